"""The API: what is asked is honoured or refused, the form is OpenAI's to the letter, and nobody else may ask."""

import asyncio
import contextlib
import json
import logging
import math
import multiprocessing
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_chat import prepare_echo

pytest.importorskip("starlette")
import httpx
import psutil
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from duochat.api.form import thoughts_and_content
from duochat.api.guard import Access
from duochat.api.service import KEPT, LARGEST_BODY, beside, make_app
from duochat.chat.answer import Step
from duochat.chat.chat import Options
from duochat.chat.worker import Worker
from duochat.config import load
from duochat.engine.rounds import Draft, Round

ROOT = Path(__file__).parent.parent
URL = "http://127.0.0.1"
NAME = "SmolLM2-135M-Instruct.Q4_1"
SETTINGS = load(target=f"models/{NAME}.gguf", temperature=0.5, max_tokens=100, context_length=4096)
multiprocessing.set_forkserver_preload(["duochat.chat.worker", "fake_chat"])


class Told:
    """An engine that remembers what it was asked and gives the steps that it was told to."""

    def __init__(self, *steps, state="ready"):
        self.steps, self.state, self.asked = steps or (Step(text="Hi.", phase="done", finish="stop"),), state, []

    def reply(self, messages, options, cancelled, party):
        self.asked.append((messages, options))
        yield from self.steps

    def status(self):
        return {"state": self.state, "loading": None, "error": "", "settings": SETTINGS}


def client(engine, access=Access(), **more):  # noqa: B008  frozen
    return TestClient(make_app(engine, access, **more), base_url=URL, raise_server_exceptions=False)


def hello(content="Hello", **more):
    return {"model": "duochat", "messages": [{"role": "user", "content": content}], **more}


def chat(to, body, **more):
    return to.post("/v1/chat/completions", json=body, **more)


def events(answer):
    """The data of the events; all other lines are comments or empty."""
    lines = answer.text.splitlines()
    assert all(line == "" or line.startswith((":", "data: ")) for line in lines)
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def chunks(answer):
    *told, last = events(answer)
    assert last == "[DONE]"
    return [json.loads(event) for event in told]


@pytest.fixture(scope="module")
def worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duochat.chat.worker.START_METHOD", "forkserver")
        worker = Worker(SETTINGS, prepare_echo)
        yield worker
        worker.close()


@pytest.fixture(scope="module")
def echo(worker):
    return client(worker)


@contextlib.contextmanager
def serving(app):
    """The app's address, on a real server in a thread. What a client does not read is the server's to keep."""
    door = socket.socket()
    door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    door.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=[[door]])
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"{URL}:{door.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        door.close()


@pytest.fixture(scope="module")
def address(worker):
    with serving(make_app(worker, Access())) as address:
        yield address


# ---------------------------------------------------------------- the form


def test_a_stream_comes_in_the_exact_order(echo):
    told = chunks(chat(echo, hello("SAY Good day.", stream=True, stream_options={"include_usage": True})))
    first, *middle, end, count = told
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": None}, "logprobs": None, "finish_reason": None}
    ]
    deltas = [chunk["choices"][0]["delta"] for chunk in middle]
    assert all(delta.keys() == {"content"} and delta["content"] for delta in deltas)
    assert "".join(delta["content"] for delta in deltas) == "Good day."
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert (count["choices"], count["usage"]["completion_tokens"]) == ([], 10)
    assert [chunk["usage"] for chunk in told[:-1]] == [None] * (len(told) - 1)
    assert ["timings" in chunk for chunk in told] == [False] * (len(told) - 1) + [True]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in told}) == 1
    assert (first["object"], first["model"], first["id"][:9]) == ("chat.completion.chunk", NAME, "chatcmpl-")


def test_figures_come_with_the_end_where_no_usage_is_asked(echo):
    told = chunks(chat(echo, hello("SAY a", stream=True)))
    assert ["timings" in chunk for chunk in told] == [False] * (len(told) - 1) + [True]
    assert not any("usage" in chunk for chunk in told)


