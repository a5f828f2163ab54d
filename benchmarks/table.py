"""Render tables of rows: ``python -m benchmarks.table [FILE.jsonl ...] [--draw PICTURE]``

Without files, renders the tables in the documentation from the committed rows, between
``<!-- rows: FILE.jsonl -->`` and ``<!-- end of rows -->``. ``--draw`` plots rows of
``data_parallel`` for docs/data_parallel.md.
"""

import argparse
import re
import tomllib
from pathlib import Path

from benchmarks.rows import ROOT, newest, read_rows, tables

RESULTS, CONFIGS = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "configs"
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "benchmarks").glob("*.md")), DOCS / "data_parallel.md"]
MARKED = re.compile(r"(<!-- rows: (\S+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def table_of(path: Path) -> str:
    """Render the rows of a file, with the columns of their config."""
    rows = read_rows(path)
    if not rows:
        return "(no rows yet)"
    configs = list(dict.fromkeys(row["config"] for row in rows))
    by_config = []
    for config in configs:
        columns = tomllib.loads((CONFIGS / f"{config}.toml").read_text())["columns"]
        by_config.append(tables([row for row in rows if row["config"] == config], columns))
    return "\n\n".join(by_config)


def rendered(page: str) -> str:
    """Return ``page`` with its tables rendered from the committed rows."""
    return MARKED.sub(lambda m: f"{m[1]}\n{table_of(RESULTS / m[2])}\n\n{m[3]}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    for file in options.files:
        print(table_of(file), end="\n\n")
    if options.draw:
        from benchmarks.plot import plot_modes  # Imports an optional package.

        rows = [row for file in options.files for row in read_rows(file)]
        plot_modes(newest(rows), options.draw)
    for page in [] if options.files else PAGES:
        page.write_text(rendered(page.read_text()))


if __name__ == "__main__":
    main()
