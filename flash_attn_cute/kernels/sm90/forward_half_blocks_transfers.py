"""Warp 0 of the forward kernel of half blocks: which tiles there are, their steps, and loads (``forward_half_blocks``).

A half block is 64 keys of a block mask's block, as both warpgroups see them, each with 64 queries. Which of them have
visible scores makes three kinds: those of the first warpgroup, of the second, and of both. A step is two half blocks of
one kind, which do not have to follow each other. Each lane holds one half block of the list that waits for a step, and
lanes without one take more of the list while 16 of them have none. So two half blocks of one kind are found as long as
the list lasts. Where there is a choice, the step is for the warpgroup that has had fewer steps of the tile: if one had
several in a row, the other would wait for a stage. The choice depends on the tile's list alone, so that sums have one
order.

At the end of a list one half block of each kind is left at the most. They make a step of their own for each warpgroup:
a half block that is left of both is loaded for each, if another one is left; else it is a step of both.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Int32

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.block_lists import EMPTY, FULL, BlockList, Tables
from flash_attn_cute.kernels.common.mask_tiles import ALL_SEEN, SEEN
from flash_attn_cute.kernels.common.query_tiles import QueryTile, QueryTiles
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.tma import ForwardTiles
from flash_attn_cute.kernels.sm90.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward_half_blocks_schedule import MESSAGES

END = -1  # in the place of a message's stage: the warpgroup has no further step in the tile
_WARPS = 4  # of a warpgroup
_FIRST, _SECOND, _BOTH = 1, 2, 3  # warpgroups that have a step, as bits
_REFILL = 16  # lanes without a half block that take more of the list; if fewer, the others have two of one kind
_KINDS = 16  # times a half block's number: room for its kinds (``mask_tiles.kinds_of_quarters``)


@dataclass(frozen=True)
class Stages:
    """Barriers of a ring whose stages need not be a power of 2."""

    barriers: cute.Pointer  # those of full stages, then those of empty ones
    num: Constexpr
    num_bytes: Constexpr  # of a stage

    def full(self, stage: Int32) -> cute.Pointer:
        """Barrier at which a stage's data arrive."""
        return self.barriers + stage

    def empty(self, stage: Int32) -> cute.Pointer:
        """Barrier at which a stage is released."""
        return self.barriers + (self.num + stage)


@dataclass(frozen=True)
class Shared:
    """Shared memory and what guards it."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    tiles: cute.Tensor
    messages: cute.Tensor
    tile_ring: Ring
    q_ring: Ring
    k_stages: Stages
    v_stages: Stages
    message_barriers: cute.Pointer  # of the first warpgroup's, which the second's follow

    def message_ring(self, warpgroup: Int32 | int) -> Ring:
        """Ring of a warpgroup's messages."""
        return Ring(self.message_barriers + 2 * MESSAGES * warpgroup, MESSAGES)


class _Half(NamedTuple):
    """A half block: its number times ``_KINDS`` plus its kinds, 0 if there is none; and its code."""

    place: Int32
    code: Int32


