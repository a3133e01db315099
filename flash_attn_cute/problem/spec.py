"""Specification of one attention call, which every layer shares.

``AttentionInputs`` holds what changes from call to call without changing any code: the tensors and the
bounds on the sequence lengths. ``AttentionSpec`` holds the rest, is hashable, and is what a backend
decides by. Nothing here depends on a backend. They are named tuples because calls build them: a frozen
dataclass takes several times as long.
"""

import enum
import math
import numbers
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_attn_cute.problem.block_tables import BlockTables

# False; True: the same inputs give the same bits; "invariant": a document does, in whatever call it is.
Deterministic: TypeAlias = bool | Literal["invariant"]
Window: TypeAlias = tuple[int | None, int | None]  # keys visible to the left and to the right; None: all of them


# The usual ones, found fast.
_INTS = frozenset({int, torch.SymInt})


def as_int(value: Any) -> int | None:
    """An int of any kind (NumPy's, for one) as a plain or symbolic one; None for anything else, bools included."""
    if type(value) in _INTS:
        return value
    return None if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


def check_int(name: str, value: Any, expected: str = "an int") -> int:
    """Returns an argument that is to be an int of any kind as ``as_int`` does; raises TypeError for anything else."""
    number = as_int(value)
    if number is None:
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    return number


def check_layout(name: str, x: Tensor) -> None:
    """Raises TypeError unless a tensor is strided, and neither sparse nor nested."""
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a strided tensor, got {x.layout}")


def check_plain(name: str, x: object, why: str = "") -> None:
    """Raises TypeError for a DTensor; ``why`` ends what the error expects."""
    if hasattr(x, "placements"):
        raise TypeError(
            f"{name}: expected a plain tensor{why}, got a DTensor with placements {x.placements}; "
            "full_tensor() is all of it, to_local() this rank's part"
        )