def test_a_whole_answer_is_the_stream_joined(echo):
    whole = chat(echo, hello(n=2)).json()
    told = chunks(chat(echo, hello(n=2, stream=True)))
    for index, choice in enumerate(whole["choices"]):
        parts = [c["choices"][0] for c in told if c["choices"][0]["index"] == index]
        assert "".join(part["delta"].get("content") or "" for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "stop"
    order = [c["choices"][0]["index"] for c in told]
    assert order == sorted(order)
    assert whole["object"] == "chat.completion"
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    single = chat(echo, hello()).json()
    assert single["usage"]["prompt_tokens"] == usage["prompt_tokens"]  # counts once
    assert single["choices"][0] == whole["choices"][0]


def test_choices_have_seeds_of_their_own():
    engine = Told()
    chat(client(engine), hello(n=3, seed=2**63 - 2))
    assert [options.seed for _, options in engine.asked] == [2**63 - 2, 2**63 - 1, 0]


def test_a_bare_prompt_has_no_template(echo, worker):
    answer = echo.post("/v1/completions", json={"model": "duochat", "prompt": ["Ab", "Cde"], "max_tokens": 4}).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == len("Ab") + len("Cde")
    for prompt, choice in zip(("Ab", "Cde"), answer["choices"], strict=True):
        steps = worker.reply(prompt, Options.of(SETTINGS, max_tokens=4))
        assert choice["text"] == "".join(step.text for step in steps)
        assert choice["finish_reason"] == "length"
    told = chunks(echo.post("/v1/completions", json={"model": "duochat", "prompt": "Ab", "stream": True}))
    whole = echo.post("/v1/completions", json={"model": "duochat", "prompt": "Ab"}).json()
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == whole["choices"][0]["text"]


# a round of three tokens: the draft guessed "a", "b" rightly, then "x" (1/4) and "y" (1/8) where the target says "c"
DRAFTS = [Draft(0, -1, 7, 10, 0.9, 0.9, 1), Draft(1, 0, 8, 11, 0.8, 0.7, 2), Draft(2, 1, 9, 12, 0.5, 0.4, 1)]
DRAFTS.append(Draft(3, 1, 9, 13, 0.4, 0.3, 2))
PLAIN = Round(0, 6, 0.0, 0.5, (9,), "plain", token_probs=(0.25,), drafted=(DRAFTS[0],))
WALKED = Round(
    1, 7, 0.5, 1.5, (10, 11, 14), "correction", drafted=tuple(DRAFTS[1:]), pending=(0, 1, 2, 3), accepted=(0, 1),
    rejected=(2, 3), token_probs=(1.0, 0.5, 0.5), pending_probs=(1.0, 0.5, 0.25, 0.125), finish="length",
)  # fmt: skip
RECORD = (
    Step(phase="prefill", prompt_tokens=6),
    Step(round=PLAIN, text="z", pieces=("z",), draft_texts={0: "a"}, phase="decode", prompt_tokens=6),
    Step(
        round=WALKED, text="abc", pieces=("a", "b", "c"), draft_texts={1: "b", 2: "x", 3: "y"}, phase="done",
        prompt_tokens=6, finish="length",
    ),
)  # fmt: skip


def test_probabilities_are_the_records():
    body = hello(logprobs=True, top_logprobs=2)
    told = chat(client(Told(*RECORD)), body).json()["choices"][0]["logprobs"]["content"]
    assert [(t["token"], t["logprob"], t["bytes"]) for t in told] == [
        ("z", math.log(0.25), [122]), ("a", 0.0, [97]), ("b", math.log(0.5), [98]), ("c", math.log(0.5), [99]),
    ]  # fmt: skip
    assert [[a["token"] for a in t["top_logprobs"]] for t in told] == [["z"], ["a"], ["b"], ["c", "x"]]
    assert told[-1]["top_logprobs"][1]["logprob"] == math.log(0.25)
    stream = chunks(chat(client(Told(*RECORD)), body | {"stream": True}))
    parts = [c["choices"][0]["logprobs"]["content"] for c in stream if c["choices"][0]["logprobs"]]
    assert [token for part in parts for token in part] == told


def test_probabilities_of_a_prompts_answer_have_their_own_form():
    body = {"model": "duochat", "prompt": "Ab", "logprobs": 2}
    to = client(Told(*RECORD))
    told = to.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["z", "a", "b", "c"]
    assert told["token_logprobs"] == [math.log(0.25), 0.0, math.log(0.5), math.log(0.5)]
    assert told["top_logprobs"][3] == {"c": math.log(0.5), "x": math.log(0.25)}
    assert told["text_offset"] == [0, 1, 2, 3]
    stream = chunks(to.post("/v1/completions", json=body | {"stream": True}))
    parts = [c["choices"][0]["logprobs"] for c in stream if c["choices"] and c["choices"][0]["logprobs"]]
    assert {name: [value for part in parts for value in part[name]] for name in told} == told
    only = to.post("/v1/completions", json=body | {"logprobs": 0}).json()["choices"][0]["logprobs"]
    assert only == told | {"top_logprobs": [{}] * 4}


def test_every_token_says_where_it_comes_from():
    body = hello(duochat={"origins": True})
    told = chat(client(Told(*RECORD)), body).json()["choices"][0]["duochat"]
    names = ("id", "text", "origin", "rank", "probability", "round")
    assert [tuple(token[name] for name in names) for token in told["tokens"]] == [
        (9, "z", "plain", None, 0.25, 0), (10, "a", "accepted", 1, 1.0, 1), (11, "b", "accepted", 2, 0.5, 1),
        (14, "c", "correction", None, 0.5, 1),
    ]  # fmt: skip
    assert told["stats"]["acceptance_rate"] == 0.5
    stream = chunks(chat(client(Told(*RECORD)), body | {"stream": True}))
    parts = [chunk["choices"][0]["duochat"]["tokens"] for chunk in stream]
    assert [token for part in parts for token in part] == told["tokens"]


def test_figures_are_the_records():
    answer = chat(client(Told(*RECORD)), hello()).json()
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["prompt_ms"], timings["prompt_per_second"]) == (6, 500, 12)
    assert (timings["predicted_n"], timings["predicted_ms"], timings["predicted_per_second"]) == (4, 1000, 3)
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (4, 2)
    assert answer["metrics"]["speculative_decoding"] == {
        "num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 2, "acceptance_rate": 0.5,
        "mean_acceptance_length": 3.0,
    }  # fmt: skip


