"""Pictures of block masks.

    python -m flash_attn_cute.sparsity plot window --seqlen 4096 --left 1023 --order spt --out window.png

draws a mask's blocks, the turns in which key blocks add to dQ, and the timeline of a model's CTAs in the backward pass.
With ``--against default --out window.gif`` the same pass moves under both orders. The command needs matplotlib:
``pip install matplotlib``.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from flash_attn_cute.runtime.command_line import picture, positive, run_command
from flash_attn_cute.sparsity.block_mask import BlockMask
from flash_attn_cute.sparsity.dq_order import launch_orders


def _documents(options: argparse.Namespace) -> BlockMask:
    ids = torch.arange(options.seqlen, device="cpu") // options.document
    return BlockMask.documents(ids) & BlockMask.causal(options.seqlen, options.seqlen)


def _random(options: argparse.Namespace) -> BlockMask:
    blocks = -(-options.seqlen // 128)
    generator = torch.Generator().manual_seed(options.seed)
    visible = torch.rand(options.heads, blocks, blocks, generator=generator, device="cpu") < options.share
    return BlockMask.from_blocks(visible, seqlen_q=options.seqlen, seqlen_k=options.seqlen)


def _sink(options: argparse.Namespace) -> BlockMask:
    window = BlockMask.window(options.seqlen, options.seqlen, left=options.left)
    first = BlockMask.prefix(options.seqlen, options.seqlen, 4)
    return (window | first) & BlockMask.causal(options.seqlen, options.seqlen)


MASKS: dict[str, Callable[[argparse.Namespace], BlockMask]] = {
    "causal": lambda options: BlockMask.causal(options.seqlen, options.seqlen),
    "window": lambda options: BlockMask.window(options.seqlen, options.seqlen, left=options.left, right=options.right),
    "documents": _documents,
    "prefix_lm": lambda options: BlockMask.prefix_lm(options.seqlen, options.seqlen, options.prefix),
    "dilated": lambda options: BlockMask.dilated(
        options.seqlen, options.seqlen, options.step, left=options.left, right=options.right
    ),
    "random": _random,
    "sink": _sink,
}


def _animate(mask: BlockMask, options: argparse.Namespace) -> None:
    from flash_attn_cute.sparsity.mask_plot import animation  # needs matplotlib

    animation([mask.with_order(options.against), mask], [options.against, options.order], options.out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 1 if matplotlib is missing, or there is no such mask or picture."""
    description, _, _ = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(prog="python -m flash_attn_cute.sparsity", description=description)
    plot = parser.add_subparsers(required=True, metavar="command").add_parser("plot", help="draw a mask")
    plot.add_argument("mask", choices=MASKS)
    plot.add_argument("--seqlen", type=positive, default=4096, help="queries and keys (%(default)s)")
    plot.add_argument("--left", type=int, default=1023, help="of windows: keys before a query (%(default)s)")
    plot.add_argument("--right", type=int, default=0, help="of windows: keys behind it (%(default)s)")
    plot.add_argument("--document", type=positive, default=1000, help="tokens of a document (%(default)s)")
    plot.add_argument("--prefix", type=int, default=1000, help="tokens that all queries attend to (%(default)s)")
    plot.add_argument("--step", type=int, default=256, help="of dilated windows (%(default)s)")
    plot.add_argument("--share", type=float, default=0.125, help="of random blocks that are visible (%(default)s)")
    plot.add_argument("--heads", type=positive, default=16, help="of a random mask (%(default)s)")
    plot.add_argument("--seed", type=int, default=0, help="of a random mask (%(default)s)")
    plot.add_argument("--order", choices=launch_orders.NAMES, default="default", help="of launches (%(default)s)")
    plot.add_argument("--against", choices=launch_orders.NAMES, help="another order, for a moving picture of both")
    plot.add_argument("--out", type=picture, help="the picture's file (mask.png, or mask.gif with --against)")
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = Path("mask.png" if options.against is None else "mask.gif")
    if options.against is not None and options.out.suffix != ".gif":
        parser.error(f"argument --out: expected a .gif with --against, got {options.out}")
    try:
        mask = MASKS[options.mask](options).with_order(options.order)
        if options.against is None:
            mask.plot().savefig(options.out, dpi=100)
        else:
            _animate(mask, options)
    except ImportError as error:
        print(f"{error}; pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{mask}\n{options.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
