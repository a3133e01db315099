"""Pictures of masks, where there is matplotlib."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.sparsity import __main__ as cli


@pytest.mark.parametrize("mask", cli.MASKS)
def test_every_mask_is_drawn(mask: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "mask.png"
    assert cli.main(["plot", mask, "--seqlen", "700", "--order", "spt", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "BlockMask(700 x 700" in capsys.readouterr().out


def test_what_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    visible = torch.tensor([[[1, 0, 1], [0, 1, 1]], [[1, 0, 0], [0, 0, 0]]], dtype=torch.bool)
    mask = BlockMask.from_blocks(visible) & BlockMask.from_dense(torch.ones(256, 384, dtype=torch.bool).tril(130))
    blocks, timeline = mask.plot(head=0).axes
    assert blocks.images[0].get_array().tolist() == [[2, 0, 1], [0, 2, 1]]
    assert sorted((int(x.get_position()[0]), x.get_text()) for x in blocks.texts) == [
        (0, "1"),
        (1, "1"),
        (2, "0"),
        (2, "0"),
    ]
    bars = len(timeline.patches)
    assert bars == 2 * 3 * 16  # work and waits of three tiles, of as many heads as the model takes
    assert len(mask.plot(head=1).axes[0].texts) == 1
    with pytest.raises(ValueError, match="head: expected 0 to 1, got 2"):
        mask.plot(head=2)


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "flash_attn_cute.sparsity.plot", raising=False)
    assert cli.main(["plot", "causal", "--seqlen", "300"]) == 1
    assert "pip install flash-attn-cute[plot]" in capsys.readouterr().err


def test_masks_do_not_import_it() -> None:
    code = "import sys, flash_attn_cute; assert not any(x in sys.modules for x in ('matplotlib', 'torch._dynamo'))"
    subprocess.run([sys.executable, "-c", code], check=True)
