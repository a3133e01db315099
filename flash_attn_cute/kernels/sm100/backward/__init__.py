"""The backward pass on Blackwell: ``launch`` is what is compiled, and chooses the main kernel of a configuration."""
