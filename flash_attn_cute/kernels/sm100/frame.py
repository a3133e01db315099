"""How every kernel begins and ends: its threads, the warps that do so, barriers, and all of tensor memory.

The mma warp allocates tensor memory ahead of a CTA's first barrier, and frees it behind the last. CTAs of a pair meet
before both: one writes to the other's shared memory and arrives at its barriers.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr

from flash_attn_cute.kernels.common.ring import StepInfo
from flash_attn_cute.kernels.common.storage import SharedMemory
from flash_attn_cute.kernels.common.tma import prefetch_descriptors
from flash_attn_cute.kernels.sm100 import tensor_memory
from flash_attn_cute.kernels.sm100.config import MMA_WARP, PRODUCER_WARP, SECOND, TENSOR_COLUMNS, WARPS

THREADS = 32 * WARPS


@cute.jit
def begin(kernel: Constexpr, tma: Constexpr) -> tuple[Int32, Int32, Any]:
    """By all threads: allocates shared and tensor memory, and barriers count from now on.

    Returns the warp's index in the CTA, the thread's in its warpgroup, and ``kernel.shared_memory``. A cluster has one
    CTA, or two that compute products together.
    """
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    thread = cute.arch.thread_idx()[0] % 128
    storage = kernel.memory.allocate()
    shared, init_barriers = kernel.shared_memory(kernel.memory, storage), partial(kernel.memory.init, storage)
    pair = isinstance(shared, InPair)
    if warp_idx == PRODUCER_WARP:
        prefetch_descriptors(tma)
        with cute.arch.elect_one():
            init_barriers()
        cute.arch.mbarrier_init_fence()
    if const_expr(pair):  # both run, and their barriers count
        meet_in_cluster()
    if warp_idx == MMA_WARP:
        cute.arch.alloc_tmem(TENSOR_COLUMNS, shared.holder.iterator, is_two_cta=pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)
    tensor_memory.before_sync()
    cute.arch.sync_threads()
    tensor_memory.after_sync()
    return warp_idx, thread, shared


@cute.jit
def end(shared: Constexpr, warp_idx: Int32) -> None:
    """By all threads, behind their roles: frees the tensor memory that ``shared`` knows of."""
    tensor_memory.before_sync()
    # No thread reads tensor memory any more, nor arrives at barriers or writes to memory of a pair's other CTA.
    pair = isinstance(shared, InPair)
    if const_expr(pair):
        meet_in_cluster()
    else:
        cute.arch.sync_threads()
    if warp_idx == MMA_WARP:
        tensor_memory.after_sync()
        cute.arch.dealloc_tmem(shared.tensor_memory, TENSOR_COLUMNS, is_two_cta=pair)


def meet_in_cluster() -> None:
    """All threads of all its CTAs."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dataclass(frozen=True)
class Held:
    """Shared memory of a CTA: fields of subclasses are buffers of the schedule."""

    rings: Any  # those of the schedule, by name
    holder: cute.Tensor  # where the CTA's tensor memory begins

    is_leader = True  # of a pair's CTAs, or alone

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any, **more: Any) -> Any:
        """Shared memory, on the device, with fields that are no buffers."""
        rings, buffers = memory.rings(storage), {buffer.name for buffer in memory.schedule.shared}
        tensors = memory.tensors(storage, *(x.name for x in fields(cls) if x.name in buffers))
        numbers = StepInfo.of(rings, {x: tensors[x] for x in ("entries", "turns") if x in tensors})
        return cls(**tensors | numbers | more, rings=rings)

    @property
    def tensor_memory(self) -> cute.Pointer:
        """Where it begins, read every time: one register for all roles would live too long."""
        return cute.arch.retrieve_tmem_ptr(Float32, 16, self.holder.iterator)

    @cute.jit
    def announce(self, ring: Constexpr, step: Int32) -> None:
        """Announces the bytes of a step, by a producer warp."""
        with cute.arch.elect_one():
            ring.announce(step)


class InPair:
    """State of a CTA of a pair, ahead of ``Held`` among bases."""

    rank: Int32  # of the CTA: the leader is 0

    @classmethod
    def of(cls, memory: SharedMemory, storage: Any) -> Any:
        """Shared memory of a CTA that knows its rank."""
        return super().of(memory, storage, rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()))

    @property
    def is_leader(self) -> Boolean:
        """Whether it is the CTA that chooses tiles and issues products."""
        return self.rank != SECOND

    @cute.jit
    def announce(self, ring: Constexpr, step: Int32) -> None:
        """Announces the bytes of both CTAs, which arrive at the leader's barrier, by the leader's producer."""
        if self.is_leader:
            with cute.arch.elect_one():
                ring.announce(step)
