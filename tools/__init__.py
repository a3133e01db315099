"""Small commands for contributors: words of the project, and the hook of its site."""
