"""Shardings: which rank holds which rows of packed documents, balanced by the cost of attention.

All of this is arithmetic on lengths on the host. No rank has to communicate to know its rows or those of others.
"""

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from flash_attn_cute.calls import validate
from flash_attn_cute.distributed.balanced_rows import Document, balanced_rows
from flash_attn_cute.problem.band import Band
from flash_attn_cute.problem.spec import Window, as_int, check_int, check_plain
from flash_attn_cute.runtime import kept

T = TypeVar("T")

# Lengths or offsets, on the host.
Numbers = Sequence[int] | Tensor

_CPU = torch.device("cpu")


class Segment(NamedTuple):
    """Consecutive rows that one rank holds, counted over all packed rows."""

    document: int  # -1: rows that no document owns
    start: int
    stop: int


# Shardings by their handles, while a caller holds them.
_by_number: "WeakValueDictionary[int, Sharding]" = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Sharding:
    """Which rows of packed documents each rank holds, and in which order.

    A rank's rows are its segments one behind another. ``balanced`` and ``contiguous`` make layouts; any other will do
    that gives every row to one rank, and to each rank its segments in ascending order, rows of no document behind them.
    For a dense batch it is the layout of the rows of an entry, one document, and all entries have the same.

    Make it once a batch, on every rank the same, and use it in all layers: attention remembers what it has worked out
    for the object.

    Attributes:
        cu_seqlens: the offsets of the documents, one more than there are documents.
        total: the rows of all ranks together, padding included.
        segments: those of each rank.
        seqused_q: the real rows of each document, or of each entry of a dense batch, if calls give them by a tensor on
            a GPU: they take these numbers, which ranks plan by, and wait for nothing.
        seqused_k: likewise of keys.
        owned: how many rows at the start of each document no rank has as padding, and so the most that may be real;
            None if these are all rows of all documents.
        plans: of attention over this layout, made on first use.
        handle: an int64 on the CPU that stands for this object in compiled programs, which take only tensors.

    Raises:
        TypeError: something else than sequences of ints and, for each rank, of segments.
        ValueError: offsets that decrease or leave the rows, rows that no rank has or that two have, or segments out of
            order or outside of their documents.
    """

    cu_seqlens: tuple[int, ...]
    total: int
    segments: tuple[tuple[Segment, ...], ...]
    seqused_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    owned: tuple[int, ...] | None = field(init=False, repr=False)
    plans: kept.Store = field(default_factory=dict, init=False, repr=False)
    handle: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Takes any kind of sequence and of int, and checks that every row is somewhere, once and in order."""
        offsets, total = _check_offsets("cu_seqlens", self.cu_seqlens, check_int("total", self.total))
        plain: dict[str, Any] = {"cu_seqlens": offsets, "total": total}
        plain["segments"] = tuple(
            tuple(map(_as_segment, check_sequence("segments", of_rank)))
            for of_rank in check_sequence("segments", self.segments)
        )
        for name in ("seqused_q", "seqused_k"):
            used = getattr(self, name)
            plain[name] = None if used is None else numbers(name, used)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        number = next(_numbers)
        _by_number[number] = self
        object.__setattr__(self, "handle", kept.outside(partial(torch.tensor, number, device=_CPU), _CPU))
        row = 0
        for s in sorted(itertools.chain.from_iterable(self.segments), key=lambda s: (s.start, s.stop)):
            if s.start != row:
                raise ValueError(f"segments: expected every row on one rank, got {s} where row {row} is next")
            if not self._is_of_its_document(s):
                raise ValueError(f"segments: expected rows of one document, or of none (-1), got {s}")
            row = s.stop
        if row != self.total:
            raise ValueError(f"segments: expected {self.total} rows on all ranks together, got {row}")
        for rank, segments in enumerate(self.segments):
            if list(segments) != sorted(segments, key=_order):
                raise ValueError(f"segments: expected those of rank {rank} in order, rows of no document last")
        object.__setattr__(self, "owned", self._find_owned())

    def _find_owned(self) -> tuple[int, ...] | None:
        offsets = self.cu_seqlens
        slots = [stop - start for start, stop in itertools.pairwise(offsets)]
        owned = list(slots)
        for s in itertools.chain.from_iterable(self.segments):
            if s.document < 0:
                first = max(bisect.bisect_right(offsets, s.start) - 1, 0)
                for document in range(first, bisect.bisect_left(offsets, s.stop, hi=len(slots))):
                    owned[document] = min(owned[document], max(s.start - offsets[document], 0))
        return None if owned == slots else tuple(owned)

    def _is_of_its_document(self, s: Segment) -> bool:
        """Whether a segment's document owns its rows; -1 is none, and padding within documents is of none, too."""
        if not 0 <= s.document < len(self.cu_seqlens) - 1:
            return s.document == -1
        return self.cu_seqlens[s.document] <= s.start <= s.stop <= self.cu_seqlens[s.document + 1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, also those that another process gets, have a handle of their own and work out plans anew."""
        return Sharding, (self.cu_seqlens, self.total, self.segments, self.seqused_q, self.seqused_k)

    @classmethod
    def balanced(
        cls,
        cu_seqlens: Numbers,
        num_ranks: int,
        *,
        causal: bool = False,
        window_size: Window = (None, None),
        window_sizes: Sequence[Window] | None = None,
        seqused_q: Numbers | None = None,
        cu_seqlens_k: Numbers | None = None,
        seqused_k: Numbers | None = None,
        total: int | None = None,
    ) -> "Sharding":
        """Ranks of the same number of rows, but for one, and of nearly the same number of visible (query, key) pairs.

        Rows of a causal document are taken from both of its ends inwards, so that every early row goes with a late one
        and all such pairs cost the same. A rank takes rows of the shortest documents and rows of the longest ones, as
        many of either as make both numbers right. So most documents stay whole: there are two cuts a rank or fewer.
        One causal sequence alone becomes the usual early and late chunk a rank. Windows that are short for a document,
        and full masks, have it cut into runs of rows, so that only neighbours share it.

        A model whose layers have several windows gives them all. Ranks are then in balance under each of them, so that
        none waits for another in any layer. That takes a few more cuts: rows are dealt as above within strata, in
        which their costs under all windows grow together.

        Args:
            cu_seqlens: (documents + 1,) offsets of the documents' rows; a tensor on a GPU is waited for, here and
                below.
            num_ranks: the size of the group.
            causal: of the attention whose cost is balanced, as is what follows.
            window_size: (left, right).
            window_sizes: in its place, each (left, right) that some layer has, once; causal holds for all of them.
            seqused_q: (documents,) the real rows of each; the others count as padding, unless keys are real there by
                seqused_k. Calls by which more queries or keys are real are refused. The sharding keeps the lengths for
                calls that give theirs by a tensor on a GPU.
            cu_seqlens_k: (documents + 1,) offsets of the keys; None: they are of the same rows.
            seqused_k: (documents,) the real keys of each, kept likewise.
            total: the rows, if there is padding behind the last document.

        Raises:
            TypeError: num_ranks, total or a side of the window is no int, or window_sizes no sequence.
            ValueError: num_ranks below 1, offsets that decrease or leave the rows, a length outside its document, or
                window_sizes that are empty or beside a window_size.
        """
        offsets, total = _check_offsets("cu_seqlens", cu_seqlens, total)
        num_ranks = _check_num_ranks(num_ranks)
        used_q = real_lengths("seqused_q", seqused_q, offsets)
        offsets_k = _offsets_of_keys(cu_seqlens_k, offsets)
        used_k = real_lengths("seqused_k", seqused_k, offsets_k)
        pairs = [window_size] if window_sizes is None else list(check_sequence("window_sizes", window_sizes))
        if not pairs or (window_sizes is not None and checked_window(False, window_size) != (None, None)):
            raise ValueError(
                f"window_sizes: expected at least one, and no window_size beside them, got {len(pairs)} "
                f"and window_size {window_size}"
            )
        windows = [checked_window(causal, pair) for pair in pairs]
        is_shared = cu_seqlens_k is None and seqused_k is not None
        owned = tuple(map(max, used_q, used_k)) if is_shared else used_q
        documents = list(itertools.starmap(Document, zip(offsets[:-1], used_q, used_k, owned, strict=True)))
        rows = balanced_rows(documents, total, windows, num_ranks)
        layout = cls(offsets, total, tuple(_tidy(Segment(*r) for r in of_rank) for of_rank in rows))
        return layout.with_lengths(seqused_q=seqused_q, seqused_k=seqused_k)

    @classmethod
    def contiguous(cls, cu_seqlens: Numbers, num_ranks: int, *, total: int | None = None) -> "Sharding":
        """Ranks that have one run of rows each, in their order, of the same length but for one row.

        Args:
            cu_seqlens: (documents + 1,) offsets of the documents' rows; a tensor on a GPU is waited for.
            num_ranks: the size of the group.
            total: the rows, if there is padding behind the last document.

        Raises:
            TypeError: num_ranks or total is no int.
            ValueError: num_ranks below 1, or offsets that decrease or leave the rows.
        """
        offsets, total = _check_offsets("cu_seqlens", cu_seqlens, total)
        num_ranks = _check_num_ranks(num_ranks)
        rows = itertools.pairwise((0, *offsets, total))
        everything = [Segment(document, *ends) for document, ends in enumerate(rows, -1)]
        everything[-1] = everything[-1]._replace(document=-1)
        starts, stops = [s.start for s in everything], [s.stop for s in everything]
        ends = [total * rank // num_ranks for rank in range(num_ranks + 1)]
        runs = (
            (first, last, everything[bisect.bisect_right(stops, first) : bisect.bisect_left(starts, last)])
            for first, last in itertools.pairwise(ends)
        )
        return cls(
            offsets,
            total,
            tuple(
                _tidy(Segment(s.document, max(s.start, first), min(s.stop, last)) for s in held)
                for first, last, held in runs
            ),
        )

    def with_lengths(self, *, seqused_q: Numbers | None = None, seqused_k: Numbers | None = None) -> "Sharding":
        """This layout for calls with padding, whose real lengths are tensors on a GPU.

        Ranks plan what they exchange on the host. A call whose seqused is on a GPU takes the numbers given here in its
        place. ``balanced`` keeps those that it is given.

        Args:
            seqused_q: the real rows of each document, or (batch,) of each entry of a dense batch; a tensor on a GPU is
                waited for, here and below.
            seqused_k: likewise of keys.

        Returns:
            Another sharding, of these lengths alone.

        Raises:
            TypeError: something else than a sequence of ints, or than a tensor of one dimension of them.
        """
        if seqused_q is None and seqused_k is None:
            return self
        lengths: tuple[Any, Any] = seqused_q, seqused_k
        return Sharding(self.cu_seqlens, self.total, self.segments, *lengths)

    def plan(self, key: Hashable, device: torch.device, make: Callable[[], T]) -> T:
        """The plan under a key: made on first use, then kept with this layout; see ``kept.made``.

        Raises:
            RuntimeError: nothing has been, and a CUDA graph is being captured, for which copies from the host come too
                late.
        """
        if kept.found(self.plans, key) is None and kept.is_captured(device):
            raise RuntimeError(
                "sharding: expected one that has served such a call before, as a CUDA graph cannot record how ranks "
                "plan it: make the call once before the capture"
            )
        # Within an operator of a compiled program memory may come from a pool.
        return kept.made(self.plans, key, device, make, in_thread=True)

    @property
    def num_ranks(self) -> int:
        """The size of the group."""
        return len(self.segments)

    def _of(self, rank: int) -> tuple[Segment, ...]:
        """The segments of a rank."""
        check_int("rank", rank)
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank: expected 0 to {self.num_ranks - 1}, got {rank}")
        return self.segments[rank]

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Where in a rank's own rows each of its segments starts and, last, how many rows it has."""
        return (0, *itertools.accumulate(s.stop - s.start for s in self._of(rank)))

    def num_rows(self, rank: int) -> int:
        """The rows of a rank."""
        return self.offsets(rank)[-1]

    def index(self, rank: int) -> Tensor:
        """Which of all packed rows each row of a rank is.

        Args:
            rank: 0 to num_ranks - 1.

        Returns:
            (rows of the rank,) int64, on the CPU.

        Raises:
            ValueError: a rank that there is not.
        """
        return rows_of((s.start, s.stop) for s in self._of(rank))

    def positions(self, rank: int) -> Tensor:
        """Each row's position in its document, as rotary embeddings want it.

        Args:
            rank: 0 to num_ranks - 1.

        Returns:
            (rows of the rank,) int64, on the CPU; 0 for rows of padding.

        Raises:
            ValueError: a rank that there is not.
        """
        positions = self.index(rank)
        for s, row in zip(self._of(rank), self.offsets(rank), strict=False):
            rows = positions[row : row + s.stop - s.start]
            rows.zero_() if s.document < 0 else rows.sub_(self.cu_seqlens[s.document])
        return positions

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """A rank's rows of a tensor that has all of them, differentiable.

        Args:
            x: any tensor with ``total`` rows, on any device.
            rank: whose rows.
            dim: the dimension of rows: 0 of packed tensors, 1 of (batch, rows, ...).

        Returns:
            A copy of x's dtype and device, with the rank's rows in that dimension.

        Raises:
            TypeError: x is no tensor, or dim or rank no int.
            ValueError: a tensor without that dimension or of another number of rows, or a rank that there is not.
        """
        check_dimension("x", x, dim)
        if x.shape[dim] != self.total:
            raise ValueError(f"x: expected {self.total} rows in dimension {dim}, got shape {tuple(x.shape)}")
        parts = [x.narrow(dim, s.start, s.stop - s.start) for s in self._of(rank)]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[Tensor], dim: int = 0) -> Tensor:
        """All rows in their order from those of every rank: the inverse of ``shard``, differentiable as well.

        ``flash_attn_cute.distributed.gather`` collects them from a group.

        Args:
            shards: a tensor a rank, as ``shard`` gives them.
            dim: the dimension of rows.

        Returns:
            A tensor of their dtype and device, with ``total`` rows in that dimension.

        Raises:
            TypeError: shards is no sequence of tensors, or dim no int.
            ValueError: another number of shards than ranks, or a shard without that dimension, of another number of
                rows, or of another dtype, device or width than the first one.
        """
        if not isinstance(shards, (Sequence, Tensor)):
            raise TypeError(f"shards: expected a sequence of tensors, got {type(shards).__name__}")
        if len(shards) != self.num_ranks:
            raise ValueError(f"shards: expected {self.num_ranks}, one a rank, got {len(shards)}")
        for rank, x in enumerate(shards):
            check_dimension(f"shards[{rank}]", x, dim)
            if x.shape[dim] != self.num_rows(rank):
                raise ValueError(
                    f"shards: expected {self.num_rows(rank)} rows in dimension {dim} of rank {rank}, "
                    f"got shape {tuple(x.shape)}"
                )
            if _but_rows(x, dim) != _but_rows(shards[0], dim):
                raise ValueError(
                    f"shards: expected all to be alike but for their rows, got {_in_words(x)} of rank {rank}, and "
                    f"{_in_words(shards[0])} of rank 0"
                )
        places = torch.cat([self.index(rank) for rank in range(self.num_ranks)]).argsort()
        together = torch.cat(list(shards), dim)
        return together.index_select(dim, places.to(together.device))

    def area(
        self,
        rank: int,
        *,
        causal: bool = False,
        window_size: Window = (None, None),
        seqused_q: Numbers | None = None,
        cu_seqlens_k: Numbers | None = None,
        seqused_k: Numbers | None = None,
    ) -> int:
        """The visible (query, key) pairs of a rank's queries, of one head: what balance is measured by.

        Other arguments and errors are those of ``balanced``.

        Args:
            rank: 0 to num_ranks - 1.
            causal: as in ``balanced``, like all that follow.
            window_size: (left, right).
            seqused_q: the real query rows of each document.
            cu_seqlens_k: the offsets of the keys, if they are not those of the queries.
            seqused_k: the real keys of each document.

        Returns:
            Their number.
        """
        window = checked_window(causal, window_size)
        offsets_k = _offsets_of_keys(cu_seqlens_k, self.cu_seqlens)
        used_q = real_lengths("seqused_q", seqused_q, self.cu_seqlens)
        used_k = real_lengths("seqused_k", seqused_k, offsets_k)
        area = 0
        for s in self._of(rank):
            if s.document >= 0:
                length_q, length_k = used_q[s.document], used_k[s.document]
                start, stop = (min(row - self.cu_seqlens[s.document], length_q) for row in (s.start, s.stop))
                area += Band.of(window, length_q, length_k).area(start, stop, length_k)
        return area

    def batched(self, batch: int) -> "Sharding":
        """The layout of the rows of a dense batch, its entries one behind another, from that of an entry."""
        total = self.total
        return Sharding(
            tuple(b * total for b in range(batch + 1)),
            batch * total,
            tuple(
                tuple(Segment(b, b * total + s.start, b * total + s.stop) for b in range(batch) for s in segments)
                for segments in self.segments
            ),
        )

    def merged(self, size: int) -> "Sharding":
        """The layout of a smaller group, each rank of which has the rows of ``size`` neighbouring ones of this."""
        starts = range(0, self.num_ranks, size)
        together = (itertools.chain.from_iterable(self.segments[start : start + size]) for start in starts)
        return Sharding(self.cu_seqlens, self.total, tuple(_tidy(segments) for segments in together))


