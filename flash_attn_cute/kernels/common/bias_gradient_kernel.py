"""The bias-gradient kernel, on the host, and the float32 sums of CTAs that share a tile of the gradient."""

import math
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BiasGradientArguments
from flash_attn_cute.kernels.common.bias_pieces import PieceMap, PieceTables
from flash_attn_cute.kernels.common.main_kernels import MainKernel
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.workspace import carved
from flash_attn_cute.kernels.schedule import PIECE_OPERANDS, Schedule


class BiasGradientKernel(MainKernel):
    """The kernel of one configuration. Subclasses have products and the device's side, ``kernel`` and ``add_up``."""

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
        self.Storage = self.memory.struct()
        scales = ScoreScales.of(c.features, a.numbers.softmax_scale, a.numbers.softcap)
        tables, ctas = self.tables(a, stream), math.prod(self.map.owners(a))
        # Lse and delta (lse or delta, head, block, query), which the backward pass left at the start of its workspace.
        stats, partial_sums = (2, a.mQ.shape[-2], a.numbers.num_m_blocks, c.stats_m), None
        mStats = carved(a.mWorkspace, {"mStats": stats}, Float32)["mStats"]
        if const_expr(c.split):  # sums (CTA, four, thread, number) of CTAs that share a tile
            shape = ctas * a.numbers.splits, c.tile_m * c.tile_n // (4 * self.threads), self.threads, 4
            partial_sums = carved(a.mSums, {"": shape}, Float32)[""]
        self.kernel(self.mmas(), tma, a, tables, mStats, partial_sums, scales).launch(
            grid=[ctas * a.numbers.splits, 1, 1],
            block=[self.schedule.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
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
