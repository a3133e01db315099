"""Effects that hardware may show later than the instruction that has them, until another instruction orders them.

    st.shared                   shown to TMA and tensor cores by the thread's fence.proxy.async
    tcgen05.ld                  in registers behind the warp's wait::ld
    tcgen05.st                  in tensor memory behind the warp's wait::st
    st, red and TMA to global   shown to other clusters by a release at the GPU's scope: the warp's own, or one of its
    memory                      cluster behind a barrier at which the warp has arrived

Each effect is shown at once or as late as that, by chance. What of a kernel depends on it being early is then wrong.

A read of shared memory (ld.shared, ldmatrix) may be so late, too, that what TMA writes to its place overtakes it, even
behind an mbarrier at which the reader has arrived. The reader's fence.proxy.async ends the read. On an H200 one call in
two had wrong rows without it.
"""

import random
from collections.abc import Callable

import numpy as np

from lab.interpreter.state import Array, Copy, Cta, FaultError, Warp, Written, warp_number

_CHUNK = 16  # bytes of shared memory
_UNDER_WAY = np.iinfo(np.int32).max  # a read, in the place of the arrival behind which it has ended


def is_late(draw: random.Random) -> bool:
    """Decides about an effect."""
    return draw.random() < 0.5


def show(effects: list[Callable[[], None]]) -> None:
    """Shows all effects of a list, in order."""
    for effect in effects:
        effect()
    effects.clear()


def show_to_async(warp: Warp, lanes: Array) -> None:
    """Shows to TMA and tensor cores what lanes have stored in shared memory."""
    left = []
    for stored, copy in warp.late.to_async:
        copy(stored & lanes)
        if (stored & ~lanes).any():
            left.append((stored & ~lanes, copy))
    warp.late.to_async = left


def read_shared(warp: Warp, places: Array, lanes: Array) -> None:
    """Notes that lanes read bytes of their CTA's shared memory, at some places, up to 16 aligned ones at each."""
    chunks = places // _CHUNK
    if warp.index not in warp.cta.reads:
        warp.cta.reads[warp.index] = np.zeros(len(warp.cta.shared) // _CHUNK, np.int32)
    warp.cta.reads[warp.index][chunks] = _UNDER_WAY
    warp.late.reading = warp.late.reading | lanes


def end_reads(warp: Warp, lanes: Array) -> None:
    """Ends what a warp reads, for those who know of its next arrival, if all lanes that read are among these."""
    if warp.late.reading.any() and not (warp.late.reading & ~lanes).any():
        reads = warp.cta.reads[warp.index]
        reads[reads == _UNDER_WAY] = warp.known[warp.number] + 1
        warp.late.reading = np.zeros_like(lanes)


def overwrite(copy: Copy, cta: Cta, places: Array | slice) -> None:
    """Checks what TMA writes to a CTA's shared memory: 16 aligned bytes at each of some places, or a range of bytes.

    Raises:
        FaultError: a warp may still be reading there, as far as who asked for the copy knows.
    """
    if isinstance(places, slice):
        chunks: Array | slice = slice(places.start // _CHUNK, places.stop // _CHUNK)
    else:
        chunks = places // _CHUNK
    for index, reads in cta.reads.items():
        number = warp_number(cta.rank, index)
        arrivals = int(copy.known[number]) + (copy.warp.number == number)
        if (reads[chunks] > arrivals).any():
            raise FaultError(f"TMA writes what warp {index} has read, which has not ended it by fence.proxy.async")


def write_global(warp: Warp, places: Array, size: int, write: Callable[[], None]) -> None:
    """Writes to global memory, ``size`` bytes at each of some places, now or later; never ahead of an earlier write."""
    if warp.late.to_global or warp.cta.cluster.to_global or is_late(warp.cta.draw):
        warp.late.to_global.append(Written(int(places.min()), int(places.max()) + size, write))
    else:
        write()


def arrive(warp: Warp) -> None:
    """Lets others of the cluster release what the warp has written: it arrives at a barrier."""
    if warp.late.to_global:
        warp.cta.cluster.to_global += warp.late.to_global
        warp.late.to_global = []


def release(warp: Warp) -> None:
    """Shows to all what the warp has written to global memory, and what others have that it knows of."""
    arrive(warp)
    show([x.write for x in warp.cta.cluster.to_global])
    warp.cta.cluster.to_global.clear()


def read_global(warp: Warp, places: Array, size: int) -> None:
    """Shows what is read of what the cluster has written: within it, barriers are enough."""
    pending = [written for written in (warp.cta.cluster.to_global, warp.late.to_global) if written]
    if not pending:
        return
    first, last = int(places.min()), int(places.max()) + size
    for written in pending:
        if any(first < x.last and x.first < last for x in written):
            show([x.write for x in written])
            written.clear()


NOT_LOADED = np.full(32, 0x7FC0DEAD, np.uint32)  # in registers: NaN
