"""What masks are made of: expressions whose nodes answer for blocks of 128 x 128 scores.

A node never makes a tensor of (seqlen_q, seqlen_k). It says in which range of key blocks a row of blocks can see
anything (``span``), whether given blocks are visible in no, some or all of their elements (``kinds``), which of them
are alike (``alike``), and which elements these are, as bits (``tiles``) or one by one (``elements``). The first three
may know less than there is to know: a wider range, SOME, nothing. ``row_tables.build`` asks for the tiles only of
blocks that are SOME, of those that are alike for one, and classifies them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute import kept
from flash_attn_cute.sparsity import bits, lookups
from flash_attn_cute.sparsity.bits import ALL, SOME, TILE

_ELEMENTS_AT_ONCE = 256  # blocks whose elements exist at a time: 4 MB, and indices
# FlexAttention's: (batch entry, head, query, key) as 0-d integer tensors, to a 0-d bool.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    """How large a mask is; batch and heads are 1 where it is the same for all."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    @property
    def blocks_q(self) -> int:
        """Blocks of queries."""
        return -(-self.seqlen_q // TILE)

    @property
    def blocks_k(self) -> int:
        """Blocks of keys."""
        return -(-self.seqlen_k // TILE)


@dataclass(eq=False, repr=False)
class Blocks:
    """Some blocks of a mask: (n,) int64 each. Positions behind the last query or key are clamped to it.

    ``row`` counts blocks of queries over all batch entries and heads, ``n`` blocks of keys.
    """

    sizes: Sizes
    row: Tensor
    n: Tensor

    def part(self, which: Tensor | slice) -> Blocks:
        """Those at some places."""
        return Blocks(self.sizes, self.row[which], self.n[which])

    def pieces(self, size: int) -> list[Blocks]:
        """All of them, at most so many at a time; one piece if there are none."""
        return [self.part(slice(first, first + size)) for first in range(0, max(len(self.n), 1), size)]

    @functools.cached_property
    def m(self) -> Tensor:
        """The block of queries of each."""
        return self.row if self.sizes.batch * self.sizes.heads == 1 else self.row % self.sizes.blocks_q

    def entries(self, node: Node) -> tuple[Tensor, Tensor]:
        """Batch entries and heads as a node of the same or smaller sizes counts them."""
        zero, of_sizes = torch.zeros_like(self.n), self.sizes
        b = zero if node.batch == 1 else self.row // (of_sizes.heads * of_sizes.blocks_q)
        return b, zero if node.heads == 1 else self.row // of_sizes.blocks_q % of_sizes.heads

    @property
    def distance(self) -> tuple[Tensor, int]:
        """From the queries of each to its keys, in blocks, counted from 0; and what it is below."""
        sizes = self.sizes
        return self.n - self.m + sizes.blocks_q, sizes.blocks_q + sizes.blocks_k

    @property
    def bounds_q(self) -> tuple[Tensor, Tensor]:
        """The first and the last query of each."""
        return _bounds(self.m, self.sizes.seqlen_q)

    @property
    def bounds_k(self) -> tuple[Tensor, Tensor]:
        """The first and the last key of each."""
        return _bounds(self.n, self.sizes.seqlen_k)

    @property
    def queries(self) -> Tensor:
        """(n, 128): the queries of each."""
        return _positions(self.m, self.sizes.seqlen_q)

    @property
    def keys(self) -> Tensor:
        """(n, 128): the keys of each."""
        return _positions(self.n, self.sizes.seqlen_k)


def _bounds(block: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return block * TILE, (block * TILE + TILE - 1).clamp(max=length - 1)


def _positions(block: Tensor, length: int) -> Tensor:
    return (block[:, None] * TILE + torch.arange(TILE, device=block.device)).clamp(max=length - 1)


@dataclass(eq=False, repr=False)
class Node:
    """One part of an expression. Its tensors are those of dataclass fields.

    Attributes:
        is_regular: whether each query sees a few runs of keys, which move on with it.
    """

    is_regular: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Notes what its tensors are; those that PyTorch counts no writes to become copies."""
        self._kept: kept.Store = {}
        self._sources: kept.Sources | None = None  # None in a program that is compiled
        if torch.compiler.is_compiling():
            return
        tensors = self._tensors()
        if any(x.is_inference() for x in tensors.values()):
            copies: dict[int, Tensor] = {}
            for name, x in tensors.items():
                if x.is_inference():
                    setattr(self, name, copies.setdefault(id(x), kept.copied(x)))
        self._sources = kept.Sources(self._named())

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: fields, with tensors of their own size."""
        self.use()
        return {f.name: _own_size(getattr(self, f.name)) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy works all else out anew."""
        self.__dict__.update(state)
        Node.__post_init__(self)

    def _tensors(self) -> dict[str, Tensor]:
        # Not by ``dataclasses.fields``, which takes several times as long as a constructor has.
        return {name: x for name, x in self.__dict__.items() if isinstance(x, Tensor)}

    def _named(self) -> dict[str, list[Tensor]]:
        """Tensors that it is made of, by the names of arguments."""
        return {name: [x] for name, x in self._tensors().items()}

    @property
    def is_real(self) -> bool:
        """Whether its tensors hold numbers that do not depend on what a traced program is given."""
        return self._sources is None or self._sources.are_real

    def use(self, *, checked: bool = True) -> None:
        """Has the current stream read its tensors, see ``kept.Sources``."""
        if self._sources is not None:
            self._sources.use(self._named(), checked=checked)

    def to(self, device: torch.device) -> Node:
        """Moves its tensors to a device, in another node.

        Raises:
            ValueError: they have been written to, or cannot be moved.
        """
        self.use()
        moved: dict[int, Any] = {}
        for x in self._tensors().values():
            moved.setdefault(id(x), x.to(device))
        return replace(self, **{name: moved[id(x)] for name, x in self._tensors().items()})

    @property
    def batch(self) -> int:
        """Batch entries, or 1 if it is the same for all."""
        return 1

    @property
    def heads(self) -> int:
        """Heads, or 1 if it is the same for all."""
        return 1

    @property
    def device(self) -> torch.device | None:
        """Where its tensors are; None if it has none and works anywhere."""
        return None

    @property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        """The queries and the keys that belong to no document, (batch, rows) bool; None if nothing has documents."""
        return None

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first key block that a row of blocks can see, and the one behind the last.

        Each broadcasts to (batch, heads, blocks_q), int64.
        """
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return zero, zero + sizes.blocks_k

    def kinds(self, blocks: Blocks) -> Tensor:
        """NONE, SOME or ALL for each block: (n,), int8."""
        return torch.full_like(blocks.m, SOME, dtype=torch.int8)

    def alike(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """Numbers (n,) int64 from 0 on, and what they are below: blocks of the same number have the same tile.

        Of each number one block is looked at. None: nothing is known before.
        """
        return None

    def tiles(self, blocks: Blocks) -> Tensor:
        """(n, 128, 4), int32: which elements are visible; behind the last query and key it may say anything."""
        return torch.cat([bits.pack(self.elements(piece)) for piece in blocks.pieces(_ELEMENTS_AT_ONCE)])

    def elements(self, blocks: Blocks) -> Tensor:
        """(n, 128, 128), bool: the same one by one."""
        raise NotImplementedError


def _own_size(x: Any) -> Any:
    """A tensor that is a part of a larger one as a copy: pickles of views carry all of it."""
    if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.numel() * x.element_size():
        return x.clone()
    return x


def _kinds(no: Tensor, all_: Tensor) -> Tensor:
    some = ~no  # NONE, SOME and ALL are 0, 1 and 2
    return some.to(torch.int8) + (some & all_)


@dataclass(eq=False, repr=False)
class Band(Node):
    """Query i sees key j when ``lower <= j - i <= upper``; None is unbounded."""

    is_regular: ClassVar[bool] = True

    lower: int | None = None
    upper: int | None = None

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """See ``Node``."""
        m = torch.arange(sizes.blocks_q, device=device)
        start, stop = torch.zeros_like(m), torch.full_like(m, sizes.blocks_k)
        if self.lower is not None:
            start = ((m * TILE + self.lower) // TILE).clamp(min=0)
        if self.upper is not None:
            last = (m * TILE + TILE - 1).clamp(max=sizes.seqlen_q - 1) + self.upper
            stop = (last // TILE + 1).clamp(0, sizes.blocks_k)
        return start, stop

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        (first_q, last_q), (first_k, last_k) = blocks.bounds_q, blocks.bounds_k
        least, most = first_k - last_q, last_k - first_q  # of j - i
        no, all_ = torch.zeros_like(least, dtype=torch.bool), torch.ones_like(least, dtype=torch.bool)
        if self.lower is not None:
            no, all_ = no | (most < self.lower), all_ & (least >= self.lower)
        if self.upper is not None:
            no, all_ = no | (least > self.upper), all_ & (most <= self.upper)
        return _kinds(no, all_)

    def alike(self, blocks: Blocks) -> tuple[Tensor, int]:
        """See ``Node``: blocks as far from the diagonal, and all that are visible as a whole."""
        distance, below = blocks.distance
        first, last, diagonal = 0, below, blocks.sizes.blocks_q
        if self.lower is not None:
            first = max(0, diagonal - (-self.lower - TILE + 1) // TILE)
        if self.upper is not None:
            last = diagonal + (self.upper - TILE + 1) // TILE
        if first <= last:
            distance = distance.masked_fill((distance >= first) & (distance <= last), first)
        return distance, below

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``: each query sees an interval."""
        at = (blocks.m - blocks.n)[:, None] * TILE + torch.arange(TILE, device=blocks.n.device)
        first = torch.zeros_like(at) if self.lower is None else at + self.lower
        return bits.between(first, torch.full_like(at, TILE) if self.upper is None else at + self.upper)


@dataclass(eq=False, repr=False)
class Dilation(Node):
    """Query i sees key j when ``j - i - shift`` is a multiple of ``step``."""

    is_regular: ClassVar[bool] = True

    step: int
    shift: int

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        (first_q, last_q), (first_k, last_k) = blocks.bounds_q, blocks.bounds_k
        least, most = first_k - last_q - self.shift, last_k - first_q - self.shift
        no = most // self.step * self.step < least
        return _kinds(no, torch.full_like(no, self.step == 1))

    def alike(self, blocks: Blocks) -> tuple[Tensor, int]:
        """See ``Node``."""
        return blocks.distance

    def elements(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        at = (blocks.m - blocks.n)[:, None] * TILE + torch.arange(TILE, device=blocks.n.device)
        return (torch.arange(TILE, device=at.device) - at[:, :, None] - self.shift) % self.step == 0


@dataclass(eq=False, repr=False)
class Prefix(Node):
    """All queries see the first ``lengths[b]`` keys: (batch,) int64 on any device."""

    is_regular: ClassVar[bool] = True

    lengths: Tensor | int

    @property
    def batch(self) -> int:
        """Of the lengths."""
        return 1 if isinstance(self.lengths, int) else len(self.lengths)

    @property
    def device(self) -> torch.device | None:
        """Of its tensors."""
        return None if isinstance(self.lengths, int) else self.lengths.device

    def _length_of(self, blocks: Blocks) -> Tensor:
        if isinstance(self.lengths, int):
            return torch.full_like(blocks.m, self.lengths)
        return self.lengths[blocks.entries(self)[0]]

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """See ``Node``."""
        stop = torch.as_tensor(self.lengths, device=device).clamp(0, sizes.seqlen_k)
        stop = (stop + TILE - 1) // TILE
        return torch.zeros((), dtype=torch.int64, device=device), stop[:, None, None] if stop.ndim else stop

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        first_k, last_k = blocks.bounds_k
        length = self._length_of(blocks)
        return _kinds(first_k >= length, last_k < length)

    def alike(self, blocks: Blocks) -> tuple[Tensor, int]:
        """See ``Node``: of a block, all queries see so many keys."""
        return (self._length_of(blocks) - blocks.n * TILE).clamp(0, TILE), TILE + 1

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``: each query sees an interval."""
        last = (self._length_of(blocks) - blocks.n * TILE - 1)[:, None].expand(-1, TILE)
        return bits.between(torch.zeros_like(last), last)


@dataclass(eq=False, repr=False)
class Documents(Node):
    """Query i sees key j when they are of the same document; negative ids are padding, which nobody sees."""

    is_regular: ClassVar[bool] = True

    ids_q: Tensor  # (batch, seqlen_q), int64
    ids_k: Tensor  # (batch, seqlen_k), int64

    @property
    def batch(self) -> int:
        """Of the ids."""
        return self.ids_q.shape[0]

    @property
    def device(self) -> torch.device | None:
        """Of its tensors."""
        return self.ids_q.device

    @property
    def padding(self) -> tuple[Tensor, Tensor]:
        """Rows of negative ids."""
        return self.ids_q < 0, self.ids_k < 0

    @property
    def _ranges(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The least and the largest id of each block of queries and of keys, (batch, blocks) each."""
        return kept.made(self._kept, "ranges", self.ids_q.device, self._find_ranges)

    def _find_ranges(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return _range_of_blocks(self.ids_q), _range_of_blocks(self.ids_k)

    @property
    def _runs(self) -> tuple[Tensor, Tensor]:
        """Of each block of queries and of keys the first one of its run, (batch, blocks) each, int64.

        A run are neighbours that have one document, the same; any other block is one alone.
        """
        return kept.made(self._kept, "runs", self.ids_q.device, self._find_runs)

    def _find_runs(self) -> tuple[Tensor, Tensor]:
        return _first_of_runs(*self._ranges[0]), _first_of_runs(*self._ranges[1])

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """See ``Node``; as narrow as it gets where ids never decrease."""
        (least_q, most_q), (least_k, most_k) = self._ranges
        largest_before = most_k.cummax(-1).values
        least_after = least_k.flip(-1).cummin(-1).values.flip(-1)
        start = torch.searchsorted(largest_before, least_q.clamp(min=0))
        stop = torch.searchsorted(least_after, most_q, right=True)
        return start[:, None], stop[:, None]

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        b, _ = blocks.entries(self)
        (least_q, most_q), (least_k, most_k) = (
            (least[b, block], most[b, block])
            for (least, most), block in zip(self._ranges, (blocks.m, blocks.n), strict=True)
        )
        no = (most_q < least_k) | (most_k < least_q) | (most_q < 0) | (most_k < 0)
        all_ = (least_q == most_q) & (least_k == most_k) & (least_q == least_k)
        return _kinds(no, all_)

    def alike(self, blocks: Blocks) -> tuple[Tensor, int]:
        """See ``Node``: all blocks within a document, and those with the same keys, or queries, of another one."""
        b, _ = blocks.entries(self)
        blocks_q, blocks_k = blocks.sizes.blocks_q, blocks.sizes.blocks_k
        m, n = (first[b, block] for first, block in zip(self._runs, (blocks.m, blocks.n), strict=True))
        number = (b * blocks_q + m) * blocks_k + n + 1
        return number.masked_fill(self.kinds(blocks) == ALL, 0), self.batch * blocks_q * blocks_k + 1

    def elements(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        b, _ = blocks.entries(self)
        of_q, of_k = self.ids_q[b[:, None], blocks.queries], self.ids_k[b[:, None], blocks.keys]
        return (of_q[:, :, None] == of_k[:, None, :]) & (of_q >= 0)[:, :, None]


def _range_of_blocks(ids: Tensor) -> tuple[Tensor, Tensor]:
    length = ids.shape[1]
    # The last block is filled up with its last id, which changes neither end of its range.
    filled = ids[:, torch.arange(-(-length // TILE) * TILE, device=ids.device).clamp(max=max(length, 1) - 1)]
    by_block = filled.unflatten(1, (-1, TILE)) if length else filled.new_empty(len(ids), 0, TILE)
    return by_block.amin(-1), by_block.amax(-1)


def _first_of_runs(least: Tensor, most: Tensor) -> Tensor:
    goes_on = (least == most)[:, 1:] & (least.diff(dim=1) == 0) & (most.diff(dim=1) == 0)
    places = torch.arange(least.shape[1], device=least.device)
    return places.masked_fill(torch.nn.functional.pad(goes_on, (1, 0)), 0).cummax(1).values


@dataclass(eq=False, repr=False)
class BlockMap(Node):
    """Blocks of any size, each visible as a whole or not: (batch, heads, blocks_q, blocks_k), bool."""

    visible: Tensor
    block_q: int
    block_k: int

    @property
    def batch(self) -> int:
        """Of the map."""
        return self.visible.shape[0]

    @property
    def heads(self) -> int:
        """Of the map."""
        return self.visible.shape[1]

    @property
    def device(self) -> torch.device | None:
        """Of its tensors."""
        return self.visible.device

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``: of the blocks of the map that a block of ours lies in."""
        b, h = blocks.entries(self)
        (first_m, last_m), (first_n, last_n) = (
            (first // size, last // size)
            for (first, last), size in ((blocks.bounds_q, self.block_q), (blocks.bounds_k, self.block_k))
        )
        no, all_ = torch.ones_like(b, dtype=torch.bool), torch.ones_like(b, dtype=torch.bool)
        for i in range(_most_met(self.block_q)):
            m = (first_m + i).clamp(max=last_m)  # the last one again does no harm
            for j in range(_most_met(self.block_k)):
                met = self.visible[b, h, m, (first_n + j).clamp(max=last_n)]
                no, all_ = no & ~met, all_ & met
        return _kinds(no, all_)

    def alike(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """See ``Node``: of sizes that are multiples of 64, which quarters of a block are visible."""
        if self.block_q % bits.HALF or self.block_k % bits.HALF:
            return None
        quarters = self._quarters(blocks)
        return (quarters.flatten(1) << torch.arange(4, device=quarters.device)).sum(1), 16

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``; of sizes that are multiples of 64 by quarters of a block."""
        if self.block_q % bits.HALF or self.block_k % bits.HALF:
            return super().tiles(blocks)
        quarters = self._quarters(blocks)
        words = -quarters.int()
        return words.repeat_interleave(bits.HALF, 1).repeat_interleave(bits.WORDS // 2, 2)

    def elements(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self._at(blocks, blocks.queries, blocks.keys)

    def _quarters(self, blocks: Blocks) -> Tensor:
        """(n, 2, 2), bool: which halves of the queries and keys see each other."""
        return self._at(blocks, blocks.queries[:, :: bits.HALF], blocks.keys[:, :: bits.HALF])

    def _at(self, blocks: Blocks, queries: Tensor, keys: Tensor) -> Tensor:
        b, h = (x[:, None, None] for x in blocks.entries(self))
        return self.visible[b, h, (queries // self.block_q)[:, :, None], (keys // self.block_k)[:, None, :]]


def _most_met(size: int) -> int:
    """How many blocks of a size a block of 128, which starts at a multiple of that, can lie in."""
    return max(1, TILE // size) if TILE % size == 0 or size % TILE == 0 else (TILE - 2) // size + 2


@dataclass(eq=False, repr=False)
class Dense(Node):
    """A mask that exists element by element: (batch, heads, seqlen_q, seqlen_k), bool, of any strides."""

    mask: Tensor

    @property
    def batch(self) -> int:
        """Of the mask."""
        return self.mask.shape[0]

    @property
    def heads(self) -> int:
        """Of the mask."""
        return self.mask.shape[1]

    @property
    def device(self) -> torch.device | None:
        """Of its tensors."""
        return self.mask.device

    def elements(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        b, h = (x[:, None, None] for x in blocks.entries(self))
        q = blocks.queries if self.mask.shape[2] > 1 else torch.zeros_like(blocks.queries)
        k = blocks.keys if self.mask.shape[3] > 1 else torch.zeros_like(blocks.keys)
        return self.mask[b, h, q[:, :, None], k[:, None, :]]


@dataclass(eq=False, repr=False)
class Function(Node):
    """A ``mask_mod`` as FlexAttention has them, evaluated by vmap over the elements of given blocks."""

    mask_mod: MaskMod
    sets: tuple[int, int]  # batch entries and heads
    on: Tensor  # an empty one, which moves where pickles are loaded to

    def _named(self) -> dict[str, list[Tensor]]:
        return {"mask_mod": list(lookups.tensors_of(self.mask_mod))}

    def to(self, device: torch.device) -> Node:
        """See ``Node``.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"device: expected {self.device}, as a mask_mod may look tensors up there, which cannot be moved, "
            f"got {device}: make it anew by from_function(..., device=...)"
        )

    @property
    def batch(self) -> int:
        """As given."""
        return self.sets[0]

    @property
    def heads(self) -> int:
        """As given."""
        return self.sets[1]

    @property
    def device(self) -> torch.device:
        """As given."""
        return self.on.device

    def elements(self, blocks: Blocks) -> Tensor:
        """See ``Node``. One vmap a dimension, as functions may reduce what they look up."""
        run = torch.vmap(self.mask_mod, in_dims=(None, None, None, 0))
        run = torch.vmap(run, in_dims=(None, None, 0, None))
        seen = torch.vmap(run)(*blocks.entries(self), blocks.queries, blocks.keys)
        if seen.dtype != torch.bool:
            raise TypeError(f"mask_mod: expected a function that gives a bool, got {seen.dtype}")
        return seen


@dataclass(eq=False, repr=False)
class Pair(Node):
    """Two expressions as one; each may be the same for all batch entries or heads of the other."""

    a: Node
    b: Node

    @property
    def is_real(self) -> bool:
        """Of both."""
        return self.a.is_real and self.b.is_real

    def use(self, *, checked: bool = True) -> None:
        """See ``Node``."""
        self.a.use(checked=checked)
        self.b.use(checked=checked)

    def to(self, device: torch.device) -> Node:
        """See ``Node``."""
        return type(self)(self.a.to(device), self.b.to(device))

    @property
    def is_regular(self) -> bool:  # type: ignore[override]
        """Of both."""
        return self.a.is_regular and self.b.is_regular

    @property
    def batch(self) -> int:
        """Of the one that differs."""
        return self.b.batch if self.a.batch == 1 else self.a.batch

    @property
    def heads(self) -> int:
        """Of the one that differs."""
        return self.b.heads if self.a.heads == 1 else self.a.heads

    @property
    def device(self) -> torch.device | None:
        """Of its tensors."""
        return self.a.device if self.b.device is None else self.b.device

    @property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        """Rows that are padding to either; ``row_tables.real_rows`` leaves out those that the expression shows."""
        a, b = self.a.padding, self.b.padding
        if a is None or b is None:
            return b if a is None else a
        return a[0] | b[0], a[1] | b[1]

    def alike(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """See ``Node``: blocks that are alike for both."""
        a, b = self.a.alike(blocks), self.b.alike(blocks)
        if a is None or b is None or a[1] * b[1] >= 1 << 61:
            return None
        return a[0] * b[1] + b[0], a[1] * b[1]


class And(Pair):
    """What both show."""

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """See ``Node``."""
        (start_a, stop_a), (start_b, stop_b) = self.a.span(sizes, device), self.b.span(sizes, device)
        return torch.maximum(start_a, start_b), torch.minimum(stop_a, stop_b)

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return torch.minimum(self.a.kinds(blocks), self.b.kinds(blocks))

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self.a.tiles(blocks) & self.b.tiles(blocks)


class Or(Pair):
    """What either shows."""

    def span(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """See ``Node``."""
        (start_a, stop_a), (start_b, stop_b) = self.a.span(sizes, device), self.b.span(sizes, device)
        return torch.minimum(start_a, start_b), torch.maximum(stop_a, stop_b)

    def kinds(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return torch.maximum(self.a.kinds(blocks), self.b.kinds(blocks))

    def tiles(self, blocks: Blocks) -> Tensor:
        """See ``Node``."""
        return self.a.tiles(blocks) | self.b.tiles(blocks)
