"""State of the process: environment variables, command lines, NVTX, forks, and what is kept between calls."""
