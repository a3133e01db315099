"""One module a suite: its cases, its contenders and the bars it must clear."""
