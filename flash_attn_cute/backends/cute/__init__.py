"""The backend of kernels in the CuTe DSL, one for every architecture in ``kernels.registry``."""

from flash_attn_cute.backends.cute.backend import CUTE_BACKENDS, CuteBackend

__all__ = ["CUTE_BACKENDS", "CuteBackend"]
