"""A kernel, every instruction of it turned into what it does."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from lab.interpreter import arithmetic, lines, memory, tensor, tma, warpgroup
from lab.interpreter.state import Effect, FaultError, Mask, Warp, converged
from lab.interpreter.statement import Statement
from lab.ptx import tree


def _nothing(s: Statement) -> Effect:
    """Does nothing for instructions that order others or are for speed: here everything happens in some order."""
    return lambda warp, mask: None


def _give_registers_back(s: Statement) -> Effect:
    """A warp keeps so many a thread; the others may get what it had more."""
    count = s.operands[0].number

    def give(warp: Warp, mask: Mask) -> None:
        converged(mask)
        if count is None or count > warp.num_registers:
            raise FaultError(f"gives registers back, down to {count} of {warp.num_registers}")
        warp.cta.free_registers += warp.num_registers - count
        warp.num_registers = count

    return give


# By how an instruction's name begins; the first that fits.
_INSTRUCTIONS: dict[str, Callable[[Statement], Effect]] = {
    **arithmetic.INSTRUCTIONS,
    "ld": memory.load,
    "st": memory.store,
    **dict.fromkeys(("ldmatrix", "stmatrix"), memory.matrices),
    "atom.global.add": memory.atomic_add,
    "red": memory.reduce,
    "mbarrier.test_wait.parity": memory.test_barrier,
    "mbarrier.init": memory.init_barrier,
    "barrier.cluster.arrive": memory.arrive_in_cluster,
    "mbarrier.arrive": memory.arrive_at_barrier,
    "cp.async.bulk.commit_group": tma.commit_group,
    "cp.async.bulk.tensor": tma.copy_box,
    "cp.async.bulk": tma.copy_bytes,
    "cp.async.cg.shared.global": lines.copy,
    "cp.async.mbarrier.arrive.noinc": lines.arrive_behind,
    "cp.reduce.async.bulk": tma.copy_bytes,
    "setmaxnreg.dec": _give_registers_back,
    "tcgen05.ld": tensor.access,
    "tcgen05.st": tensor.access,
    "tcgen05.alloc": tensor.allocate,
    "tcgen05.dealloc": tensor.deallocate,
    "tcgen05.commit": tensor.commit,
    "tcgen05.mma": tensor.multiply,
    "tcgen05.wait": tensor.wait,
    "wgmma.fence": warpgroup.fence,
    "wgmma.mma_async": warpgroup.multiply,
    "wgmma.commit_group": warpgroup.commit_group,
    "fence": memory.fence,
    **dict.fromkeys(("tcgen05.fence", "tcgen05.relinquish_alloc_permit"), _nothing),
    **dict.fromkeys(("bar.warp.sync", "prefetch.tensormap", "nanosleep"), _nothing),
}


class Step(NamedTuple):
    """An instruction as it is executed."""

    text: str
    kind: str  # "run", "poll" (which also ends the warp's turn), "together", "branch", "return", or what is waited for
    what: Any  # belongs to that: an ``Effect``, where a branch goes, what shows when a wait is over
    predicate: tuple[str, bool] | None  # register, and whether it has to be false


class Program:
    """A kernel's instructions, and the sizes of its parameters."""

    def __init__(self, text: str, kernel: str = ""):
        """``text`` is a module, and ``kernel`` a part of the name that only one kernel of it has.

        Raises:
            FaultError: an instruction that is not known.
        """
        (function,) = (f for f in _parsed(text).functions if f.is_entry and kernel in f.name)
        self.name = function.name
        head = text[function.start : text.index("{", function.start)]
        declared = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+) (\w+)(?:\[(\d+)\])?", head)
        self.param_sizes = [int(count or int(bits) // 8) for bits, _, count in declared]
        self.num_warps = function.num_threads // 32
        self.num_registers = function.registers  # a thread's at launch
        params = {name: number for number, (_, name, _) in enumerate(declared)}
        self.has_warpgroups = any(x.is_a("wgmma") for x in function.instructions)
        self.code = [self._step(Statement(x, params), text[x.start : x.end]) for x in function.instructions]

    def _step(self, s: Statement, text: str) -> Step:
        guard = s.instruction.guard
        predicate = None if guard is None else (s.instruction.register(guard), s.instruction.negated)
        return Step(text, *self._meaning(s), predicate)

    def _meaning(self, s: Statement) -> tuple[str, Any]:
        is_a, operands = s.instruction.is_a, s.operands
        if is_a("bra"):
            return "branch", s.instruction.scope.label(operands[0].text)
        if is_a("ret"):
            return "return", None
        if is_a("mbarrier.try_wait.parity"):
            return "wait", (s.address(operands[1]), s.source(operands[2], "u32"), s.target(operands[0]))
        if is_a("bar.sync", "bar.arrive"):
            all_threads = s.constant(32 * self.num_warps, "u32")
            count = s.source(operands[1], "u32") if len(operands) > 1 else all_threads
            return "meet" if is_a("bar.sync") else "arrive", (s.source(operands[0], "u32"), count)
        if is_a("wgmma.wait_group"):
            return "products", operands[0].number
        if is_a("barrier.cluster.wait"):
            return "cluster", None
        if is_a("setmaxnreg.inc"):
            return "registers", operands[0].number
        if is_a("cp.async.bulk.wait_group"):
            return "is_read" if "read" in s.instruction.parts else "is_written", operands[0].number
        if is_a("elect", "match", "vote"):
            return "together", _decoder(s.name)(s)  # once all lanes have come
        # Loops that wait for what others write would otherwise take all of a warp's turn.
        return "poll" if is_a("ld.acquire", "nanosleep") else "run", _decoder(s.name)(s)


_parsed = functools.lru_cache(maxsize=1)(tree.parse)  # kernels of a module follow each other


@functools.cache
def _decoder(name: str) -> Callable[[Statement], Effect]:
    for prefix, decode in _INSTRUCTIONS.items():
        if f"{name}.".startswith((f"{prefix}.", f"{prefix}::")):
            return decode
    raise FaultError(f"an instruction that is not known: {name}")
