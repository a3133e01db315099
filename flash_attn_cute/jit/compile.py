"""From a configuration to a callable: fake tensors in, compiled code out. Needs no GPU."""

import warnings
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flash_attn_cute.kernels.sm90.backward_pass import BackwardPassArguments, BackwardPassSm90
from flash_attn_cute.kernels.sm90.config import PART_ALIGN, BackwardPassConfig, ForwardConfig
from flash_attn_cute.kernels.sm90.forward import ForwardArguments, ForwardSm90

_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def compile_kernel(config: Any, *options: Any) -> Any:
    """Compiles the kernels of a configuration; call the result with its kind's arguments, of torch tensors.

    Shapes and strides stay open. What TMA needs (16-byte alignment of the data and of every stride but the last)
    is part of the signature, so that a tensor without it raises instead of being read wrongly.
    """
    kernel, arguments = _KINDS[type(config)](config)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    chosen = (cute.EnableTVMFFI, cute.GPUArch("sm_90a"), *options)
    with warnings.catch_warnings():  # of loops over registers, which have to be unrolled
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return cute.compile[chosen](kernel, arguments, stream)


def _forward(config: ForwardConfig) -> tuple[Any, Any]:
    kernel = ForwardSm90(config)
    rank = 3 if config.packed else 4
    arguments = ForwardArguments(
        mQ=_rows(kernel.dtype, rank),
        mK=_rows(kernel.dtype, rank),
        mV=_rows(kernel.dtype, rank),
        mO=_rows(kernel.dtype, rank),
        mLSE=_numbers(rank - 1),
        mCuSeqlensQ=_ints(config.packed),
        mCuSeqlensK=_ints(config.packed),
        mSeqUsedQ=_ints(config.has_seqused_q),
        mSeqUsedK=_ints(config.has_seqused_k),
        mSink=make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) if config.has_sink else None,
        softmax_scale=cutlass.Float32(1.0),
        softcap=cutlass.Float32(1.0),
        window_left=cutlass.Int32(0),
        window_right=cutlass.Int32(0),
        heads_in_cache=cutlass.Int32(1),
        mNextTile=_ints(config.persistent),
        num_ctas=cutlass.Int32(1),
    )
    return kernel, arguments


def _backward(config: BackwardPassConfig) -> tuple[Any, Any]:
    main, dtype = config.main, _DTYPES[config.main.dtype]
    rank = 3 if main.packed else 4
    arguments = BackwardPassArguments(
        *(_rows(dtype, rank) for _ in range(5)),
        mLSE=_numbers(rank - 1),
        mdLSE=_numbers(rank - 1) if config.has_dlse else None,
        mdQ=_rows(dtype, rank),
        mdK=_rows(dtype, rank),
        mdV=_rows(dtype, rank),
        mWorkspace=make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=PART_ALIGN),
        mCuSeqlensQ=_ints(main.packed),
        mCuSeqlensK=_ints(main.packed),
        mSeqUsedQ=_ints(main.has_seqused_q),
        mSeqUsedK=_ints(main.has_seqused_k),
        blocks=cutlass.Int32(1),
        blocks_k=cutlass.Int32(1),
        softmax_scale=cutlass.Float32(1.0),
        softcap=cutlass.Float32(1.0),
        window_left=cutlass.Int32(0),
        window_right=cutlass.Int32(0),
        heads_in_cache=cutlass.Int32(1),
        sections=cutlass.Int32(1),
        heads_a_tile=cutlass.Int32(1),
        mNextTile=_ints(True),
        num_ctas=cutlass.Int32(1),
    )
    return BackwardPassSm90(config), arguments


_KINDS = {ForwardConfig: _forward, BackwardPassConfig: _backward}


def _rows(dtype: Any, rank: int) -> Any:
    shape = [cute.sym_int() for _ in range(rank)]
    return make_fake_tensor(dtype, shape, _strides(rank, 16 // 2), assumed_align=16)


def _numbers(rank: int) -> Any:
    return make_fake_tensor(cutlass.Float32, [cute.sym_int() for _ in range(rank)], _strides(rank, 1))


def _ints(present: bool) -> Any:
    return make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),)) if present else None


def _strides(rank: int, divisibility: int) -> list[Any]:
    return [cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)] + [1]
