"""An engine that says what it is told to, a byte-level tokenizer, and what the worker's child loads in tests."""

import os
import signal
import time
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from duochat import DuoChatError
from duochat.chat.chat import Chat
from duochat.chat.text import Tokenizer
from duochat.engine.decoding import StopRule
from duochat.engine.rounds import Draft, Round

BOS, EOS = 256, 257
CHATML = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def byte_tokens():
    """One token a byte (so every emoji is split in four), <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokens


def byte_tokenizer(template=CHATML):
    return Tokenizer(byte_tokens(), template, {"bos_token": "<s>", "eos_token": "</s>"})


class SayingEngine:
    """Answers with the given token ids, `width` of them a round, `rate` tokens a second (0: at once).

    Each round also drafts and loses one token, `drafted`. echoes: it says what it was asked instead.
    """

    def __init__(self, says, width=1, rate=0, eos=(EOS,), context_length=4096, drafted=65, prefill_s=0, echoes=False):
        self.says, self.width, self.rate, self.drafted = list(says), width, rate, drafted
        self.prefill_s, self.echoes = prefill_s, echoes
        self.eos, self.context_length, self.vocabulary = frozenset(eos), context_length, EOS + 1
        self.asked = []
        self.calibrated = 0

    def decode(self, context, request, cancelled, progress):
        self.asked.append((list(context), request))
        if self.echoes:
            self.says = [*byte_tokenizer().encode(f"{byte_tokenizer().decode(context)} {request}"), EOS]
        self._read(len(context), cancelled, progress)
        stop = StopRule(request, self, len(context))
        began, says, emitted = time.monotonic(), iter(self.says), 0
        for index in range(len(self.says) + 1):
            tokens = tuple(islice(says, min(self.width, stop.left)))
            if cancelled() or not tokens:
                yield self._round(index, (), len(context) + emitted, "cancelled" if cancelled() else "error")
                return
            kept = stop(tokens)
            tokens = tokens if kept is None else tokens[:kept]
            emitted += len(tokens)
            if self.rate:
                time.sleep(max(0.0, began + emitted / self.rate - time.monotonic()))
            yield self._round(index, tokens, len(context) + emitted, stop.finish)
            if stop.finish:
                return

    def _read(self, prompt, cancelled, progress):
        chunks = 100 if self.prefill_s else 1
        for done in range(1, chunks + 1):
            if progress and not cancelled():
                time.sleep(self.prefill_s / chunks)
                progress(prompt * done // chunks, prompt)

    def _round(self, index, tokens, position, finish):
        drafted = (Draft(index, -1, position, self.drafted, 0.5, 0.5, 1),)
        now = time.time()  # the wall clock, so that tests can compare processes
        return Round(index, position, now, now, tokens, "plain", drafted=drafted, ignored=(index,), finish=finish)

    def calibrate(self):
        self.calibrated += 1

    def describe(self):
        return {"target_device": "fake", "calibrated": self.calibrated}


def chat_that_says(text, **engine):
    tokenizer = byte_tokenizer()
    return Chat(SayingEngine([*tokenizer.encode(text), EOS], **engine), tokenizer)


@dataclass(frozen=True)
class FakeSettings:
    """How the child of a test behaves. `fault` strikes while loading ("check ...", "load ...") or while answering."""

    text: str = "Hello from the engine."
    rate: float = 0
    width: int = 1
    check_s: float = 0
    load_s: float = 0
    fault: str = ""
    marker: str = ""  # a file whose existence lets a second life go well
    engine: dict = field(default_factory=dict)


def prepare_fake(settings, progress):
    """The `prepare` of a Worker under test: checks, then gives what loads."""
    progress("fetching the fake target", 0, 2)
    time.sleep(settings.check_s)
    if settings.fault == "check refuses":
        raise DuoChatError("The fake target is no model: choose another.")
    return partial(_load_fake, settings, progress)


def prepare_command(settings, progress, alone=True, fake=FakeSettings()):
    """The `prepare` of a command under test; `fake` says how its engine behaves."""
    return prepare_fake(fake, progress)


def _load_fake(settings, progress):
    progress("reading the fake target", 1, 2)
    time.sleep(settings.load_s)
    progress("reading the fake target", 2, 2)
    if settings.fault and settings.marker:
        if os.path.exists(settings.marker):
            return chat_that_says(settings.text, rate=settings.rate, width=settings.width)
        open(settings.marker, "w").close()
    if settings.fault == "load refuses":
        raise DuoChatError("The fake draft does not fit: choose another.")
    if settings.fault == "load breaks":
        raise RuntimeError("a tensor is missing\nand more")
    if settings.fault.startswith("load dies of "):
        os.kill(os.getpid(), signal.Signals[settings.fault.split()[-1]])
        time.sleep(10)
    chat = chat_that_says(settings.text, rate=settings.rate, width=settings.width, **settings.engine)
    if settings.fault:
        chat.engine.decode = _faulty(chat.engine.decode, settings.fault)
    return chat


def _faulty(decode, fault):
    """A decode that goes wrong after five rounds, when they have been heard."""

    def broken(context, request, cancelled, progress):
        if fault == "talks on":
            return (yield from decode(context, request, lambda: False, progress))
        yield from islice(decode(context, request, cancelled, progress), 5)
        time.sleep(0.1)
        if fault == "hangs":
            time.sleep(1000)
        if fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "aborts":
            os.abort()
        if fault == "refuses":
            raise DuoChatError("The fake target has had enough: ask less.")
        raise RuntimeError("the fake target broke")

    return broken


class EchoEngine(SayingEngine):
    """Answers with what the last message holds after "SAY ", or with a text that only this prompt and seed have.

    "SLOW" in the prompt: 100 tokens a second; "BREAK": a fault after three rounds. Each token has probability 1/2.
    """

    def __init__(self, tokenizer, **engine):
        super().__init__([], **engine)
        self.tokenizer = tokenizer

    def decode(self, context, request, cancelled, progress):
        asked = self.tokenizer.decode([token for token in context if token != BOS])
        own = f"{zlib.crc32(repr((context, request.sampling.seed)).encode()):08x} " * 6
        said = asked.rpartition("SAY ")[2].partition("\nassistant\n")[0].strip() if "SAY " in asked else own
        self.says, self.rate = [*self.tokenizer.encode(said), EOS], 100 if "SLOW" in asked else 0
        self.asked.clear()  # it is asked for ever
        rounds = super().decode(context, request, cancelled, progress)
        for r in islice(rounds, 3) if "BREAK" in asked else rounds:
            yield replace(r, token_probs=(0.5,) * len(r.tokens))
        if "BREAK" in asked:
            raise RuntimeError("the fake target broke")


def prepare_echo(settings, progress):
    """The `prepare` of a Worker that answers each prompt with a text of its own."""
    return partial(_load_echo, settings)


def _load_echo(settings):
    tokenizer = byte_tokenizer()
    return Chat(EchoEngine(tokenizer, context_length=settings.context_length, width=3), tokenizer)
