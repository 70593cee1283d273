"""The header reader: says what the gguf package's reader says, and refuses everything that is no whole model."""

import contextlib
import random

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import byte_level_vocabulary, write_gguf

from duochat import DuoChatError
from duochat.models import gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "toy.gguf")


def test_reads_what_the_gguf_package_reads(model):
    header, reader = gguf.read(model), GGUFReader(model)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    ours = [(t.name, t.shape, t.type, t.offset, t.size) for t in header.tensors]
    theirs = [(t.name, tuple(t.shape[::-1]), t.tensor_type, t.data_offset, t.n_bytes) for t in reader.tensors]
    assert ours == [(n, tuple(map(int, s)), k, o, b) for n, s, k, o, b in theirs]


def test_names_of_architecture_and_tokens(model):
    header = gguf.read(model)
    assert header.architecture == "llama"
    assert header.get("block_count") == 2
    assert header.get("no.such.key", 7) == 7
    assert header.tokens == byte_level_vocabulary()[0]


def test_a_model_in_parts_is_one(model, tmp_path):
    write_gguf(tmp_path / "toy.gguf", part=8)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    header, whole = gguf.read(first), gguf.read(model)
    assert header.parts == [first, second, third]
    assert [(t.name, t.shape, t.type) for t in header.tensors] == [(t.name, t.shape, t.type) for t in whole.tensors]
    assert {t.path for t in header.tensors} <= {first, second, third}
    for part in (second, third):
        with pytest.raises(DuoChatError, match=r"is part \d of 3 of a model: name …-00001-of-00003"):
            gguf.read(part)
    third.write_bytes(third.read_bytes()[:-1])
    with pytest.raises(DuoChatError, match=r"00003-of-00003.gguf is cut short"):
        gguf.read(first)
    third.unlink()
    with pytest.raises(DuoChatError, match=r"00003-of-00003.gguf is missing"):
        gguf.read(first)


def test_a_part_under_another_name_is_no_model(tmp_path):
    """The others could not be found."""
    write_gguf(tmp_path / "toy.gguf", part=8)
    first = min(tmp_path.glob("*.gguf"))
    with pytest.raises(DuoChatError, match="is part 1 of 3 of a model"):
        gguf.read(first.rename(tmp_path / "renamed.gguf"))


def test_what_its_author_calls_the_quantisation(model, tmp_path):
    assert gguf.read(model).quantization == "Q8_0"
    assert gguf.read(write_gguf(tmp_path / "t.gguf", file_type=15)).quantization == "Q4_K_M"


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04" + bytes(100), b"<!doctype html>" + bytes(100)])
def test_what_is_no_model(tmp_path, content):
    path = tmp_path / "not.gguf"
    path.write_bytes(content)
    with pytest.raises(DuoChatError, match="is not a model: give"):
        gguf.read(path)


def test_an_old_version_is_named(model, tmp_path):
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF\x01" + model.read_bytes()[5:])
    with pytest.raises(DuoChatError, match="version 1"):
        gguf.read(old)


def test_cut_anywhere_it_is_refused(model, tmp_path):
    """A download that broke off must never be taken for a model, wherever it broke off."""
    whole, cut = model.read_bytes(), tmp_path / "cut.gguf"
    rng = random.Random(0)
    for size in [24, 100, len(whole) - 1, *(rng.randrange(24, len(whole)) for _ in range(40))]:
        cut.write_bytes(whole[:size])
        with pytest.raises(DuoChatError, match="cut short or damaged: delete it"):
            gguf.read(cut)


@settings(max_examples=200, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(4, 3000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damage_is_a_sentence_or_goes_unnoticed_never_a_crash(model, changes):
    content = bytearray(model.read_bytes())
    for at, value in changes:
        content[at] = value
    damaged = model.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with contextlib.suppress(DuoChatError):
        gguf.read(damaged)
