"""Hopper kernels without such a GPU: their PTX interpreted."""
