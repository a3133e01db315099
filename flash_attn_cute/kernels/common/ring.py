"""Stages of shared memory that are used in turn, step by step, and the barriers that guard them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass._mlir.dialects import nvvm

from flash_attn_cute.kernels.common.assembly import copy_to_cta

_LEADER, _SECOND = 0, 1  # ranks of a pair's CTAs, of which the first one issues products


@cute.jit
def arrive_as_warp(barrier: cute.Pointer, rank: cutlass.Constexpr = None) -> None:
    """One arrival, when all threads of the warp have come to it; with a rank, at that CTA's barrier.

    Of a cluster: then whoever waits there sees what was done here before.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        if const_expr(rank is None):
            cute.arch.mbarrier_arrive(barrier)
        else:
            cute.arch.mbarrier_arrive(barrier, rank, scope=nvvm.MemScopeKind.CLUSTER)


@dataclass(frozen=True)
class Ring:
    """Stages, a power of 2; the number of a step, counted from 0, says which stage and in what phase its barriers are.

    A stage is filled and emptied by whoever ``init`` counts: arrivals, and bytes that were announced with one of them.
    """

    barriers: cute.Pointer  # those of full stages, then those of empty ones
    stages: cutlass.Constexpr

    @cute.jit
    def init(self, full: cutlass.Constexpr, empty: cutlass.Constexpr) -> None:
        """Before all else, by one thread: how many arrivals fill a stage and how many empty it."""
        for i in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(self.barriers + i, full)
            cute.arch.mbarrier_init(self.barriers + self.stages + i, empty)

    def stage(self, step: Int32) -> Int32:
        """Where a step's data lie."""
        return step & self.stages - 1

    def full(self, step: Int32) -> cute.Pointer:
        """The barrier at which a step's data arrive."""
        return self.barriers + self.stage(step)

    def empty(self, step: Int32) -> cute.Pointer:
        """The barrier at which a step is over."""
        return self.barriers + (self.stages + self.stage(step))

    def phase(self, step: Int32) -> Int32:
        """Of the barriers of a step's stage, once it is full."""
        return step >> self.stages.bit_length() - 1 & 1

    def wait_full(self, step: Int32) -> None:
        """Until a step's data are there."""
        cute.arch.mbarrier_wait(self.full(step), self.phase(step))

    def is_full(self, step: Int32) -> Boolean:
        """Whether they are."""
        return cute.arch.mbarrier_test_wait(self.full(step), self.phase(step))

    def wait_empty(self, step: Int32) -> None:
        """Until the step before that had this stage is over."""
        cute.arch.mbarrier_wait(self.empty(step), self.phase(step) ^ 1)

    @cute.jit
    def arrive(self, step: Int32) -> None:
        """By a warp: what it had to write is there."""
        arrive_as_warp(self.full(step))

    @cute.jit
    def release(self, step: Int32) -> None:
        """By a warp: it has read what it had to."""
        arrive_as_warp(self.empty(step))

    @cute.jit
    def release_in_both(self, step: Int32) -> None:
        """By a warp: it has read what it had to, in the eyes of both CTAs of a cluster."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < 2:
            cute.arch.mbarrier_arrive(self.empty(step), lane)


class LedRing(Ring):
    """One of several CTAs, that the first one of the cluster counts for: arrivals of all are at its barriers."""

    @cute.jit
    def arrive(self, step: Int32) -> None:
        """As of ``Ring``."""
        arrive_as_warp(self.full(step), _LEADER)

    @cute.jit
    def release(self, step: Int32) -> None:
        """As of ``Ring``."""
        arrive_as_warp(self.empty(step), _LEADER)

    def publish(self, step: Int32, fields: cute.Tensor, sent: cute.Tensor) -> None:
        """By the thread of a pair's leader that has written a step's fields: both CTAs may read them.

        Args:
            step: of the ring.
            fields: (field, stage) of Int32, where each CTA reads them.
            sent: what the second CTA is to find there, in the leader's memory: ``fields``, or others of that shape.
        """
        full, stage = self.full(step), self.stage(step)
        source, target = (x[None, stage].iterator for x in (sent, fields))
        cute.arch.fence_proxy("async.shared", space="cta")
        copy_to_cta(Int32(_SECOND), target, source, _bytes_of(fields), full)
        cute.arch.mbarrier_arrive(full)

    @cute.jit
    def expect(self, step: Int32, fields: cute.Tensor) -> None:
        """By a warp of a pair's second CTA: the leader is to ``publish`` of a step."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full(step), _bytes_of(fields))


def _bytes_of(fields: cute.Tensor) -> int:
    """Those of a step."""
    return 4 * cute.size(fields, mode=[0])


class RingSet:
    """A kernel's rings, the fields of a dataclass."""

    @staticmethod
    def stages(config: Any) -> dict[str, int]:
        """Of each, by its name."""
        raise NotImplementedError

    @classmethod
    def at(cls, config: Any, barriers: cute.Pointer) -> Any:
        """One after the other."""
        rings, first = {}, 0
        for name, stages in cls.stages(config).items():
            rings[name] = Ring(barriers + first, stages)
            first += 2 * stages
        return cls(**rings)
