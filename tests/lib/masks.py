"""Block masks with the same masks element by element, and what tables of blocks come to when they are spelled out."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.problem.block_tables import BlockTables
from tests.lib.checks import with_gradients
from tests.lib.oracle import Call
from tests.lib.waits import assert_captured, synchronisations

TILE = 128
LENGTHS = [1, 64, 127, 128, 129, 200, 256, 300, 511]


def listed(mask: BlockMask) -> BlockMask:
    """An equal mask that is equivalent to no other argument, so that calls read its lists."""
    return mask | BlockMask.prefix(mask.seqlen_q, mask.seqlen_k, 0)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention under a mask, with something behind it, as programs have."""
    out: Tensor = flash_attn_func(q, k, v, block_mask=mask)
    return out * 2


class Made(NamedTuple):
    """A mask and what it shows: (batch, heads, seqlen_q, seqlen_k), bool."""

    mask: BlockMask
    shown: Tensor


def positions(seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Queries as a column, keys as a row, counted from 0."""
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None]


def random_ids(length: int, rng: random.Random, *, is_sorted: bool = True) -> Tensor:
    """Documents of any lengths, some padding among them."""
    ids: list[int] = []
    while len(ids) < length:
        document = len(set(ids)) if is_sorted else rng.randrange(4)
        ids += [-1 if rng.random() < 0.1 else document] * rng.choice([1, 7, 100, 128, 300])
    return torch.tensor(ids[:length], dtype=torch.int64)


def spread(visible: Tensor, block_q: int, block_k: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """A map of blocks, element by element."""
    return visible.repeat_interleave(block_q, -2).repeat_interleave(block_k, -1)[..., :seqlen_q, :seqlen_k]


def _window(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    left, right = (rng.choice([None, 0, 5, 127, 128, 200, 1000]) for _ in range(2))
    i, j = positions(seqlen_q, seqlen_k)
    i = i + seqlen_k - seqlen_q
    shown = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left is not None:
        shown &= j >= i - left
    if right is not None:
        shown &= j <= i + right
    return Made(BlockMask.window(seqlen_q, seqlen_k, left=left, right=right), shown[None, None])


def _causal(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    i, j = positions(seqlen_q, seqlen_k)
    return Made(BlockMask.causal(seqlen_q, seqlen_k), (j <= i + seqlen_k - seqlen_q)[None, None])


def _documents(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    is_sorted = rng.random() < 0.7
    ids_q, ids_k = (
        torch.stack([random_ids(length, rng, is_sorted=is_sorted) for _ in range(sets[0])])
        for length in (seqlen_q, seqlen_k)
    )
    if seqlen_q == seqlen_k and rng.random() < 0.5:
        ids_k = ids_q
    shown = (ids_q[:, :, None] == ids_k[:, None]) & (ids_q >= 0)[:, :, None]
    return Made(BlockMask.documents(ids_q.int(), ids_k), shown[:, None])


def _offsets(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    num = rng.randint(1, 6)
    cu_q, cu_k = (sorted(rng.randint(0, length) for _ in range(num + 1)) for length in (seqlen_q, seqlen_k))
    shown = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for d in range(num):
        shown[cu_q[d] : cu_q[d + 1], cu_k[d] : cu_k[d + 1]] = True
    mask = BlockMask.documents(
        cu_seqlens=torch.tensor(cu_q, dtype=torch.int32),
        cu_seqlens_k=torch.tensor(cu_k, dtype=torch.int32),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
    )
    return Made(mask, shown[None, None])


def _prefix_lm(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    lengths = torch.tensor([rng.choice([0, 1, 100, 128, seqlen_k, seqlen_k + 9]) for _ in range(sets[0])])
    i, j = positions(seqlen_q, seqlen_k)
    shown = (j <= i + seqlen_k - seqlen_q) | (j < lengths[:, None, None])
    prefix = int(lengths[0]) if sets[0] == 1 and rng.random() < 0.5 else lengths
    return Made(BlockMask.prefix_lm(seqlen_q, seqlen_k, prefix), shown[:, None])


def _sink(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    length, left = rng.choice([1, 4, 130]), rng.choice([5, 200])
    i, j = positions(seqlen_q, seqlen_k)
    i = i + seqlen_k - seqlen_q
    mask = BlockMask.prefix(seqlen_q, seqlen_k, length) | BlockMask.window(seqlen_q, seqlen_k, left=left)
    return Made(mask & BlockMask.causal(seqlen_q, seqlen_k), (((j < length) | (j >= i - left)) & (j <= i))[None, None])


def _dilated(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    step, left = rng.choice([1, 2, 3, 64, 128, 255, 256, 300]), rng.choice([None, 3, 400])
    i, j = positions(seqlen_q, seqlen_k)
    distance = i + seqlen_k - seqlen_q - j
    shown = (distance % step == 0) & (distance >= 0)
    if left is not None:
        shown &= distance <= left
    return Made(BlockMask.dilated(seqlen_q, seqlen_k, step, left=left, right=0), shown[None, None])


def _blocks(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    block_q, block_k = (rng.choice([64, 128, 256, 100, 17]) for _ in range(2))
    shape = (*sets, -(-seqlen_q // block_q), -(-seqlen_k // block_k))
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))) < rng.choice(
        [0.1, 0.5, 1]
    )
    mask = BlockMask.from_blocks(visible, (block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return Made(mask, spread(visible, block_q, block_k, seqlen_q, seqlen_k))


def _indices(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    block_q, block_k = (rng.choice([64, 64, 128, 384]) for _ in range(2))
    blocks_q, blocks_k = -(-seqlen_q // block_q), -(-seqlen_k // block_k)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    width = rng.randint(0, blocks_k)
    indices = torch.rand(*sets, blocks_q, blocks_k, generator=generator).argsort(-1)[..., :width]
    counts = None
    kept = torch.ones(indices.shape, dtype=torch.bool)
    if rng.random() < 0.5:
        counts = torch.randint(0, width + 1, indices.shape[:3], generator=generator, dtype=torch.int32)
        kept = torch.arange(width) < counts[..., None]
        indices = indices.where(kept, -7 if rng.random() < 0.5 else 10**6)  # never looked at
    visible = torch.zeros(*sets, blocks_q, blocks_k + 1, dtype=torch.bool)
    visible.scatter_(-1, torch.where(kept, indices, blocks_k), True)
    mask = BlockMask.from_indices(indices.int(), counts, block=(block_q, block_k), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    return Made(mask, spread(visible[..., :-1], block_q, block_k, seqlen_q, seqlen_k))


def _dense(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    shown = torch.rand(*sets, seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    mask = shown < rng.choice([0.0001, 0.5])
    mask[..., : seqlen_q // 2, : seqlen_k // 2] = rng.random() < 0.5
    return Made(BlockMask.from_dense(mask), mask)


def _function(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int]) -> Made:
    table = torch.randint(0, 300, (*sets, seqlen_q), generator=torch.Generator().manual_seed(rng.getrandbits(32)))

    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q + h) & (k + table[b, h, q] >= q)

    i, j = positions(seqlen_q, seqlen_k)
    shown = (j <= i + torch.arange(sets[1])[:, None, None]) & (j + table[..., None] >= i)
    mask = BlockMask.from_function(near, seqlen_q, seqlen_k, batch=sets[0], heads=sets[1])
    return Made(mask, shown)


KINDS: dict[str, Callable[[int, int, random.Random, tuple[int, int]], Made]] = {
    "window": _window,
    "causal": _causal,
    "documents": _documents,
    "offsets": _offsets,
    "prefix_lm": _prefix_lm,
    "sink": _sink,
    "dilated": _dilated,
    "blocks": _blocks,
    "indices": _indices,
    "dense": _dense,
    "function": _function,
}


def random_mask(seqlen_q: int, seqlen_k: int, rng: random.Random, sets: tuple[int, int] = (1, 1)) -> Made:
    """One of any kind, or two combined, which may be the same for all batch entries or heads."""

    def one() -> Made:
        kind = rng.choice(list(KINDS.values()))
        return kind(seqlen_q, seqlen_k, rng, (rng.choice([1, sets[0]]), rng.choice([1, sets[1]])))

    made = one()
    while rng.random() < 0.4:
        other = one()
        if rng.random() < 0.5:
            made = Made(made.mask & other.mask, made.shown & other.shown)
        else:
            made = Made(made.mask | other.mask, made.shown | other.shown)
    return made


def on_device(made: Made, device: str = "cuda") -> BlockMask:
    """A mask of the tests, which make theirs on the CPU; element by element, unless it needs no tensors."""
    return made.mask if made.mask.device is None else BlockMask.from_dense(made.shown.to(device))


def with_any_order(mask: BlockMask, rng: random.Random, nheads_k: int, device: str = "cuda") -> BlockMask:
    """In a named order, or one of its own for every batch entry and key head."""
    group = mask.heads // nheads_k if mask.heads > nheads_k else 1
    name = rng.choice(["default", "spt", "permutation", "auto", "random"])
    if name != "random":
        return mask.with_order(name, group=group)
    blocks = -(-mask.seqlen_k // TILE)
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    shape = mask.batch, mask.heads // group, blocks
    return mask.with_order(torch.rand(shape, generator=generator).argsort(-1).to(device), group=group)


def spelled_out(tables: BlockTables, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Visible scores by the rows of tables, element by element; checks the form of the rows on the way."""
    spans, entries, tiles = tables.rows
    assert {x.dtype for x in tables.rows} == {torch.int32}
    batch, heads, blocks_q, _ = spans.shape
    blocks_k = -(-seqlen_k // TILE)
    assert blocks_q == -(-seqlen_q // TILE)
    shown = torch.zeros(batch, heads, blocks_q * TILE, blocks_k * TILE, dtype=torch.bool)
    for b, h, m in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks_q))).tolist():
        start, count = spans[b, h, m].tolist()
        assert start >= 0
        assert start + count <= len(entries)
        listed = entries[start : start + count].T.tolist()
        assert listed[0] == sorted(set(listed[0]))
        for n, tile in zip(*listed, strict=True):
            assert 0 <= n < blocks_k
            block = shown[b, h, m * TILE : (m + 1) * TILE, n * TILE : (n + 1) * TILE]
            block[:] = True if tile == -1 else bits_of(tiles[tile])
            assert block.any(), "an empty block is listed"
            assert block.all() == (tile == -1), "a full block has a tile"
    assert not shown[:, :, seqlen_q:].any(), "visible behind the last query"
    assert not shown[:, :, :, seqlen_k:].any(), "visible behind the last key"
    return shown[:, :, :seqlen_q, :seqlen_k]


