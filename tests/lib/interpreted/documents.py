"""Calls of the public functions whose kernels an interpreter executes, and what they leave each document."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flash_attn_cute.backends.base import BackwardCall, Gradients
from flash_attn_cute.backends.cute.backend import CuteBackend
from flash_attn_cute.calls import dispatch
from flash_attn_cute.kernels.registry import Architecture
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Results
from tests.lib.checks import bitwise_equal
from tests.lib.interpreted.common import NUM_SMS, Executed, architecture_of, fresh_counters
from tests.lib.packings import Document, Layout, packing, results


class Interpreted(CuteBackend):
    """The backend, whose kernels are executed on the CPU, under schedules that are drawn."""

    def __init__(self, capability: tuple[int, int], draw: random.Random):
        kernel_of: Any = lambda config: Executed(SimpleNamespace(config=config), draw)  # noqa: E731
        super().__init__(architecture_of(capability), kernel_of=kernel_of)

    def limits(self, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[str, ...]:
        """Tensors on the CPU are what it takes."""
        return ()

    def _architecture_on(self, device: torch.device) -> Architecture:
        return self.architecture

    def num_sms(self, device: torch.device) -> int:
        """The number that plans of interpreted calls are made for."""
        return NUM_SMS

    def forward(self, spec: AttentionSpec, inputs: AttentionInputs) -> Results:
        """See ``Backend.forward``."""
        return self._forward(spec, inputs)

    def backward(self, call: BackwardCall) -> Gradients:
        """See ``Backend.backward``."""
        return self._backward(call)

    def forward_for(self, spec: AttentionSpec, like: AttentionInputs) -> Callable[[AttentionInputs], Results]:
        """See ``Backend.forward_for``."""
        return lambda inputs: self.forward(spec, inputs)

    def backward_for(self, like: BackwardCall) -> Callable[[BackwardCall], Gradients]:
        """See ``Backend.backward_for``."""
        return self.backward


@contextmanager
def interpreted(capability: tuple[int, int], seed: int = 0) -> Iterator[None]:
    """Calls with ``backend="interpreted"`` run the kernels of GPUs of a compute capability meanwhile."""
    backends: dict[str, Any] = {"interpreted": Interpreted(capability, random.Random(seed))}
    with patch.dict(dispatch.BACKENDS, backends), fresh_counters():
        yield


def differing(
    documents: list[Document],
    layouts: list[Layout],
    capability: tuple[int, int],
    sink: Tensor | None = None,
    heard: int | None = None,
    *,
    plainly: bool = False,
    **options: Any,
) -> set[str]:
    """Results of which some document has other bits in a layout than packed alone.

    Args:
        documents: as in ``results``.
        layouts: of all of them.
        capability: of the GPU.
        sink: as in ``results``.
        heard: as in ``results``.
        plainly: a document alone has no padding, and so takes kernels that other tests may not compile; else it has
            the kernels of layouts with padding, where there are such.
        options: what else the calls take.
    """
    found = set()
    padded = any("seqused_q" in layout.arguments for layout in layouts) and not plainly
    options |= {"backend": "interpreted"}
    with interpreted(capability):
        together = [results(layout, documents, sink, heard=heard, **options) for layout in layouts]
        alone: dict[int, dict[str, Tensor]] = {}  # by identity: a document may be there several times
        for number, one in enumerate(documents):
            if heard in (None, number):
                if id(one) not in alone:
                    of_one = None if heard is None else 0
                    layout = packing([one], random.Random(number) if padded else None)
                    (alone[id(one)],) = results(layout, [one], sink, heard=of_one, **options)
                for name, x in alone[id(one)].items():
                    found |= {name for each in together if not bitwise_equal(x, each[number][name])}
    return found
