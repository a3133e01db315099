"""Exact attention over blocks of queries, every feature included, in memory linear in the keys.

A block holds the scores of some queries with all the keys they may see, so softmax needs no running maximum.
The backward pass recomputes a block's probabilities from the saved log-sum-exp, as FlashAttention does (Dao et
al., arXiv 2205.14135). Blocks run one after the other in a fixed order and add to dK, dV and dBias in it: the
same inputs give the same bits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Gradients
from flash_attn_cute.backends.portable.listed import Keys
from flash_attn_cute.backends.portable.products import attend, capped, operand, probabilities, product, uncap
from flash_attn_cute.backends.portable.tile import Tile
from flash_attn_cute.problem.spec import Results


class BlockSize(NamedTuple):
    """Elements of a block of scores, if its rows stay within bounds: at least per key head, at most per query head."""

    elements: int
    min_rows: int
    max_rows: int


# On a CPU a block should stay in the cache; a GPU wants to be filled by a few large launches.
_BLOCK_SIZES = {"cpu": BlockSize(1 << 21, 32, 128), "cuda": BlockSize(1 << 26, 128, 1024)}


@dataclass(frozen=True, slots=True)
class _Heads:
    """Some sequences and key heads of a tile, whose keys and values serve several blocks of queries."""

    tile: Tile
    batch: slice
    heads: slice
    k: Tensor  # (sequences * heads, keys, d), in the operands' dtype
    v: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries of some heads, and the keys that they see between them, or more."""

    heads: _Heads
    rows: slice
    keys: Keys
    hidden: Tensor | None = None  # by a block mask, broadcasts to (n, heads, group, rows, keys)

    @property
    def is_empty(self) -> bool:
        """Whether a block mask leaves no keys."""
        return isinstance(self.keys, slice) and self.keys.start == self.keys.stop

    def take(self, x: Tensor) -> Tensor:
        """The block's part of (n, nheads, rows, ...), as (n, heads, group, rows, ...); a view."""
        x = x.unflatten(1, (-1, self.heads.tile.group))
        return x[self.heads.batch, self.heads.heads, :, self.rows]

    def operand(self, x: Tensor) -> Tensor:
        """The block's part of (n, nheads, rows, d), as a factor (n * heads, group * rows, d)."""
        return operand(self.take(x).flatten(2, 3).flatten(0, 1))

    def split(self, x: Tensor) -> Tensor:
        """(n * heads, group * rows, ...) as (n, heads, group, rows, ...); the inverse of flattening."""
        batch = self.heads.batch.stop - self.heads.batch.start
        return x.unflatten(1, (self.heads.tile.group, -1)).unflatten(0, (batch, -1))

    def take_scores(self, x: Tensor) -> Tensor:
        """The block's part of a mask or bias, as a view that broadcasts to (n, heads, group, rows, keys)."""
        if x.shape[0] != 1:
            x = x[self.heads.batch]
        x = x[:, :, None] if x.shape[1] == 1 else x.unflatten(1, (-1, self.heads.tile.group))[:, self.heads.heads]
        if x.shape[3] != 1:
            x = x[..., self.rows, :]
        return x if x.shape[4] == 1 else x[..., self.keys]

    def add_scores(self, x: Tensor, part: Tensor) -> None:
        """Adds (n, heads, group, rows, keys) to the block's part of the gradient of a bias."""
        whole = replace(self, keys=slice(None)).take_scores(x)
        if whole.shape[4] == 1:
            whole += part.sum_to_size(whole.shape)
        else:
            whole[..., self.keys] += part.sum_to_size(*whole.shape[:4], part.shape[4])


def forward(tile: Tile, results: Results) -> None:
    """Fills out (n, nheads, rows, d_v) and lse (n, nheads, rows), the sink left aside, and raises max_logits."""
    out, lse, max_logits, _ = results
    for heads in _split_heads(tile):
        for block in _split_rows(heads):
            if block.is_empty:
                block.take(out).zero_()
                block.take(lse).fill_(-torch.inf)
                continue
            scores, _ = _scores(block, block.operand(tile.q), keep_capped=False, max_logits=max_logits)
            for target, result in zip((out, lse), attend(scores, heads.v[:, block.keys]), strict=True):
                block.take(target).copy_(block.split(result))


