"""Blackwell designs by name: flash-attn-4's, with what was published of them, and ours.

Published: TFLOP/s of flash-attn-4 on a B200, bfloat16, 8k tokens in a sequence, 32k in all (Zadouri et al., 2026).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flash_attn_cute.kernels.features import Features
from flash_attn_cute.kernels.sm100.backward.backward_config import DQ_STAGES, BackwardConfig, backward_config
from flash_attn_cute.kernels.sm100.config import CTAS
from flash_attn_cute.kernels.sm100.forward_config import ForwardConfig, forward_config
from lab.model.blackwell import Backward, BackwardDesign, Forward, ForwardDesign
from lab.model.launch import Order, Prediction, Shape, predict
from lab.model.machine import B200, Machine
from lab.model.sm import Maker
from lab.model.two_pass import BackwardTwoPass

_TOKENS, _COLUMNS = 32768, 2048
_HEADS_TOGETHER = 3  # of passes with an order, as on Hopper at 8k


@dataclass(frozen=True)
class Case:
    """A design at work on a shape."""

    design: ForwardDesign | BackwardDesign
    causal: bool
    published: float | None = None  # TFLOP/s
    seqlen: int = 8192
    window: int | None = None  # keys that a query sees, if causal
    columns: int | None = None  # of q, k and v, if fewer than those that a tile is made for

    @property
    def shape(self) -> Shape:
        """32k tokens in all, and as many heads as make 2048 columns of v."""
        d, d_v = (self.columns or columns for columns in (self.design.d, self.design.d_v))
        backward = isinstance(self.design, BackwardDesign)
        batch, heads = _TOKENS // self.seqlen, _COLUMNS // d_v
        return Shape(batch, self.seqlen, heads, d, d_v, self.causal, backward, self.window)

    def make(self, machine: Machine = B200) -> Maker:
        """Makes a CTA to simulate."""
        if isinstance(self.design, BackwardDesign):
            return Maker(Backward if self.design.num_passes == 1 else BackwardTwoPass, self.design, machine)
        return Maker(Forward, self.design, machine)

    def predict(self, machine: Machine = B200) -> Prediction:
        """Prediction of the case."""
        design, shape, make = self.design, self.shape, self.make(machine)
        if isinstance(design, ForwardDesign):
            return predict(shape, machine, make, Order(8, last_first=True))
        inputs, sums = 2.0 * shape.rows * 2 * shape.d_v, 4.0 * shape.rows * shape.d
        memory = inputs + 1.5 * sums  # delta, and dQ rounded
        if not design.overwrites:
            memory += sums  # zeros
        if not design.ordered:
            return predict(shape, machine, make, Order(1, last_first=False), memory=memory, launches=3)
        # flash-attn-4 hands a block over when it is at the next one.
        hand_over = 2.0 * machine.load + (0.0 if design.turns_ahead else _STEP)
        order = Order(_HEADS_TOGETHER, last_first=True)
        return predict(shape, machine, make, order, hand_over=hand_over, memory=memory, launches=3)

    def rate(self, machine: Machine = B200) -> float:
        """TFLOP/s that are predicted."""
        return self.tflops(self.predict(machine), machine)

    def tflops(self, prediction: Prediction, machine: Machine = B200) -> float:
        """At the clock that power leaves it."""
        return prediction.tflops(machine.clock(prediction.busy["tensor cores"]))


_STEP = 4600.0  # clocks of a block of flash-attn-4's backward pass


def _fa4_forward(d: int, causal: bool) -> ForwardDesign:
    return ForwardDesign(
        d, d, polynomials=0.125 if causal else 0.1875, persistent=not causal, stages=10 if d == 64 else 3
    )


_FA4_1 = BackwardDesign(128, 128)
_FA4_2 = replace(_FA4_1, pair=True, q_stages=1, piece_columns=8, piece_stages=4)
_FA4_2_ORDERED = replace(_FA4_2, ordered=True, piece_columns=16, piece_stages=2)
PUBLISHED = {
    "forward full": Case(_fa4_forward(128, False), False, 1535),
    "forward causal": Case(_fa4_forward(128, True), True, 1418),
    "backward 1-CTA full": Case(_FA4_1, False, 1248),
    "backward 1-CTA causal": Case(_FA4_1, True, 1118),
    "backward 2-CTA full": Case(_FA4_2, False, 1360),
    "backward 2-CTA causal": Case(_FA4_2, True, 1209),
    "deterministic 1-CTA full": Case(replace(_FA4_1, ordered=True), False, 980),
    "deterministic 1-CTA causal": Case(replace(_FA4_1, ordered=True), True, 934),
    "deterministic 2-CTA full": Case(_FA4_2_ORDERED, False, 1167),
    "deterministic 2-CTA causal": Case(_FA4_2_ORDERED, True, 1097),
    "forward 2-CTA full, best": Case(replace(_fa4_forward(128, False), pair=True, stages=6), False, 1610),
    "forward d = 64 full": Case(_fa4_forward(64, False), False, 1190),
}


def on(machine: str, design: ForwardDesign | BackwardDesign) -> ForwardDesign | BackwardDesign:
    """A design as it is compiled for a GPU: a B300 has the units for all exponentials."""
    if machine == "B300" and isinstance(design, ForwardDesign):
        return replace(design, polynomials=0.0)
    return design


# Ours: kernels by the names that their designs have on the page.

_LONG = 8192  # rows of a sequence that gets pairs of CTAs, where there are any


def _forward(d: int, d_v: int, queries: int = 0, *, bias: bool = False) -> ForwardConfig:
    return forward_config("bfloat16", d, d_v, Features(bias=bias), queries=queries)


def _backward(d: int, d_v: int, keys: int = 0) -> BackwardConfig:
    return backward_config("bfloat16", d, d_v, Features(), keys=keys)


KERNELS: dict[str, ForwardConfig | BackwardConfig] = {
    "forward": _forward(128, 128, _LONG),
    "forward, a bias": _forward(128, 128, _LONG, bias=True),
    "forward d = 64": _forward(64, 64, _LONG),
    "forward (192, 128)": _forward(192, 128),
    "forward (192, 128) 2-CTA": _forward(192, 128, _LONG),
    "forward d = 192": _forward(192, 192, _LONG),
    "forward d = 256": _forward(256, 256),
    "forward d = 256 2-CTA": _forward(256, 256, _LONG),
    "backward 1-CTA": _backward(128, 128),
    "backward 2-CTA": _backward(128, 128, _LONG),
    "backward d = 64": _backward(64, 64, _LONG),
    "backward (192, 128) 1-CTA": _backward(192, 128),
    "backward (192, 128) 2-CTA": _backward(192, 128, _LONG),
    "backward d = 192 1-CTA": _backward(192, 192),
    "backward d = 192 2-CTA": _backward(192, 192, _LONG),
    "backward d = 256 1-CTA": _backward(256, 256),
    "backward d = 256 2-CTA": _backward(256, 256, _LONG),
}


def forward_design(c: ForwardConfig) -> ForwardDesign:
    """Design of a forward kernel. All kernels do without maxima, and hand P over in two parts."""
    return ForwardDesign(
        d=c.tile_d,
        d_v=c.tile_dv,
        polynomials=1 / c.polynomial_every if c.polynomial_every else 0.0,
        maxima=False,
        keys=c.tile_n,
        persistent=c.persistent,
        stages=c.k_stages + c.v_stages,
        o_over_q=c.o_in_q,
        tiles=c.q_parts,
        warpgroups=c.q_parts,
        pair=c.ctas_a_tile == CTAS,
        bias=2 if c.features.bias else 0,
    )


def backward_design(c: BackwardConfig) -> BackwardDesign:
    """Design of a backward kernel.

    In all kernels a warp waits for turns, and the first contributor overwrites; compute warpgroups do not meet.
    """
    return BackwardDesign(
        d=c.tile_d,
        d_v=c.tile_dv,
        pair=c.ctas_a_tile == CTAS,
        ordered=c.features.deterministic,
        turns_ahead=True,
        meets=False,
        overwrites=c.counts_additions,
        own_columns=not (c.dQ_over_S or c.dQ_over_dP),
        persistent=True,
        num_passes=c.num_passes,
        queries=c.tile_m,
        kv_stages=c.kv_stages,
        q_stages=c.q_stages,
        do_stages=c.do_stages,
        piece_columns=c.piece_columns,
        piece_stages=DQ_STAGES,
    )


_OF_KERNELS: dict[str, Any] = {
    name: forward_design(c) if isinstance(c, ForwardConfig) else backward_design(c) for name, c in KERNELS.items()
}
_OURS, _64, _BACKWARD, _BACKWARD_PAIR = (
    _OF_KERNELS[name] for name in ("forward", "forward d = 64", "backward 1-CTA", "backward 2-CTA")
)
_PAIR = replace(_OURS, pair=True, stages=8)
_NO_ORDER = {"ordered": False, "turns_ahead": False, "overwrites": False}
DESIGNS: dict[str, ForwardDesign | BackwardDesign] = {
    **_OF_KERNELS,
    "forward 2-CTA": _PAIR,
    "backward 1-CTA, no order": replace(_BACKWARD, **_NO_ORDER),
    "backward 2-CTA, no order": replace(_BACKWARD_PAIR, **_NO_ORDER),
}


class Change(NamedTuple):
    """A design without it and with it, and at which work."""

    before: ForwardDesign | BackwardDesign
    after: ForwardDesign | BackwardDesign
    window: int | None = None  # causal alone, then
    columns: int | None = None

    def cases(self, causal: bool) -> tuple[Case, Case]:
        """Cases before and after the change."""
        before, after = (
            Case(design, causal, window=self.window, columns=self.columns) for design in (self.before, self.after)
        )
        return before, after

    @property
    def masks(self) -> tuple[bool, ...]:
        """Whether they are causal: full and causal, or causal alone under a window."""
        return (False, True) if self.window is None else (True,)


def _as_pairs(kernel: str, window: int | None = None) -> Change:
    """From the kernel of single CTAs to that of pairs."""
    alone = f"{kernel} 1-CTA" if f"{kernel} 1-CTA" in DESIGNS else kernel
    return Change(DESIGNS[alone], DESIGNS[f"{kernel} 2-CTA"], window)


# Changes that have not been made. They fit into shared memory (a test counts).
_WIDE_192, _BACKWARD_64 = (_OF_KERNELS[name] for name in ("forward d = 192", "backward d = 64"))
_OF_96 = {"d": 96, "d_v": 96}
OPEN: dict[str, Change] = {
    "backward d = 128, a window of 256 keys: 2-CTA": _as_pairs("backward", window=256),
    "forward d = 192: 2-CTA": Change(_WIDE_192, replace(_WIDE_192, keys=128, pair=True)),
    "backward d = 96: tiles of 96 columns": Change(
        _BACKWARD_PAIR, replace(_BACKWARD_PAIR, **_OF_96, own_columns=True), columns=96
    ),
    "backward d = 64: 2-CTA": Change(
        _BACKWARD_64, replace(_BACKWARD_64, pair=True, q_stages=1, do_stages=1, piece_columns=16)
    ),
    "forward: 2-CTA": Change(_OURS, _PAIR),
    "forward d = 96: tiles of 96 columns": Change(_OURS, replace(_OURS, **_OF_96, stages=6), columns=96),
    "forward: three sixteenths of exp2 as polynomials": Change(_OURS, replace(_OURS, polynomials=0.1875)),
    "forward d = 64: three sixteenths of exp2 as polynomials": Change(_64, replace(_64, polynomials=0.1875)),
}
