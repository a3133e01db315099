"""The benchmark of training with imprecise and precise gradients, small and on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks import training_curve


def test_students_learn_from_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses fall, and in bfloat16 they begin as in float32; queries have no drift where tokens have no mean."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(training_curve, "AVERAGED", 3)
    sizes = ["--means", "0", "2", "--rows", "48", "--steps", "24"]
    training_curve.main([*sizes, "--device", "cpu", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "training-curve.json").read_text())
    assert (tmp_path / "training-curve.png").stat().st_size > 0
    assert list(found["means"]) == ["0", "2"]
    for mean, curves in found["means"].items():
        assert curves.keys() == training_curve.CONTENDERS.keys()
        for curve in curves.values():
            assert len(curve["loss"]) == 8
            assert curve["loss"][-1] < curve["loss"][0]
            assert curve["loss"][0] == pytest.approx(curves["float32"]["loss"][0], rel=0.02)
            assert (curve["drift"][0] > 0) == (mean != "0")
