"""Linear layers that read the same input are joined: a decode step multiplies a handful of rows with every weight, and
takes as long as reading the weights, so a few large products are better than many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order in which their owners call them


class Joint:
    """The product of a group, from the call of its first member to the call of its last."""

    def __init__(self) -> None:
        self.parts: tuple[torch.Tensor, ...] | None = None


class Member(torch.nn.Module):
    """Hands out its part of the product; the first one multiplies for all, the last one leaves nothing behind."""

    def __init__(self, joint: Joint, index: int, sizes: list[int], linear: torch.nn.Linear | None) -> None:
        super().__init__()
        self.joint, self.index, self.sizes, self.linear = joint, index, sizes, linear

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.linear is not None:
            self.joint.parts = self.linear(rows).split(self.sizes, -1)
        part = self.joint.parts[self.index]
        if self.index == len(self.sizes) - 1:
            self.joint.parts = None
        return part


def join(model: torch.nn.Module, device: torch.device | None = None) -> int:
    """Join the known groups of a model in place, group by group on the device; returns how many."""
    owners = [(owner, names) for owner in list(model.modules()) for names in GROUPS if _all_linear(owner, names)]
    for owner, names in owners:
        _join(owner, names, device)
    return len(owners)


def _all_linear(owner: torch.nn.Module, names: Iterable[str]) -> bool:
    members = [getattr(owner, name, None) for name in names]
    alike = {type(m) for m in members} == {torch.nn.Linear} and len({m.bias is None for m in members}) == 1
    return alike and len({(m.weight.dtype, m.weight.device) for m in members}) == 1


def _join(owner: torch.nn.Module, names: tuple[str, ...], device: torch.device | None) -> None:
    members = [getattr(owner, name) for name in names]
    sizes = [m.out_features for m in members]
    linear = torch.nn.Linear(members[0].in_features, sum(sizes), bias=members[0].bias is not None, device="meta")
    for kind, _ in linear.named_parameters():
        whole = torch.cat([getattr(m, kind).data.to(device) for m in members])
        setattr(linear, kind, torch.nn.Parameter(whole, requires_grad=False))
    joint = Joint()
    for index, name in enumerate(names):
        setattr(owner, name, Member(joint, index, sizes, None if index else linear))