@dataclass(frozen=True)
class HalfBlockTransfers:
    """Warp 0: tiles, the pairs of half blocks that are their steps, and loads."""

    config: ForwardConfig
    a: ForwardArguments
    tables: Tables
    tma: ForwardTiles
    shared: Shared

    @cute.jit
    def producer(self) -> None:
        """Warp 0: chooses tiles, pairs half blocks, and loads all that they need in the order of the steps."""
        assert not self.config.features.packed
        a, tma, shared, tiles = self.a, self.tma, self.shared, QueryTiles(self.config)
        heads_a_key_head = a.mQ.shape[-2] // a.mK.shape[-2]
        num_tiles = tiles.num(a)
        index, _, _ = cute.arch.block_idx()
        lane, none = cute.arch.lane_idx(), Int32(0)
        count, stage, phase, first, second = none, none, none, none, none
        while index < num_tiles:
            tile, asked_before = tiles.at(a, self.tables, index), tiles.ask(a)
            self._announce(tile, count)
            count += 1
            head_k, num, taken = tile.head // heads_a_key_head, tile.blocks.num, none
            place, code = none, none  # of the half block that waits in this lane
            next_place, next_code = self._half(tile.blocks, lane)
            lead = none  # steps of the first warpgroup ahead of the second's
            working = Boolean(True)
            while working:
                free = cute.arch.vote_ballot_sync(place == 0)
                while cute.arch.popc(free) >= _REFILL and taken < num:
                    rank = cute.arch.popc(free & (1 << lane) - 1)
                    coming = [cute.arch.shuffle_sync(x, rank) for x in (next_place, next_code)]
                    if place == 0:
                        place, code = coming
                    taken += cute.arch.popc(free)
                    next_place, next_code = self._half(tile.blocks, taken + lane)
                    free = cute.arch.vote_ballot_sync(place == 0)
                which, chosen = self._choose(place % (SEEN * 4), lead)
                working = which != 0
                if working:
                    lane_1 = 31 - cute.arch.clz(chosen)
                    rest = chosen ^ 1 << lane_1
                    lane_2 = 31 - cute.arch.clz(rest) if rest != 0 else lane_1
                    one, one_code = (cute.arch.shuffle_sync(x, lane_1) for x in (place, code))
                    other, other_code = (cute.arch.shuffle_sync(x, lane_2) for x in (place, code))
                    if rest == 0:
                        other = none
                    if (1 << lane_1 | 1 << lane_2) >> lane & 1 != 0:
                        place -= which
                        if place % (SEEN * 4) == 0:
                            place = none
                    halves = (_Half(one, one_code), _Half(other, other_code))
                    K, V = (tma.K, shared.sK, shared.k_stages), (tma.V, shared.sV, shared.v_stages)
                    self._load(K, halves, tile, head_k, stage, phase, which)
                    # By its message a warpgroup that did not have the stage's last step knows that V of it has arrived.
                    # Else its wait for the next V could take the phase before that for its own.
                    cute.arch.mbarrier_wait(shared.v_stages.full(stage), phase ^ 1)
                    if which != _SECOND:
                        self._publish(halves, stage, phase, 0, first)
                        first += 1
                        lead += 1
                    if which != _FIRST:
                        self._publish(halves, stage, phase, 1, second)
                        second += 1
                        lead -= 1
                    self._load(V, halves, tile, head_k, stage, phase, which)
                    stage += 1
                    if stage == self.config.stages:
                        stage, phase = none, phase ^ 1
            self._end(0, first)
            self._end(1, second)
            first += 1
            second += 1
            index = tiles.following(a, asked_before, num_tiles)
        shared.tile_ring.wait_empty(count)  # both warpgroups are done with the stage's last tile
        with cute.arch.elect_one():
            shared.tiles[0, shared.tile_ring.stage(count)] = Int32(-1)
            cute.arch.mbarrier_arrive(shared.tile_ring.full(count))

    @cute.jit
    def _choose(self, seen: Int32, lead: Int32) -> tuple[Int32, Int32]:
        """Which warpgroups have the next step, and lanes that it is made of: the two highest ones; 0 at the end.

        Args:
            seen: warpgroups that attend to this lane's half block, as bits.
            lead: steps of the first warpgroup ahead of the second's.
        """
        of_first, of_second, of_both = (cute.arch.vote_ballot_sync(seen == which) for which in (_FIRST, _SECOND, _BOTH))
        behind, ahead, of_behind, of_ahead = Int32(_FIRST), Int32(_SECOND), of_first, of_second
        if lead > 0:
            behind, ahead, of_behind, of_ahead = ahead, behind, of_second, of_first
        which, chosen = Int32(0), Int32(0)
        if of_ahead & of_ahead - 1 != 0:
            which, chosen = ahead, of_ahead
        if of_both & of_both - 1 != 0:
            which, chosen = Int32(_BOTH), of_both
        if of_behind & of_behind - 1 != 0:
            which, chosen = behind, of_behind
        if which == 0:  # the list has ended, and one half block of each kind is left at the most
            if of_first | of_second == 0:
                if of_both != 0:
                    which, chosen = Int32(_BOTH), of_both
            elif of_first | of_both != 0:
                which, chosen = Int32(_FIRST), of_first | of_both
            else:
                which, chosen = Int32(_SECOND), of_second
        return which, chosen

    @cute.jit
    def _half(self, blocks: BlockList, i: Int32) -> tuple[Int32, Int32]:
        """The i-th half block of a list; 0 behind its end, and if no query sees it."""
        tables, place, code = self.tables, Int32(0), Int32(FULL)
        if i < blocks.num:
            number = blocks.nth(i)
            entry, half = number // 2, number % 2
            block, code_of_block = tables.mEntries[entry, 0], tables.mEntries[entry, 1]
            kinds = Int32(_BOTH * (SEEN + ALL_SEEN))
            if code_of_block >= 0:
                kinds, code = tables.mKinds[code_of_block] >> 4 * half & _KINDS - 1, 2 * code_of_block + half
            if kinds % (SEEN * 4) != 0:
                place = (2 * block + half) * _KINDS + kinds
        return place, code

    @cute.jit
    def _announce(self, tile: QueryTile, count: Int32) -> None:
        """Publishes a tile to the mma warpgroups, and loads its queries."""
        tQ, shared = self.tma.Q, self.shared
        shared.tile_ring.wait_empty(count)  # both warpgroups are done with the stage's last tile
        shared.q_ring.wait_empty(count)  # and have the last one's Q in registers
        full = shared.q_ring.full(count)
        with cute.arch.elect_one():
            tile.write(shared.tiles[None, shared.tile_ring.stage(count)])
            cute.arch.mbarrier_arrive(shared.tile_ring.full(count))
            cute.arch.mbarrier_arrive_and_expect_tx(full, shared.q_ring.num_bytes)
        for w in cutlass.range_constexpr(self.config.num_mma_warpgroups):
            # Rows behind the last one arrive as zeros.
            start = tile.first_query + 64 * w
            tQ.load(tQ.at(start, start + 64, tile.head, tile.batch), shared.sQ[None, None, w, 0], full)

    @cute.jit
    def _load(
        self, X: Constexpr, halves: Constexpr, tile: QueryTile, head_k: Int32, stage: Int32, phase: Int32, which: Int32
    ) -> None:
        """Loads K or V of a step, and releases its stage for the warpgroup that does not have it."""
        tX, sX, stages = X
        keys, columns = tX.tile_rows, tX.tile_columns
        cute.arch.mbarrier_wait(stages.empty(stage), phase ^ 1)  # from the warpgroups that had the stage before
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(stages.full(stage), stages.num_bytes)
        if which != _BOTH:
            if cute.arch.lane_idx() < _WARPS:
                cute.arch.mbarrier_arrive(stages.empty(stage))
        for h in cutlass.range_constexpr(2):
            start = halves[h].place // _KINDS * keys
            if halves[h].place == 0:  # there is none: zeros
                start = tile.k.length
            gX = tX.at(start, start + keys, head_k, tile.batch)
            tX.load(gX, cute.local_tile(sX[None, None, stage], (keys, columns), (h, 0)), stages.full(stage))

    @cute.jit
    def _publish(self, halves: Constexpr, stage: Int32, phase: Int32, warpgroup: Constexpr, number: Int32) -> None:
        """Publishes a step to a warpgroup: where it is, and for each half block which scores are visible."""
        ring = self.shared.message_ring(warpgroup)
        fields = self.shared.messages[None, ring.stage(number), warpgroup]
        values = [stage, phase]
        for half in halves:
            code = half.code
            if half.place & ALL_SEEN << warpgroup != 0:
                code = Int32(FULL)
            if half.place == 0:
                code = Int32(EMPTY)
            values.append(code)
        with cute.arch.elect_one():
            for i, value in enumerate(values):
                fields[i] = value
            cute.arch.mbarrier_arrive(ring.full(number))

    @cute.jit
    def _end(self, warpgroup: Constexpr, number: Int32) -> None:
        """Publishes to a warpgroup that it has had all steps of a tile."""
        ring = self.shared.message_ring(warpgroup)
        with cute.arch.elect_one():
            self.shared.messages[0, ring.stage(number), warpgroup] = Int32(END)
            cute.arch.mbarrier_arrive(ring.full(number))