def bits_of(tile: Tensor) -> Tensor:
    """(128, 128), bool, of a tile: bit i of word w of a row is key 32 * w + i."""
    rows = [[(word >> bit) & 1 for word in row for bit in range(32)] for row in tile.tolist()]
    return torch.tensor(rows, dtype=torch.bool)


def launch_order(mask: BlockMask) -> Tensor:
    """(batch or 1, key heads or 1, blocks_k): blocks of keys as they are launched."""
    columns = tables_of(mask).columns
    assert columns is not None
    return columns.order


def columns_spelled_out(tables: BlockTables, block_q: int) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
    """The entries of each column, in blocks of 64 or 128 queries: (batch entry, head, key block) to its lists."""
    assert tables.columns is not None
    spans = tables.columns.spans[0 if block_q == 64 else 1]
    found: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
    for place in torch.cartesian_prod(*map(torch.arange, spans.shape[:3])).tolist():
        start, count = spans[tuple(place)].tolist()
        found[tuple(place)] = [tuple(entry) for entry in tables.columns.entries[start : start + count].tolist()]
    return found


def tables_of(mask: BlockMask, **options: Any) -> BlockTables:
    """Tables on the CPU."""
    return mask.tables(torch.device("cpu"), backward=True, **options)


def masked(call: Call, mask: BlockMask, shown: Tensor) -> Call:
    """The call under a mask, which shows these scores of all entries and heads, unless ``shown`` has them apart."""
    return replace(call, block_mask=mask, shown=shown[(None,) * (4 - shown.ndim)].to(call.q.device))


