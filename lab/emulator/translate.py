"""Translation of PTX for SM100 GPUs to PTX that a Hopper GPU runs.

What Hopper lacks becomes either the same arithmetic in older instructions, or a call into ``runtime.cu``, which
emulates tensor memory and the tcgen05 unit. All other text stays as it is, to the byte. What is neither Hopper's nor
known here raises ``RefusedError``, which names the instruction and its line.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from lab.ptx import tree
from lab.ptx.tree import Instruction, Operand

TARGETS = ("sm_100a", "sm_100f", "sm_103a", "sm_103f")


class RefusedError(NotImplementedError):
    """An instruction that is not emulated."""


class Translation(NamedTuple):
    """Result of a translation."""

    body: str  # PTX without .version, .target and .address_size
    replaced: dict[str, int]  # how often each kind of instruction was
    emulated: tuple[str, ...]  # kernels that use tensor memory


def _call(function: str, *arguments: str, result: str = "") -> str:
    """A call. Arguments and the result are a type and a register or a number, such as "b32 %r1"."""
    text, names = "{ ", []
    for i, argument in enumerate(arguments):
        kind, _, value = argument.partition(" ")
        names.append(f"sm100_a{i}")
        text += f".param .{kind} {names[-1]}; st.param.{kind} [{names[-1]}], {value}; "
    kind, _, register = result.partition(" ")
    if result:
        text += f".param .{kind} sm100_r; "
    text += f"call.uni {'(sm100_r), ' if result else ''}{function}, ({', '.join(names)}); "
    if result:
        text += f"ld.param.{kind} {register}, [sm100_r]; "
    return text + "}"


def _sum(operand: Operand, register: str) -> str:
    """Puts the address within brackets into a 32-bit register."""
    (inner,) = operand.parts
    base, offset = (inner.parts[0].text, inner.parts[1].text) if inner.marks == "+" else (inner.text, "0")
    return f"mov.b32 {register}, {base}; add.u32 {register}, {register}, {offset}; "


def _guarded(instruction: Instruction, text: str) -> str:
    """The text, for the threads that execute the instruction."""
    if instruction.guard is None:
        return f"{{ {text} }}"
    return f"{{ @{'' if instruction.negated else '!'}{instruction.guard} bra SM100_SKIP; {text} SM100_SKIP: }}"


def _guard(instruction: Instruction) -> str:
    if instruction.guard is None:
        return ""
    return f"@{'!' if instruction.negated else ''}{instruction.guard} "


def _refuse(instruction: Instruction, why: str) -> RefusedError:
    return RefusedError(f"line {instruction.line}: {instruction.opcode}: {why}")


def _pairs(instruction: Instruction) -> str:
    """add, sub, mul and fma of two float32 in 64 bits: twice the same of one."""
    result, *sources = instruction.operands
    scalar = instruction.opcode.replace(".f32x2", ".f32")
    text = "{ .reg .f32 sm100_x<4>, sm100_y<4>; "
    for i, source in enumerate(sources):
        text += f"mov.b64 {{sm100_x{i}, sm100_y{i}}}, {source.text}; "
    for half in "xy":
        text += f"{scalar} sm100_{half}3, {', '.join(f'sm100_{half}{i}' for i in range(len(sources)))}; "
    return text + f"{_guard(instruction)}mov.b64 {result.text}, {{sm100_x3, sm100_y3}}; }}"


def _allocate(instruction: Instruction) -> str:
    destination = instruction.operands[0]
    text = f".reg .b32 sm100_d; {_sum(destination, 'sm100_d')}"
    return _guarded(instruction, text + _call("sm100_alloc", "b32 sm100_d", *_of_columns(instruction)))


def _free(instruction: Instruction) -> str:
    address = instruction.operands[0].text
    return _guarded(instruction, _call("sm100_dealloc", f"b32 {address}", *_of_columns(instruction)))


def _of_columns(instruction: Instruction) -> list[str]:
    """How many columns, whether for a pair, and the line."""
    values = instruction.operands[1].text, int("cta_group::2" in instruction.parts), instruction.line
    return [f"b32 {value}" for value in values]


def _tensor_memory_access(instruction: Instruction) -> str:
    """tcgen05.ld and st of shape 32x32b: a register a column, of this thread's lane."""
    columns = int(instruction.opcode.rsplit(".x", 1)[1].removesuffix(".b32"))
    is_load = instruction.is_a("tcgen05.ld")
    vector, address = instruction.operands[:: 1 if is_load else -1]
    registers = vector.parts or (vector,)
    if len(registers) != columns:
        raise _refuse(instruction, f"expected {columns} registers, got {len(registers)}")
    text = f".reg .b32 sm100_t; .reg .b64 sm100_p; {_sum(address, 'sm100_t')}"
    text += _call("sm100_lane", "b32 sm100_t", f"b32 {columns}", f"b32 {instruction.line}", result="b64 sm100_p")
    for i, register in enumerate(registers):
        place = f"[sm100_p+{512 * i}]"
        operands = f"{register.text}, {place}" if is_load else f"{place}, {register.text}"
        text += f"\n{'ld' if is_load else 'st'}.relaxed.gpu.global.b32 {operands};"
    return _guarded(instruction, text)


