"""Tiles of bits: which elements of a block of 128 x 128 scores are visible, one bit each.

A tile is (128, 4) int32, row-major: a row is a query, and bit i of its word w is key 32 * w + i of the block. Blocks
that look alike share a tile, so that causal masks, windows and documents need few of them, whatever their length. How
the bits are to lie for the registers of an architecture is for its kernels to say; here they lie as they are counted.
"""

import torch
from torch import Tensor

TILE = 128  # queries and keys of a block
WORDS = TILE // 32
HALF = TILE // 2  # queries of a block of the backward pass, where it is not 128
FULL = -1  # in the place of a tile's number: a block all of whose elements are visible

# What is known of a block. ``&`` is the minimum and ``|`` the maximum: SOME means not known to be NONE or ALL.
NONE, SOME, ALL = 0, 1, 2


def pack(elements: Tensor) -> Tensor:
    """Tiles of blocks given element by element.

    Args:
        elements: (..., 128 queries, 128 keys), bool.

    Returns:
        (..., 128, 4), int32.
    """
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=elements.device)
    eights = elements.contiguous().view(torch.uint8).unflatten(-1, (TILE // 8, 8))
    return (eights * weights).sum(-1, dtype=torch.uint8).view(torch.int32)


def unpack(tiles: Tensor) -> Tensor:
    """The elements of tiles, or of some of their rows: (..., 4) int32 gives (..., 128) bool."""
    places = torch.arange(32, dtype=torch.int32, device=tiles.device)
    return (tiles[..., None] >> places).bitwise_and_(1).bool().flatten(-2)


def seen_by_any(tiles: Tensor) -> Tensor:
    """Which keys of tiles any query sees: (n, 128, 4) int32 gives (n, 128) bool."""
    while tiles.shape[1] > 1:
        tiles = tiles[:, ::2] | tiles[:, 1::2]
    return unpack(tiles[:, 0])


def between(first: Tensor, last: Tensor) -> Tensor:
    """Tiles of which each query sees the keys first .. last, none if those are none.

    Args:
        first: (n, 128), int64: counted from the first key of the block, of which it may be on either side.
        last: (n, 128), int64: likewise.

    Returns:
        (n, 128, 4), int32.
    """
    word = 32 * torch.arange(WORDS, device=first.device)
    start, stop = ((x[:, :, None] - word).clamp_(0, 32) for x in (first, last + 1))
    one = torch.ones_like(start)
    return ((one << stop.maximum(start)) - (one << start)).int()


def cut(tiles: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Tiles (n, 128, 4) of blocks of which only so many queries and keys exist, (n,) each; 128 and more are all."""
    device = tiles.device
    left = keys[:, None] - 32 * torch.arange(WORDS, device=device)
    exist = ((1 << left.clamp(0, 31)) - 1).masked_fill(left >= 32, -1).int()
    is_real = torch.arange(TILE, device=device) < queries[:, None]
    return (tiles & exist[:, None]) * is_real[:, :, None]


def kinds(tiles: Tensor) -> Tensor:
    """NONE, SOME or ALL of (tiles, rows, 4): (tiles,), int8."""
    words = tiles.flatten(1)
    return (words != 0).any(1).to(torch.int8) + (words == -1).all(1)


def distinct(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Each tile once, in the order in which they first come.

    They are told apart by a hash of 64 bits. That this has merged none that differ is checked afterwards, and if it
    ever has, they are compared in full.

    Args:
        tiles: (n, 128, 4), int32.

    Returns:
        (distinct, 128, 4), and of each of the n its number among them, (n,) int64.
    """
    words = tiles.flatten(1)
    if not len(words):
        return tiles, torch.zeros(0, dtype=torch.int64, device=tiles.device)
    first, number = by_first((words * _factors(words.shape[1], words.device)).sum(1).unique(return_inverse=True))
    if not torch.equal(words[first[number]], words):
        first, number = by_first(words.unique(dim=0, return_inverse=True))
    return tiles[first], number


def _factors(count: int, device: torch.device) -> Tensor:
    """As good as random, (count,) int64: the numbers of SplitMix64 (Steele et al., 2014), but for its last step."""
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    return (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15


def by_first(unique: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Where each of some values comes first, and numbers for them counted in that order."""
    values, number = unique
    places = torch.arange(len(number), device=number.device)
    first, by_place = places.new_full((len(values),), len(number)).scatter_reduce_(0, number, places, "amin").sort()
    renumbered = torch.empty_like(by_place).index_copy_(0, by_place, places[: len(values)])
    return first, renumbered[number]
