"""Tensor memory and the products of the tensor cores: the instructions, and the engine."""

import numpy as np

from lab.interpreter import weak
from lab.interpreter.operands import COLUMNS, Operand, floats
from lab.interpreter.state import (
    RANK_PITCH,
    Array,
    Commit,
    Cta,
    Effect,
    FaultError,
    Mask,
    Product,
    Warp,
    converged,
    only,
    ranks_of,
    within_cta,
)
from lab.interpreter.statement import Statement, vector


def access(s: Statement) -> Effect:
    """A load or a store of a warp's own 32 lanes."""
    is_load = s.instruction.is_a("tcgen05.ld")
    of_memory, of_registers = (1, 0) if is_load else (0, 1)
    address, names = s.address(s.operands[of_memory]), vector(s.operands[of_registers])
    targets = [s.target(x) for x in names] if is_load else []
    reads = [] if is_load else [s.source(x, "b32") for x in names]

    def move(warp: Warp, mask: Mask) -> None:
        converged(mask)
        at = address(warp)
        lane, column = int(at[0]) >> 16, int(at[0]) & 0xFFFF
        if (at != at[0]).any() or lane != 32 * (warp.index % 4) or column + len(names) > warp.cta.columns:
            raise FaultError(f"{s.name} by warp {warp.index} at lane {lane}, column {column}")
        rows, is_late = warp.cta.tensor_memory[lane : lane + 32], weak.is_late(warp.cta.draw)
        values = [read(warp) for read in reads]

        def load() -> None:
            for i, write in enumerate(targets):
                write(warp, rows[:, column + i].copy(), None)

        def store() -> None:
            for i, value in enumerate(values):
                rows[:, column + i] = value

        if is_load and is_late:
            for write in targets:
                write(warp, weak.NOT_LOADED, None)
            warp.late.loads.append(load)
        elif is_load:
            load()
        elif is_late or warp.late.stores:
            warp.late.stores.append(store)
        else:
            store()

    return move


def wait(s: Statement) -> Effect:
    """The end of a warp's loads, or stores."""
    of_loads = s.instruction.is_a("tcgen05.wait::ld")

    def end(warp: Warp, mask: Mask) -> None:
        converged(mask)
        weak.show(warp.late.loads if of_loads else warp.late.stores)

    return end


