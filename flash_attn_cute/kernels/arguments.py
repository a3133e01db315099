"""Launch arguments of each pass, by name: every tensor and number once.

A field's annotation says what it is. From that alone ``jit.compile`` makes fake arguments to compile with, so a new
argument, of a new kind too, is a line here, one where the backend gives it, and one where a kernel uses it. The
backend gives torch tensors and numbers, kernels see the DSL's. Needs no cutlass.

Layouts, dense and packed (n sequences):

    q               (batch, seqlen_q, heads, d)         (total_q, heads, d)
    k               (batch, seqlen_k, heads_k, d)       (total_k, heads_k, d)
    v               (batch, seqlen_k, heads_k, d_v)     (total_k, heads_k, d_v)
    lse             (batch, heads, seqlen_q)            (heads, total_q)
    cu_seqlens                                          (n + 1,)
    seqused                                             (n,)
    mask, bias      (batch, heads, seqlen_q, seqlen_k)  (1, heads, total_q, max_seqlen_k)

Out is like q with d_v, its residuals are likewise with a multiple of 32 of columns (``kernels.common.residuals``), and
gradients are like what they are of. Mask and bias are views of the user's tensors, expanded by strides of 0. Those of a
dense batch stay dense if the kernels get it packed; then ``rows_a_slot`` has its rows.
"""

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_type_hints

PART_ALIGN = 128  # bytes of which each part of a workspace takes a multiple
BLOCK = 128  # queries and keys of a block mask's blocks


@dataclass(frozen=True)
class Argument:
    """An argument, as compiled code has to know it."""

    dtype: str  # as cutlass calls it; none: the configuration's
    rank: int = 0  # 0: a number; 1: a vector; more: a tensor of a dense batch, which packed has a dimension less
    align: int = 0  # bytes of which the address and all strides but the last are multiples; none: an element's
    wide: bool = False  # its sizes may need more than 32 bits
    of_scores: bool = False  # of rank 4, packed or not
    strided: bool | str = False  # whether the last dimension has any stride, or the configuration's attribute for it
    float32_if: str = ""  # the configuration's attribute that makes it float32
    when: str = ""  # the configuration's attribute that says whether kernels take it; none: always

    def is_given(self, config: Any) -> bool:
        """Whether kernels of this configuration take it; else it is None."""
        return not self.when or bool(attrgetter(self.when)(config))


_ROWS = Argument("", rank=4, align=16)  # as TMA can read them
_RESULT = replace(_ROWS, float32_if="features.wide")
_RESIDUAL = Argument("Int8", rank=4, align=16, when="features.residual")
_SUMS = Argument("Float32", rank=4, align=16)  # of rows
_ROW_NUMBERS = Argument("Float32", rank=3)
_DLSE = replace(_ROW_NUMBERS, when="features.dlse")
_FLOAT, _INT = Argument("Float32"), Argument("Int32")
_OF_LISTS = replace(_INT, when="features.listed")
_OF_BLOCKS = replace(_INT, when="features.block_mask")
_OF_CELLS = replace(_INT, when="stores_dS")
_OF_KEY_BITS = replace(_INT, when="key_bits")
_FLOATS, _INTS = Argument("Float32", rank=1), Argument("Int32", rank=1)
_MAX_LOGITS = replace(_FLOATS, when="features.max_logits")  # (heads,), -inf before; raised
_SINK = replace(_FLOATS, when="features.sink")  # (heads,)
_OFFSETS = replace(_INTS, when="features.packed")
_USED_Q = replace(_INTS, when="features.seqused_q")
_USED_K = replace(_INTS, when="features.seqused_k")
_TABLE = replace(_INTS, when="features.block_mask")
_BITS = replace(_INTS, align=PART_ALIGN, wide=True, when="reorders_bits")
_SEEN = replace(_INTS, align=8, when="features.intervals")
_BYTES = Argument("Uint8", rank=1, align=PART_ALIGN, wide=True)
_MASK = Argument("Uint8", rank=4, of_scores=True, strided=True, when="features.mask")  # 0: hidden
_ANY_BIAS = replace(_MASK, dtype="", float32_if="features.float32_bias", when="features.bias")
_BIAS = replace(_ANY_BIAS, strided="features.strided_bias")
_DBIAS = replace(_ANY_BIAS, strided=False, when="")
_SELECTED = replace(_MASK, dtype="Int32", when="")


