"""Instructions that compute with registers alone."""

import functools
import operator
from collections.abc import Callable

import numpy as np

from lab.interpreter.state import LANES, RANK_PITCH, Array, Effect, Mask, Warp, converged, within_cta
from lab.interpreter.statement import TYPES, Statement, vector


def _plain(function: Callable[..., Array]) -> Callable[[Statement], Effect]:
    """An instruction whose operands are all of the type that ends its name."""
    return lambda s: s.compute(s.operands, [s.kind] * 3, function)


def _arithmetic(function: Callable[..., Array]) -> Callable[[Statement], Effect]:
    """Makes an effect of a function of numbers, or of pairs of float32."""

    def on_pairs(*pairs: Array) -> Array:
        flat = function(*(np.ascontiguousarray(x).view(np.float32) for x in pairs))
        return np.ascontiguousarray(flat.astype(np.float32)).view(np.uint64)

    def decode(s: Statement) -> Effect:
        if s.name.endswith(".f32x2"):
            return s.compute(s.operands, ["b64"] * 3, on_pairs)
        return _plain(function)(s)

    return decode


def _fused(a: Array, b: Array, c: Array) -> Array:
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def _multiply(s: Statement) -> Effect:
    kind = s.kind
    if kind == "f32x2":
        return _arithmetic(operator.mul)(s)
    if ".wide." in s.name:
        wide = TYPES[f"{kind[0]}{2 * int(kind[1:])}"]
        return s.compute(s.operands, [kind] * 2, lambda a, b: a.astype(wide) * b.astype(wide))
    if ".hi." in s.name:
        return s.compute(s.operands, [kind] * 2, _high_half)
    return s.compute(s.operands, [kind] * 2, operator.mul)


def _high_half(a: Array, b: Array) -> Array:
    """High halves of products of numbers of 32 bits, or of 16."""
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(8 * a.itemsize)).astype(a.dtype)


def _leading_zeros(x: Array) -> Array:
    return np.array([32 - int(n).bit_length() for n in x], np.uint32)


def _divide(a: Array, b: Array) -> Array:
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return (quotient * np.sign(a.astype(np.int64)) * np.sign(b.astype(np.int64))).astype(a.dtype)


def _add(s: Statement) -> Effect:
    return _arithmetic(_sum_rounded_down if ".rm." in s.name else operator.add)(s)


def _sum_rounded_down(a: Array, b: Array) -> Array:
    exact = a.astype(np.float64) + b.astype(np.float64)
    nearest = exact.astype(np.float32)
    return np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def _extreme(s: Statement) -> Effect:
    ignores_nan = s.name.endswith(".f32") and ".NaN." not in s.name
    least, most = (np.fmin, np.fmax) if ignores_nan else (np.minimum, np.maximum)

    def extreme(*x: Array) -> Array:
        found: Array = functools.reduce(least if s.name.startswith("min") else most, x)
        return np.maximum(found, 0) if ".relu." in s.name else found

    return _plain(extreme)(s)


def _shift(s: Statement) -> Effect:
    kind = s.kind.replace("b", "u")
    bits, number = int(kind[1:]), s.operands[2].number
    if number is not None and number < bits:
        counts = np.full(32, number, TYPES[kind])
        moved = operator.lshift if s.name.startswith("shl") else operator.rshift
        return s.compute(s.operands[:2], [kind], lambda x: moved(x, counts))

    def shift(x: Array, count: Array) -> Array:
        within = np.minimum(count, bits - 1).astype(x.dtype)
        if s.name.startswith("shl"):
            return np.where(count < bits, x << within, 0).astype(x.dtype)
        return np.where((count < bits) | (kind[0] == "s"), x >> within, 0).astype(x.dtype)

    return s.compute(s.operands, [kind, "u32"], shift)


def _funnel(*, is_left: bool) -> Callable[[Array, Array, Array], Array]:
    def shift(low: Array, high: Array, count: Array) -> Array:
        both, count = high.astype(np.uint64) << np.uint64(32) | low, (count & 31).astype(np.uint64)
        return ((both << count) >> np.uint64(32) if is_left else both >> count).astype(np.uint32)

    return shift


def _bit_mask(start: Array, count: Array) -> Array:
    both = zip(start.tolist(), count.tolist(), strict=True)
    return np.array([((1 << min(n, 32)) - 1 << min(first, 32)) & 0xFFFFFFFF for first, n in both], np.uint32)


def _move(s: Statement) -> Effect:
    if s.operands[0].marks == "{":
        low, high = (s.target(x) for x in vector(s.operands[0]))
        bits = int(s.kind[1:]) // 2
        read, half = s.source(s.operands[1], s.kind), TYPES[f"b{bits}"]

        def unpack(warp: Warp, mask: Mask) -> None:
            value = read(warp)
            low(warp, value.astype(half), mask)
            high(warp, (value >> bits).astype(half), mask)

        return unpack
    if s.operands[1].marks == "{":
        joined, bits, whole = [s.operands[0], *vector(s.operands[1])], int(s.kind[1:]) // 2, TYPES[s.kind]
        return s.compute(joined, [f"b{bits}"] * 2, lambda low, high: high.astype(whole) << whole(bits) | low)
    return s.compute(s.operands, [s.kind], lambda x: x)


