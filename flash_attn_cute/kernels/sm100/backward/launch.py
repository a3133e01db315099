"""A backward pass on Blackwell: its kernels, launched one after the other by one call of compiled code."""

import cutlass.cute as cute

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100.backward.cta import BackwardCtaSm100
from flash_attn_cute.kernels.sm100.backward.two_walks import BackwardTwoWalksSm100
from flash_attn_cute.kernels.sm100.config import BackwardConfig


class BackwardPassSm100:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.preprocess = Preprocess(config)
        self.main = BackwardCtaSm100(config) if config.walks == 1 else BackwardTwoWalksSm100(config)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernels."""
        ws = Workspace.of(self.config, arguments, None)
        self.preprocess(arguments, ws, stream)
        self.main(arguments, ws, stream)