def of_handle(handle: Tensor) -> Sharding:
    """The sharding that a handle stands for; raises RuntimeError if the caller has not kept it."""
    found = _by_number.get(int(handle))
    if found is None:
        raise RuntimeError(
            "the Sharding of this compiled attention is gone before its backward pass; the caller has to keep it"
        )
    return found


def check_sequence(name: str, given: Any) -> Iterable[Any]:
    """Returns an argument that is to be a sequence; raises TypeError if it is none."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{name}: expected a sequence, got {given!r}")
    return given


def check_dimension(name: str, x: Any, dim: Any) -> None:
    """Raises TypeError for no tensor, or a dimension that is no int, and ValueError if the tensor lacks it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    check_int(name, dim, "an int as its dimension of rows")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name}: expected a dimension {dim} of rows, got shape {tuple(x.shape)}")


def _but_rows(x: Tensor, dim: int) -> tuple[Any, ...]:
    """Shape beside the rows, dtype and device, which shards of one tensor have in common."""
    return x.movedim(dim, 0).shape[1:], x.dtype, x.device


def _in_words(x: Tensor) -> str:
    return f"shape {tuple(x.shape)} of {x.dtype} on {x.device}"


def rows_of(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """The rows of ranges (start, stop), one behind another, int64 on the CPU."""
    parts = [torch.arange(start, stop, device="cpu") for start, stop in ranges]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")


def checked_window(causal: bool, window_size: Window) -> Window:
    """The window with ``causal`` folded in; None on a side that is unbounded."""
    options = validate.check_options(causal=causal, window_size=window_size)
    return options.window_left, options.window_right


def real_lengths(name: str, used: Numbers | None, offsets: Sequence[int]) -> tuple[int, ...]:
    """The real rows of each document; raises ValueError unless there is a length for each, from 0 to its rows."""
    slots = [stop - start for start, stop in itertools.pairwise(offsets)]
    if used is None:
        return tuple(slots)
    lengths = numbers(name, used)
    if len(lengths) != len(slots):
        raise ValueError(f"{name}: expected {len(slots)} lengths, got {len(lengths)}")
    for document, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        if not 0 <= length <= slot:
            raise ValueError(f"{name}: expected 0 to {slot} rows of document {document}, got {length}")
    return lengths


def numbers(name: str, given: Numbers) -> tuple[int, ...]:
    """Lengths or offsets as ints; raises TypeError for all but a sequence, or a tensor of one dimension, of them."""
    if isinstance(given, Tensor):
        check_plain(name, given)
        listed = given.tolist() if given.ndim == 1 else None
        got = f"{given.dtype} of shape {tuple(given.shape)}"
    else:
        listed = list(given) if isinstance(given, Iterable) else None
        got = repr(given)
    found = None if listed is None else [as_int(x) for x in listed]
    if found is None or any(x is None for x in found):
        raise TypeError(f"{name}: expected a sequence of ints, or a tensor (n,) of them, got {got}")
    return tuple(x for x in found if x is not None)


def _check_offsets(name: str, given: Numbers, total: int | None) -> tuple[tuple[int, ...], int]:
    offsets = numbers(name, given)
    if not offsets:
        raise ValueError(f"{name}: expected the offset of each document and of the end, got none")
    rows = offsets[-1] if total is None else check_int("total", total, "None or an int")
    for start, stop in itertools.pairwise((0, *offsets, rows)):
        if start > stop:
            raise ValueError(f"{name}: expected offsets from 0 to {rows} that never decrease, got {stop} after {start}")
    return offsets, rows


def _offsets_of_keys(given: Numbers | None, offsets: tuple[int, ...]) -> tuple[int, ...]:
    """The offsets of the keys of as many documents; None: those of the queries."""
    if given is None:
        return offsets
    found, _ = _check_offsets("cu_seqlens_k", given, None)
    if len(found) != len(offsets):
        raise ValueError(f"cu_seqlens_k: expected {len(offsets)} offsets, got {len(found)}")
    return found


def _check_num_ranks(num_ranks: int) -> int:
    number = check_int("num_ranks", num_ranks)
    if number < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {number}")
    return number


def _as_segment(given: Any) -> Segment:
    """A segment of plain ints; those of another kind would make a layout look like another one to other ranks."""
    if type(given) is Segment and type(given.document) is type(given.start) is type(given.stop) is int:
        return given
    found = [as_int(x) for x in given] if isinstance(given, Iterable) else []
    if len(found) != len(Segment._fields) or None in found:
        raise TypeError(f"segments: expected (document, start, stop) of ints, in a sequence a rank, got {given!r}")
    return Segment._make(found)


def _order(segment: Segment) -> tuple[bool, Segment]:
    return segment.document < 0, segment


def _tidy(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments that are not empty, in order, adjacent ones joined, those of no document last."""
    joined: list[Segment] = []
    for s in sorted((s for s in segments if s.start < s.stop), key=_order):
        if joined and (joined[-1].document, joined[-1].stop) == (s.document, s.start):
            joined[-1] = joined[-1]._replace(stop=s.stop)
        else:
            joined.append(s)
    return tuple(joined)
