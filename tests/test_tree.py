"""The draft tree against a naive model of it: a dict from path to facts, driven by random growth and outcomes."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from duochat.engine.lanes import Answer, Candidates
from duochat.engine.tree import Acceptance, Tree

TOKENS = st.integers(0, 5)  # few, so that sources often agree


def estimate(origin, rank, prob):
    return {"model": 0.9, "ngram": 0.7, "both": 0.99}[origin] * prob / rank


def all_of(tokens):
    return None


def path(tree, node):
    tokens = []
    while node is not tree.root:
        tokens.append(node.token)
        node = node.parent
    return tuple(reversed(tokens))


class NaiveTree:
    """Paths of tokens below the root; every question is answered by looking at all of them."""

    def __init__(self):
        self.edges, self.expanded = {}, set()  # path -> (origin, rank, prob) of its last token

    def reach(self, path):
        return prod(estimate(*self.edges[path[:n]]) for n in range(1, len(path) + 1))

    def grow(self, at, tokens, probs):
        self.expanded.add(at)
        for rank, (token, prob) in enumerate(zip(tokens, probs, strict=True), 1):
            known = (*at, token) in self.edges
            if not known and rank > 1 and (prob < Tree.LEAST or self.reach(at) * prob < Tree.FAINT):
                continue
            self.edges[(*at, token)] = ("both" if known else "model", rank, prob)

    def graft(self, tokens, probs):
        for n, prob in enumerate(probs, 1):
            origin, *drafted = self.edges.get(tokens[:n], ("none",))
            new = {"none": ("ngram", 1, prob), "model": ("both", *drafted)}
            self.edges[tokens[:n]] = new.get(origin, (origin, *drafted))

    def frontier(self):
        return sorted((self.reach(p) for p in [(), *self.edges] if p not in self.expanded), reverse=True)

    def best(self, n):
        return sorted(map(self.reach, self.edges), reverse=True)[:n]

    def reroot(self, prefix):
        n = len(prefix)
        self.edges = {p[n:]: e for p, e in self.edges.items() if p[:n] == prefix and len(p) > n}
        self.expanded = {p[n:] for p in self.expanded if p[:n] == prefix}


def candidates(draw):
    tokens = draw(st.lists(TOKENS, min_size=1, max_size=4, unique=True))
    probs = sorted(draw(st.lists(st.floats(0.01, 0.99), min_size=len(tokens), max_size=len(tokens))), reverse=True)
    return Candidates(tuple(tokens), tuple(probs))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_against_the_naive_tree(data):
    tree, naive = Tree([1, 2, 3], estimate), NaiveTree()
    drafted, fates = set(), []
    for _ in range(data.draw(st.integers(1, 12))):
        if chain := data.draw(st.lists(TOKENS, max_size=3)):
            naive.graft(tuple(chain), [0.5] * len(chain))
            tree.graft(chain, [0.5] * len(chain))
            assert close([n.reach for n in tree.frontier(8)], naive.frontier()[:8])
        for _ in range(data.draw(st.integers(0, 4))):
            nodes = tree.frontier(8)
            assert close([n.reach for n in nodes], naive.frontier()[:8])
            node = data.draw(st.sampled_from(nodes))
            found = candidates(data.draw)
            naive.grow(path(tree, node), found.tokens, found.probs)
            tree.grow(node, found)
        pending = tree.best(data.draw(st.integers(0, 6)))
        assert close([n.reach for n in pending], naive.best(len(pending)))
        for i, node in enumerate(pending):
            assert node.parent is tree.root or node.parent in pending[:i]
            tree.claim(node)
        answer = [data.draw(wanted(row)) for row in (tree.root, *pending)]
        before = len(tree.context)
        outcome = tree.advance(pending, Answer(answer, [1.0] * len(answer), []), all_of)
        naive.reroot(outcome.tokens)
        assert tuple(tree.context[before:]) == outcome.tokens
        drafted |= {d.id for d in tree.take_drafted()}
        fates += [*outcome.accepted, *outcome.rejected, *outcome.ignored]
        assert close(sorted(n.reach for n in tree.best(10**6)), sorted(map(naive.reach, naive.edges)))
    fates += tree.close()
    assert sorted(fates) == sorted(drafted)


def wanted(node):
    """A token of the target after this node: often one of its children."""
    return st.one_of(st.sampled_from([c.token for c in node.children] or [0]), TOKENS)


def close(left, right):
    return len(left) == len(right) and all(abs(a - b) < 1e-9 for a, b in zip(left, right, strict=True))


def test_acceptance_learns_from_verdicts():
    acceptance, tree = Acceptance(), Tree([1], estimate)
    tree.grow(tree.root, Candidates((7, 8), (0.9, 0.05)))
    before = acceptance("model", 1, 0.9)
    for _ in range(50):
        acceptance.learn(tree.root.children[0], accepted=False)
    assert acceptance("model", 1, 0.9) < before / 4
    assert acceptance("model", 2, 0.9) == Acceptance()("model", 2, 0.9)


def test_verdicts_are_learned_when_that_is_asked():
    acceptance, tree = Acceptance(), Tree([1], estimate)
    tree.acceptance = acceptance
    tree.grow(tree.root, Candidates((7, 8), (0.9, 0.05)))
    before = acceptance("model", 1, 0.9), acceptance("model", 2, 0.05)
    tree.advance(tree.best(2), Answer([7, 3, None], [1.0, 1.0, None], []), all_of)
    assert (acceptance("model", 1, 0.9), acceptance("model", 2, 0.05)) == before
    tree.learn()
    after = acceptance("model", 1, 0.9), acceptance("model", 2, 0.05)
    assert after[0] > before[0]
    assert after[1] < before[1]
    tree.learn()
    assert (acceptance("model", 1, 0.9), acceptance("model", 2, 0.05)) == after


def test_what_died_while_it_was_decoded_is_counted_and_hangs_nothing():
    tree = Tree([1])
    tree.grow(tree.root, Candidates((7, 8), (0.6, 0.3)))
    dead = tree.root.child(8)
    tree.advance([], Answer([7], [1.0], []), all_of)
    version = tree.version
    tree.grow(dead, Candidates((5, 6), (0.9, 0.05)))
    assert [draft.token for draft in tree.take_drafted()] == [8]
    assert not dead.children
    assert tree.version == version
    assert [node.token for node in tree.frontier(8)] == [7]


def test_two_sources_that_agree_make_one_node():
    tree = Tree([1, 2, 3])
    tree.graft([4, 5], [0.6, 0.8])
    tree.grow(tree.root, Candidates((4, 9), (0.7, 0.2)))
    first = tree.root.child(4)
    assert [c.token for c in tree.root.children] == [4, 9]
    assert (first.origin, first.child(5).origin) == ("both", "ngram")
    assert first.edge > Acceptance()("model", 1, 0.7)
