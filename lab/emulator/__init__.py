"""Runs kernels that are compiled for Blackwell on a Hopper GPU: ``docs/sm100-on-hopper.md``."""
