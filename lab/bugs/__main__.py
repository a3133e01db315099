"""Writes the tables of the page."""

from lab.bugs import LAUNCHES, PAGE, TABLES, page

PAGE.write_text(page(PAGE.read_text(), *TABLES.values(), LAUNCHES))
