"""Error of dQ if its blocks are summed in 32-bit integers, which have the same bits in any order, on a CPU.

    python -m benchmarks.integer_sums --keys 4096 65536

The products of a backward kernel are imitated: bfloat16 operands, P and dS rounded, float32 accumulators, a partial sum
of dQ for each block of keys. The partial sums are added in float32, as the kernels do, and as integers, multiples of a
power of two that is a row's grid. A row's grid has to hold what its sum can be at most. As |dP - delta| is no more than
|dO| (|V| + |O|), that is one of two bounds (norms of rows; |K| is a row's largest element):

    all keys    |dO| (max |V| + |O|) max |K|
    weighted    |dO| (sum of P max |V| |K| + |O| sum of P max |K|); the maxima are those of a block of keys, and a
                forward kernel can sum P of a block anyway

By the first one the grid is that of kernels (``kernels.common.fixed_point``): coarser where K and V say that the bound
is not far above a usual sum.

Each table row is a kind of data that is hard for sums. Its columns: the relative error (root mean square, over that of
dQ in float64) of float32 sums; how many times that error integers make, by each bound; and how many bits of a row's
largest element are above its grid, of the worst row and of the median one.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_cute.runtime.command_line import multiple_of

HEAD_DIM = 128
QUERIES = 64
BLOCK = 128  # keys of a block
BITS = 31
MARGIN = 1.05  # P and dS are rounded
KEPT = 2  # bits


class Data(NamedTuple):
    """Tensors of one head: q and dout (QUERIES, HEAD_DIM), k and v (keys, HEAD_DIM)."""

    q: Tensor
    dout: Tensor
    k: Tensor
    v: Tensor


def _few(x: Data) -> Tensor:
    return torch.randperm(len(x.k))[: max(1, len(x.k) // 2048)]


def _put_sink(x: Data) -> None:
    x.q[:, 0] += 8
    x.k[0] = 0
    x.k[0, 0] = 20
    x.v[0] *= 0.05


def _shift_means(x: Data) -> None:
    x.k.add_(2)
    x.v.add_(3)


def _scale_key_channel(x: Data) -> None:
    x.k[:, 5] *= 50
    x.q[:, 5] /= 50


def _scale_value_channel(x: Data) -> None:
    x.v[:, 7] *= 50


def _scale_key_rows(x: Data) -> None:
    x.k[_few(x)] *= 5


def _scale_value_rows(x: Data) -> None:
    x.v[_few(x)] *= 50


def _scale_both_rows(x: Data) -> None:
    few = _few(x)
    x.k[few] *= 8
    x.v[few] *= 50


def _repeat_tokens(x: Data) -> None:
    for rows in (x.k, x.v):
        rows.copy_(rows[:16].repeat(len(rows) // 16, 1))


# By the kind of data, what is done to normal ones.
KINDS: dict[str, Callable[[Data], object]] = {
    "normal": lambda x: None,
    "peaked": lambda x: x.q.mul_(6),
    "tiny gradients": lambda x: x.dout.mul_(1e-7),
    "means that are not zero": _shift_means,
    "a sink": _put_sink,
    "an outlier channel of k": _scale_key_channel,
    "an outlier channel of v": _scale_value_channel,
    "outlier rows of k": _scale_key_rows,
    "outlier rows of v": _scale_value_rows,
    "outlier rows of both": _scale_both_rows,
    "rows of v of all sizes": lambda x: x.v.mul_(torch.exp(2 * torch.randn(len(x.v), 1))),
    "repeated tokens": _repeat_tokens,
}


def bounds(p: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Upper bounds of an element of a row of dQ, ahead of the scale, by each rule: (rows, 1)."""
    of_v, of_k, of_out, of_dout = v.norm(dim=-1), k.abs().amax(-1), out.norm(dim=-1), dout.norm(dim=-1)
    by_block = p.unflatten(-1, (-1, BLOCK)).sum(-1)
    both, keys = ((x.unflatten(0, (-1, BLOCK)).amax(-1)) for x in (of_v * of_k, of_k))
    found = {
        "all keys": of_dout * (of_v.max() + of_out) * of_k.max(),
        "weighted": of_dout * (by_block @ both + of_out * (by_block @ keys)),
    }
    return {name: MARGIN * bound[:, None] for name, bound in found.items()}


