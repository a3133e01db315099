"""Which kernels there are: for every architecture and pass, how to configure, find, launch and compile them.

Backends and ``jit`` ask here, and name no architecture themselves. A new one is a folder of kernels and an entry here.
Needs no cutlass: kernels are imported when they are to be compiled.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from flash_attn_cute.kernels.arguments import BackwardArguments, BiasGradientArguments, ForwardArguments
from flash_attn_cute.kernels.features import PassName
from flash_attn_cute.kernels.sm90 import config as sm90


class Pass(NamedTuple):
    """The kernels of one pass on one architecture."""

    # From dtype's name, d, d_v and ``Features`` (forward also group=, of a bias's gradient split=) to a configuration:
    # a frozen dataclass with the attributes dtype, tile_d and features, whose class tells its ``architecture`` and
    # ``pass_name``. Backends read more: tile_m and tile_n; persistent, group and parts() (forward); ctas_a_tile,
    # reverses_last and workspace_size() (backward), whose features say whether its kernel writes a bias's gradient;
    # mask_tile (of that gradient).
    configure: Callable[..., Any]
    kernel: str  # "module:class" of what is compiled; it is made from a configuration and called with the arguments
    arguments: type  # a class of ``kernels.arguments``

    def make_kernel(self, config: Any) -> Any:
        """What ``cute.compile`` takes, of one configuration. Imports cutlass."""
        module, name = self.kernel.split(":")
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(config)


class Architecture(NamedTuple):
    """GPUs that share their kernels."""

    name: str  # what users write as ``backend=``
    capabilities: tuple[tuple[int, int], ...]  # of the GPUs that run them
    target: str  # what they are compiled for
    dtypes: tuple[str, ...]
    max_head_dim: int
    passes: dict[PassName, Pass]
    num_sms: int = 132  # of the usual GPU, for explaining calls where there is none: an H100 SXM or an H200


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="sm90",
            capabilities=((9, 0),),
            target="sm_90a",
            dtypes=sm90.DTYPES,
            max_head_dim=max(sm90.HEAD_DIMS),
            passes={
                "forward": Pass(sm90.forward_config, "sm90.forward:ForwardSm90", ForwardArguments),
                "backward": Pass(sm90.backward_config, "sm90.backward.launch:BackwardPassSm90", BackwardArguments),
                "bias_gradient": Pass(
                    sm90.bias_gradient_config, "sm90.backward.bias_gradient:BiasGradientSm90", BiasGradientArguments
                ),
            },
        ),
    )
}


def architecture_of(config: Any) -> Architecture:
    """That which a configuration is for."""
    return ARCHITECTURES[config.architecture]


def pass_of(config: Any) -> Pass:
    """That which a configuration is for."""
    return architecture_of(config).passes[config.pass_name]
