"""Attention forward on Blackwell, by single CTAs, or by pairs of them (``forward_pair``).

``python -m flash_attn_cute.kernels describe sm100 forward --d 128`` prints ``forward_schedule``.

A CTA takes tiles of queries of one head, one after the other. A tile has one or two parts of 128 queries, which is what
a product has lanes for. A *unit* is a block of keys for one part, and units are counted over all tiles of the CTA: unit
u of two parts is block u // 2 of part u % 2. Its scores are in S of u % 2.

Steps of q, outputs and stats count only tiles that have blocks: in one that attends to no key nothing is loaded or
multiplied, and the epilogue writes zeros by itself.

The mma warp issues O(u) = P(u) V, in two parts as P comes, and then S(u + 2) = Q K^T, for one unit after the other
and on into the next tile, so that one part's softmax runs beside the products of the other. With one part the same
order has two blocks in flight.
Where the next tile is not known yet, what is left of O(u) is issued first: the producer publishes a tile only when the
one two before it is stored.
Products are done in the order in which they were issued, and a commit arrives when all before it are done. Hence:
  - S(u + 2) may take the place of P(u), which O(u) reads ahead of it.
  - With two parts full scores of unit u show softmax that O of unit u - 2, the part's last, is complete, and O may be
    rescaled. With one part O(u - 1) is behind S(u), and a warp that rescales waits for its commit. A wait sees only the
    parity of a phase, and arrivals of commits may overtake each other. So every warp waits for each O(u - 2) beside
    S(u), whether or not it rescales, and skips no phase.
  - O of a tile's first block overwrites. Before it the mma warp waits for outputs to be empty; no softmax thread
    rescales O before a block that it has seen a key in, which is a later one.

P and row_max are in ``softmax``. Masks of windows and sequence ends are applied only in blocks that an edge crosses for
the part (``Blocks``). Where a block is empty for a part, its P is zero without its scores being read.

Under a mask or a block mask each part of 128 queries has a list of the blocks that it attends to
(``common.block_lists``), and the tile iterates over their union (``block_iterator``). A block that both parts attend to
is loaded once; a block that is empty for one part is computed for the other alone. The producer publishes each block's
index and its code for each part. For a part whose code is EMPTY the mma warp leaves out the products, and softmax
leaves out P. Commits and arrivals go on, so that units are counted as without a mask. O of a part begins with the first
block that is not empty for it. A thread's bits are the four words of its row, 16 bytes, which it loads while it waits
for scores. It applies intervals of keys beside a block mask (packed sequences, windows) to these words.

A softmax thread reads its own row of a bias (``scores.BiasRow``) before it waits for the scores of a block.

Tiles of packed sequences load and store through ragged views (``common.tma``): rows behind a sequence's end read as
zeros, so NaN behind it cannot reach P V, and are not written.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from flash_attn_cute.kernels.arguments import ForwardArguments
from flash_attn_cute.kernels.common.assembly import opaque, set_registers
from flash_attn_cute.kernels.common.block_lists import EMPTY, Tables
from flash_attn_cute.kernels.common.blocks import Blocks, Edges, Window
from flash_attn_cute.kernels.common.dtypes import DTYPES
from flash_attn_cute.kernels.common.main_kernels import ForwardKernel, ForwardMmas
from flash_attn_cute.kernels.common.max_logits import raise_max_logit_by_warp
from flash_attn_cute.kernels.common.query_tiles import QueryTile
from flash_attn_cute.kernels.common.score import ScoreScales
from flash_attn_cute.kernels.common.score_tensors import part_of
from flash_attn_cute.kernels.common.tma import ForwardTiles
from flash_attn_cute.kernels.sm100 import frame, tensor_memory
from flash_attn_cute.kernels.sm100.config import CTAS, MMA_WARP, PART_ROWS, PRODUCER_WARP
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig
from flash_attn_cute.kernels.sm100.forward_schedule import SPARE_REGISTERS, forward_schedule
from flash_attn_cute.kernels.sm100.forward_transfers import Epilogue, Producer, Shared
from flash_attn_cute.kernels.sm100.mma import (
    commit,
    commit_to_both,
    gemm,
    in_tensor_memory,
    operand,
    swizzled,
    tiled_mma,
    transposed,
)
from flash_attn_cute.kernels.sm100.scores import (
    BiasRow,
    BlockOfBias,
    cap_in_memory,
    hide_by_bits_in_memory,
    hide_in_memory,
    hides_some,
    largest_in_memory,
    within_interval,
    words_of,
)
from flash_attn_cute.kernels.sm100.softmax import RowSoftmax

_COLUMNS = 32  # of scores, or of O to rescale them, that a thread reads at once
_STEP = 16  # keys that a product sums over


class ForwardSm100(ForwardKernel):
    """The forward kernel of one configuration."""

    producer, shared_memory = Producer, Shared.of

    def __init__(self, config: ForwardConfig):
        super().__init__(config, forward_schedule(config), swizzled)

    def mmas(self) -> ForwardMmas:
        c, source, ctas = self.config, tcgen05.OperandSource, self.config.ctas_a_tile
        return ForwardMmas(
            S=tiled_mma(self.dtype, OperandMajorMode.K, c.tile_n, source.SMEM, ctas=ctas),
            O=tiled_mma(self.dtype, OperandMajorMode.MN, c.tile_dv, source.TMEM, ctas=ctas),
        )

    def load_operation(self) -> Any:
        """See ``MainKernel``: bytes for both CTAs of a pair arrive at the leader's barriers."""
        return cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup(self.config.ctas_a_tile))

    @cute.kernel
    def kernel(
        self,
        mmas: ForwardMmas,
        tma: ForwardTiles,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        a: ForwardArguments,
        tables: Tables | None,
        scales: ScoreScales,
    ) -> None:
        """Sets up shared and tensor memory, then splits into roles."""
        c, softmax, epilogue, mma = (self.config, *map(self.schedule.role, ("softmax", "epilogue", "mma")))
        warp_idx, thread, shared = frame.begin(self, tma)
        if warp_idx < softmax.warps.stop:
            set_registers(softmax.registers, frame.THREADS)
            part, address = warp_idx // 4, tensor_memory.row_address(shared.tensor_memory, thread)
            online = RowSoftmax(scales.log2, c.polynomial_every, c.features.bias, self.keeps_max_P)
            max_logit = cute.make_rmem_tensor(1, Float32) if const_expr(self.keeps_max_logits) else None
            Softmax(c, a, tables, shared, scales, online, max_logit, part, thread, address)()
        elif warp_idx < epilogue.warps.start:
            set_registers(SPARE_REGISTERS, frame.THREADS)
        elif warp_idx < epilogue.warps.stop:
            set_registers(epilogue.registers, frame.THREADS)
            Epilogue(c, a, tma.O, shared, mO, mLSE, thread)()
        else:
            set_registers(mma.registers, frame.THREADS)
            if warp_idx == MMA_WARP:
                if shared.is_leader:
                    MmaWarp(c, mmas, shared)()
            elif warp_idx == PRODUCER_WARP:
                self.producer(c, a, tables, tma, shared)()
        frame.end(shared, warp_idx)


