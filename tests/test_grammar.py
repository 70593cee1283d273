"""An answer by a schema is what the schema says, token for token the same with every decoder."""

import json

import pytest
from fakes import costs
from toy_models import byte_level_vocabulary, write_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("llguidance")
from duochat import DuoChatError
from duochat.chat.chat import Chat, Options
from duochat.chat.text import Tokenizer
from duochat.config import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.target import LlamaTarget

ASK = [{"role": "user", "content": "Hi"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Berta"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Random weights, which would never write JSON of themselves; they draft for themselves."""
    path = write_gguf(tmp_path_factory.mktemp("toy") / "toy.gguf", vocabulary=byte_level_vocabulary(600))
    target, drafter = LlamaTarget.load(path, 250), LlamaDrafter(path, 250, 1)
    yield Chat(Engine(target, drafter, costs()), Tokenizer.load(path, "{{ messages[-1].content }}"))
    target.close(), drafter.close()


def said(chat, schema, messages=ASK, **options):
    options = {"max_tokens": 200} | options
    steps = list(chat.reply(messages, Options(schema=json.dumps(schema), **options)))
    return "".join(step.text for step in steps), steps


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_random_weights_write_what_the_schema_says(chat, temperature):
    texts, accepted = {}, 0
    for decoder in DECODERS:
        text, steps = said(chat, PERSON, decoder=decoder, temperature=temperature, seed=3)
        texts[decoder] = text
        accepted += sum(len(step.round.accepted) for step in steps if step.round)
        assert steps[-1].finish == "stop"
        person = json.loads(text)
        assert person.keys() == {"name", "age"}
        assert person["name"] in ("Ann", "Berta")
        assert 10 <= person["age"] <= 99
    assert len({*texts.values()}) == 1
    assert accepted > 10, "the draft keeps to the schema"


def test_one_answer_leaves_nothing_to_the_next(chat):
    """Matchers stand where their own answer does, also when it was cut off."""
    schema = {"const": "forty-two"}
    cut, _ = said(chat, schema, max_tokens=3)
    assert 0 < len(cut) < len('"forty-two"')
    assert said(chat, schema)[0] == said(chat, schema, [{"role": "user", "content": "Other"}])[0] == '"forty-two"'
    free = "".join(step.text for step in chat.reply(ASK, Options(max_tokens=5)))
    assert not free.startswith('"')


@pytest.mark.parametrize("schema", ["[", "12", '{"type": "hiccup"}', '{"type": 12}', '{"$ref": "elsewhere"}'])
def test_what_is_no_schema_is_one_sentence(chat, schema):
    with pytest.raises(DuoChatError, match=r"^The schema cannot be followed \([^\n]*\): give another\.$"):
        next(chat.reply(ASK, Options(schema=schema, max_tokens=9)))
