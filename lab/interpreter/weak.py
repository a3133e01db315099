"""Effects that hardware may show later than the instruction that has them, until another instruction orders them.

    st.shared                   shown to TMA and tensor cores by the thread's fence.proxy.async
    tcgen05.ld                  in registers behind the warp's wait::ld
    tcgen05.st                  in tensor memory behind the warp's wait::st
    st, red and TMA to global   shown to other clusters by a release at the GPU's scope: the warp's own, or one of its
    memory                      cluster behind a barrier at which the warp has arrived

Each effect is shown at once or as late as that, by chance. What of a kernel depends on it being early is then wrong.
"""

import random
from collections.abc import Callable

import numpy as np

from lab.interpreter.state import Array, Warp, Written


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
