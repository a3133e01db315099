"""The demo: how it packs documents, that its runs repeat, that its checks can fail, and the command itself."""

import importlib
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from flash_attn_cute import demo, flash_attn_varlen_func
from tests.lib.checks import bitwise_equal, hopper_alone

DOCUMENTS = [bytes((7 * i + j * j) % 251 for j in range(13 * i)) for i in range(60)]


@pytest.fixture
def _default_device() -> Iterator[None]:
    """Settings that main makes for its own process end with the test."""
    yield
    torch.set_default_device(None)


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def test_cut_predicts_every_byte_but_a_documents_first() -> None:
    assert demo.cut([b"", b"a", b"ab", b"abcdefg"], 3) == [b"ab", b"abcd", b"defg"]
    for piece in (pieces := demo.cut(DOCUMENTS, 100)):
        assert 2 <= len(piece) <= 101
    assert sum(len(piece) - 1 for piece in pieces) == sum(max(0, len(document) - 1) for document in DOCUMENTS)


def test_pieces_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of one row, a step waited until millions of pieces had an order."""
    draws, pieces = [], [bytes([i]) for i in range(200)]

    class Counted(random.Random):
        def getrandbits(self, k: int) -> int:
            draws.append(k)
            return super().getrandbits(k)

    monkeypatch.setattr(random, "Random", Counted)
    order = demo.shuffled_forever(pieces, 0)
    first = [next(order)]
    assert len(draws) < 100
    first += itertools.islice(order, 199)
    second = list(itertools.islice(order, 200))
    assert first != second
    assert sorted(first) == sorted(second) == pieces


def test_layout_of_a_batch() -> None:
    first, second = demo.pack([b"abcd", b"xy", b"12345"], 6)
    assert first.inputs.tolist() == [*b"abc", *b"x", 0, 0]
    assert first.targets.tolist() == [*b"bcd", *b"y", demo.NO_TARGET, demo.NO_TARGET]
    assert first.positions.tolist() == [0, 1, 2, 0, 0, 0]
    assert first.cu_seqlens.tolist() == [0, 3, 4]
    assert (first.max_seqlen, first.tokens) == (3, 4)
    assert second.cu_seqlens.tolist() == [0, 4]


@pytest.mark.parametrize("rows", [40, 100, 1000])
def test_documents_never_cross(rows: int) -> None:
    pieces = demo.cut(DOCUMENTS, 40)
    expected = iter(pieces)
    for batch in demo.pack(pieces, rows):
        assert batch.cu_seqlens.dtype == torch.int32
        offsets = batch.cu_seqlens.tolist()
        assert offsets == sorted(offsets)
        assert offsets[0] == 0
        assert offsets[-1] == batch.tokens <= rows == len(batch.inputs) == len(batch.targets)
        assert batch.max_seqlen == max(stop - start for start, stop in itertools.pairwise(offsets))
        for start, stop in itertools.pairwise(offsets):
            inputs, targets = batch.inputs[start:stop].tolist(), batch.targets[start:stop].tolist()
            assert bytes([*inputs, targets[-1]]) == bytes([inputs[0], *targets]) == next(expected)
        assert (batch.targets[batch.tokens :] == demo.NO_TARGET).all()
    assert next(expected, None) is None


def test_neighbours_and_padding_do_not_change_the_loss() -> None:
    model = demo.Transformer()
    pieces = [DOCUMENTS[3], DOCUMENTS[5], DOCUMENTS[2]]
    alone = [demo.Batch.of([piece], len(piece) - 1) for piece in pieces]
    mean = sum(model(batch) * batch.tokens for batch in alone) / sum(batch.tokens for batch in alone)
    torch.testing.assert_close(model(demo.Batch.of(pieces, 500)), mean)


def test_padding_has_no_gradient() -> None:
    model = demo.Transformer()
    model(demo.Batch.of([b"abcd"], 100)).backward()
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad.any(1).nonzero().flatten().tolist() == [*b"abc"]  # and not the padding's 0


def test_unigram_entropy() -> None:
    assert demo.unigram_entropy([b"aa", b"bb"]) == pytest.approx(0.6931472)
    assert demo.unigram_entropy([b"aaa"]) == 0


def test_only_the_seed_makes_a_difference() -> None:
    first, again, other = (demo.train(DOCUMENTS, 8, 256, seed, "")[0] for seed in (1, 1, 2))
    assert demo.same_bits(first, again)
    assert not demo.same_bits(first, other)


def test_logs_get_two_states_of_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """Every state is for terminals."""
    demo.train(DOCUMENTS, 8, 256, 0, "title")
    first, last = capsys.readouterr().err.strip().split("\r")
    assert first.startswith("title:   0%")
    assert last.startswith("title: 100%")
    assert "tokens/s" in last


def test_training_learns() -> None:
    sentences = [b"Pack my box with five dozen liquor jugs. " * n for n in range(1, 20)]
    model, tokens_per_second = demo.train(sentences, 60, 512, 0, "")
    assert demo.evaluate(model, sentences, 512) < demo.unigram_entropy(sentences) - demo.MARGIN
    assert tokens_per_second > 0


def test_short_steps_are_evaluated_in_few_batches() -> None:
    """Steps of one row evaluated the held-out files byte by byte."""
    sizes: list[int] = []

    class Counted(demo.Transformer):
        def forward(self, batch: demo.Batch) -> Tensor:
            sizes.append(batch.tokens)
            assert batch.max_seqlen == 1
            return torch.zeros(())

    demo.evaluate(Counted(), [b"x" * 2049], 1)
    assert sizes == [1024, 1024]


class Recorded(demo.Transformer):
    """A model that keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, batch: demo.Batch) -> Tensor:
        loss = super().forward(batch)
        self.losses.append(loss.detach())
        return loss


