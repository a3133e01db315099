"""A window of a sequence, counted from its first query and its first key."""

from typing import NamedTuple

from flash_attn_cute.problem.spec import Window


class Band(NamedTuple):
    """Visible keys of a sequence: query i sees the keys i + lower <= j <= i + upper (None: unbounded)."""

    lower: int | None
    upper: int | None

    @classmethod
    def of(cls, window: Window, seqlen_q: int, seqlen_k: int) -> "Band":
        """The bottom-right aligned window (left, right) of a sequence, ``causal`` folded in."""
        (left, right), offset = window, seqlen_k - seqlen_q
        return cls(None if left is None else offset - left, None if right is None else offset + right)

    def without_idle_sides(self, seqlen_q: int, seqlen_k: int) -> "Band":
        """The band, None on a side that hides nothing at these lengths."""
        lower, upper = self
        return Band(
            None if lower is None or lower + seqlen_q - 1 <= 0 else lower,
            None if upper is None or upper >= seqlen_k - 1 else upper,
        )

    def keys(self, start: int, stop: int, seqlen_k: int) -> tuple[int, int]:
        """The half-open range of keys that queries start .. stop see between them; empty if none."""
        first = 0 if self.lower is None else min(max(0, start + self.lower), seqlen_k)
        last = seqlen_k if self.upper is None else max(0, min(seqlen_k, stop + self.upper))
        return first, max(first, last)

    def area(self, start: int, stop: int, seqlen_k: int) -> int:
        """The number of visible pairs of queries start .. stop, in closed form."""
        hidden = 0 if self.lower is None else _sum_clamped(start + self.lower, stop + self.lower, seqlen_k)
        if self.upper is None:
            return (stop - start) * seqlen_k - hidden
        return _sum_clamped(start + self.upper + 1, stop + self.upper + 1, seqlen_k) - hidden


def _sum_clamped(start: int, stop: int, most: int) -> int:
    """The sum of the ints start .. stop, each clamped to 0 .. most."""
    return _sum_below(stop, most) - _sum_below(start, most)


def _sum_below(stop: int, most: int) -> int:
    """The sum of the ints 0 .. stop, each at most ``most``."""
    if stop <= 0:
        return 0
    ramp = min(stop, most + 1)
    return ramp * (ramp - 1) // 2 + (stop - ramp) * most