class BlockArguments(NamedTuple):
    """Tables of a block mask (``block_tables.BlockTables``), flattened.

    Forward passes and those of a bias's gradient read rows, backward passes columns.
    """

    mSpans: Annotated[Any, _TABLE]  # (lists, first entry and how many)
    mEntries: Annotated[Any, _TABLE]  # (entries, block and tile; backward also the turn)
    mTiles: Annotated[Any, replace(_TABLE, align=16)]  # (tiles, 128 queries, 4 words)
    mBits: Annotated[Any, _BITS]  # room for the same in the order of registers


class ForwardNumbers(NamedTuple):
    """Numbers of a forward pass that a plan fixes before there are tensors."""

    softmax_scale: Annotated[Any, _FLOAT]  # not 0: a product with infinity must be infinite
    softcap: Annotated[Any, _FLOAT]
    window_left: Annotated[Any, _INT]
    window_right: Annotated[Any, _INT]
    rows_a_slot: Annotated[Any, _INT]  # query rows of an entry of mask and bias
    lists_batch: Annotated[Any, _OF_LISTS]  # lists of blocks there are over the batch, heads and tiles of queries;
    lists_heads: Annotated[Any, _OF_LISTS]  # 1 where all share them
    lists_tiles: Annotated[Any, _OF_LISTS]
    lists_group: Annotated[Any, _OF_BLOCKS]  # heads that follow each other and share the lists of a block mask
    heads_in_cache: Annotated[Any, _INT]  # heads whose tiles run together
    num_sms: Annotated[Any, _INT]  # as many CTAs, where a CTA takes several tiles


class ForwardArguments(NamedTuple):
    """Arguments of a forward pass."""

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mV: Annotated[Any, _ROWS]
    mO: Annotated[Any, _RESULT]
    mResidual: Annotated[Any, _RESIDUAL]
    mLSE: Annotated[Any, _ROW_NUMBERS]
    mMaxLogits: Annotated[Any, _MAX_LOGITS]
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mSink: Annotated[Any, _SINK]
    mMask: Annotated[Any, _MASK]
    mBias: Annotated[Any, _BIAS]
    mWorkspace: Annotated[Any, replace(_BYTES, when="features.mask")]  # room for what is made of a mask
    mNextTile: Annotated[Any, replace(_INTS, when="persistent")]  # counters of a stream; takes the first
    blocks: BlockArguments
    mIntervals: Annotated[Any, _SEEN]  # (batch, query, first key and that behind the last), flattened
    numbers: ForwardNumbers


class BackwardNumbers(NamedTuple):
    """Numbers of a backward pass that a plan fixes."""

    softmax_scale: Annotated[Any, _FLOAT]
    softcap: Annotated[Any, _FLOAT]
    window_left: Annotated[Any, _INT]
    window_right: Annotated[Any, _INT]
    rows_a_slot: Annotated[Any, _INT]
    lists_batch: Annotated[Any, _OF_LISTS]
    lists_heads: Annotated[Any, _OF_LISTS]
    lists_tiles: Annotated[Any, _OF_LISTS]
    lists_group: Annotated[Any, _OF_BLOCKS]
    orders_batch: Annotated[Any, _OF_BLOCKS]  # launch orders there are over the batch and key heads, likewise
    orders_heads: Annotated[Any, _OF_BLOCKS]
    num_m_blocks: Annotated[Any, _INT]  # of a head, over all sequences, in the workspace
    num_n_blocks: Annotated[Any, _INT]
    heads_in_cache: Annotated[Any, _INT]  # heads whose tiles run together: a section
    sections: Annotated[Any, _INT]  # of so many heads each; all that are left come together
    heads_a_tile: Annotated[Any, _INT]  # query heads of a group whose dK and dV a tile sums, if grouped
    num_sms: Annotated[Any, _INT]
    num_cells: Annotated[Any, _OF_CELLS]  # of dS in the workspace (``common.ds_cells``)
    cells_a_chunk: Annotated[Any, _OF_CELLS]  # in which the last section of a chunk begins
    num_chunks: Annotated[Any, _OF_CELLS]  # of heads, at the most


