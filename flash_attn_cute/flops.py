"""The public place of ``visible_pairs``, which ``calls.flops`` defines."""

from flash_attn_cute.calls.flops import visible_pairs

__all__ = ["visible_pairs"]
