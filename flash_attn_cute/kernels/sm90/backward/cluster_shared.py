"""Shared memory of the backward kernel above d = 128: layouts, storage and barriers (see ``cluster``)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.semaphores import OrderedAdds
from flash_attn_cute.kernels.sm90.config import BackwardClusterConfig
from flash_attn_cute.kernels.sm90.shared import swizzled

STAGES = 2  # of Q, of dO, or as many of its halves, and of dS
_CTAS = 2
_WARPS = 4  # of a warpgroup


class Layouts(NamedTuple):
    """Layouts of the operands."""

    sK: cute.ComposedLayout  # (64, d)
    sK_peer: cute.ComposedLayout  # (64, columns of dQ)
    sV: cute.ComposedLayout  # (64, d_v)
    sQ: cute.ComposedLayout  # (64, d, stage)
    sdO: cute.ComposedLayout  # (64, d_v / parts of dO, stage)
    sdS: cute.ComposedLayout  # (64, 64, own and the other CTA's, stage)


def layouts_of(config: BackwardClusterConfig, dtype: type) -> Layouts:
    """How operands lie in shared memory."""
    c = config
    return Layouts(
        # No swizzled atom of K may hold columns of both halves of dQ.
        sK=swizzled(dtype, c.columns_dQ, (64, c.tile_d)),
        sK_peer=swizzled(dtype, c.columns_dQ, (64, c.columns_dQ)),
        sV=swizzled(dtype, c.tile_dv, (64, c.tile_dv)),
        sQ=swizzled(dtype, c.tile_d, (64, c.tile_d, STAGES)),
        sdO=swizzled(dtype, c.columns_dO, (64, c.columns_dO, STAGES)),
        sdS=swizzled(dtype, 64, (64, 64, 2, STAGES)),
    )


def storage_of(config: BackwardClusterConfig, dtype: type, layouts: Layouts) -> type:
    """All shared memory of a CTA."""
    deterministic = config.features.deterministic

    @cute.struct
    class Storage:
        k_barrier: cute.struct.MemRange[Int64, 1]
        v_barrier: cute.struct.MemRange[Int64, 1]
        q_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
        do_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
        p_barriers: cute.struct.MemRange[Int64, 2]
        ds_barriers: cute.struct.MemRange[Int64, 2 * STAGES]
        order_barriers: cute.struct.MemRange[Int64, OrderedAdds.num_barriers if deterministic else 0]
        order_turns: cute.struct.MemRange[Int32, OrderedAdds.num_stages if deterministic else 0]
        tile: cute.struct.MemRange[Int32, 1]
        stats: cute.struct.Align[cute.struct.MemRange[Float32, 2 * 64 * STAGES], 128]
        sP: cute.struct.Align[cute.struct.MemRange[Int32, 64 * 64 // 2], 128]
        sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK)], 1024]
        sK_peer: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sK_peer)], 1024]
        sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sV)], 1024]
        sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sQ)], 1024]
        sdO: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdO)], 1024]
        sdS: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layouts.sdS)], 1024]

    return Storage


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sK: cute.Tensor  # (64, d)
    sK_peer: cute.Tensor  # (64, columns of dQ): the other CTA's keys, this one's columns of dQ
    sV: cute.Tensor  # (64, d_v)
    sQ: cute.Tensor  # (64, d, stage)
    sdO: cute.Tensor  # (64, d_v / parts of dO, stage)
    sdS: cute.Tensor  # (64, 64, own and the other CTA's keys, stage)
    sP: cute.Tensor  # (4, thread, 4): pairs of weights, or of rW, as a thread has them in registers
    dS: cute.Pointer  # sdS without its swizzle
    stats: cute.Tensor  # (64, lse and delta, stage of q)
    k_full: cute.Pointer  # barriers
    v_full: cute.Pointer
    q: Ring
    do: Ring
    p: Ring
    ds: Ring
    order: OrderedAdds
    rank: Int32  # of this CTA

    @staticmethod
    def at(config: BackwardClusterConfig, dtype: type, storage: Any, rank: Int32) -> "Shared":
        """Shared memory of a CTA, on the device."""
        return Shared(
            **{
                name: getattr(storage, name).get_tensor(layout.outer, swizzle=layout.inner)
                for name, layout in layouts_of(config, dtype)._asdict().items()
            },
            sP=storage.sP.get_tensor(cute.make_layout((4, 128, 4), stride=(1, 4, 512))),
            dS=storage.sdS.data_ptr(),
            stats=storage.stats.get_tensor(cute.make_layout((64, 2, STAGES))),
            k_full=storage.k_barrier.data_ptr(),
            v_full=storage.v_barrier.data_ptr(),
            q=Ring(storage.q_barriers.data_ptr(), STAGES),
            do=Ring(storage.do_barriers.data_ptr(), STAGES),
            p=Ring(storage.p_barriers.data_ptr(), 1),
            ds=Ring(storage.ds_barriers.data_ptr(), STAGES),
            order=OrderedAdds(storage.order_barriers.data_ptr(), storage.order_turns.data_ptr()),
            rank=rank,
        )

    def init(self, config: BackwardClusterConfig) -> None:
        """All barriers, before all else, by one thread; who arrives is in ``cluster``."""
        cute.arch.mbarrier_init(self.k_full, 1)
        cute.arch.mbarrier_init(self.v_full, 1)
        self.q.init(full=1, empty=_CTAS * 2 * _WARPS)
        self.do.init(full=1, empty=_CTAS * 2 * _WARPS)
        self.p.init(full=_WARPS, empty=_WARPS)
        self.ds.init(full=_WARPS, empty=_CTAS * _WARPS)
        if const_expr(config.features.deterministic):
            self.order.init(_WARPS)
