"""Random calls, running them through the public functions, and comparing with the oracle."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_cute.calls import dispatch
from flash_attn_cute.kernels.registry import architecture_for
from tests.lib import oracle
from tests.lib.oracle import Call

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
# Of this machine's GPU, if there are kernels for it.
GPU_ARCHITECTURE = None if CAPABILITY is None else architecture_for(CAPABILITY)
if GPU_ARCHITECTURE is not None:
    # What tests call sm90 are the kernels of this GPU, and calls that name no backend get them. That is here and not in
    # conftest, which processes that tests start do not import.
    dispatch.BACKENDS["sm90"] = dispatch.BACKENDS[GPU_ARCHITECTURE]
needs_kernels = pytest.mark.skipif(GPU_ARCHITECTURE is None, reason="needs a Hopper or Blackwell GPU")


def hopper_alone(why: str) -> pytest.MarkDecorator:
    """Marks tests that Blackwell's kernels cannot pass, or that say nothing of them, and why."""
    return pytest.mark.skipif(GPU_ARCHITECTURE != "sm90", reason=f"needs a Hopper GPU: {why}")


# What each backend is tested on, where one test serves all.
DEVICES = {"portable": "cpu", "sm90": "cuda"}
DTYPES = {"portable": torch.float32, "sm90": torch.bfloat16}
on_each_backend = pytest.mark.parametrize("backend", ["portable", pytest.param("sm90", marks=needs_kernels)])


