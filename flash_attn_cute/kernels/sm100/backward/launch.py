"""A backward pass on Blackwell: its kernels, launched one after the other by one call of compiled code."""

import cutlass.cute as cute

from flash_attn_cute.kernels.arguments import BackwardArguments
from flash_attn_cute.kernels.common.key_lists import KeyTables
from flash_attn_cute.kernels.common.preprocess import Preprocess
from flash_attn_cute.kernels.sm100.backward.backward_config import BackwardConfig
from flash_attn_cute.kernels.sm100.backward.cta import BackwardCtaSm100
from flash_attn_cute.kernels.sm100.backward.pair import BackwardPairSm100
from flash_attn_cute.kernels.sm100.backward.pair_two_pass import BackwardPairTwoPassSm100
from flash_attn_cute.kernels.sm100.backward.two_pass import BackwardTwoPassSm100


class BackwardPassSm100:
    """The kernels of one configuration."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.tables, self.preprocess = KeyTables(config), Preprocess(config)
        kernels = {
            (1, 1): BackwardCtaSm100,
            (2, 1): BackwardTwoPassSm100,
            (1, 2): BackwardPairSm100,
            (2, 2): BackwardPairTwoPassSm100,
        }
        self.main = kernels[config.num_passes, config.ctas_a_tile](config)

    @cute.jit
    def __call__(self, arguments: BackwardArguments, stream) -> None:
        ws = self.tables.begin(arguments, stream)
        self.preprocess(arguments, ws, stream)
        self.tables.finish(arguments, ws, stream)
        self.main(arguments, ws, stream)
