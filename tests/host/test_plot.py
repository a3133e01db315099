"""Pictures of masks, where there is matplotlib."""

import argparse
import re
import sys
from pathlib import Path

import pytest
import torch

from flash_attn_cute import BlockMask
from flash_attn_cute.sparsity import __main__ as cli
from tests.lib.refusals import assert_refused, refusals

pytest.importorskip("matplotlib")

from flash_attn_cute.sparsity import mask_plot


@pytest.mark.parametrize("mask", cli.MASKS)
def test_every_mask_is_drawn(mask: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "mask.png"
    assert cli.main(["plot", mask, "--seqlen", "700", "--order", "spt", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "BlockMask(700 x 700" in capsys.readouterr().out


def test_what_is_drawn() -> None:
    visible = torch.tensor([[[1, 0, 1], [0, 1, 1]], [[1, 0, 0], [0, 0, 0]]], dtype=torch.bool)
    mask = BlockMask.from_blocks(visible) & BlockMask.from_dense(torch.ones(256, 384, dtype=torch.bool).tril(130))
    blocks, timeline = mask.plot(head=0).axes
    assert blocks.images[0].get_array().tolist() == [[2, 0, 1], [0, 2, 1]]
    found = sorted((int(x.get_position()[0]), x.get_text()) for x in blocks.texts)
    assert found == [(0, "1"), (1, "1"), (2, "0"), (2, "0")]
    bars = len(timeline.patches)
    assert bars == 2 * 3 * 16  # work and waits of three tiles, of as many heads as the model takes
    assert len(mask.plot(head=1).axes[0].texts) == 1


REFUSED = """
BlockMask.causal(5, 5).plot(head=1)
    ValueError: head: expected 0 to 0, got 1
BlockMask.causal(5, 5).plot(batch=None)
    TypeError: batch: expected an int, got None
BlockMask.causal(0, 5).plot()
    ValueError: block_mask: expected one with queries and keys to draw, got one over
BlockMask.causal(5, 0).plot()
    ValueError: block_mask: expected one with queries and keys to draw, got one over
"""


@refusals(REFUSED)
def test_what_is_not_drawn(call: str, error: str) -> None:
    assert_refused(call, error, globals())


def test_a_moving_picture(tmp_path: Path) -> None:
    """Under two orders, from nothing to all that is done; documents under both have other tiles at work."""
    picture = tmp_path / "mask.gif"
    command = ["plot", "documents", "--seqlen", "2000", "--order", "spt", "--against", "default", "--out", str(picture)]
    assert cli.main(command) == 0
    assert picture.stat().st_size < 300_000
    with mask_plot.Image.open(picture) as moving:  # type: ignore[attr-defined]
        shown = []
        for frame in range(moving.n_frames):
            moving.seek(frame)
            shown.append((moving.info["duration"], moving.convert("RGB").tobytes()))
        height = moving.size[1] // 2
        halves = [moving.convert("RGB").crop((0, y, 60, y + height)).tobytes() for y in (0, height)]
    assert sum(milliseconds for milliseconds, _ in shown) == 48 * 120 + 3000
    assert len(shown) > 10
    assert len({content for _, content in shown}) == len(shown)
    assert halves[0] != halves[1], "the orders' names"


def test_what_moves() -> None:
    """Columns of the first head, and time of all CTAs, up to now."""
    mask = BlockMask.causal(512, 512)
    tables = mask.tables(torch.device("cpu"), backward=True)
    work, order = mask_plot._pass_of(mask, tables)
    played = work.play(order)
    blocks, timeline = mask_plot.Figure().subplots(1, 2)  # type: ignore[attr-defined]
    lane = mask_plot._Lane(blocks, timeline, torch.ones(4, 4).tril().bool(), 0, played, "default")
    lane.prepare(played.makespan)
    assert (lane.doing > 0).sum().item() == pytest.approx(
        sum(b - a for a, b in zip(played.start, played.end, strict=True)) / played.makespan * mask_plot._STEPS, rel=0.05
    )
    lane.show(0.0)
    assert lane.columns.get_array().tolist() == torch.ones(4, 4).tril().tolist()
    assert not lane.bars.get_array().any()
    now = lane.end[2].item()
    lane.show(now)
    # Key block 3 came first, and 2 has just been done; 1 and 0 take longer.
    assert lane.columns.get_array()[3].tolist() == [2, 2, 3, 3]
    assert lane.bars.get_array().any(0).sum() == round(now / played.makespan * mask_plot._STEPS)
    lane.show(played.makespan)
    assert lane.columns.get_array()[3].tolist() == [3, 3, 3, 3]
    assert lane.bars.get_array().tolist() == lane.doing.tolist()


def test_figures_of_the_page() -> None:
    """Figures that docs/block-masks.md gives for its picture are the model's; draw it anew when they change."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "block-masks.md").read_text().split())
    found = re.search(r"default order takes (\d+) us, a permutation (\d+) us, and .*? additions (\d+) us", page)
    assert found is not None
    options = argparse.Namespace(seqlen=8192, heads=16, seed=0, share=0.125)
    masks = [cli.MASKS["random"](options).with_order(order) for order in ("default", "permutation")]
    passes = [mask_plot._pass_of(mask, mask.tables(torch.device("cpu"), backward=True)) for mask in masks]
    times = [work.play(order).makespan for work, order in passes]
    work, order = passes[0]
    times.append(work.play(order, ordered=False).makespan)
    assert [f"{time:.0f}" for time in times] == list(found.groups())


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "flash_attn_cute.sparsity.mask_plot", raising=False)
    assert cli.main(["plot", "causal", "--seqlen", "300"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
