"""``python -m lab.bugs``: writes the tables of bugs into their page."""

import argparse
from collections.abc import Sequence

from lab.bugs import LAUNCHES, PAGE, TABLES, page


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page anew, and prints its path."""
    argparse.ArgumentParser("python -m lab.bugs", description=__doc__).parse_args(arguments)
    PAGE.write_text(page(PAGE.read_text(), *TABLES.values(), LAUNCHES))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
