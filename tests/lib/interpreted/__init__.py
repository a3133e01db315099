"""The backend's passes with the interpreter of PTX in the place of a Blackwell GPU."""