def test_what_was_drafted_but_not_verified_is_not_counted_as_accepted():
    """The target comes to a drafted token also without having been asked about it."""
    further = Round(1, 7, 0.5, 1.0, (10, 11), "accepted", drafted=(DRAFTS[1],), pending=(0,), accepted=(0, 1))
    step = Step(round=further, text="ab", pieces=("a", "b"), draft_texts={1: "b"}, phase="done", finish="length")
    answer = chat(client(Told(*RECORD[:2], step)), hello(duochat={"origins": True})).json()
    tokens = answer["choices"][0]["duochat"]["tokens"]
    assert [token["origin"] for token in tokens] == ["plain", "accepted", "accepted"]
    assert (answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]) == (1, 1)


THOUGHT = "\n<think>\nLet me < see </thin k>.\n</think>\n\nIt is <think>4</think>."


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        (THOUGHT, "Let me < see </thin k>.\n", "It is <think>4</think>."),
        ("No <think>thought</think>", "", "No <think>thought</think>"),
        ("<think>cut off </thi", "cut off </thi", ""),
        ("  <thin", "", "  <thin"),
    ],
)
def test_thoughts_come_apart_however_the_text_is_cut(text, thoughts, content):
    assert thoughts_and_content(text) == (thoughts, content)
    for size in range(1, len(text) + 1):
        cuts = [text[i : i + size] for i in range(0, len(text), size)]
        steps = [Step(text=cut, phase="decode") for cut in cuts[:-1]] + [Step(text=cuts[-1], finish="stop")]
        told = [c["choices"][0]["delta"] for c in chunks(chat(client(Told(*steps)), hello(stream=True)))]
        assert "".join(delta.get("reasoning_content", "") for delta in told) == thoughts
        assert "".join(delta.get("content") or "" for delta in told) == content
    message = chat(client(Told(Step(text=text, finish="stop"))), hello()).json()["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, content)


def test_rounds_of_the_last_answers_can_be_asked_for():
    to = client(Told(*RECORD))
    ids = [chat(to, hello(n=2)).json()["id"] for _ in range(KEPT + 1)]
    found = to.get(f"/v1/duochat/rounds/{ids[-1]}?choice=1")
    assert [Round.from_json(line) for line in found.text.splitlines()] == [PLAIN, WALKED]
    for gone in (ids[0], "chatcmpl-none", f"{ids[-1]}?choice=2"):
        assert to.get(f"/v1/duochat/rounds/{gone}").status_code == 404


# ---------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7}, ...),
        ({"stop": "."}, {"stop": (".",)}),
        ({"stop": [".", "!"]}, {"stop": (".", "!")}),
        ({"max_tokens": 5}, ...),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"max_tokens": 100_000}, {"max_tokens": 4096}),
        ({"decoder": "speculative", "draft_budget": 3}, ...),
        ({"draft_budget": "auto"}, {"draft_budget": None}),
        ({"temperature": None, "stop": None, "n": None, "stream": None, "tools": None}, {}),
        ({"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}, {}),
        ({"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.1}, ...),
        ({"logit_bias": {"5": -100, "3": 1}}, {"logit_bias": ((3, 1.0), (5, -100.0))}),
        ({"logit_bias": [[5, 1.5]]}, {"logit_bias": ((5, 1.5),)}),
        ({"response_format": {"type": "json_object"}}, {"schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, {"schema": '{"const": 1}'}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, {"schema": "{}"}),
        ({"json_schema": {"const": 1}}, {"schema": '{"const": 1}'}),
        ({"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}, {}),
    ],
)
def test_what_is_given_is_honoured(given, expected):
    engine = Told()
    assert chat(client(engine), hello(**given)).status_code == 200
    (_, options), wanted = engine.asked[0], given if expected is ... else expected
    assert options == Options.of(SETTINGS, **wanted)


def test_roles_and_parts_become_messages():
    engine, messages = Told(), [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": "It", "refusal": None, "tool_calls": None},
    ]  # fmt: skip
    assert chat(client(engine), hello() | {"messages": messages}).status_code == 200
    assert engine.asked[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What\nis it?"},
        {"role": "assistant", "content": "It"},
    ]


def message(role="user", content="Hi", **more):
    return {"messages": [{"role": role, "content": content, **more}]}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": "much"}, "frequency_penalty"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [["Hello", False]]}, "logit_bias"),
        ({"logprobs": 3}, None),
        ({"logprobs": "yes"}, None),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["a"] * 129}, "stop"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"decoder": "magic"}, "decoder"),
        ({"draft_budget": 0}, "draft_budget"),
        ({"duochat": {"orgins": True}}, "duochat.orgins.[key]"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"prompt": "Hi"}, "messages"),
        (message(role="tool"), "messages[0].role"),
        ({"messages": 2 * [{"role": "assistant", "content": "It"}]}, "messages"),
        (message(content=1), "messages[0].content"),
        (message(content=[{"type": "image_url", "image_url": {}}]), "messages[0].content"),
        (message(tool_calls=[{"id": "1"}]), "messages[0].tool_calls"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, param):
    engine = Told()
    answer = chat(client(engine), hello() | given)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]
    assert engine.asked == []


def test_no_request_asks_for_more_answers_than_there_are_choices():
    """Each prompt of many, each n times, would fill the memory before the first is read."""
    answer = client(Told()).post("/v1/completions", json={"model": "duochat", "prompt": ["a"] * 3, "n": 43})
    assert answer.json()["error"]["message"] == "The body: n times the prompts is 129: ask for 128 answers at most."


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'"text"', b"null"])
def test_a_body_that_is_no_request_is_refused(body):
    answer = client(Told()).post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("The body: ")


