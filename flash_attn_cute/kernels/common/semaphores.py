"""Semaphores: the order in which tiles add to a block of a float32 sum in global memory.

A block has one semaphore: an Int32 that starts at 0 and counts the tiles that have added. The tile of turn n waits
until the semaphore is n, adds its part, and signals, which makes it n + 1. The sum then has one order whatever the GPU
does, and because the order of float additions is all that could vary, it has the same bits in every run.
(FlashAttention orders its dQ like this.) The tile of turn 0 stores instead of adding, so that no kernel has to zero the
block. Every wait ends if turns follow the order in which tiles are taken (``sparsity.dq_order.turns``).

Where sums are in fixed point (``common.fixed_point``) a semaphore starts at minus the number of tiles that add, so that
it counts, below 0, those that have yet to. Tiles are then taken in the order of unordered passes, which is the opposite
one. A tile of turn n is the last but n to add: it waits until the semaphore is -1 - n. No tile stores.

Unordered additions need a zeroed block. A warp of the main kernel zeroes it, or the preprocessing kernel does. In the
former case a semaphore is ``NOT_ZEROED`` until its block is zero, and tiles wait for that. When a tile ends, it signals
at all of its blocks.

Memory order: the wait is an acquire and the signal (or a fence before several signals) a release, both at GPU scope and
both by one thread. A barrier of the CTA stands between that thread and the threads that add, and such orders are
cumulative. So all that one turn stores or adds, by any thread of its CTA, happens before what the next turn adds. Where
TMA adds, its warp waits for the turn, issues the proxy fence, issues the addition, waits for its completion, and then
signals.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

from flash_attn_cute.kernels.common.assembly import sleep
from flash_attn_cute.kernels.common.ring import Ring

_NAP = 256  # nanoseconds
NOT_ZEROED = -(1 << 30)  # initial value if additions are unordered and the main kernel zeroes the block


def at(mSemaphores: cute.Tensor, part: Int32 | int, head: Int32 | int, block: Int32) -> cute.Pointer:
    """Semaphore of a block in a tensor (parts, heads, blocks). Those of the following blocks lie behind it."""
    return cute.domain_offset((part, head, block), mSemaphores).iterator


def value(semaphore: cute.Pointer) -> Int32:
    """Number of tiles that have added, read with acquire order."""
    return cute.arch.load(semaphore, Int32, sem="acquire", scope="gpu")


@cute.jit
def wait(semaphore: cute.Pointer, turn: Int32) -> None:
    """Waits, as a converged warp, until at least ``turn`` tiles have added.

    More than ``turn`` end the wait as well. Unchecked offsets may let sequences share a block, and that has to give
    wrong numbers, not a hang. Decreasing offsets can still make a wait endless, because the tile that is waited for
    does not exist; ``FLASH_ATTN_CUTE_CHECK=1`` refuses them.
    """
    if cute.arch.lane_idx() == 0:
        while value(semaphore) < turn:
            pass
    cute.arch.sync_warp()


@cute.jit
def wait_for_all_parts(mSemaphores: cute.Tensor, head: Int32, block: Int32, tiles: Int32) -> None:
    """Waits, as a converged warp, until ``tiles`` tiles have added to every part of a block; this may take long."""
    part = cute.arch.lane_idx()
    if part < mSemaphores.shape[0]:
        while value(at(mSemaphores, part, head, block)) < tiles:
            sleep(_NAP)
    cute.arch.sync_warp()


@cute.jit
def signal(semaphore: cute.Pointer) -> None:
    """Signals that this tile has added: one thread, behind a barrier at which all threads that add have arrived."""
    cute.arch.red(semaphore, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def signal_blocks(first: cute.Pointer, num_blocks: Int32) -> None:
    """Signals at blocks that follow each other, by a converged warp whose additions to them are complete."""
    cute.arch.fence_acq_rel_gpu()
    for i in cutlass.range(cute.arch.lane_idx(), num_blocks, 32, unroll=1):
        cute.arch.red(first + i, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")


@cute.jit
def signal_zeroed(semaphore: cute.Pointer) -> None:
    """Signals that a block is zero: one thread, behind a barrier at which all threads that zero have arrived."""
    cute.arch.red(semaphore, Int32(-NOT_ZEROED), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_for_zeros(first: cute.Pointer, num_blocks: Int32) -> None:
    """Waits, as a converged warp, until blocks that follow each other are zero. Then TMA may add to them."""
    for i in cutlass.range(cute.arch.lane_idx(), num_blocks, 32, unroll=1):
        while value(first + i) < 0:
            pass
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async.global")  # the zeros come before what TMA adds


@cute.jit
def wait_as_warpgroup(semaphore: cute.Pointer, turn: Int32, barrier: Constexpr) -> None:
    """``wait`` for a converged warpgroup whose threads will add, at one of its named barriers."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        wait(semaphore, turn)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


@cute.jit
def signal_as_warpgroup(semaphore: cute.Pointer, barrier: Constexpr) -> None:
    """``signal`` for a converged warpgroup whose threads have all added, at one of its named barriers."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        with cute.arch.elect_one():
            signal(semaphore)


@dataclass(frozen=True)
class OrderedAdds:
    """Semaphore waits and signals by two warps of their own, so that the warps that add do neither."""

    # Waiting warp -> adding warps: the step's turn has come. Signalling warp -> waiting warp: it is signalled.
    order: Ring
    added: Ring  # adding warps -> signalling warp: this warp has added
    turns: cute.Tensor  # (stage): how many tiles add before this one

    @cute.jit
    def wait_semaphore(self, step: Int32, semaphore: cute.Pointer, turn: Int32) -> None:
        """Waiting warp: waits for the step's turn at its semaphore, then lets the adding warps go."""
        self.order.wait_empty(step)  # from the signalling warp
        wait(semaphore, turn)
        with cute.arch.elect_one():
            self.turns[self.order.stage(step)] = turn
        self.order.arrive(step)  # to the adding warps

    def wait(self, step: Int32) -> Boolean:
        """Adding warps: wait until the step's turn has come. Returns whether this tile is the first contributor."""
        self.order.wait_full(step)  # from the waiting warp
        return self.turns[self.order.stage(step)] == 0

    @cute.jit
    def arrive(self, step: Int32) -> None:
        """Adding warps, each: this warp has added its part of the step."""
        self.added.arrive(step)  # to the signalling warp

    @cute.jit
    def signal(self, step: Int32, first_semaphore: cute.Pointer, another: Boolean | bool) -> Int32:
        """Signalling warp: signals a step, and with it the next one if ``another`` holds and it has been added.

        Returns how many were signalled, 1 or 2. One fence serves both: at times it takes longer than a step, and as
        long for two steps as for one. The next step's semaphore lies behind ``first_semaphore``.
        """
        self.added.wait_full(step)  # from the adding warps
        steps = Int32(1)
        if another and self.added.is_full(step + 1):
            steps = Int32(2)
        steps = cute.arch.shuffle_sync(steps, 0)
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            for i in cutlass.range(steps, unroll=1):
                cute.arch.red(first_semaphore + i, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        for i in cutlass.range(steps, unroll=1):
            self.order.release(step + i)  # to the waiting warp
        return steps
