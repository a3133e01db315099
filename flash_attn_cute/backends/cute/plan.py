"""Plans of launches: from a spec and shapes to a configuration and to numbers, without tensors.

Pure functions, which need neither a GPU nor a compiler.
"""

import math
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import torch

from flash_attn_cute.backends.packing import needs_intervals
from flash_attn_cute.kernels.arguments import (
    BackwardNumbers,
    BiasGradientNumbers,
    ColumnSumsNumbers,
    ForwardNumbers,
    described,
    workspace_bytes,
)
from flash_attn_cute.kernels.backward import MaskSizes, PassSizes
from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.registry import Architecture, pass_of
from flash_attn_cute.problem.block_tables import ANY_NUMBER, most_with_half_columns
from flash_attn_cute.problem.spec import AttentionSpec
from flash_attn_cute.sparsity.dq_order.turns import BYTES_IN_FLIGHT, BYTES_IN_FLIGHT_WITH_M_BLOCK_ORDER

DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
FEW_QUERIES = 64  # at most as many of a sequence, and heads of a group share a tile

# What the heads that run at the same time read again and again: what fits the L2 cache beside everything else.
_CACHE_BYTES_FORWARD = 40_000_000
# At the end of a backward pass in no order more run together: their longest tiles come first, their shortest end it.
_CACHE_BYTES_BACKWARD_LAST = 40_000_000
# Query heads of a group whose dK and dV a tile sums, or a divisor of that: of more, too much would have to stay in the
# cache, and of fewer, more is added up in global memory.
_HEADS_A_TILE = 2
# Gradients of scores, which are stored to be summed for a bias that batch entries or heads share. Of more bytes, a
# kernel computes them again.
_BYTES_OF_GRADIENTS = 1 << 31
_FEW_SPLITS = 16  # of what a tile of a bias's gradient is the sum of: so many sums are added up in no time
# Of dS in a workspace: 3 GiB (``kernels.common.ds_cells``). In chunks of 1 GiB passes of 2 GiB took 7 to 17 % longer:
# at the ends of kernels CTAs run out of tiles, and fewer heads fit into a section. Kernels can take less than 8 GiB, as
# they count its numbers of 4 bytes in 32 bits.
_CELLS = 3 << 17
_NEARLY_ZERO = 1e-30  # a scale that is none: its product with infinity is infinite, in float32, too


# What shares an element of a bias: nothing, batch entries or heads, at least the queries, or the keys (and others).
BiasGradientOf = Literal["scores", "shared", "keys", "other"]