def each_of(name: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrises an argument of this name with each case."""
    return pytest.mark.parametrize(name, cases.values(), ids=cases)


packed_or_dense = pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])

Results = dict[str, Tensor]

GRADS = ("q", "k", "v", "bias", "learnable_sink")

# How a mask or bias may lie in memory; see ``laid_out``.
LAYOUTS = ("contiguous", "transposed", "expanded", "sliced")


def offsets(slots: Sequence[int], start: int = 0, device: str = "cpu") -> Tensor:
    """The cu_seqlens of slots of these sizes, the first one beginning at row ``start``."""
    return torch.tensor([start, *slots], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def random_call(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    nheads: int = 2,
    nheads_k: int | None = None,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    packed: bool = True,
    seqused: bool = False,
    sink: bool = False,
    mask: Sequence[int] | None = None,
    bias: Sequence[int] | None = None,
    mask_layout: str = "contiguous",
    bias_layout: str = "contiguous",
    dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
    device: str = "cpu",
    generator: torch.Generator | None = None,
    **options: Any,
) -> Call:
    """A call with fresh random tensors, its padding filled with NaN and infinities.

    Args:
        lengths_q: real queries of each sequence.
        lengths_k: real keys of each, if not the same.
        nheads: query heads.
        nheads_k: key heads, if not the same.
        head_dim: of q and k.
        head_dim_v: of v, if not the same.
        packed: packed sequences or a dense batch (whose lengths must be equal without seqused).
        seqused: slots longer than the real lengths; packed, with rows before the first and behind the last too.
        sink: with a learnable sink.
        mask: 0 and 1 for each dimension the mask could have: 0 broadcasts it. None: no mask.
        bias: likewise.
        mask_layout: one of LAYOUTS.
        bias_layout: likewise.
        dtype: of q, k and v.
        bias_dtype: of bias and sink, if not the same.
        device: where.
        generator: the source of randomness.
        options: the remaining fields of the call.
    """
    g = torch.Generator().manual_seed(torch.initial_seed()) if generator is None else generator
    lengths_k = lengths_q if lengths_k is None else lengths_k
    nheads_k = nheads if nheads_k is None else nheads_k
    batch = len(lengths_q)
    where: dict[str, Any] = {}
    rows: list[tuple[int, ...]] = []
    for side, lengths in (("q", lengths_q), ("k", lengths_k)):
        slack = [int(torch.randint(0, 4, (), generator=g)) if seqused else 0 for _ in lengths]
        slots = [length + extra for length, extra in zip(lengths, slack, strict=True)]
        if packed:
            start, end = (2, 3) if seqused else (0, 0)
            where[f"cu_seqlens_{side}"] = offsets(slots, start, device)
            rows.append((start + sum(slots) + end,))
        else:
            rows.append((batch, max(slots, default=0)))
            assert seqused or len(set(lengths)) <= 1
        if seqused:
            where[f"seqused_{side}"] = torch.tensor(lengths, dtype=torch.int32, device=device)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device, dtype).requires_grad_()

    longest_k = max(lengths_k, default=0)
    full = (nheads, *rows[0], longest_k) if packed else (batch, nheads, rows[0][1], rows[1][1])

    def score_shape(kept: Sequence[int]) -> list[int]:
        return [size if keep else 1 for size, keep in zip(full[len(full) - len(kept) :], kept, strict=True)]

    call = Call(
        q=normal(*rows[0], nheads, head_dim),
        k=normal(*rows[1], nheads_k, head_dim),
        v=normal(*rows[1], nheads_k, head_dim if head_dim_v is None else head_dim_v),
        learnable_sink=normal(nheads, dtype=bias_dtype or dtype) if sink else None,
        mask=None if mask is None else (torch.rand(score_shape(mask), generator=g) < 0.7).to(device),
        bias=None if bias is None else normal(*score_shape(bias), dtype=bias_dtype or dtype),
        **where,
        **options,
    )
    poison_padding(call)
    if call.mask is not None:
        call.mask = laid_out(call.mask, mask_layout, full)
    if call.bias is not None:
        call.bias = laid_out(call.bias.detach(), bias_layout, full).requires_grad_()
    return call


def laid_out(x: Tensor, layout: str, full: Sequence[int]) -> Tensor:
    """A mask or bias with the same numbers in another place.

    Args:
        x: the mask or bias.
        layout: "contiguous"; "transposed", keys the furthest from each other; "expanded", broadcast dimensions at their
            full size, with a stride of 0; "sliced", from the second element of rows of an odd length on, NaN (or what
            is neither True nor False) between them.
        full: the shape that it broadcasts to.
    """
    if layout == "transposed" and x.ndim:
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "expanded":
        return x.expand(full[len(full) - x.ndim :])
    if layout == "sliced":
        keys = x.shape[-1] if x.ndim else 1
        wide = x.new_zeros(*x.shape[:-1], keys + 1 + keys % 2)
        if x.dtype == torch.bool:
            wide.view(torch.uint8).fill_(7)
        else:
            wide.fill_(torch.nan)
        part = wide[..., 1 : keys + 1] if x.ndim else wide[1]
        return part.copy_(x)
    return x.contiguous()


def poison_padding(call: Call, values: Sequence[float] = (torch.nan, torch.inf, -torch.inf)) -> None:
    """Fills the padding rows of q, k and v and the padding of bias, in place, and that of mask with random bytes."""
    real_q, real_k = (real.to(call.q.device) for real in call.real_rows())
    with torch.no_grad():
        for x, real in ((call.q, real_q), (call.k, real_k), (call.v, real_k)):
            x[~real] = _cycle(x[~real], values)
        if call.bias is not None:
            padding = call.score_padding(call.bias).to(call.bias.device)
            call.bias[padding] = _cycle(call.bias[padding], values)
        if call.mask is not None:
            padding, as_bytes = call.score_padding(call.mask).to(call.mask.device), call.mask.view(torch.uint8)
            as_bytes[padding] = torch.randint_like(as_bytes[padding], 256)


def _cycle(x: Tensor, values: Sequence[float]) -> Tensor:
    period = torch.tensor(values, dtype=x.dtype, device=x.device)
    return period.repeat(x.numel() // len(values) + 1)[: x.numel()].view_as(x)


def run(call: Call, **options: Any) -> Any:
    """The call through the public function it belongs to."""
    fields = {name: value for name, value in vars(call).items() if name not in ("q", "k", "v")}
    cu_q, cu_k = fields.pop("cu_seqlens_q"), fields.pop("cu_seqlens_k")
    fields.pop("shown")  # for the oracle
    if cu_q is None:
        return flash_attn_func(call.q, call.k, call.v, **fields, **options)
    return flash_attn_varlen_func(call.q, call.k, call.v, cu_q, cu_k, **fields | longest(call), **options)


def longest(call: Call) -> dict[str, int]:
    """The lengths of the longest sequences of a call, by the names of arguments."""
    sequences = call.sequences()
    return {
        "max_seqlen_q": max((rows.stop - rows.start for _, rows, _ in sequences), default=0),
        "max_seqlen_k": max((rows.stop - rows.start for _, _, rows in sequences), default=0),
    }


def gradients(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """The gradients of every input that has one."""
    leaves = {name: getattr(call, name) for name in GRADS if getattr(call, name) is not None}
    outputs = [(x, g) for x, g in ((out, dout), (lse, dlse)) if g is not None and x.requires_grad]
    if not outputs:  # the oracle of an empty batch depends on nothing
        return {f"d{name}": torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(
        [x for x, _ in outputs], list(leaves.values()), [g.to(x.dtype) for x, g in outputs], allow_unused=True
    )
    return {
        f"d{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def poisoned_dout(call: Call, out: Tensor) -> Tensor:
    """A random gradient of out, its padding rows filled with NaN and infinities."""
    # Columns change places: if the call was drawn from the same seed, and nothing since, dout would be q.
    dout = torch.randn(out.shape, dtype=torch.float64).flip(-1).to(out.device, out.dtype)
    padding = ~call.real_rows()[0].to(out.device)
    dout[padding] = _cycle(dout[padding], (torch.nan, torch.inf, -torch.inf))
    return dout


def assert_matches_oracle(call: Call, *, through_lse: bool = False, **options: Any) -> None:
    """Runs the call forward and backward and compares every result with the oracle, padding included."""
    out, lse, *max_logits = run(call, return_lse=True, **options)
    assert out.requires_grad
    assert lse.requires_grad
    assert (out.dtype, lse.dtype) == (call.q.dtype, torch.promote_types(call.q.dtype, torch.float32))
    for x in max_logits:
        assert_max_logits_close(x, call)
    assert_right(call, out, lse, through_lse=through_lse)


def assert_right(
    call: Call, out: Tensor, lse: Tensor | None, *, through_lse: bool = False, truth: Call | None = None
) -> None:
    """Compares results of a call, and its gradients, with the oracle's of ``truth``, if that knows it as another call.

    Without lse the gradients are those of out alone.
    """
    dout = poisoned_dout(call, out)
    dlse = torch.randn_like(lse) if lse is not None and through_lse else None
    results = {"out": out, **gradients(call, out, out if lse is None else lse, dout, dlse)}
    if lse is not None:
        results["lse"] = lse
    assert_results_close(call, results, dout, dlse, truth)


def references(call: Call, dout: Tensor | None = None, dlse: Tensor | None = None) -> tuple[Results, Results]:
    """The oracle's results in float64, and the yardstick: those in the dtype of the call. Without dout no gradients."""

    def of(dtype: torch.dtype) -> Results:
        each = call.to(dtype)
        with torch.set_grad_enabled(dout is not None):
            out, lse = oracle.attention(each)
        grads = {} if dout is None else gradients(each, out, lse, dout, dlse)
        return {"out": out.detach(), "lse": lse.detach(), **grads}

    return of(torch.float64), of(call.q.dtype)


def assert_results_close(
    call: Call,
    results: Results,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    truth: Call | None = None,
    factor: float | None = None,
) -> None:
    """Compares some results of a call with the oracle's: zeros and -inf in padding and where rows see nothing.

    Args:
        call: what was called.
        results: out, lse or gradients, by name.
        dout: the gradient of out, if there are others among the results.
        dlse: the gradient of lse.
        truth: the call as the oracle knows it, if that is another one.
        factor: see ``assert_close``.
    """
    expected, low = references(truth or call, dout, dlse)
    factor = factor or (3.0 if call.softcap else 2.0)
    sizes = {name: x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for name, x in expected.items()}
    largest_gradient = max((sizes[name] for name in results if name.startswith("d")), default=0.0)
    for name, got in results.items():
        size, room = largest_gradient if name.startswith("d") else sizes[name], 0.0
        if name == "dbias" and dout is not None and (got.ndim == 0 or got.shape[-1] == 1):
            room = rounding_over_keys(got.shape, low["out"] - expected["out"], dout)
        assert_close(name, got, expected[name], low[name], factor, max(1.0, size), room)
    assert_padding_is_zero(call, results)
    fully_masked = (expected["out"] == 0).all(-1)  # rows and heads, also beside a sink, whose logit is lse there
    for name in results.keys() & {"out", "dq"}:
        assert (results[name][fully_masked] == 0).all(), f"{name}: not zero where a query sees no key"
    for name in results.keys() & {"dk", "dv"}:
        hidden = (expected["dk"] == 0).all(-1) & (expected["dv"] == 0).all(-1)
        assert (results[name][hidden] == 0).all(), f"{name}: not zero where no query sees a key"


def assert_max_logits_close(max_logits: Tensor, call: Call) -> None:
    """The largest logits of a call, of which none has a gradient, against the oracle's.

    A product is summed in float32, whose error is in proportion to the lengths of its vectors. Kernels take exp2 and
    log2 of it, whose error is absolute.
    """
    assert not max_logits.requires_grad
    with torch.no_grad():
        expected = oracle.max_logits(call.to(torch.float64))
        real_q, real_k = (real.to(call.q.device) for real in call.real_rows())
        lengths = (x[real].double().norm(dim=-1) for x, real in ((call.q, real_q), (call.k, real_k)))
        size = math.prod(x.max().item() if x.numel() else 0.0 for x in lengths)
    size *= call.q.shape[-1] ** -0.5 if call.softmax_scale is None else abs(call.softmax_scale)
    assert max_logits.shape == expected.shape
    assert max_logits.dtype == torch.promote_types(call.q.dtype, torch.float32)
    is_finite = expected.isfinite()
    assert torch.equal(max_logits.double()[~is_finite], expected[~is_finite])
    error = (max_logits.double() - expected)[is_finite].abs()
    assert (error <= 8 * torch.finfo(max_logits.dtype).eps * (size + 1)).all(), f"max_logits: error {error}"


def rounding_over_keys(shape: torch.Size, error: Tensor, dout: Tensor) -> float:
    """How far from the truth the gradient of a bias may be that is the same for all keys of a query.

    What all keys of a query get together is zero (or what lse and a sink leave), but for the rounding of out. Of
    queries that share a bias that is a sum of independent errors, whose root mean square follows from an error of out:
    four times that.
    """
    by_row = (error * dout.double().nan_to_num(0.0)).sum(-1).transpose(-1, -2)[..., None]
    squares = by_row.square().sum_to_size((1,) * (by_row.ndim - len(shape)) + shape)
    return 4.0 * squares.max().sqrt().item() if squares.numel() else 0.0


def assert_padding_reaches_nothing(call: Call, **options: Any) -> None:
    """NaN, infinities and large numbers in padding give the bits that zeros give, and exact zeros where they stand.

    No sequence may have more than two tiles of keys, or determinism has to be asked for: dq is a sum in no order.
    """
    expected = padded_results(refilled(call, (0.0,)), 0.0, **options)
    assert_padding_is_zero(call, expected)
    for fill in (torch.nan, torch.inf, 1e4):
        for name, got in padded_results(refilled(call, (fill, -fill)), fill, **options).items():
            assert bitwise_equal(got, expected[name]), f"{name} depends on padding of {fill}"


def assert_padding_is_zero(call: Call, results: Results) -> None:
    """Padding of results is exactly zero, and -inf in lse."""
    real_q, real_k = (real.to(call.q.device) for real in call.real_rows())
    for name, real in (("out", real_q), ("dq", real_q), ("dk", real_k), ("dv", real_k)):
        if name in results:
            assert (results[name][~real] == 0).all(), f"{name}: padding rows are not zero"
    if "lse" in results:
        assert results["lse"].transpose(-1, -2)[~real_q].isneginf().all(), "lse: padding rows are not -inf"
    if "dbias" in results:
        padding = call.score_padding(call.bias).to(call.q.device)
        assert (results["dbias"][padding] == 0).all(), "dbias: padding is not zero"


def assert_fully_masked_queries_reach_nothing(call: Call, *, through_lse: bool = False, **options: Any) -> None:
    """``assert_rows_reach_nothing`` of the queries that the window lets see no key, if these are some of all."""
    fully_masked = call.fully_masked_rows().to(call.q.device)
    assert fully_masked.any()
    assert not fully_masked.all()
    keys = torch.zeros(call.k.shape[:-2], dtype=torch.bool, device=fully_masked.device)
    assert_rows_reach_nothing(call, fully_masked, keys, through_lse=through_lse, **options)


def assert_rows_reach_nothing(
    call: Call, queries: Tensor, keys: Tensor, *, through_lse: bool = False, **options: Any
) -> None:
    """NaN and infinities in rows of q, k, v and of every gradient that comes in: as good as zeros there.

    The same bits, which takes sequences of no more than two tiles of keys, or determinism: dq is a sum in no order.
    With a sink the lse of a query that sees nothing is the sink's, and so is its gradient.

    Args:
        call: what is called.
        queries: which rows of q, and of the gradients of out and lse.
        keys: which rows of k and v.
        through_lse: whether lse has a gradient.
        options: more arguments of the call.
    """
    out, lse = run(call, return_lse=True, **options)
    dout = poisoned_dout(call, out)
    dlse = torch.randn_like(lse) if through_lse else None
    by_row = [dout] if dlse is None else [dout, dlse.transpose(-1, -2)]
    results = []
    for fill in ((0.0,), (torch.nan, torch.inf, -torch.inf)):
        copy = call.to(call.q.dtype)
        with torch.no_grad():
            for x, rows in ((copy.q, queries), (copy.k, keys), (copy.v, keys), *((x, queries) for x in by_row)):
                x[rows] = _cycle(x[rows], fill)
        out, lse = run(copy, return_lse=True, **options)
        results.append({"out": out, "lse": lse, **gradients(copy, out, lse, dout, dlse)})
    zeros, poisoned = results
    if through_lse:
        zeros.pop("dlearnable_sink", None)
    for name, expected in zeros.items():
        assert bitwise_equal(poisoned[name], expected), f"{name} depends on rows that reach nothing"
    for name, rows in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys)):
        assert (poisoned[name][rows] == 0).all(), f"{name}: not zero in rows that reach nothing"


