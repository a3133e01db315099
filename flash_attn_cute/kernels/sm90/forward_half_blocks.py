"""Attention forward on Hopper for block masks of blocks of 64: a step has two half blocks, wherever these are.

A CTA takes tiles of 128 queries of one head. Each of its two mma warpgroups has 64 of them, and attends to half blocks
of 64 keys of its own: in a random mask most are visible to one warpgroup alone. ``forward_half_blocks_transfers`` pairs
half blocks that the same warpgroups attend to. A pair is one step: 128 keys side by side in one stage of K and V, so
that products are as large, and as fast, as those of whole blocks. Nothing invisible is computed but at the end of a
list, and what both warpgroups attend to is loaded once.

K and V of all steps go through one ring each (``forward_half_blocks_schedule``). As warpgroups have different steps,
each gets messages of its own: where its next step is, and where the bits of its scores are; or that the tile ends. So a
warpgroup never waits at a barrier of a step that it does not have, whose phase it would lose count of. The producer
releases a stage in the place of the warpgroup that does not have its step.

No warpgroup waits for a step while it keeps a stage from others: it releases V(n) before. So the oldest step that is
not released is one whose warpgroups wait for nothing that comes behind it, and all of them make progress.

Warps of a warpgroup decide each for itself whether a step is late, and may decide differently. So nothing but products
and barriers at which each warp arrives once for a step may depend on it: a barrier of the warpgroup would lose count.
Turns at the tensor cores as of ``forward`` have no place here, as warpgroups have different numbers of steps.

Q is in registers, which leaves shared memory for three stages at d = 128. O leaves from registers, row by row.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import FULL
from flash_attn_cute.kernels.common.ring import arrive_as_warp
from flash_attn_cute.kernels.common.score import hidden
from flash_attn_cute.kernels.sm90.forward import ForwardSm90, _Work
from flash_attn_cute.kernels.sm90.forward_half_blocks_transfers import HalfBlockTransfers, Shared, Stages
from flash_attn_cute.kernels.sm90.scores import cap, hide_by_bits, raise_logits


class ForwardHalfBlocksSm90(ForwardSm90):
    """The forward kernel of one configuration with the feature ``half_blocks``."""

    transfers = HalfBlockTransfers

    @cute.jit
    def _set_up(self, a: ForwardArguments, storage: Any, warp_idx: Int32) -> Shared:  # type: ignore[override]
        memory = self.memory
        tiles, q, k, v, messages = (memory.ring(storage, name) for name in ("tiles", "q", "k", "v", "messages0"))
        if warp_idx == 0:
            with cute.arch.elect_one():
                memory.init(storage)
        pipeline.pipeline_init_arrive()
        pipeline.pipeline_init_wait()
        return Shared(
            **memory.tensors(storage, "sQ", "sK", "sV", "tiles", "messages"),
            tile_ring=tiles,
            q_ring=q,
            k_stages=Stages(k.barriers, k.stages, k.num_bytes),
            v_stages=Stages(v.barriers, v.stages, v.num_bytes),
            message_barriers=messages.barriers,
        )

    @cute.jit
    def mma(self, work: _Work) -> None:
        """An mma warpgroup: 64 queries of every tile, from their first step to out and lse."""
        shared = work.shared
        count, number = Int32(0), Int32(0)  # of tiles, and of messages to this warpgroup
        stage, phase, first, second = Int32(0), Int32(0), Int32(0), Int32(0)
        shared.tile_ring.wait_full(count)  # from the producer: the first tile
        working = shared.tiles[0, 0] >= 0
        if working:
            stage, phase, first, second = self._begin(work, count, number)
            number += 1
        while working:
            work.acc_O.fill(0.0)
            work.softmax.reset()
            if const_expr(self.keeps_max_logits):
                work.max_logits.fill(-Float32.inf)
            if stage >= 0:
                number = self._mainloop_of_steps(work, number, stage, phase, first, second)
            count += 1
            shared.tile_ring.wait_full(count)
            working = shared.tiles[0, shared.tile_ring.stage(count)] >= 0
            stage = Int32(-1)
            if working:
                stage, phase, first, second = self._begin(work, count, number)
                number += 1
            self.epilogue(work, shared.tile_ring.stage(count - 1))
            shared.tile_ring.release(count - 1)

    @cute.jit
    def _begin(self, work: _Work, count: Int32, number: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Takes Q of a tile into registers, and computes the scores of its first step. Returns the step's message."""
        shared = work.shared
        shared.q_ring.wait_full(count)
        self._receive_Q(work, Int32(0))
        shared.q_ring.release_read(count)
        stage, phase, first, second = self._receive(work, number)
        if stage >= 0:
            cute.arch.mbarrier_wait(shared.k_stages.full(stage), phase)
            self._start_S(work, Int32(0), stage)
            warpgroup.wait_group(0)
            arrive_as_warp(shared.k_stages.empty(stage))
        return stage, phase, first, second

    @cute.jit
    def _receive(self, work: _Work, number: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Waits for a message: stage and phase of a step, and codes of its half blocks; or a stage of ``END``."""
        shared, ring = work.shared, work.shared.message_ring(work.warpgroup)
        ring.wait_full(number)
        fields = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(shared.messages[None, ring.stage(number), work.warpgroup], fields)
        return fields[0], fields[1], fields[2], fields[3]

    @cute.jit
    def _mainloop_of_steps(
        self, work: _Work, number: Int32, stage: Int32, phase: Int32, first: Int32, second: Int32
    ) -> Int32:
        """All steps of a tile but the first's scores. Returns the number of the message behind the tile's end.

        ``number`` is the next message's, and the other arguments are what the first step's has (``_receive``).
        """
        shared, ring = work.shared, work.shared.message_ring(work.warpgroup)
        k, v = shared.k_stages, shared.v_stages
        self._compute_P(work, first, second, self._words(work, first, second), True)
        more = Boolean(True)
        while more:
            cute.arch.mbarrier_wait(v.full(stage), phase)
            self._start_O(work, stage)
            keeps_V = Boolean(True)
            if not cute.arch.vote_all_sync(ring.is_full(number)):  # a warp has one answer
                keeps_V = self._finish_O(work, stage)
            next_stage, next_phase, first, second = self._receive(work, number)
            number += 1
            more = next_stage >= 0
            if more:
                words = self._words(work, first, second)
                is_loaded = cute.arch.vote_all_sync(cute.arch.mbarrier_test_wait(k.full(next_stage), next_phase))
                if keeps_V and not is_loaded:
                    keeps_V = self._finish_O(work, stage)
                cute.arch.mbarrier_wait(k.full(next_stage), next_phase)
                self._start_S(work, Int32(0), next_stage)
                warpgroup.wait_group(1)
                if keeps_V:
                    arrive_as_warp(v.empty(stage))
                warpgroup.wait_group(0)
                arrive_as_warp(k.empty(next_stage))
                self._compute_P(work, first, second, words, False)
                stage, phase = next_stage, next_phase
            else:
                warpgroup.wait_group(0)
                if keeps_V:
                    arrive_as_warp(v.empty(stage))
        return number

    @cute.jit
    def _finish_O(self, work: _Work, stage: Int32) -> Boolean:
        """Waits for O of a step, and releases V; False, for nothing is kept."""
        warpgroup.wait_group(0)
        arrive_as_warp(work.shared.v_stages.empty(stage))
        return Boolean(False)

    @cute.jit
    def _words(self, work: _Work, first: Int32, second: Int32) -> cute.Tensor:
        """This thread's bits of both half blocks of a step, a word each."""
        words = cute.make_rmem_tensor(2, Int32)
        for half, code in enumerate((first, second)):
            words[half] = Int32(-1) if code == FULL else Int32(0)
            if code >= 0:
                words[half] = work.tables.mBits[Int64(code), work.warpgroup, work.thread, 0]
        return words

    @cute.jit
    def _compute_P(self, work: _Work, first: Int32, second: Int32, words: cute.Tensor, is_first: Constexpr) -> None:
        """Computes P from S: largest logits, softcap, mask, softmax."""
        hides = first & second != FULL
        if const_expr(self.keeps_max_logits):
            scale = work.arguments.numbers.softmax_scale
            if hides:
                hide_by_bits(work.acc_S, words, hidden(scale), parts=2)
            raise_logits(work.max_logits, work.acc_S, scale)
        if const_expr(self.config.features.softcap):
            cap(work.acc_S, work.scales.tanh)
        if hides:
            hide_by_bits(work.acc_S, words, hidden(work.scales.log2), parts=2)
        work.softmax.step(work.acc_S, work.rP, work.acc_O, is_first)
