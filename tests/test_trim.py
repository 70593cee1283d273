"""A draft that proposes its frequent tokens alone: it reads all, and is otherwise the same model."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_drafter import GREEDY, VOCABULARY, grow, root_of, write_tiny_model

from duochat import DuoChatError, config
from duochat.engine.backends import load_drafter
from duochat.engine.choosing import choose
from duochat.engine.lanes import never
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.library import Llama
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node
from duochat.models import gguf
from duochat.models.trim import ALL, HALF, kept, named

CONTEXT = [7, 299, 3, 180, 250]  # of these, 299 and 250 are neither ranked nor among the lowest 100
RANKING = [9, 280, 4, 199, 33, 120, 77, 3]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "plain.gguf")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "ranked.gguf", ranking=RANKING)


@pytest.mark.parametrize(
    ("most", "tokens"), [("auto", RANKING), (HALF, RANKING[:4]), (3, [9, 280, 4]), (10, [*RANKING, 0, 1])]
)
def test_a_ranking_in_the_file_says_what_to_keep(ranked, most, tokens):
    assert kept(gguf.read(ranked), most).tolist() == sorted(tokens)


def test_without_a_ranking_the_lowest_ids_are_kept_and_with_room_for_all_all(plain, ranked):
    assert kept(gguf.read(plain), 100).tolist() == list(range(100))
    assert kept(gguf.read(plain), "auto") is kept(gguf.read(plain), HALF) is None
    assert kept(gguf.read(plain), VOCABULARY) is None
    assert kept(gguf.read(ranked), 10**6) is None


@pytest.mark.parametrize(("shares_cores", "asked", "tokens"), [(True, "auto", 4), (False, "auto", 8), (True, 6, 6)])
def test_on_the_targets_cores_a_draft_proposes_half_as_many_tokens(ranked, shares_cores, asked, tokens):
    target = SimpleNamespace(shares_cores=shares_cores, context_length=512)
    drafter = load_drafter(config.load(draft_vocabulary=asked), ranked, target)
    candidates, _ = drafter.expand([3, 9], [Node(9, None, 1)], GREEDY, never)
    assert set(candidates[0].tokens) <= set(RANKING[:tokens])
    assert len(candidates[0].tokens) == tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)])
def test_candidates_are_tokens_of_the_target(ranked, sampling):
    """At T > 0 with the noise of the target's token ids, so that both lanes draw the same."""
    alone, count = Llama(ranked, 512, 1), len(CONTEXT)
    alone.decode(CONTEXT, range(count), [(0,)] * count, [count - 1])
    cut = np.full(VOCABULARY, -99, np.float32)
    cut[RANKING] = alone.logits(1)[0][RANKING]
    alone.close()
    lane = LlamaDrafter(ranked, 256, 1)
    root = root_of(CONTEXT)
    found = lane.expand(CONTEXT, [root], sampling, never)[0][0]
    assert found.tokens == choose(cut, count, sampling, 8).tokens
    assert set(found.tokens) <= set(RANKING)
    deeper = lane.expand(CONTEXT, [grow(root, 299), grow(root, found.tokens[0])], sampling, never)[0]
    assert all(set(one.tokens) <= set(RANKING) for one in deeper)
    lane.close()


def test_a_draft_is_named_with_or_without_a_number_of_tokens():
    assert named("pypi:llm==1/x.gguf") == ("pypi:llm==1/x.gguf", "auto")
    assert named("a.gguf@4096") == ("a.gguf", 4096)
    assert named("a.gguf@0") == ("a.gguf", ALL)
    with pytest.raises(DuoChatError, match=r"such as a\.gguf@16384"):
        named("a.gguf@many")