def assert_close(
    name: str, got: Tensor, expected: Tensor, low: Tensor, factor: float, size: float, room: float = 0.0
) -> None:
    """The tolerance rule: within ``factor`` times the error of plain PyTorch at the low precision, and rounding.

    Infinite elements (the lse of a query that sees no key) must agree exactly. Exact results can be differences in
    which large terms cancel; the error of those is in proportion to ``size``, the largest element of the result or of
    all gradients. In float32 the order of the sums shows beside the rounding. And the largest error among a few
    elements (zeros have none) says little about another few; nor does it among the elements of a few rows, if these
    have one error in common, as a row of dq does that of its delta. Each gets room for that, and what else is known to
    be needed as ``room``.
    """
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    infinite = expected.isinf()
    assert torch.equal(got.double()[infinite], expected[infinite]), f"{name}: infinite elements differ"
    got_f, true, low_f = got.double()[~infinite], expected[~infinite], low.double()[~infinite]
    if not true.numel():
        return
    error = (got_f - true).abs().max().item()
    if got.dtype == torch.float64:
        bound = 1e-11 * size
    else:
        rounded = (true.to(low.dtype) + 0.3) - 0.3
        bound = factor * (low_f - true).abs().max().item() + 2 * (rounded.double() - true).abs().max().item()
        # The sums are in float32 whatever the dtype.
        bound += 64 * torch.finfo(torch.float32).eps * size + room
        if low.dtype == torch.float32:
            bound *= 2
        elif _independent_errors(name, expected) < 64:
            bound = 2 * bound + 4 * torch.finfo(low.dtype).eps * size
    assert error <= bound, f"{name}: error {error:.3g} above the bound {bound:.3g}"  # NaN fails too