class MmaWarp:
    """The warp that issues all products, those of a pair in the leader. Its counts are over all tiles of the CTA."""

    def __init__(self, config: ForwardConfig, mmas: ForwardMmas, shared: Shared) -> None:
        self.config, self.mmas, self.shared = config, mmas, shared
        self.tSrQ = mmas.S.make_fragment_A(operand(shared.sQ))  # (MMA, 1, MMA_K, part)
        self.tSrK = mmas.S.make_fragment_B(operand(shared.sK))  # (MMA, 1, MMA_K, PIPE)
        self.tOrV = mmas.O.make_fragment_B(operand(transposed(shared.sV)))  # (MMA, 1, MMA_K, PIPE)
        self.memory = shared.tensor_memory
        # Blocks whose scores, and whose output, have been begun; parts of Q that scores and outputs are done with.
        self.k, self.v, self.q, self.o = (cute.make_rmem_tensor(1, Int32) for _ in range(4))
        for counter in (self.k, self.v, self.q, self.o):
            counter[0] = 0
        # Of blocks whose output is yet to be begun, from the last one: which of their tile's blocks; -1: there is none.
        self.positions = cute.make_rmem_tensor(config.blocks_ahead, Int32)
        self.positions.fill(-1)
        # Where a part's products can be left out: whether it attends to the last block; whether its O has been begun.
        self.seen, self.has_O = (cute.make_rmem_tensor(config.q_parts, Int32) for _ in range(2))
        for flags in (self.seen, self.has_O):
            flags.fill(0)

    @cute.jit
    def __call__(self) -> None:
        """S of a block ahead of P V of the block before it."""
        c, shared, tiles = self.config, self.shared, self.shared.rings.tiles
        step = Int32(0)
        tiles.wait_full(step)  # from the producer
        while shared.tiles[0, tiles.stage(step)] >= 0:
            num_blocks = shared.tile(c, step).blocks.num
            tiles.release_fields(step)  # to the producer
            for i in cutlass.range(num_blocks, unroll=1):
                self._advance(i, i == num_blocks - 1, has_scores=True)
            step += 1
            # No role may wait for an output while this warp waits for a tile: the producer may publish none before that
            # output is read.
            is_followed = cute.arch.vote_all_sync(tiles.is_full(step))
            if is_followed:
                is_followed = shared.tiles[0, tiles.stage(step)] >= 0
            if not is_followed:
                for _ in cutlass.range(c.blocks_ahead, unroll=1):
                    self._advance(Int32(-1), Boolean(False), has_scores=False)
            tiles.wait_full(step)
        shared.rings.v.wait_empty(self.v[0] - 1 + c.v_stages)  # the last commit: shared memory lives until then

    @cute.jit
    def _advance(self, i: Int32, is_last: Boolean, has_scores: Constexpr) -> None:
        """Begins the output of the block that is ``blocks_ahead`` back, and the scores of the next: a tile's i-th.

        Without scores i is -1.
        """
        c, shared, rings = self.config, self.shared, self.shared.rings
        signal = commit_to_both if const_expr(c.ctas_a_tile == CTAS) else commit
        steps = c.tile_n // _STEP
        most = steps - _COLUMNS // _STEP  # whose P is handed over ahead of the others
        positions = [self.positions[j] for j in range(c.blocks_ahead)]
        position = positions[-1]
        ends_tile = [i, *positions][-2] <= 0  # the block behind it is a tile's first, or there is none
        k, v, q, o = self.k[0], self.v[0], self.q[0], self.o[0]
        seen, has_O = self.seen, self.has_O
        for part in cutlass.range_constexpr(c.q_parts):
            if position >= 0:
                if const_expr(part == 0):
                    rings.v.wait_full(v)  # from the producer
                unit = c.q_parts * v + part
                rings.p.wait_full(unit)  # from softmax warps: most of P is in the place of S
                if position == 0:
                    rings.outputs.wait_empty(o + part)  # from the epilogue: it has read the last tile's O
                tensor_memory.after_sync()
                accumulates, is_seen = position > 0, True
                if const_expr(c.leaves_out):
                    accumulates, is_seen = accumulates and has_O[part] != 0, seen[part] != 0
                if is_seen:
                    self.start_O(unit, v, part, (0, most), accumulates)
                if const_expr(c.leaves_out):
                    has_O[part] = Int32(accumulates or is_seen)
                rings.scores.wait_empty(unit + 2)  # from softmax warps: the others are, too
                tensor_memory.after_sync()
                if is_seen:
                    self.start_O(unit, v, part, (most, steps), Boolean(True))
                if const_expr(c.q_parts == 1):
                    signal(rings.added.full(v))  # to softmax warps
                if ends_tile:
                    signal(rings.outputs.full(o + part))  # to the epilogue
                if const_expr(part == c.q_parts - 1):
                    signal(rings.v.empty(v))  # to the producer
            if const_expr(has_scores):
                unit = c.q_parts * k + part
                if const_expr(part == 0):
                    rings.k.wait_full(k)  # from the producer
                if i == 0:
                    rings.q.wait_full(q + part)  # from the producer
                is_seen = True
                if const_expr(c.leaves_out):
                    if const_expr(part == 0):
                        rings.entries.wait_full(k)  # from the producer
                    is_seen = shared.entries.numbers[1 + part, rings.entries.stage(k)] != EMPTY
                    seen[part] = Int32(is_seen)
                    if const_expr(part == c.q_parts - 1):
                        rings.entries.release(k)  # to the producer
                if is_seen:
                    self.start_S(unit, k, part)
                signal(rings.scores.full(unit))  # to the part's softmax warps
                if is_last:
                    signal(rings.q.empty(q + part))  # to the producer
                if const_expr(part == c.q_parts - 1):
                    signal(rings.k.empty(k))  # to the producer
        self.v[0] = v + Int32(position >= 0)
        self.o[0] = o + c.q_parts * Int32(position >= 0 and ends_tile)
        if const_expr(has_scores):
            self.q[0] = q + c.q_parts * Int32(is_last)
            self.k[0] = k + 1
        for j in cutlass.range_constexpr(c.blocks_ahead):
            self.positions[j] = [i, *positions][j]

    def start_S(self, unit: Int32, k: Int32, part: int) -> None:
        """S = Q K^T."""
        rings = self.shared.rings
        place = self.memory + self.config.first_S(rings.scores.stage(unit))
        tSrQ, tSrK = self.tSrQ[None, None, None, part], self.tSrK[None, None, None, rings.k.stage(k)]
        gemm(self.mmas.S, place, tSrQ, tSrK, Boolean(False))

    def start_O(self, unit: Int32, v: Int32, part: int, steps: tuple[int, int], accumulates: Boolean) -> None:
        """O = P V, or O += P V, of some of the steps of 16 keys."""
        c, mma, rings = self.config, self.mmas.O, self.shared.rings
        tOrP = in_tensor_memory(mma, self.memory + c.first_S(rings.scores.stage(unit)), c.tile_n)
        place, tOrV = self.memory + c.first_O(part), self.tOrV[None, None, None, rings.v.stage(v)]
        gemm(mma, place, tOrP, tOrV, accumulates, steps)


