"""Exact attention for training: packed sequences, safe padding, cheap determinism."""

from flash_attn_cute.api import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.explanation import explain
from flash_attn_cute.sparsity.block_mask import BlockMask

__version__ = "0.1.0"
__all__ = ["BlockMask", "explain", "flash_attn_func", "flash_attn_varlen_func"]
