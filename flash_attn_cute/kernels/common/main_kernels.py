"""Main kernels, on the host: what each is made of, and how it is launched."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments, BiasGradientArguments, ForwardArguments
from flash_attn_cute.kernels.common.bias_pieces import PieceMap, PieceTables
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.key_lists import KeyTables
from flash_attn_cute.kernels.common.key_tiles import num_key_tiles
from flash_attn_cute.kernels.common.mask_tiles import RowTables
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.common.query_tiles import QueryTiles
from flash_attn_cute.kernels.common.rows import numbers_first, rows_first
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.common.tma import ForwardTiles, RowTiles
from flash_attn_cute.kernels.common.workspace import Workspace, carved
from flash_attn_cute.kernels.schedule import PIECE_OPERANDS, Schedule


class MainKernel:
    """A kernel of one configuration, with the shared memory that its schedule describes."""

    def __init__(self, config: Any, schedule: Schedule, swizzled: Callable[..., cute.ComposedLayout]):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.schedule = schedule
        self.memory = SharedMemory(schedule, self.dtype, swizzled)

    def mmas(self) -> Any:
        """Products, called by their results, if they are of several kinds."""
        raise NotImplementedError

    def load_operation(self) -> Any:
        """The operation by which TMA loads."""
        return cpasync.CopyBulkTensorTileG2SOp()

    def loaded_tiles(self, name: str, mX: cute.Tensor) -> RowTiles:
        """TMA tiles of a tensor as users have it, for loads into the buffer of that name."""
        packed = self.config.features.packed
        return self.memory.row_tiles(self.load_operation(), name, rows_first(mX, packed), packed)

    def launch(self, kernel: Any, tiles: Int32, stream: Any, num_sms: Int32 | None = None, ctas_an_sm: int = 1) -> None:
        """Launches as many CTAs, or clusters, as SMs have room for or, if the kernel is not persistent, one a tile."""
        c, ctas = self.config, self.config.ctas_a_tile
        clusters = cutlass.min(tiles, ctas_an_sm * num_sms // ctas) if c.persistent else tiles
        kernel.launch(
            grid=[ctas * clusters, 1, 1],
            block=[self.schedule.threads, 1, 1],
            cluster=[ctas, 1, 1] if ctas > 1 else None,
            stream=stream,
            min_blocks_per_mp=ctas_an_sm,
            preferred_smem_carveout=100 if ctas_an_sm > 1 else None,  # or the compiler asks a GPU
        )


class ForwardMmas(NamedTuple):
    """Products of a forward kernel, called by their results."""

    S: cute.TiledMma
    O: cute.TiledMma  # noqa: E741 (the output's name)


class ForwardKernel(MainKernel):
    """The forward kernel of one configuration. Subclasses have products and the device's side, ``kernel``."""

    def __init__(self, config: Any, schedule: Schedule, swizzled: Callable[..., cute.ComposedLayout]):
        super().__init__(config, schedule, swizzled)
        self.row_tables = RowTables(config)
        features = config.features
        self.has_no_sO = features.wide or features.half_blocks
        # Of the largest logits: those that do not follow from P are looked for among the scores.
        self.keeps_max_P = features.max_logits and not features.caps_or_biases
        self.keeps_max_logits = features.max_logits and features.caps_or_biases

    @cute.jit
    def __call__(self, a: ForwardArguments, stream) -> None:
        """Launches the kernel, behind those that make the tables of a mask."""
        c = self.config
        mO, mLSE = rows_first(a.mO, c.features.packed), numbers_first(a.mLSE, c.features.packed)
        mmas, tma = self.mmas(), self.tma(a, mO)
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        kernel = self.kernel(mmas, tma, mO, mLSE, a, self.row_tables(a, stream), scales)
        self.launch(kernel, QueryTiles(c).num(a), stream, a.numbers.num_sms)

    def tma(self, a: ForwardArguments, mO: cute.Tensor) -> ForwardTiles:
        c, packed, row_tiles = self.config, self.config.features.packed, self.memory.row_tiles
        load, store = self.load_operation(), cpasync.CopyBulkTensorTileS2GOp()
        mQ, mK, mV = (rows_first(x, packed) for x in (a.mQ, a.mK, a.mV))
        rows = BLOCK // 2 if c.features.half_blocks else None  # of K and V, that come together
        return ForwardTiles(
            Q=row_tiles(load, "sQ", _by_groups(mQ, c.group), packed and c.group == 1),
            K=row_tiles(load, "sK", mK, packed, rows),
            V=row_tiles(load, "sV", mV, packed, rows),
            O=None if self.has_no_sO else row_tiles(store, "sO", mO, packed),
        )


