"""A backend: the features it declares, the limits it states, and its two passes."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Feature, Results
from flash_attn_cute.sparsity.block_mask import BlockMask


class Gradients(NamedTuple):
    """Gradients of one call, each of its input's shape and dtype; the last two are None if they are not wanted."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsink: Tensor | None = None


class BackwardCall(NamedTuple):
    """A call whose forward pass has run: its results, their gradients (of any strides), and what else is wanted.

    With ``residual`` (``Results.residual``) out is used as it was before it was rounded.
    A backend writes gradients of q, k and v, and those of bias and learnable_sink if they are needed.
    """

    spec: AttentionSpec
    inputs: AttentionInputs
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None = None
    residual: Tensor | None = None
    need_dbias: bool = False
    need_dsink: bool = False


class Backend(Protocol):
    """One implementation of attention. Its methods run below autograd and see only valid arguments."""

    @property
    def name(self) -> str:
        """The value of ``backend=`` that asks for it."""
        ...

    @property
    def has_residual(self) -> bool:
        """Whether ``Results.residual`` is there for calls with ``precise_gradients``."""
        ...

    @property
    def has_column_sums(self) -> bool:
        """Whether it has a kernel of its own for ``column_sums``."""
        ...

    @property
    def features(self) -> frozenset[Feature]:
        """Everything optional it can serve."""
        ...

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """Reasons beyond features why it cannot serve a call; empty if none.

        They may depend on the tensors' devices, dtypes, shapes and strides, which is what a plan is kept by.
        """
        ...

    def is_made_for(self, device: torch.device) -> bool:
        """Whether it has been written for that device; a call there that it cannot serve warns the user."""
        ...

    def most_listed(self, spec: AttentionSpec, inputs: AttentionInputs, block_mask: BlockMask) -> int:
        """Blocks of 128 x 128 that a mask may list for the backward pass to read half columns of it, not columns.

        Asked before the mask has tables. 0 if it reads columns, however few blocks there are.
        """
        ...

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        """Allocates and computes the results."""
        ...

    def column_sums(self, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Sums of each key's probabilities, (batch, nheads, seqlen_k) or packed (nheads, total_k), float32.

        Only called if ``has_column_sums``. Calls have at most windows and padding. ``lse`` is that of their scores,
        float32, of ``inputs.lse_shape``. v is not read. The sums of padding are 0.
        """
        ...

    def forward_for(self, spec: AttentionSpec, like: AttentionInputs) -> Callable[[AttentionInputs], Results]:
        """``forward`` for calls of one spec and equal bounds, without block masks, that look like this one.

        Types, dtypes, devices, shapes and strides of their tensors are equal; addresses are not.
        """
        ...

    def backward_for(self, like: BackwardCall) -> Callable[[BackwardCall], Gradients]:
        """``backward`` for calls that look like this one, likewise, and want the same gradients."""
        ...

    def backward(self, call: BackwardCall) -> Gradients:
        """Gradients of what forward was given; see ``spec.wide`` for their dtypes."""
        ...
