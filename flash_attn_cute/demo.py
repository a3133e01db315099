"""Trains a small language model on packed documents, twice, and checks that both runs end with the same bits.

    python -m flash_attn_cute.demo

The text is the source code of Python's own standard library, read byte by byte. Each file is a document; documents
keep their own lengths and are packed into steps of a fixed number of rows, and all attention goes through
``flash_attn_varlen_func``. The exit code is 0 only if the model predicts held-out files clearly better than the
frequencies of bytes do, and if two runs from one seed agree in every bit of every weight. It takes about a minute on
two CPU cores and needs einops and tqdm: ``pip install einops tqdm``.
"""

import argparse
import math
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flash_attn_cute import explain, flash_attn_varlen_func
from flash_attn_cute.runtime.command_line import positive, run_command

try:
    from einops import rearrange
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"The demo needs {error.name}, which is missing: pip install einops tqdm")

DIM, LAYERS, HEADS, HEADS_K, HEAD_DIM = 128, 2, 2, 1, 64
MAX_LENGTH = 512  # longer documents are cut into pieces
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}  # or mere tables
HELD_OUT = 50  # one file in so many is kept out of training
PEAK_RATE, WARM_UP = 3e-3, 50
MARGIN = 1.0  # nats below the unigram entropy that the held-out loss must reach; without attention it does not
NO_TARGET = -100

Rotation = tuple[Tensor, Tensor]  # cosines and sines


class Batch(NamedTuple):
    """One step: documents side by side in a fixed number of rows, those behind ``cu_seqlens[-1]`` being padding."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    tokens: int

    @classmethod
    def of(cls, pieces: Sequence[bytes], rows: int) -> "Batch":
        """Lays out pieces. Each has one byte more than it takes rows, because a row's target is the next byte."""
        lengths = [len(piece) - 1 for piece in pieces]
        offsets = list(accumulate(lengths, initial=0))
        inputs, positions = torch.zeros(2, rows, dtype=torch.int64)
        targets = torch.full((rows,), NO_TARGET)
        for piece, (start, stop) in zip(pieces, pairwise(offsets), strict=True):
            text = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            inputs[start:stop], targets[start:stop] = text[:-1], text[1:]
            positions[start:stop] = torch.arange(stop - start)
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        return cls(inputs, targets, positions, cu_seqlens, max(lengths), offsets[-1])


def read_documents() -> list[bytes]:
    """The sources of the standard library, in the same order every time."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts))
    if len(paths) < HELD_OUT:
        sys.exit(f"The demo reads the sources of Python's standard library, but {root} holds only {len(paths)}.")
    return [path.read_bytes() for path in paths]


def unigram_entropy(documents: Iterable[bytes]) -> float:
    """The loss, in nats per byte, of a model that knows how frequent each byte is and nothing else."""
    counts = torch.bincount(torch.frombuffer(bytearray().join(documents), dtype=torch.uint8))
    return torch.special.entr(counts / counts.sum(dtype=torch.float64)).sum().item()


def cut(documents: Iterable[bytes], length: int) -> list[bytes]:
    """Pieces of up to ``length`` rows; each carries one byte more, the target of its last row."""
    return [doc[i : i + length + 1] for doc in documents for i in range(0, len(doc) - 1, length)]


def shuffled_forever(pieces: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """All pieces in a random order, then all of them in another one, and so on.

    Each is drawn when it is asked for: in steps of few rows there are millions of pieces, of which few are read.
    """
    generator, order = random.Random(seed), list(pieces)
    while True:
        for i in range(len(order)):
            other = generator.randrange(i, len(order))
            order[i], order[other] = order[other], order[i]
            yield order[i]


def pack(pieces: Iterable[bytes], rows: int) -> Iterator[Batch]:
    """Fills batches of ``rows`` rows with whole pieces in the order they come."""
    taken: list[bytes] = []
    room = rows
    for piece in pieces:
        if len(piece) - 1 > room:
            yield Batch.of(taken, rows)
            taken, room = [], rows
        taken.append(piece)
        room -= len(piece) - 1
    if taken:
        yield Batch.of(taken, rows)


def rotations(positions: Tensor) -> Rotation:
    """The cosines and sines, (rows, 1, HEAD_DIM / 2), by which RoPE turns q and k at each position."""
    frequencies = 10_000 ** -torch.linspace(0, 1, HEAD_DIM // 2)
    angles = rearrange(torch.outer(positions.float(), frequencies), "rows d -> rows 1 d")
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns each pair of elements, one from either half of the head dimension."""
    (a, b), (cos, sin) = x.chunk(2, dim=-1), rotation
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def attention_dtype(device: torch.device) -> torch.dtype:
    """The dtype of q, k and v: bfloat16 on a GPU, which is built for it. All else is float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Attention(nn.Module):
    """Causal self-attention within each document; query heads share key heads (GQA)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """Mixes the rows of each document; those of padding come out as zeros."""
        heads = rearrange(self.qkv(x), "rows (heads d) -> rows heads d", d=HEAD_DIM)
        q, k, v = heads.split([HEADS, HEADS_K, HEADS_K], dim=1)
        q, k, v = (y.to(attention_dtype(y.device)) for y in (rotate(q, rotation), rotate(k, rotation), v))
        cu, longest = batch.cu_seqlens, batch.max_seqlen
        out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=True, deterministic=True)
        return self.out(rearrange(out, "rows heads d -> rows (heads d)").to(x.dtype))


