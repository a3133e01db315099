"""A model of the attention kernels' pipelines: how long a pass takes, and why.

    machine     rates of the GPUs
    simulation  processes that take clocks of units, and wait at barriers
    sm          the units of an SM, and what all kernels do with them
    hopper      a CTA of each Hopper kernel, its roles as processes
    blackwell   a CTA of each Blackwell kernel, likewise
    two_pass    a CTA of the backward kernels of two passes, likewise
    launch      from a CTA to a pass: tiles over SMs, turns, memory
    record      Hopper passes beside what was measured
    designs     Blackwell designs beside what was published
    timeline    an SM over time, as text or as a picture

docs/blackwell-model.md says what is known, what was fitted, and what comes out.
"""
