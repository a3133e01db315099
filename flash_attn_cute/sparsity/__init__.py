"""Block masks: which queries see which keys, as expressions and as tables of blocks."""
