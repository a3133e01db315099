"""One instruction, and what reads and writes its operands."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.interpreter.state import PARAM_PITCH, PARAMS, Array, Effect, FaultError, Mask, Read, Warp, Write
from lab.ptx.tree import Instruction, Operand

TYPES: dict[str, Any] = {
    "b8": np.uint8,
    **dict.fromkeys(("b16", "u16"), np.uint16),
    "s16": np.int16,
    "f16": np.float16,
    **dict.fromkeys(("b32", "u32"), np.uint32),
    **dict.fromkeys(("b64", "u64"), np.uint64),
    "s32": np.int32,
    "s64": np.int64,
    "f32": np.float32,
}
_BITS = {1: np.dtype(bool), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}  # a register's, by its bytes


@dataclass(frozen=True)
class Statement:
    """An instruction of a kernel."""

    instruction: Instruction
    params: dict[str, int]  # numbers of the kernel's parameters, by their names

    @property
    def name(self) -> str:
        """The opcode with all modifiers."""
        return self.instruction.opcode

    @property
    def kind(self) -> str:
        """The type that ends its name."""
        return self.name.split(".")[-1]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Operands as they are written."""
        return self.instruction.operands

    def register(self, operand: Operand) -> str | None:
        """The name of a register, distinct from those of the same name in other scopes; None: it is none."""
        scope = self.instruction.scope
        is_one = operand.text.startswith("%") or scope.holder(operand.text) is not None
        return self.instruction.register(operand.text) if is_one and not operand.parts else None

    def source(self, operand: Operand, kind: str) -> Read:
        """Reader of an operand: a register, a number, a parameter's address or that of shared memory.

        Numbers of bfloat16 become float32.
        """
        if kind == "bf16":
            read = self.source(operand, "u16")
            return lambda warp: (read(warp).astype(np.uint32) << 16).view(np.float32)
        name = self.register(operand)
        if name is not None:
            if kind == "pred":
                return lambda warp: warp.registers[name]
            dtype = np.dtype(TYPES[kind])
            return lambda warp: warp.registers[name].view(dtype)
        if operand.text == "__dynamic_shmem__0":
            return lambda warp: np.full(32, warp.cta.first_shared, TYPES[kind])
        return self.constant(self._value(operand), kind)

    def _value(self, operand: Operand) -> int:
        if operand.text in self.params:
            return PARAMS + self.params[operand.text] * PARAM_PITCH
        if operand.text.startswith("0f"):
            return int(operand.text[2:], 16)
        if operand.number is None:
            raise FaultError(f"not an operand: {operand.text}")
        return operand.number

    @staticmethod
    def constant(value: int, kind: str) -> Read:
        """Reader of a number that is equal for all lanes."""
        if kind == "pred":
            constant: Array = np.full(32, bool(value))
        else:
            width = np.dtype(TYPES[kind]).itemsize
            bits: Array = np.full(32, value & ((1 << 8 * width) - 1), _BITS[width])
            constant = bits.view(TYPES[kind])
        return lambda warp: constant

    def target(self, operand: Operand) -> Write:
        """Writer of a register, in some lanes."""
        name = self.register(operand)
        if name is None:
            if operand.text != "_":
                raise FaultError(f"not a register: {operand.text}")
            return lambda warp, value, mask: None

        def write(warp: Warp, value: Array, mask: Mask) -> None:
            value = value.view(_BITS[value.dtype.itemsize])
            if mask is not None and name in warp.registers:
                value = np.where(mask, value, warp.registers[name])
            warp.registers[name] = value

        return write

    def address(self, operand: Operand, kind: str = "u32") -> Read:
        """Reader of an address: ``[register + offset]``."""
        if operand.marks != "[" or len(operand.parts) != 1:
            raise FaultError(f"not an address: {operand.text}")
        base, offset = base_and_offset(operand.parts[0])
        read = self.source(base, kind)
        if not offset:
            return lambda warp: read(warp).astype(np.int64)
        offsets = np.full(32, offset)
        return lambda warp: read(warp).astype(np.int64) + offsets

    def compute(self, operands: Sequence[Operand], kinds: Sequence[str], function: Callable[..., Array]) -> Effect:
        """A register from others."""
        target = self.target(operands[0])
        reads = [self.source(*pair) for pair in zip(operands[1:], kinds, strict=False)]
        return lambda warp, mask: target(warp, function(*[read(warp) for read in reads]), mask)


def base_and_offset(operand: Operand) -> tuple[Operand, int]:
    """Base and offset of an address."""
    if operand.marks != "+":
        return operand, 0
    base, offset = operand.parts
    if offset.number is None:
        raise FaultError(f"not an offset: {offset.text}")
    return base, offset.number


def vector(operand: Operand) -> tuple[Operand, ...]:
    """Operands in braces, or the operand alone."""
    return operand.parts if operand.marks == "{" else (operand,)
