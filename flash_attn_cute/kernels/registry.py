"""Which kernels there are: for every architecture and pass, how to configure, find, launch and compile them.

Backends and ``jit`` ask here, and name no architecture themselves. A new one is a folder of kernels and an entry here.
Needs no cutlass: kernels are imported when they are to be compiled.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from flash_attn_cute.kernels.arguments import BackwardArguments, BiasGradientArguments, ForwardArguments
from flash_attn_cute.kernels.features import PassName
from flash_attn_cute.kernels.schedule import Schedule
from flash_attn_cute.kernels.sm90 import config as sm90
from flash_attn_cute.kernels.sm90.backward.bias_gradient_schedule import (
    bias_gradient_schedule as bias_gradient_schedule_sm90,
)
from flash_attn_cute.kernels.sm90.backward.cluster_schedule import cluster_schedule
from flash_attn_cute.kernels.sm90.backward.cta_schedule import cta_schedule
from flash_attn_cute.kernels.sm90.forward_schedule import forward_schedule as forward_schedule_sm90
from flash_attn_cute.kernels.sm100 import config as sm100
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule as backward_schedule_sm100
from flash_attn_cute.kernels.sm100.backward.bias_gradient_schedule import (
    bias_gradient_schedule as bias_gradient_schedule_sm100,
)
from flash_attn_cute.kernels.sm100.forward_schedule import forward_schedule as forward_schedule_sm100


class Pass(NamedTuple):
    """The kernels of one pass on one architecture."""

    # From dtype's name, d, d_v and ``Features`` (forward also group= and queries=, backward keys=, how many a sequence
    # has; both window=, how many keys a query attends to between two bounds; of a bias's gradient split=; and target=
    # where an architecture has several) to a configuration: a frozen dataclass with the attributes dtype, tile_d,
    # features and target (what it is compiled for), whose class has its ``architecture`` and ``pass_name``. Backends
    # read more: tile_m, tile_n and ctas_a_tile; reorders_bits; persistent, group and parts() (forward; the latter under
    # a mask); sums_heads, reverses_last and workspace_size() (backward), whose features say whether its kernel writes a
    # bias's gradient; mask_tile (forward, and of that gradient).
    configure: Callable[..., Any]
    kernel: str  # "module:name" of what makes, of a configuration, what is compiled and called with the arguments
    arguments: type  # a class of ``kernels.arguments``
    schedule: Callable[[Any], Schedule]  # from a configuration to its main kernel's

    def make_kernel(self, config: Any) -> Any:
        """Object that ``cute.compile`` takes, for one configuration. Imports cutlass."""
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(config)


def backward_schedule_sm90(config: sm90.BackwardConfig) -> Schedule:
    """The schedule of Hopper's backward kernel that serves a configuration."""
    return cta_schedule(config) if isinstance(config, sm90.BackwardCtaConfig) else cluster_schedule(config)


class Architecture(NamedTuple):
    """GPUs that share their kernels."""

    name: str  # what users write as ``backend=``
    targets: dict[tuple[int, int], str]  # what they are compiled for, by the compute capability of a GPU
    dtypes: tuple[str, ...]
    max_head_dim: int
    passes: dict[PassName, Pass]
    num_sms: int = 132  # of the usual GPU, for explaining calls where there is none: an H100 SXM or an H200
    # Whether calls that name no backend get a family of its kernels only where the self-check has passed it.
    is_checked_first: bool = False

    def on(self, capability: tuple[int, int]) -> "Architecture":
        """The architecture with kernels for one compute capability, where it has several targets."""
        target = self.targets[capability]
        passes = {n: p._replace(configure=partial(p.configure, target=target)) for n, p in self.passes.items()}
        return self._replace(passes=passes)


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="sm90",
            targets={(9, 0): sm90.Sm90Config.target},
            dtypes=sm90.DTYPES,
            max_head_dim=max(sm90.HEAD_DIMS),
            passes={
                "forward": Pass(
                    sm90.forward_config, "sm90.forward_kernel:forward_kernel", ForwardArguments, forward_schedule_sm90
                ),
                "backward": Pass(
                    sm90.backward_config,
                    "sm90.backward.launch:BackwardPassSm90",
                    BackwardArguments,
                    backward_schedule_sm90,
                ),
                "bias_gradient": Pass(
                    sm90.bias_gradient_config,
                    "sm90.backward.bias_gradient:BiasGradientSm90",
                    BiasGradientArguments,
                    bias_gradient_schedule_sm90,
                ),
            },
        ),
        Architecture(
            name="sm100",
            targets=sm100.TARGETS,
            dtypes=sm100.DTYPES,
            max_head_dim=max(sm100.HEAD_DIMS),
            passes={
                "forward": Pass(
                    sm100.forward_config,
                    "sm100.forward_kernel:forward_kernel",
                    ForwardArguments,
                    forward_schedule_sm100,
                ),
                "backward": Pass(
                    sm100.backward_config,
                    "sm100.backward.launch:BackwardPassSm100",
                    BackwardArguments,
                    backward_schedule_sm100,
                ),
                "bias_gradient": Pass(
                    sm100.bias_gradient_config,
                    "sm100.backward.bias_gradient:BiasGradientSm100",
                    BiasGradientArguments,
                    bias_gradient_schedule_sm100,
                ),
            },
            num_sms=148,  # a B200
            is_checked_first=True,  # it has been written without such a GPU
        ),
    )
}


def architecture_for(capability: tuple[int, int]) -> str | None:
    """Name of the architecture with kernels for GPUs of a compute capability; None if there is none."""
    return next((name for name, each in ARCHITECTURES.items() if capability in each.targets), None)


def architecture_of(config: Any) -> Architecture:
    """Architecture that a configuration belongs to."""
    return ARCHITECTURES[config.architecture]


def pass_of(config: Any) -> Pass:
    """Pass that a configuration belongs to."""
    return architecture_of(config).passes[config.pass_name]


def family(config: Any) -> str:
    """The kernels that a configuration is one of, as the self-check judges them: one class at one size of tiles.

    Such as "forward two-part d128" (a CTA has two parts of queries), "backward pair d128" or "backward two-pass d256".
    "biases" are one family: the kernels of their gradient, and reading them in the others.
    """
    if config.pass_name == "bias_gradient":
        return "biases"
    kinds = {
        "two-part": getattr(config, "q_parts", 1) == 2,
        "two-pass": getattr(config, "num_passes", 1) == 2,
        "pair": config.ctas_a_tile == 2,
    }
    return " ".join([config.pass_name, *(kind for kind, is_it in kinds.items() if is_it), f"d{config.tile_d}"])
