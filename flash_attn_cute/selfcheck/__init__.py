"""The check that a GPU's kernels compute what they should, made on that GPU, once: docs/selfcheck.md."""
