"""Writes the tables of bugs into their page."""

from lab.bugs import LAUNCHES, PAGE, TABLES, page

PAGE.write_text(page(PAGE.read_text(), *TABLES.values(), LAUNCHES))
