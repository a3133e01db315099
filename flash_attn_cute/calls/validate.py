"""User arguments in, a valid call out: every complaint about an argument is raised here.

Checks run on every call and look at types, shapes, dtypes, strides and devices only, never at device data, so
that they cost no synchronisation and work under tracing. (What the offsets hold is checked where they are
read: ``lengths.read_sequences``.) Each message reads "argument: expected ..., got ...".
"""

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.calls.attention_call import NUM_TENSORS, AttentionCall
from flash_attn_cute.problem.spec import (
    AttentionInputs,
    Deterministic,
    Options,
    Window,
    as_int,
    check_int,
    statically_true,
)
from flash_attn_cute.sparsity.block_mask import BlockMask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Scores are float32 in kernels, and their factors are multiplied by log2(e): both stay finite and normal.
_LARGEST, _SMALLEST = 2.0**127, 2.0**-126
_MAX_INT32 = 2**31 - 1  # no sequence is longer
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_TORCH_FUNCTION = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
# The usual ones, found fast. Whatever else calls itself a real number is one, too: NumPy's scalars do.
_FLOATS = frozenset({float, torch.SymFloat, int, torch.SymInt})
_SOFTCAP = "0 for none, or a number from 2**-126 to 2**127 (float32)"
_WINDOW = "a pair (left, right), each an int or None"

# What to do with a padding mask, in packed calls and in dense ones.
_ON_PADDING = (
    "; packed calls know padding by cu_seqlens and seqused, which flash_attn_cute.padding makes from such masks",
    "; of a padding mask (batch, seqlen_k), mask[:, None, None, :] hides keys, and flash_attn_cute.padding makes what "
    "skips them: seqused (padding on the right) or packed sequences (any)",
)


def check_options(
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softcap: float = 0.0,
    deterministic: Deterministic = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    zero_padding: bool = True,
    precise_gradients: bool = False,
    backend: str | None = None,
    dropout_p: float = 0.0,
) -> Options:
    """Checks every argument that is not a tensor and folds ``causal`` into the window."""
    packing_invariant = type(deterministic) is not bool and _is_invariant(deterministic)
    if not (type(causal) is type(zero_padding) is bool):
        _check_flags({"causal": causal, "zero_padding": zero_padding})  # type: ignore[unreachable]
    if not (type(return_lse) is type(return_max_logits) is bool):
        _check_flags({"return_lse": return_lse, "return_max_logits": return_max_logits})  # type: ignore[unreachable]
    if type(precise_gradients) is not bool:
        _check_flags({"precise_gradients": precise_gradients})  # type: ignore[unreachable]
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected None or a str, got {backend!r}")
    if (type(dropout_p) is not float or dropout_p != 0.0) and not _is_zero(dropout_p):
        raise ValueError(f"dropout_p: expected 0.0, dropout is not supported, got {dropout_p}")
    if softmax_scale is not None:
        softmax_scale = _as_float(
            "softmax_scale", softmax_scale, "None or a number up to 2**127 in magnitude (float32)"
        )
    if type(softcap) is not float or softcap != 0.0:
        softcap = _as_float("softcap", softcap, _SOFTCAP)
        if softcap != 0 and softcap < _SMALLEST:
            raise ValueError(f"softcap: expected {_SOFTCAP}, got {softcap}")
    # Elements are not compared, as one may be an array, which has no truth value.
    is_pair = type(window_size) is tuple and len(window_size) == 2
    is_unbounded = is_pair and window_size[0] is window_size[1] is None
    left, right = (None, None) if is_unbounded else _check_window(window_size)
    right = 0 if causal else right
    others = zero_padding, packing_invariant, precise_gradients, return_max_logits
    return Options(softmax_scale, left, right, softcap, bool(deterministic), *others)


def _is_zero(number: object) -> bool:
    """Whether it is a number, and 0; tensors are none, as to ask them may wait for the device."""
    return isinstance(number, numbers.Real) and number == 0


def _is_invariant(deterministic: object) -> bool:
    """Whether the value is "invariant", and not a bool."""
    if isinstance(deterministic, str) and deterministic != "invariant":
        raise ValueError(f'deterministic: expected a bool or "invariant", got {deterministic!r}')
    if not isinstance(deterministic, (bool, str)):
        raise TypeError(f'deterministic: expected a bool or "invariant", got {deterministic!r}')
    return isinstance(deterministic, str)


def _check_flags(flags: dict[str, object]) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {flag!r}")


def check(call: AttentionCall, device: torch.device | None = None) -> AttentionInputs:
    """The tensors of a call and its bounds, checked, without the tables of its block mask.

    ``device``: where the user's tensors are, if those of the call stand in for them. Raises TypeError for a wrong type
    or dtype, and ValueError for a wrong shape, strides or device.
    """
    inputs = _check_dense(call) if call.bounds is None else _check_packed(call, *call.bounds)
    if call.block_mask is not None:
        _check_promise(call.block_mask, call.options)
        _check_block_mask(call.block_mask, inputs, inputs.q.device if device is None else device)
    return inputs


