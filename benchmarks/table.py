"""Tables of rows: ``python -m benchmarks.table [FILE.jsonl ...]``

Without files, those of the documentation are written anew from the committed rows: what stands
between ``<!-- rows: FILE.jsonl -->`` and ``<!-- end of rows -->`` is never typed by hand.
"""

import re
import sys
import tomllib
from pathlib import Path

from benchmarks.rows import ROOT, read_rows, table

RESULTS, CONFIGS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "configs"
PAGES = [ROOT / "docs" / "benchmarks.md"]
MARKED = re.compile(r"(<!-- rows: (\S+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def table_of(path: Path) -> str:
    """The rows of a file under the columns of the config that they are of."""
    rows = read_rows(path)
    if not rows:
        return "(no rows yet)"
    configs = list(dict.fromkeys(row["config"] for row in rows))
    tables = []
    for config in configs:
        columns = tomllib.loads((CONFIGS / f"{config}.toml").read_text())["columns"]
        tables.append(table([row for row in rows if row["config"] == config], columns))
    return "\n\n".join(tables)


def rendered(page: str) -> str:
    """A page with its tables as the committed rows have them."""
    return MARKED.sub(lambda m: f"{m[1]}\n{table_of(RESULTS / m[2])}\n\n{m[3]}", page)


def main(files: list[Path]) -> None:
    for file in files:
        print(table_of(file), end="\n\n")
    for page in [] if files else PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