def allocate(s: Statement) -> Effect:
    """Columns of tensor memory, from the first one."""
    holder, count = s.address(s.operands[0]), s.source(s.operands[1], "u32")

    def allocate_columns(warp: Warp, mask: Mask) -> None:
        converged(mask)
        if warp.cta.columns:
            raise FaultError("allocated twice")
        warp.cta.columns = int(count(warp)[0])
        warp.cta.shared.view("u4")[(int(holder(warp)[0]) - warp.cta.first_shared) // 4] = 0

    return allocate_columns


def deallocate(s: Statement) -> Effect:
    """All columns that are allocated."""
    count = s.source(s.operands[1], "u32")

    def deallocate_columns(warp: Warp, mask: Mask) -> None:
        converged(mask)
        if any(cta.products for cta in warp.cta.cluster.ctas) or count(warp)[0] != warp.cta.columns:
            raise FaultError("freed twice, or in part, or while products are under way")
        warp.cta.columns = 0

    return deallocate_columns


def commit(s: Statement) -> Effect:
    """An arrival when the products so far are done, or one in each of several CTAs."""
    address = s.address(s.operands[0])
    ranks = s.source(s.operands[1], "b16") if "multicast::cluster" in s.instruction.parts else None

    def commit_products(warp: Warp, mask: Mask) -> None:
        lane = only(mask)
        to_ranks = (warp.cta.rank,) if ranks is None else ranks_of(int(ranks(warp)[lane]))
        warp.cta.products.append(Commit(within_cta(int(address(warp)[lane])), to_ranks, warp.known))

    return commit_products


def multiply(s: Statement) -> Effect:
    """Issues a product, of a pair of CTAs by its first one."""
    by_pair = "cta_group::2" in s.instruction.parts
    in_memory = s.operands[1].marks == "["
    target, b = s.address(s.operands[0]), s.source(s.operands[2], "b64")
    a = s.address(s.operands[1]) if in_memory else s.source(s.operands[1], "b64")
    instruction, accumulates = s.source(s.operands[3], "u32"), s.source(s.operands[-1], "pred")

    def issue(warp: Warp, mask: Mask) -> None:
        lane = only(mask)
        if by_pair and (warp.cta.rank % 2 or len(warp.cta.cluster.ctas) < 2):
            raise FaultError("a pair's product by the second CTA, or by one that is alone")
        column, of_a, of_b, descriptor = (int(read(warp)[lane]) for read in (target, a, b, instruction))
        product = Product(column, of_a, in_memory, of_b, descriptor, bool(accumulates(warp)[lane]), by_pair)
        warp.cta.products.append(product)

    return issue


def advance(cta: Cta, at_most: int) -> None:
    """The engine's next products and commits, in the order in which they were issued."""
    for _ in range(min(len(cta.products), at_most)):
        product = cta.products.popleft()
        if isinstance(product, Commit):
            cta.arrivals += [(product.barrier + rank * RANK_PITCH, product.known) for rank in product.ranks]
        else:
            _multiply(cta, product)


def arrive(cta: Cta) -> None:
    """The next arrival of a commit, any of those that are due."""
    place, known = cta.arrivals.pop(cta.draw.randrange(len(cta.arrivals)))
    barrier = cta.barrier(place, of_cluster=True)
    if place // RANK_PITCH != cta.rank:
        barrier.committed = barrier.phase + 1
    barrier.arrive(known)


def _multiply(cta: Cta, p: Product) -> None:
    """A product of a CTA, or of a pair: each has half of A's rows and of B's columns, and half of the sum's rows."""
    i = p.instruction
    ctas = cta.cluster.ctas[cta.rank : cta.rank + 2] if p.by_pair else [cta]
    rows, columns = (i >> 24 & 31) * 16 // len(ctas), (i >> 17 & 63) * 8
    # Of 128 rows that a pair has, the second half of the columns is in the lanes behind those of the first.
    halves = 2 if rows == 64 and p.by_pair else 1
    # Neither sparsity, saturation, negation nor shifts; float32 sums; two operands of one kind.
    is_known = not i & _UNUSED and i >> 4 & 3 == 1 and i >> 7 & 7 == i >> 10 & 7
    if rows * halves != 128 or not is_known or not 16 <= columns <= 256 or columns % 16:
        raise FaultError(f"a product of another kind: {i:#x}")
    operand_b = _operand(p.b, is_transposed=bool(i >> 16 & 1))
    b = [operand_b.read(each, 0, columns // len(ctas)) for each in ctas]
    right = floats(np.concatenate(b), _kind(i >> 10)).T
    for each in ctas:
        if p.target + columns // halves > each.columns:
            raise FaultError(f"columns {p.target} .. {p.target + columns // halves} are not all allocated")
        result = np.concatenate(np.split(_left(each, p, rows) @ right, halves, axis=1))
        place = each.tensor_memory[:, p.target : p.target + columns // halves]
        if p.accumulates:
            result = place.view(np.float32) + result
        place[:] = result.astype(np.float32).view(np.uint32)


def _left(cta: Cta, p: Product, rows: int) -> Array:
    """16 of the columns of A, in float32: of the rows that a CTA has."""
    is_transposed, kind = bool(p.instruction >> 15 & 1), _kind(p.instruction >> 7)
    if not p.a_in_tensor_memory:
        return floats(_operand(p.a, is_transposed=is_transposed).read(cta, 0, rows), kind)
    if is_transposed or rows != len(cta.tensor_memory):
        raise FaultError(f"a transposed operand in tensor memory, or one of few rows: {p.instruction:#x}")
    return floats(np.ascontiguousarray(cta.tensor_memory[:, p.a : p.a + COLUMNS // 2]).view("u2"), kind)


def _operand(descriptor: int, *, is_transposed: bool) -> Operand:
    if descriptor & _FIXED != 1 << 46 or descriptor >> 61 not in _ROW_BYTES:
        raise FaultError(f"another layout: {descriptor:#x}")
    return Operand.of(descriptor, _ROW_BYTES[descriptor >> 61], is_transposed=is_transposed)


def _kind(bits: int) -> str:
    """The kind of an operand's numbers, as instruction descriptors give it."""
    return {0: "f16", 1: "bf16"}.get(bits & 7, f"number {bits & 7}")


_UNUSED = 0b1110_0000_1000_0000_0110_0000_0100_1111  # bits of an instruction's descriptor
_FIXED = 0x1FFF_C000_C000_C000  # of an operand's, whose other bits are addresses, distances and the swizzle
_ROW_BYTES = {2: 128, 4: 64}  # of a swizzled layout, by its kind in descriptors
