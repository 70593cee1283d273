"""What each device costs: T_target(width), T_draft(batch), and the draft budget γ* that follows from them.

Curves are measured once per hardware and model, scaled by live timings, and measured again when those drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Curve:
    """Seconds by size, linear between the measured sizes and beyond the last one; `scale` follows live timings."""

    seconds: dict[int, float]
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.seconds = dict(sorted(self.seconds.items()))

    def measured(self, size: int) -> float:
        """Seconds for a call of this size as calibrated, live scale apart."""
        sizes = list(self.seconds)
        if size in self.seconds or len(sizes) == 1:
            return self.seconds.get(size, self.seconds[sizes[0]])
        i = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return max(1e-9, self.seconds[low] + slope * (size - low))

    def __call__(self, size: int) -> float:
        """Seconds that a call of this size takes now."""
        return self.scale * self.measured(size)

    def observe(self, size: int, seconds: float) -> None:
        """Follow a live timing; one outlier moves the scale by a twentieth of its excess at most."""
        ratio = min(4.0, max(0.25, seconds / self.measured(size)))
        self.scale += (ratio - self.scale) / 20


@dataclass(slots=True)
class Costs:
    """The two curves, and the seconds of one plain target forward with an idle draft lane."""

    target: Curve
    draft: Curve
    plain: float = 0.0
    threads: int = 1
    widths: tuple[int, ...] = field(default=(1, 2, 4, 8, 16, 32, 64))

    def __post_init__(self) -> None:
        self.plain = self.plain or self.target.measured(1)

    @classmethod
    def of(cls, target: Mapping[int, float], draft: Mapping[int, float], threads: int = 1) -> Costs:
        return cls(Curve(dict(target)), Curve(dict(draft)), threads=threads, widths=tuple(sorted(target)))

    @property
    def budget(self) -> float:
        """γ* = T_target(one forward) / T_draft(one token), arXiv 2503.00784."""
        return self.target(1) / self.draft(1)

    def observe_plain(self, seconds: float) -> None:
        """Follow a live timing of a forward of one token beside an idle draft lane."""
        self.plain += (min(seconds, 4 * self.plain) - self.plain) / 10

    def sequential_budget(self, acceptance: float, most: int = 16) -> int:
        """γ that gives the most tokens per second when drafting and verifying take turns (arXiv 2211.17192, eq. 1)."""
        a = min(0.999, max(0.0, acceptance))

        def rate(n: int) -> float:
            return (1 - a ** (n + 1)) / (1 - a) / (n * self.draft(1) + self.target(n + 1))

        return max(range(1, most + 1), key=rate)
