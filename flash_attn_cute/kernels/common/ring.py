"""Rings: stages of shared memory that steps use in rotation, with their full and empty mbarriers."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32, const_expr
from cutlass._mlir.dialects import nvvm

from flash_attn_cute.kernels.common.assembly import copy_to_cta

_LEADER, _SECOND = 0, 1  # ranks of a pair's CTAs, of which the first one issues products


@cute.jit
def arrive_as_warp(barrier: cute.Pointer, rank: Constexpr = None) -> None:
    """Arrives once at a barrier, for a converged warp; with a rank, at that CTA's barrier.

    With a rank the arrival has cluster scope: the waiter in that CTA sees what this warp did before.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if const_expr(rank is None):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier, rank, scope=nvvm.MemScopeKind.CLUSTER)


def end_reads() -> None:
    """Ends this thread's reads of shared memory, ahead of an arrival behind which TMA overwrites what was read.

    Without it they can be so late that they read what TMA has written: the arrival orders them before stores, but not
    before the asynchronous proxy's. CUTLASS's epilogues have the same fence. Products read by that proxy themselves.
    """
    cute.arch.fence_proxy("async.shared", space="cta")


@dataclass(frozen=True)
class Ring:
    """Stages, a power of 2. A step's number, counted from 0, gives its stage and the phase of the stage's barriers.

    ``init`` sets the arrive counts of full and empty stages.
    """

    barriers: cute.Pointer  # those of full stages, then those of empty ones
    stages: Constexpr
    num_bytes: Constexpr = 0  # that TMA brings to a stage
    stages_of_all: Constexpr = 0  # if this is a part of a ring: stages of all parts

    def part(self, nth: Int32 | int, parts: int) -> "Ring":
        """The ring of the stages that are the nth part, which steps use in rotation by themselves."""
        stages = self.stages // parts
        return Ring(self.barriers + nth * stages, stages, self.num_bytes, self.stages)

    @cute.jit
    def init(self, full: Constexpr, empty: Constexpr) -> None:
        """Initialises the barriers, by one thread, before any role starts.

        Arrive counts of full and of empty stages are given; None: without empty ones.
        """
        for i in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(self.barriers + i, full)
            if const_expr(empty is not None):
                cute.arch.mbarrier_init(self.barriers + self.stages + i, empty)

    def stage(self, step: Int32) -> Int32:
        return step & self.stages - 1

    def full(self, step: Int32) -> cute.Pointer:
        """Barrier at which a step's data arrive."""
        return self.barriers + self.stage(step)

    def empty(self, step: Int32) -> cute.Pointer:
        """Barrier at which a step's consumers release its stage."""
        return self.barriers + ((self.stages_of_all or self.stages) + self.stage(step))

    def phase(self, step: Int32) -> Int32:
        """Phase of the full barrier that a step waits for."""
        return step >> self.stages.bit_length() - 1 & 1

    def wait_full(self, step: Int32) -> None:
        """Waits, as a consumer, for a step's data."""
        cute.arch.mbarrier_wait(self.full(step), self.phase(step))

    def is_full(self, step: Int32) -> Boolean:
        """Whether a step's data have arrived."""
        return cute.arch.mbarrier_test_wait(self.full(step), self.phase(step))

    def wait_empty(self, step: Int32) -> None:
        """Waits, as the producer, until the step that had this stage before is released."""
        cute.arch.mbarrier_wait(self.empty(step), self.phase(step) ^ 1)

    def wait_all_empty(self, step: Int32) -> None:
        """Waits, as the producer, until all stages are released by the steps before ``step``, which is the end."""
        for i in range(self.stages):
            self.wait_empty(step + i)

    def announce(self, step: Int32) -> None:
        """Arrives at a step's full barrier and announces the bytes to come, by one thread of the producer."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.full(step), self.num_bytes)

    @cute.jit
    def acquire(self, step: Int32) -> None:
        """Waits, as a producer warp, until a step's stage is released, and announces the bytes to come."""
        self.wait_empty(step)
        with cute.arch.elect_one():
            self.announce(step)

    @cute.jit
    def arrive(self, step: Int32) -> None:
        """Arrives at a step's full barrier, as a producer warp that has written its data."""
        arrive_as_warp(self.full(step))

    @cute.jit
    def release(self, step: Int32) -> None:
        """Arrives at a step's empty barrier, as a consumer warp that has read its data."""
        arrive_as_warp(self.empty(step))

    @cute.jit
    def release_read(self, step: Int32) -> None:
        """``release`` by a consumer warp that has read the step's data into registers."""
        end_reads()
        self.release(step)

    def release_fields(self, step: Int32) -> None:
        """``release`` by a consumer warp that has read the step's fields, which the producer has published."""
        self.release(step)

    @cute.jit
    def release_in_both(self, step: Int32) -> None:
        """``release`` at the barriers of both CTAs of a cluster."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < 2:
            cute.arch.mbarrier_arrive(self.empty(step), lane)


@dataclass(frozen=True)
class StepInfo:
    """Numbers that the producer publishes step by step."""

    ring: Ring
    numbers: cute.Tensor  # (number, stage)

    @staticmethod
    def of(rings: Any, tensors: dict[str, cute.Tensor | None]) -> "dict[str, StepInfo | None]":
        """Numbers in tensors by the names of their rings; None for those that the configuration does without."""
        return {name: None if x is None else StepInfo(getattr(rings, name), x) for name, x in tensors.items()}

    @cute.jit
    def publish(self, step: Int32, numbers: tuple[Int32, ...]) -> None:
        """Publishes the numbers of a step, by the producer, when all readers have released the stage."""
        self.ring.wait_empty(step)  # from those who read
        with cute.arch.elect_one():
            for i, number in enumerate(numbers):
                self.numbers[i, self.ring.stage(step)] = number
            cute.arch.mbarrier_arrive(self.ring.full(step))  # to them

    def read(self, step: Int32) -> tuple[Int32, ...]:
        """Reads the numbers of a step and releases its stage, once by each warp."""
        self.ring.wait_full(step)  # from the producer
        found = tuple(self.numbers[i, self.ring.stage(step)] for i in range(cute.size(self.numbers, mode=[0])))
        self.ring.release(step)  # to it
        return found


class LedRing(Ring):
    """A ring of a pair of CTAs with the leader's barriers: warps of both arrive there, and bytes of TMA of both."""

    @cute.jit
    def arrive(self, step: Int32) -> None:
        """Arrives at the leader's full barrier."""
        arrive_as_warp(self.full(step), _LEADER)

    @cute.jit
    def release(self, step: Int32) -> None:
        """Arrives at the leader's empty barrier."""
        arrive_as_warp(self.empty(step), _LEADER)

    @cute.jit
    def release_fields(self, step: Int32) -> None:
        """``release`` of fields, over which ``publish`` writes as TMA does in the second CTA."""
        end_reads()
        self.release(step)

    def publish(self, step: Int32, fields: cute.Tensor, sent: cute.Tensor) -> None:
        """Publishes a step's fields to both CTAs, by the thread of the leader that has written them.

        Each CTA reads them in ``fields`` (field, stage), of Int32. The second CTA finds there what ``sent`` has in the
        leader's memory: ``fields``, or others of that shape.
        """
        full, stage = self.full(step), self.stage(step)
        source, target = (x[None, stage].iterator for x in (sent, fields))
        cute.arch.fence_proxy("async.shared", space="cta")
        copy_to_cta(Int32(_SECOND), target, source, _bytes_of(fields), full)
        cute.arch.mbarrier_arrive(full)

    @cute.jit
    def expect(self, step: Int32, fields: cute.Tensor) -> None:
        """Announces the bytes of a step that the leader will ``publish``, by a warp of the second CTA."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(step), _bytes_of(fields))


def _bytes_of(fields: cute.Tensor) -> int:
    return 4 * cute.size(fields, mode=[0])
