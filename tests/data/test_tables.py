import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from huggingface_hub.errors import HfHubHTTPError

from config.job_config import Data, DataSource, ValidationSource
from data import tables
from data.formats import format_of
from data.hub import HubStream, check_is_not_trained_on, hub_streams
from data.sources import build_sources, open_documents
from data.tables import Tables
from data.tokenizer import load_tokenizer
from data.validation_sources import build_validation_sources, reserved_files
from tests.lib.corpora import both

TEXTS = ["plain", "", "two\nlines", "\N{WAVING HAND SIGN} caf\u00e9", "\0", "<|end_of_text|>"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write(path: Path, texts: list[str | None], key: str = "text") -> None:
    rows = [{"id": i, key: text} for i, text in enumerate(texts)]
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tables_of(*paths: Path, key: str = "text", skips_bad: bool = False) -> Tables:
    files = [(path, path.name, format_of(path)) for path in paths]
    return Tables([(p, n, f) for p, n, f in files if f is not None], key, skips_bad=skips_bad)


def files(folder: Path, percent: float = 0.0) -> Data:
    return Data(source="files", path=str(folder / "*"), validation_percent=percent)


@pytest.mark.parametrize("key", ["text", "body"])
def test_rows_of_all_files_are_documents(tmp_path: Path, key: str) -> None:
    names = ["a.jsonl", "b.parquet", "c.jsonl"]
    for i, name in enumerate(names):
        write(tmp_path / name, TEXTS[i:], key)
    tables = tables_of(*(tmp_path / name for name in names), key=key)
    assert [tables[i] for i in range(len(tables))] == TEXTS + TEXTS[1:] + TEXTS[2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"body": "a"}\n', r"bad\.jsonl, line 1, byte 0: data\.text_key: no 'text', only body"),
        (b'{"text": "a"}\n{"text": null}\n', r"bad\.jsonl, line 2, .* data\.text_key: .* is None"),
        (b'{"text": 1}\n', r"bad\.jsonl, line 1, byte 0: data\.text_key: 'text' is 1, not text"),
        (b'{"text": "a"}\n{"text": 1}\n', r"bad\.jsonl, line 2, byte 14: "),
        (b'{"text": "a"}\r{"text": "b"}\n', r"bad\.jsonl, line 1, byte 0: Extra data, column 15"),
        (b'{"text": "a"}\n{"text": "b\n', r"bad\.jsonl, line 2, byte 14: .*column 12"),
        (b'{"text": "caf\xe9"}\n', r"bad\.jsonl, line 1, byte 0: 'utf-8' codec"),
        (b"[" * 100_000, r"bad\.jsonl, line 1, byte 0: maximum recursion depth"),
    ],
)
def test_bad_table_is_named_when_opened(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        build_sources(files(tmp_path), 0)


@pytest.mark.parametrize("skips_bad", [False, True])
def test_text_is_not_converted(tmp_path: Path, skips_bad: bool) -> None:
    """Includes texts that a type-guessing reader would parse, and columns of mixed type."""
    texts = ["2020-01-01", "2020-01-01T00:00:00Z", "1", "true", "", " a\r\nb "]
    rows = [{"beside": i if i % 2 else [i], "text": text} for i, text in enumerate(texts)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    tables = tables_of(path, skips_bad=skips_bad)
    assert [tables[i] for i in range(len(tables))] == texts


# Compressors with the settings of the command line tools.
PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_table_may_have_several_frames(tmp_path: Path, suffix: str) -> None:
    """Concatenated files: lines may span frames, and the last line may have no newline."""
    content = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode("utf-8-sig")
    parts = [content[:20], content[20:50], content[50:-1]]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(map(PACK[suffix], parts)))
    tables = tables_of(path)
    assert [tables[i] for i in range(len(tables))] == TEXTS


@pytest.mark.parametrize("suffix", PACK)
def test_corruption_of_a_compressed_table_is_named(tmp_path: Path, suffix: str) -> None:
    """An error even with ``skips_bad``, because the rest of the file is lost."""
    texts = [str(i) * (i % 50) for i in range(300)]
    write(tmp_path / "plain.jsonl", [None, *texts])
    path = tmp_path / f"a.jsonl{suffix}"
    whole = PACK[suffix]((tmp_path / "plain.jsonl").read_bytes())
    for place in range(20, len(whole) - 20, len(whole) // 10):
        path.write_bytes(whole[:place] + b"\xff" * 10 + whole[place + 10 :])
        with pytest.raises(ValueError, match=rf"a\.jsonl{suffix}, after byte \d+ of its text: "):
            tables_of(path, skips_bad=True)


def test_compressed_table_without_zstandard_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "a"}'))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst: zstd needs the package zstandard"):
        tables_of(path)


def test_column_whose_name_is_also_a_path_is_read(tmp_path: Path) -> None:
    nested = pa.array([{"b": 1, "c": "no"}, None])
    for number, names in enumerate((["a.b", "a"], ["a", "a.b"])):
        columns = {"a": nested, "a.b": pa.array(["x", "y"])}
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({name: columns[name] for name in names}), path, row_group_size=1)
        tables = Tables([(path, path.name, "parquet")], "a.b")
        assert [tables[i] for i in range(len(tables))] == ["x", "y"]
        with pytest.raises(ValueError, match=r"no column 'a\.c', only"):
            Tables([(path, path.name, "parquet")], "a.c")