def statically_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes or bounds holds, so far as is known.

    Under tracing a number may come from data, as from ``.item()``. What depends on one is not sure, and is not asked.
    """
    if not torch.compiler.is_compiling() and not isinstance(condition, torch.SymBool):
        return bool(condition)  # within torch.jit.trace it is a tensor
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which takes long to import

    return guard_or_false(condition)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of all sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Feature(enum.Enum):
    """Something a call can need and a backend can lack. The value is how users read it."""

    PACKED = "packed sequences (cu_seqlens)"
    SEQUSED = "seqused_q / seqused_k"
    WINDOW = "causal / window_size"
    SOFTCAP = "softcap"
    SINK = "learnable_sink"
    MASK = "mask"
    BIAS = "bias"
    BLOCK_MASK = "block_mask"
    SELECTION = "key blocks selected per query (BlockMask.from_selection)"
    DETERMINISTIC = "deterministic=True"
    PACKING_INVARIANT = 'deterministic="invariant"'
    PRECISE_GRADIENTS = "precise_gradients=True"
    MAX_LOGITS = "return_max_logits=True"


class AttentionInputs(NamedTuple):
    """The tensors of one call, as the user gave them, and upper bounds on its sequence lengths.

    Dense: q (batch, seqlen_q, nheads, d), k (batch, seqlen_k, nheads_k, d), v (batch, seqlen_k, nheads_k, d_v);
    mask and bias broadcast to (batch, nheads, seqlen_q, seqlen_k). Packed (``cu_seqlens`` given): q (total_q,
    nheads, d), k (total_k, nheads_k, d), v (total_k, nheads_k, d_v); mask and bias broadcast to (nheads,
    total_q, max_seqlen_k), keys counted from the start of their own sequence. A block mask is one of (batch, heads,
    seqlen_q, seqlen_k), or of (1, heads, total_q, total_k). One of key blocks that each query selects is ``selected``
    instead, (batch, heads, seqlen_q, top) or (1, heads, total_q, top), see ``sparsity.selection.Selection``;
    batch is 1 where all entries have the same, and heads are 1, nheads_k or nheads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    learnable_sink: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    block_mask: BlockTables | None = None
    selected: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are concatenated along one dimension of rows."""
        return self.cu_seqlens_q is not None

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(nheads, total_q) for packed sequences, else (batch, nheads, seqlen_q)."""
        *batch, rows, nheads, _ = self.q.shape
        return (*batch, nheads, rows)

    @property
    def lse_dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs."""
        return wide(self.q.dtype)


class Options(NamedTuple):
    """The numbers of a call; ``causal`` is folded into the window, and a scale of None means 1 / sqrt(d).

    ``packing_invariant`` is what ``deterministic="invariant"`` asks for; ``deterministic`` is then True.
    """

    softmax_scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    deterministic: bool = False
    zero_padding: bool = True
    packing_invariant: bool = False
    precise_gradients: bool = False
    max_logits: bool = False

    @property
    def promise(self) -> Deterministic:
        """Value of the argument ``deterministic`` that asks for both flags as they are."""
        return "invariant" if self.packing_invariant else self.deterministic


class Results(NamedTuple):
    """Results of a forward pass.

    Attributes:
        out: like q, last dimension d_v; float32 or wider if ``AttentionSpec.wide``.
        lse: of ``AttentionInputs.lse_shape`` and ``lse_dtype``.
        max_logits: (nheads,), of ``lse_dtype``: the largest softmax_scale * q . k of each head over all pairs that are
            visible, before softcap, bias and sink; -inf where there are none. None if it is not asked for.
        residual: (..., nheads, ``residual_columns(d_v)``), int8: what out has lost by rounding, for the backward pass,
            in an order that kernels have (``kernels.common.residuals``). None without ``precise_gradients``, or if the
            backend does without.
    """

    out: Tensor
    lse: Tensor
    max_logits: Tensor | None = None
    residual: Tensor | None = None

    def asked(self, return_lse: bool) -> "Tensor | tuple[Tensor, ...]":
        """Results as users get them: out alone, or a tuple of it, lse if asked for, and max_logits if there are any."""
        if not return_lse and self.max_logits is None:
            return self.out
        tops = () if self.max_logits is None else (self.max_logits,)
        return (self.out, self.lse, *tops) if return_lse else (self.out, *tops)


def residual_columns(head_dim_v: int) -> int:
    """Columns of ``Results.residual``: those of out, in multiples of 32."""
    return -(-head_dim_v // 32) * 32


_OPTIONAL_TENSORS = "seqused_q", "seqused_k", "mask", "bias", "block_mask"  # of ``AttentionInputs``


class AttentionSpec(NamedTuple):
    """All that a call asks for beyond its tensors' values and lengths.

    ``window_left`` and ``window_right`` are the bottom-right aligned window with ``causal`` folded in (None:
    unbounded on that side), ``softcap`` is 0 when off, and ``softmax_scale`` is always a number.
    ``packing_invariant``: whatever decides the bits of a document's results follows from that document. ``wide``: out,
    or dq, dk and dv, are as wide as lse, as they are to be merged with those of other calls. ``max_logits``: the
    forward pass also has ``Results.max_logits``. ``precise_gradients``: gradients do not suffer from the rounding of
    out, for which the forward pass may have ``Results.residual``.

    Two fields are about the block mask's tiles of keys, which add to dQ. ``low_contention``: they wait so little for
    each other that their additions are ordered even if ``deterministic`` is False. ``has_m_block_order``: each takes
    blocks of queries in an order that a search has found. ``half_blocks`` says that the block mask is made of
    blocks of 64 queries or keys. ``most_halves``: visible blocks of 64 x 64 of a head of it at the most, as far as
    that is known without the device. ``selection_block``: keys of a block that queries select; 0 if they select none.
    """

    dtype: torch.dtype
    nheads: int
    nheads_k: int
    head_dim: int
    head_dim_v: int
    packed: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_sink: bool
    has_mask: bool
    has_bias: bool
    has_block_mask: bool
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    deterministic: bool
    zero_padding: bool
    low_contention: bool = False
    has_m_block_order: bool = False
    half_blocks: bool = False
    most_halves: int = 0
    selection_block: int = 0
    packing_invariant: bool = False
    wide: bool = False
    precise_gradients: bool = False
    max_logits: bool = False

    @classmethod
    def of(cls, inputs: AttentionInputs, options: Options) -> "AttentionSpec":
        """The spec of a call from its (valid) inputs and options."""
        nheads, head_dim = inputs.q.shape[-2:]
        if options.softmax_scale is None:
            options = options._replace(softmax_scale=1 / math.sqrt(head_dim))
        given: Any = {f"has_{name}": getattr(inputs, name) is not None for name in _OPTIONAL_TENSORS}
        return cls(
            dtype=inputs.q.dtype,
            nheads=nheads,
            nheads_k=inputs.k.shape[-2],
            head_dim=head_dim,
            head_dim_v=inputs.v.shape[-1],
            packed=inputs.packed,
            has_sink=inputs.learnable_sink is not None,
            **given,
            **options._asdict(),
        )

    @property
    def has_seqused(self) -> bool:
        """Whether padding may stand within a sequence's slot."""
        return self.has_seqused_q or self.has_seqused_k

    @property
    def required(self) -> tuple[Feature, ...]:
        """The features without which a backend cannot serve this call."""
        needs = {
            Feature.PACKED: self.packed,
            Feature.SEQUSED: self.has_seqused,
            Feature.WINDOW: self.window_left is not None or self.window_right is not None,
            Feature.SOFTCAP: self.softcap > 0,
            Feature.SINK: self.has_sink,
            Feature.MASK: self.has_mask,
            Feature.BIAS: self.has_bias,
            Feature.BLOCK_MASK: self.has_block_mask,
            Feature.SELECTION: self.selection_block > 0,
            Feature.DETERMINISTIC: self.deterministic and not self.packing_invariant,
            Feature.PACKING_INVARIANT: self.packing_invariant,
            Feature.PRECISE_GRADIENTS: self.precise_gradients,
            Feature.MAX_LOGITS: self.max_logits,
        }
        return tuple(feature for feature, needed in needs.items() if needed)

    def describe(self, inputs: AttentionInputs) -> str:
        """A call's shape in words that stay the same from step to step: those of packed sequences have no lengths."""
        words = []
        if self.packed:
            words.append("packed")
        else:
            batch, seqlen_q = inputs.q.shape[:2]
            words += [f"b{batch}", f"s{_either(seqlen_q, inputs.k.shape[1])}"]
        words += [f"h{_either(self.nheads, self.nheads_k)}", f"d{_either(self.head_dim, self.head_dim_v)}"]
        words.append(str(self.dtype).removeprefix("torch."))
        window = self.window_left, self.window_right
        if window == (None, 0):
            words.append("causal")
        elif window != (None, None):
            words.append(f"window {window[0]},{window[1]}")
        return " ".join(words)


def _either(a: int, b: int) -> str:
    return str(a) if a == b else f"{a}/{b}"
