"""Attention kernels in the CuTe DSL, by architecture, and the parts they share."""
