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
gradients are like what they are of. Mask and bias are views of the user's tensors, expanded by strides of 0; keys count
from the start of each sequence. Those of a dense batch stay dense if the kernels get it packed: a slot of
``rows_a_slot`` rows is an entry.
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


Rows = Annotated[Any, Argument("", rank=4, align=16)]  # as TMA can read them
Result = Annotated[Any, Argument("", rank=4, align=16, float32_if="features.wide")]
Residuals = Annotated[Any, Argument("Int8", rank=4, align=16, when="features.residual")]
RowSums = Annotated[Any, Argument("Float32", rank=4, align=16)]
RowNumbers = Annotated[Any, Argument("Float32", rank=3)]
KeyNumbers = Annotated[Any, Argument("Float32", rank=3, when="features.dbias_of_keys")]
DLSE = Annotated[Any, Argument("Float32", rank=3, when="features.dlse")]
Float = Annotated[Any, Argument("Float32")]
Int = Annotated[Any, Argument("Int32")]
IntOfLists = Annotated[Any, Argument("Int32", when="features.listed")]
IntOfBlocks = Annotated[Any, Argument("Int32", when="features.block_mask")]
IntOfCells = Annotated[Any, Argument("Int32", when="stores_dS")]
IntOfKeyBits = Annotated[Any, Argument("Int32", when="key_bits")]
MaxLogits = Annotated[Any, Argument("Float32", rank=1, when="features.max_logits")]  # (heads,), -inf before; raised
Sink = Annotated[Any, Argument("Float32", rank=1, when="features.sink")]  # (heads,)
Offsets = Annotated[Any, Argument("Int32", rank=1, when="features.packed")]
UsedQ = Annotated[Any, Argument("Int32", rank=1, when="features.seqused_q")]
UsedK = Annotated[Any, Argument("Int32", rank=1, when="features.seqused_k")]
Counters = Annotated[Any, Argument("Int32", rank=1)]  # of a stream
Table = Annotated[Any, Argument("Int32", rank=1, when="features.block_mask")]
BitTiles = Annotated[Any, Argument("Int32", rank=1, align=16, when="features.block_mask")]
Intervals = Annotated[Any, Argument("Int32", rank=1, align=8, when="features.intervals")]
Bits = Annotated[Any, Argument("Int32", rank=1, align=PART_ALIGN, wide=True, when="reorders_bits")]
Bytes = Annotated[Any, Argument("Uint8", rank=1, align=PART_ALIGN, wide=True)]
MaskBytes = Annotated[Any, Argument("Uint8", rank=1, align=PART_ALIGN, wide=True, when="features.mask")]
SplitBytes = Annotated[Any, Argument("Uint8", rank=1, align=PART_ALIGN, wide=True, when="split")]
_SCORES = Argument("", rank=4, of_scores=True, strided=True)
_BIAS = replace(_SCORES, float32_if="features.float32_bias", when="features.bias")
Mask = Annotated[Any, replace(_SCORES, dtype="Uint8", when="features.mask")]  # 0: hidden
AnyBias = Annotated[Any, _BIAS]
Bias = Annotated[Any, replace(_BIAS, strided="features.strided_bias")]
Selected = Annotated[Any, replace(_SCORES, dtype="Int32")]


class BlockArguments(NamedTuple):
    """Tables of a block mask (``block_tables.BlockTables``), flattened.

    Forward passes and those of a bias's gradient read rows, backward passes columns.
    """

    mSpans: Table  # (lists, first entry and how many)
    mEntries: Table  # (entries, block and tile; backward also the turn)
    mTiles: BitTiles  # (tiles, 128 queries, 4 words)
    mBits: Bits  # room for the same in the order of registers


class ForwardNumbers(NamedTuple):
    """Numbers of a forward pass that a plan fixes before there are tensors."""

    softmax_scale: Float  # not 0: a product with infinity must be infinite
    softcap: Float
    window_left: Int
    window_right: Int
    rows_a_slot: Int  # query rows of an entry of mask and bias
    lists_batch: IntOfLists  # lists of blocks there are over the batch, heads and tiles of queries;
    lists_heads: IntOfLists  # 1 where all share them
    lists_tiles: IntOfLists
    lists_group: IntOfBlocks  # heads that follow each other and share the lists of a block mask
    heads_in_cache: Int  # heads whose tiles run together
    num_sms: Int  # as many CTAs, where a CTA takes several tiles


