"""Files of users: each input of a table is read exactly, or refused by name and reason."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import pyarrow.parquet as pq
import pytest
import zstandard

from config.job_config import Data, DataSource
from data.records import read_records
from data.sources import build_sources, open_documents
from tests.lib.formats import TEXTS, array, arrow, lines, parquet, table

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def objects(texts: list[str]) -> bytes:
    return "\n".join(json.dumps({"text": text}, indent=2) for text in texts).encode()


def tar(content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


class Input(NamedTuple):
    """Files, and what is right for them."""

    files: dict[str, bytes | str]
    """Contents by name; a str is the target of a link."""
    right: list[str] | str
    """Texts, in any order; or the error."""
    path: str = "**/*"
    type: str = "files"


def one(name: str, content: bytes, right: list[str] | str = TEXTS, type: str = "files") -> Input:
    return Input({name: content}, right, type=type)


TEXT = "a line\nanother, with a \u2028 separator\n"
BOM = "\ufeff"
INPUTS = [
    # Names of JSON, and no name at all.
    *(one(f"a{suffix}", lines(TEXTS)) for suffix in (".jsonl", ".JSONL", ".ndjson", ".json")),
    *(one(f"a{suffix}", lines(TEXTS)) for suffix in (".jsonlines", ".txt", "")),
    *(one(f"a{suffix}", array(TEXTS)) for suffix in (".json", ".JSON", ".jsonl", ".data")),
    one("a.json", array(TEXTS, indent=2)),
    one("a.json", objects(TEXTS)),
    one("a.json", b"\n\n" + objects(TEXTS[:1]) + b"\n\n", TEXTS[:1]),
    one("a.json", b" [ ]\n", "no documents"),
    one("a.jsonl", b"\xef\xbb\xbf" + lines(TEXTS)),
    one("a.json", b"\xef\xbb\xbf" + array(TEXTS)),
    one("a.jsonl", lines(TEXTS).replace(b"\n", b"\r\n\r\n")),
    one("a.jsonl", lines(TEXTS).rstrip()),
    *(one(f"a.jsonl{suffix}", pack(lines(TEXTS))) for suffix, pack in PACK.items()),
    *(one(f"a.json{suffix.upper()}", pack(array(TEXTS))) for suffix, pack in PACK.items()),
    *(one("a.json", pack(lines(TEXTS))) for pack in PACK.values()),
    one("a.jsonl.gz", lines(TEXTS)),
    one("a.jsonl", b'{"text": "a"}{"text": "b"}\n', r"a\.jsonl, line 1, byte 0: Extra data"),
    one("a.json", b'[{"text": "a"} {"text": "b"}]', r"record 2: '\{' after it, not a comma"),
    one("a.json", b'[{"text": "a"}, {"text": "b"}', r"a\.json, record 3: the array has no end"),
    one("a.json", b'[{"text": "a"}] [1]', r"a\.json, record 2: text after the array"),
    one("a.json", b'[{"text": "a"}, 7]', r"a\.json, record 2: 7 is not an object"),
    one("a.json", b'{"name": "package",\n "version": 1}', "no 'text', only name, version"),
    one("a.json", b'{"text": "torn', r"a\.json, line 1, byte 0: Unterminated"),
    one("a.json", b"not JSON", r"a\.json, line 1, byte 0: Expecting value"),
    one("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl, line 1, byte 0: .*surrogates"),
    one("a.jsonl", lines(TEXTS).decode().encode("utf-16"), r"a\.jsonl is UTF-16"),
    # CSV.
    one("a.csv", table(TEXTS)),
    one("a.CSV", b"\xef\xbb\xbf" + table(TEXTS)),
    one("a.tsv", table(TEXTS, "\t")),
    *(one(f"a.csv{suffix}", pack(table(TEXTS))) for suffix, pack in PACK.items()),
    one("a.csv", b"id;text\n1;a\n", r"a\.csv, line 1: .* no column 'text', only id;text"),
    one("a.csv", b"id,text\n1,a\n2,b,c\n", r"a\.csv, line 3: 3 columns, not 2"),
    one("a.csv", b'id,text\n1,"torn\n', r"a\.csv, line \d: unexpected end"),
    one("a.csv", b"text,text\na,b\n", "several columns 'text'"),
    one("a.csv", b"id,text\n", "no documents"),
    # Parquet and Arrow.
    one("a.parquet", parquet(TEXTS)),
    one("a.PARQUET", parquet(TEXTS, row_group_size=2)),
    one("a", parquet(TEXTS, use_dictionary=True, compression="zstd")),
    one("a.parquet.tmp", parquet(TEXTS)),
    one("a.parquet.tmp", parquet(TEXTS)[:-20], r"a\.parquet\.tmp: "),
    one("a.parquet", lines(TEXTS)),
    one("a.parquet", b"text", r"a\.parquet is not parquet: it begins with b'text'"),
    one("a.parquet", parquet(["a", None]), r"'text' of .*a\.parquet, row 1, is null"),
    one("a.parquet", parquet(["a", None], write_statistics=False), r"a\.parquet, row 1, is null"),
    one("a.parquet.gz", gzip.compress(parquet(TEXTS)), "parquet compressed by gzip; decompress it"),
    one("a.arrow", arrow(TEXTS, is_stream=True)),
    one("a.arrow", arrow(TEXTS, is_stream=False)),
    one("a.feather", arrow(TEXTS, is_stream=False)),
    one("a.arrow", arrow(TEXTS, is_stream=False)[:-50], r"a\.arrow: "),
    # Plain text.
    *(one(f"a{suffix}", TEXT.encode(), [TEXT]) for suffix in (".txt", ".md", ".html", "", ".0")),
    one("a.txt", (BOM + TEXT).encode(), [TEXT]),
    one("a.txt", TEXT.replace("\n", "\r\n").encode(), [TEXT.replace("\n", "\r\n")]),
    one("a.py", b"{}  # not JSON\n", ["{}  # not JSON\n"], "text"),
    one("a.txt", b"{1, 2}\n", ["{1, 2}\n"]),
    one("a.txt", b"[1] A. Author\n", ["[1] A. Author\n"]),
    one("a.txt", "caf\u00e9".encode("latin-1"), r"a\.txt, byte 3: not UTF-8"),
    *(one("a.txt", TEXT.encode(code), r"a\.txt is UTF-") for code in ("utf-16", "utf-32")),
    one("a.txt", TEXT.encode("utf-16-le"), r"a\.txt is binary: byte 1 of it is NUL"),
    *(one(f"a.txt{suffix}", PACK[suffix](TEXT.encode()), "text compressed by .*; decompress it, or")
      for suffix in PACK if suffix),
    # JSON and CSV as plain text, where the source says so.
    one("a.json", b'{"a": 1}', ['{"a": 1}'], "text"),
    one("a.csv", b"a,b\n", ["a,b\n"], "text"),
    one("a.jsonl.gz", gzip.compress(lines(TEXTS)), "text compressed by gzip", "text"),
    # Text that begins like another format.
    *(one("a.txt", text, [text.decode()]) for text in (
        b"PARENTS\n", b"PAR1\n", b"ORC\n", b"ID3 tags\n", b"RIFFLE\n", b"GIF89a\n", b"Rar!\n",
        b"MMIDIDX\n", b"ARROW1\n", b"BZh9\n")),
    one("a.csv", b"ORCID,text\n1,a\n", ["a"]),
    one("a.txt", b"BZh91AY&SY", r"compressed by bzip2|truncated"),
    # What is no text.
    one("a.parquet", b"PARE\x15\0", r"a\.parquet is encrypted Parquet"),
    one("a.orc", b"ORC\x1c\0\0", r"a\.orc is ORC"),
    one("a.wav", b"RIFF\x24\0\0\0WAVE", r"a\.wav is an image, sound"),
    one("a.mp3", b"ID3\4\0", r"a\.mp3 is sound"),
    one("a.gif", b"GIF89a\1\0\1\0", r"a\.gif is an image"),
    one("a.rar", b"Rar!\x1a\7\0", r"a\.rar is a RAR"),
    one("a.txt", b"%PDF-1.7\n", r"a\.txt is a PDF"),
    one("a.txt", b"PK\3\4 and more", r"a\.txt is a zip archive"),
    one("a.tar", tar(b"text"), r"a\.tar is a tar archive"),
    one("a.tar.gz", gzip.compress(tar(b"text")), r"a\.tar\.gz is a tar archive"),
    one("a.png", b"\x89PNG\r\n\x1a\n", r"a\.png is an image"),
    one("a.doc", b"{\\rtf1 text}", r"a\.doc is RTF"),
    one("a.wet", b"WARC/1.0\r\n", r"a\.wet is a WARC"),
    one("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    one("a.pkl", b"\x80\4\x95", r"a\.pkl, byte 0: not UTF-8"),
    # Empty parts.
    Input({"a.jsonl": b"", "b.jsonl": lines(TEXTS)}, TEXTS),
    Input({"a.jsonl": b" \n\n", "b.jsonl": lines(TEXTS)}, TEXTS),
    Input({"a.jsonl.gz": gzip.compress(b""), "b.jsonl": lines(TEXTS)}, TEXTS),
    Input({"a.parquet": parquet([]), "b.parquet": parquet(TEXTS)}, TEXTS),
    Input({"a.arrow": arrow([], is_stream=True), "b.parquet": parquet(TEXTS)}, TEXTS),
    Input({"a.txt": b"", "b.jsonl": lines(TEXTS), "_SUCCESS": b""}, TEXTS),
    Input({"a.txt": b"", "b.txt": TEXT.encode()}, [TEXT]),
    *(one(f"a{suffix}", b"", "no documents") for suffix in (".txt", ".jsonl", ".parquet", ".csv")),
    one("a.parquet", parquet([]), "no documents"),
    Input({}, "no file matches"),
    # Links, folders and hidden files.
    Input({"a.txt": b"a", "b.txt": b"b", "self": "."}, ["a", "b"]),
    Input({"d/a.txt": b"a", "d/up": "..", "d/self": ".", "more": "d"}, ["a"]),
    Input({"v1/a.txt": b"a", "v2/a.txt": b"b", "latest": "v2"}, ["a", "b"]),
    Input({"a.txt": b"a", "link.txt": "a.txt", "again.txt": "link.txt"}, ["a"]),
    Input({"v2/a.txt": b"b", "latest": "v2"}, ["b"], "latest/*.txt"),
    Input({"a.txt": b"a", "gone.txt": "nothing"}, r"gone\.txt is a link to nothing"),
    *(Input({"a/a.txt": b"a", "more": "nothing"}, "more is a link to nothing", path)
      for path in ("**/*.txt", "*/*.txt")),
    Input({"a.txt": b"a", "more": "more"}, "more: Too many levels of symbolic links", "**/*.txt"),
    Input({"a.txt": b"a", ".hidden.txt": b"h", ".git/b.txt": b"g"}, ["a"]),
    Input({".hidden.txt": b"h"}, ["h"], ".*.txt"),
    Input({"a[1].txt": b"a"}, ["a"], "a[1].txt"),
    Input({"a b/c d.txt": b"a"}, ["a"], "a b/*.txt"),
    Input({"\u00e9.txt": b"a"}, ["a"], "\u00e9.txt"),
    Input({"d/a.txt": b"a"}, "no file matches .*; it is a folder: try .*/d/", "d/"),
    Input({"a.jsonl": lines(TEXTS), "README.md": b"# About\n"}, r"mixes tables with .*README\.md"),
]  # fmt: skip


def write(folder: Path, files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def read(folder: Path, given: Input) -> list[str]:
    source = DataSource(type=given.type, path=f"{folder}/{given.path}")
    documents, _ = open_documents(source)
    build_sources(Data(sources=[source], validation_percent=0.0), 0)
    return [documents[i] for i in range(len(documents))]


@pytest.mark.row(43, "Data files are read exactly and once, or rejected by name")
@pytest.mark.parametrize("given", INPUTS, ids=lambda given: " ".join(given.files)[:40])
def test_files_are_read_exactly_or_refused(tmp_path: Path, given: Input) -> None:
    write(tmp_path, given.files)
    if isinstance(given.right, str):
        with pytest.raises(ValueError, match=given.right):
            read(tmp_path, given)
    else:
        assert sorted(read(tmp_path, given)) == sorted(given.right)


@pytest.mark.row(43, "Data files are read exactly and once, or rejected by name")
def test_files_of_several_sources_are_read_once(tmp_path: Path) -> None:
    write(tmp_path, {f"{folder}/{i}.txt": b"x" for folder in "ab" for i in range(9)} | {"c": "a"})

    def counts(*patterns: str) -> list[int | None]:
        sources = [
            DataSource(path=f"{tmp_path}/{pattern}", name=str(i))
            for i, pattern in enumerate(patterns)
        ]
        train, held_out = build_sources(Data(sources=sources, validation_percent=20.0), 0)
        return [
            (source.n_documents or 0) + (held_out[label].n_documents or 0)
            for label, source in zip(held_out, train, strict=True)
        ]

    assert counts("a/*", "b/*") == [9, 9]
    assert counts("a/*", "**/*.txt") == [9, 9]
    with pytest.raises(
        ValueError, match=r"data\.sources, 1: path: 0 has all its files, and a file"
    ):
        counts("a/*", "c/*")


@pytest.mark.row(43, "Data files are read exactly and once, or rejected by name")
@pytest.mark.parametrize(
    ("sources", "n_documents"),
    [
        # Text has no column.
        ([{"path": "*.txt", "text_key": "x"}, {"path": "*"}], [10, 20]),
        ([{"path": "t[1-4].txt"}, {"type": "text", "path": "*.txt"}], [4, 6]),
        ([{"path": "*.jsonl", "text_key": "id"}, {"type": "text", "path": "*"}], [20, 10]),
        ([{"type": "text", "path": "*.jsonl"}, {"path": "t0.jsonl"}], None),
        # The columns of a table are different documents.
        ([{"path": "*.jsonl", "text_key": "id"}, {"path": "*.jsonl"}], [20, 20]),
        ([{"path": "*.jsonl"}, {"path": "t[1-4].jsonl"}], None),
    ],
)
def test_held_out_documents_are_in_no_other_source(
    tmp_path: Path, sources: list[dict[str, str]], n_documents: list[int] | None
) -> None:
    for number in range(10):
        (tmp_path / f"t{number}.txt").write_text(f"text {number}\n")
        rows = [{"text": f"{kind} {number}", "id": f"id {kind} {number}"} for kind in "ab"]
        (tmp_path / f"t{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    configs = [
        DataSource.model_validate(
            {**source, "path": f"{tmp_path}/{source['path']}", "name": str(i)}
        )
        for i, source in enumerate(sources)
    ]
    if n_documents is None:
        with pytest.raises(ValueError, match=r"data\.sources, 1: path: 0 has all its files"):
            build_sources(Data(sources=configs, validation_percent=30.0), 0)
        return
    train, held_out = build_sources(Data(sources=configs, validation_percent=30.0), 0)
    kept = [[*islice(source.documents(0, 1, 0), source.n_documents)] for source in train]
    held = [[*source.documents(0, 1, 0)] for source in held_out.values()]
    assert [len(kept[i] + held[i]) for i in range(2)] == n_documents
    texts = [str(text) for part in kept + held for text in part]
    assert len(set(texts)) == len(texts)


def plain_reader(content: bytes, suffix: str) -> list[str]:
    """Texts of a file that the fuzz test wrote."""
    if suffix.endswith(".parquet"):
        return pq.read_table(io.BytesIO(content)).column("text").to_pylist()
    text = content.decode("utf-8-sig")
    if suffix == ".txt":
        return [text] if text else []
    if suffix == ".csv":
        return [row["text"] for row in csv.DictReader(io.StringIO(text, newline=""))]
    rows = json.loads(text or "[]") if suffix == ".json" else map(json.loads, text.split("\n")[:-1])
    return [row["text"] for row in rows]


WRITE = {
    ".jsonl": lines,
    ".json": array,
    ".csv": table,
    ".parquet": parquet,
    ".txt": lambda texts: "\n".join(texts).encode(),
}


@pytest.mark.row(43, "Data files are read exactly and once, or rejected by name")
@pytest.mark.parametrize("seed", range(12))
def test_random_corpora_equal_a_plain_reader(tmp_path: Path, seed: int) -> None:
    """Suffixes in any case, compressions, BOMs, empty files, folders and links."""
    rng = random.Random(seed)
    kinds = [".txt"] if rng.random() < 0.3 else [kind for kind in WRITE if kind != ".txt"]
    files: dict[str, bytes | str] = {}
    right = []
    for number in range(rng.randint(1, 8)):
        suffix = rng.choice(kinds)
        words = ("a", "\u00e9", " ", "\n", "\r\n", ",", '"', "\\", "{", "]", "\U0001f600", "\u2028")
        count = rng.choice([0, 1, 3])
        texts = ["x" + "".join(rng.choices(words, k=rng.randint(0, 40))) for _ in range(count)]
        content = WRITE[suffix](texts)
        right += plain_reader(content, suffix)
        if suffix != ".parquet" and content and rng.random() < 0.3:
            content = b"\xef\xbb\xbf" + content
        pack = rng.choice(list(PACK)) if suffix in (".jsonl", ".json", ".csv") else ""
        name = f"{number}{suffix}{pack}"
        name = rng.choice(["", "d/", "d/e/"]) + (name.upper() if rng.random() < 0.3 else name)
        files[name] = PACK[pack](content)
    for number in range(rng.randint(0, 3)):
        files[f"link{number}"] = rng.choice([".", *(name for name in files if "link" not in name)])
    write(tmp_path, files)
    given = Input(files, right)
    if right:
        assert sorted(read(tmp_path, given)) == sorted(right)
    else:
        with pytest.raises(ValueError, match="no documents"):
            read(tmp_path, given)


def test_machine_errors_of_the_cache_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.jsonl": lines(TEXTS), "file": b""})
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(OSError, match=r"cache .*/file/cache cannot be used: .*; .* HF_HOME moves"):
        open_documents(DataSource(path=str(tmp_path / "*.jsonl")))


@pytest.mark.row(43, "Data files are read exactly and once, or rejected by name")
def test_flipped_bit_of_a_page_is_found(tmp_path: Path) -> None:
    content = bytearray(parquet(TEXTS, write_page_checksum=True, compression="none"))
    content[content.index(b"plain")] ^= 1
    write(tmp_path, {"a.parquet": bytes(content)})
    with pytest.raises(ValueError, match=r"a\.parquet: .*CRC"):
        read(tmp_path, Input({}, []))


def test_parquet_is_not_copied(tmp_path: Path) -> None:
    write(tmp_path, {"a.parquet": parquet(TEXTS)})
    assert read(tmp_path, Input({}, [])) == TEXTS
    assert not os.listdir(datasets.config.HF_DATASETS_CACHE)


def test_row_groups_are_shuffled_and_few_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.sources.SHUFFLED_DOCUMENTS", 20)
    texts = [str(i) for i in range(400)]
    write(tmp_path, {"a.parquet": parquet(texts, row_group_size=10)})
    (train,), _ = build_sources(
        Data(source="files", path=f"{tmp_path}/*", validation_percent=0.0), 0
    )
    rows = train.documents(0, 1, 0)
    epochs = [[int(next(rows)) for _ in texts] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for order in epochs:
        assert sorted(order) == list(range(400))
        blocks = [{number // 10 for number in order[i : i + 20]} for i in range(0, 400, 20)]
        assert max(map(len, blocks)) <= 4, "of 40 row groups"
        assert min(map(len, blocks)) >= 2


def test_an_array_may_be_one_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.records.MAX_RECORD_BYTES", 1000)
    texts = [f"document {i} " + "é" * 100 for i in range(50)]
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in texts]))
    found = read_records(tmp_path / "a.json", "json", "text")
    assert [record.text for record in found] == texts


@pytest.mark.row(44, "A small data file never becomes much memory")
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_memory_is_bounded_by_a_record(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_result: Callable[[str], None],
    suffix: str,
) -> None:
    """A small file of one endless line, and one of short lines that compress a thousandfold."""
    monkeypatch.setattr("data.records.MAX_RECORD_BYTES", 1 << 20)
    pack, n_lines = PACK[suffix], 1 << 17 if suffix else 1 << 12
    contents = {
        r"line 1, byte 0: longer than 1,048,576 bytes": b'{"text": "' + b"a" * (n_lines << 9),
        r"line 1, byte 0: data\.text_key: no 'text'": (b'{"x": "' + b"a" * 500 + b'"}\n') * n_lines,
    }
    for i, content in enumerate(contents.values()):
        write(tmp_path, {f"{i}.jsonl{suffix}": pack(content)})
    for is_traced in (False, True):  # the first time also imports packages
        if is_traced:
            tracemalloc.start()
        for i, error in enumerate(contents):
            with pytest.raises(ValueError, match=error):
                read(tmp_path, Input({}, [], path=f"{i}.*"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 36 << 20, "of 64 MiB of text"
    record_result(f"{len(content) >> 20} MiB{suffix and f' in {suffix}'}: {peak >> 20} MiB")
