"""Rules that Hopper and Blackwell kernels must keep and that running them does not show: ``python -m lab.lint``.

The lint follows a kernel's PTX thread by thread (``lab.ptx.threads``); the first two threads of a warp stand for all of
it. What must lie between two instructions is looked for on every path from the one to the other. An *arrival* is at an
mbarrier or a named barrier, for which other threads wait.

    init-fence       mbarrier.init; fence.mbarrier_init; an arrival
    warp             a warp's st.shared, tcgen05.ld and st; bar.warp.sync; an arrival by one of its threads, or a copy
    proxy            ordinary stores to shared memory that TMA or tensor cores read; fence.proxy.async; an arrival
    turn             ld.acquire; fence.proxy.async of global memory; TMA stores or adds bytes; all of them are complete
                     (cp.async.bulk.wait_group 0); red.release
    load-wait        tcgen05.ld; tcgen05.wait::ld; its registers are computed with, or an arrival
    store-wait       tcgen05.st; tcgen05.wait::st; an arrival, or tcgen05.commit
    fence-before     tcgen05.ld and st; tcgen05.fence::before_thread_sync; an arrival
    fence-after      the end of a wait for tensor memory; tcgen05.fence::after_thread_sync; tcgen05.ld, st and mma
    election         tcgen05.mma and commit by one thread; alloc, dealloc, ld and st by whole warps
    group            one cta_group a kernel
    columns          tcgen05.alloc and dealloc by one warp each, always, of as many columns: a power of 2 from 32 to 512
    registers        setmaxnreg: one value a warpgroup, from 24 to 256 in steps of 8, not more together than at launch;
                     .inc from the count at launch on, .dec up to it and ahead of all waits
    arrivals         an mbarrier's count is that of the threads that arrive at it, in both CTAs of a pair
    expected-bytes   TMA loads signal mbarriers that expect bytes, and only those
    scope            loads of a loop that waits: acquire.gpu; integer red: release.gpu, or behind fence.acq_rel.gpu;
                     arrivals at another CTA's mbarrier: release.cluster (of Blackwell's kernels)
    cluster          CTAs meet; one reaches another one's memory and mbarriers; they meet again; a CTA ends
    offset           32-bit products of sizes reach no address in global memory

Not seen: which barrier guards which memory, beyond what fence-after needs; bytes that a tensor map moves; phases and
stages. Emulation (``lab.emulator``) sees those.
"""

from lab.lint.rules import Finding, barrier_operand, check, lint

__all__ = ["Finding", "barrier_operand", "check", "lint"]