def backward(tile: Tile, lse: Tensor, dout: Tensor, delta: Tensor, grads: Gradients) -> None:
    """Fills dq, dk and dv, and adds to dbias (float32 or wider, shaped as ``tile.bias``).

    Args:
        tile: as in forward.
        lse: (n, nheads, rows), the sink included.
        dout: (n, nheads, rows, d_v).
        delta: (n, nheads, rows), the row sums of dout * out less the gradient of lse, for parts of the keys
            (``spec.wide``). Else all keys are here, and the row sums of P * dP are the same but for the rounding of
            out: these are added to what it holds, the rest.
        grads: dq (n, nheads, rows, d), dk (n, nheads_k, keys, d), dv (n, nheads_k, keys, d_v), and dbias, None if it
            is not wanted.
    """
    dq, dk, dv, dbias, _ = grads
    scale, softcap = tile.spec.softmax_scale, tile.spec.softcap
    for heads in _split_heads(tile):
        sum_dk, sum_dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (heads.k, heads.v))
        for block in _split_rows(heads):
            if block.is_empty:
                block.take(dq).zero_()
                continue
            q, do = block.operand(tile.q), block.operand(dout)
            k, v = heads.k[:, block.keys], heads.v[:, block.keys]
            scores, before = _scores(block, q, keep_capped=True)
            fully_masked = None
            if tile.mask is not None or tile.bias is not None or block.hidden is not None:
                # These can leave a query nothing to see. Its weights are 0, it and its gradients may be NaN.
                fully_masked = scores.amax(-1, keepdim=True).isneginf()
                q, do = q.masked_fill(fully_masked, 0), do.masked_fill(fully_masked, 0)
                before = None if before is None else before.masked_fill_(fully_masked, 0)
            weights = probabilities(scores, block.take(lse).flatten(2, 3).flatten(0, 1))
            sum_dv[:, block.keys] += product(weights.to(q.dtype).mT, do)
            dweights = product(do, v.mT)
            if not tile.spec.wide:
                block.take(delta).add_(block.split((dweights * weights).sum(-1)))
            row_delta = block.take(delta).flatten(2, 3).flatten(0, 1)[..., None]
            if fully_masked is not None:
                row_delta = row_delta.masked_fill(fully_masked, 0)
            dscores = dweights.sub_(row_delta).mul_(weights)
            if dbias is not None:
                block.add_scores(dbias, block.split(dscores))
            factor = uncap(dscores, before, softcap).to(q.dtype)
            block.take(dq).copy_(block.split(product(factor, k, scale)))
            sum_dk[:, block.keys] += product(factor.mT, q, scale)
        for grad, total in ((dk, sum_dk), (dv, sum_dv)):
            target = grad[heads.batch, heads.heads]
            target.copy_(total.unflatten(0, target.shape[:2]))