class ForwardArguments(NamedTuple):
    """Arguments of a forward pass."""

    mQ: Rows
    mK: Rows
    mV: Rows
    mO: Result
    mResidual: Residuals
    mLSE: RowNumbers
    mMaxLogits: MaxLogits
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mSink: Sink
    mMask: Mask
    mBias: Bias
    mWorkspace: MaskBytes  # room for what is made of a mask
    mNextTile: Annotated[Any, Argument("Int32", rank=1, when="persistent")]  # counters of a stream; takes the first
    blocks: BlockArguments
    mIntervals: Intervals  # (batch, query, first key and that behind the last), flattened
    numbers: ForwardNumbers


class BackwardNumbers(NamedTuple):
    """Numbers of a backward pass that a plan fixes."""

    softmax_scale: Float
    softcap: Float
    window_left: Int
    window_right: Int
    rows_a_slot: Int
    lists_batch: IntOfLists
    lists_heads: IntOfLists
    lists_tiles: IntOfLists
    lists_group: IntOfBlocks
    orders_batch: IntOfBlocks  # launch orders there are over the batch and key heads, likewise
    orders_heads: IntOfBlocks
    num_m_blocks: Int  # of a head, over all sequences, in the workspace
    num_n_blocks: Int
    heads_in_cache: Int  # heads whose tiles run together: a section
    sections: Int  # of so many heads each; all that are left come together
    heads_a_tile: Int  # query heads of a group whose dK and dV a tile sums, if grouped
    num_sms: Int
    num_cells: IntOfCells  # of dS in the workspace (``common.ds_cells``)
    cells_a_chunk: IntOfCells  # in which the last section of a chunk begins
    num_chunks: IntOfCells  # of heads, at the most


class BackwardArguments(NamedTuple):
    """Arguments of a backward pass."""

    mQ: Rows
    mK: Rows
    mV: Rows
    mO: Rows
    mResidual: Residuals
    mdO: Rows
    mLSE: RowNumbers
    mdLSE: DLSE
    mdQ: Result
    mdK: Result
    mdV: Result
    mdBias: Annotated[Any, replace(_BIAS, strided=False, when="features.dbias")]
    mdBiasOfKeys: KeyNumbers  # (batch, heads, keys), zeros
    mWorkspace: Bytes  # of the configuration's ``workspace_size``; holds anything
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mMask: Mask
    mBias: AnyBias
    mNextTile: Counters  # counters of a stream: of tiles, of blocks of dQ to round, and to zero
    blocks: BlockArguments
    # Of a block mask, flattened: blocks of keys as they are launched, of batch entries and key heads that differ, and
    # how many tiles add to each block of queries, of lists that differ.
    mLaunchOrder: Table
    mContributors: Annotated[Any, Argument("Int32", rank=1, strided=True, when="features.block_mask")]
    mIntervals: Intervals  # (batch, key, first query and that behind the last), flattened
    numbers: BackwardNumbers


class BiasGradientNumbers(NamedTuple):
    """Numbers of a bias-gradient pass that a plan fixes."""

    softmax_scale: Float
    softcap: Float
    window_left: Int
    window_right: Int
    rows_a_slot: Int
    lists_batch: IntOfLists
    lists_heads: IntOfLists
    lists_tiles: IntOfLists
    lists_group: IntOfBlocks
    num_m_blocks: Int  # as in the backward pass
    entries: Int  # of a dense batch that the kernels get packed, in equal slots; else 0
    sequences_an_entry: Int  # of such a batch
    sums_batch: Int  # 1 if the bias is broadcast over the batch, else 0
    sums_queries: Int
    sums_keys: Int
    splits: Int  # CTAs a tile of the gradient