def _check_dense(call: AttentionCall) -> AttentionInputs:
    q, k = call.q, call.k
    _check_qkv(q, k, call.v, ("batch", "seqlen_q", "nheads", "d"), ("batch", "seqlen_k", "nheads_k", "d"))
    batch, seqlen_q, nheads, _ = q.shape
    if _differ(k.shape[0], batch):
        raise ValueError(f"k: expected the batch size of q, {batch}, got shape {tuple(k.shape)}")
    seqlen_k = k.shape[1]
    _check_int32("seqused_q", call.seqused_q, q, "batch", batch)
    _check_int32("seqused_k", call.seqused_k, q, "batch", batch)
    _check_sink(call.learnable_sink, q)
    dims = {"batch": batch, "nheads": nheads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    _check_mask(call.mask, q, dims, batch)
    _check_bias(call.bias, q, dims)
    return AttentionInputs(*call[:NUM_TENSORS], seqlen_q, seqlen_k)


def _check_packed(call: AttentionCall, max_seqlen_q: int | None, max_seqlen_k: int | None) -> AttentionInputs:
    """No length exceeds the number of rows, which stands in for a bound that is not known."""
    q, k = call.q, call.k
    _check_qkv(q, k, call.v, ("total_q", "nheads", "d"), ("total_k", "nheads_k", "d"))
    total_q, nheads, _ = q.shape
    _check_tensor("cu_seqlens_q", call.cu_seqlens_q, q)
    if call.cu_seqlens_q.ndim != 1 or statically_true(call.cu_seqlens_q.shape[0] < 1):
        raise ValueError(f"cu_seqlens_q: expected shape (batch + 1,), got shape {tuple(call.cu_seqlens_q.shape)}")
    offsets = call.cu_seqlens_q.shape[0]
    _check_int32("cu_seqlens_q", call.cu_seqlens_q, q, "batch + 1", offsets)
    _check_tensor("cu_seqlens_k", call.cu_seqlens_k, q)
    _check_int32("cu_seqlens_k", call.cu_seqlens_k, q, "batch + 1", offsets)
    _check_int32("seqused_q", call.seqused_q, q, "batch", offsets - 1)
    _check_int32("seqused_k", call.seqused_k, q, "batch", offsets - 1)
    _check_sink(call.learnable_sink, q)
    _check_range("max_seqlen_q", max_seqlen_q)
    _check_range("max_seqlen_k", max_seqlen_k)
    # Without a bound the keys' dimension of mask and bias stands as it is.
    dims = {"nheads": nheads, "total_q": total_q, "max_seqlen_k": max_seqlen_k}
    _check_mask(call.mask, q, dims, offsets - 1)
    _check_bias(call.bias, q, dims)
    longest_q = total_q if max_seqlen_q is None else max_seqlen_q
    longest_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    return AttentionInputs(*call[:NUM_TENSORS], longest_q, longest_k)


def check_rows(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> None:
    """Checks packed q, k and v whose offsets are no tensors, and the sink, as ``check`` does."""
    _check_qkv(q, k, v, ("rows", "nheads", "d"), ("rows_k", "nheads_k", "d"))
    _check_sink(sink, q)


def check_type_of_block_mask(block_mask: Any) -> None:
    """Checks what has to hold before its sizes can be asked for."""
    if not isinstance(block_mask, BlockMask):
        advice = ""
        if type(block_mask).__name__ == "BlockMask":
            advice = "; BlockMask.from_flex takes FlexAttention's"
        elif isinstance(block_mask, Tensor):
            advice = "; BlockMask.from_dense, from_blocks and from_indices take tensors"
        raise TypeError(f"block_mask: expected a flash_attn_cute.BlockMask, got {type(block_mask).__name__}{advice}")


def _check_promise(block_mask: BlockMask, options: Options) -> None:
    """Refuses block masks under which a document's bits depend on where it is.

    Those that are equivalent to a window or to documents do not come here where ``lowering`` takes them for such.
    """
    if options.packing_invariant:
        raise ValueError(
            'block_mask: expected None, a window or documents with deterministic="invariant", as blocks are counted '
            "from the first row of all, wherever a document begins (documents that follow each other, with ids for "
            "each entry of a dense batch; neither beside seqused, nor documents beside mask or bias, nor documents "
            f"and padding beside learnable_sink), got {block_mask}"
        )


def _check_block_mask(block_mask: BlockMask, inputs: AttentionInputs, device: torch.device) -> None:
    """Checks a block mask against the tensors of a valid call, which are on a device."""
    check_type_of_block_mask(block_mask)
    q, k, sizes = inputs.q, inputs.k, block_mask.sizes
    lengths = q.shape[-3], k.shape[-3]
    if statically_true(sizes.seqlen_q != lengths[0]) or statically_true(sizes.seqlen_k != lengths[1]):
        names = "(total_q, total_k)" if inputs.packed else "(seqlen_q, seqlen_k)"
        raise ValueError(f"block_mask: expected one over {names} = {lengths}, got one over {tuple(sizes[2:])}")
    batch = 1 if inputs.packed else q.shape[0]
    if sizes.batch != 1 and statically_true(sizes.batch != batch):
        expected = "1" if inputs.packed else f"1 or {batch}"
        raise ValueError(f"block_mask: expected a batch of {expected}, got {sizes.batch}")
    nheads, nheads_k = q.shape[-2], k.shape[-2]
    # Dynamo finds no number among symbols, so that `in` would not do.
    if all(statically_true(sizes.heads != n) for n in (1, nheads, nheads_k)):
        raise ValueError(f"block_mask: expected 1, nheads = {nheads} or nheads_k = {nheads_k} heads, got {sizes.heads}")
    if all(statically_true(block_mask.order_sets[1] != n) for n in (1, nheads_k)):
        raise ValueError(
            f"block_mask: expected an order for each of the {nheads_k} key heads, or one for all, got "
            f"{block_mask.order_sets[1]}; with_order(..., group={nheads // nheads_k}) makes heads of a group share one"
        )
    if block_mask.selection_block:
        for name, x in (("mask", inputs.mask), ("bias", inputs.bias)):
            if x is not None:
                raise ValueError(f"{name}: expected None beside BlockMask.from_selection, got a tensor")
    if block_mask.device is not None and block_mask.device != device:
        raise ValueError(f"block_mask: expected the device of q, {device}, got {block_mask.device}")


def check_bounds(max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int | None, int | None]:
    """The types of both bounds of a packed call checked; see ``check_max_seqlen``."""
    return check_max_seqlen("max_seqlen_q", max_seqlen_q), check_max_seqlen("max_seqlen_k", max_seqlen_k)


def check_max_seqlen(name: str, value: int | Tensor) -> int | None:
    """The type of one bound of a packed call checked; None for a tensor, which may be on the device and is never read.

    Whether an int is in range can wait for ``check``, to which not every call comes.
    """
    if type(value) is int:
        return value
    if isinstance(value, Tensor):
        if value.ndim or value.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: expected an int or a 0-d int32 or int64 tensor, "
                f"got {value.dtype} of shape {tuple(value.shape)}"
            )
        return None
    return check_int(name, value, "an int or a 0-d tensor")


def _check_range(name: str, bound: int | None) -> None:
    if bound is not None and (statically_true(bound < 0) or statically_true(bound > _MAX_INT32)):
        raise ValueError(f"{name}: expected 0 to {_MAX_INT32}, got {bound}")


def _as_float(name: str, value: Any, expected: str) -> float:
    if type(value) is float and abs(value) <= _LARGEST:
        return value
    if type(value) not in _FLOATS and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{name}: expected {expected}, got {value}")
    return number


def _check_window(window_size: Window) -> Window:
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(f"window_size: expected {_WINDOW}, got {window_size!r}")
    if len(window_size) != 2:
        raise ValueError(f"window_size: expected {_WINDOW}, got {window_size!r}")
    left, right = window_size
    return _check_side(left, window_size), _check_side(right, window_size)


def _check_side(side: int | None, window_size: Window) -> int | None:
    """One side of the window; None if it is unbounded."""
    if side is None:
        return None
    width = as_int(side)
    if width is None:
        raise TypeError(f"window_size: expected {_WINDOW}, got {window_size!r}")
    return width if 0 <= width < _MAX_INT32 else None


def _check_tensor(name: str, x: object, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        nested = " nested tensor, which flash_attn_func takes as q, k and v in the jagged layout" if x.is_nested else ""
        raise TypeError(f"{name}: expected a strided tensor, got {x.layout}{nested}")
    if x.device != q.device:
        raise ValueError(f"{name}: expected the device of q, {q.device}, got {x.device}")
    if type(x) not in _PLAIN_TYPES and not _is_its_storage(type(x)):
        raise TypeError(
            f"{name}: expected a plain tensor, got {type(x).__name__}, a subclass with functions of its own, which may "
            "mean something else than what it stores; .as_subclass(torch.Tensor) takes what it stores"
        )


def _is_its_storage(kind: Any) -> bool:
    """Whether PyTorch's own functions act on tensors of a class, and no ``__torch_function__`` of the class."""
    function = kind.__torch_function__
    own = getattr(function, "__func__", None) is not _TORCH_FUNCTION
    return function is torch._C._disabled_torch_function_impl or not own


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, q_dims: tuple[str, ...], k_dims: tuple[str, ...]) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"q: expected a torch.Tensor, got {type(q).__name__}")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q: expected float16, bfloat16, float32 or float64, got {q.dtype}")
    v_dims = (*k_dims[:-1], "d_v")
    for name, x, dims in (("q", q, q_dims), ("k", k, k_dims), ("v", v, v_dims)):
        _check_tensor(name, x, q)
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}")
        if x.ndim != len(dims):
            raise ValueError(f"{name}: expected shape ({', '.join(dims)}), got shape {tuple(x.shape)}")
        if x.shape[-1] == 0 or x.shape[-2] == 0:
            raise ValueError(
                f"{name}: expected at least one head and a head dimension of at least 1, got shape {tuple(x.shape)}"
            )
        if x.shape[-1] != 1 and x.stride(-1) != 1:
            raise ValueError(f"{name}: expected a contiguous last dimension (stride 1), got strides {x.stride()}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected the head dimension of q, {q.shape[-1]}, got shape {tuple(k.shape)}")
    if any(_differ(got, expected) for got, expected in zip(v.shape[:-1], k.shape[:-1], strict=True)):
        raise ValueError(
            f"v: expected the shape of k but for the last dimension, {tuple(k.shape[:-1])}, got shape {tuple(v.shape)}"
        )
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"k: expected a number of heads that divides the {q.shape[-2]} heads of q, got {k.shape[-2]}")


