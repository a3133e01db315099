"""Training with delta of the rounded out and of a precise one, beside float32, where tokens have a common mean.

    python -m benchmarks.training_curve --out build/benchmarks

A student learns the query and key weights of one attention layer from a teacher that is computed in float32. Tokens are
normal numbers and one vector that all of them share, ``mean`` times as large: so keys and values have means, as
activations of language models do. The mean is no information: what it adds to a row's scores is the same for all keys,
and softmax drops it. An error of delta is a multiple of the mean of K in dQ. It cannot lower the loss, but Adam follows
it, and queries grow along that mean until their scores are coarse. (Qiu and Yao, arXiv 2510.04212, describe the
mechanism for out that is rounded with a bias.)

Contenders start from the same weights, see the same tokens, and differ in attention alone. Weights, their gradients and
all other products are float32. It writes training-curve.json and draws training-curve.png.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.plot import save
from flash_attn_cute import flash_attn_func
from flash_attn_cute.runtime.command_line import device as device_of
from flash_attn_cute.runtime.command_line import make_folder, positive

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS, HEAD_DIM, TOKEN_DIM = 4, 128, 64
LEARNING_RATE, SMALL = 1e-3, 0.05
AVERAGED = 20  # losses of so many steps are one point of a curve


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's causal attention, over (1, seqlen, heads, d), in the dtype of its inputs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def in_bfloat16(attend: Attend) -> Attend:
    """Attention of float32 tensors by one that computes in bfloat16."""
    return lambda q, k, v: attend(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()


CONTENDERS: dict[str, Attend] = {
    "float32": sdpa,
    "precise_gradients=True": in_bfloat16(partial(flash_attn_func, causal=True, precise_gradients=True)),
    "default": in_bfloat16(partial(flash_attn_func, causal=True)),
    "SDPA": in_bfloat16(sdpa),
}


class Layer:
    """Weights of queries, keys, values and the output: normal numbers over the root of the number of their inputs."""

    def __init__(self, draw: Callable[..., Tensor]):
        shape = (HEADS * HEAD_DIM, TOKEN_DIM)
        self.q, self.k, self.v = (draw(*shape) / TOKEN_DIM**0.5 for _ in range(3))
        self.o = draw(*shape).T / (HEADS * HEAD_DIM) ** 0.5

    def __call__(self, queries: Tensor, tokens: Tensor, attend: Attend) -> Tensor:
        """The output (seqlen, TOKEN_DIM) of attention from ``queries`` to ``tokens``, both (seqlen, TOKEN_DIM)."""
        projected = ((queries, self.q), (tokens, self.k), (tokens, self.v))
        heads = [(x @ weight.T).unflatten(-1, (HEADS, HEAD_DIM))[None] for x, weight in projected]
        return attend(*heads)[0].flatten(-2) @ self.o.T


def train(attend: Attend, mean: float, rows: int, steps: int, device: torch.device) -> dict[str, list[float]]:
    """Trains a student, and returns its losses and drifts, averaged over ``AVERAGED`` steps.

    The drift is the length of what all queries have in common, over the root of its number of elements.
    """
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    teacher = Layer(draw)
    common = mean * draw(TOKEN_DIM)
    student = Layer(draw)
    student.q *= SMALL
    student.k, student.v, student.o = teacher.k.clone(), teacher.v, teacher.o
    learnt = [student.q.requires_grad_(), student.k.requires_grad_()]
    optimizer = torch.optim.Adam(learnt, LEARNING_RATE, betas=(0.9, 0.95))
    losses, drifts = [], []
    for _ in range(steps):
        varying = draw(rows, TOKEN_DIM)
        tokens = varying + common
        with torch.no_grad():
            target = teacher(varying, tokens, sdpa)
        loss = F.mse_loss(student(tokens, tokens, attend), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        drifts.append((student.q.detach() @ common).square().mean().sqrt())
    return {"loss": _averages(losses), "drift": _averages(drifts)}


def _averages(numbers: list[Tensor]) -> list[float]:
    averages: list[float] = torch.stack([x.mean() for x in torch.stack(numbers).split(AVERAGED)]).tolist()
    return averages


def draw_curves(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Draws losses over steps, a panel for each mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.5 * len(found), 3.2), layout="constrained")
    (panels,) = figure.subplots(1, len(found), squeeze=False)
    for axes, (mean, curves) in zip(panels, found.items(), strict=True):
        for (name, curve), style in zip(curves.items(), ("k-", "C0--", "C3-", "C1:"), strict=False):
            axes.plot([AVERAGED * (i + 1) for i in range(len(curve["loss"]))], curve["loss"], style, label=name)
        axes.set_title(f"mean {mean}")
        axes.set_xlabel("steps")
        axes.set_yscale("log")
    panels[0].set_ylabel("loss")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CONTENDERS))
    save(path, figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each contender with tokens of each mean, and writes and draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--means", nargs="+", type=float, default=[0.0, 5.0, 10.0], help="of tokens (%(default)s)")
    parser.add_argument("--rows", type=positive, default=4096, help="tokens a step (%(default)s)")
    parser.add_argument("--steps", type=positive, default=600, help="(%(default)s)")
    parser.add_argument("--device", type=device_of, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder of results (%(default)s)")
    chosen = parser.parse_args(arguments)
    make_folder(parser, "--out", chosen.out)
    found: dict[str, dict[str, Any]] = {}
    for mean in chosen.means:
        curves = found[f"{mean:g}"] = {}
        for name, attend in CONTENDERS.items():
            curves[name] = train(attend, mean, chosen.rows, chosen.steps, chosen.device)
            (*_, loss), (*_, drift) = curves[name].values()
            print(f"mean {mean:g}  {name:24} loss {loss:.3e}  drift {drift:.2f}", flush=True)
            written = {"rows": chosen.rows, "averaged": AVERAGED, "means": found}
            (chosen.out / "training-curve.json").write_text(json.dumps(written) + "\n")
    draw_curves(chosen.out / "training-curve.png", found)


if __name__ == "__main__":
    main()