def with_block_mask(
    call: Call,
    draw: random.Random,
    kind: str | None = None,
    *,
    sets: tuple[int, int] | None = None,
    least: float = 0.0,
    any_order: bool = False,
) -> Call:
    """The call under a random mask.

    Args:
        call: without a block mask.
        draw: the source of randomness.
        kind: one of KINDS, or any, also combined.
        sets: entries and heads that it has apart; by default one for each, one for all, or anything between.
        least: the share of scores that it shows at least.
        any_order: whether it is launched in any order (``with_any_order``).
    """
    (rows_q, nheads), (rows_k, nheads_k) = (x.shape[-3:-1] for x in (call.q, call.k))
    batch = 1 if call.cu_seqlens_q is not None else call.q.shape[0]
    device = call.q.device.type
    while True:
        apart = sets or (draw.choice([1, batch]), draw.choice([1, nheads, nheads_k]))
        made = random_mask(rows_q, rows_k, draw, apart) if kind is None else KINDS[kind](rows_q, rows_k, draw, apart)
        if not made.shown.numel() or made.shown.float().mean() >= least:
            mask = made.mask if device == "cpu" else on_device(made, device)
            return masked(call, with_any_order(mask, draw, nheads_k, device) if any_order else mask, made.shown)


def with_selection(call: Call, indices: Tensor, block: int) -> Call:
    """A call whose queries select key blocks.

    Args:
        call: without a block mask.
        indices: see ``BlockMask.from_selection``.
        block: keys of a block.
    """
    mask = BlockMask.from_selection(indices, block=block, seqlen_k=call.k.shape[-3])
    by_head = indices.transpose(0, 1)[None] if indices.ndim == 3 else indices
    shown = torch.zeros(*by_head.shape[:3], call.k.shape[-3], dtype=torch.bool, device=indices.device)
    for b, rows_q, rows_k in call.sequences():
        entry = 0 if b is None or len(shown) == 1 else b
        length = rows_k.stop - rows_k.start
        of_key = torch.arange(length, device=indices.device) // block
        # Entries that share indices have other lengths, and see less of the longest one's.
        shown[entry, :, rows_q, rows_k] |= (by_head[entry, :, rows_q, :, None] == of_key).any(2)
    return replace(call, block_mask=mask, shown=shown)


