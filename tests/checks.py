"""Random calls, running them through the public functions, and comparing with the oracle."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from tests import oracle
from tests.oracle import Call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

GRADS = ("q", "k", "v", "bias", "learnable_sink")


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

    def score_shape(kept: Sequence[int]) -> list[int]:
        longest_k = max(lengths_k, default=0)
        full = (nheads, *rows[0], longest_k) if packed else (batch, nheads, rows[0][1], rows[1][1])
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
    return call


def poison_padding(call: Call, values: Sequence[float] = (torch.nan, torch.inf, -torch.inf)) -> None:
    """Fills the padding rows of q, k and v, and of a packed bias, in place."""
    real_q, real_k = (real.to(call.q.device) for real in call.real_rows())
    with torch.no_grad():
        for x, real in ((call.q, real_q), (call.k, real_k), (call.v, real_k)):
            x[~real] = _cycle(x[~real], values)
        by_row = call.bias is not None and call.bias.ndim > 1 and call.bias.shape[-2] > 1
        if call.bias is not None and call.cu_seqlens_q is not None and by_row:
            call.bias[..., ~real_q, :] = _cycle(call.bias[..., ~real_q, :], values)


def _cycle(x: Tensor, values: Sequence[float]) -> Tensor:
    period = torch.tensor(values, dtype=x.dtype, device=x.device)
    return period.repeat(x.numel() // len(values) + 1)[: x.numel()].view_as(x)


def run(call: Call, **options: Any) -> Any:
    """The call through the public function it belongs to."""
    fields = {name: value for name, value in vars(call).items() if name not in ("q", "k", "v")}
    cu_q, cu_k = fields.pop("cu_seqlens_q"), fields.pop("cu_seqlens_k")
    if cu_q is None:
        return flash_attn_func(call.q, call.k, call.v, **fields, **options)
    bound_q = max((rows.stop - rows.start for _, rows, _ in call.sequences()), default=0)
    bound_k = max((rows.stop - rows.start for _, _, rows in call.sequences()), default=0)
    return flash_attn_varlen_func(call.q, call.k, call.v, cu_q, cu_k, bound_q, bound_k, **fields, **options)


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
    """A random gradient of out, its padding rows NaN."""
    dout = torch.randn(out.shape, dtype=torch.float64).to(out.device, out.dtype)
    dout[~call.real_rows()[0].to(out.device)] = torch.nan
    return dout


def assert_matches_oracle(call: Call, *, through_lse: bool = False, **options: Any) -> None:
    """Runs the call forward and backward and compares every result with the oracle, padding included."""
    out, lse = run(call, return_lse=True, **options)
    assert out.requires_grad
    assert lse.requires_grad
    dout = poisoned_dout(call, out)
    dlse = None
    if through_lse:
        dlse = torch.randn_like(lse)
    results = {"out": out, "lse": lse, **gradients(call, out, lse, dout, dlse)}

    truth = call.to(torch.float64)
    true_out, true_lse = oracle.attention(truth)
    expected = {"out": true_out, "lse": true_lse, **gradients(truth, true_out, true_lse, dout, dlse)}

    low = call.to(call.q.dtype)
    low_out, low_lse = oracle.attention(low)
    yardstick = {"out": low_out, "lse": low_lse, **gradients(low, low_out, low_lse, dout, dlse)}

    factor = 3.0 if call.softcap else 2.0
    sizes = {name: x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0 for name, x in expected.items()}
    largest_gradient = max(size for name, size in sizes.items() if name.startswith("d"))
    for name, got in results.items():
        size = largest_gradient if name.startswith("d") else sizes[name]
        assert_close(name, got, expected[name], yardstick[name], factor, max(1.0, size))
    real_q, real_k = (real.to(out.device) for real in call.real_rows())
    for name, real in (("out", real_q), ("dq", real_q), ("dk", real_k), ("dv", real_k)):
        assert (results[name][~real] == 0).all(), f"{name}: padding rows are not zero"
    assert lse.transpose(-1, -2)[~real_q].isneginf().all(), "lse: padding rows are not -inf"


def assert_blind_queries_reach_nothing(call: Call, *, through_lse: bool = False, **options: Any) -> None:
    """NaN and infinities where a query sees no key, in q and in every gradient that comes in: as good as zeros there.

    The same bits, which takes sequences of no more than two tiles of keys: dq is a sum in no order. With a sink the lse
    of such a query is the sink's, and so is its gradient.
    """
    blind = call.blind_rows().to(call.q.device)
    assert blind.any()
    assert not blind.all()
    out, lse = run(call, return_lse=True, **options)
    dout = poisoned_dout(call, out)
    dlse = torch.randn_like(lse) if through_lse else None
    results = []
    for fill in ((0.0,), (torch.nan, torch.inf, -torch.inf)):
        copy = call.to(call.q.dtype)
        with torch.no_grad():
            copy.q[blind] = _cycle(copy.q[blind], fill)
        dout[blind] = _cycle(dout[blind], fill)
        if dlse is not None:
            by_row = dlse.transpose(-1, -2)
            by_row[blind] = _cycle(by_row[blind], fill)
        out, lse = run(copy, return_lse=True, **options)
        results.append({"out": out, "lse": lse, **gradients(copy, out, lse, dout, dlse)})
    zeros, poisoned = results
    if through_lse:
        zeros.pop("dlearnable_sink", None)
    for name, expected in zeros.items():
        assert bitwise_equal(poisoned[name], expected), f"{name} depends on queries that see no key"
    assert (poisoned["out"][blind] == 0).all()
    assert (poisoned["dq"][blind] == 0).all()


def assert_close(name: str, got: Tensor, expected: Tensor, low: Tensor, factor: float, size: float) -> None:
    """The tolerance rule: within ``factor`` times the error of plain PyTorch at the low precision, and rounding.

    Infinite elements (the lse of a query that sees no key) must agree exactly. Exact results can be differences in
    which large terms cancel; the error of those is in proportion to ``size``, the largest element of the result or of
    all gradients. In float32 the order of the sums shows beside the rounding. And the largest error among a few
    elements says little about another few. Each gets room for that.
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
        bound += 64 * torch.finfo(torch.float32).eps * size
        if low.dtype == torch.float32:
            bound *= 2
        elif true.numel() < 64:
            bound = 2 * bound + 4 * torch.finfo(low.dtype).eps * size
    assert error <= bound, f"{name}: error {error:.3g} above the bound {bound:.3g}"  # NaN fails too


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, which tell NaNs and signed zeros apart."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN and signed zeros included."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))
