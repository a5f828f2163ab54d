"""Run all scorecard tests and write their results to docs/scorecard.md.

``python -m tests.reliability.scorecard``; ``--full`` runs the full trial counts (hours).
"""

import os
import platform
import re
import sys
from dataclasses import dataclass, field

import pytest
import torch

from tests.lib.repository import ROOT

PAGE = ROOT / "docs" / "scorecard.md"
MOST_IN_A_CELL = 150
BEGIN, END = "<!-- scorecard -->", "<!-- end of scorecard -->"


@dataclass
class Row:
    """One promise with the results of its tests."""

    promise: str
    n_tests: int = 0
    failed: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        """All results in one line."""
        if self.failed:
            return f"FAILED: {', '.join(self.failed)}"
        return "; ".join(self.results or ["as promised"])


class Collector:
    """Pytest plugin that collects row markers and the results of their tests."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self._row_of: dict[str, Row] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (mark := item.get_closest_marker("row")) is not None:
                number, promise = mark.args
                self._row_of[item.nodeid] = self.rows.setdefault(number, Row(promise))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._row_of[report.nodeid]
        if report.failed:
            row.failed.append(report.nodeid.rpartition("::")[2])
        if report.when == "call":
            row.n_tests += 1
            row.results += [str(text) for name, text in report.user_properties if name == "result"]


def table(rows: dict[int, Row], *, is_full: bool) -> str:
    """Render the scorecard as Markdown."""
    counts = "full counts" if is_full else "a tenth of the full counts or fewer"
    machine = f"{os.cpu_count()} CPU cores, torch {torch.__version__}, Python"
    lines = [
        f"{counts.capitalize()}, {machine} {platform.python_version()}:",
        "",
        "| # | promise | tests | seen |",
        "|---|---|---|---|",
    ]
    details = []
    for number, row in sorted(rows.items()):
        seen = row.result
        if len(seen) > MOST_IN_A_CELL:
            details += ["", f"Row {number}:", "", *(f"- {text}" for text in seen.split("; "))]
            seen = f"all {len(row.results)} as promised; see below" if not row.failed else "FAILED"
        lines.append(f"| {number} | {row.promise} | {row.n_tests} | {seen} |")
    return "\n".join([*lines, *details])


def main(arguments: list[str]) -> int:
    collector = Collector()
    code = pytest.main(["-m", "row", *arguments], plugins=[collector])
    text = table(collector.rows, is_full="--full" in arguments)
    print(text)
    pattern = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    page = pattern.sub(lambda _: f"{BEGIN}\n{text}\n{END}", PAGE.read_text())
    PAGE.write_text(page)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
