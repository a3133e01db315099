"""What ranks run in ``tests/test_context_parallel.py``: each of them every function of a list, in a group of all."""
