"""The backward pass on Hopper.

``launch`` is what is compiled: ``preprocess``, one of two main kernels (``cta`` up to d = 128, ``cluster`` above), and
behind the latter ``postprocess``. Both work on the tiles of ``tiles`` and add to the ``workspace``.
"""
