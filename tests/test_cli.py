"""The commands: what they print, and one line with status 2 for everything a user can get wrong."""

import json
import mmap
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fake_chat import EOS, FakeSettings, byte_tokenizer, prepare_command
from toy_models import byte_level_vocabulary, write_gguf

from duochat import DuoChatError, config, terminal
from duochat.__main__ import COMMANDS, main
from duochat.bench import tasks
from duochat.chat import loading, worker
from duochat.chat.answer import Answer, Step
from duochat.engine.decoding import DECODERS
from duochat.engine.rounds import Round
from duochat.models import files
from duochat.models.store import silent

SAYS = [*byte_tokenizer().encode("Hello"), EOS]


@pytest.fixture(autouse=True)
def no_models(monkeypatch, tmp_path):
    """Nothing here may fetch the real pair; the engine's process is there in milliseconds."""
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(worker, "START_METHOD", "forkserver")


@pytest.fixture
def engine(monkeypatch):
    """An engine in place of the real pair, which says "Hello" or behaves as it is told."""

    def behave(**how):
        fake = FakeSettings(**{"text": "Hello", "width": 2, **how})
        monkeypatch.setattr(loading, "prepare", partial(prepare_command, fake=fake))

    behave()
    return behave


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
    assert answer["stats"]["prompt_tokens"] == len(byte_tokenizer().prompt([{"role": "user", "content": "Hi"}]))
    assert answer["hardware"]["target_device"] == "fake"


def test_chat_passes_its_options_on(engine, run):
    engine(engine={"echoes": True})
    said = run("chat", "Hi", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.1",
               "--max-tokens", "300", "--seed", "4", "--draft-budget", "12", "--system", "Be brief",
               "--repetition-penalty", "1.2", "--frequency-penalty", "-1", "--logit-bias", '{"9": 1}')[1]  # fmt: skip
    for asked in ("temperature=0.5", "top_k=9", "top_p=0.8", "min_p=0.1", "seed=4", "max_tokens=300",
                  "draft_budget=12", "Be brief", "repetition_penalty=1.2", "frequency_penalty=-1.0",
                  "logit_bias=((9, 1.0),)"):  # fmt: skip
        assert asked in said


