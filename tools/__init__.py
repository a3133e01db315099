"""Profiling: ``python -m tools.nsys`` for a timeline, ``python -m tools.ncu`` for what holds one kernel up."""
