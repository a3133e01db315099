"""The tools of ``flash_attn_cute.profile``, also by the names ``tools.nsys``, ``tools.ncu`` and ``tools.workload``."""