def _scores(
    block: _Block, q: Tensor, keep_capped: bool, max_logits: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """A block's scores (n * heads, group * rows, keys), hidden ones -inf; and, if asked, the capped ones.

    The second result is what the derivative of the softcap needs: the scores before bias and masks. It is None
    without a softcap. ``max_logits`` (nheads,), if given, is raised to the largest visible scaled products.
    """
    tile = block.heads.tile
    scores = product(q, block.heads.k[:, block.keys].mT, tile.spec.softmax_scale)
    if max_logits is not None:
        logits = scores.clone()
        _hide(block, block.split(logits))
        tops = max_logits.unflatten(0, (-1, tile.group))[block.heads.heads]
        torch.maximum(tops, block.split(logits).amax((0, 3, 4)), out=tops)
    before = None
    if tile.spec.softcap:
        scores = capped(scores, tile.spec.softcap)
        before = scores.clone() if keep_capped else None
    parts = block.split(scores)
    if tile.bias is not None:
        parts += block.take_scores(tile.bias)
    _hide(block, parts)
    return scores, before


def _hide(block: _Block, parts: Tensor) -> None:
    """Makes scores (n, heads, group, rows, keys) that masks hide -inf."""
    if block.hidden is not None:
        parts.masked_fill_(block.hidden, -torch.inf)
    _hide_beyond_band(block, parts)
    mask = block.heads.tile.mask
    if mask is not None:
        parts.masked_fill_(block.take_scores(mask).logical_not(), -torch.inf)


def _hide_beyond_band(block: _Block, parts: Tensor) -> None:
    band = block.heads.tile.band
    rows = torch.arange(block.rows.start, block.rows.stop, device=parts.device)[:, None]
    if isinstance(block.keys, Tensor):
        for edge, beyond in ((band.upper, torch.gt), (band.lower, torch.lt)):
            if edge is not None:
                parts.masked_fill_(beyond(block.keys, rows + edge), -torch.inf)
        return
    if band.upper is not None:  # only keys behind the first row's last one can be hidden from any row
        first = min(max(block.keys.start, block.rows.start + band.upper + 1), block.keys.stop)
        keys = torch.arange(first, block.keys.stop, device=parts.device)
        parts[..., first - block.keys.start :].masked_fill_(keys > rows + band.upper, -torch.inf)
    if band.lower is not None:  # and only keys before the last row's first one
        last = max(min(block.keys.stop, block.rows.stop - 1 + band.lower), block.keys.start)
        keys = torch.arange(block.keys.start, last, device=parts.device)
        parts[..., : len(keys)].masked_fill_(keys < rows + band.lower, -torch.inf)


def _split_heads(tile: Tile) -> Iterator[_Heads]:
    """Groups of sequences and heads, as many at a time as a block of scores has room for."""
    n, nheads_k = tile.k.shape[:2]
    room = _room(tile) // _block_rows(tile)
    step_h = max(1, min(nheads_k, room))
    step_n = max(1, room // nheads_k) if step_h == nheads_k else 1
    if tile.lists is not None:  # heads and entries with lists of their own go one by one
        step_h = 1 if tile.lists.heads > 1 else step_h
        step_n = 1 if tile.lists.batch > 1 or tile.lists.heads > 1 else step_n
    for b in range(0, n, step_n):
        for h in range(0, nheads_k, step_h):
            batch, heads = slice(b, min(b + step_n, n)), slice(h, min(h + step_h, nheads_k))
            k, v = (operand(x[batch, heads].flatten(0, 1)) for x in (tile.k, tile.v))
            yield _Heads(tile, batch, heads, k, v)


def _split_rows(heads: _Heads) -> Iterator[_Block]:
    tile, start = heads.tile, 0
    seqlen_q, seqlen_k, step = tile.q.shape[2], tile.k.shape[2], _block_rows(tile)
    while start < seqlen_q:
        stop = min(start + step, seqlen_q)
        if tile.lists is None:
            yield _Block(heads, slice(start, stop), slice(*tile.band.keys(start, stop, seqlen_k)))
        else:
            stop = tile.lists.stop_of_rows(start, stop)
            rows, keys = slice(start, stop), slice(*tile.band.keys(start, stop, seqlen_k))
            found, hidden = tile.lists.of_block(heads.batch.start, _heads_of_mask(heads), rows, keys)
            # (heads, rows, keys) of one head, or of a key head's group.
            yield _Block(heads, rows, found, None if hidden is None else hidden[None, None])
        start = stop


def _heads_of_mask(heads: _Heads) -> slice:
    """Heads of a block mask, which has one, one for each key head, or one for each query head."""
    tile, head = heads.tile, heads.heads.start
    assert tile.lists is not None
    if tile.lists.heads == 1:
        return slice(0, 1)
    a_head = tile.lists.heads // tile.k.shape[1]
    return slice(head * a_head, (head + 1) * a_head)


def _block_rows(tile: Tile) -> int:
    size = _block_size(tile)
    return min(tile.q.shape[2], max(-(-size.min_rows // tile.group), min(size.max_rows, _room(tile))))


def _room(tile: Tile) -> int:
    """Rows of one key head's scores that a block has room for."""
    size, seqlen_k, (lower, upper) = _block_size(tile), tile.k.shape[2], tile.band
    if lower is not None and upper is not None:
        seqlen_k = min(seqlen_k, upper - lower + size.max_rows)
    return size.elements // (seqlen_k * tile.group)


def _block_size(tile: Tile) -> BlockSize:
    return _BLOCK_SIZES.get(tile.q.device.type, _BLOCK_SIZES["cpu"])
