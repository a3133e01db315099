"""The backend of kernels in the CuTe DSL, one for every architecture in ``kernels.registry``."""

from flash_attn_cute.backends.cute.backend import CuteBackend

__all__ = ["CuteBackend"]
