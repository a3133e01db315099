"""Settings for emulated kernels, and what they found wrong: a page of host memory that GPUs reach at the same address.

``runtime.cu`` knows the address and the numbers of the faults.
"""

import ctypes
import functools
import mmap
import struct
from dataclasses import dataclass

ADDRESS = 0x6A0000000000
_SIZE = 1 << 16
_FIRST_RECORD, _RECORD_WORDS, _RECORDS = 16, 16, 128
_MAP_FIXED_NOREPLACE = 0x100000

FAULTS = {
    1: "tcgen05.alloc of {a} columns: expected a power of two from 32 to 512",
    2: "tcgen05.alloc of {a} columns never got them: allocated are {b:#x} (a bit for every 32 columns)",
    3: "tcgen05.dealloc of {b} columns at {a:#x}, which are not allocated: {c:#x} are",
    4: "{b} columns at {a:#x} are not allocated: {c:#x} are (a bit for every 32 columns)",
    5: "lanes of address {a:#x} are not those that this warp reaches, {b}..",
    6: "threads of a warp give different addresses, such as {a:#x}",
    7: "tcgen05.mma with instruction descriptor {a:#010x}, result at {b:#x}, high half of B's descriptor {c:#010x}: no "
    "such form is emulated",
    8: "tcgen05.mma with disabled output lanes ({a:#x})",
    9: "no tensor memory is allocated, or too many CTAs share a multiprocessor",
    10: "tcgen05.dealloc, and the last tcgen05.mma of thread {a} has no tcgen05.commit behind it",
    11: "tcgen05.commit by another thread of the warp than thread {a}, whose tcgen05.mma it does not cover",
    12: "the kernel does not end: waits for the mbarrier at {a:#x}, parity {b}; {c} products and commits are left",
    13: "a pair of CTAs: rank {a}, or the peer has not allocated the same columns",
    14: "a TMA load that signals {a:#x} is not done on {b:#x}, {c} bytes",
}


@dataclass(frozen=True)
class Fault:
    """One thing that a kernel did and must not do."""

    code: int  # a key of FAULTS
    cta: tuple[int, int, int]
    thread: int
    line: int  # of the kernel's PTX for SM100
    values: tuple[int, int, int]

    def __str__(self) -> str:
        a, b, c = self.values
        text = FAULTS.get(self.code, "fault {a:#x} {b:#x} {c:#x} that this version does not know").format(a=a, b=b, c=c)
        return f"PTX line {self.line}, CTA {self.cta}, thread {self.thread}: {text}"


class Mailbox:
    """The page; ``mailbox()`` is that of the process."""

    def __init__(self) -> None:
        """Makes the page at its address.

        Raises:
            OSError: something else is at the address.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
        found = libc.mmap(ADDRESS, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if found != ADDRESS:
            raise OSError(ctypes.get_errno(), f"no page at {ADDRESS:#x}")
        self._bytes = (ctypes.c_char * _SIZE).from_address(ADDRESS)
        self._is_registered = False
        self.configure()

    def configure(self, *, jitter_ns: int = 0, limit_ms: int = 20_000) -> None:
        """Sets limits and jitter for CTAs that allocate tensor memory from now on.

        Args:
            jitter_ns: the longest time that a product, a commit, an access to tensor memory or the end of a wait is
                held back; most are not at all.
            limit_ms: how long a CTA may go on before its kernel ends with a fault.
        """
        struct.pack_into("<2I", self._bytes, 4, jitter_ns, limit_ms)

    def register(self) -> None:
        """Lets the GPU reach the page. Initialises CUDA.

        Raises:
            RuntimeError: CUDA refuses.
        """
        if self._is_registered:
            return
        import torch

        torch.cuda.init()
        runtime = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(ADDRESS, _SIZE, 3))  # portable and mapped
        self._is_registered = True

    def take_faults(self) -> list[Fault]:
        """Faults since the last call, at most 128, of kernels that have ended."""
        found = []
        for number in range(_RECORDS):
            offset = 4 * (_FIRST_RECORD + number * _RECORD_WORDS)
            code, x, y, z, thread, line, a, b, c = struct.unpack_from("<9I", self._bytes, offset)
            if code:
                found.append(Fault(code, (x, y, z), thread, line, (a, b, c)))
                struct.pack_into("<I", self._bytes, offset, 0)
        return found

    def take_reports(self) -> list[str]:
        """Texts of the faults since the last call, each once."""
        return list(dict.fromkeys(map(str, self.take_faults())))


@functools.cache
def mailbox() -> Mailbox:
    """Mailbox of this process, without jitter until it is configured.

    Raises:
        OSError: something else is at its address.
    """
    return Mailbox()