def spare_bits(k: Tensor, v: Tensor) -> int:
    """Bits that a head's sums do without: fewer, the further the bound of all keys is above a usual sum."""
    loss = v.square().sum(-1).max() / v.square().mean() * len(k) * k.abs().max().square() / k.square().mean()
    return int(max(0, min(9, (34 - math.floor(math.log2(loss.item()))) // 2 - KEPT)))


def errors(kind: str, keys: int) -> tuple[float, dict[str, tuple[float, float, float]]]:
    """The table row of a kind of data: float32's error; by bound, the ratio of errors and the bits of a row.

    Raises:
        AssertionError: a sum does not fit 32 bits, so a bound is none.
    """
    data = Data(*torch.randn(2, QUERIES, HEAD_DIM), *torch.randn(2, keys, HEAD_DIM))
    KINDS[kind](data)
    q, dout, k, v = (x.bfloat16().float() for x in data)
    scale = 1 / math.sqrt(HEAD_DIM)
    wide_q, wide_k, wide_v, wide_dout = (x.double() for x in (q, k, v, dout))
    true_p = torch.softmax(wide_q @ wide_k.T * scale, -1)
    true_delta = ((true_p @ wide_v) * wide_dout).sum(-1, keepdim=True)
    truth = true_p * (wide_dout @ wide_v.T - true_delta) @ wide_k * scale

    scores = q @ k.T
    p = torch.exp(scores * scale - torch.logsumexp(scores.double() * scale, -1, keepdim=True).float())
    out = (p.bfloat16().float() @ v).bfloat16().float()
    ds = (p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))).bfloat16().float()
    parts = torch.stack([ds[:, i : i + BLOCK] @ k[i : i + BLOCK] for i in range(0, keys, BLOCK)])

    def error(sums: Tensor) -> float:
        rounded = (sums * scale).float().bfloat16().double()
        return ((rounded - truth).square().mean() / truth.square().mean()).sqrt().item()

    sums = torch.zeros_like(parts[0])
    for part in parts:
        sums += part
    in_float, by_bound = error(sums.double()), {}
    for name, bound in bounds(p, k, v, out, dout).items():
        spare = spare_bits(k, v) if name == "all keys" else 0
        grid = torch.exp2(torch.ceil(torch.log2(bound.double())) - BITS + spare)
        integers = torch.round(parts.double() / grid)
        total = integers.sum(0)
        assert integers.abs().sum(0).max() < 2**BITS, f"{kind}, {name}: a sum is larger than its bound"
        bits = total.abs().amax(-1).clamp_min(1).log2()
        by_bound[name] = error(total * grid) / in_float, bits.min().item(), bits.median().item()
    return in_float, by_bound


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the errors of each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys_type = partial(multiple_of, BLOCK)
    parser.add_argument("--keys", nargs="+", type=keys_type, default=[4096], help="of a sequence; multiples of 128")
    chosen = parser.parse_args(arguments)
    for keys in chosen.keys:
        print(f"{keys} keys, {QUERIES} queries that attend to all of them, d = {HEAD_DIM}")
        print(f"{'':26}{'float32':>10}" + "".join(f"{name:>12}{'bits':>16}" for name in ("all keys", "weighted")))
        for kind in KINDS:
            torch.manual_seed(0)
            in_float, by_bound = errors(kind, keys)
            line = f"{kind:26}{in_float:10.2e}"
            for ratio, worst, median in by_bound.values():
                line += f"{ratio:12.3f}{f'{worst:.1f}, {median:.1f}':>16}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
