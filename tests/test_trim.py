"""A draft with a cut vocabulary: it reads all tokens, proposes the kept ones, and is otherwise the same model."""

import numpy as np
import pytest
from test_drafter import GREEDY, VOCABULARY, grow, root_of, write_tiny_model

from duochat import DuoChatError
from duochat.engine.choosing import choose
from duochat.engine.lanes import never
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.library import Llama
from duochat.engine.sampling import Sampling
from duochat.models.trim import ALL, named, trim

CONTEXT = [7, 299, 3, 180, 250]  # of these, 299 and 250 are neither ranked nor among the lowest 100
RANKING = [9, 280, 4, 199, 33, 120, 77, 3]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "plain.gguf")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "ranked.gguf", ranking=RANKING)


def logits(path, vocabulary):
    llama = Llama(path, 512, 1, vocabulary)
    n = len(CONTEXT)
    llama.decode(CONTEXT, range(n), [(0,)] * n, [n - 1])
    row = llama.logits(1)[0].copy()
    names = np.arange(len(row)) if llama.names is None else llama.names
    llama.close()
    return row, names


def test_the_kept_logits_are_those_of_the_whole_model(plain):
    whole, _ = logits(plain, VOCABULARY)
    cut, names = logits(plain, 100)
    assert names.tolist() == list(range(100))
    np.testing.assert_allclose(cut, whole[names], atol=2e-2)


def test_a_damaged_copy_is_made_anew(plain):
    copy = trim(plain, 100).path
    whole = copy.read_bytes()
    copy.write_bytes(whole[: len(whole) // 2])
    _, names = logits(plain, 100)
    assert len(names) == 100
    assert copy.read_bytes() == whole


def test_a_ranking_in_the_file_says_what_to_keep(ranked):
    whole, _ = logits(ranked, VOCABULARY)
    for most, kept in (("auto", RANKING), (3, [9, 280, 4]), (10, [*RANKING, 0, 1])):
        cut, names = logits(ranked, most)
        assert names.tolist() == sorted(kept)
        np.testing.assert_allclose(cut, whole[names], atol=2e-2)


def test_without_a_ranking_or_with_room_for_all_nothing_is_cut(plain, ranked):
    assert trim(plain, "auto") is None
    assert trim(plain, VOCABULARY) is None
    assert trim(ranked, 10**6) is None


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)])
def test_candidates_are_tokens_of_the_target(ranked, sampling):
    """At T > 0 with the noise of the target's token ids, so that both lanes draw the same."""
    lane = LlamaDrafter(ranked, 256, 1)
    root = root_of(CONTEXT)
    found = lane.expand(CONTEXT, [root], sampling, never)[0][0]
    row, names = logits(ranked, "auto")
    whole = np.full(VOCABULARY, -99, np.float32)
    whole[names] = row
    assert found.tokens == choose(whole, len(CONTEXT), sampling, 8).tokens
    assert set(found.tokens) <= set(RANKING)
    deeper = lane.expand(CONTEXT, [grow(root, 299), grow(root, found.tokens[0])], sampling, never)[0]
    assert all(set(one.tokens) <= set(RANKING) for one in deeper)
    lane.close()


def test_without_a_place_to_keep_it_the_whole_draft_is_used(ranked, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "file"))
    assert trim(ranked) is None
    with pytest.raises(DuoChatError, match="cannot be written: set DUOCHAT_CACHE"):
        trim(ranked, 10)


def test_a_second_load_uses_the_file_of_the_first(plain):
    first = trim(plain, 100).path
    made = first.stat().st_mtime_ns
    assert trim(plain, 100).path == first
    assert first.stat().st_mtime_ns == made
    assert trim(plain, 90).path != first


def test_a_changed_draft_is_cut_anew(tmp_path):
    draft = write_tiny_model(tmp_path / "draft.gguf")
    first = trim(draft, 100).path
    write_tiny_model(draft, ranking=RANKING)
    assert trim(draft, 100).path != first


def test_a_token_beyond_the_vocabulary(plain):
    lane = LlamaDrafter(plain, 256, 1, vocabulary=100)
    with pytest.raises(DuoChatError, match="token"):
        lane.expand([1, VOCABULARY], [root_of([1, VOCABULARY])], GREEDY, never)
    lane.close()


def test_a_model_that_scales_its_embedding_keeps_all_tokens(tmp_path):
    """Vectors go in as they are; gemma multiplies only what it looks up itself."""
    path = write_tiny_model(tmp_path / "gemma.gguf", "gemma")
    with pytest.raises(DuoChatError, match="draft_vocabulary"):
        trim(path, 100)
    assert trim(path) is None


def test_a_draft_is_named_with_or_without_a_number_of_tokens():
    assert named("pypi:llm==1/x.gguf") == ("pypi:llm==1/x.gguf", "auto")
    assert named("a.gguf@4096") == ("a.gguf", 4096)
    assert named("a.gguf@0") == ("a.gguf", ALL)
    with pytest.raises(DuoChatError, match=r"such as a\.gguf@16384"):
        named("a.gguf@many")