@dataclass(frozen=True)
class Softmax:
    """A warpgroup: P from S for a part of every tile's queries, one a thread."""

    config: ForwardConfig
    a: ForwardArguments
    tables: Tables | None
    shared: Shared
    scales: ScoreScales
    softmax: RowSoftmax
    max_logit: cute.Tensor | None  # where it does not follow from P
    part: Int32
    thread: Int32  # of the warpgroup
    address: Int32  # of this thread's row in tensor memory

    @cute.jit
    def __call__(self) -> None:
        """All tiles of the CTA."""
        c, shared, rings, thread, part = self.config, self.shared, self.shared.rings, self.thread, self.part
        block_step, step, stats_step = Int32(0), Int32(0), part
        rings.tiles.wait_full(step)  # from the producer
        while shared.tiles[0, rings.tiles.stage(step)] >= 0:
            num_blocks = self.tile(step).blocks.num
            if num_blocks > 0:
                self.reset()
                for i in cutlass.range(num_blocks, unroll=1):
                    self._step(step, i, block_step)
                    block_step += 1
                if const_expr(c.features.max_logits):
                    self.raise_max_logits(step)
                rings.stats.wait_empty(stats_step)  # from the epilogue
                shared.stats[thread, 0, part] = self.softmax.row_sum[0]
                shared.stats[thread, 1, part] = self.softmax.row_max[0]
                rings.stats.arrive(stats_step)  # to it
                stats_step += c.q_parts
            rings.tiles.release_fields(step)  # to the producer
            step += 1
            rings.tiles.wait_full(step)
        if const_expr(c.q_parts == 1):
            for unit in (block_step - 2, block_step - 1):
                rings.added.wait_full(unit)  # from the tensor cores: of a pair, the CTA lives until they have arrived

    @cute.jit
    def _step(self, step: Int32, i: Int32, block_step: Int32) -> None:
        """Computes P of a tile's i-th block, in the place of S. Tiles and blocks are counted for the whole CTA."""
        c, ring = self.config, self.shared.rings.scores
        if const_expr(c.features.bias):
            step = opaque(step)  # or the compiler computes ahead where the tile's fields are, and lacks registers
        if const_expr(c.features.listed):
            block, code, words = self.read_entry(step, block_step)
            is_seen, is_cut = code != EMPTY, self.hides(code, words)
        else:
            block, words = self.tile(step).blocks.nth(i), None
            visible = self.visible_blocks(step)
            is_seen = block >= visible.start and block < visible.stop
            is_cut = visible.crosses_left(block) or visible.crosses_right(block)
        unit = c.q_parts * block_step + self.part
        place = self.address + c.first_S(ring.stage(unit))

        bias = self.bias(step, block) if const_expr(c.features.bias and self.max_logit is None) else None
        store, hand_over = partial(self.store, place), partial(self.hand_over, unit)
        ring.wait_full(unit)  # from the tensor cores; the part's earlier outputs are complete, too
        if const_expr(c.q_parts == 1):
            self.shared.rings.added.wait_full(unit - 2)  # likewise: no phase is skipped
        tensor_memory.after_sync()
        if is_seen:
            if const_expr(self.max_logit is not None):
                scale = self.a.numbers.softmax_scale
                if is_cut:
                    self.hide(step, block, place, words, scale)
                self.add_logits(place, scale)
            if const_expr(c.features.softcap):
                cap_in_memory(place, c.tile_n, self.scales.tanh)
            if const_expr(c.features.bias):
                self.add_bias(step, block, place, bias)
            if is_cut:
                self.hide(step, block, place, words, self.scales.log2)
            scores = [partial(tensor_memory.load, place + first, _COLUMNS) for first in range(0, c.tile_n, _COLUMNS)]
            self.softmax.step(scores, store, partial(self.rescale, unit), hand_over, DTYPES[c.dtype])
        else:
            if const_expr(not c.features.listed):
                store(0, [Int32(0)] * (c.tile_n // 2))
            hand_over()
        tensor_memory.before_sync()
        ring.release(unit)  # to the mma warp

    # Fields of a tile are read again and again, and what follows from them is computed for every block: while a thread
    # waits for scores it has the time, but when it has them it lacks registers.

    def tile(self, step: Int32) -> QueryTile:
        """Tile of a step, as the producer has published it."""
        return self.shared.tile(self.config, step)

    def visible_blocks(self, step: Int32) -> Blocks:
        """Blocks of the tile that this part of its queries attends to."""
        tile = self.tile(step)
        first_row = tile.first_query + PART_ROWS * self.part
        num_rows = cutlass.min(tile.q.length - first_row, PART_ROWS)
        window = Window.of(self.config.features, self.a, tile.q.length, tile.k.length)
        return Blocks.of(first_row, num_rows, tile.k.length, window, self.config.tile_n)

    @cute.jit
    def read_entry(self, step: Int32, block_step: Int32) -> tuple[Int32, Int32, list[Int32]]:
        """Entry of a block: its index, the code in the part's list, and the row's bits, 32 keys a word."""
        ring = self.shared.rings.entries
        ring.wait_full(block_step)  # from the producer
        block, code = (self.shared.entries.numbers[j, ring.stage(block_step)] for j in (0, 1 + self.part))
        ring.release(block_step)  # to it
        words = words_of(self.tables.mBits, code, 0, self.thread)
        if const_expr(self.config.features.intervals):
            tile, m = self.tile(step), self.a.mIntervals
            row = tile.first_query + PART_ROWS * self.part + self.thread
            words = within_interval(words, m, tile.batch, tile.q.length, row, block * self.config.tile_n)
        return block, code, words

    @cute.jit
    def hides(self, code: Int32, words: list[Int32]) -> Boolean:
        """Whether some row of the warp does not attend to all of a block."""
        is_cut = code >= 0
        if const_expr(self.config.features.intervals):
            is_cut = hides_some(words)
        return is_cut

    def add_bias(self, step: Int32, block: Int32, place: Int32, bias: Any) -> None:
        """Adds the row's bias to a block's scores in tensor memory; read here, if not ahead of time.

        Where products are searched for the largest logit before, there are no registers to keep it in.
        """
        bias = self.bias(step, block) if bias is None else bias
        bias.add_in_memory(place, self.scales.bias)

    def bias(self, step: Int32, block: Int32) -> BlockOfBias:
        """Begins to read the row's bias in a block, which the part need not attend to."""
        a, f, tile = self.a, self.config.features, self.tile(step)
        row = cutlass.min(tile.first_query + PART_ROWS * self.part + self.thread, tile.q.length - 1)
        mRow = part_of(a, a.mBias, tile.q, tile.batch)[tile.head, row, None]
        bias = BiasRow.of(mRow, tile.k.length, f.strided_bias)
        return BlockOfBias.of(bias, self.config.tile_n, block * self.config.tile_n)

    def hide(self, step: Int32, block: Int32, place: Int32, words: list[Int32] | None, scale: Float32) -> None:
        """Masks a block's scores, yet to be multiplied by ``scale``, where they are in tensor memory.

        By the bits in ``words``, if there are lists, or else outside what the row attends to.
        """
        f = self.config.features
        if f.listed:
            hide_by_bits_in_memory(place, scale, words)
            return
        tile = self.tile(step)
        row = tile.first_query + PART_ROWS * self.part + self.thread
        window = Window.of(f, self.a, tile.q.length, tile.k.length)
        edges, first_column = Edges(left=f.left, right=True), block * self.config.tile_n
        hide_in_memory(place, self.config.tile_n, scale, row, first_column, tile.k.length, window, edges)

    def reset(self) -> None:
        """Resets the rows' state, before a tile's first block."""
        self.softmax.reset()
        if self.max_logit is not None:
            self.max_logit[0] = -Float32.inf

    def add_logits(self, place: Int32, scale: Float32) -> None:
        """Raises the row's largest logit to those of a block, products in tensor memory times ``scale``."""
        self.max_logit[0] = cute.arch.fmax(self.max_logit[0], largest_in_memory(place, self.config.tile_n, scale))

    def raise_max_logits(self, step: Int32) -> None:
        """Raises the largest logit of the tile's head to those of the rows."""
        tile = self.tile(step)
        logit = self.softmax.max_logit(0) if self.max_logit is None else self.max_logit[0]
        is_real = tile.first_query + PART_ROWS * self.part + self.thread < tile.q.length
        logit = cutlass.select_(is_real, logit, -Float32.inf)
        raise_max_logit_by_warp(self.a.mMaxLogits, tile.head, logit)

    def store(self, place: Int32, piece: int, P: list[Int32]) -> None:
        """Stores P of a piece, in pairs, from its first column on."""
        tensor_memory.store(place + piece * _COLUMNS // 2, P)

    def hand_over(self, unit: Int32) -> None:
        """Signals the mma warp that all of P but the last piece is there."""
        tensor_memory.before_sync()
        self.shared.rings.p.arrive(unit)

    def rescale(self, unit: Int32, factor: Float32) -> None:
        """Multiplies the row's O, to which all blocks before this one have been added."""
        if self.config.q_parts == 1:
            self.shared.rings.added.wait_full(unit - 1)  # from the tensor cores
            tensor_memory.after_sync()
        for first in range(0, self.config.tile_dv, _COLUMNS):
            address = self.address + (self.config.first_O(self.part) + first)
            tensor_memory.store(address, [x * factor for x in tensor_memory.load(address, _COLUMNS)])
