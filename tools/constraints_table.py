"""``python -m tools.constraints_table`` writes docs/reference/constraints.md."""

from pathlib import Path
from typing import Any

from config.constraints import CONFIG_CONSTRAINTS, Constraint
from parallelisms.constraints import RUN_CONSTRAINTS

ROWS: tuple[Constraint[Any], ...] = (*RUN_CONSTRAINTS, *CONFIG_CONSTRAINTS)
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "constraints.md"
INTRO = """\
# Unsupported configurations

Every other configuration starts, if its degrees multiply to the number of ranks. The launcher
rejects those in this table with exit code 2, before any process group or device is touched. Of
those that start, [tests](../design/init_and_data_order.md#tests) cover pairs of options on up to 4
ranks on CPUs, and with `--all` every triple on up to 8. Rows are in the order of the code:
first pairs of parallelisms, then single keys.
`./shardloom python -m tools.constraints_table` writes this page from the tables in
`parallelisms/constraints.py` and `config/constraints.py`.

| key | reason |
|---|---|
"""


def constraints_page() -> str:
    """Return the text of docs/reference/constraints.md."""
    return INTRO + "".join(f"| `{row.key}` | {row.reason} |\n" for row in ROWS)


if __name__ == "__main__":
    PAGE.write_text(constraints_page())