class BackwardArguments(NamedTuple):
    """Arguments of a backward pass."""

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mV: Annotated[Any, _ROWS]
    mO: Annotated[Any, _ROWS]
    mResidual: Annotated[Any, _RESIDUAL]
    mdO: Annotated[Any, _ROWS]
    mLSE: Annotated[Any, _ROW_NUMBERS]
    mdLSE: Annotated[Any, _DLSE]
    mdQ: Annotated[Any, _RESULT]
    mdK: Annotated[Any, _RESULT]
    mdV: Annotated[Any, _RESULT]
    mdBias: Annotated[Any, replace(_DBIAS, when="features.dbias")]
    mdBiasOfKeys: Annotated[Any, replace(_ROW_NUMBERS, when="features.dbias_of_keys")]  # (batch, heads, keys), zeros
    mWorkspace: Annotated[Any, _BYTES]  # of the configuration's ``workspace_size``; holds anything
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mMask: Annotated[Any, _MASK]
    mBias: Annotated[Any, _ANY_BIAS]
    mNextTile: Annotated[Any, _INTS]  # counters of a stream: of tiles, of blocks of dQ to round, and to zero
    blocks: BlockArguments
    # Of a block mask, flattened: blocks of keys as they are launched, of batch entries and key heads that differ, and
    # how many tiles add to each block of queries, of lists that differ.
    mLaunchOrder: Annotated[Any, _TABLE]
    mContributors: Annotated[Any, replace(_TABLE, strided=True)]
    mIntervals: Annotated[Any, _SEEN]  # (batch, key, first query and that behind the last), flattened
    numbers: BackwardNumbers


class BiasGradientNumbers(NamedTuple):
    """Numbers of a bias-gradient pass that a plan fixes."""

    softmax_scale: Annotated[Any, _FLOAT]
    softcap: Annotated[Any, _FLOAT]
    window_left: Annotated[Any, _INT]
    window_right: Annotated[Any, _INT]
    rows_a_slot: Annotated[Any, _INT]
    lists_batch: Annotated[Any, _OF_LISTS]
    lists_heads: Annotated[Any, _OF_LISTS]
    lists_tiles: Annotated[Any, _OF_LISTS]
    lists_group: Annotated[Any, _OF_BLOCKS]
    num_m_blocks: Annotated[Any, _INT]  # as in the backward pass
    entries: Annotated[Any, _INT]  # of a dense batch that the kernels get packed, in equal slots; else 0
    sequences_an_entry: Annotated[Any, _INT]  # of such a batch
    sums_batch: Annotated[Any, _INT]  # 1 if the bias is broadcast over the batch, else 0
    sums_queries: Annotated[Any, _INT]
    sums_keys: Annotated[Any, _INT]
    splits: Annotated[Any, _INT]  # CTAs a tile of the gradient


class BiasGradientArguments(NamedTuple):
    """Arguments of a bias-gradient pass, which follows the backward pass."""

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mV: Annotated[Any, _ROWS]
    mdO: Annotated[Any, _ROWS]
    mWorkspace: Annotated[Any, _BYTES]  # of the backward pass, which begins with lse and delta
    mdBias: Annotated[Any, _DBIAS]  # of the bias's own shape
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mMask: Annotated[Any, _MASK]
    mBias: Annotated[Any, _BIAS]
    mTables: Annotated[Any, replace(_BYTES, when="features.mask")]  # room for what is made of a mask
    mSums: Annotated[Any, replace(_BYTES, when="split")]  # and for the sums of CTAs that share a tile
    blocks: BlockArguments
    numbers: BiasGradientNumbers


class SelectionNumbers(NamedTuple):
    """Numbers of a forward pass in which each query selects key blocks."""

    softmax_scale: Annotated[Any, _FLOAT]
    softcap: Annotated[Any, _FLOAT]
    window_left: Annotated[Any, _INT]
    window_right: Annotated[Any, _INT]
    top: Annotated[Any, _INT]  # ranks of a query: blocks that it selects at the most
    first_row: Annotated[Any, _INT]  # of a launch, which is for some rows of q, in every batch entry,
    num_rows: Annotated[Any, _INT]
    first_unit: Annotated[Any, _INT]  # and some units: heads that are rows of one tile, of one batch entry
    num_units: Annotated[Any, _INT]
    sets_batch: Annotated[Any, _INT]  # selections there are over the batch and heads; 1 where all share them
    sets_heads: Annotated[Any, _INT]
    columns: Annotated[Any, _INT]  # key blocks of a set, over all sequences
    parts: Annotated[Any, _INT]  # blocks of the kernels' of which a selected block has keys, at the most
    block: Annotated[Any, _OF_KEY_BITS]  # keys of a selected block
    item_picks: Annotated[Any, _INT]  # of an item at the most
    num_items: Annotated[Any, _INT]  # of a set; see ``kernels.selection.TableSizes``
    num_chunks: Annotated[Any, _INT]
    chunk_picks: Annotated[Any, _INT]


