"""Roles that load tiles for a pair of CTAs in two passes (see ``pair_two_pass``), and carry dQ away."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_tiles import KeyTile, heads_a_tile
from flash_attn_cute.kernels.common.tma import BackwardTiles
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100.backward.cta_shared import PairShared
from flash_attn_cute.kernels.sm100.backward.cta_transfers import Operand
from flash_attn_cute.kernels.sm100.backward.pair_transfers import PairTransfers
from flash_attn_cute.kernels.sm100.backward.two_pass import plus
from flash_attn_cute.kernels.sm100.config import PART_ROWS


class _Start(NamedTuple):
    """Where a pass over a tile starts: the numbers of its first steps, as their rings count them."""

    tile: KeyTile
    tile_idx: Int32
    step: Int32  # of either pass
    do_step: Int32  # of passes of one kind
    number: Int32  # of what lies in ``q``


class PairTwoPassTransfers(PairTransfers):
    """The roles that move what others multiply, and what they have summed of dQ."""

    @cute.jit
    def producer(self, a: BackwardArguments, ws: Workspace, tma: BackwardTiles, shared: PairShared) -> None:
        """A warp of each CTA: loads its part of all that is needed, in an order in which there comes to be room.

        The leader's chooses tiles.
        """
        c, rings, (K,) = self.config, shared.rings, Operand.named("K", tma, shared)
        tile_idx, step, do_step, number = Int32(0), Int32(0), Int32(0), Int32(0)
        self._publish_next(a, ws, shared, tile_idx)
        while shared.has_tile(tile_idx):
            tile, num_steps = shared.tile(c, a, tile_idx), shared.num_steps(c, a, tile_idx)
            shared.tiles.release_fields(tile_idx)
            self._load_keys(tile, K, shared, tile_idx)  # its bytes arrive at a barrier of this CTA
            self._load_first_pass(a, ws, tma, shared, _Start(tile, tile_idx, step, do_step, number))
            step, number = step + num_steps, number + num_steps
            # From the tensor cores: the last dO by columns has been read, in whose place dO by rows is loaded. (dS is
            # written there as well, behind the first dP. The next tile's dO is loaded behind its K, and so behind this
            # tile's last dQ.)
            rings.do_columns.wait_empty(plus(do_step + num_steps, 1))
            self._load_second_pass(a, ws, tma, shared, _Start(tile, tile_idx, step, do_step, number))
            step, do_step, number = step + num_steps, do_step + num_steps, number + 2 * num_steps
            tile_idx += 1
            # Not earlier: until the tile is begun, all CTAs with a later turn would wait.
            self._publish_next(a, ws, shared, tile_idx)
        # From the tensor cores of the pair: commits arrive in any order, and the CTA lives until all are here.
        rings.q.wait_all_empty(number)
        rings.do.wait_all_empty(do_step)
        rings.do_columns.wait_all_empty(do_step)
        rings.k.wait_all_empty(tile_idx)

    @cute.jit
    def _load_first_pass(
        self, a: BackwardArguments, ws: Workspace, tma: BackwardTiles, shared: PairShared, start: cutlass.Constexpr
    ) -> None:
        """Q by rows, a step ahead of dO by columns; behind the first step's V."""
        c, (tile, tile_idx, step, do_step, number) = self.config, start
        Q, V, dO_columns = Operand.named("Q V dO_columns", tma, shared)
        num_blocks = tile.blocks.num
        num_steps = heads_a_tile(c, a) * num_blocks
        for i in cutlass.range(num_steps + 1, unroll=1):
            if i < num_steps:
                own, _ = self._rows(shared, tile, tile.blocks.nth(i % num_blocks))
                self._load(Q.at(number + i), own, tile.head + i // num_blocks, tile, shared)
            if i > 0:
                before = plus(i, -1)
                head, m_block = tile.head + before // num_blocks, tile.blocks.nth(before % num_blocks)
                _, all_of_it = self._rows(shared, tile, m_block)
                self._load_stats(ws, shared, head, tile.first_block + m_block, step + before)
                self._load(dO_columns.at(do_step + before), all_of_it, head, tile, shared, shared.rank)
                if i == 1:
                    self._load(V.at(tile_idx), tile.keys_of(shared.rank, PART_ROWS), tile.head_k, tile, shared)

    @cute.jit
    def _load_second_pass(
        self, a: BackwardArguments, ws: Workspace, tma: BackwardTiles, shared: PairShared, start: cutlass.Constexpr
    ) -> None:
        """Q by rows and by columns, and dO by rows; behind the first step's K by columns."""
        c, (tile, tile_idx, step, do_step, number), done = self.config, start, Int32(0)
        Q, dO = Operand.named("Q dO", tma, shared)
        Q_columns = Operand(tma.Q_columns, shared.sQ_columns, Q.ring)
        for nth in cutlass.range(heads_a_tile(c, a), unroll=1):
            for i in cutlass.range(tile.blocks.num, unroll=1):
                head, m_block, now = tile.head + nth, tile.blocks.nth(i), step + done
                rows, columns = number + 2 * done, plus(number, 2 * done + 1)
                own, all_of_it = self._rows(shared, tile, m_block)
                self._load(Q.at(rows), own, head, tile, shared)
                self._load_stats(ws, shared, head, tile.first_block + m_block, now)
                self._load(dO.at(do_step + done), own, head, tile, shared)
                self._load(Q_columns.at(columns), all_of_it, head, tile, shared, shared.rank)
                if done == 0:  # dV of this tile leaves through their place
                    self._load_columns_of_keys(tile, tma.K_columns, shared, tile_idx, later=1)
                done += 1

    def _first_dQ(self, part: int, end: Int32) -> Int32 | int:
        """See ``Transfers``. If dQ takes the place of S, that place changes after each odd number of steps.

        Tiles before have had three products of scores a step, and this one's first pass has one.
        """
        c = self.config
        if not c.dQ_over_S:
            return super()._first_dQ(part, end)
        return end % 2 * c.first_dP
