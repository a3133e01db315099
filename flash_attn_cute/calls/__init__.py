"""Calls: checked, rewritten, given to a backend, shown to autograd and compilers."""
