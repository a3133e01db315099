"""From a configuration to a callable: fake arguments in, compiled code out. Needs no GPU."""

import warnings
from operator import attrgetter
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from flash_attn_cute.kernels import registry
from flash_attn_cute.kernels.arguments import Argument, described
from flash_attn_cute.kernels.common.dtypes import DTYPES


def compile_kernel(config: Any, *options: Any) -> Any:
    """Compiles the kernels of a configuration, for ``code.export``.

    What ``code.load`` makes of it is called with its pass's arguments, of torch tensors.
    Shapes and strides stay open. What TMA needs (16-byte alignment of the data and of every stride but the last)
    is part of the signature, so that a tensor without it raises instead of being read wrongly.
    """
    kernels = registry.pass_of(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    chosen = (cute.EnableTVMFFI, cute.GPUArch(config.target), *options)
    with warnings.catch_warnings():  # of loops over registers, which have to be unrolled
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        # The result is exported. An engine would generate the host's code twice more, only for a call from here.
        return cute.compile[chosen](kernels.make_kernel(config), fake_arguments(config), stream, no_jit_engine=True)


def fake_arguments(config: Any) -> Any:
    """The arguments of a configuration's pass, without data."""
    return _fakes(registry.pass_of(config).arguments, config)


def _fakes(arguments: type, config: Any) -> Any:
    fakes: dict[str, Any] = {}
    for name, described_as in described(arguments).items():
        if isinstance(described_as, type):
            fakes[name] = _fakes(described_as, config)
        else:
            fakes[name] = _fake(described_as, config) if described_as.is_given(config) else None
    return arguments(**fakes)


def _fake(argument: Argument, config: Any) -> Any:
    """An argument without data: all its sizes and strides are open."""
    dtype = getattr(cutlass, argument.dtype) if argument.dtype else DTYPES[config.dtype]
    if argument.float32_if and attrgetter(argument.float32_if)(config):
        dtype = cutlass.Float32
    if argument.rank == 0:
        return dtype(1)
    size = cute.sym_int64 if argument.wide else cute.sym_int
    rank = argument.rank
    if rank > 1 and config.features.packed and not argument.of_scores:
        rank -= 1
    divisibility = max(1, 8 * argument.align // dtype.width)
    strides = [cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)]
    strided = attrgetter(argument.strided)(config) if isinstance(argument.strided, str) else argument.strided
    last = cute.sym_int64() if strided else 1
    sizes = [size() for _ in range(rank)]
    return make_fake_tensor(dtype, sizes, [*strides, last], assumed_align=argument.align or None)
