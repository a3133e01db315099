"""Rates of the GPUs, and what a hand-over takes: known ones, measured ones, and the few that were fitted.

All are clocks of an SM, or an amount per clock and SM, if not said otherwise.
"""

from dataclasses import dataclass, replace

# Fitted: a gemm has so much of the peak at its clock, and the clock follows from power: a kernel that keeps the tensor
# cores busy for less of the time than a gemm has a higher one.
GEMM_OF_PEAK = 0.915
CLOCK_EXPONENT = 0.2


@dataclass(frozen=True)
class Machine:
    """A GPU.

    Known from its documentation: ``sms``, ``ghz``, ``tensor``, ``exp2``, ``shared``. Measured on the H200
    (``benchmarks/notes``): ``l2_together``, ``adds``, ``adds_together``, ``dram``. Assumed: ``l2``, ``tmem``, ``wake``,
    and of Blackwell what was measured on Hopper. Fitted: ``dispatch``, ``handover``, ``load``.
    """

    name: str
    sms: int
    ghz: float  # the highest clock
    tensor: float  # FLOP of 16-bit products
    exp2: float  # exponentials
    dispatch: float  # clocks of an instruction of a warpgroup
    load: float  # from asking TMA for a tile until its first byte is there, or from its last until it is stored
    dram: float  # bytes a second, read and written, of the whole GPU
    gemm: float | None = None  # FLOP/s of a large gemm, from which the clock follows; None: not known
    handover: float = 100.0  # from a product's end, or an access to memory begun, until warps compute, beyond ``wake``
    wake: float = 30.0  # from the last arrival at a barrier until those who wait go on
    shared: float = 128.0  # bytes of shared memory
    tmem: float = 4096.0  # bytes of tensor memory that warps load or store
    l2: float = 64.0  # bytes read from the L2 cache by one SM
    l2_together: float = 35.0  # and by each when all read
    adds: float = 25.0  # bytes added to global memory by one SM
    adds_together: float = 15.5  # and by each when all add

    def product(self, m: int, n: int, k: int) -> float:
        """Clocks of the tensor cores for (m, k) by (k, n)."""
        return 2.0 * m * n * k / self.tensor

    def bytes_shared(self, size: float) -> float:
        """Clocks of shared memory for so many bytes."""
        return size / self.shared

    def clock(self, busy: float, gemm: float | None = None) -> float:
        """GHz of a kernel that keeps the tensor cores busy for a share of the time.

        It follows from a gemm's FLOP/s; if that is not given, here or by the GPU, the clock is the highest.
        """
        gemm = self.gemm if gemm is None else gemm
        if gemm is None:
            return self.ghz
        ghz = gemm / (self.sms * self.tensor * GEMM_OF_PEAK) / 1e9
        return min(self.ghz, ghz * (GEMM_OF_PEAK / busy) ** CLOCK_EXPONENT)


H200 = Machine("H200", sms=132, ghz=1.98, tensor=4096, exp2=16, dispatch=2.1, load=1000.0, dram=4.2e12)
# What has been fitted is as on the H200. More bytes are taken to be read from the L2 cache, and added there, when all
# SMs do: this has not been measured.
B200 = replace(H200, name="B200", sms=148, ghz=1.85, tensor=8192, dram=8e12, l2_together=64.0, adds_together=25.0)
# Another reading of the same published figures: power lowers the clock as it does on the H200, beside a gemm of the
# upper end of what is reported, and two constants are fitted anew.
B200_BY_POWER = replace(B200, name="B200 by power", dispatch=1.5, load=800.0, gemm=1.76e15)
B300 = replace(B200, name="B300", exp2=32)
