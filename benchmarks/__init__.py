"""The benchmarks: one harness, and suites of cases and contenders that plug into it."""
