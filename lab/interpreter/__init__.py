"""Executes the PTX of a Blackwell or Hopper kernel on a CPU, for small shapes, and for missing waits.

The 32 lanes of a warp are numpy arrays. CTAs and warps take turns at random, some warps rarely. TMA and the tensor
cores are engines that do what they have been asked for at some later time, copies in any order, products in the order
in which they were issued; so a kernel that does not wait for something sooner or later misses it. It is sooner where
something lags: an engine, or some warps, that go on only when nothing else of the cluster can. Shared and tensor memory
start with NaN. Unknown instructions are refused when a program is read, addresses outside of memory, or in a CTA that
is over, when it runs. Where no warp can go on ``FaultError`` says what each waits for.

CTAs of a cluster run side by side, and reach each other's shared memory; those of a pair compute products together. A
warpgroup's products lag like others, each warp's part by itself; their registers are out of reach until it waits.

An mbarrier's phase that a warp waits for has to be the only one of its parity that it can be (``Warp.go_behind``).

Effects come as late as hardware may show them: behind a proxy fence, ``tcgen05.wait`` or a release (``weak``). Not seen
are a missing ``tcgen05.fence``, and a read ahead of a poll that does not acquire.

    state         a CTA: its memory, barriers and warps, and what its engines have been asked for; clusters
    statement     one instruction of ``lab.ptx.tree``: how its operands are read and written
    arithmetic    instructions on registers
    weak          effects that come later than their instruction
    memory        loads, stores, atomics and mbarriers
    tma           copies: instructions, and the engine
    lines         copies of 16 bytes a thread, for the same engine
    operands      operands of products in shared memory, as descriptors give them
    tensor        Blackwell's tensor memory and products: instructions, and the engine
    warpgroup     Hopper's products of warpgroups: instructions, and the engine
    program       a kernel, every instruction turned into what it does
    scheduling    whose turn it is: CTAs, warps and engines
    host          tensors in global memory, and the launching code of a pass
"""

from lab.interpreter.program import Program
from lab.interpreter.scheduling import run
from lab.interpreter.state import FaultError, Lagging, Launch, Name, address_of

__all__ = ["FaultError", "Lagging", "Launch", "Name", "Program", "address_of", "run"]
