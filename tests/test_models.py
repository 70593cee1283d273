"""The default pair itself: fetched, converted, and read like llama.cpp reads it."""

import json

import pytest
import tokenizers
from test_convert import TEXTS

from duochat import config
from duochat.models import gguf
from duochat.models.fetch import fetch
from duochat.models.pair import check_pair
from duochat.models.tokenizer import write_tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target():
    return fetch(config.load().target)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """With its tokenizer."""
    made = tmp_path_factory.mktemp("default")
    write_tokenizer(gguf.read(target), made)
    return made


def test_the_default_pair_fits(folder):
    pair = check_pair(folder, fetch(config.load().draft))
    assert pair.fits
    assert pair.shared == 49_152


@pytest.mark.parametrize("text", TEXTS)
def test_its_texts_become_llama_cpps_tokens(folder, theirs, text):
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True)
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def theirs(target):
    import llama_cpp

    return llama_cpp.Llama(str(target), vocab_only=True, verbose=False)


def test_its_chat_template_is_the_models_own(folder):
    from duochat.chat.text import Tokenizer

    tokenizer = Tokenizer.load(folder)
    prompt = tokenizer.prompt([{"role": "user", "content": "Hi"}])
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    asked = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == tokenizer.encode(asked)


def test_it_stops_at_the_end_of_a_turn(folder):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
