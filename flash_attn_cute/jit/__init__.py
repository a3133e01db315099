"""Kernels made when they are first needed, and kept."""
