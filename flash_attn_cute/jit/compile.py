"""From a configuration to a callable: fake arguments in, compiled code out. Needs no GPU."""

import warnings
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flash_attn_cute.kernels import registry
from flash_attn_cute.kernels.arguments import Kind, described

_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def compile_kernel(config: Any, *options: Any) -> Any:
    """Compiles the kernels of a configuration, for ``code.export``.

    What ``code.load`` makes of it is called with its pass's arguments, of torch tensors.
    Shapes and strides stay open. What TMA needs (16-byte alignment of the data and of every stride but the last)
    is part of the signature, so that a tensor without it raises instead of being read wrongly.
    """
    kernels = registry.pass_of(config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    chosen = (cute.EnableTVMFFI, cute.GPUArch(registry.architecture_of(config).target), *options)
    with warnings.catch_warnings():  # of loops over registers, which have to be unrolled
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        # The result is exported. An engine would generate the host's code twice more, only for a call from here.
        return cute.compile[chosen](kernels.make_kernel(config), fake_arguments(config), stream, no_jit_engine=True)


def fake_arguments(config: Any) -> Any:
    """The arguments of a configuration's pass, without data."""
    arguments = registry.pass_of(config).arguments
    return arguments(
        **{
            name: _FAKES[argument.kind](config) if argument.is_given(config) else None
            for name, argument in described(arguments).items()
        }
    )


def _rows(config: Any) -> Any:
    rank = _rank(config)
    shape = [cute.sym_int() for _ in range(rank)]
    return make_fake_tensor(_DTYPES[config.dtype], shape, _strides(rank, 16 // 2), assumed_align=16)


def _row_numbers(config: Any) -> Any:
    rank = _rank(config) - 1
    return make_fake_tensor(cutlass.Float32, [cute.sym_int() for _ in range(rank)], _strides(rank, 1))


def _rank(config: Any) -> int:
    return 3 if config.features.packed else 4


def _strides(rank: int, divisibility: int) -> list[Any]:
    return [cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)] + [1]


_FAKES: dict[Kind, Callable[[Any], Any]] = {
    Kind.ROWS: _rows,
    Kind.ROW_NUMBERS: _row_numbers,
    Kind.FLOATS: lambda _: make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)),
    Kind.INTS: lambda _: make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),)),
    Kind.BYTES: lambda _: make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=128),
    Kind.FLOAT: lambda _: cutlass.Float32(1.0),
    Kind.INT: lambda _: cutlass.Int32(1),
}
