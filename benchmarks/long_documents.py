"""Lengths of documents as in a public corpus for training on long contexts.

Shares of lengths, and how documents are packed, are those of MagiAttention's benchmark of context parallelism, whose
published rates are on such packs. Source, below ``exps/dist_attn/benchmark`` of github.com/SandAI-org/MagiAttention at
2c64135: ``datasets/default/doc_length_distribution.csv`` and ``utils.py``.
"""

import random
from itertools import pairwise

# Of all documents, the percentage whose lengths are above one edge and at most the next one.
_EDGES = (0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608)
_PERCENTAGES = (0.22, 2.91, 5.20, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14)
# Documents are cut to this part of a pack, so that no pack is a single document.
_LONGEST = 4
# Tokens that are drawn for each token of a pack, so that pieces of one document seldom meet.
_DRAWN = 16


def pack(tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths of the documents of a pack of so many tokens; the last one is cut off."""
    draw, longest = random.Random(seed), max(1, tokens // _LONGEST)
    ranges, pieces, drawn = list(pairwise(_EDGES)), [], 0
    while drawn < _DRAWN * tokens:
        above, most = draw.choices(ranges, _PERCENTAGES)[0]
        length = draw.randint(above + 1, most)
        whole, rest = divmod(length, longest)
        pieces += [longest] * whole + [rest] * (rest > 0)
        drawn += length
    draw.shuffle(pieces)
    packed: list[int] = []
    while tokens:
        packed.append(min(pieces.pop(), tokens))
        tokens -= packed[-1]
    return tuple(packed)
