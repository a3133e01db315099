"""Instruments for those who change the package. Those for kernels show what no GPU, or no run on one, does.

    ptx          reads PTX: a tree, and the threads of its kernels
    lint         rules that the PTX of kernels must keep
    interpreter  executes the PTX of Blackwell and Hopper kernels on a CPU
    emulator     runs Blackwell kernels on a Hopper GPU
    bugs         bugs to plant in Blackwell kernels, and what finds each
    model        predicts how long a pass takes, from the pipelines of its kernels
    prose        checks the words of code and pages
    site_links   the site's hook for links that leave docs/

They are not in the wheel. Their tests are in ``tests/lab``.
"""
