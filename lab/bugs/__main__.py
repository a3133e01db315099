"""``python -m lab.bugs``: writes the tables of bugs into their page, or prints every bug."""

import argparse
from collections.abc import Sequence

from lab.bugs import ALL, PAGE, listed, page


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page anew and prints its path, or prints a line for each bug."""
    parser = argparse.ArgumentParser("python -m lab.bugs", description=__doc__)
    kernels = f"all of them, or those of some kernels: {', '.join(ALL)}"
    parser.add_argument("--list", choices=ALL, metavar="KERNEL", nargs="*", help=f"print bugs, {kernels}")
    chosen = parser.parse_args(arguments).list
    if chosen is None:
        PAGE.write_text(page(PAGE.read_text(), ALL))
        print(f"wrote {PAGE}")
        return
    for kernel in chosen or ALL:
        print(f"{kernel}:", *listed(ALL[kernel]), sep="\n  ")


if __name__ == "__main__":
    main()
