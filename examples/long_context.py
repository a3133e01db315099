"""Attention over a million tokens, forward and backward, on one GPU.

    python examples/long_context.py

One causal sequence, or with ``--documents`` as many packed into the same tokens. On an H200 a million tokens of 8 heads
of 128 take 14 seconds and 22 GB: q, k, v, out and their gradients, and dQ once more in float32; the scores, which would
take 16 TB, exist nowhere. Anywhere else it runs with fewer tokens. Some rows of out are checked against a direct
computation in float64.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_cute import explain, flash_attn_varlen_func
from flash_attn_cute.runtime.command_line import positive


def main() -> None:
    """Runs both passes once, and once more with the clock on."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=1 << 20 if on_gpu else 1 << 12)
    parser.add_argument("--documents", type=positive, default=1, help="of equal lengths")
    parser.add_argument("--heads", type=positive, default=8 if on_gpu else 1)
    chosen = parser.parse_args()
    if chosen.documents > chosen.tokens:
        parser.error(f"argument --documents: expected at most {chosen.tokens}, the tokens, got {chosen.documents}")
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    length = chosen.tokens // chosen.documents
    tokens = length * chosen.documents

    q, k, v = (torch.randn(tokens, chosen.heads, 128, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    cu_seqlens = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    bounds = cu_seqlens, cu_seqlens, length, length
    print(explain(q, k, v, cu_seqlens, cu_seqlens, length, length, causal=True))

    def both_passes() -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, *bounds, causal=True)
        out.backward(dout)
        return out

    with FlopCounterMode(display=False) as counter:
        both_passes()  # compiles
    q.grad = k.grad = v.grad = None
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    out = both_passes().detach()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    speed = f"{seconds:.2f} s, {counter.get_total_flops() / seconds / 1e12:.2f} TFLOP/s"
    memory = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if on_gpu else ""
    print(f"{tokens} tokens in {chosen.documents} documents: {speed}{memory}")

    worst = max(difference(q, k, v, out, row, row // length * length) for row in (0, tokens // 3, tokens - 1))
    print(f"largest difference from float64, of three rows: {worst:.1e}")
    if not worst < (2e-2 if on_gpu else 1e-5):
        raise SystemExit("FAILED")
    print("PASSED")


def difference(q: Tensor, k: Tensor, v: Tensor, out: Tensor, row: int, first: int) -> float:
    """How far a row of out is from what its document's keys up to it give."""
    keys, values = (x[first : row + 1].detach().double() for x in (k, v))
    scores = torch.einsum("hd,khd->hk", q[row].detach().double(), keys) / 128**0.5
    return (torch.einsum("hk,khd->hd", scores.softmax(-1), values) - out[row]).abs().max().item()


if __name__ == "__main__":
    main()