@hopper_alone("asserts which backend its calls get by default")
@pytest.mark.usefixtures("_default_device")
def test_training_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs agree in every bit, and their losses with the portable backend's as far as bfloat16 allows.

    Rounding errors of either backend are of one size, and training carries them on alike. So bfloat16 may move the
    losses of one from those with float32 about as far as those of the other: on average less than three times as far.
    """
    torch.set_default_device("cuda")
    assert demo.selected_backend().startswith("sm90 ")
    documents = demo.read_documents()
    monkeypatch.setattr(demo, "Transformer", Recorded)

    def train(backend: str, dtype: torch.dtype) -> tuple[Recorded, Tensor]:
        monkeypatch.setattr(demo, "flash_attn_varlen_func", partial(flash_attn_varlen_func, backend=backend))
        monkeypatch.setattr(demo, "attention_dtype", lambda device: dtype)
        model, _ = demo.train(documents, 250, 1024, 0, f"{backend}, {dtype}")
        assert isinstance(model, Recorded)
        return model, torch.stack(model.losses)

    _, expected = train("portable", torch.float32)
    assert expected[-10:].mean() < demo.unigram_entropy(documents) - demo.MARGIN / 2  # has begun to attend
    _, yardstick = train("portable", torch.bfloat16)
    first, losses = train("sm90", torch.bfloat16)
    again, losses_again = train("sm90", torch.bfloat16)
    assert (losses - expected).abs().mean() < 3 * (yardstick - expected).abs().mean()
    assert demo.same_bits(first, again)
    assert bitwise_equal(losses, losses_again)


@pytest.mark.parametrize("value", [1e-45, -0.0, float("nan")])
def test_the_comparison_of_weights_sees_one_bit(value: float) -> None:
    a, b = demo.Transformer(), demo.Transformer()
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        for model in (a, b):
            model.head.weight[3, 5] = 0.0
        assert demo.same_bits(a, b)
        b.head.weight[3, 5] = value
    assert not demo.same_bits(a, b)


def test_each_check_can_fail() -> None:
    assert demo.failures(1.9, 3.2, True) == []
    assert len(demo.failures(1.9, 3.2, False)) == 1
    assert len(demo.failures(2.4, 3.2, True)) == 1
    assert len(demo.failures(float("nan"), 3.2, False)) == 2


@pytest.mark.usefixtures("_default_device")
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--steps", "3", "--tokens", "256"]
    monkeypatch.setattr(demo, "read_documents", lambda: DOCUMENTS)
    assert demo.main(arguments) == 1
    assert "FAILED:  the held-out loss" in capsys.readouterr().out

    monkeypatch.setattr(demo, "MARGIN", -10.0)
    assert demo.main(arguments) == 0
    assert "PASSED" in capsys.readouterr().out

    train, seeds = demo.train, itertools.count()
    monkeypatch.setattr(
        demo, "train", lambda texts, steps, rows, _, title: train(texts, steps, rows, next(seeds), title)
    )
    assert demo.main(arguments) == 1
    assert "FAILED:  the two runs ended with different weights" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command() -> None:
    run = command("-m", "flash_attn_cute.demo", "--steps", "2", "--tokens", "2048")
    for expected in ("backend: ", "device:  ", "unigram entropy", "tokens/s", "weights: bitwise equal"):
        assert expected in run.stdout
    assert "run 2/2: 100%" in run.stderr
    assert run.returncode == 1, run.stderr
    assert "FAILED:  the held-out loss is not" in run.stdout.splitlines()[-1]


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "expected a number, 1 or more, got '0'" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["einops", "tqdm"])
def test_it_says_how_to_install_what_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which Python prints as it exits with status 1."""
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "flash_attn_cute.demo")
    with pytest.raises(SystemExit) as end:
        importlib.import_module("flash_attn_cute.demo")
    assert isinstance(end.value.code, str)
    assert "\n" not in end.value.code
    assert f"needs {missing}, which is missing: pip install einops tqdm" in end.value.code
