"""Tests of flash_attn_cute. ``pytest`` with no arguments runs what the machine can."""
