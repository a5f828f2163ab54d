"""Formats of data files, by their content; those that must not be trained on as text."""

import re
from typing import Literal

from data.compression import compression_of, open_decompressed
from data.storage import DataPath

Format = Literal["text", "json", "csv", "tsv", "parquet", "arrow"]

# Bytes of a file that tell its format; git and grep also look for a NUL in so many.
HEAD_BYTES = 8000
_TABLES: dict[bytes, Format] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\xff\xff\xff\xff": "arrow",  # of a stream
}
# What must not be trained on as text: (first bytes, what it is). Files of these have control
# characters, unlike texts that begin with the same letters: "ORCID", "PARENTS".
_BINARY = {
    b"MMIDIDX": "an index of Megatron-LM, for a source of type tokens",
    b"PK\3\4": "a zip archive, like those of Office and EPUB",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x04\x22\x4d\x18": "compressed by lz4; decompress it",
    b"PARE": "encrypted Parquet",
    b"Obj\1": "Avro",
    b"ORC": "ORC",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"GIF8": "an image",
    b"RIFF": "an image, sound or film",
    b"ID3": "sound",
}
# These may have none.
_OTHERS = {
    b"\0\0\xfe\xff": "UTF-32; convert it to UTF-8",
    b"\xff\xfe": "UTF-16; convert it to UTF-8",
    b"\xfe\xff": "UTF-16; convert it to UTF-8",
    b"version https://git-lfs": "a pointer of Git LFS; run git lfs pull",
    b"WARC/": "a WARC archive; extract its texts",
    b"%PDF-": "a PDF",
    b"%!PS": "PostScript",
    b"{\\rtf": "RTF",
}
# Other than whitespace and the escape of terminals.
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
_TAR = slice(257, 262)
_JSON_SUFFIXES = {".json", ".jsonl", ".jsonlines", ".ndjson"}
_SUFFIXES: dict[str, Format] = {".csv": "csv", ".tsv": "tsv"}
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
# The beginning of an object, or of an array of objects.
_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*)?\{\s*(?:"|\})')


def format_of(path: DataPath, *, as_text: bool = False) -> Format | None:
    """Return the format of a file, also a compressed one; None if it is empty.

    Its content decides. The suffix, in any case, decides only for CSV, and for JSON that is
    malformed. ``as_text``: JSON and CSV are text. Raises ``ValueError`` for what is none of the
    formats, and says what it is.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        compression = compression_of(head)
        if compression:
            with open_decompressed(path) as decompressed:
                head = decompressed.read(HEAD_BYTES)
        if not head:
            return None
        found = _recognize(path, head)
        if as_text and found in ("json", "csv", "tsv"):
            found = "text"
    except PermissionError as error:
        raise ValueError(f"data.path: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"data.path: {error}") from None
    if compression and found in ("text", "parquet", "arrow"):
        advice = "decompress it" + (", or write JSON lines" if found == "text" else "")
        raise ValueError(f"data.path: {path} is {found} compressed by {compression}; {advice}")
    return found


def _recognize(path: DataPath, head: bytes) -> Format:
    is_binary = _CONTROL.search(head) is not None
    for magic, table in _TABLES.items():
        if is_binary and head.startswith(magic):
            return table
    for magic, what in (_OTHERS | (_BINARY if is_binary else {})).items():
        if head.startswith(magic):
            raise ValueError(f"{path} is {what}")
    if head[_TAR] == b"ustar":
        raise ValueError(f"{path} is a tar archive; extract it")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    suffix = next((s for s in reversed(suffixes) if s not in _COMPRESSED_SUFFIXES), "")
    if suffix in _JSON_SUFFIXES or _JSON.match(head):
        return "json"
    if b"\0" in head:
        raise ValueError(f"{path} is binary: byte {head.index(0)} of it is NUL")
    if suffix in (".parquet", ".arrow"):
        raise ValueError(f"{path} is not {suffix[1:]}: it begins with {head[:16]!r}")
    return _SUFFIXES.get(suffix, "text")
