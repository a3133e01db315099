"""The backend's passes with the interpreter of PTX in the place of a Blackwell or Hopper GPU."""
