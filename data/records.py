"""Texts of the records of JSON and CSV files, one at a time, in the memory of one record."""

import codecs
import csv
import io
import json
import re
import reprlib
from collections.abc import Iterator
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple

from data.compression import open_decompressed
from data.formats import Format
from data.storage import DataPath

# Longest record in bytes, because a file without line breaks would fill the memory.
MAX_RECORD_BYTES = 1 << 27
# Of files with a record per line.
LINE_SUFFIXES = {".jsonl", ".jsonlines", ".ndjson"}
_CHUNK_BYTES = 1 << 20
_BLANKS = re.compile(r"\s*")


class Record(NamedTuple):
    """A record's text, or why it has none."""

    text: str | None
    error: str = ""


def read_records(path: DataPath, file_format: Format, text_key: str) -> Iterator[Record]:
    """Yield the records of a json, csv or tsv file in its order; ``text_key``: column of the text.

    JSON has a record per line, or is one array, or records over several lines. Raises
    ``ValueError`` where the rest of the file cannot be read.
    """
    with open_decompressed(path) as file:
        if file_format == "json":
            yield from _read_json(path, file, text_key)
        else:
            yield from _read_csv(path, file, text_key, "\t" if file_format == "tsv" else ",")


def _read_json(path: DataPath, file: BinaryIO, text_key: str) -> Iterator[Record]:
    is_first, start, number = True, 0, 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        where = f"{path}, line {number}, byte {start}"
        start += len(line)
        if len(line) > MAX_RECORD_BYTES and not (is_first and _begins_array(line)):
            raise ValueError(f"{where}: longer than {MAX_RECORD_BYTES:,} bytes")
        if not line.strip(codecs.BOM_UTF8 + b" \t\r\n"):
            continue
        if is_first and _continues(line, path):
            yield from _read_values(path, line, file, text_key)
            return
        is_first = False
        yield _record_of_line(line, text_key, where)


def _continues(line: bytes, path: DataPath) -> bool:
    """True if the first line begins an array, or an object that goes on in the next line."""
    if _begins_array(line):
        return True
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    if {suffix.lower() for suffix in path.suffixes} & LINE_SUFFIXES:
        # The first line is a bad record like any other.
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.decode())
    except (ValueError, RecursionError):
        pass
    return False


def _begins_array(line: bytes) -> bool:
    return re.match(rb"(?:\xef\xbb\xbf)?\s*\[\s*(?:\{|\]|$)", line) is not None


def _record_of_line(line: bytes, text_key: str, where: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return Record(None, f"{where}: {error.msg}, column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Record(None, f"{where}: {error}")
    return _record_of_value(record, text_key, where)


def _record_of_value(value: Any, text_key: str, where: str) -> Record:
    if not isinstance(value, dict):
        return Record(None, f"{where}: {reprlib.repr(value)} is not an object")
    if text_key not in value:
        columns = shorten(", ".join(value), 200) or "none"
        return Record(None, f"{where}: data.text_key: no {text_key!r}, only {columns}")
    text = value[text_key]
    if not isinstance(text, str):
        problem = f"{text_key!r} is {reprlib.repr(text)}, not text"
        return Record(None, f"{where}: data.text_key: {problem}")
    try:
        # JSON can escape a lone surrogate, which UTF-8 cannot encode.
        text.encode()
    except UnicodeEncodeError as error:
        return Record(None, f"{where}: {error}")
    return Record(text)


def _read_values(path: DataPath, head: bytes, file: BinaryIO, text_key: str) -> Iterator[Record]:
    number = 0
    try:
        for value in _values(_JsonText(head, file)):
            number += 1
            yield _record_of_value(value, text_key, f"{path}, record {number}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, record {number + 1}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, record {number + 1}: {error}") from None


def _values(text: "_JsonText") -> Iterator[Any]:
    """Values of one array, or of a sequence of values."""
    if text.peek() != "[":
        while text.peek():
            yield text.decode()
        return
    text.take()
    end = text.peek() == "]" and text.take()
    while end != "]":
        yield text.decode()
        end = text.take()
        if end not in ("]", ","):
            raise ValueError(f"{end!r} after it, not a comma" if end else "the array has no end")
    if text.peek():
        raise ValueError("text after the array")


class _JsonText:
    """JSON that is read in chunks and decoded value by value."""

    def __init__(self, head: bytes, file: BinaryIO) -> None:
        self._file = file
        self._decode_bytes = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decode_value = json.JSONDecoder().raw_decode
        self._text, self._at = self._decode_bytes(head), 0

    def peek(self) -> str:
        """Return the next character that is not blank, "" at the end."""
        while True:
            blanks = _BLANKS.match(self._text, self._at)
            assert blanks is not None, "also matches nothing"
            self._at = blanks.end()
            if self._at < len(self._text) or not self._read():
                return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """Return the next character that is not blank, and go past it."""
        character = self.peek()
        self._at += len(character)
        return character

    def decode(self) -> Any:
        """Return the next value, and go past it."""
        self.peek()
        while True:
            try:
                value, self._at = self._decode_value(self._text, self._at)
            except json.JSONDecodeError:
                # It may go on in the next chunk.
                if not self._read():
                    raise
            else:
                return value

    def _read(self) -> bool:
        """Append as much again, so that a long value is not decoded often; False at the end."""
        self._text, self._at = self._text[self._at :], 0
        if len(self._text) > MAX_RECORD_BYTES:
            raise ValueError(f"longer than {MAX_RECORD_BYTES:,} bytes, or malformed")
        chunk = self._file.read(max(_CHUNK_BYTES, len(self._text)))
        self._text += self._decode_bytes(chunk, final=not chunk)
        return bool(chunk)


def _read_csv(path: DataPath, file: BinaryIO, text_key: str, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)
    lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
    rows = csv.reader(_bounded_lines(lines), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        if header.count(text_key) != 1:
            problem = "several columns" if text_key in header else "no column"
            columns = shorten(", ".join(header), 200)
            raise ValueError(f"data.text_key: {problem} {text_key!r}, only {columns}")
        for row in rows:
            if len(row) == len(header):
                yield Record(row[header.index(text_key)])
            elif row:
                problem = f"{len(row)} columns, not {len(header)}"
                yield Record(None, f"{path}, line {rows.line_num}: {problem}")
    except UnicodeDecodeError as error:
        # Many lines are decoded at once.
        raise ValueError(f"{path}, after line {rows.line_num}: {error}") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from None


def _bounded_lines(file: io.TextIOWrapper) -> Iterator[str]:
    while line := file.readline(MAX_RECORD_BYTES + 1):
        if len(line) > MAX_RECORD_BYTES:
            raise ValueError(f"longer than {MAX_RECORD_BYTES:,} characters")
        yield line
