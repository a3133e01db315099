"""Roles that load tiles for a pair of CTAs (see ``pair``, ``pair_two_pass``), and carry dQ away."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_cute.kernels.common.key_tiles import KeyTile, heads_a_tile, key_tile, num_key_tiles
from flash_attn_cute.kernels.common.tiles import take_tile
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES
from flash_attn_cute.kernels.sm100.backward.cta_shared import PairShared
from flash_attn_cute.kernels.sm100.backward.cta_transfers import Operand, Transfers
from flash_attn_cute.kernels.sm100.backward.sums import by_fours, put
from flash_attn_cute.kernels.sm100.backward.two_pass import plus
from flash_attn_cute.kernels.sm100.config import CTAS, PART_ROWS


class PairTransfers(Transfers):
    """The roles that move what others multiply, and what they have summed of dQ."""

    shared: PairShared

    @cute.jit
    def producer(self) -> None:
        """A warp of each CTA: loads its part of all that is needed, in an order in which there comes to be room.

        The leader's chooses tiles.
        """
        c, a, shared, rings = self.config, self.a, self.shared, self.shared.rings
        K, V, Q, dO, Q_columns, dO_columns = self.operands("K V Q dO Q_columns dO_columns")
        tile_idx, step = Int32(0), Int32(0)
        self._publish_next(tile_idx)
        while shared.has_tile(tile_idx):
            tile = shared.tile(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)
            keys = tile.keys_of(shared.rank, PART_ROWS)
            self._load(K.at(tile_idx), keys, tile.head_k, tile)
            first_step = step
            for nth in cutlass.range(heads_a_tile(c, a), unroll=1):
                for i in cutlass.range(tile.blocks.num, unroll=1):
                    head, m_block = tile.head + nth, tile.blocks.nth(i)
                    own, all_of_it = self._rows(tile, m_block)
                    self._load(Q.at(step), own, head, tile)
                    self._load_stats(head, tile.first_block + m_block, step)
                    if step == first_step:
                        self._load(V.at(tile_idx), keys, tile.head_k, tile)
                    self._load(dO.at(step), own, head, tile)
                    self._load(dO_columns.at(step), all_of_it, head, tile, shared.rank)
                    self._load(Q_columns.at(step), all_of_it, head, tile, shared.rank)
                    if step == first_step:
                        self._load_columns_of_keys(tile, tile_idx)
                    step += 1
            tile_idx += 1
            # Not earlier: until the tile is begun, all CTAs with a later turn would wait.
            self._publish_next(tile_idx)
        # From the tensor cores of the pair: commits arrive in any order, and the CTA lives until all are here.
        for ring in (rings.q, rings.do, rings.q_columns, rings.do_columns):
            ring.wait_all_empty(step)
        rings.k_columns.wait_all_empty(tile_idx)

    @cute.jit
    def signal_dS(self) -> None:
        """The mma warp of the second CTA: signals the leader that its dS has come."""
        c, a, shared, exchange = self.config, self.a, self.shared, self.shared.rings.exchange
        tile_idx, step = Int32(0), Int32(0)
        while shared.has_tile(tile_idx):
            num_steps = shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)  # to the leader's producer
            for _ in cutlass.range(num_steps, unroll=1):
                exchange.wait_full(step)  # from the leader's compute warps
                exchange.release(step)  # to the leader's mma warp
                step += 1
            tile_idx += 1

    def _rows(self, tile: KeyTile, m_block: Int32) -> tuple[tuple[Int32, Int32], ...]:
        """Where a CTA's own queries of a block begin and end, and where the block does."""
        c, first, last = self.config, tile.q.start + m_block * self.config.tile_m, tile.q.start + tile.q.length
        own, end = first + c.queries_shared * self.shared.rank, cutlass.min(first + c.tile_m, last)
        own_end = cutlass.max(cutlass.min(own + c.queries_shared, last), own)
        return (own, own_end), (first, end)

    @cute.jit
    def _publish_next(self, tile_idx: Int32) -> None:
        """Publishes the next tile, or the end, to all roles of both CTAs, by the leader's producer."""
        c, a, shared = self.config, self.a, self.shared
        if shared.is_leader:
            num_tiles = num_key_tiles(c, a)
            num_questions = num_tiles + cute.arch.grid_dim()[0] // CTAS  # every pair asks until it gets none
            index, is_published = take_tile(a.mNextTile, num_questions), Boolean(False)
            while index < num_tiles:
                tile = key_tile(c, a, self.ws, index)
                index = num_tiles
                if tile.blocks.num > 0:
                    shared.publish(tile, tile_idx)
                    is_published = Boolean(True)
                else:  # only has zeros to be written
                    index = take_tile(a.mNextTile, num_questions)
            if not is_published:
                shared.publish_end(tile_idx)
        else:
            shared.tiles.expect(tile_idx, shared.tile_fields)

    def _load(
        self, x: Operand, rows: tuple[Int32, Int32], head: Int32, tile: KeyTile, column_tile: Int32 | int = 0
    ) -> None:
        """A CTA's part of an operand: rows start .. stop of some columns. Its bytes arrive at the leader's barrier."""
        x.ring.wait_empty(x.step)  # from the tensor cores, or compute warps: what was there is not needed any more
        self.shared.announce(x.ring, x.step)
        x.load(x.tiles.at(*rows, head, tile.batch, column_tile))

    @cute.jit
    def _load_columns_of_keys(self, tile: KeyTile, tile_idx: Int32, later: Constexpr = 0) -> None:
        """This CTA's columns of the keys of both, 64 at a time; of those of dQ that both compute, both have them.

        ``later``: whether their place is empty behind something of this tile, not of the last one.
        """
        c, t, shared, ring = self.config, self.tma.K_columns, self.shared, self.shared.rings.k_columns
        parts = c.columns_of_keys // t.tile_columns
        first = shared.rank * ((c.tile_d - c.columns_of_keys) // t.tile_columns)
        ring.wait_empty(tile_idx + later)
        shared.announce(ring, tile_idx)
        for rank in cutlass.range_constexpr(CTAS):
            start, stop = tile.keys_of(Int32(rank), PART_ROWS)
            for part in cutlass.range_constexpr(parts):
                sX = cute.local_tile(shared.sK_columns, (PART_ROWS, t.tile_columns), (rank, part))
                t.load(t.at(start, stop, tile.head_k, tile.batch, first + part), sX, ring.full(tile_idx))

    @cute.jit
    def _load_stats(self, head: Int32, block: Int32, step: Int32) -> None:
        """Lse and delta of a block, which each CTA needs of all queries."""
        ring = self.shared.rings.stats
        ring.wait_empty(step)  # from compute warps
        with cute.arch.elect_one():
            ring.announce(step)
            numbers = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
            for i, stats in enumerate((self.shared.lse, self.shared.delta)):
                target = stats[None, ring.stage(step)]
                cute.copy(numbers, self.ws.mStats[i, head, block, None], target, mbar_ptr=ring.full(step))

    @cute.jit
    def _put(self, numbers: Constexpr, part: Constexpr, i: Constexpr, thread: Int32) -> None:
        """See ``Transfers``. If dQ is transposed, the first CTA adds its first lanes, the second its last."""
        c, shared, first = self.config, self.shared, i * self.config.piece_columns
        if const_expr(c.transposes_dQ):
            lane = thread - shared.rank * (PART_ROWS - c.piece_lanes)
            if lane >= 0 and lane < c.piece_lanes:
                place = by_fours(shared.dQ[None, i % DQ_STAGES].iterator, c.piece_columns, c.piece_lanes)
                put(numbers[first : first + c.piece_columns], place, lane)
        else:
            super()._put(numbers, part, i, thread)


class PairTwoPassTransfers(PairTransfers):
    """The roles that move what others multiply, and what they have summed of dQ."""

    @cute.jit
    def producer(self) -> None:
        """A warp of each CTA: loads its part of all that is needed, in an order in which there comes to be room.

        The leader's chooses tiles.
        """
        c, a, shared, rings, (K,) = self.config, self.a, self.shared, self.shared.rings, self.operands("K")
        # Steps of either pass, steps of passes of one kind, and what lies in ``q``, as their rings count them.
        tile_idx, step, do_step, number = Int32(0), Int32(0), Int32(0), Int32(0)
        self._publish_next(tile_idx)
        while shared.has_tile(tile_idx):
            tile, num_steps = shared.tile(c, a, tile_idx), shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)
            self._load_keys(tile, K, tile_idx)  # its bytes arrive at a barrier of this CTA
            self._load_first_pass(tile, tile_idx, step, do_step, number)
            step, number = step + num_steps, number + num_steps
            # From the tensor cores: the last dO by columns has been read, in whose place dO by rows is loaded. (dS is
            # written there as well, behind the first dP. The next tile's dO is loaded behind its K, and so behind this
            # tile's last dQ.)
            rings.do_columns.wait_empty(plus(do_step + num_steps, 1))
            self._load_second_pass(tile, tile_idx, step, do_step, number)
            step, do_step, number = step + num_steps, do_step + num_steps, number + 2 * num_steps
            tile_idx += 1
            # Not earlier: until the tile is begun, all CTAs with a later turn would wait.
            self._publish_next(tile_idx)
        # From the tensor cores of the pair: commits arrive in any order, and the CTA lives until all are here.
        rings.q.wait_all_empty(number)
        rings.do.wait_all_empty(do_step)
        rings.do_columns.wait_all_empty(do_step)
        rings.k.wait_all_empty(tile_idx)

    @cute.jit
    def _load_first_pass(self, tile: KeyTile, tile_idx: Int32, step: Int32, do_step: Int32, number: Int32) -> None:
        """Q by rows, a step ahead of dO by columns; behind the first step's V."""
        rank, (Q, V, dO_columns) = self.shared.rank, self.operands("Q V dO_columns")
        num_blocks = tile.blocks.num
        num_steps = heads_a_tile(self.config, self.a) * num_blocks
        for i in cutlass.range(num_steps + 1, unroll=1):
            if i < num_steps:
                own, _ = self._rows(tile, tile.blocks.nth(i % num_blocks))
                self._load(Q.at(number + i), own, tile.head + i // num_blocks, tile)
            if i > 0:
                before = plus(i, -1)
                head, m_block = tile.head + before // num_blocks, tile.blocks.nth(before % num_blocks)
                _, all_of_it = self._rows(tile, m_block)
                self._load_stats(head, tile.first_block + m_block, step + before)
                self._load(dO_columns.at(do_step + before), all_of_it, head, tile, rank)
                if i == 1:
                    self._load(V.at(tile_idx), tile.keys_of(rank, PART_ROWS), tile.head_k, tile)

    @cute.jit
    def _load_second_pass(self, tile: KeyTile, tile_idx: Int32, step: Int32, do_step: Int32, number: Int32) -> None:
        """Q by rows and by columns, and dO by rows; behind the first step's K by columns."""
        done, (Q, dO) = Int32(0), self.operands("Q dO")
        Q_columns = Operand(self.tma.Q_columns, self.shared.sQ_columns, Q.ring)
        for nth in cutlass.range(heads_a_tile(self.config, self.a), unroll=1):
            for i in cutlass.range(tile.blocks.num, unroll=1):
                head, m_block, now = tile.head + nth, tile.blocks.nth(i), step + done
                rows, columns = number + 2 * done, plus(number, 2 * done + 1)
                own, all_of_it = self._rows(tile, m_block)
                self._load(Q.at(rows), own, head, tile)
                self._load_stats(head, tile.first_block + m_block, now)
                self._load(dO.at(do_step + done), own, head, tile)
                self._load(Q_columns.at(columns), all_of_it, head, tile, self.shared.rank)
                if done == 0:  # dV of this tile leaves through their place
                    self._load_columns_of_keys(tile, tile_idx, later=1)
                done += 1

    def _first_dQ(self, part: int, end: Int32) -> Int32 | int:
        """See ``Transfers``. If dQ takes the place of S, that place changes after each odd number of steps.

        Tiles before have had three products of scores a step, and this one's first pass has one.
        """
        c = self.config
        if not c.dQ_over_S:
            return super()._first_dQ(part, end)
        return end % 2 * c.first_dP
