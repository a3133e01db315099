"""Arguments and launches of interpreted kernels, whatever the pass."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from flash_attn_cute.backends.base import Backend, Gradients
from flash_attn_cute.backends.cute import counters
from flash_attn_cute.backends.cute.backend import CuteBackend, Launch
from flash_attn_cute.backends.cute.plan import takes_tiles
from flash_attn_cute.calls.prepared_call import known_of_block_mask
from flash_attn_cute.kernels.registry import ARCHITECTURES, Architecture, architecture_for
from flash_attn_cute.kernels.sm100.config import TARGETS
from flash_attn_cute.problem.spec import AttentionInputs, AttentionSpec, Options
from lab import interpreter
from lab.interpreter.host import Host, Memory
from tests.lib.checks import random_call
from tests.lib.compiled import code_for
from tests.lib.oracle import Call

B200, B300 = TARGETS  # their compute capabilities
H100 = 9, 0
NUM_SMS = 2


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The architecture of GPUs of a compute capability, with kernels for these."""
    found = ARCHITECTURES[architecture_for(capability) or ""]
    return found.on(capability) if len(found.targets) > 1 else found


def reconfigured(architecture: Architecture, name: Any, configure: Callable[..., Any]) -> Architecture:
    """An architecture that configures a pass otherwise: by a function of its own one, and of what that is given."""
    own = architecture.passes[name]
    other = own._replace(configure=functools.partial(configure, own.configure))
    return architecture._replace(passes=architecture.passes | {name: other})


def as_given(
    call: Call, *, backward: bool = False, deterministic: bool = False, backend: Backend | None = None
) -> tuple[AttentionInputs, AttentionSpec]:
    """A call as backends are given it, with what a backward pass takes; autograd knows nothing of its q, k and v.

    ``backend`` chooses the columns of its block mask.
    """
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "learnable_sink", "mask", "bias")
    fields: dict[str, Any] = {name: getattr(call, name) for name in names}
    fields |= {name: getattr(call, name).detach() for name in ("q", "k", "v")}
    block = 0 if call.block_mask is None else call.block_mask.selection_block
    if block:
        fields["selected"] = call.block_mask.selected()
    elif call.block_mask is not None:
        fields["block_mask"] = call.block_mask.tables(torch.device("cpu"), backward=backward)
    inputs = AttentionInputs(**fields, max_seqlen_q=call.q.shape[-3], max_seqlen_k=call.k.shape[-3])
    left, right = call.window_size
    options = Options(
        softmax_scale=call.softmax_scale,
        window_left=left,
        window_right=0 if call.causal else right,
        softcap=call.softcap,
        deterministic=deterministic,
        zero_padding=True,
    )
    spec = AttentionSpec.of(inputs, options)
    if call.block_mask is not None:
        spec = spec._replace(**known_of_block_mask(call.block_mask)._asdict())
        if backend is not None and not block:
            most = backend.most_listed(spec, inputs, call.block_mask)
            tables = call.block_mask.tables(torch.device("cpu"), backward=True, most_listed=most)
            inputs = inputs._replace(block_mask=tables)
    return inputs, spec


@functools.cache
def host(config: Any) -> Host:
    """The launching code of a configuration."""
    code = code_for(config)
    return Host(code.ptx, code.host)


@dataclasses.dataclass(frozen=True)
class Executed:
    """A pass on the CPU, launching code and kernels, in the place of the compiled one that the backend calls."""

    plan: Any
    draw: random.Random
    changed: interpreter.Program | None = None  # instead of the kernel of that name
    lagging: interpreter.Lagging | None = None
    only: str = ""  # a part of the names of kernels that are executed

    def __call__(self, a: Any) -> None:
        """Launches on the arguments what the pass launches."""
        given = tensors_of(a)
        if "mBias" in given:  # whose rows kernels read in large pieces
            given["mBias"] = given.pop("mBias")
        memory, code = Memory(given), host(self.plan.config)
        for launch in self.launches(a, memory):
            program = code.program(launch.name)
            if self.changed is not None and self.changed.name == launch.name:
                program = self.changed
            interpreter.run(program, launch, memory.bytes, self.draw, self.lagging, memory.tensors)
        memory.read()
        assert not given.get("mNextTile", torch.zeros(1)).any(), "the counters are not left as they were"

    def launches(self, a: Any, memory: Memory) -> list[interpreter.Launch]:
        """The kernels that the launching code launches, in order."""
        launches = host(self.plan.config).launches(a, memory.places)
        return [launch for launch in launches if self.only in launch.name]


class Interpreted(CuteBackend):
    """The backend, whose passes are planned for so many SMs, and executed by the interpreter."""

    def __init__(
        self,
        architecture: Architecture,
        num_sms: int,
        draw: random.Random,
        changed: interpreter.Program | None = None,
        lagging: interpreter.Lagging | None = None,
    ):
        super().__init__(architecture)
        self.planned_sms, self.draw, self.changed, self.lagging = num_sms, draw, changed, lagging
        self.launch_of = self.prepare  # type: ignore[assignment]

    def prepare(self, plan_pass: Any, _: torch.device, spec: AttentionSpec, *given: Any) -> Launch:
        """Plans as ``_launch_of`` does, without a GPU."""
        plan = plan_pass(self.architecture, spec, *given, self.planned_sms)
        return Launch(Executed(plan, self.draw, self.changed, self.lagging), plan, takes_tiles(plan.config))


def fresh_counters() -> Any:
    """A context in which each launch gets a counter of tiles on the CPU."""
    return patch.object(counters, "next_tile", lambda *_: torch.zeros(4, dtype=torch.int32))


def by_name(found: Gradients) -> dict[str, Tensor]:
    """Gradients that there are, by the names that tests have for them."""
    names = {"dq": found.dq, "dk": found.dk, "dv": found.dv, "dbias": found.dbias, "dlearnable_sink": found.dsink}
    return {name: x for name, x in names.items() if x is not None}


def tensors_of(a: Any) -> dict[str, Tensor]:
    """Tensors among the arguments, in their order."""
    found: dict[str, Tensor] = {}
    for name, x in a._asdict().items():
        some = x._asdict() if name == "blocks" else {name: x}
        found |= {key: each for key, each in some.items() if isinstance(each, Tensor)}
    return found


def packed(
    lengths_q: list[int], lengths_k: list[int] | None = None, *, head_dim: int = 64, **options: Any
) -> functools.partial[Call]:
    """Draws a call of packed sequences, in bfloat16 by default; options are those of ``random_call``."""
    options = {"dtype": torch.bfloat16, **options}
    return functools.partial(random_call, lengths_q, lengths_k, head_dim=head_dim, **options)


dense = functools.partial(packed, packed=False)


EVERYTHING: dict[str, Any] = {"softcap": 5.0, "sink": True, "window_size": (100, 3), "seqused": True}
