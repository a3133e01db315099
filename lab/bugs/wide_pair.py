"""Bugs of the backward kernel of pairs of CTAs at (192, 128), where it is not as at d = 128."""

from lab.bugs.code import BACKWARD_WARPS, KIND, LEADING, MMA, PRODUCER, SWIZZLE, TARGET, A, B, find, waits
from lab.bugs.table import LAST_REGISTER, Bug, Bugs, drain_keeps_registers, no_wait, wrong_bytes

_DRAIN, _COMPUTE, _ADDS = (BACKWARD_WARPS[name][0] for name in ("drain", "compute", "adding"))
_DRAIN_LAGS, _COMPUTE_LAGS = (frozenset(BACKWARD_WARPS[name]) for name in ("drain", "compute"))

# Products, four steps each: of dK and dQ in the loop over steps, and behind it.
_PRODUCTS = find(MMA, "tcgen05.mma", 28)
_OF_DV, _OF_DK = _PRODUCTS[16:20], _PRODUCTS[4:8] + _PRODUCTS[20:24]
_OF_DQ = _PRODUCTS[12:16] + _PRODUCTS[24:]
_LOADS_OF_K = find(PRODUCER, "cp.async.bulk.tensor", 4, "k_columns.full")
_LOADS_OF_Q = find(PRODUCER, "cp.async.bulk.tensor", 3, "q_columns.full")
_LANES = find(_DRAIN, "setp.gt.u32", 4, having=", 95;")


WIDE_PAIR: Bugs = {
    "missing wait": (
        Bug(
            "dQ overwrites the last step's, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[:1].left_out(),
            "steps",
            _DRAIN_LAGS,
        ),
        Bug(
            "a tile's last dQ overwrites that before it, which drain warps have not read",
            waits(MMA, "dq.empty", 2)[1:].left_out(),
            "two",
            _DRAIN_LAGS,
        ),
        no_wait(
            "the next scores overwrite those that compute warps have not read", MMA, "p.full", "two", _COMPUTE_LAGS
        ),
    ),
    "wrong place": (
        Bug("a CTA puts out all columns of dQ that it computes", _LANES.rewritten(", 95;", ", 127;"), "one"),
        Bug(
            "the second CTA adds where the first one's columns end that it computes",
            find(_ADDS, "mul.lo.s32", having=", 6144;").rewritten("6144", "8192"),
            "one",
        ),
        Bug(
            "dQ is rounded from parts of 64 columns",
            find(_COMPUTE, "mul.wide.u32", having=", 6144;").rewritten("6144", "4096"),
            "one",
        ),
        Bug("the last columns of K are put where those before them are", _LOADS_OF_K[1].further(0, -32768), "one"),
        Bug("K by columns is loaded from column 0 on by both CTAs", _LOADS_OF_K[:1].rewritten(r"\{%r\d+", "{0"), "one"),
        Bug("the last 32 columns of Q are put where those before them are", _LOADS_OF_Q[2].further(0, -4096), "one"),
        Bug("dQ takes the place of scores", _OF_DQ.flipped(TARGET, 448), "two"),
        Bug("dV takes the second half of P from behind the first", _OF_DV[2:].flipped(A, 48), "one"),
    ),
    "wrong descriptor": (
        Bug("Q by columns is said to be swizzled in 128 bytes", _OF_DK.flipped(B, (4 ^ 2) << SWIZZLE), "one"),
        Bug("dS is said to be swizzled in 128 bytes", _OF_DQ.flipped(B, (4 ^ 2) << SWIZZLE), "one"),
        Bug(
            "32 columns of Q are looked for at half the distance to them",
            _OF_DK.flipped(B, (0x100 ^ 0x80) << LEADING),
            "one",
        ),
        Bug(
            "the last 64 columns of K are looked for at the place of the first",
            _OF_DQ.flipped(A, 0x800 << LEADING),
            "one",
        ),
        Bug("products of dQ are said to have the queries of one CTA", _OF_DQ.flipped(KIND, (8 ^ 4) << 17), "one"),
        Bug("products of dQ are said to have the columns of one CTA", _OF_DQ.flipped(KIND, (16 ^ 8) << 24), "one"),
    ),
    "wrong bytes": (
        wrong_bytes("the bytes of half of K by columns are expected", "k_columns.full", 65536, "tiles"),
        Bug(
            "the adding warp adds a piece of 64 columns",
            find(_ADDS, "cp.reduce.async.bulk", 4).rewritten(LAST_REGISTER, ", 4096;"),
            "tiles",
        ),
    ),
    "registers": (drain_keeps_registers("one"),),
}
