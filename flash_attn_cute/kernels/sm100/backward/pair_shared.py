"""Shared memory of a CTA of a pair (``pair``, ``pair_two_pass``), and what it sends to the other CTA."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.common.assembly import copy_to_cta
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm100.config import CTAS, PART_ROWS
from flash_attn_cute.kernels.sm100.frame import InPair

OUT = CTAS  # the place of dS that is to be sent


@dataclass(frozen=True)
class PairShared(Shared, InPair):
    """Shared memory of a CTA and what guards it."""

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
