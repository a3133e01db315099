"""``BlockMask``: which queries see which keys, block by block, as an expression and as tables made of it once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute import kept, settings
from flash_attn_cute.block_tables import BlockColumns, BlockRows, BlockTables
from flash_attn_cute.dq_order import launch_orders
from flash_attn_cute.sparsity import column_tables, mask_arguments, row_tables
from flash_attn_cute.sparsity.bits import HALF, TILE
from flash_attn_cute.sparsity.indices import Indices
from flash_attn_cute.sparsity.nodes import (
    And,
    Band,
    BlockMap,
    Dense,
    Dilation,
    Documents,
    Function,
    MaskMod,
    Node,
    Or,
    Prefix,
    Sizes,
)
from flash_attn_cute.sparsity.plain import Offsets, Plain
from flash_attn_cute.sparsity.statistics import Statistics

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


_UNBUILT = (
    "block_mask: expected one that has been built, as that waits for the device, which torch.compile and CUDA graphs "
    "cannot: call its build() before"
)
_UNBUILT_TABLES = (
    "block_mask: expected one that has been built with its tables, which a window or documents need beside seqused, "
    "packed sequences, or (documents) mask and bias: call its build(tables=True) before"
)


class _Turns(NamedTuple):
    """How tiles of a mask add to dQ in turn."""

    waits_little: bool
    has_walks: bool


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Which keys each query sees, for attention that costs what the visible blocks cost.

    Made by one of the constructors below, and combined by ``&`` and ``|``: ``BlockMask.window(8192, 8192, left=2047)
    & BlockMask.documents(ids)``. None of them makes a tensor of (seqlen_q, seqlen_k). A mask is a rule; the tables that
    backends read are made of it when it is first used, on the device of that call, and kept. So make a mask once, and
    give the same object to all layers. To make them waits for the device a few times (``from_indices``: never), which
    ``build`` does ahead of torch.compile and of capturing a CUDA graph.

    Windows, and documents that follow each other, need no tables in dense calls: these become calls with
    ``window_size``, or with packed sequences. Not so in another order than the default, beside seqused, and, for
    documents, beside mask and bias or if they have fewer than 128 rows on average.

    Positions are absolute, query i and key j counted from 0, but for ``causal``, ``window``, ``prefix_lm`` and
    ``dilated``, which are aligned to the bottom right: the last query stands beside the last key. Packed calls
    take a mask over (total_q, total_k), on top of which sequences see nothing of each other.

    The idea of lists of full and partial blocks, and of a function for the elements of partial ones, is FlexAttention's
    (arXiv 2412.05496).

    Attributes:
        batch: batch entries, or 1 if it is the same for all.
        heads: query heads or key heads, or 1 if it is the same for all.
        seqlen_q: queries.
        seqlen_k: keys.
        device: where its tensors are; None if it has none, and can be used anywhere.
    """

    _node: Node
    seqlen_q: int
    seqlen_k: int
    _order: str | Tensor = "default"
    _group: int = 1
    # What has been made of it on each device. Tables without columns, and offsets, serve all orders.
    _rows: kept.Store = field(default_factory=dict)
    _tables: kept.Store = field(default_factory=dict)
    _offsets: kept.Store = field(default_factory=dict)
    # What says the same without tables; those are for whoever asks for another order.
    plain: Plain | None = field(init=False)
    _sources: kept.Sources | None = field(default=None, init=False)  # of its order
    _turns: _Turns = field(init=False)  # as its constructor tells, then as a search has found, the same on every device

    def __post_init__(self) -> None:
        """Finds out whether other arguments say the same, and what is known of waits."""
        is_default = isinstance(self._order, str) and self._order == "default"
        if isinstance(self._order, Tensor) and not torch.compiler.is_compiling():
            if self._order.is_inference():  # calls that train save it for their backward passes
                object.__setattr__(self, "_order", kept.copied(self._order))
            object.__setattr__(self, "_sources", kept.Sources({"order": [self._order]}))
        object.__setattr__(self, "plain", Plain.of(self._node, self.sizes) if is_default else None)
        object.__setattr__(self, "_turns", _Turns(is_default and self._node.is_regular, self._is_searched))

    @property
    def batch(self) -> int:
        """Batch entries, or 1."""
        return self._node.batch

    @property
    def heads(self) -> int:
        """Query heads or key heads, or 1."""
        return self._node.heads

    @property
    def device(self) -> torch.device | None:
        """That of its tensors, if it has any."""
        return self._node.device

    @property
    def sizes(self) -> Sizes:
        """Batch, heads and lengths."""
        return Sizes(self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    @property
    def order_sets(self) -> tuple[int, int]:
        """Batch entries and key heads that have launch orders of their own; 1 where they share one."""
        if isinstance(self._order, Tensor):
            return self._order.shape[0], self._order.shape[1]
        return (1, 1) if self._order == "default" else (self.batch, self.heads // self._group)

    @property
    def waits_little(self) -> bool:
        """Whether tiles of keys come to each block of queries one after the other, as far as is known.

        So it is where queries see a few runs of keys that move on with them, in the default order of launches.
        Constructors tell, or the search of the order "auto".
        """
        return self._turns.waits_little

    @property
    def has_walks(self) -> bool:
        """Whether its tiles walk as has been found for them; before a search, whether there is to be one."""
        return self._turns.has_walks

    @property
    def _is_searched(self) -> bool:
        """Whether its order is found by a search, which waits for the device."""
        return isinstance(self._order, str) and self._order in launch_orders.WAITING

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """Query i sees key j when ``j <= i + seqlen_k - seqlen_q``.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.

        Raises:
            TypeError: a length that is no int.
            ValueError: a length below 0 or above 2^31 - 1.
        """
        return cls.window(seqlen_q, seqlen_k, right=0)

    @classmethod
    def window(cls, seqlen_q: int, seqlen_k: int, *, left: int | None = None, right: int | None = None) -> BlockMask:
        """Query i sees key j when ``i + shift - left <= j <= i + shift + right``, shift = seqlen_k - seqlen_q.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            left: keys before its own position that a query sees; None or negative: all.
            right: keys behind it, likewise.

        Raises:
            TypeError: a length or side that is no int.
            ValueError: a length below 0 or above 2^31 - 1.
        """
        mask_arguments.check_lengths(seqlen_q, seqlen_k)
        shift = seqlen_k - seqlen_q
        left, right = mask_arguments.check_side("left", left), mask_arguments.check_side("right", right)
        lower, upper = None if left is None else shift - left, None if right is None else shift + right
        return cls(Band(lower, upper), seqlen_q, seqlen_k)

    @classmethod
    def documents(
        cls,
        ids: Tensor | None = None,
        ids_k: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
    ) -> BlockMask:
        """A query sees the keys of its own document, told by ids or by offsets.

        Blocks that can be ruled out by the least and the largest id that they hold are never looked at; where ids never
        decrease these are all.

        Args:
            ids: (seqlen_q,) or (batch, seqlen_q), int32 or int64: the document of each query. Negative is padding:
                whatever such rows hold reaches nothing, NaN included, unless ``|`` shows them.
            ids_k: (seqlen_k,) or (batch, seqlen_k): likewise of each key. None: ids.
            cu_seqlens: (documents + 1,), int32 or int64, in the place of ids: the offsets of the documents' queries.
                What they leave out is padding.
            cu_seqlens_k: likewise of their keys. None: cu_seqlens.
            seqlen_q: queries, given with cu_seqlens, as reading the last offset would wait for the device.
            seqlen_k: keys, likewise. None: seqlen_q.

        Raises:
            TypeError: a tensor of another dtype, or something else in its place.
            ValueError: both or neither of ids and cu_seqlens, or a wrong shape or device.
        """
        ids, ids_k = mask_arguments.ids_of(ids, ids_k, cu_seqlens, cu_seqlens_k, seqlen_q, seqlen_k)
        return cls(Documents(ids, ids_k), ids.shape[1], ids_k.shape[1])

    @classmethod
    def prefix(cls, seqlen_q: int, seqlen_k: int, length: int | Tensor) -> BlockMask:
        """All queries see the first keys, and no others; with ``|`` sinks and global tokens.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            length: keys that all see; an int, or (batch,) int32 or int64.

        Raises:
            TypeError: a length of another type or dtype, or a seqlen that is no int.
            ValueError: a wrong shape or length.
        """
        mask_arguments.check_lengths(seqlen_q, seqlen_k)
        if isinstance(length, Tensor):
            mask_arguments.check_integers("length", length, (1,), "(batch,)")
            length = kept.copied(length).long()
        elif not mask_arguments.is_int(length):
            raise TypeError(f"length: expected an int or a tensor, got {length!r}")
        return cls(Prefix(length), seqlen_q, seqlen_k)

    @classmethod
    def prefix_lm(cls, seqlen_q: int, seqlen_k: int, length: int | Tensor) -> BlockMask:
        """All queries see the prefix, and behind it what ``causal`` shows.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            length: keys of the prefix, see ``prefix``.

        Raises:
            TypeError: as ``prefix`` does.
            ValueError: likewise.
        """
        return cls.causal(seqlen_q, seqlen_k) | cls.prefix(seqlen_q, seqlen_k, length)

    @classmethod
    def dilated(
        cls, seqlen_q: int, seqlen_k: int, step: int, *, left: int | None = None, right: int | None = None
    ) -> BlockMask:
        """Of a window, every step-th key: those at a distance from the query that is a multiple of step.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            step: at least 1.
            left: see ``window``; in keys, seen or not.
            right: likewise.

        Raises:
            TypeError: a length, step or side that is no int.
            ValueError: a length below 0 or above 2^31 - 1, or a step below 1.
        """
        if not mask_arguments.is_int(step):
            raise TypeError(f"step: expected an int, got {step!r}")
        if step < 1:
            raise ValueError(f"step: expected at least 1, got {step}")
        window = cls.window(seqlen_q, seqlen_k, left=left, right=right)
        return cls(And(window._node, Dilation(step, seqlen_k - seqlen_q)), seqlen_q, seqlen_k)

    @classmethod
    def from_blocks(
        cls,
        visible: Tensor,
        block: int | tuple[int, int] = TILE,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
    ) -> BlockMask:
        """Blocks that are visible as a whole or not at all.

        Args:
            visible: ([[batch,] heads,] blocks_q, blocks_k), bool; batch and heads may be 1.
            block: queries and keys of a block; any sizes, multiples of 128 and 64 are made without partial blocks, or
                with few kinds of them.
            seqlen_q: queries, if the last block has fewer. None: all blocks are whole.
            seqlen_k: keys, likewise.

        Raises:
            TypeError: another dtype, or sizes that are no ints.
            ValueError: a wrong shape, or a length that does not come to as many blocks.
        """
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            raise TypeError(f"visible: expected a bool tensor, got {mask_arguments.told(visible)}")
        if not 2 <= visible.ndim <= 4:
            raise ValueError(
                f"visible: expected shape ([[batch,] heads,] blocks_q, blocks_k), got shape {tuple(visible.shape)}"
            )
        block_q, block_k = mask_arguments.check_block(block)
        visible = visible[(None,) * (4 - visible.ndim)]
        seqlen_q = mask_arguments.check_blocks("seqlen_q", seqlen_q, visible.shape[2], block_q)
        seqlen_k = mask_arguments.check_blocks("seqlen_k", seqlen_k, visible.shape[3], block_k)
        return cls(BlockMap(visible, block_q, block_k), seqlen_q, seqlen_k)

    @classmethod
    def from_indices(
        cls,
        indices: Tensor,
        counts: Tensor | None = None,
        *,
        block: int | tuple[int, int] = TILE,
        seqlen_k: int,
        seqlen_q: int | None = None,
    ) -> BlockMask:
        """For each block of queries the key blocks that it sees, as models select them for each step and layer.

        Nothing here or later waits for the device, and nothing is read but with ``FLASH_ATTN_CUTE_CHECK=1``. Combined
        by ``&`` or ``|`` it is made as any other mask.

        Args:
            indices: (batch or 1, heads or 1, blocks_q, width), int32 or int64: numbers of key blocks, in any order.
                Those that are negative, and those behind the count, stand for none.
            counts: (batch or 1, heads or 1, blocks_q), int32 or int64: how many of each row count. None: all.
            block: queries and keys of a block: 64, or multiples of 128.
            seqlen_k: keys.
            seqlen_q: queries, if the last block has fewer. None: all blocks are whole.

        Raises:
            TypeError: another dtype, or sizes that are no ints.
            ValueError: a wrong shape, size or length; with ``FLASH_ATTN_CUTE_CHECK=1`` numbers of blocks that are too
                large or twice in a row, or counts out of range.
        """
        mask_arguments.check_integers("indices", indices, (4,), "(batch, heads, blocks_q, width)")
        block_q, block_k = mask_arguments.check_block(block)
        if any(size != HALF and size % TILE for size in (block_q, block_k)):
            raise ValueError(f"block: expected 64 or multiples of 128, got {(block_q, block_k)}")
        seqlen_q = mask_arguments.check_blocks("seqlen_q", seqlen_q, indices.shape[2], block_q)
        mask_arguments.check_lengths(seqlen_q, seqlen_k)
        indices = indices.long()
        if counts is not None:
            mask_arguments.check_integers("counts", counts, (3,), "(batch, heads, blocks_q)", beside=indices)
            if counts.shape != indices.shape[:3]:
                raise ValueError(f"counts: expected shape {tuple(indices.shape[:3])}, got {tuple(counts.shape)}")
            is_counted = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
            indices = torch.where(is_counted, indices, -1)
        if not torch.compiler.is_compiling() and settings.check_data():
            mask_arguments.check_indices(indices, counts, -(-seqlen_k // block_k))
        sizes = Sizes(indices.shape[0], indices.shape[1], seqlen_q, seqlen_k)
        return cls(Indices(indices, block_q, block_k, sizes), seqlen_q, seqlen_k)

    @classmethod
    def from_function(
        cls,
        mask_mod: MaskMod,
        seqlen_q: int,
        seqlen_k: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """A ``mask_mod`` as FlexAttention has them; any Python function that torch.vmap can map.

        It is evaluated when the mask is first used, 256 blocks of 128 x 128 at a time. Alone it says nothing about
        whole blocks, so all are evaluated; ``&`` with what rules blocks out leaves the others.

        Args:
            mask_mod: (batch entry, head, query, key) as 0-d int64 tensors, to a 0-d bool, True = may attend.
            seqlen_q: queries.
            seqlen_k: keys.
            batch: batch entries; None or 1 if it is the same for all.
            heads: heads, likewise.
            device: that of the tensors that the function looks things up in.

        Raises:
            TypeError: sizes that are no ints, or no function.
            ValueError: a size out of range.
        """
        mask_arguments.check_lengths(seqlen_q, seqlen_k)
        sets = []
        for name, size in (("batch", batch), ("heads", heads)):
            if size is not None and not mask_arguments.is_int(size):
                raise TypeError(f"{name}: expected None or an int, got {size!r}")
            if size is not None and size < 1:
                raise ValueError(f"{name}: expected None or at least 1, got {size}")
            sets.append(size or 1)
        if not callable(mask_mod):
            raise TypeError(f"mask_mod: expected a function of (batch entry, head, query, key), got {mask_mod!r}")
        return cls(Function(mask_mod, (sets[0], sets[1]), torch.empty(0, device=device)), seqlen_q, seqlen_k)

    @classmethod
    def from_dense(cls, mask: Tensor) -> BlockMask:
        """A mask that exists element by element.

        Args:
            mask: ([[batch,] heads,] seqlen_q, seqlen_k), bool, True = may attend, of any strides. Batch and heads may
                be 1. It is read when the mask is first used, and must not change before.

        Raises:
            TypeError: another dtype.
            ValueError: a wrong shape.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask: expected a bool tensor, got {mask_arguments.told(mask)}")
        if not 2 <= mask.ndim <= 4:
            raise ValueError(
                f"mask: expected shape ([[batch,] heads,] seqlen_q, seqlen_k), got shape {tuple(mask.shape)}"
            )
        mask = mask[(None,) * (4 - mask.ndim)]
        return cls(Dense(mask), mask.shape[2], mask.shape[3])

    @classmethod
    def from_flex(cls, mask: FlexBlockMask) -> BlockMask:
        """That of ``torch.nn.attention.flex_attention``, with its lists of blocks and its ``mask_mod``.

        Its function is evaluated on its partial blocks alone, and never compiled. Its orders of additions to dQ are not
        taken: see ``with_order``.

        Args:
            mask: a ``torch.nn.attention.flex_attention.BlockMask``.

        Raises:
            TypeError: something else.
        """
        from flash_attn_cute.sparsity import flex

        node, seqlen_q, seqlen_k = flex.node_of(mask)
        return cls(node, seqlen_q, seqlen_k)

    def to_flex(self) -> FlexBlockMask:
        """The same mask for ``torch.nn.attention.flex_attention``, in blocks of 128.

        Its ``mask_mod`` looks elements up in the tiles of this mask, which is built first.
        """
        from flash_attn_cute.sparsity import flex

        return flex.mask_of(self.sizes, self._any_tables().rows)

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both show; orders are forgotten.

        Raises:
            ValueError: of other lengths, on another device, or of batch entries or heads that do not broadcast.
        """
        return self._combined(And, "&", other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either shows; orders are forgotten.

        Raises:
            ValueError: as ``&`` does.
        """
        return self._combined(Or, "|", other) if isinstance(other, BlockMask) else NotImplemented

    def _combined(self, kind: type[And | Or], sign: str, other: BlockMask) -> BlockMask:
        a, b = self.sizes, other.sizes
        broadcast = all(x == y or 1 in (x, y) for x, y in zip(a[:2], b[:2], strict=True))
        if a[2:] != b[2:] or not broadcast:
            raise ValueError(f"{sign}: expected masks of sizes that fit, {_sizes_told(a)}, got {_sizes_told(b)}")
        if None not in (self.device, other.device) and self.device != other.device:
            raise ValueError(f"{sign}: expected masks of one device, {self.device}, got {other.device}")
        return BlockMask(kind(self._node, other._node), self.seqlen_q, self.seqlen_k)

    def with_order(self, order: str | Tensor, *, group: int = 1) -> BlockMask:
        """The same mask, its key blocks launched in another order in backward passes; results may round otherwise.

        Deterministic passes add to dQ in the order in which blocks of keys are launched, so that waiting depends on it;
        see ``flash_attn_cute.dq_order.turns``.

        Args:
            order: ``"default"``, last keys first; ``"spt"``, those that the fewest queries see first (shortest
                processing time); ``"permutation"``, one of both, and, where that pays, walks of tiles over blocks of
                queries that a model of the device finds for this mask, so that they wait less; ``"auto"``, the same, or
                the default where that waits for little, which some constructors tell without a search. Or a tensor of
                key blocks as they are to be launched: ([[batch,] key heads,] blocks_k), int32 or int64, each a
                permutation of 0 .. blocks_k - 1. Batch and key heads may be 1, and have to be where the mask has 1.
                Passes that add in no order launch them the other way round, so that long tiles come first.
            group: query heads of a key head, if the mask is one of query heads: those share an order.

        Raises:
            TypeError: something else, or another dtype.
            ValueError: an unknown name, a wrong shape or group, or a tensor that is no permutation (which waits for the
                device).
        """
        if not mask_arguments.is_int(group):
            raise TypeError(f"group: expected an int, got {group!r}")
        if group < 1 or self.heads % group:
            raise ValueError(f"group: expected a divisor of the mask's {self.heads} heads, got {group}")
        if isinstance(order, Tensor):
            order = launch_orders.checked(order, self.batch, self.heads // group, self.sizes.blocks_k)
        elif not isinstance(order, str):
            raise TypeError(f"order: expected one of {list(launch_orders.NAMES)} or a tensor, got {order!r}")
        elif order not in launch_orders.NAMES:
            raise ValueError(f"order: expected one of {list(launch_orders.NAMES)} or a tensor, got {order!r}")
        elif order == "auto" and self._node.is_regular:
            order = "default"
        return replace(self, _order=order, _group=group, _tables={})

    def build(self, device: torch.device | str | None = None, *, tables: bool = False) -> BlockMask:
        """Makes now what calls read, for torch.compile or a CUDA graph, and returns the mask itself.

        Args:
            device: where the calls will be; None if the mask has tensors.
            tables: also those of windows and documents, which dense calls do without (see ``BlockMask``).

        Raises:
            ValueError: no device, or another one than the mask's.
        """
        if device is None and self.device is None:
            raise ValueError("device: expected one, as the mask has no tensors, got None")
        where = self.device if device is None else torch.empty(0, device=device).device
        assert where is not None
        if self.device is not None and where != self.device:
            raise ValueError(f"device: expected that of the mask, {self.device}, got {where}")
        read: list[Tensor | None] = []
        if self.plain is not None and self.plain.documents is not None and self.offsets is not None:
            read += [self.offsets.cu_seqlens, self.offsets.seqused]
        if tables or not self._does_without_tables:
            made = self.tables(where, backward=True)
            read += [made.rows.entries, made.rows.tiles, made.columns and made.columns.entries]
        for x in read:
            if x is not None:  # how many there are differs from mask to mask, and is to compile nothing anew
                torch._dynamo.maybe_mark_dynamic(x, 0)
        if not isinstance(self._node, Indices):  # compiled programs read them on any stream
            kept.finish(self._offsets)
            kept.finish(self._tables)
        return self

    def to(self, device: torch.device | str) -> BlockMask:
        """Moves the mask to another device: itself, if its tensors are there or it has none.

        Its sources are moved, and tables are made of them anew.

        Args:
            device: where the calls will be.

        Raises:
            ValueError: a function looks tensors up (``from_function``, ``from_flex``), or a tensor that the mask was
                made of has been written to since.
        """
        where = torch.empty(0, device=device).device
        is_there = self.device in (None, where)
        order = self._order
        if is_there and not (isinstance(order, Tensor) and order.device != where):
            return self
        node = self._node if is_there else kept.outside(lambda: self._node.to(where), where)
        if isinstance(order, Tensor):
            order = kept.outside(partial(order.to, where), where)
        return BlockMask(node, self.seqlen_q, self.seqlen_k, order, self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles have the sources alone: they make tables anew, on the device where they are then."""
        return BlockMask, (self._node, self.seqlen_q, self.seqlen_k, self._order, self._group)

    @property
    def _does_without_tables(self) -> bool:
        return self.plain is not None and (self.plain.documents is None or self.offsets is not None)

    @property
    def offsets(self) -> Offsets | None:
        """Of documents that follow each other, if that is what there is but for a window; found once, and kept.

        Raises:
            RuntimeError: as ``tables`` does.
        """
        if self.plain is None or self.plain.documents is None:
            return None
        ids, device = self.plain.documents.ids_q, self.plain.documents.ids_q.device
        found: kept.Kept[Offsets | None] | None = kept.found(self._offsets, device)
        if found is not None:
            return found.get()
        if self._is_traced(device):
            raise RuntimeError(_UNBUILT)

        def find() -> Offsets | None:
            self._node.use()
            return Offsets.of(ids)

        return kept.made(self._offsets, device, device, find)

    def tables(self, device: torch.device, *, backward: bool) -> BlockTables:
        """What backends read: made when first asked for, on the mask's device, and kept.

        Args:
            device: that of the call; the mask's, if it has one.
            backward: whether gradients are wanted.

        Raises:
            RuntimeError: they have not been made, and torch.compile or a CUDA graph is recording what waits for none.
            ValueError: what they are to be made of has been written to.
        """
        there = self._tables.get(device)
        if there is None and not backward:
            there = self._rows.get(device)
        if isinstance(there, kept.Kept):
            tables: BlockTables = there.get()
            return tables
        return (self._traced if self._is_traced(device) else self._made)(device, backward)

    def _is_traced(self, device: torch.device) -> bool:
        """Whether what is computed now belongs to a program or a graph, and is not to be kept."""
        return torch.compiler.is_compiling() or kept.is_captured(device) or not self._node.is_real

    def _traced(self, device: torch.device, backward: bool) -> BlockTables:
        """The tables as part of a program, which has to do without waiting for the device."""
        there = kept.found(self._rows, device)
        node = self._node
        if not isinstance(node, Indices) or (backward and self._is_searched):
            raise RuntimeError(_UNBUILT if self.plain is None else _UNBUILT_TABLES)
        if there is None:
            node.use(checked=False)
        tables = BlockTables(node.rows(), None) if there is None else there.get()
        return tables._replace(columns=self._columns(tables.rows)[0]) if backward else tables

    def _made(self, device: torch.device, backward: bool) -> BlockTables:
        node = self._node

        def without_columns() -> BlockTables:
            node.use()
            rows = node.rows() if isinstance(node, Indices) else row_tables.build(node, self.sizes, device)
            return BlockTables(rows, None, row_tables.real_rows(node, rows, self.sizes))

        def with_columns() -> BlockTables:
            tables = kept.made(self._rows, device, device, without_columns)
            columns, turns = self._columns(tables.rows)
            if turns is not None:  # told before other threads can see the tables
                object.__setattr__(self, "_turns", turns)
            return tables._replace(columns=columns)

        if backward:
            return kept.made(self._tables, device, device, with_columns)
        return kept.made(self._rows, device, device, without_columns)

    def _columns(self, rows: BlockRows) -> tuple[BlockColumns, _Turns | None]:
        """The columns of rows, and what a search has found of turns."""
        if self._sources is not None and isinstance(self._order, Tensor):
            self._sources.use({"order": [self._order]})
        order, walks, waits_little = column_tables.launch_of(self._order, rows, self.sizes, self._group)
        turns = _Turns(waits_little, walks is not None) if self._is_searched else None
        return column_tables.columns(rows, order, self.sizes, walks), turns

    def _any_tables(self) -> BlockTables:
        """On the device where there are some already, if any."""
        device = next(iter(self._rows), self.device or torch.device("cpu"))
        return self.tables(device, backward=False)

    @property
    def statistics(self) -> Statistics:
        """How many blocks there are, and of which kind; builds the mask, and waits for the device."""
        return Statistics.of(self._any_tables().rows, self.sizes)

    @property
    def sparsity(self) -> float:
        """The share of blocks of 128 x 128 that nobody sees; builds the mask, and waits for the device."""
        return 1 - self.statistics.share_seen

    def plot(self, *, batch: int = 0, head: int = 0) -> Any:
        """A picture of one batch entry and head: blocks, their turns, and the timeline of a model.

        Args:
            batch: which entry.
            head: which head, of those that the mask has.

        Returns:
            A ``matplotlib.figure.Figure``; ``savefig`` writes it.

        Raises:
            ImportError: matplotlib is missing (``pip install matplotlib``).
            ValueError: a batch entry or head that there is not.
        """
        from flash_attn_cute.sparsity import mask_plot

        return mask_plot.figure(self, batch, head)

    def __repr__(self) -> str:
        parts = [_sizes_told(self.sizes)]
        if not self._rows:
            parts.append("no tables")
        else:
            parts.append(str(self.statistics))
        parts.append(f"order {'of its own' if isinstance(self._order, Tensor) else self._order}")
        return f"BlockMask({', '.join(parts)})"


def _sizes_told(sizes: Sizes) -> str:
    of = [f"{n} {name}" for n, name in ((sizes.batch, "batch entries"), (sizes.heads, "heads")) if n != 1]
    return " of ".join([f"{sizes.seqlen_q} x {sizes.seqlen_k}", *([" x ".join(of)] if of else [])])
