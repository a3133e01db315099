"""Which kernels there are: for every architecture and pass, how to configure, find, launch and compile them.

Backends and ``jit`` ask here, and name no architecture themselves. A new one is a folder of kernels and an entry here.
Needs no cutlass: configurations are imported when a call needs one, kernels when they are to be compiled.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flash_attn_cute.kernels.arguments import (
    BackwardArguments,
    BiasGradientArguments,
    ColumnSumsArguments,
    ForwardArguments,
    SelectionArguments,
    SelectionBackwardArguments,
)
from flash_attn_cute.kernels.features import PassName
from flash_attn_cute.kernels.sm90 import config as sm90
from flash_attn_cute.kernels.sm100 import config as sm100

if TYPE_CHECKING:
    from flash_attn_cute.kernels.schedule import Schedule


class Pass(NamedTuple):
    """The kernels of one pass on one architecture."""

    # From dtype's name, d, d_v and ``Features`` to a configuration. Forward also group=, query heads of few queries
    # that are rows of one tile, and queries=; backward keys=, and low_contention= of a block mask. These two are how
    # many a sequence has on average, 0 if that is not known. Both take window=, how many keys a query attends to
    # between two bounds, and that of a bias's gradient split=; all take target= where an architecture has several.
    # A configuration is a frozen dataclass with the attributes dtype, tile_d, features and target (what it is compiled
    # for), whose class has its ``architecture`` and ``pass_name``. Backends read more: tile_m, tile_n and ctas_a_tile;
    # reorders_bits; persistent and group (forward); sums_heads, reverses_last and workspace_size() (backward), whose
    # features say whether its kernel writes a bias's gradient; mask_tile (forward, and of that gradient).
    configure: Callable[..., Any]
    arguments: type  # a class of ``kernels.arguments``
    described_by: str  # "module:name" of what makes, of a configuration, the ``Schedule`` of its main kernel
    launched_by: str = ""  # "module:name" of a class that launches other kernels beside the main one, if there are such

    def make_kernel(self, config: Any) -> Any:
        """Object that ``cute.compile`` takes, for one configuration. Imports cutlass."""
        main = self.schedule(config).make_kernel(config)
        return _imported(self.launched_by)(config, main) if self.launched_by else main

    def schedule(self, config: Any) -> "Schedule":
        return _imported(self.described_by)(config)


def _imported(place: str) -> Any:
    """The object at "module:name" below this package, imported when it is needed."""
    module, name = place.split(":")
    return getattr(importlib.import_module(f"{__package__}.{module}"), name)


def _configure(place: str) -> Callable[..., Any]:
    """A ``Pass.configure`` that is imported when it is first called."""
    return lambda *given, **options: _imported(place)(*given, **options)


def _pass(stem: str, arguments: type, launched_by: str = "") -> Pass:
    """A pass with ``forward_config:forward_config`` and ``forward_schedule:forward_schedule`` in a folder.

    ``stem`` is the folder and what these names begin with, "sm90.forward".
    """
    name = stem.rpartition(".")[2]
    configure, schedule = (f"{stem}_{what}:{name}_{what}" for what in ("config", "schedule"))
    return Pass(_configure(configure), arguments, schedule, launched_by)


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
                "forward": _pass("sm90.forward", ForwardArguments),
                "backward": _pass("sm90.backward.backward", BackwardArguments, "sm90.backward.launch:BackwardPassSm90"),
                "bias_gradient": _pass("sm90.backward.bias_gradient", BiasGradientArguments),
                "selection": _pass("sm90.selection", SelectionArguments),
                "selection_backward": Pass(
                    _configure("sm90.selection_config:selection_backward_config"),
                    SelectionBackwardArguments,
                    "sm90.selection_schedule:selection_schedule",
                ),
                "column_sums": _pass("sm90.column_sums", ColumnSumsArguments),
            },
        ),
        Architecture(
            name="sm100",
            targets=sm100.TARGETS,
            dtypes=sm100.DTYPES,
            max_head_dim=max(sm100.HEAD_DIMS),
            passes={
                "forward": _pass("sm100.forward", ForwardArguments),
                "backward": _pass("sm100.backward.backward", BackwardArguments, "common.main_kernels:BackwardPass"),
                "bias_gradient": _pass("sm100.backward.bias_gradient", BiasGradientArguments),
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
    return ARCHITECTURES[config.architecture]


def pass_of(config: Any) -> Pass:
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
