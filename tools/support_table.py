"""``python -m tools.support_table`` writes docs/support.md, the reader's copy of the tables."""

from pathlib import Path
from typing import Any

from config import refusals
from config.refusals import Refusal
from parallelisms import support

ROWS: tuple[Refusal[Any], ...] = (*support.REFUSALS, *refusals.REFUSALS)
PAGE = Path(__file__).parents[1] / "docs" / "support.md"
INTRO = """\
# What cannot be run

Whatever this table does not name runs, if its degrees multiply to the number of ranks. What it
names is refused with exit code 2 before any process group or device is touched.
`python -m tools.support_table` writes this page from the tables in `parallelisms/support.py` and
`config/refusals.py`.

| key | refused because |
|---|---|
"""


def support_text() -> str:
    """The page as it should be."""
    return INTRO + "".join(f"| `{row.key}` | {row.reason} |\n" for row in ROWS)


if __name__ == "__main__":
    PAGE.write_text(support_text())
