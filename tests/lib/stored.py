"""Data of every kind in one folder, and comparisons of what is read from copies of it."""

import gzip
import json
from pathlib import Path

import numpy as np
import zstandard

from config.job_config import DataSource
from data.sources import open_documents
from tests.lib.corpora import DOCUMENTS, write_megatron, write_prepared
from tests.lib.formats import arrow, parquet, table

# (type, pattern) of sources that read files of ``write_every_kind``.
SOURCES = [
    ("files", "text/**/*.txt"),
    ("files", "text/**"),
    ("files", "text/*"),
    ("files", "text/*/*.txt"),
    ("files", "text/.h*"),
    ("files", "te[x]t/[a-b]*/c.t?t"),
    ("files", "text/long.txt"),
    ("files", "**/long.*"),
    ("files", "rows/*"),
    ("text", "rows/table.csv"),
    ("files", "tables/*.parquet"),
    ("files", "tables/*.arrow"),
    ("tokens", "tokens/prepared"),
    ("tokens", "tokens/megatron.idx"),
    ("tokens", "tokens/*"),
]


def write_every_kind(folder: Path) -> None:
    """Write files whose names sort in other orders by parts and by characters."""
    names = ("a/c.txt", "a-b/c.txt", "a b.txt", "B.txt", "\N{LATIN SMALL LETTER E WITH ACUTE}.txt")
    texts = {name: f"text of {name}\n" for name in (*names, ".hidden/x.txt", ".h.txt", "empty.txt")}
    texts |= {"long.txt": "".join(f"line {number}\n" for number in range(20_000)), "empty.txt": ""}
    for name, text in texts.items():
        path = folder / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(300)).encode()
    (folder / "rows").mkdir()
    (folder / "rows" / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    (folder / "rows" / "b.jsonl.zst").write_bytes(zstandard.compress(rows))
    (folder / "rows" / "table.csv").write_bytes(table(["x", "two\nlines", ""]))
    (folder / "tables").mkdir()
    for number in range(2):
        cells = [f"cell {row} of {number}" for row in range(500)]
        content = parquet(cells, row_group_size=60)
        (folder / "tables" / f"{number}.parquet").write_bytes(content)
    (folder / "tables" / "x.arrow").write_bytes(arrow(["p", "q", "r"], is_stream=False))
    write_prepared(folder / "tokens" / "prepared", [DOCUMENTS, [[1] * 90, [2]]])
    write_megatron(folder / "tokens" / "megatron.idx", [[[5, 6]], [[7], [8, 9]]])


def assert_same_source(kind: str, local: str, remote: str) -> None:
    """Assert that both patterns give the same documents in one order, and one fingerprint."""
    expected, fingerprint = open_documents(DataSource(type=kind, path=local))
    found, same_fingerprint = open_documents(DataSource(type=kind, path=remote))
    assert len(found) == len(expected) > 0
    for index in range(len(expected)):
        assert np.array_equal(found[index], expected[index]), index
    assert np.array_equal(found.split_hashes, expected.split_hashes)
    assert same_fingerprint == fingerprint
