"""Linear layers that read the same input, multiplied as one: fewer and longer reads of weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in the order in which their owners call them


class Joint:
    """The product of a group, from the call of its first member to the call of its last."""

    def __init__(self, linear: torch.nn.Linear, sizes: list[int]) -> None:
        self.linear, self.sizes = linear, sizes
        self.parts: tuple[torch.Tensor, ...] | None = None


class First(torch.nn.Module):
    """Multiplies for the whole group and keeps the other parts for them."""

    def __init__(self, joint: Joint) -> None:
        super().__init__()
        self.linear, self.joint = joint.linear, joint

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        part, *self.joint.parts = self.linear(rows).split(self.joint.sizes, -1)
        return part


class Other(torch.nn.Module):
    """Hands out its part; the last of the group leaves nothing behind."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint, self.index = joint, index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        part = self.joint.parts[self.index]
        if self.index == len(self.joint.sizes) - 2:
            self.joint.parts = None
        return part


def join(model: torch.nn.Module) -> int:
    """Join the known groups of a model in place; returns how many."""
    owners = [(owner, names) for owner in list(model.modules()) for names in GROUPS if _all_linear(owner, names)]
    for owner, names in owners:
        _join(owner, names)
    return len(owners)


def _all_linear(owner: torch.nn.Module, names: Iterable[str]) -> bool:
    members = [getattr(owner, name, None) for name in names]
    alike = {type(m) for m in members} == {torch.nn.Linear} and len({m.bias is None for m in members}) == 1
    return alike and len({(m.weight.dtype, m.weight.device) for m in members}) == 1


def _join(owner: torch.nn.Module, names: tuple[str, ...]) -> None:
    members = [getattr(owner, name) for name in names]
    sizes = [m.out_features for m in members]
    linear = torch.nn.Linear(members[0].in_features, sum(sizes), bias=members[0].bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(torch.cat([m.weight.data for m in members]), requires_grad=False)
    if members[0].bias is not None:
        linear.bias = torch.nn.Parameter(torch.cat([m.bias.data for m in members]), requires_grad=False)
    joint = Joint(linear, sizes)
    setattr(owner, names[0], First(joint))
    for index, name in enumerate(names[1:]):
        setattr(owner, name, Other(joint, index))
