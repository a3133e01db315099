"""Calls that the self-check makes: what each asks for, its tensors, and how results are compared with the truth."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Backend, BackwardCall
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from flash_attn_cute.selfcheck import reference
from flash_attn_cute.selfcheck.reference import Results
from flash_attn_cute.sparsity.block_mask import BlockMask

_CODES = 32  # kinds of keys in exact calls: rows of a Hadamard matrix, orthogonal over so many columns
_POISON = (float("nan"), float("inf"), float("-inf"))


class WrongResultError(Exception):
    """A backend computed something else than the truth."""


@dataclass(frozen=True)
class Sample:
    """Request of one call of the self-check."""

    d: int  # columns of q and k
    d_v: int  # columns of v
    lengths_q: tuple[int, ...]  # real queries of each sequence
    lengths_k: tuple[int, ...] = ()  # real keys of each; empty: as many
    heads: int = 2  # query heads, all different
    heads_k: int = 2  # key heads, all different
    # How often batch entries and heads are repeated, by strides of 0; results have to be copies, too.
    copies: tuple[int, int] = (1, 1)
    packed: bool = False  # packed sequences; dense ones have equal lengths, unless padded
    padded: bool = False  # slots are longer than their sequences (``seqused``), and packed rows follow the last of them
    left: int | None = None  # window_size
    right: int | None = None  # likewise
    softcap: float = 0.0  # likewise an argument of the call
    scale: float | None = None  # softmax_scale
    sink: bool = False  # with a learnable sink
    mask: str = ""  # which dimensions of (batch, heads, queries, keys) a mask has at full size: letters of "bhqk"
    bias: str = ""  # likewise of a bias, which has a gradient
    float32_bias: bool = False  # the bias is float32, not of q's dtype
    blocks: bool = False  # with a block mask
    dtype: torch.dtype = torch.bfloat16  # of q, k and v
    sliced: bool = False  # q, k and v are slices of wider tensors that TMA cannot read
    dlse: bool = False  # lse has a gradient
    # Scores grow towards the last keys, and most in the last 32 of each 128, so that row_max is raised.
    rising: bool = False
    max_logits: bool = False  # the largest logits are asked for
    exact: bool = False  # integers for which every product is exact, and so the results, but for their rounding


@dataclass(frozen=True)
class Drawn:
    """Tensors of a call, without copies, and its truth."""

    sample: Sample
    spec: AttentionSpec
    inputs: AttentionInputs
    shown: Tensor | None  # by a block mask
    dout: Tensor
    dlse: Tensor | None
    is_dry: bool  # nothing is computed, and its results are not compared

    @functools.cached_property
    def truth(self) -> Results:
        """Results in float64, or of a dry call room for them."""
        if not self.is_dry:
            return reference.attention(self.spec, self.inputs, self.shown, self.dout, self.dlse, torch.float64)
        q, k, v, *_ = self.inputs
        return Results(self.dout, q.new_empty(self.inputs.lse_shape, dtype=torch.float32), q, k, v, None, None)

    def forward(self, backend: Backend) -> dict[str, Tensor]:
        """Out and lse, with the copies, and max_logits if the sample has them."""
        found = backend.forward(self.spec, self._copied())._asdict()
        return {name: x for name, x in found.items() if x is not None}

    def backward(self, backend: Backend) -> dict[str, Tensor]:
        """The gradients, with the copies, from the true results of the forward pass."""
        out, lse = self.truth.out.to(self.inputs.q.dtype), self.truth.lse.float()
        out, dout = self._repeat(out, rank=4), self._repeat(self.dout, rank=4)
        lse, dlse = self._repeat(lse, rank=3), None if self.dlse is None else self._repeat(self.dlse, rank=3)
        inputs = self._copied()
        needs = inputs.bias is not None, inputs.learnable_sink is not None
        found = backend.backward(BackwardCall(self.spec, inputs, out, lse.contiguous(), dout, dlse, None, *needs))
        return {name: x for name, x in found._asdict().items() if x is not None}

    def _copied(self) -> AttentionInputs:
        q, k, v = (self._repeat(x, rank=4) for x in self.inputs[:3])
        return self.inputs._replace(q=q, k=k, v=v)

    def _repeat(self, x: Tensor, rank: int) -> Tensor:
        """A tensor of a dense batch with its copies; heads are the last dimension but one, or of lse the second."""
        batch, heads = self.sample.copies
        if (batch, heads) == (1, 1):
            return x
        dim = 2 if rank == 4 else 1
        assert x.shape[0] == 1 or batch == 1, "a sample repeats one batch entry"
        assert x.shape[dim] == 1 or heads == 1, "a sample repeats one head"
        sizes = [-1] * rank
        sizes[0], sizes[dim] = (batch if batch > 1 else -1), (heads if heads > 1 else -1)
        return x.expand(sizes)

    def compare(self, found: dict[str, Tensor]) -> None:
        """Raises WrongResultError if a result is wrong: which one, by how much and what was expected."""
        truth = {name: x for name, x in self.truth._asdict().items() if x is not None}
        bounds = _exact_bounds if self.sample.exact else self._bounds
        single = {name: self._first(name, x) for name, x in found.items()}
        limits = bounds(truth)
        for name, x in single.items():
            _compare(name, x, truth[name], limits[name])
        self._compare_padding(single)

    def _first(self, name: str, x: Tensor) -> Tensor:
        """A result without its copies, which have to have the same bits."""
        if self.sample.copies == (1, 1) or name in ("dbias", "dsink"):
            return x
        batch, heads = self.sample.copies
        dim = 1 if name == "lse" else 2
        first = x[:1] if batch > 1 else x
        first = first.narrow(dim, 0, 1) if heads > 1 else first
        if not torch.equal(bits(x), bits(first).expand_as(x)):
            raise WrongResultError(f"{name}: expected the same bits for {batch * heads} copies of a head")
        return first

    def _bounds(self, truth: dict[str, Tensor]) -> dict[str, Tensor]:
        """How far each result may be from the truth: a multiple of plain PyTorch's error at the dtype.

        Only float32 is behind lse, but for the tanh of a softcap.
        """
        dtype = self.inputs.q.dtype
        low = reference.attention(self.spec, self.inputs, self.shown, self.dout, self.dlse, dtype)._asdict()
        sizes = {name: float(_largest(x)) for name, x in truth.items()}
        gradients = truth.keys() - {"out", "lse", "max_logits"}
        sizes |= dict.fromkeys(gradients, max(sizes[name] for name in ("dq", "dk", "dv")))
        bounds = {}
        for name, x in truth.items():
            rounding = _largest(x.to(dtype).double() - x)
            rest = 100 * torch.finfo(torch.float32).eps * max(1.0, sizes[name])
            bound = 3 * _largest(low[name].double() - x) + 3 * rounding + rest
            if name in ("dbias", "dsink"):  # few elements, which say little of their own errors
                bound = 2 * bound + 4 * torch.finfo(dtype).eps * max(1.0, sizes[name])
            bounds[name] = bound.expand_as(x)
        tanh = self.sample.softcap / 512
        if "max_logits" in truth:  # of which only float32 sums and logarithms are behind
            bounds["max_logits"] = 1e-5 * (1 + truth["max_logits"].nan_to_num(neginf=0.0).abs())
        return bounds | {"lse": 5e-4 + tanh + 1e-5 * truth["lse"].nan_to_num(neginf=0.0).abs()}

    def _compare_padding(self, found: dict[str, Tensor]) -> None:
        real = {side: _real_rows(self.inputs, side) for side in "qk"}
        for name, side in (("out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "k")):
            if name in found and (found[name][~real[side]] != 0).any():
                raise WrongResultError(f"{name}: expected zeros in rows of padding")
        if "lse" in found and not found["lse"].transpose(-1, -2)[~real["q"]].isneginf().all():
            raise WrongResultError("lse: expected -inf in rows of padding")


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers, which differ for NaNs and signed zeros."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _largest(x: Tensor) -> Tensor:
    finite = x.detach()[x.isfinite()].abs()
    return finite.max() if finite.numel() else finite.new_zeros(())


def _exact_bounds(truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Half of the last bit; of lse, whose logarithm is no integer, some of float32's."""
    half = torch.finfo(torch.bfloat16).eps / 2
    bounds = {name: 1e-5 + half * 1.001 * x.abs() for name, x in truth.items()}
    return bounds | {"lse": 1e-5 * (1 + truth["lse"].abs())}


