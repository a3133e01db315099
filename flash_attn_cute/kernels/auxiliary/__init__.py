"""Kernels before and after the backward kernel, for any architecture."""
