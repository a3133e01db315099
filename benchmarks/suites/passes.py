"""Cases that are passes of one call, and what runs a contender's passes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from benchmarks.harness import Case, NoPart, Results, Run
from benchmarks.work import Passes

EACH: tuple[Passes, ...] = ("forward", "backward")
# Computes out; its inputs require gradients if a backward pass follows.
Forward: TypeAlias = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class PassCase(Case):
    """Passes of a call, its inputs, and the gradient that comes back to out."""

    passes: Passes
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Leaves of the case, by the names of their gradients."""
        return {"dq": self.q, "dk": self.k, "dv": self.v}


P = TypeVar("P", bound=PassCase)


def run_passes(make: Callable[[P], Forward], without: tuple[str, ...] = ()) -> Callable[[P], Run]:
    """Makes what runs the passes of a case: gives out, or of the gradients of all leaves those but ``without``."""

    def of(case: P) -> Run:
        forward = make(case)
        if case.passes == "forward":
            return lambda: {"out": forward()}
        leaves = {name: x for name, x in case.leaves.items() if name not in without}
        once = forward() if case.passes == "backward" else None

        def run() -> Results:
            out = forward() if once is None else once
            grads = torch.autograd.grad(out, list(leaves.values()), case.dout, retain_graph=once is not None)
            return dict(zip(leaves, grads, strict=True))

        return run

    return of


def deterministic(make: Callable[..., Forward]) -> Callable[[P], Forward]:
    """Makes the forward pass ahead of a deterministic backward pass; forward passes alone are deterministic anyway."""

    def of(case: P) -> Forward:
        if case.passes == "forward":
            raise NoPart
        return make(case, deterministic=True)

    return of
