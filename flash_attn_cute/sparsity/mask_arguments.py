"""Checks of the arguments of a mask's constructors: types, shapes and ranges; with a flag also data."""

from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import as_int, check_int, check_layout, check_plain, statically_true
from flash_attn_cute.runtime import kept, settings
from flash_attn_cute.sparsity.score_blocks import Sizes

_MAX_LENGTH = 2**31 - 1


def check_flags(name: str, x: Any, last: str) -> Tensor:
    """Checks a bool tensor ([[batch,] heads,] and the two ``last`` dimensions); returns it with all four."""
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        given = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name}: expected a bool tensor, got {given}")
    check_layout(name, x)
    check_plain(name, x)
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"{name}: expected shape ([[batch,] heads,] {last}), got shape {tuple(x.shape)}")
    x = x[(None,) * (4 - x.ndim)]
    check_heads(name, x)
    return x


def check_heads(name: str, x: Tensor) -> None:
    """Refuses a tensor of no heads, which are its second dimension."""
    if x.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one head, got shape {tuple(x.shape)}")


def check_lengths(seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """Checks the lengths of a mask; returns them."""
    return _check_length("seqlen_q", seqlen_q), _check_length("seqlen_k", seqlen_k)


def _check_length(name: str, length: int) -> int:
    length = check_int(name, length)
    if statically_true(length < 0) or statically_true(length > _MAX_LENGTH):
        raise ValueError(f"{name}: expected 0 to {_MAX_LENGTH}, got {length}")
    return length


def check_device(device: Any) -> torch.device:
    """Checks a device; returns it with its number, of which "cuda" has none."""
    if not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device: expected a torch.device or a str, got {device!r}")
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected one that PyTorch knows, got {device!r}") from error
    return torch.empty(0, device=named).device


def check_side(name: str, side: int | None) -> int | None:
    """Checks one side of a window; returns None if it is unbounded, or wider than any sequence is long."""
    if side is None:
        return None
    side = check_int(name, side, "None or an int")
    return side if 0 <= side < _MAX_LENGTH else None


def limited(number: int) -> int:
    """A number of rows or keys that tensors of int64 can hold; above the longest sequence they are all the same."""
    return min(max(number, -1), _MAX_LENGTH)


def check_integers(
    name: str, x: Any, ndims: tuple[int, ...], shape: str, *, beside: Tensor | None = None, sharded: bool = False
) -> None:
    """Checks a strided tensor of int32 or int64, or raises TypeError; of one of ``ndims`` dimensions, or ValueError.

    ``shape`` is what the error says was expected. ``beside``: a tensor on whose device it has to be. ``sharded``:
    whether it may be a DTensor.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    check_layout(name, x)
    if not sharded:
        check_plain(name, x)
    if x.ndim not in ndims:
        raise ValueError(f"{name}: expected shape {shape}, got shape {tuple(x.shape)}")
    if beside is not None and x.device != beside.device:
        raise ValueError(f"{name}: expected the device {beside.device}, got {x.device}")


def ids_of(
    ids: Tensor | None,
    ids_k: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqlen_q: int | None,
    seqlen_k: int | None,
) -> tuple[Tensor, Tensor]:
    """Documents of queries and of keys, from the arguments of ``BlockMask.documents``: copies (batch, seqlen), int64.

    They are the same tensor twice where queries and keys have the same documents.
    """
    if (ids is None) == (cu_seqlens is None):
        raise ValueError("ids: expected either ids or cu_seqlens, got " + ("neither" if ids is None else "both"))
    if (cu_seqlens is None and cu_seqlens_k is not None) or (ids is None and ids_k is not None):
        given, wrong = ("ids", "cu_seqlens_k") if cu_seqlens is None else ("cu_seqlens", "ids_k")
        raise ValueError(f"{wrong}: expected None beside {given}, got a tensor")
    lengths = (seqlen_q, seqlen_k)
    if cu_seqlens is not None:
        if seqlen_q is None:
            raise TypeError("seqlen_q: expected an int beside cu_seqlens, got None")
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        seqlen_q, seqlen_k = check_lengths(seqlen_q, seqlen_k)
        cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        for name, offsets in (("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)):
            check_integers(name, offsets, (1,), "(documents + 1,)", beside=cu_seqlens)
        if not len(cu_seqlens):
            raise ValueError("cu_seqlens: expected shape (documents + 1,), got shape (0,)")
        if len(cu_seqlens) != len(cu_seqlens_k):
            raise ValueError(f"cu_seqlens_k: expected shape ({len(cu_seqlens)},), got {tuple(cu_seqlens_k.shape)}")
        is_same = cu_seqlens_k is cu_seqlens and seqlen_k == seqlen_q
        ids = _ids_of_offsets(cu_seqlens, seqlen_q)
        ids_k = None if is_same else _ids_of_offsets(cu_seqlens_k, seqlen_k)
        if settings.check_data() and not torch.compiler.is_compiling():
            _check_offsets("cu_seqlens", cu_seqlens, seqlen_q)
            _check_offsets("cu_seqlens_k", cu_seqlens_k, seqlen_k)
    assert ids is not None
    ids_k = ids if ids_k is None else ids_k
    for name, x, shape in (("ids", ids, "(seqlen_q,)"), ("ids_k", ids_k, "(seqlen_k,)")):
        check_integers(name, x, (1, 2), f"{shape} or (batch, {shape[1:-2]})", beside=ids)
    is_same = ids_k is ids
    ids, ids_k = (kept.copied(x if x.ndim == 2 else x[None]).long() for x in (ids, ids_k))
    if len(ids) != len(ids_k):
        raise ValueError(f"ids_k: expected the batch size of ids, {len(ids)}, got shape {tuple(ids_k.shape)}")
    for name, length, x in zip(("seqlen_q", "seqlen_k"), lengths, (ids, ids_k), strict=True):
        if length is not None and _check_length(name, length) != x.shape[1]:
            raise ValueError(f"{name}: expected None or the rows of ids, {x.shape[1]}, got {length}")
    return ids, ids if is_same else ids_k


def _check_offsets(name: str, offsets: Tensor, length: int) -> None:
    """Checks the data of offsets, which waits for the device."""
    if (offsets.diff() < 0).any():
        raise ValueError(f"{name}: expected offsets that never decrease, got {offsets.tolist()}")
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > length:
        raise ValueError(f"{name}: expected offsets within {length} rows, got a range from {first} to {last}")


def _ids_of_offsets(offsets: Tensor, length: int) -> Tensor:
    """Document of each row, -1 for padding."""
    row = torch.arange(length, device=offsets.device)
    document = torch.searchsorted(offsets.long().contiguous(), row, right=True) - 1
    return torch.where(row < offsets[-1], document, -1)


def check_set(name: str, size: int | None) -> int:
    """Checks a number of batch entries or heads; returns it, or 1 for None."""
    if size is None:
        return 1
    size = check_int(name, size, "None or an int")
    if size < 1:
        raise ValueError(f"{name}: expected None or at least 1, got {size}")
    return size


def check_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """Checks the size of blocks; returns their queries and keys."""
    given = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    block_q, block_k = map(as_int, given) if len(given) == 2 else (None, None)
    if block_q is None or block_k is None:
        raise TypeError(f"block: expected an int or a pair of them, got {block!r}")
    if block_q < 1 or block_k < 1:
        raise ValueError(f"block: expected at least 1, got {block!r}")
    return block_q, block_k


def check_blocks(name: str, length: int | None, blocks: int, size: int) -> int:
    """Checks that a length makes ``blocks`` blocks; returns it, or for None the length of whole blocks."""
    if length is None:
        length = blocks * size
    length = _check_length(name, length)
    if -(-length // size) != blocks:
        raise ValueError(f"{name}: expected a length of {blocks} blocks of {size}, got {length}")
    return length


def check_block_lengths(lengths: Any, block: tuple[int, int], sizes: Sizes) -> list[int]:
    """Checks real rows of blocks, of queries and keys alike; returns them as ints."""
    if isinstance(lengths, Tensor):
        check_integers("block_lengths", lengths, (1,), "(blocks,)")
        if lengths.device.type != "cpu":
            raise ValueError(f"block_lengths: expected lengths on the host, got a tensor on {lengths.device}")
        lengths = lengths.tolist()
    numbers = [as_int(x) for x in lengths] if isinstance(lengths, (list, tuple)) else [None]
    found = [n for n in numbers if n is not None]
    if len(found) != len(numbers):
        raise TypeError(f"block_lengths: expected ints or a tensor of them, got {lengths!r}")
    size, rows = block[0], len(lengths) * block[0]
    if block[1] != size or not rows == sizes.seqlen_q == sizes.seqlen_k:
        raise ValueError(
            f"block_lengths: expected a length for each block, of queries and keys alike, got {len(lengths)} of "
            f"{block[0]} x {block[1]} for {sizes.seqlen_q} queries and {sizes.seqlen_k} keys"
        )
    if not all(0 <= length <= size for length in found):
        raise ValueError(f"block_lengths: expected 0 to {size}, got {min(found)} to {max(found)}")
    return found


def check_indices(indices: Tensor, counts: Tensor | None, blocks_k: int) -> None:
    """Checks the data of ``BlockMask.from_indices``, which waits for the device."""
    if counts is not None and ((counts < 0) | (counts > indices.shape[-1])).any():
        raise ValueError(f"counts: expected 0 to {indices.shape[-1]}, got {int(counts.min())} to {int(counts.max())}")
    if (indices >= blocks_k).any():
        raise ValueError(f"indices: expected numbers below {blocks_k}, got {int(indices.max())}")
    ordered = indices.sort(-1).values
    if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any():
        raise ValueError("indices: expected each number once in a row, got one twice")
