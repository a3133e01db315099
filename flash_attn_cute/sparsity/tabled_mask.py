"""Masks as calls see them: an expression and an order, and the tables made of them, which are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import ANY_NUMBER, BlockTables, most_with_half_columns
from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity import column_tables, row_tables
from flash_attn_cute.sparsity.dq_order import launch_orders
from flash_attn_cute.sparsity.dq_order.launch_orders import Launch
from flash_attn_cute.sparsity.indices import Indices
from flash_attn_cute.sparsity.nodes import Node
from flash_attn_cute.sparsity.plain import Offsets, Plain
from flash_attn_cute.sparsity.score_blocks import Sizes
from flash_attn_cute.sparsity.selection import Selection

_UNBUILT = (
    "block_mask: expected one that has been built, as that waits for the device, which torch.compile, CUDA graphs and "
    "torch.vmap over its tensors cannot: call its build() before"
)
_UNBUILT_TABLES = (
    "block_mask: expected one that has been built with its tables, which a window or documents need beside seqused, "
    "packed sequences, or (documents) mask and bias: call its build(tables=True) before"
)

_HOPPER = 9  # major compute capability of the GPUs whose kernels read half columns
# With the device, keys of the launch of a mask's columns, and of tables with half columns.
_LAUNCH, _HALVES = "launch", "halves"

SELECTION = "{}: expected a mask of blocks of queries, got key blocks selected per query (from_selection){}"


class _Contention(NamedTuple):
    """Knowledge about waits of a mask's tiles for their turns, see ``BlockMask.low_contention``."""

    low_contention: bool
    has_m_block_order: bool


