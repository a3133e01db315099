"""Key blocks that each query selects, on a Hopper GPU: attention of 64 or 16 heads of 128 in four groups, causal.

Queries select their own block of 64 keys, the first one, and others before their own at random, as many as they can up
to a number. Either pass takes part, against the selected branch of flash-linear-attention's NSA, where it is there, and
compiled FlexAttention with a byte for each query and block. NSA takes groups of 16 heads and more: smaller ones are
padded with zeros, in its time. The package also takes part with 16 blocks, to whose time that of other numbers is to be
proportional. Work is that of visible pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness import Bar, Contender, NoPart, Suite, Unavailable
from benchmarks.suites.passes import EACH, Forward, PassCase, run_passes
from benchmarks.work import Passes, Work, attention_flop, gpu_backend
from flash_attn_cute import BlockMask, flash_attn_func

PACKAGE, FLA, FLEX = "flash_attn_cute", "flash-linear-attention", "FlexAttention"
SIXTEEN = f"{PACKAGE} top 16"  # not what a row asks for
BACKEND = gpu_backend()
GROUPS, D, BLOCK = 4, 128, 64
FEWEST_HEADS = 16  # of a group of flash-linear-attention's
_LONGEST_FLEX = 65_536  # its bytes take too much room then
_ROWS_AT_ONCE = 4096  # of random numbers, whose rows are as long as there are blocks


@dataclass(frozen=True)
class Row:
    """Queries of ``seqlen`` tokens, in groups of so many heads, that select ``top`` blocks each."""

    group: int = 16
    top: int = 16
    seqlen: int = 32_768

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"group of {self.group}, top {self.top}, {self.seqlen // 1024}k"


_FIRST, _SMALL_GROUP = Row(), Row(group=4)
ROWS = (
    _FIRST,
    _SMALL_GROUP,
    *(Row(top=top) for top in (4, 8, 32, 64)),
    *(Row(seqlen=seqlen) for seqlen in (8192, 65_536, 131_072)),
)
BARS = {(_FIRST, FLA): 3.0, (_FIRST, FLEX): 6.0, (_SMALL_GROUP, FLA): 2.0}  # least speed over others
PROPORTIONAL = 1.15  # the most time over top / 16 of that of 16 blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectedCase(PassCase):
    """A pass, inputs (1, seqlen, heads, d), and selected blocks (1, groups, seqlen, top), int32, -1 for none."""

    row: Row
    indices: Tensor


def suite(device: torch.device, dtype: torch.dtype) -> Suite[SelectedCase]:
    """The suite of all rows, both passes. Its bars are the least that the package has to reach."""

    def cases() -> Iterator[SelectedCase]:
        for row in ROWS:
            for passes in EACH:
                yield _case(row, passes, device, dtype)

    contenders = [
        Contender(PACKAGE, run_passes(_package)),
        Contender(SIXTEEN, run_passes(_sixteen), compared=False),
        Contender(FLA, run_passes(_flash_linear_attention)),
        Contender(FLEX, run_passes(_flex)),
    ]
    return Suite("selected", cases, contenders, PACKAGE, list(_bars()), rounds=20, seconds=1.0)


def _bars() -> Iterator[Bar]:
    for passes in EACH:
        for (row, against), least in BARS.items():
            if row in ROWS:
                yield Bar(f"{passes} {row.name}", PACKAGE, against, 1 / least)
        for row in ROWS:
            if row.top != _FIRST.top:
                yield Bar(f"{passes} {row.name}", PACKAGE, SIXTEEN, PROPORTIONAL * row.top / _FIRST.top)


def _case(row: Row, passes: Passes, device: torch.device, dtype: torch.dtype) -> SelectedCase:
    draw = torch.Generator(device).manual_seed(0)
    heads = GROUPS * row.group
    q, k, v = (
        torch.randn(1, row.seqlen, n, D, generator=draw, device=device, dtype=dtype) for n in (heads, GROUPS, GROUPS)
    )
    dout = torch.randn(q.shape, generator=draw, device=device, dtype=dtype)
    for x in (q, k, v):
        x.requires_grad_(passes != "forward")
    indices = selected_blocks(row.seqlen, row.top, device)
    pairs = row.group * _pairs(indices)
    return SelectedCase(
        name=f"{passes} {row.name}",
        detail=f"q {tuple(q.shape)}, {GROUPS} groups, blocks of {BLOCK} keys",
        panel=passes,
        device=device,
        dtype=dtype,
        work=Work(attention_flop(pairs, 1, D, D, passes), (2 if passes == "forward" else 4) * (q.nbytes + k.nbytes)),
        row=row,
        passes=passes,
        q=q,
        k=k,
        v=v,
        dout=dout,
        indices=indices,
    )


def selected_blocks(seqlen: int, top: int, device: torch.device) -> Tensor:
    """(1, groups, seqlen, top), int32: the own block, the first, and others before; -1 where there are no more."""
    draw, found = torch.Generator(device).manual_seed(0), []
    blocks = torch.arange(-(-seqlen // BLOCK), device=device)
    for rows in torch.arange(seqlen, device=device).split(_ROWS_AT_ONCE):
        own = rows[:, None] // BLOCK
        scores = torch.rand(GROUPS, len(rows), len(blocks), generator=draw, device=device)
        scores = scores.masked_fill_(blocks == own, 2.0).masked_fill_(blocks == 0, 3.0)
        best = scores.masked_fill_(blocks > own, -1.0).topk(min(top, len(blocks)))
        found.append(best.indices.masked_fill(best.values < 0, -1).int())
    return torch.cat(found, 1)[None]


def _pairs(indices: Tensor) -> int:
    """Visible pairs of queries and keys, over all groups."""
    row = torch.arange(indices.shape[2], device=indices.device)[:, None]
    keys = (row + 1 - indices * BLOCK).clamp(max=BLOCK).masked_fill(indices < 0, 0)
    return int(keys.sum())


def _package(case: SelectedCase, indices: Tensor | None = None) -> Forward:
    indices = case.indices if indices is None else indices
    mask = BlockMask.from_selection(indices, block=BLOCK, seqlen_k=case.row.seqlen)

    def run() -> Tensor:
        out: Tensor = flash_attn_func(case.q, case.k, case.v, causal=True, block_mask=mask, backend=BACKEND)
        return out

    return run


def _sixteen(case: SelectedCase) -> Forward:
    if case.row.top == _FIRST.top:
        raise NoPart
    return _package(case, selected_blocks(case.row.seqlen, _FIRST.top, case.device))


def _flash_linear_attention(case: SelectedCase) -> Forward:
    """The selected branch alone, but that the function also averages blocks of keys and values."""
    try:
        from fla.ops.nsa import parallel_nsa
    except ImportError as reason:
        raise Unavailable(str(reason)) from reason
    group = case.row.group
    none = case.row.seqlen  # of no block, so that no query sees one there
    indices = case.indices.masked_fill(case.indices < 0, none).transpose(1, 2).long().contiguous()

    def run() -> Tensor:
        q = case.q
        if group < FEWEST_HEADS:
            padding = (0, 0, 0, FEWEST_HEADS - group)
            q = torch.nn.functional.pad(q.unflatten(2, (GROUPS, group)), padding).flatten(2, 3)
        out = parallel_nsa(q, case.k, case.v, block_indices=indices, block_counts=indices.shape[-1], block_size=BLOCK)
        real: Tensor = out.unflatten(2, (GROUPS, -1))[:, :, :, :group].flatten(2, 3)
        return real

    return run


def _flex(case: SelectedCase) -> Forward:
    """Compiled FlexAttention, with a byte for each query and block; its mask is made once."""
    n, group = case.row.seqlen, case.row.group
    if n > _LONGEST_FLEX:
        raise Unavailable(f"its mask takes too long to make of more than {_LONGEST_FLEX} tokens")
    blocks = -(-n // BLOCK)
    places = case.indices.long().masked_fill(case.indices < 0, blocks)
    seen = torch.zeros(GROUPS, n, blocks + 1, dtype=torch.bool, device=case.device).scatter_(-1, places[0], True)

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return seen[h // group, i, j // BLOCK] & (j <= i)

    is_compiled = case.device.type == "cuda"
    shown = create_block_mask(mod, None, GROUPS * group, n, n, device=case.device, _compile=is_compiled)
    torch.compiler.reset()  # or after eight rows it would be compiled no more
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))

    def run() -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=shown, enable_gqa=True).transpose(1, 2)
        return out

    return run