class Block(nn.Module):
    """Attention and an MLP, each with a norm in front and added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, rotation: Rotation, batch: Batch) -> Tensor:
        """One layer of the transformer."""
        x = x + self.attention(self.norm_attention(x), rotation, batch)
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, 256, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss, in nats, over the rows that have a target."""
        x, rotation = self.embedding(batch.inputs), rotations(batch.positions)
        for block in self.blocks:
            x = block(x, rotation, batch)
        return F.cross_entropy(self.head(self.norm(x)), batch.targets, ignore_index=NO_TARGET)


def selected_backend() -> str:
    """The backend that serves the model's attention, and why, for people to read."""
    q, k = (torch.zeros(1, heads, HEAD_DIM) for heads in (HEADS, HEADS_K))
    q, k = (x.to(attention_dtype(x.device)) for x in (q, k))
    cu = torch.tensor([0, 1], dtype=torch.int32)
    arguments = q, k, k, cu, cu, MAX_LENGTH, MAX_LENGTH
    flash_attn_varlen_func(*arguments, causal=True, deterministic=True)  # a GPU's first call may check its kernels
    return str(explain(*arguments, causal=True, deterministic=True)).removeprefix("backend ")


def train(documents: Sequence[bytes], steps: int, rows: int, seed: int, title: str) -> tuple[Transformer, float]:
    """Trains a new model, all of whose randomness comes from the seed; returns it and the tokens per second."""
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    batches = pack(shuffled_forever(cut(documents, min(MAX_LENGTH, rows)), seed), rows)
    start, tokens, rate = time.perf_counter(), 0, 0.0
    pause = 0.1 if sys.stderr.isatty() else math.inf  # logs get the first and the last state of the bar
    with tqdm(islice(batches, steps), title, total=steps, unit="step", mininterval=pause) as progress:
        for batch in progress:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            tokens += batch.tokens
            rate = tokens / (time.perf_counter() - start)
            progress.set_postfix_str(f"loss {loss.item():.3f}, {rate:,.0f} tokens/s", refresh=False)
    return model, rate


@torch.no_grad()
def evaluate(model: Transformer, documents: Sequence[bytes], rows: int) -> float:
    """The mean loss over documents, in nats per byte, of pieces as long as those of steps of so many rows."""
    batches = list(pack(cut(documents, min(MAX_LENGTH, rows)), max(rows, 2 * MAX_LENGTH)))
    return sum(model(batch).item() * batch.tokens for batch in batches) / sum(batch.tokens for batch in batches)


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    """Whether all float32 weights of two models are equal, down to the last bit."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in pairs)


def failures(loss: float, entropy: float, same: bool) -> list[str]:
    """The checks that did not pass, in words."""
    checks = {
        f"the held-out loss is not {MARGIN} nats below the unigram entropy": loss < entropy - MARGIN,
        "the two runs ended with different weights": same,
    }
    return [complaint for complaint, passed in checks.items() if not passed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo as the command line asks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_cute.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=800, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and document order (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=positive, default=1024, help="rows of a step, filled with documents (default: %(default)s)"
    )
    chosen = parser.parse_args(arguments)

    # deterministic=True covers the attention; on a GPU the rest of the model needs these two.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_device(device)

    documents = read_documents()
    held_out, training = documents[::HELD_OUT], [doc for i, doc in enumerate(documents) if i % HELD_OUT]
    entropy = unigram_entropy(training)
    print(f"backend: {selected_backend()}")
    print(f"device:  {device}, attention in {attention_dtype(device)}, all else in torch.float32")
    print(f"text:    {len(training)} files, {sum(map(len, training)):,} bytes; {len(held_out)} more are held out")
    print(f"         unigram entropy {entropy:.3f} nats = {entropy / math.log(2):.3f} bits per byte")
    print(f"model:   {sum(weight.numel() for weight in Transformer().parameters()):,} parameters", flush=True)

    first, _ = train(training, chosen.steps, chosen.tokens, chosen.seed, "run 1/2")
    second, rate = train(training, chosen.steps, chosen.tokens, chosen.seed, "run 2/2")
    loss, entropy, same = evaluate(second, held_out, chosen.tokens), unigram_entropy(held_out), same_bits(first, second)
    print(f"loss:    {loss:.3f} nats per byte of the held-out files, whose unigram entropy is {entropy:.3f}")
    print(f"speed:   {rate:,.0f} tokens/s")
    print(f"weights: {'bitwise equal' if same else 'different'} after the two runs")
    failed = failures(loss, entropy, same)
    print(f"FAILED:  {'; '.join(failed)}" if failed else "PASSED")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
