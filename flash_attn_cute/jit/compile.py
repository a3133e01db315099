"""From a configuration to a callable: fake tensors in, compiled code out. Needs no GPU."""

import warnings
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from flash_attn_cute.kernels.sm90.config import ForwardConfig
from flash_attn_cute.kernels.sm90.forward import ForwardArguments, ForwardSm90


def compile_forward(config: ForwardConfig, *options: Any) -> Any:
    """Compiles the forward kernel of a configuration; call the result with ``ForwardArguments`` of torch tensors.

    Shapes and strides stay open. What TMA needs (16-byte alignment of the data and of every stride but the last)
    is part of the signature, so that a tensor without it raises instead of being read wrongly.
    """
    kernel = ForwardSm90(config)
    rank = 3 if config.packed else 4

    def rows() -> Any:
        shape = [cute.sym_int() for _ in range(rank)]
        return make_fake_tensor(kernel.dtype, shape, _strides(rank, 16 // 2), assumed_align=16)

    def ints(present: bool) -> Any:
        return make_fake_compact_tensor(cutlass.Int32, (cute.sym_int(),)) if present else None

    lse_rank = rank - 1
    lse = make_fake_tensor(cutlass.Float32, [cute.sym_int() for _ in range(lse_rank)], _strides(lse_rank, 1))
    arguments = ForwardArguments(
        mQ=rows(),
        mK=rows(),
        mV=rows(),
        mO=rows(),
        mLSE=lse,
        mCuSeqlensQ=ints(config.packed),
        mCuSeqlensK=ints(config.packed),
        mSeqUsedQ=ints(config.has_seqused_q),
        mSeqUsedK=ints(config.has_seqused_k),
        mSink=make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) if config.has_sink else None,
        softmax_scale=cutlass.Float32(1.0),
        softcap=cutlass.Float32(1.0),
        window_left=cutlass.Int32(0),
        window_right=cutlass.Int32(0),
        heads_in_cache=cutlass.Int32(1),
        mNextTile=ints(config.persistent),
        num_ctas=cutlass.Int32(1),
    )
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    chosen = (cute.EnableTVMFFI, cute.GPUArch("sm_90a"), *options)
    with warnings.catch_warnings():  # of loops over registers, which have to be unrolled
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return cute.compile[chosen](kernel, arguments, stream)


def _strides(rank: int, divisibility: int) -> list[Any]:
    return [cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)] + [1]
