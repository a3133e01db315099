"""Blackwell kernels without such a GPU: their PTX interpreted, their model, and their emulation."""
