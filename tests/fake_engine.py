"""An engine without models: plausible rounds at a steady rate, for the page and its tests.

Words in the last user message steer it: LONG (4,000
tokens), SLOWLOAD and SLOWPREFILL (ten seconds in that phase), BOOM (an exception), FAULT (a step with an error),
CUT (ends with "length"), OFF (speculation paused), HOSTILE (markdown that tries to reach another host).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from duochat import DuoChatError
from duochat.chat.answer import Step
from duochat.chat.chat import Options
from duochat.engine.rounds import Batch, Draft, Round

ANSWER = """**Speculative decoding** lets a small *draft* model guess several tokens ahead 🚀 as the large one checks.

## Why it works

1. The draft is quick, so a guess costs little.
2. The target reads all guesses in **one** forward.
3. A wrong guess costs nothing but the guess.

With acceptance rate $\\alpha$ and $k$ drafted tokens the expected number of tokens per forward is

$$\\tau = \\frac{1 - \\alpha^{k+1}}{1 - \\alpha}$$

```python
def reverse(text: str) -> str:
    \"\"\"Return the text backwards.\"\"\"
    return text[::-1]  # a slice with step -1
```

| model | runs on | task |
|---|---|---|
| draft | CPU | guess |
| target | GPU | decide |

> Whatever was drafted, the text is the target's own. Voilà: naïve café 👩‍🚀.
"""
HOSTILE = """Look: ![pixel](https://evil.example/a.png)
<img src="https://evil.example/b.png" onerror="window.pwned=1">
<script>window.pwned = 1</script> <style>@import url(https://evil.example/c.css)</style>
[click](javascript:window.pwned=1) <iframe src="https://evil.example/d"></iframe> ![x](//evil.example/e.png)
<link rel="prefetch" href="https://evil.example/f">
$\\href{javascript:window.pwned=1}{x}\\includegraphics{https://evil.example/g.png}$
"""
HARDWARE = {
    "target_device": "CPU, 2 threads", "target_dtype": "float32", "shares_cores": True, "draft_threads": 2, "cores": 2,
    "draft_fault": "", "costs": {
        "target": {"1": 0.04, "2": 0.041, "4": 0.043, "8": 0.048, "16": 0.058}, "draft": {"1": 0.005, "2": 0.006},
        "sweep": {"1": 0.008, "2": 0.005}, "threads": 2, "plain": 0.035,
    },
}  # fmt: skip
FILLER = "The draft writes ahead and the target decides, token by token, which words stay and which ones go. "


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s?[^\s\w]|\s?\w{1,6}|\s", text)


class Ready:
    """An engine that is ready at once; what it replies is left to the fakes that stand on it."""

    hardware: ClassVar[dict[str, Any]] = {}
    settings: Any = None
    choosing: tuple[str, int, int] | None = None

    def loading(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        return iter(())

    def status(self) -> dict[str, Any]:
        return {"state": "ready", "loading": None, "choosing": self.choosing, "hardware": self.hardware, "error": "",
                "requests": 0, "settings": self.settings, "pid": 0}  # fmt: skip

    def calibrate(self) -> dict[str, Any]:
        return self.hardware

    def change(self, settings: Any, beside: bool = False, cancelled: Callable[[], bool] = lambda: False) -> None:
        self.settings = settings

    def close(self) -> None:
        pass


class FakeEngine(Ready):
    """rate: tokens per second. ended: file for the time at which the last answer was finished."""

    hardware = HARDWARE

    def __init__(self, rate: float = 60.0, context_length: int = 4096, ended: Path | None = None) -> None:
        self.rate, self.context_length, self.ended = rate, context_length, ended
        self._line: list[object] = []

    def status(self) -> dict[str, Any]:
        return {**super().status(), "requests": len(self._line)}

    def change(self, settings: Any, beside: bool = False, cancelled: Callable[[], bool] = lambda: False) -> None:
        """A target with "fails" in its name cannot be loaded, one with "slow" is fetched until it is cancelled."""
        if "fails" in settings.target:
            raise DuoChatError(f"{settings.target} cannot be loaded: give another.")
        begun = time.monotonic()
        while "slow" in settings.target:
            self.choosing = "fetching slow", int(1e7 * (time.monotonic() - begun)), 100_000_000
            if cancelled():
                self.choosing = None
                raise DuoChatError("It was cancelled.")
            time.sleep(0.05)
        self.settings = settings

    def reply(
        self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool], _party: str = ""
    ) -> Iterator[Step]:
        """One answer at a time, first come, first served."""
        ticket = object()
        self._line.append(ticket)
        shown = None
        try:
            while (ahead := self._line.index(ticket)) and not cancelled():
                if shown != (ahead, len(self._line)):
                    shown = (ahead, len(self._line))
                    yield Step(phase="queued", progress=shown)
                time.sleep(0.05)
            yield from self._answer_now(messages, options, cancelled)
        finally:
            self._line.remove(ticket)

    def _answer_now(
        self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool]
    ) -> Iterator[Step]:
        asked = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        if "BOOM" in asked:
            raise RuntimeError("the fake engine was told to fail")
        begun = time.monotonic()
        if not (yield from self._phase("loading", 10 if "SLOWLOAD" in asked else 0.05, cancelled)):
            return
        prompt = sum(len(m["content"]) // 4 + 4 for m in messages)
        if not (yield from self._phase("prefill", 10 if "SLOWPREFILL" in asked else 0.1, cancelled, prompt)):
            return
        yield from self._decode(asked, messages, options, cancelled, prompt, begun)

    def _phase(self, name: str, seconds: float, cancelled: Callable[[], bool], total: int = 100) -> Iterator[Step]:
        """Returns False when it was stopped."""
        begun, notice = time.monotonic(), "fetching the target" if name == "loading" else ""
        while (spent := time.monotonic() - begun) < seconds:
            yield Step(phase=name, progress=(int(total * spent / seconds), total), notice=notice)
            if cancelled():
                yield Step(phase="done", finish="cancelled")
                return False
            time.sleep(min(0.05, seconds))
        yield Step(phase=name, progress=(total, total))
        return True

    def _decode(
        self, asked: str, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool],
        prompt: int, begun: float,
    ) -> Iterator[Step]:  # fmt: skip
        pieces = self._answer(asked, messages)[: options.max_tokens]
        rounds = Rounds(prompt, options, "OFF" in asked, seed=len(asked))
        shown, due = 0, time.monotonic()
        while shown < len(pieces):
            if cancelled():
                yield Step(phase="done", finish="cancelled")
                return
            if "FAULT" in asked and shown > 20:
                yield Step(phase="done", finish="error", error="The draft's file ends too early: fetch it again.")
                return
            count = min(rounds.next_count(), len(pieces) - shown)
            due += count / self.rate
            time.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic() - begun
            texts = tuple(pieces[shown : shown + count])
            shown += count
            finish = ("length" if "CUT" in asked else "stop") if shown >= len(pieces) else None
            if finish and self.ended:
                self.ended.write_text(str(time.time()))
            step, draft_texts = rounds.make(texts, now, count / self.rate, finish)
            yield Step(
                round=step, text="".join(texts), pieces=texts, draft_texts=draft_texts, phase="decode",
                prompt_tokens=prompt, context_length=self.context_length, finish=finish,
            )  # fmt: skip

    @staticmethod
    def _answer(asked: str, messages: list[dict[str, str]]) -> list[str]:
        if messages[-1]["role"] == "assistant":
            return tokens_of(" And here it goes on to its end.")
        if "HOSTILE" in asked:
            return tokens_of(HOSTILE)
        if "CUT" in asked:
            return tokens_of("This answer stops in the mid")
        if "LONG" in asked:
            return (tokens_of(ANSWER + "\n\n" + (FILLER * 6 + "\n\n") * 60) * 2)[:4000]
        return tokens_of(ANSWER)


class Rounds:
    """Makes rounds with every fate of a drafted token."""

    def __init__(self, prompt: int, options: Options, paused: bool, seed: int) -> None:
        self.random = random.Random(seed)
        self.position, self.index, self.drafts = prompt, 0, 0
        self.plain = options.decoder == "autoregressive" or paused
        self.state = "paused" if paused else ("off" if self.plain else "on")
        self.reason = "the measured gain is 0.9" if paused else ""

    def next_count(self) -> int:
        return 1 if self.plain or not self.index else self.random.choice((1, 2, 2, 3, 4))

    def make(self, texts: tuple[str, ...], now: float, took: float, finish: str | None) -> tuple[Round, dict[int, str]]:
        tokens = tuple(hash(t) % 49152 for t in texts)
        drafted, words, rejected, ignored = self._draft(texts)
        accepted = tuple(d.id for d in drafted[: len(texts) - 1])
        batch = Batch(now - took * 0.9, now - took * 0.2, max(1, len(drafted)))
        made = Round(
            index=self.index, position=self.position, started=now - took * 0.95, ended=now, tokens=tokens,
            last="plain" if self.plain or not self.index else ("correction" if rejected else "bonus"),
            drafted=drafted, batches=(batch,) if drafted else (), pending=accepted + rejected,
            accepted=accepted, rejected=rejected, ignored=ignored,
            token_probs=tuple(self.random.uniform(0.4, 1) for _ in texts),
            pending_probs=tuple(self.random.random() for _ in accepted + rejected),
            phase="decode" if self.index else "prefill", budget=4.2, hit=self.random.random() < 0.6,
            speculation=self.state, reason=self.reason, finish=finish, plain=1.9 * took / len(texts),
        )  # fmt: skip
        self.index += 1
        self.position += len(texts)
        return made, words

    def _draft(
        self, texts: tuple[str, ...]
    ) -> tuple[tuple[Draft, ...], dict[int, str], tuple[int, ...], tuple[int, ...]]:
        """The accepted ones first, then perhaps a rejected one and an ignored one."""
        if self.plain or not self.index:
            return (), {}, (), ()
        words = list(texts[:-1])
        wrong = self.random.random() < 0.6
        words += [" perhaps", " never"] if wrong else []
        made, first = [], self.drafts
        for place, word in enumerate(words):
            self.drafts += 1
            made.append(
                Draft(first + place, first + place - 1 if place else -1, self.position + place, hash(word) % 49152,
                      self.random.uniform(0.3, 1), 0.8**place, 1)
            )  # fmt: skip
        ids = [d.id for d in made]
        fates = (tuple(ids[-2:-1]), tuple(ids[-1:])) if wrong else ((), ())
        return tuple(made), dict(zip(ids, words, strict=True)), *fates
