"""Writes the tables of the page."""

from tests.sm100_bugs import BACKWARD, FORWARD, PAGE, page

PAGE.write_text(page(PAGE.read_text(), FORWARD, BACKWARD))
