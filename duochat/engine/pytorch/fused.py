"""What stands before and after the layers, compiled: a few kernels in place of many small ones.

Numbers of rows and slots are variables of the code, which is compiled twice: for one row, and for more. Compiled parts
are held to the plain functions on made-up input before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duochat.engine.pytorch import choose, masks
from duochat.engine.pytorch.compiling import raise_limit, vary
from duochat.engine.pytorch.rows import parameters
from duochat.engine.pytorch.shapes import PARAMETERS
from duochat.engine.sampling import Sampling

FEW = 32  # rows whose ancestors fit into one word each; beside a forward of more, small kernels do not matter
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, min_p=0.02))


def mask_builder(**options: Any) -> Callable[..., masks.Masks]:
    """`masks.build`, compiled for few rows. options: for `torch.compile`."""
    raise_limit()
    fast = torch.compile(masks.build, **options)

    def build(sections: masks.Sections, positions: torch.Tensor, *rest: Any) -> masks.Masks:
        if len(sections["slot"]) > FEW:
            return masks.build(sections, positions, *rest)
        needed = {name: sections[name] for name in masks.NEEDED}
        for tensor in (*needed.values(), positions):
            vary(tensor, 0)
        return fast(needed, positions, *rest)

    return build


def teller(**options: Any) -> Callable[[choose.Way, torch.Tensor, choose.Ask], torch.Tensor]:
    """`choose.told`, compiled for the two ways over the whole vocabulary. The best tokens alone are few numbers."""
    raise_limit()
    fast = torch.compile(choose.told, **options)

    def told(way: choose.Way, logits: torch.Tensor, ask: choose.Ask) -> torch.Tensor:
        if way not in (choose.greedy, choose.noise):
            return choose.told(way, logits, ask)
        for tensor in (logits, ask.token, ask.parent, ask.key):
            vary(tensor, 0)
        return fast(way, logits, ask)

    return told


def check_masks(build: Callable[..., masks.Masks], packed: torch.Tensor, positions: torch.Tensor, *rest: Any) -> bool:
    """True; raises AssertionError when the compiled masks are not the plain ones."""
    for rows, span in ((1, 64), (3, 128), (8, 96)):
        given = _sections(rows, span, packed), positions[:span], *rest
        wanted, got = masks.build(*given), build(*given)
        assert all(torch.equal(wanted[kind], got[kind]) for kind in wanted), "other masks"
    return True


def _sections(rows: int, span: int, packed: torch.Tensor) -> masks.Sections:
    """Every third slot is committed; the first row is padding, the others stand in a chain."""
    each = torch.arange(rows, dtype=torch.int32)
    slots = torch.where(each == 0, span + 7, 3 * each + 1)
    ancestors = ((2 << each) - 1)[:, None]
    committed = torch.full((span // 32,), 0x49249249)
    return dict(zip(masks.NEEDED, _laid(packed, slots, each + span // 3, ancestors, committed), strict=True))


def check_choices(told: Callable[..., torch.Tensor], packed: torch.Tensor, logits: torch.Tensor) -> bool:
    """True; raises AssertionError when compiled choices from these logits are not the plain ones."""
    for sampling in SAMPLINGS:
        for some in (logits[:1], logits):
            given = choose.way(sampling), some, _ask(sampling, len(some), packed)
            wanted, got = choose.told(*given), told(*given)
            assert torch.equal(wanted[0], got[0]), "other tokens"
            assert torch.allclose(wanted, got, rtol=1e-3, atol=1e-6), "other probabilities"
    return True


def _ask(sampling: Sampling, rows: int, packed: torch.Tensor) -> choose.Ask:
    each = torch.arange(rows)
    numbers = torch.frombuffer(bytearray(parameters(sampling)), dtype=torch.int32)
    rows = _laid(packed, 7 * each, (each - 1).clamp(min=0), 0x5A5A5A * each)
    return choose.Ask.of(*rows, packed[:PARAMETERS].copy_(numbers))


def _laid(packed: torch.Tensor, *sections: torch.Tensor) -> list[torch.Tensor]:
    """Copies where the rows' sections will be: compiled code asks what its arguments are views of.

    Each begins beside a 16-byte boundary: code made for that takes any, while the other would copy what is not.
    """
    laid, end = [], PARAMETERS
    for section in sections:
        start = -(-end // 4) * 4 + 2
        end = start + section.numel()
        laid.append(packed[start:end].view(section.shape).copy_(section))
    return laid
