"""What lies on this disk: found where other programs keep it, described by its own header, with the drafts that fit."""

import json
import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from toy_models import byte_level_vocabulary, write_gguf

from duochat.models import gguf, pair
from duochat.models.catalog import Memory
from duochat.models.local import list_local
from duochat.models.pair import check_pair

TOKENS, MERGES = byte_level_vocabulary()
ROOMY = Memory(ram=64, gpu=0)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def write(path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, **options)


def folder(path, tokens=TOKENS):
    """A transformers folder as far as a listing looks."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "qwen3", "dtype": "bfloat16"}')
    write_words(path, tokens)
    (path / "model.safetensors").write_bytes(bytes(3 << 20))
    return path


def write_words(folder, tokens):
    Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, [])).save(str(folder / "tokenizer.json"))


def listed(**options):
    return list_local("~/models", memory=ROOMY, **options)


def test_a_file_and_a_folder_of_ones_own(home):
    path, whole = write(home / "models" / "deep" / "toy.gguf", file_type=15), folder(home / "models" / "whole")
    one, other = listed()
    assert (one.name, one.reference, one.source, one.kind) == ("toy", str(path), "models folder", "gguf")
    assert (one.architecture, one.quantization, one.unfit) == ("llama", "Q4_K_M", "")
    assert one.size == path.stat().st_size / 2**30
    cache = 2 * 4096 * 2 * 2 * (16 + 16)  # bytes a number, tokens, layers, heads, widths of key and value
    assert one.need == pytest.approx(one.size + cache / 2**30)
    assert (other.name, other.reference, other.kind) == ("whole", str(whole), "folder")
    assert (other.architecture, other.quantization) == ("qwen3", "bfloat16")
    assert one.to_dict()["fits"] is True
    assert list_local("", memory=ROOMY) == []


def test_where_other_programs_keep_theirs(home):
    write(home / ".lmstudio/models/someone/toy-GGUF/studio.gguf")
    blobs, manifest = home / ".ollama/models/blobs", home / ".ollama/models/manifests/registry.ollama.ai/library/toy/1b"
    write(blobs / "sha256-12ab")
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": f"application/vnd.ollama.image.{k}", "digest": f"sha256:{d}"} for k, d in
              (("license", "9"), ("model", "12ab"))]  # fmt: skip
    manifest.write_text(json.dumps({"layers": layers}))
    (manifest.parent / "broken").write_text("{")
    repo = home / "hub/models--Own--toy-GGUF"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("new\n")
    write(repo / "snapshots/new/hub.gguf")
    write(repo / "snapshots/old/hub.gguf")
    found = {(m.source, m.name): m.reference for m in listed()}
    assert found == {
        ("LM Studio", "studio"): str(home / ".lmstudio/models/someone/toy-GGUF/studio.gguf"),
        ("Ollama", "toy:1b"): str(blobs / "sha256-12ab"),
        ("Hugging Face", "Own/toy-GGUF/hub"): str(repo / "snapshots/new/hub.gguf"),
    }


def test_a_model_in_parts_is_listed_once_and_no_eyes(home):
    write(home / "models" / "toy.gguf", part=8)
    write(home / "models" / "mmproj-toy.gguf")
    (one,) = listed()
    header = gguf.read(home / "models" / "toy-00001-of-00003.gguf")
    assert one.reference == str(header.path)
    assert one.size == sum(part.stat().st_size for part in header.parts) / 2**30


def test_what_cannot_be_read_is_left_out(home):
    whole = write(home / "models" / "toy.gguf").read_bytes()
    (home / "models" / "cut.gguf").write_bytes(whole[:-1])
    (home / "models" / "page.gguf").write_text("<!doctype html>")
    (folder(home / "models" / "damaged") / "config.json").write_text("[")
    (folder(home / "models" / "wordless") / "tokenizer.json").unlink()
    assert [m.name for m in listed()] == ["toy"]


def test_drafts_that_fit_the_smallest_first(home):
    target = folder(home / "models" / "target")
    middle, other = write(home / "models" / "middle.gguf"), write(home / "models" / "other.gguf", vocabulary="llama")
    small = write(home / "models" / "small.gguf", without=["output.weight"])
    least = ["output.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"]
    shipped = write(home / "assets" / "shipped.gguf", vocabulary=([*TOKENS, "[PAD600]"], MERGES), without=least)
    assert shipped.stat().st_size < small.stat().st_size < middle.stat().st_size
    found = {m.name: m.drafts for m in listed(shipped=[shipped, home / "gone.gguf"])}
    assert found["target"] == (str(shipped), str(small), str(middle))
    assert found["middle"] == (), "a draft of more than half its target's size gains nothing"
    assert str(other) not in found["target"]
    assert str(target) not in sum(found.values(), ())


def test_a_second_look_reads_no_headers(home, monkeypatch):
    write(home / "models" / "toy.gguf")
    folder(home / "models" / "whole")
    first = listed()
    monkeypatch.setattr(gguf, "read", None)
    monkeypatch.setattr(pair, "digest", None)
    assert listed() == first


def test_without_a_cache_it_is_read_each_time(home):
    (home / "cache").write_text("no folder")
    write(home / "models" / "toy.gguf")
    assert [m.name for m in listed()] == ["toy"]


@pytest.mark.parametrize(
    ("memory", "file_fits", "folder_fits"),
    [
        (Memory(ram=64, gpu=0), True, True),
        (Memory(ram=0.004, gpu=0), True, False),  # in fp32 the folder takes twice its size
        (Memory(ram=0.001, gpu=0), False, False),
        (Memory(ram=0.001, gpu=0.003), True, True),  # llama.cpp shares the layers out
        (Memory(ram=64, gpu=0.001), True, False),
    ],
)
def test_what_fits_this_machine(home, memory, file_fits, folder_fits):
    write(home / "models" / "file.gguf")
    folder(home / "models" / "folder")
    file, whole = list_local("~/models", memory=memory)
    assert (not file.unfit, not whole.unfit) == (file_fits, folder_fits), (file.need, whole.need)


WORDS = st.lists(st.sampled_from(["a", "b", "c", "[PAD1]", "<unused7>"]), min_size=1, unique=True)


@given(WORDS, WORDS)
@example(["a"], ["a", "[PAD1]"])
@example(["a", "<unused7>", "b"], ["a", "[PAD1]", "b"])
def test_equal_digests_are_what_check_pair_accepts(tmp_path_factory, ours, theirs):
    """Two ways to ask whether vocabularies fit must never part."""
    paths = []
    for i, tokens in enumerate((ours, theirs)):
        path = tmp_path_factory.getbasetemp() / f"words-{i}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        write_words(path, tokens)
        paths.append(path)
    assert (pair.digest(paths[0]) == pair.digest(paths[1])) == check_pair(*paths).fits