def _independent_errors(name: str, expected: Tensor) -> int:
    nonzero = expected != 0
    return int((nonzero.any(-1) if name[:2] in ("dq", "dk") else nonzero & ~expected.isinf()).sum())


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, which differ for NaNs and signed zeros."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN and signed zeros included."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def same_bits(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Whether tensors hold the same bits as others, each as the one in its place."""
    return all(bitwise_equal(a, b) for a, b in zip(one, other, strict=True))


def with_gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor | None = None) -> tuple[Tensor, ...]:
    """Out, and the gradients of leaves by a gradient of it; by ones, if none is given."""
    return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if dout is None else dout)


def assert_alike(
    functions: Iterable[Callable[..., Tensor]],
    arguments: Sequence[Any],
    leaves: Sequence[Tensor],
    *,
    exact: bool = True,
) -> None:
    """Two functions give equal results of arguments, and equal gradients of leaves, or close ones."""
    one, other = (function(*arguments) for function in functions)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    if leaves:
        dout, given = torch.randn_like(one), {"rtol": 0.0, "atol": 0.0} if exact else {}
        grads = (torch.autograd.grad(out, leaves, dout) for out in (one, other))
        torch.testing.assert_close(*grads, **given)  # type: ignore[arg-type]


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], Any]:
    """A function that is compiled as one graph, and what counts how often."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def assert_compiles(
    function: Callable[..., Tensor],
    calls: Iterable[Sequence[Any]],
    most: int,
    backend: str = "aot_eager",
    *,
    exact: bool = True,
) -> None:
    """A function is compiled at most so many times for all calls, and alike in each, gradients of leaves included."""
    step, counter = compiled(function, backend)
    for arguments in calls:
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        assert_alike((step, function), arguments, leaves, exact=exact)
    assert 1 <= counter.frame_count <= most


