"""Runs kernels that are compiled for Blackwell on a Hopper GPU: ``docs/sm100-on-hopper.md``.

    translate      PTX for Blackwell, rewritten for Hopper; ``runtime.cu`` and ``product.h`` have what it calls
    build          PTX to a binary, by nvcc and ptxas
    hook           puts that binary in the place of the one that ``flash_attn_cute`` compiles
    mailbox        settings and faults, in memory that host and GPU share
    pytest_plugin  the same for runs of pytest

``on_host`` has what tests need to compile the arithmetic of products without a GPU.
"""
