"""The Hopper kernels as a call launches them, and the record of what they took."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from flash_attn_cute import explain
from lab.model.hopper import BackwardCluster, BackwardCta, Forward
from lab.model.launch import Order, Prediction, Shape, predict
from lab.model.machine import H200
from lab.model.sm import Maker

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
CALL = 35e-6  # fitted: seconds of a call beyond its tiles, with caches that hold none of its inputs
HAND_OVER = 3300.0  # clocks, 2 us: notes/determinism.md


class HopperPass(NamedTuple):
    """A pass as the package launches it."""

    shape: Shape
    make: Maker
    order: Order
    hand_over: float | None = None
    memory: float = 0.0
    launches: int = 1

    def predict(self) -> Prediction:
        """Prediction of the pass."""
        return predict(
            self.shape,
            H200,
            self.make,
            self.order,
            hand_over=self.hand_over,
            memory=self.memory,
            launches=self.launches,
        )


def hopper_pass(shape: Shape) -> HopperPass:
    """The configuration, the order of tiles and the kernels beside it that the package would launch.

    Up to d = 128 backward passes add to dQ in order, as those of the record do, and as the model's kernel does.
    """
    in_order = shape.backward and max(shape.d, shape.d_v) <= 128
    q, v = (
        torch.empty(shape.batch, shape.seqlen, shape.heads, d, dtype=torch.bfloat16, device="meta")
        for d in (shape.d, shape.d_v)
    )
    explanation = explain(q, q, v, causal=shape.causal, deterministic=in_order, gpu="sm90")
    assert explanation.forward is not None
    assert explanation.backward is not None
    if not shape.backward:
        order = Order(explanation.forward.numbers.heads_in_cache, last_first=True)
        return HopperPass(shape, Maker(Forward, explanation.forward.config, H200), order)
    config, numbers = explanation.backward.config, explanation.backward.numbers
    order = Order(numbers.heads_in_cache, config.features.deterministic, numbers.sections, config.reverses_last)
    inputs, sums = 2.0 * shape.rows * 2 * shape.d_v, 4.0 * shape.rows * shape.d
    memory = inputs + 1.5 * sums  # delta, and dQ rounded
    if config.ctas_a_tile == 1:
        # dQ is rounded by the same kernel, when no tile is left.
        return HopperPass(shape, Maker(BackwardCta, config, H200), order, HAND_OVER, memory, launches=2)
    memory += sums  # sums begin with zeros
    return HopperPass(shape, Maker(BackwardCluster, config, H200), order, memory=memory, launches=3)


class Row(NamedTuple):
    """A case of the record, with what it took."""

    suite: str
    name: str
    shape: Shape
    seconds: float  # the median
    gemm: float  # FLOP/s of the gemm of the same rounds

    def ghz(self, prediction: Prediction) -> float:
        """The clock at which the kernel ran, from that of the gemm."""
        return H200.clock(prediction.busy["tensor cores"], self.gemm)

    def error(self, prediction: Prediction) -> float:
        """Time predicted over time measured, less 1."""
        return (prediction.seconds(self.ghz(prediction)) + CALL) / self.seconds - 1


def rows(suite: str) -> Iterator[Row]:
    """The dense rows of ``benchmarks/results/SUITE-cuda-bfloat16.json`` with as many heads of keys as of queries."""
    for case in json.loads((RESULTS / f"{suite}-cuda-bfloat16.json").read_text())["cases"]:
        found = re.fullmatch(r"(?:(forward|backward) )?(\d+)x(\d+) (\d+k?) (causal|full|plain)", case["name"])
        sizes = re.match(r"q(?:, k and v)? \((\d+), (\d+), ", case["detail"])
        if found is None or sizes is None or suite == "both":
            continue
        shape = Shape(
            batch=int(sizes[1]),
            seqlen=int(sizes[2]),
            heads=int(found[2]),
            d=int(found[3]),
            d_v=int(found[3]),
            causal=found[5] == "causal",
            backward=(found[1] or suite) == "backward",
        )
        median_us, median_tflops = case["measured"]["flash_attn_cute"][0], case["rates"][0]
        yield Row(suite, case["name"], shape, 1e-6 * median_us, 1e12 * median_tflops)