def _product(instruction: Instruction) -> str:
    d, a, b, description, *rest = instruction.operands
    text = ".reg .b32 sm100_d, sm100_m, sm100_f; .reg .b64 sm100_s; mov.b32 sm100_m, 0; "
    if rest and rest[0].marks == "{":
        for lanes in rest.pop(0).parts:
            text += f"or.b32 sm100_m, sm100_m, {lanes.text}; "
    if len(rest) != 1:
        raise _refuse(instruction, "expected a predicate that says whether to accumulate, and nothing behind it")
    (accumulates,) = rest
    pair, in_tensor_memory = "cta_group::2" in instruction.parts, a.marks == "["
    flags = int(in_tensor_memory) + 2 * int(pair)
    text += _sum(d, "sm100_d")
    if in_tensor_memory:
        text += f"{_sum(a, 'sm100_f')} cvt.u64.u32 sm100_s, sm100_f; "
    else:
        text += f"mov.b64 sm100_s, {a.text}; "
    if accumulates.number is not None:
        text += f"mov.b32 sm100_f, {flags + 4 * bool(accumulates.number)}; "
    elif accumulates.marks == "!":
        text += f"selp.b32 sm100_f, {flags}, {flags + 4}, {accumulates.parts[0].text}; "
    else:
        text += f"selp.b32 sm100_f, {flags + 4}, {flags}, {accumulates.text}; "
    operands = "b32 sm100_d", "b64 sm100_s", f"b64 {b.text}", f"b32 {description.text}"
    return _guarded(
        instruction, text + _call("sm100_mma", *operands, "b32 sm100_f", "b32 sm100_m", f"b32 {instruction.line}")
    )


def _commit(instruction: Instruction) -> str:
    barrier, *ctas = instruction.operands
    text = f".reg .b16 sm100_h; .reg .b32 sm100_d, sm100_m; {_sum(barrier, 'sm100_d')}"
    text += f"mov.b16 sm100_h, {ctas[0].text if ctas else 0}; cvt.u32.u16 sm100_m, sm100_h; "
    return _guarded(instruction, text + _call("sm100_commit", "b32 sm100_d", "b32 sm100_m", f"b32 {instruction.line}"))


def _wait(instruction: Instruction) -> str:
    """Waiting for an mbarrier: that is when the emulation goes on."""
    if "parity" not in instruction.parts:
        raise _refuse(instruction, "beside tensor memory, only with .parity")
    done, barrier, parity = instruction.operands[:3]
    patient = int(instruction.is_a("mbarrier.try_wait"))
    text = f".reg .b32 sm100_d, sm100_w; {_sum(barrier, 'sm100_d')}"
    arguments = "b32 sm100_d", f"b32 {parity.text}", f"b32 {patient}", f"b32 {instruction.line}"
    text += _call("sm100_wait", *arguments, result="b32 sm100_w")
    return _guarded(instruction, text + f" setp.ne.b32 {done.text}, sm100_w, 0;")


