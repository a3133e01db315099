"""Tiles of bits: which scores of a partial block are visible, one bit for each of 128 x 128.

A tile is (128, 4) int32, row-major: a row is a query, and bit i of its word w is key 32 * w + i of the block. Equal
blocks share a tile, so causal masks, windows and documents need few of them at any length. Kernels bring the bits into
the order of their architecture's registers.
"""

import torch
from torch import Tensor

TILE = 128  # queries and keys of a block
WORDS = TILE // 32
HALF = TILE // 2  # queries of a block in backward passes whose blocks have 64

# Kinds of blocks. Those of ``a & b`` are the minimum of both, those of ``a | b`` the maximum, where PARTIAL means that
# neither EMPTY nor FULL is certain.
EMPTY, PARTIAL, FULL = 0, 1, 2


def pack(elements: Tensor) -> Tensor:
    """Packs elements of blocks (..., 128 queries, 128 keys), bool, into tiles (..., 128, 4), int32."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=elements.device)
    eights = elements.contiguous().view(torch.uint8).unflatten(-1, (TILE // 8, 8))
    return (eights * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack(tiles: Tensor) -> Tensor:
    """Unpacks tiles, or some of their rows: (..., 4) int32 gives (..., 128) bool."""
    places = torch.arange(32, dtype=torch.int32, device=tiles.device)
    return (tiles[..., None] >> places).bitwise_and_(1).bool().flatten(-2)


def visible_keys(tiles: Tensor) -> Tensor:
    """Keys of tiles that at least one query attends to: (n, 128, 4) int32 gives (n, 128) bool."""
    while tiles.shape[1] > 1:
        tiles = tiles[:, ::2] | tiles[:, 1::2]
    return unpack(tiles[:, 0])


def between(first: Tensor, last: Tensor) -> Tensor:
    """Tiles (n, 128, 4), int32, in which each query attends to the keys first .. last, or to none if last < first.

    Both are (n, 128), int64, and counted from the first key of the block; below 0 and above 127 are fine.
    """
    word = 32 * torch.arange(WORDS, device=first.device)
    start, stop = ((x[:, :, None] - word).clamp_(0, 32) for x in (first, last + 1))
    one = torch.ones_like(start)
    return ((one << stop.maximum(start)) - (one << start)).int()


def cut(tiles: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Tiles (n, 128, 4), int32, without their bits beyond the last query and key.

    ``queries`` and ``keys``, (n,), are how many of each block exist; 128 or more for all.
    """
    device = tiles.device
    left = keys[:, None] - 32 * torch.arange(WORDS, device=device)
    exist = ((1 << left.clamp(0, 31)) - 1).masked_fill(left >= 32, -1).int()
    is_real = torch.arange(TILE, device=device) < queries[:, None]
    return (tiles & exist[:, None]) * is_real[:, :, None]


def kinds(tiles: Tensor) -> Tensor:
    """Kinds of tiles (n, rows, 4): EMPTY, PARTIAL or FULL, (n,) int8."""
    words = tiles.flatten(1)
    return (words != 0).any(1).to(torch.int8) + (words == -1).all(1)


def distinct(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the distinct tiles (n, 128, 4), int32, in the order of their first appearance.

    Tiles are compared by a hash of 64 bits. Afterwards the words are compared as well; if the hash has merged different
    tiles, all are sorted in full. Returns them, and the index of each of the n tiles among them, (n,) int64.
    """
    words = tiles.flatten(1)
    if not len(words):
        return tiles, torch.zeros(0, dtype=torch.int64, device=tiles.device)
    first, index = by_first((words * _factors(words.shape[1], words.device)).sum(1).unique(return_inverse=True))
    if not torch.equal(words[first[index]], words):
        first, index = by_first(words.unique(dim=0, return_inverse=True))
    return tiles[first], index


def _factors(count: int, device: torch.device) -> Tensor:
    """Pseudo-random numbers, (count,) int64, by SplitMix64 (Steele et al., 2014) without its last step."""
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15


def by_first(unique: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Renumbers by first appearance: distinct values, and the index of each element's, as ``torch.unique`` gives them.

    Returns the place of each value's first appearance, ascending, and the index of each element's value in that order.
    """
    values, index = unique
    places = torch.arange(len(index), device=index.device)
    first, by_place = places.new_full((len(values),), len(index)).scatter_reduce_(0, index, places, "amin").sort()
    renumbered = torch.empty_like(by_place).index_copy_(0, by_place, places[: len(values)])
    return first, renumbered[index]