class SelectionArguments(NamedTuple):
    """Arguments of a forward pass in which each query selects key blocks.

    A pick is a query and a block that it selects; its number is ``top`` times the query's row, counted from
    ``first_row``, plus the block's rank. Sets are over the batch and heads, see ``SelectionNumbers``.
    """

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mV: Annotated[Any, _ROWS]
    mO: Annotated[Any, _ROWS]
    mLSE: Annotated[Any, _ROW_NUMBERS]
    mMaxLogits: Annotated[Any, _MAX_LOGITS]
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mSink: Annotated[Any, _SINK]
    mSelected: Annotated[Any, _SELECTED]  # (batch, heads, rows, top / parts), of all rows
    mTables: Annotated[Any, _BYTES]  # room for ``kernels.selection.table_parts``; launches for rows share it
    mWorkspace: Annotated[Any, _BYTES]  # of ``kernels.selection.workspace_parts``
    numbers: SelectionNumbers


class SelectionBackwardArguments(NamedTuple):
    """Arguments of a backward pass in which each query selects key blocks, in launches as the forward pass has them."""

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mV: Annotated[Any, _ROWS]
    mO: Annotated[Any, _ROWS]
    mdO: Annotated[Any, _ROWS]
    mLSE: Annotated[Any, _ROW_NUMBERS]
    mdLSE: Annotated[Any, _DLSE]
    mdQ: Annotated[Any, _ROWS]
    mdK: Annotated[Any, _SUMS]  # of all launches so far; this one adds to them
    mdV: Annotated[Any, _SUMS]
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mSelected: Annotated[Any, _SELECTED]  # as in ``SelectionArguments``
    mTables: Annotated[Any, _BYTES]
    mWorkspace: Annotated[Any, _BYTES]  # of ``kernels.selection.backward_workspace_parts``
    numbers: SelectionNumbers


class ColumnSumsNumbers(NamedTuple):
    """Numbers of a pass of column sums that a plan fixes."""

    softmax_scale: Annotated[Any, _FLOAT]
    window_left: Annotated[Any, _INT]
    window_right: Annotated[Any, _INT]
    heads_in_cache: Annotated[Any, _INT]  # heads whose tiles run together
    num_sms: Annotated[Any, _INT]


class ColumnSumsArguments(NamedTuple):
    """Arguments of a pass of column sums, which follows a forward pass."""

    mQ: Annotated[Any, _ROWS]
    mK: Annotated[Any, _ROWS]
    mLSE: Annotated[Any, _ROW_NUMBERS]
    mSums: Annotated[Any, _ROW_NUMBERS]  # (batch, heads, seqlen_k) or (heads, total_k), zeros before
    mCuSeqlensQ: Annotated[Any, _OFFSETS]
    mCuSeqlensK: Annotated[Any, _OFFSETS]
    mSeqUsedQ: Annotated[Any, _USED_Q]
    mSeqUsedK: Annotated[Any, _USED_K]
    mNextTile: Annotated[Any, _INTS]  # counters of a stream; takes the first
    numbers: ColumnSumsNumbers


def workspace_bytes(parts: dict[str, tuple[int, ...]]) -> int:
    """Bytes of a workspace whose parts, of numbers of 4 bytes, have these shapes."""
    return sum(-(-4 * math.prod(shape) // PART_ALIGN) * PART_ALIGN for shape in parts.values())


def described(arguments: type) -> dict[str, Any]:
    """Annotations of an arguments class, by field and in order: an ``Argument``, or a class of more arguments."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] if hasattr(hint, "__metadata__") else hint for name, hint in hints.items()}