def test_models_are_listed_and_others_are_not_found():
    to = client(Told())
    assert [model["id"] for model in to.get("/v1/models").json()["data"]] == ["duochat", NAME]
    assert to.get(f"/v1/models/{NAME}").json()["object"] == "model"
    for name in ("duochat", NAME, SETTINGS.target):
        assert chat(to, hello() | {"model": name}).json()["model"] == NAME
    for missing in (to.get("/v1/models/gpt-5"), chat(to, hello() | {"model": "gpt-5"})):
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_other_routes_are_not_found():
    for answer in (client(Told()).get("/v1/nothing"), client(Told()).get("/v1/chat/completions")):
        assert answer.status_code in (404, 405)
        assert answer.json()["error"]["type"] == "invalid_request_error"


# ---------------------------------------------------------------- faults


FAULT = Step(phase="done", finish="error", error="The draft's file ends too early: fetch it again.")


@pytest.mark.parametrize(
    ("engine", "status"),
    [(Told(FAULT), 400), (Told(RECORD[0], FAULT), 500), (Told(FAULT, state="dead"), 503), (Told(RECORD[0]), 500)],
)
def test_a_fault_has_a_status_and_a_sentence(engine, status):
    answer = chat(client(engine), hello())
    assert answer.status_code == status
    assert answer.json()["error"]["message"] in (FAULT.error, "The engine stopped without an answer: try again.")


