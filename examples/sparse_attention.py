"""Trains a tiny model whose attention selects blocks of keys: native sparse attention (NSA, arXiv 2502.11089).

    python examples/sparse_attention.py

The task is recall. A sequence begins with pairs of a name and a value, a token each, and goes on with names alone,
whose values the model has to find again. Pairs lie far outside of the window, and compressed blocks blur 8 of them, so
it is the selected blocks that answer. One layer learns it in seconds on a CPU. Prints the loss and the share of right
answers, and in the end that share without the branch of selected blocks. The exit code is 0 if the model has learnt to
recall, and cannot without that branch. Nothing is downloaded.
"""

import argparse
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn_cute import BlockMask, flash_attn_func
from flash_attn_cute.runtime.command_line import positive

WIDTH, HEADS, HEADS_K, HEAD_DIM = 64, 2, 1, 64
BLOCK, TOP, WINDOW = 8, 4, 8
PAIRS, QUESTIONS, VALUES = 96, 32, 8  # pairs of a sequence, names asked for, values that there are
BATCH, RATE = 8, 5e-3


def means(x: Tensor, block: int) -> Tensor:
    """Means of whole blocks of rows: (batch, seqlen // block, heads, d)."""
    return x[:, : x.shape[1] // block * block].unflatten(1, (-1, block)).mean(2)


def own_and_best(scores: Tensor, block: int, top: int) -> Tensor:
    """Blocks that queries select by scores (..., seqlen, blocks): (..., seqlen, up to top), -1 for none."""
    own = torch.arange(scores.shape[-2], device=scores.device)[:, None] // block
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    best = scores.masked_fill(blocks >= own, -torch.inf).topk(min(top - 1, len(blocks)))
    return torch.cat((best.indices.masked_fill(best.values.isneginf(), -1), own.expand(*scores.shape[:-1], 1)), -1)


def nsa_branches(q: Tensor, k: Tensor, v: Tensor, block: int, top: int, window: int) -> tuple[Tensor, Tensor]:
    """Out (3, batch, seqlen, nheads, d) and lse (3, batch, seqlen, nheads) of the three branches."""
    seqlen, nheads_k = k.shape[1:3]
    short_k, short_v = means(k, block), means(v, block)
    last = torch.arange(1, short_k.shape[1] + 1, device=q.device) * block - 1  # key of each block
    is_over = last <= torch.arange(seqlen, device=q.device)[:, None]
    compressed, lse = flash_attn_func(q, short_k, short_v, mask=is_over, return_lse=True)

    with torch.no_grad():
        by_group = q.unflatten(2, (nheads_k, -1))
        scores = torch.einsum("bihgd,bnhd->bhgin", by_group, short_k) * q.shape[-1] ** -0.5
        p = (scores - lse.unflatten(1, (nheads_k, -1))[..., None]).exp().masked_fill(~is_over, 0)
        indices = own_and_best(p.sum(2), block, top)
    mask = BlockMask.from_selection(indices, block=block, seqlen_k=seqlen)

    selected = flash_attn_func(q, k, v, causal=True, block_mask=mask, return_lse=True)
    near = flash_attn_func(q, k, v, causal=True, window_size=(window - 1, 0), return_lse=True)
    outs, lses = zip((compressed, lse), selected, near, strict=True)
    return torch.stack(outs), torch.stack(lses).transpose(-1, -2)


class Model(nn.Module):
    """One layer of attention between embeddings of names and values, and a choice of values."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.values = nn.Embedding(PAIRS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        with torch.no_grad():  # queries begin as the keys of their names, so that training starts with a clue
            q, k, _ = self.qkv.weight.split([HEADS * HEAD_DIM, HEADS_K * HEAD_DIM, HEADS_K * HEAD_DIM])
            q.copy_(k.repeat(HEADS // HEADS_K, 1))
        self.gates = nn.Linear(WIDTH, 3 * HEADS)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VALUES)

    def forward(self, names: Tensor, values: Tensor, selects: bool = True) -> Tensor:
        """Logits of values (batch, seqlen, VALUES) for names and values (batch, seqlen), VALUES for an unknown one."""
        x = self.names(names) + self.values(values)
        q, k, v = self.qkv(x).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, HEADS_K, HEADS_K], dim=-2)
        outs, _ = nsa_branches(q, k, v, BLOCK, TOP, WINDOW)
        gates = self.gates(x).sigmoid().unflatten(-1, (3, HEADS)).movedim(-2, 0)
        if not selects:
            gates = gates * gates.new_tensor([1, 0, 1])[:, None, None, None]
        logits: Tensor = self.head(x + self.out((gates[..., None] * outs).sum(0).flatten(-2)))
        return logits


def sequences(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Names and values as the model gets them, and the values asked for (batch, QUESTIONS)."""
    names = torch.rand(BATCH, PAIRS, device=device).argsort(1)
    values = torch.randint(VALUES, (BATCH, PAIRS), device=device)
    asked = torch.randint(PAIRS, (BATCH, QUESTIONS), device=device)
    unknown = torch.full_like(asked, VALUES)
    return torch.cat((names, names.gather(1, asked)), 1), torch.cat((values, unknown), 1), values.gather(1, asked)


def main() -> int:
    """Trains and reports; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        names, values, answers = sequences(device)
        logits = model(names, values)[:, PAIRS:]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == options.steps:
            right = (logits.argmax(-1) == answers).float().mean().item()
            print(f"step {step}: loss {loss.item():.3f}, {right:.0%} right, {time.perf_counter() - start:.0f} s")
    with torch.no_grad():
        names, values, answers = sequences(device)
        with_it, without_it = (
            (model(names, values, selects)[:, PAIRS:].argmax(-1) == answers).float().mean().item()
            for selects in (True, False)
        )
    print(f"right with selected blocks: {with_it:.0%}, without: {without_it:.0%}")
    has_learnt = with_it > 0.7 and without_it < 0.3
    print("PASSED" if has_learnt else "FAILED: expected more than 70 % and less than 30 %")
    return int(not has_learnt)


if __name__ == "__main__":
    sys.exit(main())