def test_chat_writes_a_trace(engine, run, tmp_path):
    run("chat", "Hi", "--trace", str(tmp_path / "t.jsonl"))
    rounds = [Round.from_json(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [token for r in rounds for token in r.tokens] == SAYS


@pytest.fixture
def interrupt(monkeypatch):
    """Ctrl-C as soon as a step is as wanted."""

    def interrupt(wanted):
        def add(answer, step):
            if wanted(step) and not sent:
                sent.append(signal.raise_signal(signal.SIGINT))
            return before(answer, step)

        sent, before = [], Answer.add
        monkeypatch.setattr(Answer, "add", add)

    return interrupt


def test_interrupted_chat_ends_cleanly(engine, interrupt, run):
    """Ctrl-C in the middle of an answer: what was said stays, the status tells, no traceback."""
    before = signal.getsignal(signal.SIGINT)
    engine(text="tick " * 800, rate=60)
    interrupt(lambda step: step.text)
    status, out, _ = run("chat", "Hi", "--json")
    answer = json.loads(out)
    assert (status, answer["finish_reason"]) == (terminal.INTERRUPTED, "cancelled")
    assert ("tick " * 800).startswith(answer["text"])
    assert 0 < len(answer["text"]) < 200
    assert signal.getsignal(signal.SIGINT) == before


def test_interrupt_while_loading(engine, interrupt, run):
    engine(load_s=30)
    interrupt(lambda step: step.phase == "loading")
    status, out, err = run("chat", "Hi")
    assert (status, out, err[-1]) == (terminal.INTERRUPTED, "", "Stopped.")


def test_a_failing_engine_gives_its_sentence(engine, run):
    engine(fault="refuses")
    status, out, err = run("chat", "Hi", "--json")
    assert (status, err[-1]) == (2, "The fake target has had enough: ask less.")
    assert (json.loads(out)["text"], json.loads(out)["finish_reason"]) == ("Hello", "error")


@pytest.mark.parametrize(
    ("fault", "words"),
    [("load dies of SIGKILL", "memory ran out"), ("load dies of SIGILL", "built for another processor"),
     ("load breaks", "a tensor is missing"), ("aborts", "crashed (SIGABRT)"), ("check refuses", "choose another")],
)  # fmt: skip
def test_whatever_kills_the_engine_is_a_sentence_and_status_2(engine, run, fault, words):
    """The command line died with the shell's words: "Illegal instruction"."""
    engine(fault=fault)
    status, _, err = run("chat", "Hi")
    assert status == 2
    assert words in err[-1]


def test_notices_are_lines_of_standard_error(engine, run):
    engine(text="tick " * 20, engine={"context_length": 90})
    assert "context of 90 tokens is full" in "\n".join(run("chat", "Hi", "--max-tokens", "80")[2])


def test_words_that_are_no_utf8_are_replaced(engine, run):
    """As the store does with them; the shell hands them over as halves of surrogate pairs."""
    engine(engine={"echoes": True})
    status, out, said = run("chat", b"caf\xe9".decode("utf-8", "surrogateescape"), "--system", "\udcff!")
    assert status == 0, said
    assert "system\n\ufffd!\nuser\ncaf\ufffd\n" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["chat"], "required: PROMPT"),
        (["chat", ""], "message is empty"),
        (["chat", "x" * 5000], "context holds 4096"),
        (["chat", "Hi", "--temperature", "-1"], "temperature is -1: give a number from 0"),
        (["chat", "Hi", "--temperature", "nan"], "temperature is 'nan'"),
        (["chat", "Hi", "--temperature", "warm"], "temperature is 'warm': give a number"),
        (["chat", "Hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["chat", "Hi", "--max-tokens", "0"], "max_tokens is 0"),
        (["chat", "Hi", "--max-tokens", "1000000000"], "max_tokens is 1000000000"),
        (["chat", "Hi", "--draft-budget", "many"], "draft_budget is 'many': give a whole number"),
        (["chat", "Hi", "--decoder", "fast"], "decoder is 'fast': choose one of duotree"),
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


def test_chat_refuses_a_pair_that_does_not_fit_before_loading_it(pair, run, monkeypatch):
    names = ("--target", str(pair / "target.gguf"), "--draft", str(pair / "other.gguf"))
    status, out, err = run("chat", "Hi", *names)
    assert (status, out) == (2, "")
    assert "token 0 is '<|endoftext|>'" in err[-1]
    assert not any("Loading" in line for line in err)
    asked = config.load(target=names[1], draft=names[3])
    assert loading.prepare(asked, silent), "plain decoding needs no draft"


def test_the_files_of_a_pair_are_fetched_once(pair, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "fetch", lambda ref, progress: asked.append(ref) or Path(ref))
    names = [str(pair / "target.gguf"), str(pair / "target.gguf")]
    talk = loading.load_chat(config.load(target=names[0], draft=names[1]), silent)
    assert asked == names
    assert talk.engine.fault == ""


def test_check_refuses_a_target_that_cannot_be_one(pair, run):
    write_gguf(pair / "mamba.gguf", "mamba")
    (pair / "torch.yaml").write_text("backend: torch")
    same = ("--target", str(pair / "mamba.gguf"), "--draft", str(pair / "target.gguf"))
    assert run("check", *same)[0] == 0  # llama.cpp takes what torch cannot
    status, _, err = run("check", *same, "--config", str(pair / "torch.yaml"))
    assert status == 2
    assert "architecture 'mamba' is not converted" in err[0]


def test_check_refuses_a_template_that_cannot_be_used(pair, run):
    (pair / "mine.yaml").write_text("chat_template: '{{ 1 / 0 }}'")
    same = ("--target", str(pair / "target.gguf"), "--draft", str(pair / "target.gguf"))
    status, _, err = run("check", *same, "--config", str(pair / "mine.yaml"))
    assert (status, len(err)) == (2, 1)
    assert "chat template refuses" in err[0]


def test_models_lists_what_lies_on_this_disk(run, pair, monkeypatch):
    monkeypatch.setenv("HOME", str(pair))
    (pair / "models").mkdir()
    (pair / "target.gguf").rename(pair / "models" / "target.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(pair / "none"))
    out = run("models")[1]
    assert re.search(r"^target +0.0  llama +Q8_0 +yes$", out, re.MULTILINE)
    found = json.loads(run("models", "--json")[1])["local"]
    assert [(m["name"], m["reference"], m["fits"]) for m in found] == [
        ("target", str(pair / "models" / "target.gguf"), True)
    ]
    (pair / "mine.yaml").write_text("models_folder: ''")
    assert json.loads(run("models", "--json", "--config", str(pair / "mine.yaml"))[1])["local"] == []


def test_models_lists_the_presets(run, monkeypatch, tmp_path):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    status, out, _ = run("models")
    assert status == 0
    assert "\ndefault " in out
    assert str(tmp_path) in out
    assert json.loads(run("models", "--json")[1])["presets"][0]["name"] == "default"


def test_models_tells_what_to_expect(run, monkeypatch, tmp_path):
    from duochat.bench import forecast

    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    told = forecast.Forecast(10.0, 17.0, 0.7, assumed=False)
    default = config.load().target
    monkeypatch.setattr(forecast, "of_pair", lambda pair: told if pair.target == default else None)
    assert told.sentence not in run("models")[1]
    assert run("models", "--forecast")[1].count(told.sentence) == 1
    assert json.loads(run("models", "--forecast", "--json")[1])["forecasts"] == {default: told.to_dict()}


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


@pytest.mark.parametrize(
    ("command", "package"),
    [
        ("from duochat.__main__ import main; sys.exit(main(['models']))", "psutil"),
        ("from duochat.__main__ import main; sys.exit(main(['check']))", "yaml"),
        ("import app; from duochat import terminal; sys.exit(terminal.run(app.main, ['--port', '7999']))", "gradio"),
    ],
)
def test_a_missing_package_is_one_line(command, package):
    done = python("-c", f"import sys\nsys.modules['{package}'] = None\n{command}")
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = [line for line in done.stderr.splitlines() if line.startswith(f"The package {package} is missing")]
    assert said.endswith(f"run {terminal.INSTALL}.")
    assert "Traceback" not in done.stderr


def test_the_command_that_installs_is_readmes():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert f" {terminal.INSTALL} " in readme


def raising(fault):
    def command(_):
        raise fault

    return command


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (lambda _: bytearray(1 << 62), "Memory ran out (MemoryError): close other programs"),
        (lambda _: mmap.mmap(-1, 1 << 47), "Memory ran out (OSError: [Errno 12]"),
        (raising(RuntimeError("unable to mmap 5 bytes: Cannot allocate memory (12)")), "Memory ran out"),
        (raising(OSError(28, "No space left on device")), "The system refused to go on (OSError: [Errno 28]"),
        (raising(ImportError("libx.so: no such file")), "A package is missing or broken (ImportError: libx.so"),
    ],
)
def test_faults_of_the_machine_are_sentences(capsys, command, says):
    assert terminal.run(command, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize("fault", [ImportError("gone", name="duochat.app.gone"), OSError("no number"), ValueError("x")])
def test_faults_of_the_program_are_not(fault):
    with pytest.raises(type(fault)):
        terminal.run(raising(fault), [])


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