def _differ(got: int, expected: int) -> bool:
    """Whether two sizes differ, so far as is known.

    Under tracing sizes may come from data, as from ``nonzero()``. Then the traced program compares them when it runs.
    """
    if statically_true(got != expected):
        return True
    is_equal: bool | torch.SymBool = got == expected
    if torch.compiler.is_compiling() or isinstance(is_equal, torch.SymBool):
        torch._check(is_equal)
    return False


def _check_int32(name: str, x: Tensor | None, q: Tensor, dim: str, length: int) -> None:
    if x is None:
        return
    _check_tensor(name, x, q)
    if x.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {x.dtype}")
    if x.ndim != 1 or _differ(x.shape[0], length):
        raise ValueError(f"{name}: expected shape ({dim},) = ({length},), got shape {tuple(x.shape)}")


def _check_sink(sink: Tensor | None, q: Tensor) -> None:
    if sink is None:
        return
    _check_float("learnable_sink", sink, q)
    if sink.ndim != 1 or sink.shape[0] != q.shape[-2]:
        raise ValueError(f"learnable_sink: expected shape (nheads,) = ({q.shape[-2]},), got shape {tuple(sink.shape)}")


def _check_mask(mask: Tensor | None, q: Tensor, dims: Mapping[str, int | None], batch: int) -> None:
    if mask is None:
        return
    _check_tensor("mask", mask, q)
    # A mask with a row a sequence was meant to mark padding.
    looks_padded = mask.ndim == 2 and statically_true(mask.shape[0] == batch)
    on_padding = _ON_PADDING["batch" in dims] if looks_padded else ""
    if mask.dtype != torch.bool:
        also = (
            "an additive mask goes into bias" if mask.is_floating_point() else "mask.bool() is True where it is not 0"
        )
        raise TypeError(f"mask: expected bool (True = may attend), got {mask.dtype}; {also}{on_padding}")
    _check_broadcast("mask", mask, dims, on_padding)


def _check_bias(bias: Tensor | None, q: Tensor, dims: Mapping[str, int | None]) -> None:
    if bias is None:
        return
    _check_float("bias", bias, q)
    _check_broadcast("bias", bias, dims)


def _check_float(name: str, x: Tensor, q: Tensor) -> None:
    _check_tensor(name, x, q)
    if x.dtype not in (torch.float32, q.dtype):
        raise TypeError(f"{name}: expected float32 or the dtype of q, {q.dtype}, got {x.dtype}")


def _check_broadcast(name: str, x: Tensor, dims: Mapping[str, int | None], advice: str = "") -> None:
    """Checks that x broadcasts to dims, a name and a size each; a size of None fits everything."""
    sizes = list(dims.values())
    aligned = sizes[max(0, len(sizes) - x.ndim) :]
    fits = x.ndim <= len(sizes) and all(
        expected is None or not (statically_true(got != expected) and statically_true(got != 1))
        for got, expected in zip(x.shape, aligned, strict=False)
    )
    if not fits:
        shown = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(
            f"{name}: expected a shape that broadcasts to ({', '.join(dims)}) = ({shown}), "
            f"got shape {tuple(x.shape)}{advice}"
        )
