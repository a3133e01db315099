"""Turns: the order in which tiles add to a block in global memory.

A counter a block, 0 at first, counts the tiles that have added to it. Whoever is to be the (n + 1)-th waits until it is
n, adds, and counts itself. A sum then has one order whatever the GPU does, and as float addition is all that depends on
it, the same bits. (FlashAttention orders its dQ like this.) The first one overwrites the block, so nobody has to zero
it. Waits end if turns follow the order in which tiles are taken (``sparsity.order``).

The wait acquires, and the count, or a fence before several, releases, at the scope of the GPU. Both belong to one
thread each; between it and the threads that add stands a barrier of the CTA, and such orders are cumulative. So what
one turn stores or adds, by any thread of the CTA, comes before what the next one adds. Where TMA adds, its warp waits
for the turn, then for the proxy fence, tells TMA to add, and waits until it has, before it counts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash_attn_cute.kernels.common.assembly import sleep
from flash_attn_cute.kernels.common.ring import Ring, arrive_as_warp

_STAGES = 4  # turns that have come and are not passed on yet
_NAP = 256  # nanoseconds


def counter(mTurns: cute.Tensor, part: Int32 | int, head: Int32 | int, block: Int32) -> cute.Pointer:
    """That of a block, out of (parts, heads, blocks); those of the blocks behind it follow."""
    return cute.domain_offset((part, head, block), mTurns).iterator


def added(counter: cute.Pointer) -> Int32:
    """How many tiles have."""
    return cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def wait(counter: cute.Pointer, turn: Int32) -> None:
    """Returns, to a converged warp, when it is that turn: when that many tiles have added.

    Or more: offsets that nobody has checked may let sequences share a block, which is to be wrong, not to hang. Where
    they decrease, though, tiles may be waited for that nobody takes; FLASH_ATTN_CUTE_CHECK=1 refuses them.
    """
    if cute.arch.lane_idx() == 0:
        while added(counter) < turn:
            pass
    cute.arch.sync_warp()


@cute.jit
def wait_for_all(mTurns: cute.Tensor, head: Int32, block: Int32, tiles: Int32) -> None:
    """Returns, to a converged warp, when that many tiles have added to all parts of a block, which may take long."""
    part = cute.arch.lane_idx()
    if part < mTurns.shape[0]:
        while added(counter(mTurns, part, head, block)) < tiles:
            sleep(_NAP)
    cute.arch.sync_warp()


@cute.jit
def count(counter: cute.Pointer) -> None:
    """Counts this tile, by one thread, to which a barrier has told that all others have added."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


@cute.jit
def wait_as_warpgroup(counter: cute.Pointer, turn: Int32, barrier: cutlass.Constexpr) -> None:
    """``wait`` for a converged warpgroup, whose threads are to add, at one of its named barriers."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        wait(counter, turn)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


@cute.jit
def count_as_warpgroup(counter: cute.Pointer, barrier: cutlass.Constexpr) -> None:
    """``count`` for a converged warpgroup, all of whose threads have added."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
        with cute.arch.elect_one():
            count(counter)


@dataclass(frozen=True)
class Turns:
    """Waiting and counting by two warps of their own, so that those that add do neither. Steps count from 0 on.

    A ring of four: the waiting warp fills it, when a step's turn has come, and the counting warp empties it, when that
    has been passed on. In between each adding warp arrives at a barrier, when it has added.
    """

    barriers: cute.Pointer  # those of the ring, then four of additions
    turns: cute.Pointer  # a stage's: how many have added before

    num_barriers = 3 * _STAGES
    num_stages = _STAGES

    @property
    def _ring(self) -> Ring:
        return Ring(self.barriers, _STAGES)

    def _added(self, step: Int32) -> cute.Pointer:
        return self.barriers + (2 * _STAGES + self._ring.stage(step))

    @cute.jit
    def init(self, adding_warps: cutlass.Constexpr) -> None:
        """Before all else, by one thread."""
        self._ring.init(full=1, empty=1)
        for i in cutlass.range_constexpr(_STAGES):
            cute.arch.mbarrier_init(self.barriers + (2 * _STAGES + i), adding_warps)

    @cute.jit
    def call(self, step: Int32, counter: cute.Pointer, turn: Int32) -> None:
        """By the waiting warp: waits for a step's turn, and tells the adding warps."""
        self._ring.wait_empty(step)  # from the counting warp
        wait(counter, turn)
        with cute.arch.elect_one():
            (self.turns + self._ring.stage(step)).store(turn)
        self._ring.arrive(step)  # to the adding warps

    def wait(self, step: Int32) -> Boolean:
        """By the adding warps: until a step's turn has come. Returns whether it is the first one."""
        self._ring.wait_full(step)  # from the waiting warp
        return (self.turns + self._ring.stage(step)).load() == 0

    @cute.jit
    def have_added(self, step: Int32) -> None:
        """By each adding warp: it has."""
        arrive_as_warp(self._added(step))  # to the counting warp

    @cute.jit
    def pass_on(self, step: Int32, counters: cute.Pointer, another: Boolean | bool) -> Int32:
        """By the counting warp: a step's turn, and with it the next step's if that has ``another`` block and has added.

        Returns the number of steps. The fence takes longer than a step at times, and as long for two as for one.
        """
        cute.arch.mbarrier_wait(self._added(step), self._ring.phase(step))  # from the adding warps
        steps = Int32(1)
        if another and cute.arch.mbarrier_test_wait(self._added(step + 1), self._ring.phase(step + 1)):
            steps = Int32(2)
        steps = cute.arch.shuffle_sync(steps, 0)
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            for i in cutlass.range(steps, unroll=1):
                cute.arch.red(counters + i, Int32(1), op="add", dtype="s32", sem="relaxed", scope="gpu")
        for i in cutlass.range(steps, unroll=1):
            self._ring.release(step + i)  # to the waiting warp
        return steps
