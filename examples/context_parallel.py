"""Trains a small transformer on packed documents whose tokens are dealt over ranks.

    torchrun --nproc-per-node 2 examples/context_parallel.py
    torchrun --nproc-per-node 8 examples/context_parallel.py --tokens 262144 --longest 65536 --width 4096 --heads 32 \
        --heads-k 8 --layers 4

Without arguments it runs on a CPU in seconds, and prints the same losses on any number of ranks. With GPUs there it
takes one a rank, and bfloat16 for attention.
"""

import argparse
import math
import os
import random
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_attn_cute.distributed import Sharding, context_parallel_attn_varlen_func
from flash_attn_cute.runtime.command_line import positive

VOCABULARY = 256


class Block(nn.Module):
    """Attention and an MLP; of a token it knows its position in its document."""

    def __init__(self, width: int, heads: int, heads_k: int) -> None:
        super().__init__()
        self.d = width // heads
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, heads * self.d, bias=False)
        self.kv = nn.Linear(width, 2 * heads_k * self.d, bias=False)
        self.out = nn.Linear(heads * self.d, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, angles: Tensor, sharding: Sharding, group: ProcessGroup | None, method: str) -> Tensor:
        """(rows, width) of this rank's tokens."""
        y = self.norm(x)
        q = rotated(self.q(y).unflatten(1, (-1, self.d)), angles)
        k, v = self.kv(y).unflatten(1, (-1, self.d)).chunk(2, 1)
        q, k, v = (z.bfloat16() if z.is_cuda else z for z in (q, rotated(k, angles), v))
        # The only line that sees other ranks.
        out = context_parallel_attn_varlen_func(q, k, v, sharding, causal=True, group=group, method=method)
        x = x + self.out(out.flatten(1).to(x.dtype))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self, width: int, heads: int, heads_k: int, layers: int) -> None:
        super().__init__()
        self.d = width // heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, heads_k) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, sharding: Sharding, group: ProcessGroup | None, method: str
    ) -> Tensor:
        """(rows, VOCABULARY) of this rank's tokens."""
        x, half = self.embedding(tokens), self.d // 2
        frequencies = 10000 ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None, None] * frequencies
        for block in self.blocks:
            x = block(x, angles, sharding, group, method)
        return self.head(self.norm(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embeddings of (rows, heads, d)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def documents(tokens: int, longest: int) -> Iterator[tuple[list[int], Tensor]]:
    """Batches of so many tokens: the lengths of their documents, and the tokens, the same on all ranks."""
    draw, noise = random.Random(0), torch.Generator().manual_seed(0)
    while True:
        lengths: list[int] = []
        while sum(lengths) < tokens:
            length = round(math.exp(draw.uniform(math.log(16), math.log(longest))))
            lengths.append(min(length, tokens - sum(lengths)))
        # Counting in steps of their own, which a model can find out.
        starts, steps = (torch.randint(VOCABULARY, (len(lengths),), generator=noise) for _ in range(2))
        yield (
            lengths,
            torch.cat([(a + b * torch.arange(n)) % VOCABULARY for a, b, n in zip(starts, steps, lengths, strict=True)]),
        )


def train(chosen: argparse.Namespace, group: ProcessGroup | None, device: torch.device) -> list[float]:
    """The loss of each step, which the ranks of a group take together."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    model = Model(chosen.width, chosen.heads, chosen.heads_k, chosen.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2 / chosen.width)  # wider models want smaller steps
    losses = []
    for _, (lengths, tokens) in zip(range(chosen.steps), documents(chosen.tokens, chosen.longest), strict=False):
        cu_seqlens = [0, *accumulate(lengths)]
        targets = tokens.roll(-1)
        targets[torch.tensor(cu_seqlens[1:]) - 1] = -100  # the last token of a document has no next one
        # Once a batch: who has which rows. All layers share it.
        sharding = Sharding.balanced(cu_seqlens, num_ranks, causal=True)
        tokens, targets = (sharding.shard(x, rank).to(device) for x in (tokens, targets))
        logits = model(tokens, sharding.positions(rank).to(device), sharding, group, chosen.method)
        # Every rank's part of one loss; the parts, and so their gradients, sum up to it.
        loss = F.cross_entropy(logits.float(), targets, reduction="sum") / (chosen.tokens - len(lengths))
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line, which ends the program if heads and width do not fit each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=positive, default=1024, help="of a batch, on all ranks together")
    parser.add_argument("--longest", type=positive, default=512, help="document")
    parser.add_argument("--width", type=positive, default=64)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--heads-k", type=positive, default=2)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--method", choices=("auto", "all_gather", "ring", "all_to_all"), default="auto")
    chosen = parser.parse_args(arguments)
    d = chosen.width // chosen.heads
    if d == 0 or d % 2:
        parser.error(f"argument --heads: expected an even --width // --heads, as rotary embeddings need it, got {d}")
    if chosen.heads % chosen.heads_k:
        parser.error(f"argument --heads-k: expected a divisor of the {chosen.heads} heads, got {chosen.heads_k}")
    return chosen


def main() -> None:
    """Joins the ranks that torchrun has started, or is the only one; trains, and prints on the first of them."""
    chosen = options()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    alone: Any = {} if "RANK" in os.environ else {"init_method": "tcp://localhost:0", "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None, **alone)
    losses = train(chosen, None, device)
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
