"""The commands: what they print, and one line with status 2 for everything a user can get wrong."""

import json
import signal
import socket
import subprocess
import sys

import pytest
from fake_chat import EOS, SayingEngine, byte_tokenizer
from toy_models import byte_level_vocabulary, write_gguf

from duochat import DuoChatError, __main__, terminal
from duochat.__main__ import COMMANDS, main
from duochat.bench import tasks
from duochat.chat import worker
from duochat.chat.chat import Chat, Step
from duochat.engine.decoding import DECODERS

SAYS = [*byte_tokenizer().encode("Hello"), EOS]


@pytest.fixture(autouse=True)
def no_models(monkeypatch, tmp_path, request):
    """Nothing here may fetch the real pair."""
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    if "pair" not in request.fixturenames:
        monkeypatch.setattr(__main__, "_refuse_unfit", lambda settings: None)


@pytest.fixture
def engine(monkeypatch):
    """An engine that says "Hello" in place of the real pair."""
    engine = SayingEngine(SAYS, width=2)
    monkeypatch.setattr(worker, "load_chat", lambda settings, progress: Chat(engine, byte_tokenizer()))
    return engine


@pytest.fixture
def run(capsys):
    """Run a command in this process: (status, standard output, lines of standard error)."""

    def run(*arguments):
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], text=True, capture_output=True, timeout=120, **options)


# ---------------------------------------------------------------- chat


def test_chat_streams_the_text(engine, run):
    status, out, err = run("chat", "Hi")
    assert (status, out) == (0, "Hello")
    assert err[-1].startswith("6 tokens, ")


def test_chat_json_has_every_promised_key(engine, run):
    status, out, _ = run("chat", "Hi", "--json", "--seed", "7", "--decoder", "duodecoding")
    answer = json.loads(out)
    assert status == 0
    assert answer.keys() == {"text", "token_ids", "finish_reason", "decoder", "seed", "stats", "hardware"}
    assert (answer["text"], answer["token_ids"]) == ("Hello", SAYS)
    assert (answer["finish_reason"], answer["decoder"], answer["seed"]) == ("stop", "duodecoding", 7)
    promised = (
        "prompt_tokens completion_tokens ttft_s total_s tokens_per_s rounds drafted tested accepted rejected ignored"
    )
    promised += " acceptance_rate mean_accepted_length draft_budget cpu_idle gpu_idle"
    assert set(promised.split()) <= answer["stats"].keys()
    assert answer["stats"]["completion_tokens"] == 6
    assert answer["stats"]["prompt_tokens"] == len(engine.asked[0][0])
    assert answer["hardware"] == {"target_device": "fake"}


def test_chat_passes_its_options_on(engine, run):
    run("chat", "Hi", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.1", "--max-tokens", "3",
        "--seed", "4", "--draft-budget", "12", "--system", "Be brief")  # fmt: skip
    context, request = engine.asked[0]
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (0.5, 9, 0.8, 0.1, 4)
    assert (request.max_tokens, request.draft_budget) == (3, 12)
    assert "system\nBe brief" in byte_tokenizer().decode(context)


def test_chat_writes_a_trace(engine, run, tmp_path):
    from duochat.engine.rounds import read_jsonl

    run("chat", "Hi", "--trace", str(tmp_path / "t.jsonl"))
    rounds = list(read_jsonl((tmp_path / "t.jsonl").read_text().splitlines()))
    assert [token for r in rounds for token in r.tokens] == SAYS


def test_interrupted_chat_ends_cleanly(monkeypatch, run):
    """Ctrl-C in the middle of an answer: what was said stays, the status tells, no traceback."""

    class Interrupted(SayingEngine):
        def decode(self, *asked):
            for index, r in enumerate(super().decode(*asked)):
                if index == 1:
                    signal.raise_signal(signal.SIGINT)
                yield r

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(worker, "load_chat", lambda *_: Chat(Interrupted(SAYS, width=1), byte_tokenizer()))
    status, out, _ = run("chat", "Hi", "--json")
    answer = json.loads(out)
    assert (status, answer["finish_reason"]) == (terminal.INTERRUPTED, "cancelled")
    assert "Hello".startswith(answer["text"])
    assert signal.getsignal(signal.SIGINT) == before


