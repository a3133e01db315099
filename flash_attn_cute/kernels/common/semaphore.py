"""Turns: the order in which tiles add to a block in global memory.

A number a block, 0 at first, counts the tiles that have added to it. Who is to be the (turn + 1)-th waits until it is
``turn``, adds, and counts itself. A sum has then one order whatever the GPU does, and as float addition is all that
depends on it, the same bits. (FlashAttention orders its dQ like this.)

The wait acquires, and the count releases, at the scope of the GPU. Both belong to one thread each;
between it and the threads that add stands a barrier of the CTA, and such orders are cumulative. So additions of one
turn, by any thread of the CTA, come before those of the next.
"""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait(counter: cute.Pointer, turn: Int32) -> None:
    """Returns, to a converged warp, when ``turn`` tiles have added."""
    if cute.arch.lane_idx() == 0:
        added = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        while added != turn:
            added = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def pass_on(counter: cute.Pointer) -> None:
    """Counts this tile, by one thread, when a barrier has told it that all others have added."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
