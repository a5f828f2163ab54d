"""Reading prepared and Megatron-LM files that these tests write by the formats' definitions."""

import hashlib
import mmap
import os
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from config.job_config import Data, DataSource
from data import token_files
from data.sources import build_sources, open_documents
from data.token_files import (
    DTYPES,
    TokenFiles,
    open_token_files,
    read_index,
    smallest_dtype,
    verify,
)
from tests.lib.corpora import CODES, DOCUMENTS, write_index, write_megatron, write_prepared

SHARD: dict[str, Any] = {"file": "../x.bin", "sha256": "", "ends_sha256": ""}
SHARD |= {"documents": 1, "tokens": 1, "max_id": 1}


def joined(sequences: list[list[int]]) -> list[int]:
    return [token for sequence in sequences for token in sequence]


def contents(files: TokenFiles) -> list[list[int]]:
    return [files[index].tolist() for index in range(len(files))]


def overwrite(path: Path, start: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(content)


def random_documents(rng: np.random.Generator, high: int, least: int) -> list[list[int]]:
    lengths = rng.choice([least, 1, 2, 7, 300], rng.integers(0, 12))
    return [rng.integers(0, high, length, dtype=np.uint64).tolist() for length in lengths]


def test_prepared_documents_round_trip(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for trial in range(40):
        dtype = str(rng.choice(list(DTYPES)))
        high = int(np.iinfo(dtype).max) + 1
        # Some shards have no documents.
        shards = [random_documents(rng, high, least=1) for _ in range(5)] + [[[high - 1]]]
        folder = write_prepared(tmp_path / str(trial), shards, dtype)
        files = open_token_files(str(folder))
        flat = [document for shard in shards for document in shard]
        assert contents(files) == flat
        assert len(files) == len(files.split_hashes) == len(flat)
        assert files.max_id == high - 1
        assert files.tokenizer_fingerprint == "f"
        assert not any(problem for _, problem in verify(folder))
        for index in (-1, len(files)):
            with pytest.raises(IndexError):
                files[index]


@pytest.mark.parametrize("dtype", CODES)
def test_megatron_documents_round_trip(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    high = int(np.iinfo(dtype).max) + 1
    for trial in range(20):
        documents = [random_documents(rng, high, least=0) for _ in range(6)] + [[[high - 1]]]
        path = write_megatron(tmp_path / f"{trial}.idx", documents, dtype)
        files = open_token_files(str(path))
        assert contents(files) == [joined(document) for document in documents]
        assert (files.tokenizer_fingerprint, files.max_id) == (None, None)
        assert files[6].dtype == np.dtype(dtype)


def test_documents_are_views_of_the_file(tmp_path: Path) -> None:
    write_prepared(tmp_path / "a", [DOCUMENTS])
    write_megatron(tmp_path / "b.idx", [DOCUMENTS, [[1]]])
    for name in ("a", "b.idx"):
        files = open_token_files(str(tmp_path / name))
        assert np.shares_memory(files[0], token_files._mapped()(files._shards[0])[0])
        assert isinstance(token_files._map(files._shards[0])[0].base.obj, mmap.mmap)
        assert not files[0].flags.writeable
    before = files[0].copy()
    overwrite(tmp_path / "b.bin", 0, struct.pack("<i", 77))
    assert (before[0], files[0][0]) == (1, 77)


def test_number_of_open_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = lru_cache(maxsize=3)(token_files._map)
    monkeypatch.setattr(token_files, "_mapped", lambda: cached)
    folders = [write_prepared(tmp_path / name, [DOCUMENTS] * 40) for name in ("a", "b")]
    sources = [open_token_files(str(folder)) for folder in folders]
    n_open = len(os.listdir("/proc/self/fd"))
    for files in sources:
        assert contents(files) == DOCUMENTS * 40
    assert len(os.listdir("/proc/self/fd")) <= n_open + 2 * 3, "of all sources together"


@pytest.mark.parametrize(("limit", "shards"), [(64, 64), (1024, 256), (sys.maxsize, 16_384)])
def test_mapped_shards_take_half_of_the_open_files(
    limit: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "open_file_limit", lambda: limit)
    assert cast(Any, token_files._mapped.__wrapped__()).cache_info().maxsize == shards


def splitmix64(state: int) -> int:
    """Steele, Lea, Flood: Fast splittable pseudorandom number generators, figure 17."""
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_split_hashes_are_uniform_and_depend_on_names_only(tmp_path: Path) -> None:
    write_prepared(tmp_path / "a", [[[1]] * 3000, [[2]] * 2000])
    keys = open_token_files(str(tmp_path / "a")).split_hashes
    assert keys.dtype == np.uint64
    assert len(np.unique(keys)) == 5000
    name = hashlib.blake2b(b"shard-00001", digest_size=8).digest()
    start = int.from_bytes(name, "little")
    expected = [splitmix64((start + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(2000)]
    assert keys[3000:].tolist() == expected
    tenths = np.bincount((keys >> np.uint64(32)).astype(np.int64) * 10 >> 32, minlength=10)
    # Five standard deviations of a binomial distribution.
    assert np.abs(tenths - 500).max() < 5 * np.sqrt(5000 * 0.1 * 0.9)
    write_prepared(tmp_path / "b", [[[5, 6]] * 3000, [[7]] * 2500])
    assert (open_token_files(str(tmp_path / "b")).split_hashes[:5000] == keys).all()


def test_glob_finds_folders_and_indices(tmp_path: Path) -> None:
    write_prepared(tmp_path / "x" / "a", [DOCUMENTS])
    write_prepared(tmp_path / "x" / "c", [DOCUMENTS[1:]])
    write_megatron(tmp_path / "x" / "b.idx", [DOCUMENTS])
    files = open_token_files(str(tmp_path / "x" / "*"))
    assert contents(files) == [*DOCUMENTS, joined(DOCUMENTS), *DOCUMENTS[1:]]
    assert (files.tokenizer_fingerprint, files.max_id) == ("f", None)
    assert len(np.unique(files.split_hashes)) == len(files)
    assert len(open_token_files(str(tmp_path / "x" / "*.idx"))) == 1
    (tmp_path / "y").mkdir()
    (tmp_path / "x").rename(tmp_path / "y" / "x")
    moved = open_token_files(str(tmp_path / "y" / "x" / "*"))
    assert moved.fingerprint == files.fingerprint
    assert (moved.split_hashes == files.split_hashes).all()
    write_prepared(tmp_path / "y" / "x" / "d", [DOCUMENTS], fingerprint="g")
    with pytest.raises(ValueError, match=r"data\.path: .*x/a and .*x/d have different tokenizers"):
        open_token_files(str(tmp_path / "y" / "x" / "?"))


@pytest.mark.parametrize("paths", [["x/b", "x/*"], ["x/m.idx", "x/*"], ["x/[a]", "x/?", "x/*"]])
def test_held_out_documents_are_in_no_other_source(tmp_path: Path, paths: list[str]) -> None:
    """Each document has an id of its own."""
    for number, name in enumerate("ab"):
        documents = [[1 + i + 100 * number] for i in range(100)]
        write_prepared(tmp_path / "x" / name, [documents[:60], documents[60:]])
    write_megatron(tmp_path / "x" / "m.idx", [[[201 + i]] for i in range(50)])
    # Links are read as the files that they lead to.
    (tmp_path / "x" / "aa").symlink_to("b")
    (tmp_path / "x" / "copy").mkdir()
    for file in (tmp_path / "x" / "a").iterdir():
        os.link(file, tmp_path / "x" / "copy" / file.name)
    sources = [DataSource(type="tokens", path=f"{tmp_path}/{p}", name=p) for p in paths]
    train, held_out = build_sources(Data(sources=sources, validation_percent=30.0), 0)
    parts = [islice(source.documents(0, 1, 0), source.n_documents) for source in train]
    parts += [source.documents(0, 1, 0) for source in held_out.values()]
    ids = [int(id_) for part in parts for document in part for id_ in document]
    assert sorted(ids) == [*range(1, 251)]


def test_source_without_files_of_its_own_is_an_error(tmp_path: Path) -> None:
    write_prepared(tmp_path / "x" / "wiki", [DOCUMENTS])
    paths = [f"{tmp_path}/x/*", f"{tmp_path}/x/wiki"]
    sources = [DataSource(type="tokens", path=path) for path in paths]
    with pytest.raises(ValueError, match=r"data\.sources, wiki: path: x has all its files"):
        build_sources(Data(sources=sources), 0)


def test_link_does_not_change_the_split(tmp_path: Path) -> None:
    write_prepared(tmp_path / "x" / "b", [DOCUMENTS])
    alone = open_token_files(f"{tmp_path}/x/*")
    (tmp_path / "x" / "a").symlink_to("b")
    linked = open_token_files(f"{tmp_path}/x/*")
    assert linked.fingerprint == alone.fingerprint
    assert (linked.split_hashes == alone.split_hashes).all()


def test_fingerprint_changes_with_the_documents(tmp_path: Path) -> None:
    other = [*DOCUMENTS[:3], [7, 8, 9, 11]]
    split_elsewhere = [[1, 2], [3, 4], *DOCUMENTS[2:]]
    found = set()
    for number, documents in enumerate((DOCUMENTS, other, split_elsewhere)):
        folder = write_prepared(tmp_path / str(number), [documents])
        write_megatron(tmp_path / str(number) / "m.idx", [[d] for d in documents])
        paths = (folder, folder / "m.idx")
        found |= {open_token_files(str(path)).fingerprint for path in paths}
    assert len(found) == 6


def test_fingerprint_includes_name_and_dtype(tmp_path: Path) -> None:
    """Names decide the held-out split; both dtypes have identical bytes here."""
    for dtype in ("int16", "uint16"):
        write_megatron(tmp_path / dtype / "m.idx", [DOCUMENTS], dtype)
        write_megatron(tmp_path / dtype / "n.idx", [DOCUMENTS], dtype)
    paths = [tmp_path / dtype / f"{name}.idx" for dtype in ("int16", "uint16") for name in "mn"]
    assert len({open_token_files(str(path)).fingerprint for path in paths}) == 4


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        write_index(path.parent, read_index(path.parent) | changes)

    return change


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("index.json", Path.unlink, r"/p has no index\.json"),
        ("index.json", shrink, r"/p/index\.json: checksum|/p/index\.json: not an index"),
        ("index.json", lambda p: overwrite(p, 0, b"("), r"/p/index\.json: not an index: JSON"),
        ("index.json", lambda p: p.write_text("[]"), r"/p/index\.json: not an index"),
        ("index.json", edit(format=2), r"/p/index\.json: format is 2, not 1"),
        ("index.json", edit(dtype="float32"), r"/p/index\.json: dtype is 'float32', not one"),
        ("index.json", edit(shards=[SHARD]), r"'\.\./x\.bin' is not a shard's name"),
        ("index.json", edit(shards=[SHARD | {"tokens": "1"}]), r"index\.json: .* another type"),
        ("index.json", edit(shards=[SHARD | {"documents": 2**70}]), r"index\.json: .* or range"),
        ("index.json", edit(shards=7), r"index\.json: .* another type"),
        ("index.json", edit(dtype={}), r"index\.json: .* another type"),
        ("index.json", edit(tokenizer=None), r"index\.json: .* a key is missing"),
        ("shard-00001.bin", Path.unlink, r"/p/shard-00001\.bin: No such file"),
        ("shard-00001.bin", shrink, r"/p/shard-00001\.bin has 19 bytes, not 20"),
        ("shard-00000.ends", Path.unlink, r"/p/shard-00000\.ends: No such file"),
        ("shard-00000.ends", shrink, r"/p/shard-00000\.ends has 31 bytes, not 32"),
        (
            "shard-00001.ends",
            lambda p: overwrite(p, 0, b"\xff" * 8),
            r"00001\.ends, bytes 0 and 24",
        ),
        ("shard-00001.ends", lambda p: overwrite(p, 24, b"\x09"), r"00001\.ends.* and 9, .* of 10"),
    ],
)
def test_corrupt_file_is_named_when_opened(
    tmp_path: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = write_prepared(tmp_path / "p", [DOCUMENTS, DOCUMENTS])
    damage(folder / file)
    with pytest.raises(ValueError, match=r"^data\.path: .*" + f"({message})"):
        open_token_files(str(folder))


def test_every_changed_byte_of_the_index_is_detected(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "p", [DOCUMENTS])
    whole = (folder / "index.json").read_bytes()
    for i in range(0, len(whole), 3):
        changed = whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]
        (folder / "index.json").write_bytes(changed)
        if whole[i : i + 1].isspace():
            continue
        with pytest.raises(ValueError, match=r"index\.json"):
            read_index(folder)


@pytest.mark.parametrize("end", [0, 3, 11, -1, 2**62])
def test_bad_document_end_is_named_when_read(tmp_path: Path, end: int) -> None:
    folder = write_prepared(tmp_path / "p", [DOCUMENTS, DOCUMENTS])
    overwrite(folder / "shard-00001.ends", 8, struct.pack("<q", end))
    files = open_token_files(str(folder))
    with pytest.raises(ValueError, match=r"^data\.path: .*00001\.ends, byte 8: document 1 "):
        files[5]
    assert [files[i].tolist() for i in (3, 4, 7)] == [DOCUMENTS[i] for i in (3, 0, 3)]
    source = DataSource(type="tokens", path=str(folder))
    documents, _ = open_documents(source, skips_bad=True)
    assert documents[5] is None


def test_verify_names_changed_files(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path / "p", [DOCUMENTS, DOCUMENTS])
    overwrite(folder / "shard-00001.bin", 6, b"\x07")
    (folder / "shard-00000.ends").unlink()
    found = {path.name: problem for path, problem in verify(folder)}
    assert len(found) == 4
    assert {name for name, problem in found.items() if problem} == {
        "shard-00001.bin",
        "shard-00000.ends",
    }


def without_documents(path: Path) -> None:
    overwrite(path, 26, struct.pack("<Q", 0))
    os.truncate(path, 70)


# A header of 34 bytes; 3 lengths of 4 bytes, 3 pointers and 3 document indices of 8.
@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("m.idx", lambda p: overwrite(p, 0, b"X"), r"m\.idx: not a Megatron-LM index"),
        ("m.idx", lambda p: os.truncate(p, 20), r"m\.idx: not a Megatron-LM index"),
        ("m.idx", lambda p: overwrite(p, 9, b"\x02"), r"m\.idx: version is 2"),
        ("m.idx", lambda p: overwrite(p, 17, b"\x07"), r"m\.idx: dtype code 7"),
        ("m.idx", lambda p: overwrite(p, 17, b"\x06"), r"m\.idx: dtype code 6"),
        ("m.idx", shrink, r"m\.idx has 93 bytes, not 94"),
        ("m.bin", shrink, r"m\.bin has 23 bytes, not 24"),
        ("m.bin", Path.unlink, r"m\.bin: No such file"),
        ("m.idx", lambda p: overwrite(p, 86, b"\x02"), r"m\.idx: documents do not cover all 3"),
        ("m.idx", lambda p: overwrite(p, 70, b"\x01"), r"m\.idx: documents do not cover all 3"),
        ("m.idx", without_documents, r"m\.idx: documents do not cover all 3"),
        ("m.idx", lambda p: overwrite(p, 78, b"\x04"), r"m\.idx: document 0 has sequences 0 to 4"),
        ("m.idx", lambda p: overwrite(p, 34, b"\x02"), r"m\.idx: document 0 spans bytes 0"),
        ("m.idx", lambda p: overwrite(p, 46, b"\x01"), r"m\.idx: document 0 spans bytes 1"),
    ],
)
def test_corrupt_megatron_file_is_named(
    tmp_path: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    path = write_megatron(tmp_path / "m.idx", [DOCUMENTS[:2], DOCUMENTS[2:3]])
    assert path.stat().st_size == 94
    damage(tmp_path / file)
    with pytest.raises(ValueError, match=r"^data\.path: .*" + message):
        open_token_files(str(path))


def test_path_without_token_files_is_named(tmp_path: Path) -> None:
    for path in ("", "nowhere", str(tmp_path / "*.idx")):
        with pytest.raises(ValueError, match=r"^data\.path: no folder and no \.idx file matches"):
            open_token_files(path)
    (tmp_path / "lone.bin").write_bytes(b"ids")
    with pytest.raises(ValueError, match=r"^data\.path: .*lone\.bin is neither"):
        open_token_files(str(tmp_path / "*"))
    (tmp_path / "lone.bin").unlink()
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"^data\.path: .*a\.txt is neither"):
        open_token_files(str(tmp_path / "*"))
    with pytest.raises(ValueError, match=r"^data\.path: .* has no documents"):
        open_token_files(str(write_prepared(tmp_path / "p", [[]])))
    (tmp_path / "p" / "index.json").rename(tmp_path / "p" / "begun.json")
    with pytest.raises(ValueError, match=r"no index\.json; shardloom prepare has not finished it"):
        open_token_files(str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("n_vocab", "dtype"),
    [
        (1, "uint8"),
        (256, "uint8"),
        (257, "uint16"),
        (65535, "uint16"),
        (65536, "uint16"),
        (65537, "uint32"),
        (2**32, "uint32"),
    ],
)
def test_smallest_dtype_holds_all_ids(n_vocab: int, dtype: str) -> None:
    assert smallest_dtype(n_vocab) == dtype
    assert np.array([n_vocab - 1]).astype(DTYPES[dtype])[0] == n_vocab - 1


def test_vanished_file_is_not_bad_data(tmp_path: Path) -> None:
    """The file may come back, so its documents must not be skipped."""
    write_prepared(tmp_path / "p", [[[1, 2, 3]], [[4, 5]]])
    documents, _ = open_documents(
        DataSource(type="tokens", path=str(tmp_path / "p")), skips_bad=True
    )
    (tmp_path / "p" / "shard-00001.bin").unlink()
    assert documents[0] is not None
    with pytest.raises(OSError, match=r"shard-00001\.bin"):
        documents[1]


@pytest.mark.parametrize("change", [-4, 4])
def test_file_of_another_size_is_not_bad_data(tmp_path: Path, change: int) -> None:
    """A copy that breaks off would cut documents, and those after it would be empty."""
    write_prepared(tmp_path / "p", [[[1, 2, 3], [4, 5, 6]]])
    config = DataSource(type="tokens", path=str(tmp_path / "p"))
    documents, _ = open_documents(config, skips_bad=True)
    path = tmp_path / "p" / "shard-00000.bin"
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(OSError, match=r"shard-00000\.bin changed from 6 to \d+ tokens while"):
        documents[0]


def test_documents_are_named_by_their_shard(tmp_path: Path) -> None:
    """An id outside the vocabulary is looked up by the order in which a row reads."""
    folder = write_prepared(tmp_path / "a", [[[1], [2], [3]], [[4], [5]]])
    data = Data(source="tokens", path=str(folder), validation_percent=0.0)
    (source,), _ = build_sources(data, 0)
    for row in range(2):
        for number, ids in enumerate(islice(source.documents(row, 2, 0), 7)):
            shard, document = divmod(int(ids[0]) - 1, 3)
            place = f"{folder}/shard-{shard:05d}.bin, document {document}"
            assert source.place(row, 2, number) == place
