"""Whether drafting pays: what the last rounds gave over plain decoding, the pauses that follow, and what ends them."""

from __future__ import annotations

from collections import deque

from duochat.engine.costs import Costs, Scale
from duochat.engine.rounds import Round


class Watch:
    """Never slower: pauses drafting when the last rounds took longer than plain decoding would for their tokens.

    A round's tokens are those that its tree promised, times what came of such promises lately: what really came in a
    few rounds is mostly chance. All of it outlives a request.

    Each pause is twice as long as the one before, since a draft that does not fit a text may not fit it for long; it
    ends at once when forwards become faster, for then it was the machine that was busy. After it a draft with cores of
    its own is only looked at: it drafts beside plain forwards, and is tried when what it promises would pay. To try it
    at once may cost more than that: where forwards are filled up, a GPU's graphs are captured anew at both ends.
    """

    WINDOW = 16  # rounds that a judgement rests on, and of the first pause
    MOST = 128  # rounds: a try takes WINDOW of them, so it costs an eighth of what drafting loses
    MEMORY = 0.99  # of promises, a round
    LOSS = 2.5  # plain forwards lost in a window that are enough to judge before it is full
    PAYS = 1.1  # speedup that is worth a change
    EASED = 0.85  # `slowness` over that when the pause began

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.window: deque[tuple[float, float]] = deque(maxlen=self.WINDOW)  # tokens, and plain forwards as calibrated
        self.came = self.promised = 32.0  # tokens
        self.left = 0  # rounds of the pause still to go
        self.pause = self.WINDOW
        self.looking = False  # the pause is over, and the draft not yet believed
        self.lasting = Scale()  # a drafting round's seconds over those of its forward
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

    def observe(self, r: Round, promised: float, rows: int) -> str:
        """Count a round; returns the reason while nothing is verified.

        promised: tokens expected of a forward of so many rows; one of a draft that is looked at does not run.
        """
        seconds = r.ended - (self.before if self.before is not None else r.started)
        self.before = r.ended
        if self.left:
            self._rest()
        elif self.looking or (r.phase == "decode" and r.speculation == "on" and rows == len(r.pending) + 1):
            self._count(len(r.tokens), promised, seconds, self.costs.target(rows))
            self._judge()
        return self.reason

    def _rest(self) -> None:
        """A round of a pause."""
        eased = self.costs.slowness < self.EASED * self.paused_at
        self.left = 0 if eased else self.left - 1
        self.looking = not (self.left or eased or self.costs.shared)
        self.reason = self.reason if self.left or self.looking else ""

    def _count(self, tokens: int, promised: float, seconds: float, forward: float) -> None:
        if self.looking:
            seconds = self.lasting.value * forward
        else:
            self.lasting.observe(seconds / forward)
            self.came = self.MEMORY * self.came + tokens
            self.promised = self.MEMORY * self.promised + promised
        self.window.append((promised * self.came / self.promised, seconds / self.costs.calibrated))

    def _judge(self) -> None:
        lost, full, pays = self.forwards - self.tokens, len(self.window) == self.WINDOW, self.speedup > self.PAYS
        vain = (full and not pays) if self.looking else lost >= self.LOSS or (full and lost > 0)
        if vain:
            self._pause()
        elif full and pays and self.looking:
            self.looking, self.reason = False, ""
            self.window.clear()
        elif full and pays:
            self.pause = self.WINDOW

    def _pause(self) -> None:
        gave = "would give" if self.looking else "gave"
        self.reason = f"drafting {gave} {self.speedup:.2f}× plain decoding over {len(self.window)} rounds"
        self.left, self.pause, self.looking = self.pause, min(self.MOST, 2 * self.pause), False
        self.paused_at = self.costs.slowness
        self.window.clear()