def random_selection(call: Call, rng: random.Random, block: int, top: int) -> Call:
    """A call whose queries select some blocks: several times, in any order, beyond the keys, or nothing."""
    packed = call.cu_seqlens_q is not None
    (rows, nheads), (keys, nheads_k) = (x.shape[-3:-1] for x in (call.q, call.k))
    heads, generator = rng.choice([1, nheads_k, nheads]), torch.Generator().manual_seed(rng.getrandbits(32))
    shape = (rows, heads, top) if packed else (rng.choice([1, len(call.q)]), heads, rows, top)
    indices = torch.randint(-1, -(-keys // block) + 1, shape, generator=generator)
    nothing = torch.rand(shape[:-1], generator=generator) < 0.1
    indices = indices.masked_fill(nothing[..., None], -rng.choice([1, 2**31])).to(call.q.device)
    return with_selection(call, indices if rng.random() < 0.5 else indices.clamp(-(2**31)).int(), block)


def assert_masks_are_captured(
    backend: str, make: Callable[[], BlockMask], change: Callable[[], object], **options: Any
) -> None:
    """The host never waits in calls of 512 rows with a mask that each of them makes, and graphs capture them."""
    tensors = [torch.randn(1, 512, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2, 2)]
    dout = torch.randn_like(tensors[0])

    def both(deterministic: bool = True) -> tuple[Tensor, ...]:
        q, k, v = (x.detach().requires_grad_() for x in tensors)  # leaves of this stream
        asked: dict[str, Any] = {"deterministic": deterministic, "backend": backend, **options}
        return with_gradients(flash_attn_func(q, k, v, block_mask=make(), **asked), (q, k, v), dout)

    both(False)
    assert synchronisations(lambda: both(False)) == 0
    assert_captured(both, change)


def as_if_captured() -> Any:
    """A context in which masks find a CUDA graph that captures."""
    return patch("flash_attn_cute.runtime.kept.is_captured", lambda device: True)


def equal_tables(*masks: BlockMask) -> bool:
    """Whether rows and columns are equal."""
    first, *others = map(tables_of, masks)
    return all(are_equal(first, other) for other in others)


def are_equal(one: BlockTables, other: BlockTables) -> bool:
    """Whether all tables are equal, and the same ones are there."""
    pairs = zip(one.flat(), other.flat(), strict=True)
    return all(x is y if x is None or y is None else torch.equal(x, y) for x, y in pairs)
