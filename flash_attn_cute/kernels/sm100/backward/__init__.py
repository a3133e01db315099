"""The backward pass on Blackwell: ``launch`` is what is compiled, ``cta`` or ``two_pass`` its main kernel."""
