"""Do two vocabularies fit? And what the list of presets says of this machine."""

import json

import pytest
from toy_models import byte_level_vocabulary, sentencepiece_vocabulary, write_gguf, write_sentencepiece

from duochat import DuoChatError
from duochat.config import Settings
from duochat.models import catalog, check_pair, list_models, require_pair

TOKENS, MERGES = byte_level_vocabulary()


def model(folder, name, tokens):
    return write_gguf(folder / f"{name}.gguf", vocabulary=(tokens, MERGES))


def target(folder, tokens, added=()):
    """A model folder whose tokenizer.json lists these tokens."""
    vocabulary = {token: id for id, token in enumerate(tokens)}
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": id, "content": t} for id, t in added]}
    (folder / "target").mkdir()
    (folder / "target" / "tokenizer.json").write_text(json.dumps(content))
    return folder / "target"


def test_the_same_tokens_fit(tmp_path):
    pair = check_pair(target(tmp_path, TOKENS), model(tmp_path, "draft", TOKENS))
    assert pair.fits
    assert (pair.target_tokens, pair.draft_tokens, pair.shared) == (600, 600, 600)
    assert pair.sentence() == "Target and draft fit: 600 tokens in common."


def test_the_first_difference_is_named(tmp_path):
    other = [*TOKENS[:300], "x1", TOKENS[301], "x2", *TOKENS[303:]]
    draft = model(tmp_path, "draft", other)
    pair = check_pair(target(tmp_path, TOKENS), draft)
    assert (pair.first_difference, pair.target_token, pair.draft_token) == (300, TOKENS[300], "x1")
    with pytest.raises(DuoChatError, match=f"token 300 is {TOKENS[300]!r} in the target and 'x1' in the draft; choose"):
        require_pair(tmp_path / "target", draft)


@pytest.mark.parametrize("longer", ["target", "draft"])
def test_padding_at_the_end_is_no_difference(tmp_path, longer):
    padded = [*TOKENS, *(f"[PAD{id}]" for id in range(600, 640))]
    ours, theirs = (padded, TOKENS) if longer == "target" else (TOKENS, padded)
    pair = check_pair(target(tmp_path, ours), model(tmp_path, "draft", theirs))
    assert pair.fits
    assert pair.shared == 600


def test_a_real_token_past_the_end_is_a_difference(tmp_path):
    pair = check_pair(target(tmp_path, TOKENS), model(tmp_path, "draft", [*TOKENS, "<tool>"]))
    assert (pair.first_difference, pair.target_token, pair.draft_token) == (600, None, "<tool>")


def test_added_tokens_count(tmp_path):
    added = [(600, "<tool>")]
    assert check_pair(target(tmp_path, TOKENS, added), model(tmp_path, "draft", [*TOKENS, "<tool>"])).fits


def test_a_folder_with_pieces_only(tmp_path):
    (tmp_path / "m").mkdir()
    write_sentencepiece(tmp_path / "m" / "tokenizer.model", *sentencepiece_vocabulary())
    assert check_pair(tmp_path / "m", write_gguf(tmp_path / "draft.gguf", vocabulary="llama")).fits


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": 3}}', '{"model": {"vocab": {}}}'])
def test_a_tokenizer_that_cannot_be_read(tmp_path, content):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text(content)
    with pytest.raises(DuoChatError, match=r"is no tokenizer|holds no vocabulary"):
        check_pair(tmp_path / "m", model(tmp_path, "draft", TOKENS))


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DuoChatError, match="holds no vocabulary: give a whole model"):
        check_pair(tmp_path, model(tmp_path, "draft", TOKENS))


# ---------------------------------------------------------------- the list


PAIR = Settings("t", "d", target_gib=15.5, draft_gib=1.0)


@pytest.mark.parametrize(
    ("ram", "gpu", "says"),
    [
        (32.1, 0.0, ""),
        (31.9, 0.0, "needs 32 GiB of RAM, there are 31.9"),
        (16.0, 24.0, ""),
        (16.0, 8.0, "the target needs 15.5 GiB on the GPU, which has 8.0"),
        (0.5, 24.0, "needs 1 GiB of RAM, there are 0.5"),
    ],
)
def test_what_fits(ram, gpu, says):
    """Without a card the target takes twice its size, in fp32, beside the draft."""
    assert catalog.unfit(PAIR, catalog.Memory(ram, gpu)) == says


def test_the_list_has_every_preset(monkeypatch, tmp_path):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    entries = list_models()
    assert entries[0].name == "default"
    assert not entries[0].target_cached
    assert json.loads(json.dumps([entry.to_dict() for entry in entries]))[0]["fits"] in (True, False)
