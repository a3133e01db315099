"""Padded batches: from a padding mask to what the attention functions take, and back.

A padding mask is (batch, rows), bool, True = real. There are two ways to attend to real rows alone:

- ``seqused_of``, if the padding is on the right: ``flash_attn_func`` then skips it. Nothing is moved.
- ``Packing``, for padding anywhere, or to have the layers around attention save the work on padding, too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.calls import torch_modes
from flash_attn_cute.problem.spec import check_int, check_layout, check_plain, statically_true
from flash_attn_cute.runtime import settings


class Packing(NamedTuple):
    """Where the real rows of a padded batch go, if they are packed one behind another; made by ``Packing.of``.

    Attributes:
        cu_seqlens: (batch + 1,) int32, the offsets of the sequences; for ``flash_attn_varlen_func``.
        max_seqlen: int, a bound on the real rows of a sequence: the rows of the padded batch.
        sources: (total,) int64, the row of the flattened batch that each packed row is; batch * rows if it is none.
        places: (batch, rows) int64, the packed row that each row of the batch becomes; at least total in padding.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    sources: Tensor
    places: Tensor

    @classmethod
    def of(cls, mask: Tensor, total: int | None = None) -> "Packing":
        """The packing of a padding mask: of right padding, left padding or holes, which close up.

        Args:
            mask: (batch, rows) bool, True = real.
            total: the rows of packed tensors, no fewer than the mask has real ones. Those left over stand behind
                the last sequence, where packed calls take them for padding. None: as many as there are, which the
                host has to read from the device (and ``torch.compile`` breaks its graph for, as for any ``.item()``).

        Returns:
            The packing, its tensors on the mask's device.

        Raises:
            TypeError: a mask that is no strided bool tensor or is a DTensor, or a total that is no int.
            ValueError: a mask of another shape, a negative total, or one too small for the mask. The last is noticed
                if the mask is on the CPU or with ``FLASH_ATTN_CUTE_CHECK=1``, and by a backend that reads cu_seqlens on
                the host; else the rows in excess count as padding.
        """
        _check_mask("mask", mask)
        check_plain("mask", mask)
        bound = None if total is None else check_int("total", total, "None or an int")
        if bound is not None and statically_true(bound < 0):
            raise ValueError(f"total: expected at least 0, got {bound}")
        counted = mask.flatten().cumsum(0)
        if bound is None:
            bound = int(counted[-1].item()) if counted.shape[0] else 0
        elif counted.shape[0] and _is_read(mask) and counted[-1].item() > bound:
            raise ValueError(f"total: expected at least the {counted[-1].item()} real rows of mask, got {bound}")
        # The i-th real row is the first at which i have been counted; where there is none, that is behind the last.
        sources = torch.searchsorted(counted, torch.arange(1, bound + 1, device=mask.device))
        places = (counted - 1).view(mask.shape).masked_fill(~mask, bound)
        lengths = mask.sum(1).cumsum(0, dtype=torch.int32)
        return cls(torch.nn.functional.pad(lengths, (1, 0)), mask.shape[1], sources, places)

    def pack(self, x: Tensor) -> Tensor:
        """The real rows of a padded tensor, one behind another; differentiable.

        Args:
            x: (batch, rows, ...), of any dtype. What stands in the padding, NaN included, reaches nothing.

        Returns:
            (total, ...) of x's dtype, contiguous; rows behind the last sequence are 0.

        Raises:
            TypeError: x is no strided tensor.
            ValueError: x has another batch, other rows or another device than the mask.
        """
        _check_rows(x, self.places, "(batch, rows, ...)")
        return _Moved.apply(x.flatten(0, 1), self.sources, self.places.flatten())

    def unpack(self, x: Tensor) -> Tensor:
        """A padded tensor of packed rows, 0 in the padding; differentiable, the inverse of ``pack``.

        Args:
            x: (total, ...), of any dtype. Rows behind the last sequence, NaN included, reach nothing.

        Returns:
            (batch, rows, ...) of x's dtype, contiguous.

        Raises:
            TypeError: x is no strided tensor.
            ValueError: x has other rows than total, or another device than the mask.
        """
        _check_rows(x, self.sources, "(total, ...)")
        rows: Tensor = _Moved.apply(x, self.places.flatten(), self.sources)
        return rows.unflatten(0, self.places.shape)


def seqused_of(real: Tensor) -> Tensor:
    """Lengths for seqused_q and seqused_k of ``flash_attn_func``, of a batch with its padding on the right.

    Args:
        real: (batch, rows) bool, True = real and right padding alone; or (batch,) of any integer dtype, the lengths.

    Returns:
        (batch,) int32. Nothing is read by the host.

    Raises:
        TypeError: no strided tensor, or one of another dtype.
        ValueError: another shape, or a mask with a real row behind padding. The latter is noticed if the mask is on
            the CPU or with ``FLASH_ATTN_CUTE_CHECK=1``.
    """
    if isinstance(real, Tensor) and real.ndim == 1 and real.dtype != torch.bool:
        if real.is_floating_point() or real.is_complex():
            raise TypeError(f"real: expected a bool mask or integer lengths, got {real.dtype}")
        check_layout("real", real)
        if real.dtype != torch.int32:  # what int32 has not stays out of range, instead of another length
            real = real.long().clamp(-1, 2**31 - 1)
        return real.to(torch.int32)
    _check_mask("real", real)
    if _is_read(real) and (real[:, 1:] > real[:, :-1]).any():
        raise ValueError(
            "real: expected padding on the right alone, got a real row behind padding; see padding.Packing"
        )
    return real.sum(1, dtype=torch.int32)


def _check_mask(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name}: expected bool (True = real), got {mask.dtype}; {name}.bool() is True where it is not 0"
        )
    check_layout(name, mask)
    if mask.ndim != 2:
        raise ValueError(f"{name}: expected shape (batch, rows), got shape {tuple(mask.shape)}")


def _check_rows(x: Tensor, index: Tensor, expected: str) -> None:
    """Checks that the leading dimensions of x are those of an index, on whose device it is."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    check_layout("x", x)
    check_plain("x", x)
    if x.device != index.device:
        raise ValueError(f"x: expected the device of the mask, {index.device}, got {x.device}")
    leading = tuple(index.shape)
    if x.ndim < len(leading) or any(statically_true(got != n) for got, n in zip(x.shape, leading, strict=False)):
        shape = expected.replace("...", "").strip("(), ")
        raise ValueError(f"x: expected shape {expected} with ({shape}) = {leading}, got shape {tuple(x.shape)}")


def _is_read(x: Tensor) -> bool:
    """Whether values are looked at: where the host need not wait for them, or where all are to be."""
    return not torch_modes.needs_dispatcher((x,)) and (x.device.type == "cpu" or settings.check_data())


class _Moved(torch.autograd.Function):
    """Rows of a tensor in other places; places without a row are 0.

    The derivative moves them back, by the inverse: each row comes from one place at most, so nothing is summed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        """Row ``index[i]`` of x as row i, or 0 if x has no such row; ``inverse`` undoes it."""
        rows, shape = x.shape[0], (index.shape[0], *x.shape[1:])
        if statically_true(rows == 0):
            return x.new_zeros(shape)
        absent = (index >= rows).view(-1, *[1] * (x.ndim - 1))
        return x.index_select(0, index.clamp(max=rows - 1)).masked_fill(absent, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Keeps the way back."""
        _, index, inverse = inputs
        ctx.save_for_backward(index, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The gradients of x."""
        index, inverse = ctx.saved_tensors
        return _Moved.apply(grad, inverse, index), None, None
