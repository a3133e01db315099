"""Small SM100 kernels in the CuTe DSL that need little more than what is emulated, for tests of the emulator itself.

Each computes D = A B' with A (M, 64), B (N, 64) and D (M, N): M is 128 in one CTA, and 256 in a pair of CTAs.
Sources: the CuTe DSL's own interface to tcgen05 (``cutlass.utils.blackwell_helpers``).
"""

import warnings
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass._mlir.dialects import nvvm
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

DEPTH = 64
COLUMNS_OF_A = 256  # in tensor memory, behind the result


@dataclass(frozen=True)
class Case:
    """Parameters of a kernel."""

    name: str
    n: int = 128
    dtype: str = "BFloat16"
    a_mn_major: bool = False
    b_mn_major: bool = False
    a_in_tensor_memory: bool = False
    waits: bool = True  # for the products, before it reads their result
    finishes: bool = False  # with max(2 D + 1, D, 0) in arithmetic on pairs of float32 and a maximum of three
    pair: bool = False  # two CTAs, each of which holds half of A, of B and of the result
    by_tma: bool = False  # A and B are loaded by TMA, which signals a barrier of the first CTA

    @property
    def m(self) -> int:
        """Number of rows of A."""
        return 256 if self.pair else 128


class Product:
    """D = A B' by CTAs of 128 threads: A and B by way of shared memory, or A by way of tensor memory."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = getattr(cutlass, case.dtype)

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream: Any) -> None:
        """Launches it.

        Args:
            mA: (m, 64) of the case's dtype.
            mB: (n, 64), likewise.
            mD: (m, n) of float32, the result.
            stream: the CUDA stream.
        """
        majors = [
            OperandMajorMode.MN if mn else OperandMajorMode.K for mn in (self.case.a_mn_major, self.case.b_mn_major)
        ]
        source = tcgen05.OperandSource.TMEM if self.case.a_in_tensor_memory else tcgen05.OperandSource.SMEM
        group = tcgen05.CtaGroup.TWO if self.case.pair else tcgen05.CtaGroup.ONE
        tile = (self.case.m, self.case.n, DEPTH)
        mma = blackwell.make_trivial_tiled_mma(
            self.dtype, self.dtype, *majors, cutlass.Float32, group, tile[:2], source
        )
        sA_layout = blackwell.make_smem_layout_a(mma, tile, self.dtype, 1)
        sB_layout = blackwell.make_smem_layout_b(mma, tile, self.dtype, 1)
        ctas = 2 if self.case.pair else 1
        loads = None
        if cutlass.const_expr(self.case.by_tma):
            ranks = cute.tiled_divide(cute.make_layout((ctas, 1, 1)), (mma.thr_id.shape,)).shape
            load = cpasync.CopyBulkTensorTileG2SOp(group)
            loads = (
                cute.nvgpu.make_tiled_tma_atom_A(
                    load, mA, cute.slice_(sA_layout, (None, None, None, 0)), tile, mma, ranks
                ),
                cute.nvgpu.make_tiled_tma_atom_B(
                    load, mB, cute.slice_(sB_layout, (None, None, None, 0)), tile, mma, ranks
                ),
            )
        self.kernel(mA, mB, mD, mma, sA_layout, sB_layout, loads).launch(
            grid=(ctas, 1, 1), block=(128, 1, 1), cluster=(ctas, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        mma: cute.TiledMma,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        loads: Any,
    ) -> None:
        """Loads, multiplies, stores."""
        case, n = self.case, self.case.n
        pair = case.pair
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        sA = allocator.allocate_tensor(self.dtype, sA_layout.outer, 1024, sA_layout.inner)
        sB = allocator.allocate_tensor(self.dtype, sB_layout.outer, 1024, sB_layout.inner)
        barrier = allocator.allocate_array(cutlass.Int64, 1)
        loaded = allocator.allocate_array(cutlass.Int64, 1)
        holder = allocator.allocate_array(cutlass.Int32, 1)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(512, holder, is_two_cta=pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)

        if cutlass.const_expr(case.by_tma):
            self.meet()
            if warp == 0:
                self.load(mma, loads, sA, sB, loaded, rank)
        else:
            self.copy(mA, mB, sA, sB, thread, rank)
        cute.arch.sync_threads()

        base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        tDtD = cute.make_tensor(base, mma.make_fragment_C(mma.partition_shape_C((case.m, n))).layout)
        if cutlass.const_expr(case.a_in_tensor_memory):
            self.store_a(mA, base, thread)
        self.meet()
        fence_after()
        leads = warp == 0
        if cutlass.const_expr(pair):
            leads = leads and rank == 0
        if leads:
            if cutlass.const_expr(case.by_tma):
                cute.arch.mbarrier_wait(loaded, 0)
            self.multiply(mma, tDtD, base, sA, sB)
            with cute.arch.elect_one():
                if cutlass.const_expr(pair):
                    tcgen05.commit(barrier, 3, tcgen05.CtaGroup.TWO)
                else:
                    tcgen05.commit(barrier)
        if cutlass.const_expr(case.waits):
            cute.arch.mbarrier_wait(barrier, 0)
        fence_after()

        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(16)), cutlass.Float32)
        copy = tcgen05.make_tmem_copy(load, tDtD[(None, None), 0, 0])
        part = copy.get_slice(thread)
        tDcD = part.partition_D(cute.make_identity_tensor((128, n)))
        rD = cute.make_rmem_tensor(tDcD.shape, cutlass.Float32)
        cute.copy(copy, part.partition_S(tDtD[(None, None), 0, 0]), rD)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(case.finishes):
            for i in cutlass.range_constexpr(0, cute.size(rD), 2):
                doubled = cute.arch.fma_packed_f32x2((rD[i], rD[i + 1]), (2.0, 2.0), (1.0, 1.0))
                for j in cutlass.range_constexpr(2):
                    rD[i + j] = largest(doubled[j], rD[i + j], cutlass.Float32(0.0))
        for i in cutlass.range_constexpr(cute.size(rD)):
            row, column = tDcD[i]
            mD[rank * 128 + row, column] = rD[i]
        fence_before()
        self.meet()
        if warp == 0:
            cute.arch.dealloc_tmem(base, 512, is_two_cta=pair)

    @cute.jit
    def copy(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        thread: cutlass.Int32,
        rank: cutlass.Int32,
    ) -> None:
        """A row or two of A and B a thread, an element at a time."""
        rows_of_b = self.case.n // 2 if self.case.pair else self.case.n
        for k in cutlass.range_constexpr(DEPTH):
            if cutlass.const_expr(not self.case.a_in_tensor_memory):
                sA[(thread, k % 16), 0, k // 16, 0] = mA[rank * 128 + thread, k]
            for block in cutlass.range_constexpr((rows_of_b + 127) // 128):
                row = block * 128 + thread
                if row < rows_of_b:
                    sB[(row, k % 16), 0, k // 16, 0] = mB[rank * rows_of_b + row, k]
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load(
        self,
        mma: cute.TiledMma,
        loads: Any,
        sA: cute.Tensor,
        sB: cute.Tensor,
        loaded: cute.Pointer,
        rank: cutlass.Int32,
    ) -> None:
        """Loads this CTA's part of A and B by TMA. The first CTA's barrier expects the bytes of both."""
        case = self.case
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, 2 * (case.m + case.n) * DEPTH)
        (atom_a, tensor_a), (atom_b, tensor_b) = loads
        part = mma.get_slice(rank if case.pair else 0)
        tCgA = part.partition_A(cute.local_tile(tensor_a, (case.m, DEPTH), (0, 0)))
        tCgB = part.partition_B(cute.local_tile(tensor_b, (case.n, DEPTH), (0, 0)))
        for atom, shared, tensor in ((atom_a, sA, tCgA), (atom_b, sB, tCgB)):
            to, from_ = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tensor, 0, 3)
            )
            cute.copy(atom, from_, to[None, 0], tma_bar_ptr=loaded)

    @cute.jit
    def meet(self) -> None:
        """All threads of the CTA, or of the pair."""
        if cutlass.const_expr(self.case.pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def store_a(self, mA: cute.Tensor, base: cute.Pointer, thread: cutlass.Int32) -> None:
        """A into tensor memory: two elements a column, a row a lane."""
        columns = cute.make_tensor(base + COLUMNS_OF_A, cute.make_layout((128, DEPTH // 2), stride=(1 << 16, 1)))
        store = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(32)), cutlass.Float32)
        copy = tcgen05.make_tmem_copy(store, columns)
        part = copy.get_slice(thread)
        tAtA = part.partition_D(columns)
        rA = cute.make_rmem_tensor(
            part.partition_S(cute.make_identity_tensor((128, DEPTH // 2))).shape, cutlass.Float32
        )
        halves = cute.recast_tensor(rA, self.dtype)
        for k in cutlass.range_constexpr(DEPTH):
            halves[k] = mA[thread, k]
        cute.copy(copy, rA, tAtA)
        cute.arch.fence_view_async_tmem_store()
        fence_before()

    @cute.jit
    def multiply(
        self, mma: cute.TiledMma, tDtD: cute.Tensor, base: cute.Pointer, sA: cute.Tensor, sB: cute.Tensor
    ) -> None:
        """Issues the products, of 16 of K each."""
        tDsB = mma.make_fragment_B(sB)
        if cutlass.const_expr(self.case.a_in_tensor_memory):
            fragment = mma.make_fragment_A(mma.partition_shape_A((self.case.m, DEPTH)))
            tDsA = cute.make_tensor(cute.recast_ptr(base + COLUMNS_OF_A, dtype=self.dtype), fragment.layout)
        else:
            tDsA = mma.make_fragment_A(sA)[None, None, None, 0]
        for k in cutlass.range_constexpr(DEPTH // 16):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            cute.gemm(mma, tDtD, tDsA[None, None, k], tDsB[None, None, k, 0], tDtD)


def fence_before() -> None:
    """Keeps accesses to tensor memory ahead of the arrival that other threads wait for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def fence_after() -> None:
    """Accesses to tensor memory are not moved before what waits for other threads."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)


def largest(*values: cutlass.Float32) -> cutlass.Float32:
    """Largest of three numbers."""
    a, b, c = (value.ir_value() for value in values)
    return cutlass.Float32(nvvm.fmax(a, b, c=c))


def compiled(case: Case, *options: Any) -> Any:
    """A case compiled by ``cute.compile`` for sm_100a, callable with torch tensors. Needs no GPU.

    Args:
        case: the kernel.
        options: more of the compiler's.
    """
    fake = cute.runtime.make_fake_tensor
    dtype = getattr(cutlass, case.dtype)
    arguments = (
        fake(dtype, (case.m, DEPTH), (DEPTH, 1), assumed_align=16),
        fake(dtype, (case.n, DEPTH), (DEPTH, 1), assumed_align=16),
        fake(cutlass.Float32, (case.m, case.n), (case.n, 1), assumed_align=16),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    chosen = (cute.EnableTVMFFI, cute.GPUArch("sm_100a"), *options)
    with warnings.catch_warnings():  # of loops over registers, which have to be unrolled
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return cute.compile[chosen](Product(case), *arguments, no_jit_engine=True)
