"""Products of a warpgroup (``wgmma``): the instructions, and the engine.

Each of the four warps has 16 of a product's 64 rows, computed some time after the warp has issued it, in the order in
which that warp has issued its products; shared memory is read then. From issue until the warp has waited for a product
the registers of the sum are away: to read one is a fault, and so is to write it, or one of A. Registers that a product
begins with have to be as they were at the warp's last ``wgmma.fence``.
"""

import re
from typing import NamedTuple

import numpy as np

from lab.interpreter import weak
from lab.interpreter.operands import COLUMNS, Operand, floats
from lab.interpreter.state import Array, Cta, Effect, FaultError, Mask, Read, Sum, Warp, WarpProduct, converged
from lab.interpreter.statement import Statement, vector
from lab.ptx.tree import Operand as PtxOperand

_ROWS = 16  # of a warp
_ROW_BYTES = {1: 128, 2: 64, 3: 32}  # of a swizzled layout, by its kind in descriptors
_FIXED = 0x3FFF_C000_C000_C000  # of a descriptor, whose other bits are addresses, distances and the swizzle


def fence(s: Statement) -> Effect:
    """Lets products that follow read registers as they are."""

    def note(warp: Warp, mask: Mask) -> None:
        converged(mask)
        warp.fenced = dict(warp.registers)

    return note


def commit_group(s: Statement) -> Effect:
    """Products so far are a group."""

    def commit(warp: Warp, mask: Mask) -> None:
        converged(mask)
        warp.product_groups.append(warp.open_products)
        warp.open_products = []

    return commit


