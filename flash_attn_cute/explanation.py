"""The public place of ``explain`` and ``Explanation``, which ``calls.explanation`` defines."""

from flash_attn_cute.calls.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
