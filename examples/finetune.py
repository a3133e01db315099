"""Fine-tunes a model of Hugging Face transformers on packed documents, with and without flash_attn_cute.

    python examples/finetune.py

Nothing is downloaded. A small Llama of bytes is first trained on the source code of Python's standard library and
saved; this stands for the model that you would load. Then it is loaded twice and fine-tuned on what the library's
docstrings say, documents packed one behind another: once with ``attn_implementation="flash_attn_cute"``, once with
``"eager"``. Both have to learn the same. It takes a minute or two on two CPU cores and needs
``pip install -e '.[examples]'``.
"""

import argparse
import ast
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig
from transformers.utils import logging

from flash_attn_cute.demo import read_documents, shuffled_forever
from flash_attn_cute.integrations.transformers import register
from flash_attn_cute.runtime.command_line import at_least, positive

LONGEST = 512  # bytes of a document; longer ones are cut
HELD_OUT = 20  # one docstring in so many
TOLERANCE = 0.02  # nats by which the two losses may differ: both runs round in their own way

Batch = dict[str, Any]


def docstrings() -> list[bytes]:
    """Docstrings of the modules, classes and functions of the standard library."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found: dict[str, None] = {}  # each once, in order
    for source in read_documents():
        for node in ast.walk(ast.parse(source)):  # prose: ok
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                found[text] = None
    return [text.encode()[:LONGEST] for text in found if len(text) > 100]


def packed(documents: Iterator[bytes], rows: int, device: torch.device) -> Iterator[Batch]:
    """Batches of whole documents, no more than ``rows`` bytes each, as transformers takes them: (1, bytes)."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)  # position_ids, offsets and labels
    taken: list[bytes] = []
    for document in documents:
        if sum(map(len, taken)) + len(document) > rows:
            batch = collate([{"input_ids": list(text)} for text in taken])
            yield {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
            taken = []
        taken.append(document)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Loss of a batch, computed in bfloat16 on a GPU."""
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


def train(model: Any, batches: Iterator[Batch], steps: int, rate: float) -> tuple[float, float]:
    """Trains a model; returns the mean loss of the last tenth of the steps, and the bytes per second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, count, start = [], 0, time.perf_counter()
    for batch in itertools.islice(batches, steps):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        count += batch["input_ids"].numel()
    last = torch.stack(losses[-max(1, steps // 10) :]).mean().item()
    return last, count / (time.perf_counter() - start)


@torch.no_grad()
def evaluate(model: Any, batches: Iterator[Batch], steps: int) -> float:
    """The mean loss over batches."""
    losses = [loss_of(model, batch) for batch in itertools.islice(batches, steps)]
    return torch.stack(losses).mean().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the example; returns 0 if both models have learned, and the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=80, help="of training, and of fine-tuning (%(default)s)")
    parser.add_argument("--rows", type=partial(at_least, LONGEST), default=1024, help="bytes of a step (%(default)s)")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    register()
    logging.disable_progress_bar()

    sources = [document[:LONGEST] for document in read_documents() if document]
    texts = docstrings()
    held_out, training = texts[::HELD_OUT], [text for i, text in enumerate(texts) if i % HELD_OUT]
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attn_cute").to(device)
        loss, _ = train(model, packed(shuffled_forever(sources, 0), options.rows, device), options.steps, 3e-3)
        model.save_pretrained(folder)
        print(f"a model of source code: loss {loss:.3f} nats per byte")

        after: list[float] = []
        for implementation in ("flash_attn_cute", "eager"):
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=implementation).to(device)
            before = evaluate(model, packed(iter(held_out), options.rows, device), 10)
            batches = packed(shuffled_forever(training, 1), options.rows, device)
            _, speed = train(model, batches, options.steps, 1e-3)
            after.append(evaluate(model, packed(iter(held_out), options.rows, device), 10))
            print(f"{implementation:>16}: held-out loss {before:.3f} -> {after[-1]:.3f}, {speed:,.0f} bytes/s")
    learned = max(after) < before and abs(after[0] - after[1]) < TOLERANCE
    print("PASSED" if learned else "FAILED: the losses should have fallen, both to the same")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
