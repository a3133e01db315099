"""``BlockMask``: which queries attend to which keys. Its constructors, combinations, orders and conversions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import check_int
from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity import mask_arguments
from flash_attn_cute.sparsity.bits import TILE
from flash_attn_cute.sparsity.documents import Documents
from flash_attn_cute.sparsity.dq_order import launch_orders
from flash_attn_cute.sparsity.indices import Indices
from flash_attn_cute.sparsity.nodes import (
    And,
    Band,
    BlockMap,
    Dense,
    Dilation,
    Function,
    MaskMod,
    Or,
    Prefix,
)
from flash_attn_cute.sparsity.score_blocks import Sizes
from flash_attn_cute.sparsity.selection import Selection
from flash_attn_cute.sparsity.statistics import Statistics
from flash_attn_cute.sparsity.tabled_mask import SELECTION, TabledMask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(TabledMask):
    """A mask that says which keys each query attends to, for attention that costs what its visible blocks cost.

    The constructors below make masks, and ``&`` and ``|`` combine them: ``BlockMask.window(8192, 8192, left=2047)
    & BlockMask.documents(ids)``. No tensor of (seqlen_q, seqlen_k) is made.

    A mask is a rule. The tables that backends read are made of it when it is first used, on the device of that call,
    and kept. So make a mask once, and give the same object to all layers. Making tables waits for the device a few
    times (``from_indices``: never). ``build`` does it ahead of torch.compile and of capturing a CUDA graph.

    Windows, and documents that follow each other, need no tables in dense calls: these become calls with
    ``window_size``, or with packed sequences. The exceptions are other orders than the default, seqused, and for
    documents also a mask or bias, and fewer than 128 rows on average.

    Positions are absolute: query i and key j are counted from 0. ``causal``, ``window``, ``prefix_lm`` and ``dilated``
    are aligned to the bottom right instead: the last query stands beside the last key. Packed calls take a mask over
    (total_q, total_k), and no sequence attends to another one.

    The idea of lists of full and partial blocks, and of a function for the elements of partial ones, is FlexAttention's
    (arXiv 2412.05496).

    Attributes:
        batch: batch entries, or 1 if all have the same mask.
        heads: query heads or key heads, or 1 if all have the same mask.
        seqlen_q: queries.
        seqlen_k: keys.
        device: of its tensors; None if it has none, and can be used anywhere.
        plain: equivalent arguments of a call, see ``sparsity.plain``; None if there are none.
        low_contention: whether tiles of keys are known to wait little for their turns (``TabledMask.low_contention``).
        has_m_block_order: whether they take query blocks in an order found for the mask; True before the search.
    """

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int) -> BlockMask:
        """A causal mask: query i attends to key j where ``j <= i + seqlen_k - seqlen_q``.

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
        """A window: query i attends to key j where ``i + shift - left <= j <= i + shift + right``.

        The shift is seqlen_k - seqlen_q.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            left: keys before its own position that a query attends to; None or negative: all.
            right: keys behind it, likewise.

        Raises:
            TypeError: a length or side that is no int.
            ValueError: a length below 0 or above 2^31 - 1.
        """
        seqlen_q, seqlen_k = mask_arguments.check_lengths(seqlen_q, seqlen_k)
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
        """Documents, by ids or by offsets: a query attends to the keys of its own document.

        The smallest and the largest id of a block decide whether its elements are looked at. Where ids never decrease,
        these are the blocks that cross the edge of a document.

        Args:
            ids: (seqlen_q,) or (batch, seqlen_q), int32 or int64: the document of each query. Negative is padding:
                whatever such rows hold reaches nothing, NaN included, unless ``|`` makes them visible.
            ids_k: (seqlen_k,) or (batch, seqlen_k): likewise of each key, beside ids. None: ids.
            cu_seqlens: (documents + 1,), int32 or int64, instead of ids: the offsets of the documents' queries. Rows
                that they leave out are padding. Their order and range are checked with ``FLASH_ATTN_CUTE_CHECK=1``.
            cu_seqlens_k: likewise of their keys. None: cu_seqlens.
            seqlen_q: queries, required with cu_seqlens, as reading the last offset would wait for the device.
            seqlen_k: keys, likewise. None: seqlen_q.

        Raises:
            TypeError: a tensor of another dtype, or something else in its place.
            ValueError: both or neither of ids and cu_seqlens, keys that are said in the other way, a length that is not
                that of ids, or a wrong shape or device; with ``FLASH_ATTN_CUTE_CHECK=1`` offsets that decrease or that
                leave the rows.
        """
        ids, ids_k = mask_arguments.ids_of(ids, ids_k, cu_seqlens, cu_seqlens_k, seqlen_q, seqlen_k)
        return cls(Documents(ids, ids_k), ids.shape[1], ids_k.shape[1])

    @classmethod
    def prefix(cls, seqlen_q: int, seqlen_k: int, length: int | Tensor) -> BlockMask:
        """A prefix of keys that all queries attend to, and no others; for sinks and global tokens by ``|``.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            length: keys of the prefix; an int, or (batch,) int32 or int64.

        Raises:
            TypeError: a length of another type or dtype, or a seqlen that is no int.
            ValueError: a wrong shape or length.
        """
        seqlen_q, seqlen_k = mask_arguments.check_lengths(seqlen_q, seqlen_k)
        if isinstance(length, Tensor):
            mask_arguments.check_integers("length", length, (1,), "(batch,)")
            length = kept.copied(length).long()
        else:
            length = mask_arguments.limited(check_int("length", length, "an int or a tensor"))
        return cls(Prefix(length), seqlen_q, seqlen_k)

    @classmethod
    def prefix_lm(cls, seqlen_q: int, seqlen_k: int, length: int | Tensor) -> BlockMask:
        """A prefix that all queries attend to, and a causal mask behind it.

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
        """A dilated window: its keys whose distance from the query is a multiple of ``step``.

        Args:
            seqlen_q: queries.
            seqlen_k: keys.
            step: at least 1.
            left: see ``window``; counted in all keys, visible or not.
            right: likewise.

        Raises:
            TypeError: a length, step or side that is no int.
            ValueError: a length below 0 or above 2^31 - 1, or a step below 1.
        """
        step = check_int("step", step)
        if step < 1:
            raise ValueError(f"step: expected at least 1, got {step}")
        window = cls.window(seqlen_q, seqlen_k, left=left, right=right)
        dilation = Dilation(mask_arguments.limited(step), window.seqlen_k - window.seqlen_q)
        return cls(And(window._node, dilation), window.seqlen_q, window.seqlen_k)

    @classmethod
    def from_blocks(
        cls,
        visible: Tensor,
        block: int | tuple[int, int] = TILE,
        *,
        seqlen_q: int | None = None,
        seqlen_k: int | None = None,
    ) -> BlockMask:
        """A map of blocks, each fully visible or empty.

        Args:
            visible: ([[batch,] heads,] blocks_q, blocks_k), bool; batch and heads may be 1.
            block: queries and keys of a block, of any size. Multiples of 128 make no partial blocks, and multiples of
                64 few distinct ones.
            seqlen_q: queries, if the last block is cut off. None: it is complete.
            seqlen_k: keys, likewise.

        Raises:
            TypeError: another dtype, or sizes that are no ints.
            ValueError: a wrong shape, or a length that does not come to as many blocks.
        """
        visible = mask_arguments.check_flags("visible", visible, "blocks_q, blocks_k")
        block_q, block_k = mask_arguments.check_block(block)
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
        block_lengths: Sequence[int] | Tensor | None = None,
    ) -> BlockMask:
        """Lists of the key blocks that each query block attends to, as models select them in every step and layer.

        Neither making nor using such a mask waits for the device, and its data are checked with
        ``FLASH_ATTN_CUTE_CHECK=1`` alone. Combined by ``&`` or ``|`` it is made like any other mask. Both tensors are
        read when tables are made of them, and must not be written to before.

        Args:
            indices: (batch or 1, heads or 1, blocks_q, width), int32 or int64: numbers of key blocks, in any order.
                Negative numbers, and those behind the count, are no blocks.
            counts: (batch or 1, heads or 1, blocks_q), int32 or int64: how many numbers of each row count. None: all.
            block: queries and keys of a block: 64, or multiples of 128.
            seqlen_k: keys.
            seqlen_q: queries, if the last block is cut off. None: it is complete.
            block_lengths: (blocks,), ints on the host: how many rows at the start of each block are real, of queries
                and keys alike. The others are padding: whatever they hold reaches nothing, NaN included. The halves of
                blocks of 128 may have 32 different pairs of lengths. None: all rows are real.

        Raises:
            TypeError: another dtype, or sizes that are no ints.
            ValueError: a wrong shape, size or length, or too many different lengths; with ``FLASH_ATTN_CUTE_CHECK=1``
                numbers of blocks that are too large or twice in a row, or counts out of range.
        """
        node = Indices.of(indices, counts, mask_arguments.check_block(block), seqlen_q, seqlen_k, block_lengths)
        return cls(node, node.sizes.seqlen_q, node.sizes.seqlen_k)

    @classmethod
    def from_selection(cls, indices: Tensor, *, block: int, seqlen_k: int) -> BlockMask:
        """Key blocks that each query selects, by itself or with the other heads of its group.

        Block i has the keys ``i * block`` to ``(i + 1) * block - 1`` of the query's own sequence, also in packed calls.
        Causal and windowed calls hide keys of it as of any block: select the query's own block to see its part up to
        the query. A block that a query selects several times counts once. A query that selects nothing gives out 0 and
        lse -inf (with a sink: the sink's logit).

        Such masks do not combine by ``&`` and ``|``, have no other order than the default and no tables, and calls take
        neither ``mask`` nor ``bias`` beside them. Neither making nor using one waits for the device, and its data are
        checked with ``FLASH_ATTN_CUTE_CHECK=1`` alone. The indices are read by the first call, and must not be written
        to before.

        Args:
            indices: (batch or 1, heads, seqlen_q, top), or (total_q, heads, top) for packed calls, int32 or int64:
                numbers of key blocks, in any order. Heads are query heads, key heads, or 1 for all. Negative numbers
                are no blocks, nor are those behind the last block of the query's sequence.
            block: keys of a block, at least 1.
            seqlen_k: keys, or total_k.

        Raises:
            TypeError: another dtype, or sizes that are no ints.
            ValueError: a wrong shape or size; with ``FLASH_ATTN_CUTE_CHECK=1`` numbers of blocks that are too large.
        """
        node = Selection.of(indices, block, seqlen_k)
        return cls(node, node.indices.shape[2], node.seqlen_k)

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
        """A ``mask_mod`` in FlexAttention's form: any Python function that torch.vmap can map.

        It is evaluated when the mask is first used, 256 blocks of 128 x 128 at a time. A function says nothing about
        whole blocks, so all blocks are evaluated; ``&`` with another mask leaves those which that rules out.

        Args:
            mask_mod: (batch entry, head, query, key) as 0-d int64 tensors, to a 0-d bool, True = may attend.
            seqlen_q: queries.
            seqlen_k: keys.
            batch: batch entries; None or 1 if all have the same mask.
            heads: heads, likewise.
            device: of the tensors that the function looks up.

        Raises:
            TypeError: sizes that are no ints, no function or no device.
            ValueError: a size out of range, or a device that PyTorch does not know.
        """
        seqlen_q, seqlen_k = mask_arguments.check_lengths(seqlen_q, seqlen_k)
        if not callable(mask_mod):
            raise TypeError(f"mask_mod: expected a function of (batch entry, head, query, key), got {mask_mod!r}")
        sets = mask_arguments.check_set("batch", batch), mask_arguments.check_set("heads", heads)
        where = torch.empty(0, device=mask_arguments.check_device(device))
        return cls(Function(mask_mod, sets, where), seqlen_q, seqlen_k)

    @classmethod
    def from_dense(cls, mask: Tensor) -> BlockMask:
        """A mask given element by element.

        Args:
            mask: ([[batch,] heads,] seqlen_q, seqlen_k), bool, True = may attend, of any strides. Batch and heads may
                be 1. It is read when the mask is first used, and must not be written to before.

        Raises:
            TypeError: another dtype.
            ValueError: a wrong shape.
        """
        mask = mask_arguments.check_flags("mask", mask, "seqlen_q, seqlen_k")
        return cls(Dense(mask), mask.shape[2], mask.shape[3])

    @classmethod
    def from_flex(cls, mask: FlexBlockMask) -> BlockMask:
        """Converts a mask of ``torch.nn.attention.flex_attention``, with its lists of blocks and its ``mask_mod``.

        The function is evaluated on partial blocks alone, and never compiled. Orders of additions to dQ are not taken
        over: see ``with_order``.

        Args:
            mask: a ``torch.nn.attention.flex_attention.BlockMask``.

        Raises:
            TypeError: something else.
        """
        from flash_attn_cute.sparsity import flex

        node, seqlen_q, seqlen_k = flex.node_of(mask)
        return cls(node, seqlen_q, seqlen_k)

    def to_flex(self) -> FlexBlockMask:
        """Converts to a mask of ``torch.nn.attention.flex_attention`` in blocks of 128.

        Builds this mask first. The ``mask_mod`` of the result looks scores up in its tiles.
        """
        from flash_attn_cute.sparsity import flex

        return flex.mask_of(self.sizes, self._any_tables().rows)

    def __and__(self, other: BlockMask) -> BlockMask:
        """The intersection of two masks, in the default order.

        Raises:
            ValueError: other lengths, another device, batch entries or heads that do not broadcast, or a mask of
                ``from_selection``.
        """
        return self._combined(And, "&", other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """The union of two masks, in the default order.

        Raises:
            ValueError: as ``&`` does.
        """
        return self._combined(Or, "|", other) if isinstance(other, BlockMask) else NotImplemented

    def _combined(self, kind: type[And | Or], sign: str, other: BlockMask) -> BlockMask:
        if self.selection_block or other.selection_block:
            raise ValueError(SELECTION.format(sign, ", which causal, window_size and seqused of the call restrict"))
        a, b = self.sizes, other.sizes
        broadcast = all(x == y or 1 in (x, y) for x, y in zip(a[:2], b[:2], strict=True))
        if a[2:] != b[2:] or not broadcast:
            raise ValueError(f"{sign}: expected masks of sizes that fit, {_describe(a)}, got {_describe(b)}")
        if None not in (self.device, other.device) and self.device != other.device:
            raise ValueError(f"{sign}: expected masks of one device, {self.device}, got {other.device}")
        return BlockMask(kind(self._node, other._node), self.seqlen_q, self.seqlen_k)

    def with_order(self, order: str | Tensor, *, group: int = 1) -> BlockMask:
        """A copy of the mask whose key blocks are launched in another order in backward passes.

        Deterministic passes add to dQ in launch order, so the order decides how long tiles wait for each other; see
        ``flash_attn_cute.sparsity.dq_order.turns``. Results may round differently.

        Args:
            order: a name, or a launch order.

                - ``"default"``: last keys first.
                - ``"spt"``: key blocks with the fewest queries first (shortest processing time).
                - ``"permutation"``: one of these two, by a search on a model of the device; and where that pays, an
                  order in which each key block takes its query blocks, so that it waits less.
                - ``"auto"``: the default where tiles wait little in it, else as ``"permutation"``. Some constructors
                  know that without a search.
                - A tensor of key blocks in launch order, ([[batch,] key heads,] blocks_k), int32 or int64, each row a
                  permutation of 0 .. blocks_k - 1. Batch and key heads may be 1, and have to be where the mask has 1.
                  Passes that add in no order launch them in reverse, so that long tiles come first.
            group: query heads of a key head, if the mask has query heads: a group shares an order.

        Raises:
            TypeError: another type or dtype.
            ValueError: an unknown name, a wrong shape or group, a mask of ``from_selection``, or a tensor that is no
                permutation. A tensor is read back from the device for that.
        """
        if self.selection_block:
            raise ValueError(SELECTION.format("order", ", whose tiles have one order"))
        group = check_int("group", group)
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
        """Makes the tables that calls read, ahead of torch.compile or a CUDA graph; returns the mask itself.

        What calls ask for is not known here. So where Hopper's backward kernels read columns of 64 keys at some head
        dimensions, and of 128 at others, both are made.

        Args:
            device: of the calls; None for that of the mask's tensors. Tables on the meta device have room for all
                blocks.
            tables: whether to make also the tables of windows and documents, which dense calls do not need.

        Raises:
            TypeError: something else than a device, or than a bool.
            ValueError: no device, another one than the mask's, or one that PyTorch does not know.
        """
        if not isinstance(tables, bool):
            raise TypeError(f"tables: expected a bool, got {tables!r}")
        if device is None and self.device is None:
            raise ValueError("device: expected one, as the mask has no tensors, got None")
        where = self.device if device is None else mask_arguments.check_device(device)
        assert where is not None
        if self.device is not None and where != self.device:
            raise ValueError(f"device: expected that of the mask, {self.device}, got {where}")
        read: list[Tensor | None] = []
        if self.plain is not None and self.plain.documents is not None and self.offsets is not None:
            read += [self.offsets.cu_seqlens, self.offsets.seqused]
        if self.selection_block:
            self.selected()
        elif tables or not self._does_without_tables:
            made = self.tables(where, backward=True)
            read += [made.rows.entries, made.rows.tiles]
            for some in (made, self.tables(where, backward=True, most_listed=self._most_listed(where))):
                assert some.columns is not None
                read.append(some.columns.entries)
        for x in read:
            if x is not None:  # their sizes differ from mask to mask, and shall compile nothing anew
                torch._dynamo.maybe_mark_dynamic(x, 0)
        if not isinstance(self._node, Indices):  # compiled programs read them on any stream
            kept.finish(self._offsets)
            kept.finish(self._tables)
        return self

    def to(self, device: torch.device | str) -> BlockMask:
        """Moves the mask to another device; returns the mask itself if its tensors are there or it has none.

        The tensors that it was made of are moved, and tables are made of them anew.

        Args:
            device: of the calls.

        Raises:
            TypeError: something else than a device.
            ValueError: a device that PyTorch does not know; a function looks tensors up (``from_function``,
                ``from_flex``); or a tensor that the mask was made of has been written to since.
        """
        where = mask_arguments.check_device(device)
        is_there = self.device in (None, where)
        order = self._order
        if is_there and not (isinstance(order, Tensor) and order.device != where):
            return self
        node = self._node if is_there else kept.outside(lambda: self._node.to(where), where)
        if isinstance(order, Tensor):
            order = kept.outside(partial(order.to, where), where)
        return BlockMask(node, self.seqlen_q, self.seqlen_k, order, self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        """State for copies and pickles: sources alone, of which tables are made anew on the device of the copy."""
        return BlockMask, (self._node, self.seqlen_q, self.seqlen_k, self._order, self._group)

    @property
    def statistics(self) -> Statistics:
        """Counts of blocks by their kind; builds the mask, and waits for the device."""
        return Statistics.of(self._any_tables().rows, self.sizes)

    @property
    def sparsity(self) -> float:
        """Share of blocks of 128 x 128 that are empty; builds the mask, and waits for the device."""
        return 1 - self.statistics.visible_share

    def plot(self, *, batch: int = 0, head: int = 0) -> Any:
        """Draws one batch entry and head: blocks, their turns, and the timeline of a model.

        Args:
            batch: number of the batch entry.
            head: number of the head, of those that the mask has.

        Returns:
            A ``matplotlib.figure.Figure``; ``savefig`` writes it.

        Raises:
            ImportError: matplotlib is missing (``pip install matplotlib``).
            TypeError: a batch entry or head that is no int.
            ValueError: one that the mask does not have, or a mask without queries or keys.
        """
        from flash_attn_cute.sparsity import mask_plot

        return mask_plot.figure(self, batch, head)

    def __repr__(self) -> str:
        parts = [_describe(self.sizes)]
        if self.selection_block:
            parts.append(f"blocks of {self.selection_block} keys selected per query")
        elif not any(self._devices_of_tables()):
            parts.append("no tables")
        else:
            parts.append(str(self.statistics))
        parts.append(f"order {'of its own' if isinstance(self._order, Tensor) else self._order}")
        return f"BlockMask({', '.join(parts)})"


def _describe(sizes: Sizes) -> str:
    """Sizes of a mask in words."""
    of = [f"{n} {name}" for n, name in ((sizes.batch, "batch entries"), (sizes.heads, "heads")) if n != 1]
    return " of ".join([f"{sizes.seqlen_q} x {sizes.seqlen_k}", *([" x ".join(of)] if of else [])])
