"""Attention backward on Blackwell, up to d = 128, and (192, 128): a tile of 128 keys is the work of a CTA.

``python -m flash_attn_cute.kernels describe sm100 backward --d 128`` prints ``backward_schedule``.

A CTA takes one tile after the other (``common.key_tiles``), and goes over the blocks of 128 queries that attend to it,
at d = 192 of 64. A block is a *step*, and steps are counted over all tiles of the CTA. When no tile is left, drain
warps write zeros into dK and dV of keys that have no tile, and compute warps round dQ (``common.dq_rounding``). The two
adding warps have every other step each: one waits until its block's turn has come (``common.semaphores``), or until
what it has added is there, while the other adds.

Products are transposed, but for the last one: rows are keys.
    S' = K Q'          both from shared memory
    dP' = V dO'        both from shared memory
    dV += P' dO        P' from tensor memory
    dK += dS' Q        dS' from tensor memory
    dQ = dS K          dS from shared memory
At d = 192 shared memory has no room for 128 queries, and dQ of 64, who are not as many as tensor memory has lanes, is
transposed: dQ' = K' dS, in two parts of 128 columns of dQ, of which the second begins with half of the first's.
One copy of K, V, Q and dO serves all products: rows of 64 columns in shared memory are read along either dimension.

P and dS, of 16 bits, take the first half of a warpgroup's own columns of S and dP, so that none waits for the other.

Pieces of dQ have two places, and each adding warp has barriers of its own, because a warp that waits must not miss two
phases of a barrier. Where dQ is transposed, a piece is 32 queries of 64 columns.

P of a step is computed beside dK and dQ of the one before, and dS beside dV and the next S. Products are done in the
order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(t + 1) may take the place of P(t), which dV(t) reads ahead of it, and dQ(t) that of dS(t), which dK(t) reads.
  - dP(t + 1), for which compute warps wait, shows them that dQ(t) is done: there is room for dS in shared memory.
  - Where dQ lies in the place of dP, the mma warp waits for the drain before dP(t + 1), and else before dQ(t + 1).
  - dV and dK of a tile's first step overwrite, when compute warps have read those of the last tile.
dV leaves through the place of V, which is not needed behind the last dP, and dK through that of K, behind the last dQ.

Windows and ends are looked at only in steps that an edge crosses. Under a mask the mainloop goes over lists of blocks
of queries, those of all its heads (``common.key_lists``), and bits are read while scores are computed. ``sums`` has the
order of sums in the workspace.
(The roles, the order of products and the places in tensor memory are FlashAttention-4's.)
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common import semaphores
from flash_attn_cute.kernels.common.assembly import opaque, pack, set_registers
from flash_attn_cute.kernels.common.dq_rounding import round_blocks
from flash_attn_cute.kernels.common.key_tiles import KeyTile, rounds_a_tile, zero_fully_masked_keys
from flash_attn_cute.kernels.common.main_kernels import BackwardKernel
from flash_attn_cute.kernels.common.ring import Ring
from flash_attn_cute.kernels.common.rows import rows_first, scaled, store_columns
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.tma import BackwardTiles, RowTiles, make_row_tiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100 import frame, tensor_memory
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule
from flash_attn_cute.kernels.sm100.backward.cta_scores import COLUMNS, Scores
from flash_attn_cute.kernels.sm100.backward.cta_shared import Shared
from flash_attn_cute.kernels.sm100.backward.cta_transfers import Transfers
from flash_attn_cute.kernels.sm100.backward.products import Mmas, Products
from flash_attn_cute.kernels.sm100.backward.sums import by_fours, round_block, share, take
from flash_attn_cute.kernels.sm100.config import COMPUTE_WARPGROUPS, CTAS, MMA_WARP, O_COLUMNS, PART_ROWS, PRODUCER_WARP
from flash_attn_cute.kernels.sm100.mma import commit, swizzled, write_row

_BARRIER_OUT = 1  # a named barrier for each compute warpgroup; 0 is the whole CTA's
DV, DK = 0, 1  # which of a tile's results


class Compute(Scores):
    """A compute warpgroup: P and dS of every step, then dV and dK of the tile."""

    @cute.jit
    def __call__(self) -> None:
        """Half of every step's queries, then dK and dV of the tile."""
        c, a, shared = self.config, self.a, self.shared
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_blocks = shared.tile(c, a, tile_idx).blocks.num
            for nth in cutlass.range(rounds_a_tile(c, a), unroll=1):
                for i in cutlass.range(num_blocks, unroll=1):
                    block = self.block(tile_idx, nth, i, step)
                    P = self.compute_P(block, step, step, c.first_S)
                    self.compute_dS(P, block, step, step, shared.rings.dp, step, c.first_dP)
                    step += 1
            self._put_out(tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the producer
            tile_idx += 1

    @cute.jit
    def _put_out(self, tile_idx: Int32, results: Constexpr = (DV, DK)) -> None:
        """This warpgroup's pieces of dV and dK, to where they belong, or to the workspace if other tiles follow."""
        c, shared, barrier, tile = self.config, self.shared, _BARRIER_OUT + self.warpgroup, self.tile(tile_idx)
        is_last, tiles_before, is_first = tile.is_last, tile.tiles_before, Boolean(True)
        if const_expr(c.features.grouped):
            part = self.warpgroup + COMPUTE_WARPGROUPS * (results[0] + c.num_passes * shared.rank)
            semaphore = semaphores.at(self.ws.mSemaphoresK, part, tile.head_k, tile.block)
            if not is_last or tiles_before > 0:
                is_first = tile.wait_turn(c, semaphore, barrier)
        for which in results:  # in pieces of 64 columns, a warpgroup every other one
            num = (c.tile_dv, c.tile_d)[which] // O_COLUMNS
            odd = num % COMPUTE_WARPGROUPS
            if const_expr(odd):  # the first one of dV is the first warpgroup's, and that of dK the second one's
                if self.warpgroup == which:
                    self._piece(tile_idx, which, Int32(0), num == 1, is_first)
            for first in cutlass.range_constexpr(odd, num, COMPUTE_WARPGROUPS):
                self._piece(tile_idx, which, first + self.warpgroup, first + 2 == num, is_first)
        if self.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            for which in results:
                if const_expr((c.tile_dv, c.tile_d)[which] > O_COLUMNS) or self.warpgroup == which:
                    self.ways_out[which][1].release(tile_idx)  # to the producer
        if const_expr(c.features.grouped):
            if not is_last:
                semaphores.signal_as_warpgroup(semaphore, barrier)

    @property
    def ways_out(self) -> tuple[tuple[cute.Tensor, Ring], tuple[cute.Tensor, Ring]]:
        """Where dV and dK leave through, and the rings of what is loaded there."""
        return (self.shared.sV, self.shared.rings.v), (self.shared.sK, self.shared.rings.k)

    @cute.jit
    def _piece(self, tile_idx: Int32, which: Constexpr, piece: Int32, is_last: Constexpr, is_first: Boolean) -> None:
        """A piece of dV or dK, this warpgroup's last one or not."""
        c, shared, rings, tma = self.config, self.shared, self.shared.rings, self.tma
        ring, first, t = ((rings.dv, c.first_dV, tma.dV), (rings.dk, c.first_dK, tma.dK))[which]
        sX, kv = self.ways_out[which]
        sX = cute.local_tile(sX[None, None, kv.stage(tile_idx)], (PART_ROWS, O_COLUMNS), (0, piece))
        scale = self.a.numbers.softmax_scale if const_expr(which == DK) else Float32(1.0)
        address = self.address + (first + O_COLUMNS * piece)
        ring.wait_full(tile_idx)  # from the tensor cores: it is complete, and what sX held not needed any more
        tensor_memory.after_sync()
        tile = self.tile(tile_idx)
        for column in cutlass.range_constexpr(0, O_COLUMNS, COLUMNS):
            numbers = tensor_memory.load(address + column, COLUMNS)
            acc = cute.make_rmem_tensor(COLUMNS, Float32)
            for j in cutlass.range_constexpr(COLUMNS):
                acc[j] = scaled(numbers[j], scale)
            if const_expr(c.features.grouped):
                # Opaque, or the compiler keeps what the index is multiplied by in a register from the start.
                block = self.ws.mdKVaccum[opaque(Int32(which)), tile.head_k, tile.block, None]
                columns_before = c.tile_d * shared.rank + O_COLUMNS * piece + column
                place = cute.domain_offset((columns_before * PART_ROWS,), block)
                sums = by_fours(place.iterator, COLUMNS)
                if not tile.is_last:
                    share([acc[j] for j in range(COLUMNS)], sums, self.thread, is_first)
                elif tile.tiles_before > 0:
                    take(acc, sums, self.thread)
            if const_expr(c.features.wide):
                self._write_row(tile, which, acc, O_COLUMNS * piece + column)
            else:
                numbers = cute.make_rmem_tensor(COLUMNS, self.dtype)
                packed = cute.recast_tensor(numbers, Int32)
                for j in cutlass.range_constexpr(COLUMNS // 2):
                    packed[j] = pack(acc[2 * j], acc[2 * j + 1], self.dtype)
                write_row(numbers, sX, self.thread, column)
        if const_expr(not c.features.wide):
            cute.arch.fence_proxy("async.shared", space="cta")
        tensor_memory.before_sync()
        if const_expr(is_last):
            ring.release(tile_idx)  # to the mma warp: it may be overwritten
        if const_expr(not c.features.wide):
            cute.arch.barrier(barrier_id=_BARRIER_OUT + self.warpgroup, number_of_threads=128)
            if self.thread < 32:
                if tile.is_last:
                    start, stop = tile.keys_of(shared.rank, PART_ROWS)
                    t.store(sX, t.at(start, stop, tile.head_k, tile.batch, piece))
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _write_row(self, tile: KeyTile, which: Constexpr, acc: cute.Tensor, first_column: Int32) -> None:
        """A thread's float32 columns of its key, from one on, to where dV or dK belongs, if they are whole."""
        mX = rows_first((self.a.mdV, self.a.mdK)[which], self.config.features.packed)
        gX = mX[None, None, tile.head_k, tile.batch]
        start, stop = tile.keys_of(self.shared.rank, PART_ROWS)
        row, end = start + self.thread, Int32(0)
        if tile.is_last and row < stop:
            end = Int32(gX.shape[1])
        store_columns(acc, gX[row, None], first_column, end)


class MmaWarp(Products):
    """The warp that issues all products."""

    @cute.jit
    def __call__(self) -> None:
        """S of a step ahead of what is left of the one before."""
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the producer
            rings.k.wait_full(tile_idx)  # from the producer
            for i in cutlass.range(num_steps, unroll=1):
                rings.q.wait_full(step)  # from the producer
                self.start_S(tile_idx, step, c.first_S)
                commit(rings.scores.full(step))  # to compute warps
                if i > 0:
                    self._finish(tile_idx, step - 1, i == 1)
                else:
                    rings.v.wait_full(tile_idx)  # from the producer
                rings.do.wait_full(step)  # from the producer
                if const_expr(c.dQ_over_dP):
                    rings.dq.wait_empty(c.parts_dQ * step)  # from the drain warps: they have what lies there of dQ
                    tensor_memory.after_sync()
                self.start_dP(tile_idx, step, c.first_dP)
                commit(rings.dp.full(step))  # to compute warps
                rings.scores.wait_empty(step + 1)  # from compute warps: P is there
                if i == 0:
                    rings.dv.wait_empty(tile_idx)  # from compute warps: they have the last tile's dV
                tensor_memory.after_sync()
                self.start_dV(step, c.first_S, i > 0)
                commit(rings.do.empty(step))  # to the producer
                step += 1
            commit(rings.dv.full(tile_idx))  # to compute warps
            self._finish(tile_idx, step - 1, num_steps == 1)
            commit(rings.dk.full(tile_idx))  # to compute warps; the last commit that anybody waits for
            tile_idx += 1

    @cute.jit
    def _finish(self, tile_idx: Int32, step: Int32, is_first: Boolean) -> None:
        """Begins dK and dQ of a step, which may be its tile's first."""
        c, rings = self.config, self.shared.rings
        rings.dp.wait_empty(step + 1)  # from compute warps: dS is there
        if is_first:
            rings.dk.wait_empty(tile_idx)  # from compute warps: they have the last tile's dK
        for part in cutlass.range_constexpr(int(c.dQ_over_dP), c.parts_dQ):
            rings.dq.wait_empty(c.parts_dQ * step + part)  # from the drain warps: they have the last step's dQ
        tensor_memory.after_sync()
        self.start_dK(step, c.first_dP, not is_first)
        commit(rings.q.empty(step))  # to the producer
        for part in cutlass.range_constexpr(c.parts_dQ):
            self.start_dQ(tile_idx, c.first_dQ(part), part)
            commit(rings.dq.full(c.parts_dQ * step + part))  # to the drain warps


class BackwardCtaSm100(BackwardKernel):
    """The backward kernel of one configuration: persistent CTAs."""

    transfers, compute, mma_warp, shared_memory = Transfers, Compute, MmaWarp, Shared.of

    def __init__(self, config: BackwardConfig):
        super().__init__(config, backward_schedule(config), swizzled)

    def mmas(self) -> Mmas:
        return Mmas.of(self.config)

    def tma(self, a: BackwardArguments, mdK: cute.Tensor, mdV: cute.Tensor) -> BackwardTiles:
        tensors = {"Q": a.mQ, "dO": a.mdO, "K": a.mK, "V": a.mV}
        loaded = {name: self.loaded_tiles(f"s{name}", x) for name, x in tensors.items()}
        return BackwardTiles(**loaded, **self._tiles_out(mdK, mdV))

    def _tiles_out(self, mdK: cute.Tensor, mdV: cute.Tensor) -> dict[str, RowTiles | None]:
        """Pieces of dK and dV; None if they leave wide, from registers."""
        if self.config.features.wide:
            return {"dK": None, "dV": None}
        store, piece = cpasync.CopyBulkTensorTileS2GOp(), swizzled(self.dtype, O_COLUMNS, (PART_ROWS, O_COLUMNS))
        packed = self.config.features.packed
        return {
            name: make_row_tiles(store, x, piece, (PART_ROWS, O_COLUMNS), packed)
            for name, x in (("dK", mdK), ("dV", mdV))
        }

    @cute.kernel
    def kernel(
        self,
        mmas: Mmas,
        tma: BackwardTiles,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        a: BackwardArguments,
        ws: Workspace,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared and tensor memory, then splits into roles."""
        c = self.config
        drain, compute, mma, adding = map(self.schedule.role, ("drain", "compute", "mma", "adding"))
        warp_idx, thread, shared = frame.begin(self, tma)
        state = c, a, ws, tma, shared
        transfers = self.transfers(*state)
        if warp_idx < drain.warps.stop:
            set_registers(drain.registers, frame.THREADS)
            transfers.drain(thread)
            if const_expr(c.features.may_mask_keys):
                index, num, warps = cute.arch.block_idx()[0], cute.arch.grid_dim()[0], len(drain.warps)
                zero_fully_masked_keys(c, a, ws, mdK, mdV, warps * index + warp_idx, warps * num)
        elif warp_idx < compute.warps.stop:
            set_registers(compute.registers, frame.THREADS)
            warpgroup = warp_idx // 4 - 1
            address = tensor_memory.row_address(shared.tensor_memory, thread)
            self.compute(*state, scales, warpgroup, thread, address)()
            round_blocks(c, a, ws, len(compute.warps), partial(round_block, c, a.numbers.softmax_scale))
        else:
            set_registers(mma.registers, frame.THREADS)
            if warp_idx == MMA_WARP:
                if shared.is_leader:
                    self.mma_warp.of(c, a, mmas, shared)()
                elif const_expr(c.ctas_a_tile == CTAS):
                    transfers.signal_dS()
            elif warp_idx == PRODUCER_WARP:
                transfers.producer()
            else:
                transfers.add(warp_idx - adding.warps.start)
        frame.end(shared, warp_idx)