def refilled(call: Call, values: tuple[float, ...]) -> Call:
    """A copy of the call as fresh leaves, its padding holding other values."""
    names = [n for n in ("q", "k", "v", "bias", "learnable_sink") if getattr(call, n) is not None]
    copy = replace(call, **{n: getattr(call, n).detach().clone().requires_grad_() for n in names})
    poison_padding(copy, values)
    return copy


def padded_results(call: Call, padding_of_dout: float, **options: Any) -> Results:
    """Both passes' results, for a gradient of out that is always the same but for its padding."""
    out, lse = run(call, return_lse=True, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    dout[~call.real_rows()[0].to(out.device)] = padding_of_dout
    return {"out": out, "lse": lse, **gradients(call, out, lse, dout, None)}


def both_passes(call: Call, dout: Tensor, **options: Any) -> Callable[[], Results]:
    """A function that runs both passes of a call again and again, and never waits for the device."""
    given = {name: value for name, value in vars(call).items() if value is not None} | options
    if call.cu_seqlens_q is None:
        attend = partial(flash_attn_func, **given, return_lse=True)
    else:
        attend = partial(flash_attn_varlen_func, **given, **longest(call), return_lse=True)

    def run_both() -> Results:
        out, lse = attend()
        return {"out": out.detach(), "lse": lse.detach(), **gradients(call, out, lse, dout, None)}

    return run_both


def differing(expected: Results, function: Callable[[], Results], repetitions: int) -> list[str]:
    """The results that were not the expected ones to the bit in each of the repetitions."""
    differs = {name: torch.zeros((), dtype=torch.bool, device=x.device) for name, x in expected.items()}
    for _ in range(repetitions):
        for name, x in function().items():
            differs[name] |= (bits(x) != bits(expected[name])).any()
    return [name for name, seen in differs.items() if seen]


def random_lengths(draw: random.Random, batch: int, *, equal: bool) -> tuple[list[int], list[int]]:
    """So many lengths of q and of k, about some tile edge or below it; ``equal``: all of q, and all of k."""

    def lengths() -> list[int]:
        edge = draw.choice([8, 64, 96, 128, 192, 256, 400, 1000])
        return [max(0, draw.choice([draw.randint(0, edge), edge - 1, edge, edge + 1])) for _ in range(batch)]

    lengths_q, lengths_k = lengths(), lengths()
    if draw.random() < 0.5:
        lengths_k = lengths_q
    if equal:
        return lengths_q[:1] * batch, lengths_k[:1] * batch
    return lengths_q, lengths_k


def randomly_strided(draw: random.Random, x: Tensor) -> Tensor:
    """X itself or, with the same values, a slice of a wider tensor that TMA can read or cannot."""
    if draw.random() < 0.7:
        return x.detach()
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 16), torch.nan)
    start = draw.choice([8, 3])
    return wide[..., start : start + x.shape[-1]].copy_(x.detach())