class _Form(NamedTuple):
    """Product that an instruction describes."""

    columns: int
    kind: str  # of numbers
    sign: np.float32  # of the product
    names: tuple[str, ...]  # registers of the sum
    names_a: tuple[str, ...]  # registers of A; none: it is in shared memory
    transposed: tuple[bool, ...]  # operands in shared memory, in order

    @classmethod
    def of(cls, s: Statement) -> "_Form":
        """The form of an instruction.

        Raises:
            FaultError: numbers of another kind, or another number of registers or operands.
        """
        found = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2", s.name)
        if found is None:
            raise FaultError(f"a product of another kind: {s.name}")
        d, a, _, _, sign_a, sign_b, *transposed = s.operands
        names_a = _registers(s, a) if a.marks == "{" else ()
        sign = np.float32(1 if sign_a.number == sign_b.number else -1)
        is_transposed = tuple(x.number == 1 for x in transposed)
        form = cls(int(found[1]), found[2], sign, _registers(s, d), names_a, is_transposed)
        if (len(form.names), len(transposed)) != (form.columns // 2, 1 if names_a else 2):
            raise FaultError(f"another number of operands: {form}")
        return form


def multiply(s: Statement) -> Effect:
    """Issues a product: A of registers or of shared memory, B of shared memory, sums in float32."""
    form = _Form.of(s)
    reads = [s.source(x, "b64") for x in (s.operands[2:3] if form.names_a else s.operands[1:3])]
    accumulates = s.source(s.operands[3], "pred")

    def issue(warp: Warp, mask: Mask) -> None:
        converged(mask)
        descriptors = [_of_all_lanes(read, warp) for read in reads]
        adds = bool(_of_all_lanes(accumulates, warp))
        _together(warp, (s.name, *descriptors, adds))
        operands = [_operand(x, is_transposed=t) for x, t in zip(descriptors, form.transposed, strict=True)]
        _check_fenced(warp, form.names_a)
        a = [warp.registers[name] for name in form.names_a]

        def product() -> Array:
            right = operands[-1].read(warp.cta, 0, form.columns)
            left = _as_rows(a) if a else operands[0].read(warp.cta, warp.index % 4 * _ROWS, _ROWS)
            return form.sign * _in_registers(floats(left, form.kind) @ floats(right, form.kind).T)

        held = tuple(zip(form.names_a, a, strict=True))
        issued = WarpProduct(warp, _sum_of(warp, form.names), held, product, adds)
        issued.sum.num_products += 1
        warp.open_products.append(issued)
        warp.cta.warp_products.append(issued)

    return issue


def _together(warp: Warp, product: tuple[object, ...]) -> None:
    """Compares a product with what the other warps of the warpgroup have issued."""
    number = warp.index // 4, warp.num_products
    warp.num_products += 1
    same = warp.cta.issued.setdefault(number, [])
    same.append(product)
    if same[0] != product:
        raise FaultError(f"warps of a warpgroup issue {same[0]} and {product}")
    if len(same) == 4:
        del warp.cta.issued[number]


def _sum_of(warp: Warp, names: tuple[str, ...]) -> Sum:
    """The sum in registers: the one under way, or else a new one, which takes their numbers."""
    for other in warp.sums:
        if other.names == names:
            return other
        if not set(names).isdisjoint(other.names):
            raise FaultError(f"accumulators of another product under way: {other.names[0]}")
    _check_fenced(warp, names)
    values = np.array([warp.registers.pop(name, weak.NOT_LOADED) for name in names]).view(np.float32)
    warp.sums.append(Sum(names, values))
    return warp.sums[-1]


def _check_fenced(warp: Warp, names: tuple[str, ...]) -> None:
    for name in names:
        if warp.registers.get(name) is not warp.fenced.get(name):
            raise FaultError(f"{name} is written behind the last wgmma.fence")


def is_over(warp: Warp, most: int) -> bool:
    """Whether no more than so many groups of products are under way; if so, hands sums of the others out."""
    groups = warp.product_groups
    over, left = (groups[:-most], groups[-most:]) if most else (groups, [])
    if not all(product.is_done for group in over for product in group):
        return False
    warp.product_groups = left
    for product in (product for group in over for product in group):
        for name, value in product.a:
            if warp.registers[name] is not value:
                raise FaultError(f"{name} is written while a product reads it")
        product.sum.num_products -= 1
        if not product.sum.num_products:
            _hand_out(warp, product.sum)
    return True


def _hand_out(warp: Warp, done: Sum) -> None:
    for name, value in zip(done.names, done.values.view(np.uint32), strict=True):
        if name in warp.registers:
            raise FaultError(f"{name} is written while a product adds to it")
        warp.registers[name] = value
    warp.sums.remove(done)


def advance(cta: Cta, at_most: int) -> None:
    """The engine's next products, of a warp that is drawn."""
    warp = cta.draw.choice(cta.warp_products).warp
    for product in [x for x in cta.warp_products if x.warp is warp][:at_most]:
        cta.warp_products.remove(product)
        added = product.multiply()
        product.sum.values = product.sum.values + added if product.accumulates else added
        product.is_done = True


def _registers(s: Statement, operand: PtxOperand) -> tuple[str, ...]:
    names = [s.register(x) for x in vector(operand)]
    if None in names:
        raise FaultError(f"not registers: {operand.text}")
    return tuple(name for name in names if name is not None)


def _of_all_lanes(read: Read, warp: Warp) -> int:
    value = read(warp)
    if (value != value[0]).any():
        raise FaultError(f"lanes of a warp issue different products: {value}")
    return int(value[0])


def _operand(descriptor: int, *, is_transposed: bool) -> Operand:
    if descriptor & _FIXED or descriptor >> 62 not in _ROW_BYTES:
        raise FaultError(f"another layout: {descriptor:#x}")
    return Operand.of(descriptor, _ROW_BYTES[descriptor >> 62], is_transposed=is_transposed)


def _as_rows(a: list[Array]) -> Array:
    """Numbers of A, (16, 16): a thread has two neighbours of each of two rows, eight apart, and of two columns."""
    bits = np.array(a).view(np.uint16)
    return bits.reshape(2, 2, 8, 4, 2).transpose(1, 2, 0, 3, 4).reshape(_ROWS, COLUMNS)


def _in_registers(rows: Array) -> Array:
    """Rows of a warp as registers of its threads: (16, columns) to (columns / 2, 32)."""
    return np.ascontiguousarray(rows.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3)).reshape(-1, 32)