class ScoreLayout(NamedTuple):
    """Layout of mask and bias, which have an element for every score; the defaults stand for neither."""

    rows_a_slot: int = 1  # query rows of an entry of theirs; matters to packed calls alone
    float32_bias: bool = False
    strided_bias: bool = False  # its keys do not follow each other in memory
    paired_bias: bool = False  # two of an even key and the next lie in one aligned word
    uniform_bias: bool = False  # the same for all queries
    tiled_bias: bool = False  # its rows, and those of a gradient like it, begin at multiples of 16 bytes
    gradient: BiasGradientOf | None = None  # None: the bias has none
    mask_keys: int = 1  # of the mask; at least 1
    mask_varies: tuple[bool, bool, bool] = (False, False, False)  # over the batch, heads and queries
    block_lists: tuple[int, int] = (1, 1)  # of a block mask, over the batch and heads: 1, or those that differ
    block_orders: tuple[int, int] = (1, 1)  # its launch orders, over the batch and key heads
    half_entries: int = 0  # of its half columns; 0 if it has columns of 128 keys
    intervals: bool = False  # beside it each row sees one interval alone

    def mask_blocks(self, keys: int) -> int:
        """Blocks of so many keys of the mask."""
        return -(-self.mask_keys // keys)


class Shapes(NamedTuple):
    """Input of a plan besides the spec: shapes of q and k, as kernels get them, and what else comes with them."""

    q: tuple[int, ...]  # (batch, seqlen_q, heads, d), or packed (total_q, heads, d)
    k: tuple[int, ...]
    num_sequences: int  # of packed calls, else 0
    max_seqlen_q: int
    has_dlse: bool = False
    scores: ScoreLayout = ScoreLayout()

    @property
    def packed(self) -> bool:
        """Whether the kernels get packed sequences; they may where the user has given a dense batch."""
        return len(self.q) == 3

    def rows_a_sequence(self, spec: AttentionSpec, shape: tuple[int, ...]) -> int:
        """Rows of a sequence on average, from the shape of q or k; 0, as if not known, for an invariant call."""
        if spec.packing_invariant:
            return 0
        return shape[-3] // max(1, self.num_sequences) if self.packed else shape[-3]


class Plan(NamedTuple):
    """Plan of a pass."""

    config: Any
    numbers: Any  # of ``kernels.arguments``
    workspace_size: int = 0  # bytes


class BiasGradientPlan(NamedTuple):
    """Plan of the gradient of a call's bias."""

    config: Any
    numbers: BiasGradientNumbers
    tables_size: int  # bytes; none without a mask
    sums_size: int  # bytes; none, if a tile of the gradient is one CTA's


def takes_tiles(config: Any) -> bool:
    """Whether CTAs of a configuration's main kernel take tiles from a counter."""
    next_tile = described(pass_of(config).arguments).get("mNextTile")
    return next_tile is not None and next_tile.is_given(config)


def features_of(spec: AttentionSpec, shapes: Shapes) -> Features:
    """Features that a call asks of the kernels of either pass. A tensor ``x`` that it has is the flag of that name."""
    names = (flag.name for flag in fields(Features))
    scores = shapes.scores
    return Features(
        packed=shapes.packed,
        # What is made of a mask has the window in it.
        left=spec.window_left is not None and not spec.has_mask,
        right=spec.window_right is not None and not spec.has_mask,
        softcap=spec.softcap > 0,
        dlse=shapes.has_dlse,
        dbias=scores.gradient == "scores" and _writes_dbias(spec, scores),
        dbias_of_scores=_stores_dbias(spec, shapes),
        dbias_of_keys=_sums_dbias(spec, shapes),
        tiled_bias=scores.tiled_bias and not _has_neighbours(spec),
        float32_bias=scores.float32_bias,
        # A mask with a row for each query looks like one row for all if there is a single query.
        uniform_mask=not (spec.packing_invariant or scores.mask_varies[2] or _has_window(spec)) and spec.has_mask,
        uniform_bias=scores.uniform_bias,
        strided_bias=scores.strided_bias,
        half_blocks=spec.half_blocks,
        half_columns=scores.half_entries > 0,
        stored_ds=_chunks_of(spec, shapes) is not None,
        intervals=scores.intervals,
        paired_bias=scores.paired_bias,
        grouped=spec.nheads > spec.nheads_k,
        deterministic=spec.deterministic,
        wide=spec.wide,
        residual=spec.precise_gradients,
        max_logits=spec.max_logits,
        zero_padding=spec.zero_padding,
        **{name: getattr(spec, f"has_{name}") for name in names if hasattr(spec, f"has_{name}")},
    )


def given(spec: AttentionSpec, shapes: Shapes) -> tuple[str, int, int, Features]:
    """Input of ``configure`` of every pass (``kernels.registry.Pass``)."""
    return DTYPES[spec.dtype], spec.head_dim, spec.head_dim_v, features_of(spec, shapes)


def _has_neighbours(spec: AttentionSpec) -> bool:
    """Whether there may be documents beside one whose bits must not depend on them.

    How long the rows of a bias are, and so how they are loaded and in which tiles, follows from the longest document.
    """
    return spec.packing_invariant or (spec.packed and spec.deterministic)


def _writes_dbias(spec: AttentionSpec, scores: ScoreLayout) -> bool:
    """Whether a backward kernel can write every score's gradient: if it is what it computes, rounded to that dtype."""
    return not (scores.float32_bias or spec.softcap)


def _stores_dbias(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Whether a backward kernel stores every score's gradient for a bias that batch entries or heads share.

    It does where it comes to all scores: others would have to be zeroed.
    """
    scores = shapes.scores
    comes_to_all = not (spec.has_mask or spec.has_block_mask or _has_window(spec) or shapes.packed)
    num_bytes = 2 * spec.nheads * math.prod(shapes.q[:-2]) * shapes.k[-3]
    return (
        scores.gradient == "shared"
        and scores.tiled_bias
        and comes_to_all
        and not spec.packing_invariant
        and num_bytes <= _BYTES_OF_GRADIENTS
        and _writes_dbias(spec, scores)
    )


def _sums_dbias(spec: AttentionSpec, shapes: Shapes) -> bool:
    """Whether the backward kernel sums the gradients of each key's scores: each tile is then of one head."""
    is_alone = spec.nheads == spec.nheads_k and not (shapes.packed or spec.packing_invariant)
    return shapes.scores.gradient == "keys" and is_alone and not spec.softcap


def plan_forward(architecture: Architecture, spec: AttentionSpec, shapes: Shapes, num_sms: int) -> Plan:
    """The plan of a forward call, on a GPU of so many SMs."""
    # Heads of a group share a tile where queries alone would leave half of it empty.
    group = spec.nheads // spec.nheads_k
    group = group if shapes.max_seqlen_q <= FEW_QUERIES and 64 % group == 0 and not spec.has_block_mask else 1
    queries, window = shapes.rows_a_sequence(spec, shapes.q), _keys_of_window(spec)
    configure = architecture.passes["forward"].configure
    config = configure(*given(spec, shapes), group=group, queries=queries, window=window)
    heads = spec.nheads // config.group
    bytes_a_head = 2 * shapes.k[-3] * (spec.head_dim + spec.head_dim_v)
    at_once = max(1, _CACHE_BYTES_FORWARD // max(1, bytes_a_head)) * (heads // spec.nheads_k)
    heads_in_cache = _in_equal_sections(heads * math.prod(shapes.q[:-3]), at_once)
    queries = config.mask_tile.queries
    tiles_q = max(1, shapes.q[-3] // queries + shapes.num_sequences) if shapes.packed else -(-shapes.q[-3] // queries)
    sharing = _sharing(spec, shapes, heads, tiles_q)
    numbers = ForwardNumbers(**_numbers(spec, shapes, sharing), heads_in_cache=heads_in_cache, num_sms=num_sms)
    size = 0
    if spec.has_mask:
        blocks = shapes.scores.mask_blocks(config.tile_n)
        size = workspace_bytes(config.mask_tile.parts_with_lists(math.prod(sharing), blocks))
    return Plan(config, numbers, size)


def plan_column_sums(architecture: Architecture, spec: AttentionSpec, shapes: Shapes, num_sms: int) -> Plan:
    """The plan of a pass of column sums, on a GPU of so many SMs."""
    config = architecture.passes["column_sums"].configure(*given(spec, shapes))
    at_once = max(1, _CACHE_BYTES_FORWARD // max(1, 2 * shapes.q[-3] * spec.head_dim))
    of_scores = numbers_of(spec, shapes)
    numbers = ColumnSumsNumbers(
        **{name: of_scores[name] for name in ColumnSumsNumbers._fields if name in of_scores},
        heads_in_cache=_in_equal_sections(spec.nheads * math.prod(shapes.q[:-3]), at_once),
        num_sms=num_sms,
    )
    return Plan(config, numbers)


def plan_backward(architecture: Architecture, spec: AttentionSpec, shapes: Shapes, num_sms: int) -> Plan:
    """The plan of a backward call, on a GPU of so many SMs."""
    config = architecture.passes["backward"].configure(
        *given(spec, shapes),
        keys=shapes.rows_a_sequence(spec, shapes.k),
        window=_keys_of_window(spec),
        low_contention=spec.low_contention,
    )
    num_m_blocks, num_n_blocks = (
        shape[-3] // rows + shapes.num_sequences if shapes.packed else shape[0] * -(-shape[-3] // rows)
        for shape, rows in ((shapes.q, config.tile_m), (shapes.k, config.tile_n))
    )
    longest = max(1, shapes.max_seqlen_q)
    group = spec.nheads // spec.nheads_k
    heads_a_tile = _heads_a_tile(spec) if config.sums_heads else 1
    sums = 0 if config.stores_dS else 4 * config.tile_d
    bytes_a_head = heads_a_tile * longest * (2 * (spec.head_dim + spec.head_dim_v) + sums)
    has_order = config.in_order and spec.has_m_block_order
    heads_in_cache = max(1, (BYTES_IN_FLIGHT_WITH_M_BLOCK_ORDER if has_order else BYTES_IN_FLIGHT) // bytes_a_head)
    if config.in_order and (spec.window_right is None or config.reverses_last):
        # Where all tiles of a head start with the same queries, one is best begun when the one before has passed its
        # first turn on, two and a half steps later. Of all that are under way, one a head begins in so many steps.
        # Dense causal passes gain by as many; packed ones and grouped heads lose by more than the cache has room for.
        tiles_under_way = num_sms // config.ctas_a_tile
        steps_a_tile = heads_a_tile * -(-longest // config.tile_m)
        heads_in_cache = max(heads_in_cache, -(-5 * tiles_under_way // (2 * steps_a_tile)))
    # Of packed sequences the first heads of all groups have sections of their own, and so on.
    heads = spec.nheads_k if shapes.packed else spec.nheads // heads_a_tile * shapes.q[0]
    heads_in_cache = heads_in_last = min(heads_in_cache, heads)
    if not config.in_order:
        heads_in_last = max(heads_in_last, _CACHE_BYTES_BACKWARD_LAST // bytes_a_head)
    chunks = _chunks_of(spec, shapes) if config.stores_dS else None
    numbers_of_cells: dict[str, int | None] = dict.fromkeys(("num_cells", "cells_a_chunk", "num_chunks"))
    if chunks is not None:
        if chunks.are_several:
            heads_in_cache = min(heads_in_cache, chunks.most_heads)
            heads_in_last = heads % heads_in_cache  # they have whole sections
        numbers_of_cells |= chunks.numbers(heads_in_cache)
    sections = max(0, heads - heads_in_last) // heads_in_cache
    if config.reverses_last and spec.packing_invariant:
        sections = heads  # more than there are: no head is in a last section, which goes the other way round
    tiles_q = num_m_blocks if shapes.packed else -(-shapes.q[-3] // config.tile_m)
    # Rows behind the last query have to be hidden from a last block: anything may stand where their bias would.
    is_ragged = spec.has_bias and shapes.q[-3] % config.tile_m > 0
    sharing = _sharing(spec, shapes, spec.nheads, tiles_q, by_tile=is_ragged)
    numbers = BackwardNumbers(
        **_numbers(spec, shapes, sharing),
        num_m_blocks=num_m_blocks,
        num_n_blocks=num_n_blocks,
        heads_in_cache=heads_in_cache,
        orders_batch=shapes.scores.block_orders[0] if spec.has_block_mask else None,
        orders_heads=shapes.scores.block_orders[1] if spec.has_block_mask else None,
        sections=sections,
        heads_a_tile=heads_a_tile,
        num_sms=num_sms,
        **numbers_of_cells,
    )
    # No sums of dK and dV are left to others if each tile sums over all heads of a group.
    shares = group > heads_a_tile
    mask = None
    if spec.has_mask:
        blocks = shapes.scores.mask_blocks(config.tile_n)
        mask = MaskSizes(tiles_q, blocks, num_n_blocks if shapes.packed else blocks)
    sizes = PassSizes(numbers, shapes.q[0], spec.nheads, spec.nheads_k, mask)
    return Plan(config, numbers, config.workspace_size(sizes, shares=shares))


class _Chunks(NamedTuple):
    """Chunks of heads of which dS of visible blocks of 64 x 64 is in a workspace at a time (``common.ds_cells``)."""

    most: int  # blocks of the pass, each of which needs a cell
    of_heads: int  # of the heads of a tile, at the most

    @property
    def are_several(self) -> bool:
        """Whether one does not suffice."""
        return self.most > _CELLS

    @property
    def most_heads(self) -> int:
        """Heads of tiles of a section at the most, if there are several chunks: it takes half of the workspace."""
        return _CELLS // (2 * self.of_heads)

    def numbers(self, heads: int) -> dict[str, int]:
        """Numbers of ``BackwardNumbers`` for sections of so many heads of tiles.

        The last section of a chunk may begin with the last of its cells.
        """
        of_section = heads * self.of_heads if self.are_several else 0
        num = -(-self.most // (_CELLS - of_section))
        a_chunk = -(-self.most // num)
        return {"num_cells": a_chunk + of_section, "cells_a_chunk": a_chunk, "num_chunks": num}


def _chunks_of(spec: AttentionSpec, shapes: Shapes) -> _Chunks | None:
    """Chunks of a call whose block mask has half columns, in which dS is stored.

    None if the mask has none, or dS of a head no room.
    """
    entries = shapes.scores.half_entries
    if not entries:
        return None
    most = entries * (shapes.q[0] * spec.nheads // math.prod(shapes.scores.block_lists))
    chunks = _Chunks(most, _heads_a_tile(spec) * min(entries, spec.most_halves))
    return None if chunks.are_several and not chunks.most_heads else chunks


def _heads_a_tile(spec: AttentionSpec) -> int:
    """Query heads that a tile of keys comes to, where it sums their dK and dV."""
    return math.gcd(spec.nheads // spec.nheads_k, _HEADS_A_TILE)


def rounded_up(entries: int) -> int:
    """A number of entries rounded up by 1/32 at the most, so that masks with nearly as many have one plan."""
    step = 1 << max(0, entries.bit_length() - 6)
    return -(-entries // step) * step


def most_listed(
    architecture: Architecture, spec: AttentionSpec, batch: int, sizes: tuple[int, int, int, int], made_of_64: bool
) -> int:
    """Blocks of 128 x 128 that a mask may list for a backward pass to read half columns of it.

    The choice between columns of 64 and of 128 keys, made once and before either is there. A mask of blocks of 64 has
    half columns wherever a kernel reads them. Others have them where dS is stored in place of a sum in fixed point.

    Args:
        architecture: whose kernels.
        spec: of the call.
        batch: its entries.
        sizes: of the mask: batch entries, heads, seqlen_q and seqlen_k.
        made_of_64: whether the mask is made of blocks of 64 keys.
    """
    if not spec.has_block_mask:
        return 0
    features = Features(
        block_mask=True,
        half_columns=True,
        stored_ds=True,
        deterministic=spec.deterministic,
        bias=spec.has_bias,
        packed=spec.packed,
        intervals=needs_intervals(spec),
    )
    configure = architecture.passes["backward"].configure
    config = configure(DTYPES[spec.dtype], spec.head_dim, spec.head_dim_v, features, low_contention=spec.low_contention)
    if made_of_64:
        return ANY_NUMBER if config.features.half_columns else 0
    if not (config.stores_dS and spec.deterministic) or spec.half_blocks:
        return 0
    most = most_with_half_columns(*sizes)
    heads = _heads_a_tile(spec)
    if 2 * heads * spec.most_halves <= _CELLS:
        return most
    # So large a head may need more room than there is: all of dS has to be one chunk, or each of its lists half of one.
    room = max(_CELLS // max(1, batch * spec.nheads // (sizes[0] * sizes[1])), _CELLS // (2 * heads))
    return min(most, room * 8 // 33)  # of four blocks of 64 x 64 each, whose number is rounded up


def plan_bias_gradient(
    architecture: Architecture,
    spec: AttentionSpec,
    shapes: Shapes,
    backward: Plan,
    slots: tuple[int, int],
    bias_shape: tuple[int, ...],
    num_sms: int,
) -> BiasGradientPlan:
    """The plan of a bias's gradient behind a backward pass.

    Args:
        architecture: whose kernels.
        spec: of the call.
        shapes: as the backward pass had them.
        backward: the plan of that pass.
        slots: entries of a dense batch that the kernels get packed, and sequences of each; (0, 0) of other calls.
        bias_shape: of the bias as the user gave it, with four dimensions.
        num_sms: of the GPU.
    """
    configure = architecture.passes["bias_gradient"].configure
    options = given(spec, shapes)
    config = configure(*options)
    if slots[0]:
        entries, blocks = slots[0], -(-shapes.scores.rows_a_slot // config.tile_m)
    elif shapes.packed:
        entries, blocks = 1, shapes.q[-3] // config.tile_m + shapes.num_sequences + 2
    else:
        entries, blocks = shapes.q[0], -(-shapes.q[-3] // config.tile_m)
    sums_batch, sums_queries, sums_keys = (bias_shape[i] == 1 for i in (0, 2, 3))
    n_blocks = -(-bias_shape[3] // config.tile_n)
    owners = (1 if sums_batch else entries) * (1 if sums_queries else blocks) * bias_shape[1] * n_blocks
    pieces = spec.nheads // bias_shape[1] * (entries if sums_batch else 1) * (blocks if sums_queries else 1)
    # How many split a sum, and so its order, follows from all tiles of a call.
    splits = 1 if spec.packing_invariant else _splits(owners, pieces, num_sms)
    config = configure(*options, split=splits > 1)
    rows = entries * blocks if shapes.packed else blocks
    sharing = _sharing(spec, shapes, spec.nheads, rows)
    numbers = BiasGradientNumbers(
        **_numbers(spec, shapes, sharing),
        num_m_blocks=backward.numbers.num_m_blocks,
        entries=slots[0],
        sequences_an_entry=slots[1],
        sums_batch=int(sums_batch),
        sums_queries=int(sums_queries),
        sums_keys=int(sums_keys),
        splits=splits,
    )
    tables = sums = 0
    if spec.has_mask:
        tables = workspace_bytes(config.mask_tile.parts(math.prod(sharing), shapes.scores.mask_blocks(config.tile_n)))
    if splits > 1:
        sums = 4 * owners * splits * config.tile_m * config.tile_n
    return BiasGradientPlan(config, numbers, tables, sums)


def _splits(owners: int, pieces: int, num_sms: int) -> int:
    """How many CTAs share the pieces of a tile: where tiles are few, as many as make the most of the SMs.

    Each leaves 64 KB of sums, so there are at most two an SM. One CTA adds those of a tile up, one after the other:
    many are only worth it where each CTA has at least as many pieces.
    """
    most = max(_FEW_SPLITS, math.isqrt(pieces))
    best, best_time = 1, float(-(-owners // num_sms))
    for splits in range(2, min(most, pieces // 2, 2 * num_sms // owners) + 1):
        time = -(-owners * splits // num_sms) / splits
        if time < 0.95 * best_time:
            best, best_time = splits, time
    return best


def _sharing(
    spec: AttentionSpec, shapes: Shapes, heads: int, tiles_q: int, *, by_tile: bool = False
) -> tuple[int, int, int]:
    """How many lists of blocks there are over the batch, heads and tiles of queries; 1 where all share them.

    ``by_tile``: tiles of queries share none, whatever they see.
    """
    by_batch, by_head, by_query = shapes.scores.mask_varies
    if spec.has_block_mask:
        return *shapes.scores.block_lists, tiles_q
    if shapes.packed:
        return 1, heads if by_head else 1, tiles_q
    by_tile = by_tile or by_query or _has_window(spec)
    return shapes.q[0] if by_batch else 1, heads if by_head else 1, tiles_q if by_tile else 1


def _has_window(spec: AttentionSpec) -> bool:
    return spec.window_left is not None or spec.window_right is not None


def _keys_of_window(spec: AttentionSpec) -> int | None:
    """Number of keys that a query attends to, if a window bounds both sides."""
    if spec.window_left is None or spec.window_right is None:
        return None
    return spec.window_left + spec.window_right + 1


def numbers_of(spec: AttentionSpec, shapes: Shapes) -> dict[str, float]:
    """Numbers of scores, which all passes are given."""
    # No window need be wider than there are rows, and the kernels add positions to it in 32 bits.
    return {
        "softmax_scale": spec.softmax_scale if abs(spec.softmax_scale) > _NEARLY_ZERO else _NEARLY_ZERO,
        "softcap": spec.softcap,
        "window_left": shapes.k[-3] if spec.window_left is None else min(spec.window_left, shapes.k[-3]),
        "window_right": shapes.q[-3] if spec.window_right is None else min(spec.window_right, shapes.q[-3]),
    }


def _numbers(spec: AttentionSpec, shapes: Shapes, sharing: tuple[int, int, int]) -> dict[str, float | None]:
    """Numbers that all passes over tiles of queries or of keys are given."""
    lists = sharing if spec.has_mask or spec.has_block_mask else (None, None, None)
    return {
        **numbers_of(spec, shapes),
        "rows_a_slot": shapes.scores.rows_a_slot,
        **dict(zip(("lists_batch", "lists_heads", "lists_tiles"), lists, strict=True)),
        "lists_group": spec.nheads // sharing[1] if spec.has_block_mask else None,
    }


def _in_equal_sections(heads: int, at_once: int) -> int:
    """How many heads run together, if they are to be about so many: all sections of the same size.

    A small last one would start its longest tiles when the others have finished.
    """
    sections = -(-heads // at_once)
    return -(-heads // sections)
