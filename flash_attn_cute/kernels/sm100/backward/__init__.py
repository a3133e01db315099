"""The backward pass on Blackwell, up to d = 128: ``launch`` is what is compiled, ``cta`` its main kernel."""
