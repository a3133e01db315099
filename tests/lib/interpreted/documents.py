"""Documents of interpreted calls: what a call leaves each of them, and the same document alone."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flash_attn_cute.spec import AttentionSpec
from tests.lib import oracle
from tests.lib.checks import bitwise_equal, offsets
from tests.lib.interpreted import backward, forward
from tests.lib.oracle import Call

Results = dict[str, Tensor]


class Ordered(backward.Interpreted):
    """The backend, whose backward pass is deterministic or "invariant"."""

    def __init__(self, promise: bool | str, *given: Any, **options: Any):
        super().__init__(*given, **options)
        self.promise = promise

    def prepare(self, spec: AttentionSpec, *given: Any) -> Any:
        """Plans the pass of a spec that asks for it."""
        return super().prepare(spec._replace(deterministic=True, packing_invariant=self.promise == "invariant"), *given)


def results_of(call: Call, dout: Tensor, seed: int, capability: tuple[int, int], promise: bool | str) -> Results:
    """Out, lse and the gradients, under schedules that are drawn."""
    asked = {"packing_invariant": promise == "invariant"}
    draw = random.Random(seed)
    found = forward.results_of(call, draw, None, None, by_pairs=False, capability=capability, asked=asked)
    true_lse = oracle.attention(call.to(torch.float64))[1].detach().float()
    backend = Ordered(promise, draw, capability=capability)
    return {"out": found.out, "lse": found.lse, **backward.execute(call, backend, true_lse, dout, None)}


def parts(call: Call, x: Tensor, name: str) -> Iterator[Tensor]:
    """Each document's part of a result, or of a tensor of rows."""
    for entry, rows, _ in call.sequences():  # as many queries as keys
        own = x if call.cu_seqlens_q is not None else x[entry]
        yield (own[:, rows] if name == "lse" else own[rows]).contiguous()


def differing(call: Call, dout: Tensor, capability: tuple[int, int], promise: bool | str) -> set[str]:
    """Results of which some document has other bits in a call than packed alone. Queries and keys are as many."""
    together = results_of(call, dout, 0, capability, promise)
    found = set()
    tensors = [list(parts(call, x.detach(), "")) for x in (call.q, call.k, call.v, dout)]
    for number, (q, k, v, own_dout) in enumerate(zip(*tensors, strict=True)):
        cu = offsets([len(q)])
        alone = dataclasses.replace(
            call,
            **{name: x.clone().requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)},
            cu_seqlens_q=cu,
            cu_seqlens_k=cu,
            seqused_q=None,
            seqused_k=None,
        )
        for name, x in results_of(alone, own_dout, number + 1, capability, promise).items():
            got = list(parts(call, together[name], name))[number]
            if not bitwise_equal(got, x.contiguous()):
                found.add(name)
    return found
