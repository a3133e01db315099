"""Trains a language model of bytes on packed documents, and shows what packing, determinism and speed come to.

    python examples/pretrain.py
    python examples/pretrain.py --width 1024 --layers 12 --length 4096 --tokens 16384 --steps 300   # a GPU's size

The text is the source code of Python's standard library. On a GPU the model computes in bfloat16. Prints

- the tokens per second of steps on packed documents, and of steps on the same documents as PyTorch's own attention
  takes them: padded to the longest, with a mask;
- whether a run that is stopped in the middle, saved, loaded and resumed ends with the bits of one that was not.

Needs ``pip install -e '.[examples]'``.
"""

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn_cute import flash_attn_varlen_func
from flash_attn_cute.demo import NO_TARGET, Batch, cut, pack, read_documents, same_bits, shuffled_forever
from flash_attn_cute.runtime.command_line import make_folder, positive

HEAD_DIM, GROUP = 64, 4  # four query heads a key head

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """Attention and an MLP, each with a norm in front and added to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(GROUP, width // HEAD_DIM)
        self.heads_k = self.heads // GROUP
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.heads_k) * HEAD_DIM, bias=False)
        self.out = nn.Linear(self.heads * HEAD_DIM, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """One layer, of rows (..., width)."""
        heads = rearrange(self.qkv(self.norms[0](x)), "... (heads d) -> ... heads d", d=HEAD_DIM)
        q, k, v = heads.split([self.heads, self.heads_k, self.heads_k], dim=-2)
        out = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.out(rearrange(out, "... heads d -> ... (heads d)"))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A language model of bytes; how it attends comes with each call."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, inputs: Tensor, positions: Tensor, targets: Tensor, attend: Attend) -> Tensor:
        """The mean loss, in nats, over the rows that have a target."""
        x, rotation = self.embedding(inputs), rotation_of(positions)
        for block in self.blocks:
            x = block(x, rotation, attend)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=NO_TARGET)


def rotation_of(positions: Tensor) -> Tensor:
    """Rotary embeddings: complex numbers (..., 1, HEAD_DIM / 2)."""
    frequencies = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=positions.device)
    angles = positions[..., None, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns each pair of neighbouring elements."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def loss_packed(model: Model, batch: Batch) -> Tensor:
    """Documents one behind another: nothing is computed for padding, which is only at the end."""
    cu, longest = batch.cu_seqlens, batch.max_seqlen
    attend: Any = functools.partial(
        flash_attn_varlen_func,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        deterministic=True,
    )
    loss: Tensor = model(batch.inputs, batch.positions, batch.targets, attend)
    return loss


def loss_padded(model: Model, batch: Batch) -> Tensor:
    """Loss of the documents as a padded batch, through PyTorch's attention with a mask."""
    lengths = batch.cu_seqlens.diff()
    positions = torch.arange(batch.max_seqlen)
    real = positions < lengths[:, None]
    rows = (batch.cu_seqlens[:-1, None] + positions).clamp(max=len(batch.inputs) - 1)
    mask = (positions <= positions[:, None]) & real[:, None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # With grouped heads PyTorch would compute all scores in memory: only that way does it take them with a mask.
        k, v = (x.repeat_interleave(GROUP, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    targets = batch.targets[rows].masked_fill(~real, NO_TARGET)
    loss: Tensor = model(batch.inputs[rows], positions.expand(len(lengths), -1), targets, attend)
    return loss


class Run:
    """A model in training. All its randomness comes from the seed."""

    def __init__(self, options: argparse.Namespace, loss_of: Callable[[Model, Batch], Tensor]) -> None:
        torch.manual_seed(options.seed)
        self.model = Model(options.width, options.layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.rate, betas=(0.9, 0.95))
        self.loss_of = loss_of
        self.losses: list[float] = []

    def step(self, batch: Batch) -> float:
        """One step; returns the seconds that it took."""
        start = time.perf_counter()
        kind = batch.inputs.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            loss = self.loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        return time.perf_counter() - start

    def save(self, path: Path) -> None:
        """Writes what a resumed run needs; the data follows from the number of steps."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "losses": self.losses}
        torch.save(state, path)

    def load(self, path: Path) -> None:
        """Reads what ``save`` wrote."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = state["losses"]


def batches(options: argparse.Namespace) -> Iterator[Batch]:
    """Endless batches, equal in every run."""
    pieces = cut(read_documents(), min(options.length, options.tokens))
    return pack(shuffled_forever(pieces, options.seed), options.tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if the resumed run ended with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=positive, default=128, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=positive, default=2, help="%(default)s")
    parser.add_argument("--length", type=positive, default=1024, help="bytes of a document at the most (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=2048, help="bytes of a step (%(default)s)")
    parser.add_argument("--steps", type=positive, default=60, help="%(default)s")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="%(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("build/pretrain"), help="its checkpoint's folder (%(default)s)"
    )
    options = parser.parse_args(arguments)
    make_folder(parser, "--out", options.out)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")

    packed, padded = Run(options, loss_packed), Run(options, loss_padded)
    checkpoint = options.out / "half.pt"
    speeds: dict[str, list[float]] = {"packed": [], "padded": []}
    for step, batch in enumerate(itertools.islice(batches(options), options.steps)):
        if step == options.steps // 2:
            packed.save(checkpoint)
        for name, run in (("packed", packed), ("padded", padded)):  # taking turns
            speeds[name].append(batch.tokens / run.step(batch))
        print(f"step {step}: loss {packed.losses[-1]:.3f} packed, {padded.losses[-1]:.3f} padded", flush=True)
    ours, theirs = (median(x[len(x) // 10 :]) for x in speeds.values())  # the first ones compile
    print(f"speed:   {ours:,.0f} tokens/s packed, {theirs:,.0f} padded: {ours / theirs:.2f} times")

    resumed = Run(options, loss_packed)
    resumed.load(checkpoint)
    for batch in itertools.islice(batches(options), options.steps // 2, options.steps):
        resumed.step(batch)
    same = same_bits(packed.model, resumed.model) and packed.losses == resumed.losses
    print(f"resumed: {'bitwise equal' if same else 'different'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
