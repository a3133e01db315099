"""A backward pass on Blackwell: its kernels, launched one after the other by one call of compiled code."""

import cutlass.cute as cute

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.common.workspace import Workspace
from flash_attn_cute.kernels.sm100.backward.cta import BackwardCtaSm100
from flash_attn_cute.kernels.sm100.backward.pair import BackwardPairSm100
from flash_attn_cute.kernels.sm100.config import BackwardConfig


class BackwardPassSm100:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.preprocess = Preprocess(config)
        self.main = BackwardPairSm100(config) if config.ctas_a_tile == 2 else BackwardCtaSm100(config)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:  # type: ignore[no-untyped-def]
        """Launches the kernels."""
        ws = Workspace.of(self.config, arguments, None)
        self.preprocess(arguments, ws, stream)
        self.main(arguments, ws, stream)
