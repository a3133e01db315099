"""The backward pass on Hopper: ``launch`` is what is compiled, and chooses the main kernel of a configuration."""
