"""Shared memory of the backward kernels, as their roles read it: ``backward_schedule`` describes all of it."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.assembly import copy_to_cta
from flash_attn_cute.kernels.common.key_tiles import WorkTileBroadcast
from flash_attn_cute.kernels.common.ring import Ring, StepInfo
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES, BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import ADDING_WARPS
from flash_attn_cute.kernels.sm100.config import CTAS, PART_ROWS
from flash_attn_cute.kernels.sm100.frame import Held, InPair

OUT = CTAS  # the place of dS that is to be sent


def piece_number(config: BackwardConfig, step: Int32, i: int) -> Int32:
    """Number of a step's i-th piece, counted over the steps of its adding warp."""
    return step // ADDING_WARPS * config.pieces_dQ + i


@dataclass(frozen=True)
class Shared(WorkTileBroadcast, Held):
    """Shared memory and what guards it."""

    sK: cute.Tensor
    sV: cute.Tensor
    sQ: cute.Tensor
    sdO: cute.Tensor
    sdS: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    dQ: cute.Tensor
    tile_fields: cute.Tensor
    # Under a mask, a step's block of queries, its code and, with a bias, the head, to compute warps; and which block of
    # dQ, counted over all heads, it adds to, and its turn, to adding warps, whose steps are those that have a dQ.
    entries: StepInfo | None
    turns: StepInfo | None

    rank = 0  # of the CTA, among those of a tile

    @property
    def tiles(self) -> Ring:
        """The ring of published tiles."""
        return self.rings.tiles

    def pieces(self, step: Int32) -> Ring:
        """Ring of dQ's pieces for the adding warp that has the step. Each adding warp has every other step."""
        return Ring(self.rings.pieces_even.barriers + 2 * DQ_STAGES * (step % ADDING_WARPS), DQ_STAGES)


@dataclass(frozen=True)
class PairShared(InPair, Shared):
    """Shared memory of a CTA of a pair, and what it sends to the other one."""

    sK_columns: cute.Tensor
    sQ_columns: cute.Tensor
    sdO_columns: cute.Tensor
    rank: Int32
    sdV: cute.Tensor | None = None  # where dV leaves through, in two passes

    def _signal(self, tile_idx: Int32) -> None:
        """Signals, by one thread of the leader, that the fields are written, and sends them to the second CTA."""
        self.tiles.publish(tile_idx, self.tile_fields, self.tile_fields)

    @cute.jit
    def send_dS(self, step: Int32, warp: Int32) -> None:
        """By a warp, whose 32 keys' dS of the other CTA's queries are at the last place: sends them there.

        The other CTA's same warp, or that beside it, sends as many bytes as this one.
        """
        numbers = PART_ROWS // 4 * cute.size(self.sdS, mode=[1])
        source, target = (self.sdS.iterator + (4 * place + warp) * numbers for place in (OUT, self.rank))
        full = self.rings.exchange.full(step)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * numbers)
            copy_to_cta(1 - self.rank, target, source, 2 * numbers, full)
