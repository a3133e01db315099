"""Errors of gradients against float64 over data that is hard for them: by roundings on a CPU, by kernels on a GPU.

    python -m benchmarks.gradient_errors --rows 2048 16384
    python -m benchmarks.gradient_errors --kernels --rows 4096

All backward kernels round P and dS to the dtype of q, k and v ahead of products that are summed in float32, and
subtract delta = rowsum(dO * O) from dP. What differs, or could, is where delta comes from:

    rounded            out as it is returned
    residual, 16 bits  out and what it has lost by rounding, in the dtype of out
    residual, 8 bits   likewise, as ``precise_gradients`` has it
    unrounded          out in float32, of the rounded P
    sums of rounded P  likewise, and divided by the sum of the rounded P (lse is that of the others)
    P dP               rowsum(P * dP), by which each row of dS sums to 0; a pass of its own over all keys
    rounded P, dP      likewise, with the P that products use

and whether P is normalised ahead of dV = P' dO, or dO is divided by the row's sum instead. One head of d = 128, causal;
of more rows than 2048 only the last 1024 queries in the simulation.

A table's columns are relative errors, root mean squares over that of float64's gradient; "bias" is the error's mean
over rows, its length over the root mean square of the rows' lengths: what is left where a weight's gradient sums over
tokens.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flash_attn_cute import flash_attn_func
from flash_attn_cute.runtime.command_line import multiple_of

HEAD_DIM = 128
SCALE = 1 / math.sqrt(HEAD_DIM)
QUERIES = 1024  # of long rows
Gradients = dict[str, Tensor]
Attention = Callable[..., Tensor]


class Data(NamedTuple):
    """Tensors of one head: q and dout (queries, HEAD_DIM), the last ones of a sequence; k and v (keys, HEAD_DIM)."""

    q: Tensor
    dout: Tensor
    k: Tensor
    v: Tensor


def _shift_values(x: Data) -> None:
    x.v.add_(3)


def _shift_means(x: Data) -> None:
    for part, size in ((x.q, 0.5), (x.dout, 0.5), (x.k, 2), (x.v, 2)):
        part.add_(size * torch.randn(HEAD_DIM))


def _flatten(x: Data) -> None:
    x.q.mul_(0.05)
    x.k.add_(2)
    x.v.add_(3)


def _put_sink(x: Data) -> None:
    x.q[:, 0] += 8
    x.k[0] = 0
    x.k[0, 0] = 20
    x.v[0] *= 0.05


def _repeat_tokens(x: Data) -> None:
    for rows in (x.k, x.v):
        rows.copy_(rows[:16].repeat(len(rows) // 16, 1))


def _tie(x: Data) -> None:
    x.q.mul_(6)
    x.k[1::2] = x.k[::2]
    x.v.copy_(-x.v.abs() - 1)


# By the kind of data, what is done to normal ones.
KINDS: dict[str, Callable[[Data], object]] = {
    "normal": lambda x: None,
    "peaked": lambda x: x.q.mul_(6),
    "values with a mean": _shift_values,
    "means in q, k, v, dout": _shift_means,
    "flat rows, means in k, v": _flatten,
    "a sink": _put_sink,
    "repeated tokens": _repeat_tokens,
    "two equal maxima, v < 0": _tie,
}


def draw(kind: str, queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> Data:
    """Data of a kind, representable in a dtype, in float32 on the CPU."""
    data = Data(*torch.randn(2, queries, HEAD_DIM), *torch.randn(2, keys, HEAD_DIM))
    KINDS[kind](data)
    return Data(*(x.to(dtype).float() for x in data))


def _visible(x: Data) -> Tensor:
    keys = len(x.k)
    rows = torch.arange(keys - len(x.q), keys, device=x.q.device)
    return torch.arange(keys, device=x.q.device) <= rows[:, None]


def truth(x: Data) -> Gradients:
    """The true gradients: all of the computation is in float64."""
    q, dout, k, v = (part.double() for part in x)
    p = torch.softmax((q @ k.T * SCALE).masked_fill_(~_visible(x), -torch.inf), -1)
    delta = ((p @ v) * dout).sum(-1, keepdim=True)
    ds = p * (dout @ v.T - delta)
    return {"dq": ds @ k * SCALE, "dk": ds.T @ q * SCALE, "dv": p.T @ dout}


def simulated(x: Data, dtype: torch.dtype = torch.bfloat16) -> dict[str, Gradients]:
    """Gradients by the roundings of kernels, before they are rounded themselves, by what differs."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    q, dout, k, v = x
    scores = (q @ k.T * SCALE).masked_fill_(~_visible(x), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    unnormalised = torch.exp(scores - top)
    total = unnormalised.sum(-1, keepdim=True)
    p, dp = torch.exp(scores - top - total.log()), dout @ v.T
    out = rounded(unnormalised) @ v / total
    lost = out - rounded(out)
    step = torch.exp2(torch.floor(torch.log2(out.abs().clamp_min(1e-30))) - (7 if dtype == torch.bfloat16 else 10) - 8)
    by_rounded = rounded(unnormalised) @ v / rounded(unnormalised).sum(-1, keepdim=True)
    deltas = {
        "rounded": rounded(out) * dout,
        "residual, 16 bits": (rounded(out) + rounded(lost)) * dout,
        "residual, 8 bits": (rounded(out) + (torch.floor(lost / step) + 0.5) * step) * dout,
        "unrounded": out * dout,
        "sums of rounded P": by_rounded * dout,
        "P dP": p * dp,
        "rounded P, dP": rounded(p) * dp,
    }
    found = {}
    for name, terms in deltas.items():
        ds = rounded(p * (dp - terms.sum(-1, keepdim=True)))
        found[name] = {"dq": ds @ k * SCALE, "dk": ds.T @ q * SCALE}
    found["P normalised for dV"] = {"dv": rounded(p).T @ dout}
    found["dO divided for dV"] = {"dv": rounded(unnormalised).T @ rounded(dout / total)}
    return found


def errors(found: Gradients, true: Gradients) -> dict[str, tuple[float, float]]:
    """The relative error of each gradient, and its bias."""
    return {
        name: (
            ((x.double() - true[name]).square().mean() / true[name].square().mean()).sqrt().item(),
            ((x.double() - true[name]).mean(0).norm() / true[name].square().sum(-1).mean().sqrt()).item(),
        )
        for name, x in found.items()
    }


def attentions(rows: int) -> dict[str, Attention]:
    """Causal attention (1, rows, 1, HEAD_DIM) by this package and by peers, which have to be installed if chosen."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def flash_attn_4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func as attend

        result = attend(q, k, v, causal=True)
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, rows, rows, device="cuda")
    compiled: Any = torch.compile(flex_attention)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=blocks).transpose(1, 2)
        return out

    return {
        "flash_attn_cute": partial(flash_attn_func, causal=True),
        "precise_gradients=True": partial(flash_attn_func, causal=True, precise_gradients=True),
        "flash-attn-4": flash_attn_4,
        "cuDNN": cudnn,
        "FlexAttention": flex,
    }


def by_kernels(x: Data, attend: Attention) -> Gradients:
    """Gradients in bfloat16 on the GPU of the data."""
    q, dout, k, v = (part.bfloat16()[None, :, None] for part in x)
    leaves = [part.requires_grad_() for part in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves), leaves, dout)
    return {name: grad[0, :, 0].float() for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of errors for each kind of data and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows_type = partial(multiple_of, 16)
    parser.add_argument("--rows", nargs="+", type=rows_type, default=[2048], help="keys of a sequence, multiples of 16")
    parser.add_argument("--kernels", action="store_true", help="those of this machine's GPU, not a simulation")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    chosen = parser.parse_args(arguments)
    if chosen.only and not chosen.kernels:
        parser.error("argument --only: expected with --kernels, whose names it chooses")
    if chosen.kernels and not torch.cuda.is_available():
        parser.error("argument --kernels: expected a GPU, and PyTorch sees none")
    for rows in chosen.rows:
        attends = {n: f for n, f in attentions(rows).items() if chosen.only in n} if chosen.kernels else {}
        if chosen.kernels and not attends:
            parser.error(f"argument --only: expected part of one of {', '.join(attentions(rows))}, got {chosen.only!r}")
        queries = rows if chosen.kernels or rows <= 2 * QUERIES else QUERIES
        for kind in KINDS:
            torch.manual_seed(0)
            data = draw(kind, queries, rows)
            if chosen.kernels:
                data = Data(*(x.cuda() for x in data))
            true = truth(data)
            found = {n: by_kernels(data, f) for n, f in attends.items()} if attends else simulated(data)
            print(f"{kind}, {rows} rows")
            for name, grads in found.items():
                each = (f"{x} {error:.2e} (bias {bias:.1e})" for x, (error, bias) in errors(grads, true).items())
                print(f"  {name:24}" + "  ".join(each), flush=True)


if __name__ == "__main__":
    main()
