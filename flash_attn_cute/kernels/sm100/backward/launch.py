"""A backward pass on Blackwell: its kernels, launched one after the other by one call of compiled code."""

import cutlass.cute as cute

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_lists import KeyTables
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.backward_schedule import backward_schedule


class BackwardPassSm100:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.tables, self.preprocess = KeyTables(config), Preprocess(config)
        self.main = backward_schedule(config).make_kernel(config)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:
        ws = self.tables.begin(arguments, stream)
        self.preprocess(arguments, ws, stream)
        self.tables.finish(arguments, ws, stream)
        self.main(arguments, ws, stream)