def _compare(name: str, found: Tensor, truth: Tensor, bound: Tensor) -> None:
    if found.shape != truth.shape:
        raise WrongResultError(f"{name}: expected shape {tuple(truth.shape)}, got {tuple(found.shape)}")
    infinite = truth.isinf()
    error = torch.where(infinite, 0, (found.double() - torch.where(infinite, 0, truth)).abs())
    wrong = ~(error <= bound) | (infinite & (found.double() != truth))  # NaN is wrong, too
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise WrongResultError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the first, {where}, is "
            f"{found[where].item():.6g}, expected {truth[where].item():.6g} within {bound[where].item():.3g}"
        )


def _real_rows(inputs: AttentionInputs, side: str) -> Tensor:
    """A boolean map of rows of q or k that some sequence owns."""
    x = inputs.q if side == "q" else inputs.k
    real = torch.zeros(x.shape[:-2], dtype=torch.bool, device=x.device)
    for one in reference.sequences(inputs):
        one.of(real, one.rows_q if side == "q" else one.rows_k)[:] = True
    return real


def draw(sample: Sample, device: torch.device, *, is_dry: bool = False) -> Drawn:
    """Draws the tensors of a call, the same ones each time."""
    seed = sum(repr(sample).encode()) * 7919 % 2**31
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = sample.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    lengths = sample.lengths_q, sample.lengths_k or sample.lengths_q
    rows, where = _rows(sample, lengths, device)
    heads = sample.heads, sample.heads_k
    shapes = (*rows[0], heads[0], sample.d), (*rows[1], heads[1], sample.d), (*rows[1], heads[1], sample.d_v)
    dout_shape = (*rows[0], heads[0], sample.d_v)
    if sample.exact:
        q, k, v, dout = _integers(sample, shapes, dout_shape, generator, device)
    else:
        q, k, v = (_sliced(normal(*shape)) if sample.sliced else normal(*shape) for shape in shapes)
        dout = normal(*dout_shape)
        if sample.rising:
            key = torch.arange(k.shape[-3], device=device)
            k *= ((1 + 4 * key / len(key)) * (1 + key % 128 // 96))[:, None, None].to(sample.dtype)
    batch = len(lengths[0])
    full = (heads[0], *rows[0], max(lengths[1])) if sample.packed else (batch, heads[0], rows[0][1], rows[1][1])
    letters = "hqk" if sample.packed else "bhqk"

    def of_scores(kept: str) -> tuple[int, ...]:
        return tuple(n if letter in kept else 1 for letter, n in zip(letters, full, strict=True))

    mask = bias = tables = shown = None
    if sample.mask:
        mask = torch.rand(of_scores(sample.mask), generator=generator, device=device) < 0.7
    if sample.bias:
        bias = normal(*of_scores(sample.bias), dtype=torch.float32 if sample.float32_bias else sample.dtype)
    sink = normal(heads[0]) if sample.sink else None
    turns: dict[str, Any] = {}
    if sample.blocks:
        shown = _blocks_shown(full[-2], full[-1], generator, device)
        block_mask = BlockMask.from_dense(shown)
        tables = block_mask.tables(device, backward=True)
        turns = {"low_contention": block_mask.low_contention, "has_m_block_order": block_mask.has_m_block_order}
    longest = max(lengths[0], default=0), max(lengths[1], default=0)
    if not sample.packed:
        longest = rows[0][1], rows[1][1]
    offsets_q, offsets_k, used_q, used_k = where
    inputs = AttentionInputs(q, k, v, offsets_q, offsets_k, used_q, used_k, sink, mask, bias, *longest, tables)
    scale = 1 / 8 if sample.exact else sample.scale
    options = Options(scale, sample.left, sample.right, sample.softcap, True, True)
    spec = AttentionSpec.of(inputs, options)
    _poison(inputs, dout)
    dlse = normal(*inputs.lse_shape, dtype=torch.float32) if sample.dlse else None
    spec = spec._replace(nheads=heads[0] * sample.copies[1], nheads_k=heads[1] * sample.copies[1], **turns)
    spec = spec._replace(max_logits=sample.max_logits)
    return Drawn(sample, spec, inputs, shown, dout, dlse, is_dry)


def _rows(
    sample: Sample, lengths: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> tuple[list[tuple[int, ...]], list[Tensor | None]]:
    """The leading sizes of q and k, and cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k."""
    rows: list[tuple[int, ...]] = []
    offsets: list[Tensor | None] = [None, None]
    used: list[Tensor | None] = [None, None]
    for side, each in enumerate(lengths):
        slots = [n + 5 * (i % 3) for i, n in enumerate(each)] if sample.padded else list(each)
        if sample.packed:
            starts = torch.tensor([0, *slots], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
            offsets[side] = starts.to(device)
            rows.append((sum(slots) + (7 if sample.padded else 0),))
        else:
            rows.append((len(each), max(slots)))
        if sample.padded:
            used[side] = torch.tensor(each, dtype=torch.int32, device=device)
    return rows, [*offsets, *used]


def _sliced(x: Tensor) -> Tensor:
    """A slice of a wider tensor with the same numbers, from an odd element on."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 13), torch.nan)
    return wide[..., 3 : 3 + x.shape[-1]].copy_(x)


def _integers(
    sample: Sample,
    shapes: tuple[tuple[int, ...], ...],
    dout_shape: tuple[int, ...],
    generator: torch.Generator,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Q, k, v and the gradient of out of an exact call.

    The first columns of a key, half of all or less, hold one of 32 orthogonal codes; a query holds 16 times a code
    there. At a scale of 1/8 its score is 64 or more with keys of its code and 0 with others, whose P vanishes. Keys
    number 32 times a power of two, so that P is that power's inverse, and all sums of products are exact in float32.
    In the other columns of keys are integers, whose product with dS is dQ. Every second key head has its codes last.
    """
    width = sample.d // 2 // _CODES * _CODES
    columns = torch.arange(sample.d, device=device)
    group = sample.heads // sample.heads_k

    def codes(shape: tuple[int, ...], step: int) -> Tensor:
        rows, heads = (torch.arange(n, device=device) for n in shape[-3:-1])
        both = (rows * step)[:, None, None] + heads[:, None]
        both = both % _CODES & columns
        for shift in (4, 2, 1):
            both = both ^ (both >> shift)
        return (1 - 2 * (both & 1)).expand(shape)

    def has_codes(heads: int, group: int) -> Tensor:
        is_last = torch.arange(heads, device=device)[:, None] // group % 2 == 1
        return torch.where(is_last, columns >= sample.d - width, columns < width)

    def small(shape: tuple[int, ...]) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator, device=device)

    q_shape, k_shape, v_shape = shapes
    q = torch.where(has_codes(sample.heads, group), 16 * codes(q_shape, 7), 0)
    k = torch.where(has_codes(sample.heads_k, 1), codes(k_shape, 5), small(k_shape))
    # One element a row, so that dS has few bits.
    chosen = torch.randint(0, dout_shape[-1], (*dout_shape[:-1], 1), generator=generator, device=device)
    dout = torch.where(torch.arange(dout_shape[-1], device=device) == chosen, 1 - 2 * (chosen % 2), 0)
    q, k, v, dout = (x.to(sample.dtype) for x in (q, k, small(v_shape), dout))
    return q, k, v, dout


def _blocks_shown(queries: int, keys: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """(1, 1, queries, keys): causal, but for blocks of 128 that are hidden; some are shown in part."""
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None]
    blocks = torch.rand(-(-queries // 128), -(-keys // 128), generator=generator, device=device) < 0.6
    shown = blocks[i // 128, j // 128] & (j <= i + keys - queries)
    return (shown | (j < 3))[None, None]


def _poison(inputs: AttentionInputs, dout: Tensor) -> None:
    """NaN and infinities in rows of padding."""
    for x, side in ((inputs.q, "q"), (inputs.k, "k"), (inputs.v, "k"), (dout, "q")):
        padding = ~_real_rows(inputs, side)
        rows = int(padding.sum())
        values = torch.tensor(_POISON, dtype=x.dtype, device=x.device).repeat(rows)[:rows]
        x[padding] = values[:, None, None].expand(rows, *x.shape[-2:])
    if inputs.packed and inputs.bias is not None and inputs.bias.shape[1] > 1:
        inputs.bias[:, ~_real_rows(inputs, "q")] = torch.nan