def drawn_call(
    draw: random.Random, lengths: Callable[..., tuple[list[int], list[int]]] = random_lengths, **given: Any
) -> Call:
    """A call of what is given, and of random lengths, padding, heads, scale, dtype and strides.

    Args:
        draw: the source of randomness.
        lengths: draws those of q and of k, as ``random_lengths`` does.
        given: options of ``random_call``. Head dimensions may become 8 less; some of a bias may become -inf.
    """
    batch, nheads_k, group = draw.randint(1, 4), draw.randint(1, 2), draw.choice([1, 1, 2, 3, 4])
    options: dict[str, Any] = {
        "packed": draw.random() < 0.5,
        "seqused": draw.random() < 0.5,
        "nheads": nheads_k * group,
        "nheads_k": nheads_k,
        "dtype": draw.choice([torch.bfloat16, torch.float16]),
        "sink": draw.random() < 0.3,
        "softmax_scale": draw.choice([None, 0.05, -0.2, 0.0]),
        "generator": torch.Generator().manual_seed(draw.randrange(2**31)),
    } | given
    for name in ("head_dim", "head_dim_v"):
        if options.get(name) is not None:
            options[name] -= 8 * draw.choice([0, 0, 1])
    call = random_call(*lengths(draw, batch, equal=not (options["packed"] or options["seqused"])), **options)
    hidden = draw.choice([0.0, 0.0, 0.1, 0.9])
    if call.bias is not None and hidden and call.bias.is_contiguous():
        chosen = torch.rand(call.bias.shape, generator=options["generator"]) < hidden
        with torch.no_grad():
            call.bias[chosen.to(call.bias.device)] = -torch.inf
    leaves: Any = {name: randomly_strided(draw, getattr(call, name)).requires_grad_() for name in "qkv"}
    return replace(call, **leaves)