def _convert(s: Statement) -> Effect:
    kind, given = s.name.split(".")[-2:]
    if kind[0] in "su" and given[0] == "f":
        rounding = {"rni": np.rint, "rzi": np.trunc}[s.name.split(".")[1]]
        return s.compute(s.operands, [given], lambda x: _saturated(rounding(x), TYPES[kind]))
    if s.name.startswith("cvt.rn.") and given == "f32":
        kind = s.name.split(".")[2]
        rounded = {"bf16": _bfloat16, "f16": _float16}[kind.removesuffix("x2")]
        if not kind.endswith("x2"):
            return s.compute(s.operands, ["f32"], lambda x: rounded(x).astype(np.uint16))
        return s.compute(s.operands, ["f32"] * 2, lambda high, low: rounded(high) << _16 | rounded(low))
    return s.compute(s.operands, [given], lambda x: x.astype(TYPES[kind]))


def _saturated(x: Array, kind: type) -> Array:
    """Whole numbers as integers, the nearest there are; 0 of NaN."""
    limits = np.iinfo(kind)
    return np.clip(np.nan_to_num(x.astype(np.float64)), limits.min, limits.max).astype(kind)


def _float16(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _bfloat16(x: Array) -> Array:
    bits = x.view(np.uint32)
    even = bits + (_BELOW_HALF + (bits >> _16 & _1)) >> _16  # which wraps around for some NaN only
    is_nan = x != x
    return np.where(is_nan, np.uint32(0x7FFF), even) if np.count_nonzero(is_nan) else even


_BELOW_HALF, _16, _1 = (np.full(32, number, np.uint32) for number in (0x7FFF, 16, 1))  # arrays are faster than numbers


_COMPARE: dict[str, Callable[..., Array]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "neu": lambda a, b: ~(a == b),
    "geu": lambda a, b: ~(a < b),
}


def _compare(s: Statement) -> Effect:
    _, relation, kind = s.name.split(".")
    if relation == "ne" and "f" in kind:  # not of NaN
        return s.compute(s.operands, [kind] * 2, lambda a, b: (a < b) | (a > b))
    return s.compute(s.operands, [kind] * 2, _COMPARE[relation])


def _chosen(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


def _shuffle(s: Statement) -> Effect:
    flips = ".bfly." in s.name
    return s.compute(s.operands[:3], ["b32", "u32"], lambda x, lane: x[(LANES ^ lane if flips else lane) & 31])


def _vote(s: Statement) -> Effect:
    if ".ballot." in s.name:
        return s.compute(s.operands, ["pred"], lambda given: np.full(32, int((given << LANES).sum()), np.uint32))
    combine = np.any if ".any." in s.name else np.all
    return s.compute(s.operands, ["pred"], lambda given: np.full(32, combine(given)))


def _match(s: Statement) -> Effect:
    """Writes, for each lane, the bits of the lanes that have its value."""
    return s.compute(s.operands, ["b32"], lambda x: ((x[:, None] == x) << LANES).sum(1).astype(np.uint32))


def _elect(s: Statement) -> Effect:
    write = s.target(s.operands[0].parts[1])
    return lambda warp, mask: write(warp, warp.elected, mask)


def _of_whole_warps(decode: Callable[[Statement], Effect]) -> Callable[[Statement], Effect]:
    """Refuses a part of a warp."""

    def decode_checked(s: Statement) -> Effect:
        effect = decode(s)

        def check(warp: Warp, mask: Mask) -> None:
            converged(mask)
            effect(warp, mask)

        return check

    return decode_checked


# By how an instruction's name begins.
INSTRUCTIONS: dict[str, Callable[[Statement], Effect]] = {
    "mov": _move,
    **dict.fromkeys(("cvta.param", "cvta.shared", "cvta.to.shared::cluster"), _plain(lambda x: x)),
    "add": _add,
    "sub": _arithmetic(operator.sub),
    "fma": _arithmetic(_fused),
    "mul": _multiply,
    "mad.lo": _plain(lambda a, b, c: a * b + c),
    **dict.fromkeys(("div.s32", "div.s64", "div.u32"), _plain(_divide)),
    **dict.fromkeys(("rem.s32", "rem.u32"), _plain(lambda a, b: a - _divide(a, b) * b)),
    "div.rn.f32": _plain(operator.truediv),
    "mapa": _plain(lambda a, rank: within_cta(a) + rank * np.uint32(RANK_PITCH)),
    "neg": _plain(operator.neg),
    "abs": _plain(np.abs),
    "not": _plain(operator.inv),
    "and": _plain(operator.and_),
    "or": _plain(operator.or_),
    "xor": _plain(operator.xor),
    "min": _extreme,
    "max": _extreme,
    "shl": _shift,
    "shr": _shift,
    "shf.l.wrap.b32": _plain(_funnel(is_left=True)),
    "shf.r.wrap.b32": _plain(_funnel(is_left=False)),
    "bmsk.clamp": lambda s: s.compute(s.operands, ["u32"] * 2, _bit_mask),
    "popc": lambda s: s.compute(s.operands, ["u32"], lambda x: np.bitwise_count(x).astype(np.uint32)),
    "cvt": _convert,
    "setp": _compare,
    "selp": lambda s: s.compute(s.operands, [s.kind, s.kind, "pred"], _chosen),
    "ex2.approx": _plain(lambda x: np.exp2(x).astype(np.float32)),
    "lg2.approx": _plain(lambda x: np.log2(x).astype(np.float32)),
    **dict.fromkeys(("rcp.approx", "rcp.rn.f32"), _plain(lambda x: (np.float32(1) / x).astype(np.float32))),
    "sqrt.rn.f32": _plain(np.sqrt),
    "clz.b32": _plain(_leading_zeros),
    "tanh.approx": _plain(lambda x: np.tanh(x).astype(np.float32)),
    **dict.fromkeys(("shfl.sync.idx", "shfl.sync.bfly"), _shuffle),
    "vote.sync": _of_whole_warps(_vote),
    "match.any.sync.b32": _of_whole_warps(_match),
    "elect.sync": _of_whole_warps(_elect),
}
