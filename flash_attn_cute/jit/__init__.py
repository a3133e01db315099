"""Kernels made when they are first needed, and kept in memory and on disk."""