def test_interrupt_while_loading(monkeypatch, run):
    def load(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(worker, "load_chat", load)
    assert run("chat", "Hi") == (terminal.INTERRUPTED, "", ["Stopped."])


def test_a_failing_engine_gives_its_sentence(monkeypatch, run):
    class Failing(Chat):
        def reply(self, *_):
            yield Step(text="Hel")
            yield Step(finish="error", error="The worker died: send it again.")

    monkeypatch.setattr(worker, "load_chat", lambda *_: Failing(SayingEngine(SAYS), byte_tokenizer()))
    status, out, err = run("chat", "Hi", "--json")
    assert (status, err) == (2, ["The worker died: send it again."])
    assert (json.loads(out)["text"], json.loads(out)["finish_reason"]) == ("Hel", "error")


def test_a_draft_that_cannot_be_used_is_refused(engine, run, monkeypatch):
    monkeypatch.setattr(engine, "describe", lambda: {"draft_fault": "This draft does not fit: choose another."})
    assert run("chat", "Hi") == (2, "", ["This draft does not fit: choose another."])
    assert run("chat", "Hi", "--decoder", "autoregressive")[0] == 0, "plain decoding needs no draft"


def test_notices_are_lines_of_standard_error(monkeypatch, run):
    class Noticing(Chat):
        def reply(self, *_):
            yield Step(text="Hi", notice="The oldest turn\nwas dropped.", finish="stop")

    monkeypatch.setattr(worker, "load_chat", lambda *_: Noticing(SayingEngine(SAYS), byte_tokenizer()))
    assert run("chat", "Hi")[2][0] == "The oldest turn was dropped."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat"], "required: PROMPT"),
        (["chat", ""], "message is empty"),
        (["chat", "x" * 5000], "context holds 4096"),
        (["chat", "Hi", "--temperature", "-1"], "temperature is -1.0: give a number from 0"),
        (["chat", "Hi", "--temperature", "nan"], "temperature is nan"),
        (["chat", "Hi", "--temperature", "warm"], "invalid float value: 'warm'"),
        (["chat", "Hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["chat", "Hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["chat", "Hi", "--max-tokens", "1000000000"], "max_tokens is 1000000000"),
        (["chat", "Hi", "--draft-budget", "many"], "invalid number_or_auto value"),
        (["chat", "Hi", "--decoder", "fast"], "decoder is 'fast': choose one of autoregressive"),
        (["chat", "Hi", "--config", "/no/such.yaml"], "no config file /no/such.yaml"),
        (["chat", "Hi", "--trace", "/no/such/t.jsonl"], "/no/such/t.jsonl cannot be written"),
        (["chat", "Hi", "--frobnicate"], "Unrecognized arguments: --frobnicate: see python -m duochat"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: COMMAND"),
        (["check", "--target", "/no/such", "--draft", "x"], "no model at '/no/such'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(engine, run, arguments, says):
    status, out, err = run(*arguments)
    assert (status, out, len(err)) == (2, "", 1)
    assert says in err[0]


# ---------------------------------------------------------------- check, calibrate, models


@pytest.fixture
def pair(tmp_path):
    tokens, merges = byte_level_vocabulary()
    other = ["first", *tokens[1:]]
    write_gguf(tmp_path / "target.gguf")
    write_gguf(tmp_path / "other.gguf", vocabulary=(other, merges))
    return tmp_path


def test_check_says_that_they_fit(pair, run):
    status, out, _ = run("check", "--target", str(pair / "target.gguf"), "--draft", str(pair / "target.gguf"))
    assert (status, out) == (0, "Target and draft fit: 600 tokens in common.\n")


def test_calibrate_predicts_the_speed_of_each_decoder(pair, run, monkeypatch):
    for task in tasks.TASKS:
        (pair / f"{task}.jsonl").write_text(json.dumps({"question_id": 1, "turns": [f"a question of {task}"]}))
    monkeypatch.setattr(tasks, "PROMPTS", pair)
    model = str(pair / "target.gguf")
    status, out, _ = run("calibrate", "--target", model, "--draft", model, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["draft_budget"] == pytest.approx(1 / found["c"])
    assert found["tokens_per_s"].keys() == DECODERS.keys()
    assert all(speed > 0 for speed in found["tokens_per_s"].values())


def test_check_names_the_first_difference(pair, run):
    asked = ("check", "--target", str(pair / "target.gguf"), "--draft", str(pair / "other.gguf"))
    status, out, err = run(*asked, "--json")
    assert status == 2
    assert "token 0 is '<|endoftext|>' in the target and 'first' in the draft" in err[0]
    found = json.loads(out)
    assert (found["fits"], found["first_difference"], found["draft_token"]) == (False, 0, "first")


def test_chat_refuses_a_pair_that_does_not_fit_before_loading_it(pair, engine, run):
    names = ("--target", str(pair / "target.gguf"), "--draft", str(pair / "other.gguf"))
    status, out, err = run("chat", "Hi", *names)
    assert (status, out) == (2, "")
    assert "token 0 is '<|endoftext|>'" in err[0]
    assert run("chat", "Hi", *names, "--decoder", "autoregressive")[:2] == (0, "Hello")


def test_check_refuses_a_target_that_cannot_be_one(pair, run):
    write_gguf(pair / "mamba.gguf", "mamba")
    status, _, err = run("check", "--target", str(pair / "mamba.gguf"), "--draft", str(pair / "target.gguf"))
    assert status == 2
    assert "architecture 'mamba' is not converted" in err[0]


def test_models_lists_the_presets(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    status, out, _ = run("models")
    assert status == 0
    assert "\ndefault " in out
    assert str(tmp_path) in out
    assert json.loads(run("models", "--json")[1])["presets"][0]["name"] == "default"


# ---------------------------------------------------------------- processes


def test_help_is_quick_and_loads_nothing_heavy():
    """0.3 s on an idle machine; the processor time holds on a busy one too."""
    command = "import sys, resource; sys.argv[1:] = ['--help']\nfrom duochat.__main__ import main\ntry: main()\n"
    command += "except SystemExit: pass\nuse = resource.getrusage(resource.RUSAGE_SELF)\n"
    command += "print(use.ru_utime + use.ru_stime, *sorted({m.split('.')[0] for m in sys.modules}))"
    best = 9.0
    for _ in range(3):
        *said, last = python("-c", command).stdout.splitlines()
        seconds, *loaded = last.split()
        best = min(best, float(seconds))
        assert not {"torch", "numpy", "llama_cpp", "transformers", "yaml", "gradio"} & set(loaded)
        assert all(any(name in line for line in said) for name in COMMANDS)
    assert best < 0.3


def test_a_fault_in_a_process_is_one_line(tmp_path):
    done = python("-m", "duochat", "chat", "Hi", "--target", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_that_leaves_early():
    """`python -m duochat models | head -1` must not end in a traceback."""
    command = f"{sys.executable} -m duochat models --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], text=True, capture_output=True, timeout=120)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


# ---------------------------------------------------------------- app.py


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "0"], "port is 0"),
        (["--port", "x"], "invalid int value"),
        (["--auth", "me"], "--auth needs user:password"),
        (["--auth", ":secret"], "--auth needs user:password"),
        (["--config", "/no/such.yaml"], "no config file"),
    ],
)
def test_app_refuses_bad_input(arguments, says):
    done = python("app.py", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_app_refuses_a_port_in_use_and_an_open_door():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        taken_port, open_door = python("app.py", "--port", port), python("app.py", "--host", "0.0.0.0")
    for done, says in ((taken_port, f"Port {port} on 127.0.0.1 cannot be used"), (open_door, "add --auth")):
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert says in done.stderr


def test_app_shows_what_the_engine_loads(capsys):
    class Loading:
        def loading(self):
            yield Step(phase="loading", notice="Loading the target model", progress=(0, 0))
            raise DuoChatError("The file is gone: fetch it again.")

    terminal.show_loading(Loading().loading())
    assert capsys.readouterr().err == "Loading the target model …\nThe file is gone: fetch it again.\n"


def test_the_bar_draws_on_a_terminal_and_writes_lines_elsewhere():
    import io

    out = io.StringIO()
    bar = terminal.Bar(out)
    bar("Loading", 0, 0)
    bar._began = 0.0
    for done in range(0, 101, 5):
        bar._label, bar._began = "Fetching", 0.0
        bar("Fetching", done << 20, 100 << 20)
    lines = out.getvalue().splitlines()
    assert lines[0] == "Loading …"
    assert [line.split("] ")[1] for line in lines[1:]] == [f"{n} % of 100 MiB" for n in (0, 25, 50, 75, 100)]
    out.isatty = lambda: True
    live = terminal.Bar(out)
    live("Loading", 0, 0)
    live.close()
    assert out.getvalue().endswith("\r\x1b[KLoading …\r\x1b[K")


def test_run_lets_bugs_through():
    def bug(_):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        terminal.run(bug, [])
    assert terminal.run(lambda _: (_ for _ in ()).throw(DuoChatError("x")), []) == 2
