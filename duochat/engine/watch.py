"""Whether drafting pays: what the last rounds gave over plain decoding, and the pauses that follow."""

from __future__ import annotations

from collections import deque

from duochat.engine.costs import Costs
from duochat.engine.rounds import Round


class Watch:
    """Never slower: pauses drafting when the last rounds took longer than plain decoding would for their tokens.

    A round's tokens are those that its tree promised, times what came of such promises lately: what really came in a
    few rounds is mostly chance. All of it outlives a request.

    Each pause is twice as long as the one before, since a draft that does not fit a text may not fit it for long; it
    ends at once when forwards become faster, for then it was the machine that was busy.
    """

    WINDOW = 16  # rounds that a judgement rests on, and of the first pause
    MOST = 128  # rounds: a try takes WINDOW of them, so it costs an eighth of what drafting loses
    MEMORY = 0.99  # of promises, a round
    LOSS = 2.5  # plain forwards lost in a window that are enough to judge before it is full
    EASED = 0.85  # `slowness` over that when the pause began

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.window: deque[tuple[float, float]] = deque(maxlen=self.WINDOW)  # tokens, and plain forwards as calibrated
        self.came = self.promised = 32.0  # tokens
        self.left = 0  # rounds of the pause still to go
        self.pause = self.WINDOW
        self.paused_at = 0.0  # `slowness` when the pause began
        self.before: float | None = None  # when the round before ended
        self.reason = ""

    @property
    def tokens(self) -> float:
        """Of the window."""
        return sum(tokens for tokens, _ in self.window)

    @property
    def forwards(self) -> float:
        """Plain forwards that fit into the window's time; a round's accident counts as one more than its tokens."""
        return sum(min(forwards / self.costs.slowness, tokens + 1) for tokens, forwards in self.window)

    @property
    def speedup(self) -> float:
        """Tokens per second of the window over those of plain decoding."""
        return self.tokens / self.forwards if self.window else 1.0

    def observe(self, r: Round, promised: float) -> str:
        """Count a round, from which so many tokens were expected; returns the reason while drafting is paused."""
        seconds = r.ended - (self.before if self.before is not None else r.started)
        self.before = r.ended
        if self.left:
            eased = self.costs.slowness < self.EASED * self.paused_at
            self.left = 0 if eased else self.left - 1
            return self.reason if self.left else ""
        if r.phase == "decode" and r.speculation == "on":
            self.came = self.MEMORY * self.came + len(r.tokens)
            self.promised = self.MEMORY * self.promised + promised
            self.window.append((promised * self.came / self.promised, seconds / self.costs.calibrated))
        lost = self.forwards - self.tokens
        if lost < self.LOSS and (lost <= 0 or len(self.window) < self.WINDOW):
            if len(self.window) == self.WINDOW and self.speedup > 1.1:
                self.pause = self.WINDOW
            return ""
        self.reason = f"drafting gave {self.speedup:.2f}× plain decoding over {len(self.window)} rounds"
        self.left, self.pause = self.pause, min(self.MOST, 2 * self.pause)
        self.paused_at = self.costs.slowness
        self.window.clear()
        return self.reason
