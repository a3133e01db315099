"""The portable backend's unit of work: one run of equal sequences, seen as 4-d views, and its window.

A run's views are (n, nheads, rows, d): n sequences of one length. They alias the user's tensors, so that
reading them copies nothing and writing them fills the results in place.
"""

from dataclasses import dataclass

from torch import Tensor

from flash_attn_cute.backends.portable.listed import Lists
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.lengths import Rows, Run
from flash_attn_cute.problem.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """The inputs of one run: views (n, nheads or nheads_k, rows, d), mask and bias as ``view_scores`` gives them.

    ``selected`` is as ``view_selected`` gives it. Queries that see no key at all stand before the tile's first row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    lists: Lists | None
    selected: Tensor | None
    band: Band
    spec: AttentionSpec

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.spec.nheads // self.spec.nheads_k


def view_rows(x: Tensor, run: Run, rows: Rows, packed: bool) -> Tensor:
    """A run of (total, heads, d) or (batch, seqlen, heads, d) as (n, heads, rows, d)."""
    if packed:
        x = x[rows.start : rows.start + run.n * rows.length].unflatten(0, (run.n, rows.length))
    else:
        x = x[run.first : run.first + run.n, : rows.length]
    return x.transpose(1, 2)


def view_lse(lse: Tensor, run: Run, packed: bool) -> Tensor:
    """A run of (nheads, total_q) or (batch, nheads, seqlen_q) as (n, nheads, rows)."""
    start, length = run.q
    if packed:
        lse = lse[:, start : start + run.n * length]
        return lse.unflatten(1, (run.n, length)).transpose(0, 1)
    return lse[run.first : run.first + run.n, :, :length]


def view_scores(x: Tensor | None, run: Run, skip: int, packed: bool) -> Tensor | None:
    """A run of a mask or bias as (n, nheads, rows, keys), broadcast dimensions left at 1, without ``skip`` rows."""
    if x is None:
        return None
    x = x[(None,) * ((3 if packed else 4) - x.ndim)]
    start, length = run.q
    if packed:
        if x.shape[1] == 1:
            x = x[None]
        else:
            x = x[:, start : start + run.n * length].unflatten(1, (run.n, length)).transpose(0, 1)
    elif x.shape[0] != 1:
        x = x[run.first : run.first + run.n]
    if x.shape[2] != 1:
        x = x[:, :, skip:length]
    return x if x.shape[3] == 1 else x[..., : run.k.length]


def view_selected(x: Tensor | None, run: Run, skip: int, packed: bool) -> Tensor | None:
    """A run of selected blocks as (n or 1, heads, rows, top), without ``skip`` rows."""
    if x is None:
        return None
    start, length = run.q
    if packed:
        x = x[0, :, start : start + run.n * length].unflatten(1, (run.n, length)).transpose(0, 1)
    elif len(x) != 1:
        x = x[run.first : run.first + run.n]
    return x[:, :, skip:length]
