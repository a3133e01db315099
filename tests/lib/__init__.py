"""Helpers that tests share: the oracle, checks, random calls, masks, ranks, and an interpreter of PTX."""