class BiasGradientArguments(NamedTuple):
    """Arguments of a bias-gradient pass, which follows the backward pass."""

    mQ: Rows
    mK: Rows
    mV: Rows
    mdO: Rows
    mWorkspace: Bytes  # of the backward pass, which begins with lse and delta
    mdBias: Annotated[Any, replace(_BIAS, strided=False, when="")]  # of the bias's own shape
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mMask: Mask
    mBias: Bias
    mTables: MaskBytes  # room for what is made of a mask
    mSums: SplitBytes  # and for the sums of CTAs that share a tile
    blocks: BlockArguments
    numbers: BiasGradientNumbers


class SelectionNumbers(NamedTuple):
    """Numbers of a forward pass in which each query selects key blocks."""

    softmax_scale: Float
    softcap: Float
    window_left: Int
    window_right: Int
    top: Int  # ranks of a query: blocks that it selects at the most
    first_row: Int  # of a launch, which is for some rows of q, in every batch entry,
    num_rows: Int
    first_unit: Int  # and some units: heads that are rows of one tile, of one batch entry
    num_units: Int
    sets_batch: Int  # selections there are over the batch and heads; 1 where all share them
    sets_heads: Int
    columns: Int  # key blocks of a set, over all sequences
    parts: Int  # blocks of the kernels' of which a selected block has keys, at the most
    block: IntOfKeyBits  # keys of a selected block
    item_picks: Int  # of an item at the most
    num_items: Int  # of a set; see ``kernels.selection.TableSizes``
    num_chunks: Int
    chunk_picks: Int


class SelectionArguments(NamedTuple):
    """Arguments of a forward pass in which each query selects key blocks.

    A pick is a query and a block that it selects; its number is ``top`` times the query's row, counted from
    ``first_row``, plus the block's rank. Sets are over the batch and heads, see ``SelectionNumbers``.
    """

    mQ: Rows
    mK: Rows
    mV: Rows
    mO: Rows
    mLSE: RowNumbers
    mMaxLogits: MaxLogits
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mSink: Sink
    mSelected: Selected  # (batch, heads, rows, top / parts), of all rows
    mTables: Bytes  # room for ``kernels.selection.table_parts``; launches for rows share it
    mWorkspace: Bytes  # of ``kernels.selection.workspace_parts``
    numbers: SelectionNumbers


class SelectionBackwardArguments(NamedTuple):
    """Arguments of a backward pass in which each query selects key blocks, in launches as the forward pass has them."""

    mQ: Rows
    mK: Rows
    mV: Rows
    mO: Rows
    mdO: Rows
    mLSE: RowNumbers
    mdLSE: DLSE
    mdQ: Rows
    mdK: RowSums  # of all launches so far; this one adds to them
    mdV: RowSums
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mSelected: Selected  # as in ``SelectionArguments``
    mTables: Bytes
    mWorkspace: Bytes  # of ``kernels.selection.backward_workspace_parts``
    numbers: SelectionNumbers


class ColumnSumsNumbers(NamedTuple):
    """Numbers of a pass of column sums that a plan fixes."""

    softmax_scale: Float
    window_left: Int
    window_right: Int
    heads_in_cache: Int  # heads whose tiles run together
    num_sms: Int


class ColumnSumsArguments(NamedTuple):
    """Arguments of a pass of column sums, which follows a forward pass."""

    mQ: Rows
    mK: Rows
    mLSE: RowNumbers
    mSums: RowNumbers  # (batch, heads, seqlen_k) or (heads, total_k), zeros before
    mCuSeqlensQ: Offsets
    mCuSeqlensK: Offsets
    mSeqUsedQ: UsedQ
    mSeqUsedK: UsedK
    mNextTile: Counters  # counters of a stream; takes the first
    numbers: ColumnSumsNumbers


def workspace_bytes(parts: dict[str, tuple[int, ...]]) -> int:
    """Bytes of a workspace whose parts, of numbers of 4 bytes, have these shapes."""
    return sum(-(-4 * math.prod(shape) // PART_ALIGN) * PART_ALIGN for shape in parts.values())


def described(arguments: type) -> dict[str, Any]:
    """Annotations of an arguments class, by field and in order: an ``Argument``, or a class of more arguments."""
    hints = get_type_hints(arguments, include_extras=True)
    return {name: hint.__metadata__[0] if hasattr(hint, "__metadata__") else hint for name, hint in hints.items()}
