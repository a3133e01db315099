"""The backward pass on Hopper.

``launch`` is what is compiled: preprocessing, one of two kernels that multiply (``cta`` up to d = 128, ``cluster``
above), and behind the latter postprocessing. Both work on the tiles of ``tiles`` and add to the ``workspace``.
"""
