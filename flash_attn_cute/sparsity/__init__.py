"""Block masks: which queries see which keys, as expressions and tables, and in which order kernels take them."""