def small_call(draw: random.Random, lengths: Sequence[int], **given: Any) -> Call:
    """A call of what is given, and of up to three sequences of some of these lengths, small heads and any features."""
    torch.manual_seed(draw.randrange(2**31))
    batch, nheads_k = draw.randint(1, 3), draw.randint(1, 2)
    options: dict[str, Any] = {
        "nheads": nheads_k * draw.randint(1, 3),
        "nheads_k": nheads_k,
        "head_dim": draw.choice([1, 8, 24]),
        "head_dim_v": draw.choice([None, 1, 16]),
        "dtype": draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        "causal": draw.random() < 0.4,
        "window_size": (draw.choice([None, None, 0, 3, 90]), draw.choice([None, -1, 0, 3, 150])),
        "softcap": draw.choice([0.0, 0.0, 2.0, 30.0]),
        "sink": draw.random() < 0.3,
        "seqused": draw.random() < 0.4,
        "packed": draw.random() < 0.5,
    } | given
    differ = options["packed"] or options["seqused"]
    lengths_q, lengths_k = (
        [draw.choice(lengths) for _ in range(batch)] if differ else [draw.choice(lengths)] * batch for _ in range(2)
    )
    return random_call(lengths_q, lengths_k, **options)


fuzz_seed = 0  # of the option --fuzz-seed


