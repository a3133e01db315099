"""Attention in plain PyTorch: every feature, any device, linear memory, the same bits every time."""

from flash_attn_cute.backends.portable.backend import PortableBackend

__all__ = ["PortableBackend"]
