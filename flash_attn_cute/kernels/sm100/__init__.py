"""Kernels for Blackwell (compute capabilities 10.0 and 10.3)."""