def draws(seed: str, seconds: float, least: int = 3) -> Iterator[tuple[int, random.Random]]:
    """Sources of randomness and their numbers, for so many seconds, and some at the least: the first one compiles."""
    stop, count = time.monotonic() + seconds, 0
    while time.monotonic() < stop or count < least:
        count += 1
        print(f"draw {count}")  # shown where it fails
        yield count, random.Random(f"{fuzz_seed} {seed} {count}")


def drawn(case: str, seconds: float) -> Iterator[tuple[int, random.Random]]:
    """Sources of randomness and their numbers, for so many seconds, and one at the least: calls take seconds here."""
    stop = time.monotonic() + seconds
    for count in itertools.count():
        yield count, random.Random(f"{case} {count + (fuzz_seed << 32)}")
        if time.monotonic() > stop:
            break


Case = dict[str, Any]


def each_on(cases: dict[str, Case], one_in: int = 1) -> pytest.MarkDecorator:
    """Parametrises with all cases on a GPU and, on a CPU, with one in so many."""
    portable = itertools.islice(cases.items(), 0, None, one_in)
    return pytest.mark.parametrize(
        ("backend", "case"),
        [
            *(pytest.param("portable", case, id=f"portable-{name}") for name, case in portable),
            *(pytest.param("sm90", case, id=f"sm90-{name}", marks=needs_kernels) for name, case in cases.items()),
        ],
    )


def call_on(backend: str, lengths_q: Sequence[int], lengths_k: Sequence[int] | None = None, **options: Any) -> Call:
    """A random call on the device of a backend, in the dtype that is usual there."""
    given: Case = {"dtype": DTYPES[backend], "device": DEVICES[backend], "nheads": 4, "head_dim": 64}
    return random_call(lengths_q, lengths_k, **given | options)


def call_of(backend: str, case: Case) -> Call:
    """``call_on`` a backend of a case's lengths, or of several around the edges of tiles."""
    may_differ = case.get("packed", True) or case.get("seqused", False)
    lengths = ([200, 1, 0, 130], [300, 5, 7, 0]) if may_differ else ([200] * 2, [300] * 2)
    return call_on(backend, *case.get("lengths", lengths), **{name: x for name, x in case.items() if name != "lengths"})


# Arguments of a call that ``random_call`` does not take.
ASKED = ("through_lse", "deterministic", "return_max_logits", "precise_gradients")


def check_on(backend: str, lengths_q: Sequence[int], lengths_k: Sequence[int] | None = None, **options: Any) -> None:
    """Compares ``call_on`` a backend with the oracle; options may be those of ``ASKED``, too."""
    asked = {name: options.pop(name) for name in ASKED if name in options}
    assert_matches_oracle(call_on(backend, lengths_q, lengths_k, **options), backend=backend, **asked)
