"""Documents as bytes of each format of data files."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

TEXTS = ["plain", "two\nlines", '\N{WAVING HAND SIGN} caf\u00e9, "quoted"']


def lines(texts: list[str]) -> bytes:
    return "".join(
        json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)
    ).encode()


def array(texts: list[str], indent: int | None = None) -> bytes:
    rows = [{"text": text, "more": [i, {"a": "]}"}]} for i, text in enumerate(texts)]
    return json.dumps(rows, indent=indent).encode()


def table(texts: list[str], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def parquet(texts: list[str | None], **options: object) -> bytes:
    file = io.BytesIO()
    pq.write_table(
        pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())}), file, **options
    )
    return file.getvalue()


def arrow(texts: list[str], *, is_stream: bool) -> bytes:
    file, rows = io.BytesIO(), pa.table({"text": pa.array(texts, pa.large_string())})
    with (ipc.new_stream if is_stream else ipc.new_file)(file, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    return file.getvalue()