@dataclass(frozen=True, eq=False, repr=False)
class TabledMask:
    """An expression, an order of key blocks, and what is made of them for backends: once for each device.

    ``BlockMask`` is one that users make, combine and order.
    """

    _node: Node
    seqlen_q: int
    seqlen_k: int
    _order: str | Tensor = "default"
    _group: int = 1
    # Tables and offsets made so far, by device. Tables without columns, and offsets, serve all orders.
    _rows: kept.Store = field(default_factory=dict)
    _tables: kept.Store = field(default_factory=dict)
    _offsets: kept.Store = field(default_factory=dict)
    plain: Plain | None = field(init=False)
    _sources: kept.Sources | None = field(default=None, init=False)  # of its order
    _contention: _Contention = field(init=False)  # from its constructor, then from a search, equal on every device

    def __post_init__(self) -> None:
        """Looks for equivalent arguments, and for what is known about waits."""
        is_default = isinstance(self._order, str) and self._order == "default"
        if isinstance(self._order, Tensor) and not torch.compiler.is_compiling():
            object.__setattr__(self, "_order", kept.lasting(self._order))
            object.__setattr__(self, "_sources", kept.Sources({"order": [self._order]}))
        object.__setattr__(self, "plain", Plain.of(self._node, self.sizes) if is_default else None)
        is_regular = is_default and self._node.is_regular
        object.__setattr__(self, "_contention", _Contention(is_regular, self._is_searched))

    @property
    def batch(self) -> int:
        """Batch entries, or 1 if all have the same mask."""
        return self._node.batch

    @property
    def heads(self) -> int:
        """Query heads or key heads, or 1 if all have the same mask."""
        return self._node.heads

    @property
    def device(self) -> torch.device | None:
        """Device of its tensors; None if it has none, and can be used anywhere."""
        return self._node.device

    @property
    def sizes(self) -> Sizes:
        """Batch entries, heads, seqlen_q and seqlen_k."""
        return Sizes(self.batch, self.heads, self.seqlen_q, self.seqlen_k)

    @property
    def order_sets(self) -> tuple[int, int]:
        """Batch entries and key heads that have launch orders of their own; 1 where all share one."""
        if isinstance(self._order, Tensor):
            return self._order.shape[0], self._order.shape[1]
        return (1, 1) if self._order == "default" else (self.batch, self.heads // self._group)

    @property
    def low_contention(self) -> bool:
        """Whether tiles of keys are known to wait little for their turns, so that dQ is ordered at no cost.

        Masks whose queries attend to a few runs of keys that move on with them have low contention in the default
        order. Constructors know that; for other masks the search of the order "auto" finds out.
        """
        return self._contention.low_contention

    @property
    def has_m_block_order(self) -> bool:
        """Whether tiles of keys take query blocks in an order found for the mask; True before the search for one."""
        return self._contention.has_m_block_order

    @property
    def half_blocks(self) -> bool:
        """Whether it is made of blocks of 64: Hopper's forward kernel up to d = 128 then takes 64 x 64 scores each."""
        return self._node.half_blocks

    @property
    def half_columns(self) -> int:
        """Visible blocks of 64 x 64 of a head at the most, if it is made of blocks of 64 keys; else 0.

        Hopper's backward kernel up to d = 128 then has tiles of 64 keys.
        """
        return self.most_halves if self._node.half_columns else 0

    @property
    def most_halves(self) -> int:
        """Visible blocks of 64 x 64 of a head at the most, as far as it is known without the device."""
        return self._node.most_halves(self.sizes)

    @property
    def selection_block(self) -> int:
        """Keys of a block that queries select (``from_selection``); 0 for all other masks."""
        return self._node.block if isinstance(self._node, Selection) else 0

    @property
    def selection_shape(self) -> tuple[int, ...]:
        """Shape of ``selected()``: (batch, heads, seqlen_q, top); of a mask of ``from_selection``."""
        node = self._node
        assert isinstance(node, Selection)
        *sets, top = node.indices.shape
        return (*sets, max(1, top))

    @property
    def _is_searched(self) -> bool:
        """Whether a search finds its order, which waits for the device."""
        return isinstance(self._order, str) and self._order in launch_orders.SEARCHED

    @property
    def _does_without_tables(self) -> bool:
        if self.plain is None or self.plain.documents is None:
            return self.plain is not None
        return self.offsets is not None and not self.offsets.are_short

    @property
    def offsets(self) -> Offsets | None:
        """Offsets of documents that follow each other, if the mask is equivalent to them; raises as ``tables`` does."""
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
            return None if ids.is_meta else Offsets.of(ids)

        return kept.made(self._offsets, device, device, find)

    def tables(self, device: torch.device, *, backward: bool, most_listed: int = 0) -> BlockTables:
        """The tables that backends read, made when first asked for, and kept.

        Args:
            device: of the call, which is the mask's if it has one.
            backward: whether gradients are wanted, so that the tables have columns.
            most_listed: how many blocks of 128 x 128 the rows may have room for if columns are to be half columns; such
                of a mask with low contention never are.

        Raises:
            RuntimeError: they have not been made, and cannot be while torch.compile or a CUDA graph records.
            ValueError: a tensor that the mask was made of has been written to, or a mask of ``from_selection``.
        """
        there = self._rows.get(device)
        if backward and isinstance(there, kept.Kept):
            there = self._tables.get((device, _HALVES) if self._lists_halves(there.value, most_listed) else device)
        if isinstance(there, kept.Kept):
            tables: BlockTables = there.get()
            return tables
        if self.selection_block:
            raise ValueError(SELECTION.format("block_mask", ", which has no tables"))
        return (self._traced if self._is_traced(device) else self._made)(device, backward, most_listed)

    def _lists_halves(self, rows: BlockTables, most_listed: int) -> bool:
        """Whether columns beside these rows are half columns. Sizes alone decide: nothing waits for the device."""
        return most_listed > 0 and not self.low_contention and len(rows.rows.entries) <= most_listed

    def selected(self) -> Tensor:
        """Selected key blocks of a mask of ``from_selection`` as backends read them, see ``Selection.selected``."""
        node = self._node
        assert isinstance(node, Selection)
        return node.selected(is_traced=self._is_traced(node.device))

    def _is_traced(self, device: torch.device) -> bool:
        """Whether results computed now belong to a program or a graph, and must not be kept."""
        return torch.compiler.is_compiling() or kept.is_captured(device) or not self._node.is_real

    def _most_listed(self, device: torch.device) -> int:
        """Blocks of 128 x 128 that it may list for calls on a device to read half columns, whatever they ask for."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _HOPPER:
            return 0
        return ANY_NUMBER if self.half_columns else most_with_half_columns(*self.sizes)

    def _traced(self, device: torch.device, backward: bool, most_listed: int) -> BlockTables:
        """Makes tables as a part of a program, which cannot wait for the device."""
        there = kept.found(self._rows, device)
        node = self._node
        if not isinstance(node, Indices) or (backward and self._is_searched):
            raise RuntimeError(_UNBUILT if self.plain is None else _UNBUILT_TABLES)
        if there is None:
            node.use(checked=False)
        tables = BlockTables(node.rows(), None, node.real) if there is None else there.get()
        return self._with_columns(tables, self._launch_of(tables), most_listed) if backward else tables

    def _made(self, device: torch.device, backward: bool, most_listed: int) -> BlockTables:
        """Finds the kept tables, or makes and keeps them."""
        node = self._node

        def of_rows() -> BlockTables:
            node.use()
            if isinstance(node, Indices):
                return BlockTables(node.rows(), None, node.real)
            if device.type == "meta":
                return BlockTables(row_tables.without_data(self.sizes), None)
            rows = row_tables.build(node, self.sizes, device)
            return BlockTables(rows, None, row_tables.real_rows(node, rows, self.sizes))

        tables = kept.made(self._rows, device, device, of_rows)
        if not backward:
            return tables
        launch = kept.made(self._tables, (device, _LAUNCH), device, lambda: self._launch_of(tables))
        if self._is_searched and device.type != "meta":
            contention = _Contention(launch.low_contention, launch.m_block_order is not None)
            object.__setattr__(self, "_contention", contention)
        key = (device, _HALVES) if self._lists_halves(tables, most_listed) else device
        return kept.made(self._tables, key, device, lambda: self._with_columns(tables, launch, most_listed))

    def _launch_of(self, tables: BlockTables) -> Launch:
        """Finds the launch of the tiles of keys: the default one on the meta device, which has no numbers."""
        if tables.rows.spans.is_meta:
            return column_tables.launch_of("default", tables.rows, self.sizes, self._group)
        if self._sources is not None and isinstance(self._order, Tensor):
            self._sources.use({"order": [self._order]})
        return column_tables.launch_of(self._order, tables.rows, self.sizes, self._group)

    def _with_columns(self, tables: BlockTables, launch: Launch, most_listed: int) -> BlockTables:
        """Makes the columns beside rows, or half columns."""
        rows, sizes, most = tables.rows, self.sizes, None
        if not self._lists_halves(tables, most_listed):
            columns = column_tables.columns(rows, launch.order, sizes, launch.m_block_order)
            return tables._replace(columns=columns)
        if isinstance(self._node, Indices):
            most = self.most_halves * sizes.batch * sizes.heads
        # Tiles of larger blocks than 64 wait for no turn, so that ascending blocks of queries serve.
        m_block_order = launch.m_block_order if self.half_columns else None
        return tables._replace(columns=column_tables.half_columns(rows, launch.order, sizes, m_block_order, most))

    def _devices_of_tables(self) -> Iterator[torch.device]:
        """Devices on which tables have been made; none are on the meta device, which keeps no numbers."""
        return (device for device in self._rows if device.type != "meta")

    def _any_tables(self) -> BlockTables:
        """Tables on a device that has some already, if any."""
        device = next(self._devices_of_tables(), self.device or torch.device("cpu"))
        return self.tables(device, backward=False)
