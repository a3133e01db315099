"""Exact attention of queries to the key blocks that each of them selects, in memory that follows the selection.

Selected blocks of some queries are gathered, so that products are batched over queries, and their rows are the heads
that select together. No tensor is larger than q, k, v, the selection, or ``_ELEMENTS``. Gradients of gathered
blocks are added to their blocks in a fixed order: the same inputs give the same bits. The host waits for nothing.

A copy of K and V ends with a block of zeros. It takes the places of blocks that are not selected, that repeat an
earlier one, or that the window hides from the query, so that what these hold reaches nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.backends.portable.products import attend, capped, operand, probabilities, product, uncap
from flash_attn_cute.backends.portable.tile import Tile
from flash_attn_cute.problem.spec import Results

# Elements of K or V that are gathered at a time, if those of one query are no more; on a CPU they stay in the cache.
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True, slots=True)
class _Head:
    """Keys and values of one sequence and key head, by blocks, with a block of zeros at the end."""

    tile: Tile
    sequence: int
    head: int
    k: Tensor  # (blocks + 1, block, d), in the operands' dtype
    v: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Some queries of the heads that select together, and the blocks that they select."""

    of: _Head
    heads: slice  # of the query heads
    rows: slice
    blocks: Tensor  # (rows, top), int64
    hidden: Tensor  # (rows, 1, top * block), bool: beyond the sequence, or hidden by the window

    def take(self, x: Tensor) -> Tensor:
        """The part's view of (n, nheads, rows, ...), as (rows, heads, ...)."""
        return x[self.of.sequence, self.heads, self.rows].transpose(0, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Selected blocks of (blocks + 1, block, d), as (rows, top * block, d)."""
        return x.index_select(0, self.blocks.flatten()).view(len(self.blocks), -1, x.shape[-1])

    def add(self, total: Tensor, x: Tensor) -> None:
        """Adds (rows, top * block, d) to the selected blocks of (blocks + 1, block, d), in an order that is fixed."""
        index, x = self.blocks.flatten(), x.reshape(-1, *total.shape[1:])
        if total.is_cuda:  # which sorts the index; additions of index_add_ have no order there
            total.index_put_((index,), x, accumulate=True)
        else:
            total.index_add_(0, index, x)

    def scores(self, q: Tensor, k: Tensor, max_logits: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scores (rows, heads, keys), hidden ones -inf; and with a softcap, what is before the hiding.

        ``max_logits`` (nheads,), if given, is raised to the largest visible scaled products.
        """
        spec, before = self.of.tile.spec, None
        scores = product(q, k.mT, spec.softmax_scale)
        if max_logits is not None:
            tops = max_logits[self.heads]
            torch.maximum(tops, scores.masked_fill(self.hidden, -torch.inf).amax((0, 2)), out=tops)
        if spec.softcap:
            scores = capped(scores, spec.softcap)
            before = scores.clone()
        return scores.masked_fill_(self.hidden, -torch.inf), before


def forward(tile: Tile, results: Results) -> None:
    """Fills out (n, nheads, rows, d_v) and lse (n, nheads, rows), the sink left aside, and raises max_logits."""
    for head in _split_heads(tile):
        for part in _split_rows(head):
            q, k, v = operand(part.take(tile.q)), part.gather(head.k), part.gather(head.v)
            scores, _ = part.scores(q, k, results.max_logits)
            for target, result in zip(results[:2], attend(scores, v), strict=True):
                part.take(target).copy_(result)


def backward(tile: Tile, lse: Tensor, dout: Tensor, delta: Tensor, grads: Gradients) -> None:
    """Fills dq, dk and dv; arguments as in ``blockwise.backward``."""
    scale, softcap = tile.spec.softmax_scale, tile.spec.softcap
    for head in _split_heads(tile):
        sum_dk, sum_dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (head.k, head.v))
        for part in _split_rows(head):
            # A query without visible keys and its gradients may be NaN.
            fully_masked = part.hidden.all(-1, keepdim=True)
            q, do = (operand(part.take(x)).masked_fill(fully_masked, 0) for x in (tile.q, dout))
            k, v = part.gather(head.k), part.gather(head.v)
            scores, before = part.scores(q, k)
            weights = probabilities(scores, part.take(lse))
            part.add(sum_dv, product(weights.to(q.dtype).mT, do))
            dweights = product(do, v.mT)
            if not tile.spec.wide:
                part.take(delta).add_((dweights * weights).sum(-1))
            dscores = dweights.sub_(part.take(delta)[..., None].masked_fill(fully_masked, 0)).mul_(weights)
            factor = uncap(dscores, before, softcap).to(q.dtype)
            part.take(grads.dq).copy_(product(factor, k, scale))
            part.add(sum_dk, product(factor.mT, q, scale))
        for grad, total in ((grads.dk, sum_dk), (grads.dv, sum_dv)):
            target = grad[head.sequence, head.head]
            target.copy_(total.flatten(0, 1)[: len(target)])


def _split_heads(tile: Tile) -> Iterator[_Head]:
    for sequence in range(tile.k.shape[0]):
        for head in range(tile.k.shape[1]):
            k, v = (_blocks(x[sequence, head], tile.spec.selection_block) for x in (tile.k, tile.v))
            yield _Head(tile, sequence, head, k, v)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Rows (keys, d) as blocks (blocks + 1, block, d), zeros behind the last row; a longer block ends with the keys."""
    block = min(block, len(x))
    missing = -len(x) % block
    return torch.nn.functional.pad(operand(x), (0, 0, 0, missing + block)).unflatten(0, (-1, block))


def _split_rows(head: _Head) -> Iterator[_Part]:
    """Parts of the queries that share the key head, a query head at a time if each selects for itself."""
    tile, (_, block, d) = head.tile, head.k.shape
    assert tile.selected is not None
    sets = tile.selected[head.sequence % len(tile.selected)]  # (heads, rows, top)
    heads = 1 if len(sets) == tile.spec.nheads else tile.group
    gathered = sets.shape[-1] * block * max(d, head.v.shape[-1])
    step = max(1, _ELEMENTS.get(head.k.device.type, _ELEMENTS["cpu"]) // gathered)
    for first in range(head.head * tile.group, (head.head + 1) * tile.group, heads):
        selected = sets[first // heads % len(sets)]
        for start in range(0, len(selected), step):
            rows = slice(start, min(start + step, len(selected)))
            blocks, hidden = _visible(head, rows, selected[rows])
            yield _Part(head, slice(first, first + heads), rows, blocks, hidden)


def _visible(head: _Head, rows: slice, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks that queries see some keys of, (rows, top), the block of zeros for others; and their hidden keys."""
    (lower, upper), seqlen_k = head.tile.band, head.tile.k.shape[2]
    none, block = len(head.k) - 1, head.k.shape[1]
    row = torch.arange(rows.start, rows.stop, device=selected.device)[:, None]
    first = row * 0 if lower is None else (row + lower).clamp(min=0)  # key that a query sees, and the one behind
    stop = row * 0 + seqlen_k if upper is None else (row + upper + 1).clamp(max=seqlen_k)
    blocks = selected.long()
    is_repeated = torch.nn.functional.pad(blocks.diff() == 0, (1, 0))
    blocks = blocks.masked_fill(is_repeated | (blocks * block >= stop) | ((blocks + 1) * block <= first), none)
    keys = (blocks[..., None] * block + torch.arange(block, device=selected.device)).flatten(1)
    return blocks, ((keys < first) | (keys >= stop))[:, None]
