"""Expressions of masks: nodes that answer for blocks of 128 x 128 scores.

No node makes a tensor of (seqlen_q, seqlen_k). A node answers five questions:

- ``block_range``: in which range of key blocks may a query block have visible scores?
- ``kinds``: is each of some blocks EMPTY, PARTIAL or FULL?
- ``patterns``: which of these blocks have equal tiles?
- ``tiles``: which scores of these blocks are visible, as bits?
- ``elements``: the same as bools.

The first three answers may know less than there is to know: a wider range, PARTIAL, None. ``row_tables.build`` asks for
tiles of PARTIAL blocks only, once for each pattern, and classifies the blocks again by their tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flash_attn_cute.runtime import kept
from flash_attn_cute.sparsity import bits, lookups
from flash_attn_cute.sparsity.bits import PARTIAL, TILE
from flash_attn_cute.sparsity.score_blocks import Blocks, Sizes

_BLOCKS_AT_ONCE = 256  # whose elements exist at a time: 4 MB, and indices
# FlexAttention's: (batch entry, head, query, key) as 0-d integer tensors, to a 0-d bool.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(eq=False, repr=False)
class Node:
    """One part of an expression. Fields of the dataclass hold its tensors.

    Attributes:
        is_regular: whether each query attends to a few runs of keys that move on with it. Tiles of such masks wait
            little for their turns in the default launch order.
    """

    is_regular: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Records the versions of its tensors, which ``kept.lasting`` has made such that have one."""
        self._kept: kept.Store = {}
        self._sources: kept.Sources | None = None  # None in a program that is compiled
        if torch.compiler.is_compiling():
            return
        lasting: dict[int, Tensor] = {}
        for name, x in self._tensors().items():
            setattr(self, name, lasting.setdefault(id(x), kept.lasting(x)))
        self._sources = kept.Sources(self._named())

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: the fields, with views of larger tensors as copies."""
        self.use()
        return {f.name: _own_size(getattr(self, f.name)) for f in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the fields; everything else is worked out anew."""
        self.__dict__.update(state)
        Node.__post_init__(self)

    def _tensors(self) -> dict[str, Tensor]:
        # Not by ``dataclasses.fields``, which takes longer than a constructor has; nor by ``__dict__``, which
        # torch.compile of PyTorch 2.11 does not read.
        return {name: x for name in self.__dataclass_fields__ if isinstance(x := getattr(self, name), Tensor)}

    def _named(self) -> dict[str, list[Tensor]]:
        """Tensors that the node is made of, by the argument that brought them."""
        return {name: [x] for name, x in self._tensors().items()}

    @property
    def is_real(self) -> bool:
        """Whether its tensors hold numbers, rather than being inputs of a program that is traced."""
        return self._sources is None or self._sources.are_real

    def use(self, *, checked: bool = True) -> None:
        """Prepares its tensors for the current stream, see ``kept.Sources.use``; ValueError if one was written to."""
        if self._sources is not None:
            self._sources.use(self._named(), checked=checked)

    def to(self, device: torch.device) -> Node:
        """Makes a node of copies of its tensors on a device; ValueError if they were written to, or cannot move."""
        self.use()
        moved: dict[int, Any] = {}
        for x in self._tensors().values():
            moved.setdefault(id(x), x.to(device))
        return replace(self, **{name: moved[id(x)] for name, x in self._tensors().items()})

    @property
    def batch(self) -> int:
        """Number of batch entries, or 1 if all have the same mask."""
        return 1

    @property
    def heads(self) -> int:
        """Number of heads, or 1 if all have the same mask."""
        return 1

    @property
    def device(self) -> torch.device | None:
        """Device of its tensors; None if it has none and works anywhere."""
        return None

    @property
    def half_blocks(self) -> bool:
        """Whether it is made of blocks of 64 queries or keys, so that many quarters of blocks are empty."""
        return False

    @property
    def half_columns(self) -> bool:
        """Whether it is made of blocks of 64 keys, so that each half of a block's keys has queries of its own.

        False where it is known without the device that so many are visible that blocks of 128 are faster.
        """
        return False

    def most_halves(self, sizes: Sizes) -> int:
        """Number of visible blocks of 64 x 64 of a head at the most, as far as it is known without the device."""
        return -(-sizes.seqlen_q // bits.HALF) * -(-sizes.seqlen_k // bits.HALF)

    @property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        """Queries and keys of no document, (batch, rows) bool each; None if the mask has no documents."""
        return None

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        """Range of key blocks in which each query block may have visible scores.

        Returns the first key block and the one after the last, each broadcasting to (batch, heads, blocks_q), int64.
        """
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return zero, zero + sizes.blocks_k

    def kinds(self, blocks: Blocks) -> Tensor:
        """Kind of each block, EMPTY, PARTIAL or FULL: (n,), int8. PARTIAL also stands for unknown."""
        return torch.full_like(blocks.m, PARTIAL, dtype=torch.int8)

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """Pattern of each block: blocks of one pattern have equal tiles, of which one is made.

        Returns patterns (n,), int64, from 0 on, and an upper bound of them; None if they are unknown.
        """
        return None

    def tiles(self, blocks: Blocks) -> Tensor:
        """Tiles of blocks: (n, 128, 4), int32. Bits beyond the last query or key may be anything."""
        return torch.cat([bits.pack(self.elements(chunk)) for chunk in blocks.chunks(_BLOCKS_AT_ONCE)])

    def elements(self, blocks: Blocks) -> Tensor:
        """Visible scores of blocks: (n, 128 queries, 128 keys), bool."""
        raise NotImplementedError


def _own_size(x: Any) -> Any:
    """A copy of a tensor that is a view of a larger one, whose pickle would carry all of that; else x itself."""
    if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.numel() * x.element_size():
        return x.clone()
    return x


def kinds_of(is_empty: Tensor, is_full: Tensor) -> Tensor:
    """Kinds (n,) int8 of blocks by two flags (n,); an empty one is EMPTY even if it is flagged as full."""
    is_visible = ~is_empty  # EMPTY, PARTIAL and FULL are 0, 1 and 2
    return is_visible.to(torch.int8) + (is_visible & is_full)


@dataclass(eq=False, repr=False)
class Band(Node):
    """Query i attends to key j where ``lower <= j - i <= upper``; None is unbounded."""

    is_regular: ClassVar[bool] = True

    lower: int | None = None
    upper: int | None = None

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        m = torch.arange(sizes.blocks_q, device=device)
        start, stop = torch.zeros_like(m), torch.full_like(m, sizes.blocks_k)
        if self.lower is not None:
            start = ((m * TILE + self.lower) // TILE).clamp(min=0)
        if self.upper is not None:
            last = (m * TILE + TILE - 1).clamp(max=sizes.seqlen_q - 1) + self.upper
            stop = (last // TILE + 1).clamp(0, sizes.blocks_k)
        return start, stop

    def kinds(self, blocks: Blocks) -> Tensor:
        (first_q, last_q), (first_k, last_k) = blocks.bounds_q, blocks.bounds_k
        least, most = first_k - last_q, last_k - first_q  # of j - i
        is_empty, is_full = torch.zeros_like(least, dtype=torch.bool), torch.ones_like(least, dtype=torch.bool)
        if self.lower is not None:
            is_empty, is_full = is_empty | (most < self.lower), is_full & (least >= self.lower)
        if self.upper is not None:
            is_empty, is_full = is_empty | (least > self.upper), is_full & (most <= self.upper)
        return kinds_of(is_empty, is_full)

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int]:
        """A pattern for each diagonal of blocks, and one for all full blocks."""
        diagonal, bound = blocks.diagonals
        first, last, main = 0, bound, blocks.sizes.blocks_q
        if self.lower is not None:
            first = max(0, main - (-self.lower - TILE + 1) // TILE)
        if self.upper is not None:
            last = main + (self.upper - TILE + 1) // TILE
        if first <= last:
            diagonal = diagonal.masked_fill((diagonal >= first) & (diagonal <= last), first)
        return diagonal, bound

    def tiles(self, blocks: Blocks) -> Tensor:
        """Each query attends to an interval."""
        at = (blocks.m - blocks.n)[:, None] * TILE + torch.arange(TILE, device=blocks.n.device)
        first = torch.zeros_like(at) if self.lower is None else at + self.lower
        return bits.between(first, torch.full_like(at, TILE) if self.upper is None else at + self.upper)


@dataclass(eq=False, repr=False)
class Dilation(Node):
    """Query i attends to key j where ``j - i - shift`` is a multiple of ``step``."""

    is_regular: ClassVar[bool] = True

    step: int
    shift: int

    def kinds(self, blocks: Blocks) -> Tensor:
        (first_q, last_q), (first_k, last_k) = blocks.bounds_q, blocks.bounds_k
        least, most = first_k - last_q - self.shift, last_k - first_q - self.shift
        is_empty = most // self.step * self.step < least
        return kinds_of(is_empty, torch.full_like(is_empty, self.step == 1))

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int]:
        return blocks.diagonals

    def elements(self, blocks: Blocks) -> Tensor:
        at = (blocks.m - blocks.n)[:, None] * TILE + torch.arange(TILE, device=blocks.n.device)
        return (torch.arange(TILE, device=at.device) - at[:, :, None] - self.shift) % self.step == 0


@dataclass(eq=False, repr=False)
class Prefix(Node):
    """All queries attend to the first ``lengths[b]`` keys: (batch,) int64 on any device."""

    is_regular: ClassVar[bool] = True

    lengths: Tensor | int

    @property
    def batch(self) -> int:
        return 1 if isinstance(self.lengths, int) else len(self.lengths)

    @property
    def device(self) -> torch.device | None:
        return None if isinstance(self.lengths, int) else self.lengths.device

    def _length_of(self, blocks: Blocks) -> Tensor:
        if isinstance(self.lengths, int):
            return torch.full_like(blocks.m, self.lengths)
        return self.lengths[blocks.entry_and_head(self)[0]]

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        stop = torch.as_tensor(self.lengths, device=device).clamp(0, sizes.seqlen_k)
        stop = (stop + TILE - 1) // TILE
        return torch.zeros((), dtype=torch.int64, device=device), stop[:, None, None] if stop.ndim else stop

    def kinds(self, blocks: Blocks) -> Tensor:
        first_k, last_k = blocks.bounds_k
        length = self._length_of(blocks)
        return kinds_of(first_k >= length, last_k < length)

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int]:
        """A pattern for each number of visible keys."""
        return (self._length_of(blocks) - blocks.n * TILE).clamp(0, TILE), TILE + 1

    def tiles(self, blocks: Blocks) -> Tensor:
        last = (self._length_of(blocks) - blocks.n * TILE - 1)[:, None].expand(-1, TILE)
        return bits.between(torch.zeros_like(last), last)


class PerHead(Node):
    """A mask that one tensor says, of batch entries and heads."""

    @property
    def per_head(self) -> Tensor:
        """The tensor, (batch, heads, ...), either of which may be 1."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        return self.per_head.shape[0]

    @property
    def heads(self) -> int:
        return self.per_head.shape[1]

    @property
    def device(self) -> torch.device:
        return self.per_head.device


@dataclass(eq=False, repr=False)
class BlockMap(PerHead):
    """A map of blocks of any size: visible (batch, heads, blocks_q, blocks_k), bool."""

    visible: Tensor
    block_q: int
    block_k: int

    @property
    def per_head(self) -> Tensor:
        return self.visible

    @property
    def half_blocks(self) -> bool:
        sizes = self.block_q, self.block_k
        return any(size % TILE for size in sizes) and not any(size % bits.HALF for size in sizes)

    @property
    def half_columns(self) -> bool:
        return self.half_blocks and self.block_k % TILE > 0

    def kinds(self, blocks: Blocks) -> Tensor:
        """Classifies a block of 128 x 128 by the blocks of the map that it meets."""
        b, h = blocks.entry_and_head(self)
        (first_m, last_m), (first_n, last_n) = (
            (first // size, last // size)
            for (first, last), size in ((blocks.bounds_q, self.block_q), (blocks.bounds_k, self.block_k))
        )
        is_empty, is_full = torch.ones_like(b, dtype=torch.bool), torch.ones_like(b, dtype=torch.bool)
        for i in range(_most_met(self.block_q)):
            m = (first_m + i).clamp(max=last_m)  # to look at the last one again does no harm
            for j in range(_most_met(self.block_k)):
                met = self.visible[b, h, m, (first_n + j).clamp(max=last_n)]
                is_empty, is_full = is_empty & ~met, is_full & met
        return kinds_of(is_empty, is_full)

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """A pattern for each set of visible quarters, if sizes are multiples of 64."""
        if self.block_q % bits.HALF or self.block_k % bits.HALF:
            return None
        quarters = self._quarters(blocks)
        return (quarters.flatten(1) << torch.arange(4, device=quarters.device)).sum(1), 16

    def tiles(self, blocks: Blocks) -> Tensor:
        """Makes tiles of quarters, if sizes are multiples of 64."""
        if self.block_q % bits.HALF or self.block_k % bits.HALF:
            return super().tiles(blocks)
        quarters = self._quarters(blocks)
        words = -quarters.int()
        return words.repeat_interleave(bits.HALF, 1).repeat_interleave(bits.WORDS // 2, 2)

    def elements(self, blocks: Blocks) -> Tensor:
        return self._at(blocks, blocks.queries, blocks.keys)

    def _quarters(self, blocks: Blocks) -> Tensor:
        """Visible quarters of each block: (n, 2 halves of queries, 2 halves of keys), bool."""
        return self._at(blocks, blocks.queries[:, :: bits.HALF], blocks.keys[:, :: bits.HALF])

    def _at(self, blocks: Blocks, queries: Tensor, keys: Tensor) -> Tensor:
        b, h = (x[:, None, None] for x in blocks.entry_and_head(self))
        return self.visible[b, h, (queries // self.block_q)[:, :, None], (keys // self.block_k)[:, None, :]]


def _most_met(size: int) -> int:
    """How many blocks of a size a block of 128 can meet that starts at a multiple of 128."""
    return max(1, TILE // size) if TILE % size == 0 or size % TILE == 0 else (TILE - 2) // size + 2


@dataclass(eq=False, repr=False)
class Dense(PerHead):
    """A mask given element by element: (batch, heads, seqlen_q, seqlen_k), bool, of any strides."""

    mask: Tensor

    @property
    def per_head(self) -> Tensor:
        return self.mask

    def elements(self, blocks: Blocks) -> Tensor:
        b, h = (x[:, None, None] for x in blocks.entry_and_head(self))
        q = blocks.queries if self.mask.shape[2] > 1 else torch.zeros_like(blocks.queries)
        k = blocks.keys if self.mask.shape[3] > 1 else torch.zeros_like(blocks.keys)
        return self.mask[b, h, q[:, :, None], k[:, None, :]]


@dataclass(eq=False, repr=False)
class Function(Node):
    """A ``mask_mod`` in FlexAttention's form, evaluated by vmap over the elements of blocks."""

    mask_mod: MaskMod
    sets: tuple[int, int]  # batch entries and heads
    on: Tensor  # empty; it moves to the device that pickles are loaded to

    def _named(self) -> dict[str, list[Tensor]]:
        return {"mask_mod": list(lookups.tensors_of(self.mask_mod))}

    def to(self, device: torch.device) -> Node:
        """Raises ValueError, as a function may look up any tensors."""
        raise ValueError(
            f"device: expected {self.device}, as a mask_mod may look tensors up there, which cannot be moved, "
            f"got {device}: make it anew by from_function(..., device=...)"
        )

    @property
    def batch(self) -> int:
        return self.sets[0]

    @property
    def heads(self) -> int:
        return self.sets[1]

    @property
    def device(self) -> torch.device:
        return self.on.device

    def elements(self, blocks: Blocks) -> Tensor:
        """Maps the function by one vmap a dimension, as it may reduce tensors that it looks up."""
        run = torch.vmap(self._element, in_dims=(None, None, None, 0))
        run = torch.vmap(run, in_dims=(None, None, 0, None))
        return torch.vmap(run)(*blocks.entry_and_head(self), blocks.queries, blocks.keys)

    def _element(self, *where: Tensor) -> Tensor:
        """Whether a score is visible, as vmap maps it."""
        visible: Any = self.mask_mod(*where)
        if not isinstance(visible, Tensor):
            raise TypeError(f"mask_mod: expected a function that gives a bool tensor, got {type(visible).__name__}")
        if visible.dtype != torch.bool:
            raise TypeError(f"mask_mod: expected a function that gives a bool tensor, got {visible.dtype}")
        if visible.ndim:
            raise ValueError(f"mask_mod: expected a function that gives a 0-d tensor, got shape {tuple(visible.shape)}")
        return visible


@dataclass(eq=False, repr=False)
class Combination(Node):
    """Two expressions combined; each may have one batch entry or head where the other has several."""

    a: Node
    b: Node

    @property
    def is_real(self) -> bool:
        return self.a.is_real and self.b.is_real

    def use(self, *, checked: bool = True) -> None:
        self.a.use(checked=checked)
        self.b.use(checked=checked)

    def to(self, device: torch.device) -> Node:
        return type(self)(self.a.to(device), self.b.to(device))

    @property
    def is_regular(self) -> bool:  # type: ignore[override]
        return self.a.is_regular and self.b.is_regular

    @property
    def half_blocks(self) -> bool:
        return self.a.half_blocks or self.b.half_blocks

    @property
    def half_columns(self) -> bool:
        return self.a.half_columns or self.b.half_columns

    @property
    def batch(self) -> int:
        return self.b.batch if self.a.batch == 1 else self.a.batch

    @property
    def heads(self) -> int:
        return self.b.heads if self.a.heads == 1 else self.a.heads

    @property
    def device(self) -> torch.device | None:
        return self.a.device if self.b.device is None else self.b.device

    @property
    def padding(self) -> tuple[Tensor, Tensor] | None:
        """Rows that are padding in ``a`` or ``b``; ``row_tables.real_rows`` takes back those with visible scores."""
        a, b = self.a.padding, self.b.padding
        if a is None or b is None:
            return b if a is None else a
        return a[0] | b[0], a[1] | b[1]

    def patterns(self, blocks: Blocks) -> tuple[Tensor, int] | None:
        """A pattern for each pair of patterns of both."""
        a, b = self.a.patterns(blocks), self.b.patterns(blocks)
        if a is None or b is None or a[1] * b[1] >= 1 << 61:
            return None
        return a[0] * b[1] + b[0], a[1] * b[1]


class And(Combination):
    """Intersection: scores visible in both expressions."""

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        (start_a, stop_a), (start_b, stop_b) = self.a.block_range(sizes, device), self.b.block_range(sizes, device)
        return torch.maximum(start_a, start_b), torch.minimum(stop_a, stop_b)

    def kinds(self, blocks: Blocks) -> Tensor:
        return torch.minimum(self.a.kinds(blocks), self.b.kinds(blocks))

    def tiles(self, blocks: Blocks) -> Tensor:
        return self.a.tiles(blocks) & self.b.tiles(blocks)


class Or(Combination):
    """Union: scores visible in either expression."""

    def block_range(self, sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
        (start_a, stop_a), (start_b, stop_b) = self.a.block_range(sizes, device), self.b.block_range(sizes, device)
        return torch.minimum(start_a, start_b), torch.maximum(stop_a, stop_b)

    def kinds(self, blocks: Blocks) -> Tensor:
        return torch.maximum(self.a.kinds(blocks), self.b.kinds(blocks))

    def tiles(self, blocks: Blocks) -> Tensor:
        return self.a.tiles(blocks) | self.b.tiles(blocks)