def test_a_fault_in_a_stream_is_its_last_event():
    *_, last = events(chat(client(Told(RECORD[0], FAULT)), hello(stream=True)))
    assert json.loads(last)["error"]["message"] == FAULT.error
    answer = chat(client(Told(FAULT)), hello(stream=True))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, FAULT.error)


def test_an_engine_that_breaks_says_so_and_comes_back(echo):
    *_, last = events(chat(echo, hello("BREAK", stream=True)))
    assert "RuntimeError" in json.loads(last)["error"]["message"]
    assert chat(echo, hello("SAY I am back.")).json()["choices"][0]["message"]["content"] == "I am back."


def test_the_engines_own_refusals_are_the_requests_fault(echo):
    for body in (hello("x" * 5000), hello(" ")):
        answer = chat(echo, body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_health_follows_the_engine():
    assert client(Told()).get("/health").json() == {"status": "ok"}
    assert client(Told(state="busy")).get("/health").status_code == 200
    for state in ("loading", "dead"):
        answer = client(Told(state=state)).get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, state)


# ---------------------------------------------------------------- who may ask


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example"])
def test_a_foreign_host_header_is_refused(host):
    assert client(Told()).get("/v1/models", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", ""])
def test_pages_elsewhere_may_not_ask(origin):
    engine = Told()
    for access in (Access(), Access(origins=["https://good.example"]), Access(key="k")):
        to = client(engine, access)
        assert chat(to, hello(), headers={"origin": origin, "authorization": "Bearer k"}).status_code == 403
        assert "access-control-allow-origin" not in to.options("/v1/models", headers={"origin": origin}).headers
    assert engine.asked == []


def test_a_listed_origin_may_ask_and_read():
    to = client(Told(), Access(key="k", origins=["https://good.example"]))
    asking = {"origin": "https://good.example", "access-control-request-method": "POST"}
    preflight = to.options("/v1/chat/completions", headers=asking | {"access-control-request-headers": "authorization"})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "https://good.example")
    for key, status in (("k", 200), ("x", 401)):
        answer = chat(to, hello(), headers={"origin": "https://good.example", "authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "https://good.example")


def test_own_pages_may_ask():
    assert client(Told()).get("/v1/models", headers={"origin": URL}).status_code == 200


@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", "Bearer ", "Basic secret-key", "secret-key", "Bearer secret-keyé"]
)
def test_the_key_is_asked_for(given, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    engine = Told()
    to = client(engine, Access(key="secret-key"))
    headers = {} if given is None else {"authorization": given.encode()}
    for answer in (chat(to, hello(), headers=headers), to.get("/v1/models", headers=headers)):
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert engine.asked == []
    assert to.get("/health").status_code == 200
    assert chat(to, hello(), headers={"authorization": "Bearer secret-key"}).status_code == 200
    assert "secret-key" not in caplog.text + "".join(capfd.readouterr())


def test_a_key_may_have_any_letters():
    to = client(Told(), Access(key="schlüssel"))
    assert chat(to, hello(), headers={"authorization": "Bearer schlüssel".encode()}).status_code == 200


def test_a_password_on_the_page_locks_the_api_too():
    answer = client(Told(), Access(locked=True)).get("/v1/models", headers={"authorization": "Bearer "})
    assert (answer.status_code, "--api-key" in answer.json()["error"]["message"]) == (401, True)


def test_on_other_addresses_any_name_may_be_used():
    to = client(Told(), Access("0.0.0.0", key="k"))
    assert to.get("/v1/models", headers={"host": "box.lan", "authorization": "Bearer k"}).status_code == 200


def test_a_client_that_goes_within_its_body_is_no_fault(capfd):
    with serving(make_app(Told(), Access())) as address:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as to:
            to.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.1)
        assert httpx.get(f"{address}/health").status_code == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("sized", [True, False])
def test_a_body_too_large_is_refused(sized):
    body = json.dumps(hello("x" * LARGEST_BODY)).encode()
    answer = client(Told()).post("/v1/chat/completions", content=body if sized else iter([body]))
    assert answer.status_code == 413


def test_page_and_api_share_an_address():
    to = TestClient(beside(PlainTextResponse("the page"), make_app(Told(), Access())), base_url=URL)
    assert [to.get(path).text for path in ("/", "/v1", "/healthy", "/gradio_api/v1/")] == ["the page"] * 4
    assert to.get("/health").json() == {"status": "ok"}
    assert to.get("/v1/models").json()["object"] == "list"


def test_a_terminated_server_cleans_up(tmp_path):
    """A forecast's process outlived the app: uvicorn raises the signal again, which ended it on the spot."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"""if True:
        from duochat.api.serve import run
        try:
            run(None, "127.0.0.1", {port})
        finally:
            print("cleaned up")"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("DuoChat is at")
        until_served(port)
        server.terminate()
        assert server.communicate(timeout=30)[0] == "cleaned up\n"
        assert server.returncode == 128 + signal.SIGTERM


def until_served(port):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError("the server did not start")


def test_the_page_is_served_with_the_api_behind_its_own_guards(monkeypatch, worker, tmp_path):
    pytest.importorskip("gradio")
    from duochat.app import page
    from duochat.app.store import Store

    served = []
    monkeypatch.setattr(page, "run", lambda app, *_, **__: served.append(app))
    monkeypatch.setattr(worker, "close", lambda: None)
    page.launch(SETTINGS, port=0, auth=("ann", "pw"), worker=worker, store=Store(tmp_path / "c.db"), api_key="k")
    to = TestClient(served[0], base_url=URL)
    assert to.get("/config").status_code == 401
    assert to.get("/v1/models").status_code == 401
    assert chat(to, hello("SAY a"), headers={"authorization": "Bearer k"}).status_code == 200
    assert to.get("/", headers={"origin": "https://evil.example"}).status_code == 403
    assert to.get("/", headers={"host": "evil.example"}).status_code == 400


def test_serving_others_needs_a_key():
    command = [sys.executable, "-m", "duochat", "serve", "--host", "0.0.0.0"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Binding to 0.0.0.0 lets others in: add --api-key KEY.\n"


# ---------------------------------------------------------------- the line, and clients that go


def idle(worker, seconds=2.0):
    end = time.monotonic() + seconds
    while worker.status()["requests"] and time.monotonic() < end:
        time.sleep(0.01)
    return worker.status()["requests"] == 0


SLOW = hello("SLOW SAY " + "tick " * 400, max_tokens=3000)  # 20 seconds


def leave(address, body, after):
    """Ask, and close the connection after some seconds."""
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as to:
        send(to, body)
        time.sleep(after)


def send(to, body):
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
    to.sendall(head.encode() + content)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_goes_ends_its_answer(worker, address, stream, waiting):
    """Also while it waits for another; the other goes on."""
    before = worker.reply([{"role": "user", "content": SLOW["messages"][0]["content"]}], Options(max_tokens=3000))
    if waiting:
        while not next(before).text:
            pass
    leave(address, SLOW | {"stream": stream}, after=0.3)
    if waiting:
        end = time.monotonic() + 1
        while worker.status()["requests"] > 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert worker.status()["requests"] == 1
        assert next(before).text
        before.close()
    assert idle(worker, 0.5)


def test_a_client_that_does_not_read_holds_up_nobody(worker, address):
    """The answer is taken from the engine at its own pace."""
    text = "tick " * 700
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        send(lazy, hello(f"SAY {text}", max_tokens=4000, stream=True, duochat={"origins": True}))
        assert lazy.recv(1)
        assert chat(httpx.Client(base_url=address, timeout=10), hello("SAY next")).status_code == 200
    assert idle(worker)


def test_the_line_has_an_end_and_tells_the_place(worker):
    with serving(make_app(worker, Access(), longest_queue=2)) as address, contextlib.ExitStack() as stack:
        to = stack.enter_context(httpx.Client(base_url=address, timeout=10))
        for place in range(3):
            answer = stack.enter_context(to.stream("POST", "/v1/chat/completions", json=SLOW | {"stream": True}))
            assert (answer.status_code, answer.headers["x-duochat-queue"]) == (200, str(place))
        for stream in (True, False):
            answer = chat(to, SLOW | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["x-duochat-queue"]) > 2
    assert idle(worker)


def test_a_request_that_was_let_in_is_answered_to_its_end():
    """Its later choices stand in line anew, behind however many."""
    line = Step(phase="queued", progress=(9, 10))
    engine, told = Told(), iter([RECORD, (line, *RECORD)])
    engine.reply = lambda *_: iter(next(told))
    answer = chat(client(engine, longest_queue=2), hello(n=2))
    assert (answer.status_code, answer.headers["x-duochat-queue"]) == (200, "0")


# ---------------------------------------------------------------- clients that people use


def test_the_openai_client_reads_all_of_it(address):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as to:
        assert [model.id for model in to.models.list()] == ["duochat", NAME]
        assert to.models.retrieve("duochat").id == "duochat"
        create = lambda content, **more: to.chat.completions.create(**hello(content, **more))  # noqa: E731
        whole = create("SAY <think>so</think>Yes.", logprobs=True, top_logprobs=1)
        assert (whole.choices[0].message.content, whole.choices[0].message.reasoning_content) == ("Yes.", "so")
        assert whole.choices[0].logprobs.content[0].top_logprobs[0].token == "<"
        assert whole._request_id == whole.id
        told = list(create("SAY Good day.", stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in told if c.choices) == "Good day."
        assert told[-1].usage.completion_tokens == 10
        assert to.completions.create(model="duochat", prompt="Ab", max_tokens=3).choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            create("Hi", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="gpt-5"):
            to.chat.completions.create(**hello() | {"model": "gpt-5"})
        with pytest.raises(openai.APIError, match="RuntimeError"):
            list(create("BREAK", stream=True))


def test_the_openai_client_may_be_asynchronous_and_stop(worker, address):
    openai = pytest.importorskip("openai")

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as to:
            create = to.chat.completions.create
            both = await asyncio.gather(create(**hello("SAY one")), create(**hello("SAY two")))
            stream = await create(**SLOW, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            return [answer.choices[0].message.content for answer in both]

    assert asyncio.run(ask()) == ["one", "two"]
    assert idle(worker, 0.5)


def test_the_openai_client_and_the_key():
    openai = pytest.importorskip("openai")
    with serving(make_app(Told(), Access(key="k"))) as address:
        assert openai.OpenAI(base_url=f"{address}/v1", api_key="k").chat.completions.create(**hello()).choices
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/v1", api_key="x").models.list()


COMPLIES = {
    "chat-basic-response", "chat-system-prompt", "chat-multi-turn", "chat-streaming-response", "chat-streaming-usage",
    "chat-error-handling",
}  # fmt: skip


def test_llm_comply_is_content(address):
    """All of its tests but those of tools and pictures, which are refused."""
    pytest.importorskip("llm_comply")
    asked = ["--format", "openai-chat", "-u", f"{address}/v1", "-k", "none", "-m", "duochat", "--json"]
    done = subprocess.run([sys.executable, "-m", "llm_comply.cli", *asked], text=True, capture_output=True, timeout=60)
    results = {result["id"]: result for result in json.loads(done.stdout)["results"]}
    assert {id for id, result in results.items() if result["status"] == "passed"} == COMPLIES
    assert not any(results[id].get("warnings") for id in COMPLIES)
    for id in ("chat-tool-calling", "chat-image-input"):
        assert results[id]["errors"][0].startswith("HTTP 400")


# ---------------------------------------------------------------- many at once


def serve_echo(door):
    uvicorn.Server(uvicorn.Config(make_app(Worker(SETTINGS, prepare_echo), Access()))).run([door])


@pytest.fixture
def apart():
    """The address of a server that has a process of its own, and that process."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        process = multiprocessing.get_context("spawn").Process(target=serve_echo, args=[door])
        process.start()
        address = f"{URL}:{door.getsockname()[1]}"
        while httpx.get(f"{address}/health", timeout=60).status_code != 200:
            time.sleep(0.1)
        yield address, psutil.Process(process.pid)
        process.terminate()
        process.join()


@pytest.mark.slow
def test_two_hundred_requests_of_eight_clients(apart):
    """A quarter of them go in the middle. None is lost or mixed; then neither memory nor threads have grown."""
    address, process = apart
    bodies = [hello(f"Question {i}", seed=i, stream=i % 3 > 0, max_tokens=60) for i in range(200)]
    with httpx.Client(base_url=address, timeout=60) as to:
        alone = [text_of(chat(to, body)) for body in bodies]
        assert len(set(alone)) == 200
        together(address, bodies)  # all that is kept or pooled is there now
        before = resident(process)
        found = together(address, bodies)
        assert chat(to, hello("SAY next")).headers["x-duochat-queue"] == "0"
    assert [i for i in range(200) if found[i] is None] == list(range(0, 200, 4))
    assert all(text == alone[i] for i, text in found.items() if text is not None)
    assert resident(process) - before < 1
    assert process.num_threads() <= 40


def resident(process):
    """MiB of memory that it and its children hold."""
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) / 2**20


def text_of(answer):
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["message"]["content"]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks(answer))


def together(address, bodies):
    """The answers by number, None for every fourth, whose client goes before its end."""
    found, numbers = {}, iter(range(len(bodies)))

    def ask():
        with httpx.Client(base_url=address, timeout=60) as to:
            for i in numbers:
                found[i] = text_of(chat(to, bodies[i])) if i % 4 else leave(address, bodies[i], after=i / 8000)

    clients = [threading.Thread(target=ask) for _ in range(8)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return found
