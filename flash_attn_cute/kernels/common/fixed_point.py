"""Sums of dQ in fixed point: integers add up to the same bits in any order, so that no tile waits for its turn.

A row of dQ is summed in int32, as multiples of a power of two that is known before the first addition. No row's sum
is larger than

    (|dO| max |V| + |delta|) max |K|

with norms of a row of dO and of V, and with the largest element of K, over the keys of all visible tiles: a score's
dS is P (dP - delta), |dP| is at most |dO| |V|, and P sums up to at most 1.

The bound is far above most sums, and the lowest bits are lost. A few keys with huge values could leave too few bits to
all others. So each head has a measure of that (``KeyRanges.of_heads``). Above ``MOST_LOSS`` it is summed in float32, in
turns. Both the measure and the sums depend on the inputs alone. ``benchmarks/notes/determinism.md`` has the errors.

Reproducible sums of floats by integers, or by bins that are aligned alike, are an idea of ReproBLAS (Demmel, Nguyen).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Constexpr, Float32, Int32, Int64, const_expr

from flash_attn_cute.kernels.arguments import BLOCK, BackwardArguments
from flash_attn_cute.kernels.backward import NUM_RANGES
from flash_attn_cute.kernels.common.assembly import as_bits, as_float, fma, largest_magnitude, to_integer
from flash_attn_cute.kernels.common.key_lists import blocks_of_keys, list_of
from flash_attn_cute.kernels.common.rows import rows_first
from flash_attn_cute.kernels.common.workspace import Workspace

# With so much of it integers double nothing: on data that is hard for sums errors grow by 3 % at most.
_MOST_LOSS_BITS = 34
MOST_LOSS = float(1 << _MOST_LOSS_BITS)
FLOAT32 = -1.0  # in the place of a row's units: this head is summed in float32, in turns
# Added to a number below 2^22 it makes a float whose last bits are the nearest integer.
_ROUNDING, _ROUNDING_BITS = 1.5 * (1 << 23), 0x4B400000
_MOST_ROUNDED = float(1 << 22)
# Heads with less loss do without some bits, and keep 2 more than those of most loss, as most of what their tiles add is
# then below ``_MOST_ROUNDED``. Without 9 bits all of it is.
_MOST_SPARE, _KEPT = 9, 2
_MARGIN = 1.05  # of the bound, as P and dS are rounded
_THREADS, _PARTS = 256, 2  # of a tile, one after the other, so that more CTAs fit an SM
_WARPS = _THREADS // 32


# Magnitudes of keys and values, of a row, a tile or a head: the largest square of the norm of a row of V, the largest
# element of K, sums of squares of V and K (NaN or infinite if an element is), and the number of rows.
_NORM_V, _ELEMENT_K, _SQUARES_V, _SQUARES_K, _ROWS = range(5)


class KeyRanges:
    """The kernels that read K and V once: for the magnitudes of each tile of keys, and then of each key head.

    A key that no query sees has no magnitude, so what it holds changes no bit of dQ. Only if it is NaN or infinite, and
    others of its tile are seen, products have NaN, which integers would lose: that is left to float32.
    """

    def __init__(self, config: Any):
        self.config = config
        # Threads a row. With fewer than 8 a part of 64 keys has no row for each thread.
        self.lanes = max(8, 1 << (config.tile_d // 8).bit_length() - 1)
        self.vectors = -(-config.tile_d // 8 // self.lanes)  # of 16 bytes of a row, a thread
        self.num_rows = config.tile_n * self.lanes // _THREADS // _PARTS  # of a part of a tile, a thread

    @cute.jit
    def __call__(self, a: BackwardArguments, ws: Workspace, stream) -> None:
        """Launches the kernels, for a dense batch: one CTA a tile of a key head, and one warp a key head."""
        batch, _, heads_k, _ = a.mK.shape
        self.of_tiles(a, ws).launch(
            grid=[heads_k, blocks_of_keys(self.config, a), batch], block=[_THREADS, 1, 1], stream=stream
        )
        self.of_heads(a, ws).launch(grid=[heads_k, batch, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def of_tiles(self, a: BackwardArguments, ws: Workspace) -> None:
        head_k, block, batch = cute.arch.block_idx()  # neighbours read rows that lie side by side
        heads_k, tiles, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        gK, gV = (rows_first(x, False)[None, None, head_k, batch] for x in (a.mK, a.mV))
        # Loads are in flight while lists are read. They are in vain for a tile that no query sees, but few are.
        first_key = block * self.config.tile_n
        keys, values = (self._rows(x, first_key, 0) for x in (gK, gV))
        smem = cutlass.memory.SmemAllocator()
        sSeen = smem.allocate_tensor(Int32, cute.make_layout(self.config.tile_n))
        sFound = smem.allocate_tensor(Float32, cute.make_layout((NUM_RANGES, _WARPS)))
        group, num_entries = a.mQ.shape[2] // heads_k, Int32(0)
        for i in cutlass.range(group, unroll=1):
            num_entries += list_of(self.config, a, ws, batch, head_k * group + i, block)[1]
        found = cute.make_rmem_tensor(NUM_RANGES, Float32)
        found.fill(0.0)
        if num_entries > 0:
            if thread < self.config.tile_n:
                sSeen[thread] = self._is_seen(a, ws, batch, head_k, block, thread)
            cute.arch.sync_threads()
            for part in cutlass.range_constexpr(_PARTS):
                if const_expr(part > 0):
                    keys, values = (self._rows(x, first_key, part) for x in (gK, gV))
                self._measure(keys, values, sSeen, part, found)
        _over_warp(found)
        if thread % 32 == 0:
            for i in range(NUM_RANGES):
                sFound[i, thread // 32] = found[i]
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range(1, _WARPS, unroll=1):
                _merge(found, [sFound[i, warp] for i in range(NUM_RANGES)])
            for i in range(NUM_RANGES):
                ws.mRanges[i, head_k, batch * tiles + block] = found[i]

    @cute.kernel
    def of_heads(self, a: BackwardArguments, ws: Workspace) -> None:
        """Merges the tiles of a head, and decides how it is summed."""
        head_k, batch, _ = cute.arch.block_idx()
        tiles, lane = blocks_of_keys(self.config, a), cute.arch.lane_idx()
        first = batch * tiles
        found = cute.make_rmem_tensor(NUM_RANGES, Float32)
        found.fill(0.0)
        for tile in cutlass.range(lane, tiles, 32, unroll=2):
            _merge(found, [ws.mRanges[i, head_k, first + tile] for i in range(NUM_RANGES)])
        _over_warp(found)
        # How much larger than a usual sum the bound is, squared. A sum of many keys with equal weights is small, and a
        # few large rows of V, or elements of K, raise the bound, but neither the sum nor its error. NaN is a loss, too.
        columns, rows = Float32(a.mK.shape[3]), found[_ROWS]
        loss = found[_NORM_V] * rows / found[_SQUARES_V] * columns * rows
        loss *= found[_ELEMENT_K] * found[_ELEMENT_K] * rows * columns / found[_SQUARES_K]
        if lane == 0:
            ws.mHeads[0, head_k, first] = cute.math.sqrt(found[_NORM_V])
            ws.mHeads[1, head_k, first] = found[_ELEMENT_K]
            spare = (_MOST_LOSS_BITS + 127 - (as_bits(loss) >> 23)) // 2 - _KEPT
            spare = cutlass.max(cutlass.min(spare, Int32(_MOST_SPARE)), Int32(0))
            ws.mHeads[2, head_k, first] = spare.to(Float32) if loss <= MOST_LOSS else Float32(FLOAT32)

    @cute.jit
    def _is_seen(
        self, a: BackwardArguments, ws: Workspace, batch: Int32, head_k: Int32, block: Int32, nth: Int32
    ) -> Int32:
        """Whether any query of any head sees the tile's nth key: 1 or 0."""
        c, length = self.config, a.mK.shape[1]
        group, parts, key = a.mQ.shape[2] // a.mK.shape[2], BLOCK // c.tile_m, block * c.tile_n + nth
        if const_expr(c.tile_n < BLOCK):  # bits are of whole blocks
            nth = key % BLOCK
        start, stop, seen = Int32(0), a.mQ.shape[1], Int32(0)
        if const_expr(c.features.intervals):
            place = 2 * (Int64(batch) * length + cutlass.min(key, length - 1))
            start, stop = a.mIntervals[place], cutlass.min(stop, a.mIntervals[place + 1])
        for i in cutlass.range(group, unroll=1):
            first, num = list_of(c, a, ws, batch, head_k * group + i, block)
            entry = Int32(0) if key < length else num
            while entry < num and seen == 0:
                m_block, tile = ws.mEntries[first + entry, 0], ws.mEntries[first + entry, 1]
                low, high = cutlass.max(start, m_block * c.tile_m), cutlass.min(stop, (m_block + 1) * c.tile_m)
                if tile < 0:
                    seen = Int32(1) if low < high else Int32(0)
                else:
                    for query in cutlass.range(low, high, unroll=4):
                        row = m_block % parts * c.tile_m + query - m_block * c.tile_m
                        word = a.blocks.mTiles[(Int64(tile) * BLOCK + row) * (BLOCK // 32) + nth // 32]
                        seen |= word >> nth % 32 & 1
                entry += 1
        return seen

    def _place(self, part: int, i: int) -> Int32:
        """This thread's ith row of a part, within a tile."""
        thread, _, _ = cute.arch.thread_idx()
        return (part * self.num_rows + i) * (_THREADS // self.lanes) + thread // self.lanes

    @cute.jit
    def _rows(self, gX: cute.Tensor, first: Int32, part: Constexpr) -> cute.Tensor:
        """This thread's vectors of a part, (8, vector, row): zeros behind the columns, the last row behind the rows."""
        lane = cute.arch.thread_idx()[0] % self.lanes
        read = cute.make_rmem_tensor((8, self.vectors, self.num_rows), gX.element_type)
        read.fill(0.0)
        for j in cutlass.range_constexpr(self.vectors):
            vector, last = lane + j * self.lanes, gX.shape[0] - 1 - first
            if vector < gX.shape[1] // 8:
                own = cute.local_tile(cute.domain_offset((first, 0), gX), (gX.shape[0], 8), (0, vector))
                for i in cutlass.range_constexpr(self.num_rows):
                    cute.autovec_copy(own[cutlass.min(self._place(part, i), last), None], read[None, j, i])
        return read

    @cute.jit
    def _measure(
        self, keys: cute.Tensor, values: cute.Tensor, sSeen: cute.Tensor, part: Constexpr, found: cute.Tensor
    ) -> None:
        """Magnitudes of what this thread has read of a part."""
        lane = cute.arch.thread_idx()[0] % self.lanes
        for i in cutlass.range_constexpr(self.num_rows):
            seen = Float32(sSeen[self._place(part, i)])
            largest, squares_k, squares_v = (Float32(0.0) for _ in range(3))
            for j in cutlass.range_constexpr(8 * self.vectors):
                # NaN if it is not finite, even if no query sees it.
                k, v = (x[j % 8, j // 8, i].to(Float32) * seen for x in (keys, values))
                largest = largest_magnitude(largest, k)
                squares_k, squares_v = squares_k + k * k, squares_v + v * v
            norm = squares_v
            for j in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                norm += cute.arch.shuffle_sync_bfly(norm, 1 << j)
            _merge(found, [norm, largest, squares_v, squares_k, seen if lane == 0 else Float32(0.0)])


def _merge(found: cute.Tensor, other: list[Float32]) -> None:
    """Magnitudes of both, in the place of the first."""
    for i in (_NORM_V, _ELEMENT_K):
        found[i] = cute.arch.fmax(found[i], other[i])
    for i in (_SQUARES_V, _SQUARES_K, _ROWS):
        found[i] = found[i] + other[i]


def _over_warp(found: cute.Tensor) -> None:
    """Magnitudes of what all lanes of a warp have found, to each."""
    for j in range(5):
        _merge(found, [cute.arch.shuffle_sync_bfly(found[i], 1 << j) for i in range(NUM_RANGES)])


def ranges_of_head(config: Any, a: BackwardArguments, ws: Workspace, batch: Int32, head: Int32) -> list[Float32]:
    """A head's largest norm of a row of V, its largest element of K, and ``FLOAT32`` or its spare bits."""
    head_k = head // (a.mQ.shape[2] // a.mK.shape[2])
    return [ws.mHeads[i, head_k, batch * blocks_of_keys(config, a)] for i in range(3)]


@cute.jit
def units_of(ranges: list[Float32], norm_dO: Float32, delta: Float32, is_seen: Boolean) -> Float32:
    """The factor of a row of dQ ahead of its sum: a power of two by which its largest sum has 31 bits, or fewer.

    It is NaN if dO or delta is NaN or infinite, 0 for a row that sees nothing, or ``FLOAT32``. ``ranges`` are those of
    the head (``ranges_of_head``), ``norm_dO`` and ``delta`` the row's.
    """
    bound = (norm_dO * ranges[0] + cute.arch.fmax(delta, -delta)) * ranges[1] * Float32(_MARGIN)
    exponent = (as_bits(bound) >> 23) & 255
    units = as_float((284 - ranges[2].to(Int32) - cutlass.max(exponent, Int32(31))) << 23)
    units = Float32.nan if exponent == 255 else units
    units = units if is_seen else Float32(0.0)
    return units if ranges[2] >= 0.0 else Float32(FLOAT32)


@cute.jit
def to_fixed_point(acc: cute.Tensor, units: cute.Tensor) -> None:
    """Makes an accumulator of two rows a thread integers in units of each, plus ``_ROUNDING_BITS``, as their bits.

    Numbers below 2^22 become integers by one addition, all others by a conversion, of which an SM has few a clock.
    """
    largest = [Float32(0.0), Float32(0.0)]
    for i in cutlass.range_constexpr(cute.size(acc)):
        largest[i // 2 % 2] = largest_magnitude(largest[i // 2 % 2], acc[i])
    if cute.arch.fmax(largest[0] * units[0], largest[1] * units[1]) < _MOST_ROUNDED:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = fma(acc[i], units[i // 2 % 2], Float32(_ROUNDING))
    else:
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = as_float(to_integer(acc[i] * units[i // 2 % 2]) + _ROUNDING_BITS)


def from_fixed_point(numbers: cute.Tensor, units: Float32, num_adding: Int32) -> list[Float32]:
    """Numbers of a row to which so many tiles have added, in its units, or as they are in float32."""
    whole = cutlass.select_(units == Float32(0.0), Float32(0.0), Float32(1.0) / units)
    in_turns = units == Float32(FLOAT32)
    added = num_adding * _ROUNDING_BITS
    return [
        cutlass.select_(in_turns, numbers[i], (as_bits(numbers[i]) - added).to(Float32) * whole)
        for i in range(cute.size(numbers))
    ]