def _by_groups(mQ: cute.Tensor, group: int) -> cute.Tensor:
    """Queries whose rows are those of a group's heads in turn, then of the next position.

    Nothing clips such rows where a sequence ends: rows behind it give results that are not stored.
    """
    if group == 1:
        return mQ
    (rows, d, heads, batch), (row, column, head, entry) = mQ.shape, mQ.stride
    layout = cute.make_layout(
        ((group, rows), d, heads // group, batch), stride=((head, row), column, head * group, entry)
    )
    return cute.make_tensor(mQ.iterator, layout)


class BackwardKernel(MainKernel):
    """The backward kernel of one configuration. Subclasses have products, TMA tiles and the device side, ``kernel``."""

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        c = self.config
        mdK, mdV = (rows_first(x, c.features.packed) for x in (a.mdK, a.mdV))
        mmas, tma = self.mmas(), self.tma(a, mdK, mdV)
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        kernel = self.kernel(mmas, tma, mdK, mdV, a, ws, scales)
        self.launch(kernel, num_key_tiles(c, a), stream, a.numbers.num_sms, c.ctas_an_sm)


class BackwardPass:
    """The kernels of a backward pass, launched one after the other by one call of compiled code."""

    def __init__(self, config: Any, main: BackwardKernel):
        self.tables, self.preprocess, self.main = KeyTables(config), Preprocess(config), main

    @cute.jit
    def __call__(self, a: BackwardArguments, stream) -> None:
        ws = self.tables.begin(a, stream)
        self.preprocess(a, ws, stream)
        self.tables.finish(a, ws, stream)
        self.main(a, ws, stream)


class BiasGradientKernel(MainKernel):
    """The bias-gradient kernel of one configuration, and the float32 sums of CTAs that share a tile of the gradient.

    Subclasses have products and the device's side, ``kernel`` and ``add_up``.
    """

    threads = 256  # that compute, and have as many sums each

    def __init__(self, config: Any, schedule: Schedule, swizzled: Callable[..., cute.ComposedLayout]):
        super().__init__(config, schedule, swizzled)
        self.map = PieceMap(config)
        self.tables = PieceTables(config, self.map)

    @cute.jit
    def __call__(self, a: BiasGradientArguments, stream) -> None:
        """Launches the kernel, and if tiles are split the one that adds up their parts."""
        c = self.config
        tensors = zip(PIECE_OPERANDS, (a.mQ, a.mK, a.mdO, a.mV), strict=True)
        tma = tuple(self.loaded_tiles(name, x) for name, x in tensors)
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        tables, ctas = self.tables(a, stream), math.prod(self.map.owners(a))
        # Lse and delta (lse or delta, head, block, query), which the backward pass left at the start of its workspace.
        stats, partial_sums = (2, a.mQ.shape[-2], a.numbers.num_m_blocks, c.stats_m), None
        mStats = carved(a.mWorkspace, {"mStats": stats}, Float32)["mStats"]
        if const_expr(c.split):  # sums (CTA, four, thread, number) of CTAs that share a tile
            shape = ctas * a.numbers.splits, c.tile_m * c.tile_n // (4 * self.threads), self.threads, 4
            partial_sums = carved(a.mSums, {"": shape}, Float32)[""]
        kernel, grid = self.kernel(self.mmas(), tma, a, tables, mStats, partial_sums, scales), ctas * a.numbers.splits
        kernel.launch(grid=[grid, 1, 1], block=[self.schedule.threads, 1, 1], stream=stream, min_blocks_per_mp=1)
        if const_expr(c.split):
            self.add_up(a, partial_sums).launch(grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.jit
    def leave_sums(self, sums: cute.Tensor, partial_sums: cute.Tensor, thread: Int32) -> None:
        """Stores a thread's sums to the place of its CTA."""
        index, _, _ = cute.arch.block_idx()
        part, fours = partial_sums[Int64(index), None, thread, None], _by_fours(sums)
        for i in cutlass.range_constexpr(cute.size(fours, mode=[1])):
            cute.autovec_copy(fours[None, i], part[i, None])

    @cute.jit
    def gather_sums(
        self, a: BiasGradientArguments, sums: cute.Tensor, partial_sums: cute.Tensor, thread: Int32
    ) -> None:
        """Adds up what a thread of each CTA that shares the tile has stored, in the order of the CTAs."""
        sums.fill(0.0)
        four, fours = cute.make_rmem_tensor(4, sums.element_type), _by_fours(sums)
        index, _, _ = cute.arch.block_idx()
        for split in cutlass.range(a.numbers.splits, unroll=1):
            part = partial_sums[Int64(split * cute.arch.grid_dim()[0] + index), None, thread, None]
            for i in cutlass.range_constexpr(cute.size(fours, mode=[1])):
                cute.autovec_copy(part[i, None], four)
                for j in cutlass.range_constexpr(4):
                    fours[j, i] = fours[j, i] + four[j]


def _by_fours(sums: cute.Tensor) -> cute.Tensor:
    """Registers as (number of four, four)."""
    return cute.make_tensor(sums.iterator, cute.make_layout((4, cute.size(sums) // 4)))
