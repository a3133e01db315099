"""A model of the attention kernels' pipelines: how long a pass takes, and why.

Three levels, each with a module or two:

- ``simulation``, ``sm``, ``machine``: processes that take clocks of an SM's units and wait at barriers.
- ``hopper``, ``blackwell``: a CTA of a kernel, its roles as processes.
- ``launch``, ``record``, ``designs``: tiles over SMs, turns, clocks; what was measured or published beside it.

docs/blackwell-model.md says what is known, what was fitted, and what comes out.
"""