@pytest.mark.parametrize("suffix", ["", *PACK])
def test_changed_table_is_read_again(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    # The contents have the same length, and the files the same times, like those of an archive.
    for texts in (["first"], ["other"]):
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(PACK.get(suffix, bytes)(content))
        os.utime(path, (0, 0))
        tables = tables_of(path)
        assert [tables[i] for i in range(len(tables))] == texts


def test_parquet_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_OPEN_FILES", 1)
    paths = [tmp_path / f"{name}.parquet" for name in "ab"]
    for path in paths:
        pq.write_table(pa.table({"text": [path.name]}), path)
    documents = Tables([(path, path.name, "parquet") for path in paths], "text")
    paths[0].unlink()
    pq.write_table(pa.table({"text": ["another one"] * 9}), paths[0])
    with pytest.raises(OSError, match=r"a\.parquet changed from \d+ to \d+ bytes while it was"):
        documents[0]


def test_relative_paths_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("first", "other"):
        path = tmp_path / text / "a.jsonl"
        write(path, [text])
        os.utime(path, (0, 0))
        monkeypatch.chdir(tmp_path / text)
        assert tables_of(Path("a.jsonl"))[0] == text


def test_broken_parquet_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", TEXTS)
    (whole,), _ = build_sources(files(tmp_path), 0)
    assert sorted(islice(whole.documents(0, 1, 0), len(TEXTS))) == sorted(TEXTS)
    write(tmp_path / "a.parquet", [None, "text"])
    with pytest.raises(ValueError, match=r"'text' of .*a\.parquet, row 0, is null"):
        build_sources(files(tmp_path), 0)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        build_sources(files(tmp_path), 0)


def test_row_groups_used_last_stay_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have room: one large group does not count for the others."""
    sizes = [10, 10, 5000, 10]
    for name, size in enumerate(sizes):
        write(tmp_path / f"{name}.parquet", ["x" * size])
    monkeypatch.setattr(tables, "CACHED_BYTES", 1000)
    found = tables_of(*(tmp_path / f"{name}.parquet" for name in range(4)))
    decoded, texts = list[int](), found._texts
    monkeypatch.setattr(found, "_texts", lambda group: decoded.append(group.file) or texts(group))
    for file in (0, 1, 3, 0, 1, 3):
        assert len(found[file] or "") == sizes[file]
    assert decoded == [0, 1, 3]
    for file in (2, 3, 2, 0):
        assert len(found[file] or "") == sizes[file]
    assert decoded[3:] == [2, 0], "3 stayed, and with 2 there is no room for others"


def test_lack_of_memory_is_no_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: Any, **kwargs: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 4294967296 failed")

    write(tmp_path / "a.parquet", TEXTS)
    documents, _ = open_documents(files(tmp_path).mixture[0], skips_bad=True)
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", without_memory)
    with pytest.raises(MemoryError):
        documents[0]


def test_tables_and_plain_text_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("plain")
    with pytest.raises(ValueError, match=r"data\.path: mixes tables with .*b\.txt;"):
        build_sources(files(tmp_path), 0)
    for name in "cdef":
        (tmp_path / f"{name}.txt").write_text("plain")
    with pytest.raises(ValueError, match=r"/b\.txt, .*/c\.txt, .*/d\.txt and 2 more;"):
        build_sources(files(tmp_path), 0)


def test_held_out_split_of_rows_is_stable(tmp_path: Path) -> None:
    texts = {name: [f"{name} {i}" for i in range(200)] for name in ("a.jsonl", "b.parquet")}
    for name, rows in texts.items():
        write(tmp_path / name, rows)

    def sides(seed: int) -> list[set[str]]:
        sources = both(files(tmp_path, percent=25.0), seed)
        counts = [int(source.description.split()[0]) for source in sources]
        return [
            set(islice(source.documents(0, 1, 0), count))
            for source, count in zip(sources, counts, strict=True)
            if source
        ]

    train, held_out = sides(seed=0)
    assert train | held_out == {*texts["a.jsonl"], *texts["b.parquet"]}
    assert not train & held_out
    assert 60 <= len(held_out) <= 140
    # Appended rows and deleted files do not change the split of other rows.
    write(tmp_path / "a.jsonl", [*texts["a.jsonl"], *(f"new {i}" for i in range(100))])
    (tmp_path / "b.parquet").unlink()
    assert sides(seed=1)[1] & {*texts["a.jsonl"]} == held_out & {*texts["a.jsonl"]}


def hub(folder: Path, counts: list[int], suffix: str) -> list[str]:
    """Write a hub dataset with ``counts`` rows per training file; return its training texts."""
    texts = [[f"{file}-{i}" for i in range(count)] for file, count in enumerate(counts)]
    for file, rows in enumerate(texts):
        write(folder / f"train-{file:05}-of-{len(counts):05}{suffix}", rows)
    write(folder / f"validation-00000-of-00001{suffix}", ["held out"])
    return [text for rows in texts for text in rows]


def train_stream(folder: Path) -> HubStream:
    return HubStream(DataSource(type="huggingface", path=str(folder)), "train")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 7])
def test_rows_of_the_batch_share_the_stream(tmp_path: Path, n_rows: int, suffix: str) -> None:
    texts = hub(tmp_path / "data", [5, 9, 6], suffix)
    stream = train_stream(tmp_path / "data")
    counts: Counter[str] = Counter()
    for row in range(n_rows):
        read = list(islice(stream.documents(row, n_rows, 0), 3 * len(texts)))
        count = len(set(read))
        assert read == (read[:count] * len(read))[: len(read)], "every epoch is the same"
        counts.update(read[: 2 * count])
        for start in (1, count, 2 * count + 1):
            assert next(stream.documents(row, n_rows, start)) == read[start]
    assert counts == dict.fromkeys(texts, 2)


def test_files_of_a_local_copy_that_changed_are_named(tmp_path: Path) -> None:
    hub(tmp_path / "data", [3], ".jsonl")
    stream = train_stream(tmp_path / "data")
    training, _ = sorted((tmp_path / "data").iterdir())
    assert stream.changed_since(0.0) == [training]
    assert stream.changed_since(training.stat().st_ctime + 60.0) == []


def test_rows_without_documents_are_an_error(tmp_path: Path) -> None:
    hub(tmp_path / "data", [3], ".jsonl")
    stream = train_stream(tmp_path / "data")
    assert next(stream.documents(2, 4, 0)) == "0-2"
    with pytest.raises(ValueError, match="no document for row 3 of 4"):
        next(stream.documents(3, 4, 0))


def test_stream_without_repeat_is_read_once(tmp_path: Path) -> None:
    """So is the held-out split; a row without documents ends immediately."""
    texts = hub(tmp_path / "data", [3], ".jsonl")
    repeating = DataSource(type="huggingface", path=str(tmp_path / "data"))
    once = repeating.model_copy(update={"repeat": False})
    train, held_out = hub_streams(once, True, 0.0, skips_bad=False)
    for row, text in enumerate(texts):
        assert list(islice(train.documents(row, 4, 0), 2)) == [text]
    assert list(train.documents(3, 4, 0)) == []
    assert list(train.documents(0, 1, 2)) == texts[2:]
    assert held_out is not None
    assert [*held_out.documents(0, 1, 0)] == ["held out"]
    assert train.fingerprint != hub_streams(repeating, False, 0.0, skips_bad=False)[0].fingerprint


def test_bad_documents_of_a_stream_are_skipped(tmp_path: Path) -> None:
    hub(tmp_path / "data", [1], ".jsonl")
    write(tmp_path / "data" / "train-00000-of-00001.jsonl", ["a", None, "b"])
    once = DataSource(type="huggingface", path=str(tmp_path / "data"), repeat=False)
    stream, _ = hub_streams(once, False, 0.0, skips_bad=True)
    strict, _ = hub_streams(once, False, 0.0, skips_bad=False)
    assert list(stream.documents(0, 1, 0)) == ["a", None, "b"]
    assert list(stream.documents(0, 1, 1)) == [None, "b"]
    with pytest.raises(ValueError, match="'text' of document 1 of row 0 is None, not text"):
        list(strict.documents(0, 1, 0))


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("bad bytes"), ValueError), (RuntimeError("no answer"), OSError)]
)
def test_stream_error_names_the_document(
    tmp_path: Path, error: Exception, kind: type[Exception]
) -> None:
    hub(tmp_path / "data", [6], ".jsonl")
    stream = train_stream(tmp_path / "data")

    class Broken:
        num_shards = 1

        def shard(self, count: int, index: int) -> Iterator[dict[str, str]]:
            yield from ({"text": str(i)} for i in range(7))
            raise error

    stream._dataset = Broken()
    # Two rows share a file, so row 1 reads every second document.
    with pytest.raises(kind, match=r"document 3 of row 1 cannot be read: .*(bytes|answer)"):
        list(stream.documents(1, 2, 0))


def test_hub_dataset_has_held_out_texts_and_the_column(tmp_path: Path) -> None:
    path = tmp_path / "data"
    hub(path, [3], ".jsonl")
    config = Data(source="huggingface", path=str(path))
    train, held_out = both(config, 0)
    assert next(held_out.documents(0, 1, 0)) == "held out"
    assert train.fingerprint != held_out.fingerprint
    other, _ = both(config.model_copy(update={"text_key": "id"}), 0)
    assert other.fingerprint != train.fingerprint
    with pytest.raises(ValueError, match=r"data\.text_key: 'id' of document 0 of row 0 is 0"):
        next(other.documents(0, 1, 0))
    (path / "validation-00000-of-00001.jsonl").unlink()
    # The other rows may have some: the run rejects a source without text.
    assert not [*both(config, 0)[1].documents(0, 1, 0)]


@pytest.mark.parametrize("n_rows", [1, 3, 8])
def test_hub_dataset_without_validation_holds_out_rows(tmp_path: Path, n_rows: int) -> None:
    """By their text: the same ones in other files, and without validation."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, counts in zip(folders, ([150, 50], [200]), strict=True):
        texts = iter(f"document {i}" for i in range(200))
        for file, count in enumerate(counts):
            write(folder / f"train-{file:05}-of-{len(counts):05}.jsonl", [*islice(texts, count)])

    def read(stream: HubStream) -> list[str | None]:
        rows = (stream.documents(row, n_rows, 0) for row in range(n_rows))
        return sorted(text for row in rows for text in iter_once(row))

    def iter_once(row: Iterator[str | None]) -> list[str]:
        texts: list[str] = []
        for text in row:
            assert text is not None
            if text in texts:  # the next epoch
                break
            texts.append(text)
        return texts

    sides = []
    for folder in folders:
        config = DataSource(type="huggingface", path=str(folder), repeat=False)
        train, held_out = hub_streams(config, True, 20.0, skips_bad=False)
        assert held_out is not None
        sides.append((read(train), read(held_out)))
        assert read(hub_streams(config, False, 20.0, skips_bad=False)[0]) == sides[-1][0]
        with pytest.raises(ValueError, match=r"data\.validation_percent: must be greater than 0"):
            hub_streams(config, True, 0.0, skips_bad=False)
    assert sides[0] == sides[1]
    assert sorted([*sides[0][0], *sides[0][1]]) == sorted(f"document {i}" for i in range(200))
    assert 20 <= len(sides[0][1]) <= 60


@pytest.mark.parametrize(("subset", "other"), [("", "default"), ("default", ""), ("", "")])
@pytest.mark.parametrize("suffix", ["", "/", "/.", "/../link"])
def test_hub_dataset_is_trained_on_under_any_name(
    tmp_path: Path, subset: str, other: str, suffix: str
) -> None:
    hub(tmp_path / "data", [3], ".jsonl")
    (tmp_path / "link").symlink_to("data")
    config, source = (
        DataSource(type="huggingface", path=f"{tmp_path}/data{end}", subset=name)
        for end, name in (("", subset), (suffix, other))
    )
    with pytest.raises(ValueError, match=r"data\.split: train of .*/data is also trained on"):
        check_is_not_trained_on(config, [source])


def test_other_subset_is_not_trained_on() -> None:
    keys = [("a/b", "en"), ("a/c", "de"), ("A/B", "de")]
    en, *others = (DataSource(type="huggingface", path=path, subset=key) for path, key in keys)
    check_is_not_trained_on(en, others)
    with pytest.raises(ValueError, match=r"data\.split: train of A/B is also trained on"):
        check_is_not_trained_on(others[1], [en.model_copy(update={"subset": "de"})])


def test_hub_dataset_without_train_names_its_splits(tmp_path: Path) -> None:
    write(tmp_path / "data" / "test-00000-of-00001.jsonl", ["text"])
    config = DataSource(type="huggingface", path=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"has no split train, only test"):
        hub_streams(config, True, 20.0, skips_bad=False)


def test_hub_dataset_can_be_read_by_index(tmp_path: Path) -> None:
    texts = hub(tmp_path / "data", [5, 9], ".parquet")
    source = DataSource(type="huggingface", path=str(tmp_path / "data"))
    documents, fingerprint = open_documents(source)
    assert [documents[i] for i in range(len(documents))] == texts
    for change, message in (({"text_key": "id"}, "is int64"), ({"text_key": "x"}, "only id, text")):
        with pytest.raises(ValueError, match=rf"data\.text_key: .*{message}"):
            open_documents(source.model_copy(update=change))
    with pytest.raises(ValueError, match=r"data\.path: cannot load .*nowhere \(train\)"):
        open_documents(source.model_copy(update={"path": str(tmp_path / "nowhere")}))
    write(tmp_path / "data" / "train-00000-of-00002.parquet", [*texts[:4], None])
    with pytest.raises(ValueError, match="row 4, is null"):
        open_documents(source)
    documents, other = open_documents(source, skips_bad=True)
    assert documents[4] is None
    assert other != fingerprint


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_fingerprint_changes_with_the_column(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": "a", "content": "b"}, {"text": "c", "content": "d"}]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = files(tmp_path)
    found = [both(config.model_copy(update={"text_key": key}), 0)[0] for key in rows[0]]
    assert len({source.fingerprint for source in found}) == 2


def identities(folder: Path) -> tuple[str, str]:
    """Fingerprints of a hub dataset: as a stream, and by index."""
    source = DataSource(type="huggingface", path=str(folder))
    return train_stream(folder).fingerprint, open_documents(source)[1]


def test_files_of_a_local_copy_are_part_of_the_fingerprints(tmp_path: Path) -> None:
    hub(tmp_path / "data", [3, 3, 3], ".jsonl")
    before = identities(tmp_path / "data")
    (tmp_path / "data" / "README.md").write_text("# About")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert identities(tmp_path / "moved") == before
    (tmp_path / "moved" / "train-00002-of-00003.jsonl").unlink()
    for first, second in zip(before, identities(tmp_path / "moved"), strict=True):
        assert first != second


def test_held_out_split_of_a_local_copy_is_not_trained_on(tmp_path: Path) -> None:
    hub(tmp_path, [3], ".jsonl")
    write(tmp_path / "more.jsonl", ["more"])
    copy = DataSource(type="huggingface", path=str(tmp_path), name="copy")
    rest = DataSource(type="files", path=str(tmp_path / "*.jsonl"), name="rest")
    for with_held_out in (False, True):
        (_, train), _ = build_sources(
            Data(sources=[copy, rest], validation_percent=0.0), 0, with_held_out=with_held_out
        )
        assert set(islice(train.documents(0, 1, 0), 9)) == {"more"}
    held_out = DataSource(type="files", path=str(tmp_path / "validation*"), name="held out")
    with pytest.raises(ValueError, match=r"validation-.*\.jsonl is also a file of held out"):
        build_sources(Data(sources=[held_out, copy], validation_percent=0.0), 0)


def test_validation_split_of_a_local_copy_is_not_trained_on(tmp_path: Path) -> None:
    hub(tmp_path, [3], ".jsonl")
    configs = [ValidationSource(name="own", type="huggingface", path=str(tmp_path))]
    data = Data(source="files", path=str(tmp_path / "*.jsonl"), validation_percent=0.0)
    found = build_validation_sources(configs, data, 0, load_tokenizer("bytes"))
    for reserved in (found.reserved, reserved_files(configs, data)):
        with pytest.raises(ValueError, match=r"validation-.* is also a file of validation\.s.*own"):
            build_sources(data, 0, reserved=reserved)
    # Its other split is.
    copy = Data(source="huggingface", path=str(tmp_path), validation_percent=0.0)
    build_sources(copy, 0, reserved=found.reserved)


@pytest.mark.parametrize("is_excluded", [False, True])
def test_file_of_a_local_copy_is_not_read_by_two_sources(tmp_path: Path, is_excluded: bool) -> None:
    hub(tmp_path / "data", [3, 3], ".jsonl")
    file = str(tmp_path / "data" / "train-00001-of-00002.jsonl")
    copy = DataSource(type="huggingface", path=str(tmp_path / "data"), name="copy")
    one = DataSource(type="files", path=file, name="one")
    with pytest.raises(ValueError, match=r"00001-of-00002\.jsonl is also a file of one; .*whole"):
        build_sources(Data(sources=[one, copy], validation_percent=0.0), 0)
    config = ValidationSource(name="own", path=file, exclude_from_training=is_excluded)
    reserved = reserved_files([config], Data())
    data = Data(source="huggingface", path=str(tmp_path / "data"))
    text = r"also a file of validation\.sources, own; a dataset is read whole"
    with pytest.raises(ValueError, match=text):
        build_sources(data, 0, reserved=reserved)
    with pytest.raises(ValueError, match=text):
        open_documents(copy, reserved=reserved)


def kind_of_error() -> type[Exception]:
    with pytest.raises((OSError, ValueError), match=r"^data\.path: cannot load owner/d") as caught:
        HubStream(DataSource(type="huggingface", path="owner/data"), "train")
    return caught.type


def test_offline_mode_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although ``datasets`` says that it could not connect."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert kind_of_error() is ValueError


def test_error_of_the_network_or_a_busy_server_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``datasets`` makes of it: a restart may help, and nothing else may."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    # Releases of huggingface_hub use httpx or httpx2.
    httpx: Any = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
    request = httpx.Request("GET", "https://huggingface.co")

    def answered(code: int) -> Exception:
        return HfHubHTTPError("no", response=httpx.Response(code, request=request))

    errors = [
        (answered(429), OSError),
        (answered(503), OSError),
        (httpx.ConnectTimeout("no answer"), OSError),
        (answered(404), ValueError),
    ]
    for error, kind in errors:
        for wrapped in (error, _caused_by(error), _met_by(error)):
            with patch("datasets.load_dataset_builder", side_effect=wrapped):
                assert kind_of_error() is kind


def _caused_by(error: Exception) -> Exception:
    found = ValueError("no splits")
    found.__cause__ = error
    return found


def _met_by(error: Exception) -> Exception:
    found = FileNotFoundError("no data file")
    found.__context__ = error
    return found


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_text_outside_of_a_damaged_arrow_file_is_not_read(tmp_path: Path, kind: Any) -> None:
    texts = [f"a text of more than twelve bytes, number {i}" for i in range(9)]
    table = pa.table({"text": pa.array(texts, kind)})
    path = tmp_path / "a.arrow"
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    whole, errors = path.read_bytes(), []
    for place in range(200, len(whole) - 8, 8):
        path.write_bytes(whole[:place] + b"\xff" * 4 + b"\x7f" * 4 + whole[place + 8 :])
        try:
            tables = tables_of(path)
            [tables[i] for i in range(len(tables))]
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 3
    assert all("a.arrow" in error for error in errors)
