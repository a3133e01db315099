"""Functions that ranks run in ``test_context_parallel``: each of them every function of a list, in a group of all."""
