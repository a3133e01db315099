"""The study of dQ in integers: its bounds hold, and integers are as exact as float32 by one of them."""

import pytest

from benchmarks import integer_sums


@pytest.mark.parametrize("kind", integer_sums.KINDS)
def test_integers_are_as_exact_as_float32(kind: str) -> None:
    in_float, by_bound = integer_sums.errors(kind, 1024)
    assert 1e-4 < in_float < 2
    assert by_bound["weighted"][0] < 1.02


def test_values_without_weight_cost_one_bound_its_bits() -> None:
    _, by_bound = integer_sums.errors("outlier rows of v", 8192)
    all_keys, weighted = (by_bound[name][2] for name in ("all keys", "weighted"))
    assert weighted > all_keys + 3


def test_a_bound_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_sums, "MARGIN", 1e-4)
    with pytest.raises(AssertionError, match="normal, all keys: a sum is larger than its bound"):
        integer_sums.errors("normal", 1024)


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_sums, "KINDS", {"normal": integer_sums.KINDS["normal"]})
    integer_sums.main(["--keys", "256"])
    title, header, row = capsys.readouterr().out.splitlines()
    assert title.startswith("256 keys")
    assert header.split() == ["float32", "all", "keys", "bits", "weighted", "bits"]
    assert row.startswith("normal")
    assert len(row.split()) == 8
