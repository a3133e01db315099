"""NVIDIA's profilers on attention: ``python -m flash_attn_cute.profile --help``."""