def _pair_load(instruction: Instruction) -> str:
    """A TMA load that signals a barrier of either CTA of a pair."""
    if any(word.startswith("multicast") for word in instruction.parts):
        raise _refuse(instruction, "not with multicast")
    destination, source, barrier, *rest = instruction.operands
    tensor_map = source.parts[0].text
    text = ".reg .b32 sm100_d, sm100_b, sm100_o; .reg .b64 sm100_s, sm100_t; "
    text += f"mov.b64 sm100_t, {tensor_map}; {_sum(destination, 'sm100_d')}{_sum(barrier, 'sm100_b')}"
    text += "and.b32 sm100_d, sm100_d, 0xff000000; and.b32 sm100_o, sm100_b, 0x00ffffff; "
    text += "or.b32 sm100_o, sm100_o, sm100_d; "
    text += _call("sm100_before_load", "b32 sm100_b", "b32 sm100_o", "b64 sm100_t", result="b64 sm100_s")
    operands = [destination.text, source.text, "[sm100_o]", *(x.text for x in rest)]
    text += f" {instruction.opcode.replace('.cta_group::2', '')} {', '.join(operands)}; "
    arguments = "b32 sm100_b", "b32 sm100_o", "b64 sm100_t", "b64 sm100_s", f"b32 {instruction.line}"
    return _guarded(instruction, text + _call("sm100_after_load", *arguments))


def _nothing(instruction: Instruction) -> str:
    """No code: the instruction orders accesses to tensor memory, or moves registers between warpgroups."""
    return ""


def _stores_done(instruction: Instruction) -> str:
    return "fence.acq_rel.gpu;"


class _Rule(NamedTuple):
    pattern: str  # of whole opcodes
    rewrite: Callable[[Instruction], str]
    only_emulated: bool = False  # in kernels that use tensor memory


_GROUP = r"cta_group::[12]"
_RULES = (
    _Rule(r"(fma|mul|add|sub)\b.*\.f32x2", _pairs),
    _Rule(rf"tcgen05\.alloc\.{_GROUP}\.sync\.aligned\.shared::cta\.b32", _allocate),
    _Rule(rf"tcgen05\.dealloc\.{_GROUP}\.sync\.aligned\.b32", _free),
    _Rule(rf"tcgen05\.relinquish_alloc_permit\.{_GROUP}\.sync\.aligned", _nothing),
    _Rule(r"tcgen05\.(ld|st)\.sync\.aligned\.32x32b\.x(1|2|4|8|16|32|64|128)\.b32", _tensor_memory_access),
    _Rule(r"tcgen05\.wait::ld\.sync\.aligned|tcgen05\.fence::(before|after)_thread_sync", _nothing),
    _Rule(r"tcgen05\.wait::st\.sync\.aligned", _stores_done),
    _Rule(rf"tcgen05\.mma\.{_GROUP}\.kind::f16(\.collector::a::(discard|lastuse|fill|use))?", _product),
    _Rule(
        rf"tcgen05\.commit\.{_GROUP}\.mbarrier::arrive::one(\.shared::cluster)?(\.multicast::cluster)?\.b64", _commit
    ),
    _Rule(r"mbarrier\.(try|test)_wait\b.*", _wait, True),
    _Rule(r"setmaxnreg\b.*", _nothing, True),
    _Rule(r"cp\.async\.bulk\.tensor\b.*\.cta_group::2\b.*", _pair_load),
)
_UNKNOWN = re.compile(r"tcgen05\b.*|clusterlaunchcontrol\b.*|.*\bcta_group::.*")


def translate(text: str) -> Translation:
    """The functions of a module for SM100 or SM103, for a Hopper GPU together with the runtime.

    Args:
        text: the PTX of a module.

    Raises:
        RefusedError: an instruction, or a form of one, that is not emulated.
        PtxError: text that is not PTX as ``lab.ptx.tree`` knows it.
        ValueError: PTX for other GPUs.
    """
    module = tree.parse(text)
    if module.target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {module.target}")
    replaced: Counter[str] = Counter()
    emulated = []
    pieces, position = [], module.head_end
    for function in module.functions:
        uses_tensor_memory = any(x.is_a("tcgen05.alloc") for x in function.instructions)
        if uses_tensor_memory:
            emulated.append(function.name)
        for instruction in function.instructions:
            new = _rewritten(instruction, uses_tensor_memory)
            if new is not None:
                replaced[instruction.opcode] += 1
                pieces += [module.text[position : instruction.start], new]
                position = instruction.end
    pieces.append(module.text[position:])
    return Translation("".join(pieces), dict(replaced), tuple(emulated))


def _rewritten(instruction: Instruction, uses_tensor_memory: bool) -> str | None:
    for rule in _RULES:
        if re.fullmatch(rule.pattern, instruction.opcode) and (uses_tensor_memory or not rule.only_emulated):
            return rule.rewrite(instruction)
    if _UNKNOWN.fullmatch(instruction.opcode):
        raise _refuse(instruction, "not emulated")
    return None
