import re
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from config.job_config import Data, DataSource
from data.files import FINGERPRINT_SAMPLES
from data.sources import (
    ORDER_OVERHEAD,
    SHUFFLED_DOCUMENTS,
    ShuffledDocuments,
    Source,
    build_sources,
    named_errors,
)
from data.tokenizer import load_tokenizer
from tests.lib.corpora import DOCUMENTS, both, write_prepared


def shuffled(count: int, seed: int = 0, *, repeat: bool = True) -> ShuffledDocuments:
    texts = [str(i) for i in range(count)]
    indices = np.arange(count)
    return ShuffledDocuments(
        texts, indices, seed=seed, name="training", fingerprint="", repeat=repeat
    )


def files(folder: Path, percent: float = 30.0) -> Data:
    return Data(source="files", path=str(folder / "**/*.txt"), validation_percent=percent)


def epoch(source: Source, count: int) -> list[str]:
    return list(islice(source.documents(0, 1, 0), count))


def write_files(folder: Path, names: list[str]) -> None:
    """Write files of two pieces each that contain their name."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"{name}\n" * (30_000 // len(name)))


def names_in(source: Source | None) -> set[str]:
    """Names of the files that a source reads in one epoch."""
    assert source is not None
    count = int(source.description.split()[0].replace(",", ""))
    return {text.split()[0] for text in epoch(source, count)}


@pytest.mark.parametrize(("n_documents", "n_rows"), [(1, 3), (10, 1), (10, 4), (10, 10), (7, 16)])
def test_rows_read_every_document_once_per_epoch(n_documents: int, n_rows: int) -> None:
    source = shuffled(n_documents)
    for epochs in (1, 3):
        total = epochs * n_documents
        counts: Counter[str] = Counter()
        for row in range(n_rows):
            own = len(range(row, total, n_rows))
            counts.update(islice(source.documents(row, n_rows, 0), own))
        assert counts == {str(i): epochs for i in range(n_documents)}


def test_row_can_start_anywhere() -> None:
    source = shuffled(10)
    whole = list(islice(source.documents(2, 4, 0), 40))
    for start in range(30):
        assert list(islice(source.documents(2, 4, start), 10)) == whole[start : start + 10]


def test_order_depends_only_on_seed_and_epoch() -> None:
    first, second = np.array(epoch(shuffled(50), 100)).reshape(2, 50)
    assert not np.array_equal(first, second)
    assert epoch(shuffled(50), 100) == [*first, *second]
    assert epoch(shuffled(50, seed=1), 50) not in ([*first], [*second])
    assert shuffled(50).fingerprint != shuffled(50, repeat=False).fingerprint


def expected_order(
    indices: np.ndarray, seed: int, epoch: int, groups: np.ndarray | None
) -> np.ndarray:
    """Order of an epoch by one sort of int64 indices, with all sort keys in memory."""
    generator = np.random.Philox(key=[seed, epoch])
    keys = generator.random_raw(len(indices))
    if groups is None:
        return indices[np.argsort(keys, kind="stable")]
    _, group, counts = np.unique(groups[indices], return_inverse=True, return_counts=True)
    order = np.argsort(generator.random_raw(len(counts)), kind="stable")
    block = np.empty(len(counts), np.int64)
    block[order] = np.cumsum(counts[order]) // SHUFFLED_DOCUMENTS
    return indices[np.lexsort((keys, block[group]))]


@pytest.mark.parametrize("n_documents", [1, 2, 1000, 4096, 40_000])
@pytest.mark.parametrize("group_size", [None, 1, 700, 2 * SHUFFLED_DOCUMENTS])
@pytest.mark.parametrize("held_out", [None, 3])
def test_order_is_that_of_one_sort(
    monkeypatch: pytest.MonkeyPatch,
    n_documents: int,
    group_size: int | None,
    held_out: int | None,
) -> None:
    monkeypatch.setattr("data.sources.DRAWN_AT_ONCE", 4096)
    every = np.arange(n_documents)
    indices = None if held_out is None else every[every % held_out != 1]
    groups = None if group_size is None else every // group_size
    for seed, number in [(0, 0), (0, 3), (2**63, 1)]:
        source = ShuffledDocuments(
            range(n_documents), indices, seed=seed, name="training", fingerprint="", groups=groups
        )
        count = source.n_documents
        found = list(islice(source.documents(0, 1, number * count), count))
        chosen = every if indices is None else indices
        assert found == expected_order(chosen, seed, number, groups).tolist()


def test_indices_may_exceed_32_bits() -> None:
    indices = np.array([5, 2**32 + 5, 2**33 - 1])
    source = ShuffledDocuments(range(2**33), indices, seed=0, name="training", fingerprint="")
    assert sorted(epoch(source, 3)) == indices.tolist()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Epochs whose order is computed."""
    epochs: list[int] = []
    permutation = ShuffledDocuments._permutation

    def noted(self: ShuffledDocuments, number: int) -> np.ndarray:
        epochs.append(number)
        return permutation(self, number)

    monkeypatch.setattr(ShuffledDocuments, "_permutation", noted)
    return epochs


def test_an_order_is_computed_once_though_rows_are_epochs_apart(computed: list[int]) -> None:
    source, n_rows, n_batches = shuffled(50), 10, 20
    rows = [source.documents(row, n_rows, 0) for row in range(n_rows)]
    for _ in range(n_batches):
        for row, documents in enumerate(rows):
            # Documents of the last row are a tenth as long as those of the first.
            assert len(list(islice(documents, row + 1))) == row + 1
    n_epochs = n_batches * n_rows * n_rows // 50
    assert sorted(computed) == list(range(n_epochs))


@pytest.mark.parametrize(("n_orders", "kept"), [(0, 2), (1, 2), (3, 3)])
def test_orders_of_a_large_source_are_bounded_by_their_bytes(
    monkeypatch: pytest.MonkeyPatch, computed: list[int], n_orders: int, kept: int
) -> None:
    count = 10_000
    monkeypatch.setattr("data.sources.CACHED_ORDERS", n_orders * (4 * count + ORDER_OVERHEAD))
    source = shuffled(count)
    for number in [*range(kept), *range(kept), kept, 0]:
        next(source.documents(0, 1, number * count))
    assert computed == [*range(kept), kept, 0]


def test_orders_take_few_bytes_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two orders of 4 bytes are kept; a third needs them and 3.5 for an eighth of the keys."""
    monkeypatch.setattr("data.sources.CACHED_ORDERS", 0)
    monkeypatch.setattr("data.sources.DRAWN_AT_ONCE", 4096)
    count = 1 << 18
    tracemalloc.start()
    source = ShuffledDocuments(range(count), None, seed=0, name="training", fingerprint="")
    for number in range(3):
        next(source.documents(0, 1, number * count))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 8.5 * count
    assert peak < 17 * count


def test_held_out_split_is_by_file_and_stable(tmp_path: Path) -> None:
    names = [f"{folder}/{i}.txt" for folder in "ab" for i in range(50)]
    write_files(tmp_path, names)
    sides = [names_in(source) for source in both(files(tmp_path), 0)]
    train, held_out = sides
    assert train | held_out == set(names)
    assert not train & held_out
    assert 15 <= len(held_out) <= 45

    # The split depends neither on other files nor on the folder's path.
    kept = names[::3]
    for name in set(names) - set(kept):
        (tmp_path / name).unlink()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    fewer = [names_in(source) for source in both(files(moved), 1)]
    assert fewer == [side & set(kept) for side in sides]


def test_fingerprint_changes_with_the_data(tmp_path: Path) -> None:
    names = [f"a/{i}.txt" for i in range(20)]
    write_files(tmp_path, names)

    def fingerprint(seed: int = 0, percent: float = 30.0) -> str:
        return both(files(tmp_path, percent), seed)[0].fingerprint

    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(seed=1) != before
    assert fingerprint(percent=0.0) != before
    path = tmp_path / names[7]
    text = path.read_text()
    path.write_text(text.replace("a/", "A/"))  # same size
    edited = fingerprint()
    path.write_text(text + "\n")
    assert len({before, edited, fingerprint()}) == 3


def test_fingerprint_includes_all_names_and_sizes(tmp_path: Path) -> None:
    for i in range(3 * FINGERPRINT_SAMPLES):
        (tmp_path / f"{i:03}.txt").write_text("text")
    found = {both(files(tmp_path, 0.0), 0)[0].fingerprint}
    (tmp_path / "001.txt").write_text("longer text")
    found.add(both(files(tmp_path, 0.0), 0)[0].fingerprint)
    (tmp_path / "001.txt").rename(tmp_path / "001a.txt")
    found.add(both(files(tmp_path, 0.0), 0)[0].fingerprint)
    assert len(found) == 3


@pytest.mark.parametrize("percent", [1e-9, 50.0])
def test_empty_split_is_an_error(tmp_path: Path, percent: float) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0.txt").write_text("one piece")
    config = files(tmp_path, percent)
    with pytest.raises(ValueError, match=r"the only document .* data\.validation_percent = 0 and"):
        build_sources(config, 0)
    assert build_sources(files(tmp_path, 0.0), 0)[1] == {}


def test_documents_that_are_all_held_out_are_an_error(tmp_path: Path) -> None:
    # By their hashes, both documents of about one pair in four.
    pairs = [files(tmp_path / str(pair), 50.0) for pair in range(20)]
    for pair in range(20):
        write_files(tmp_path / str(pair), [f"{pair}.txt", f"{pair + 20}.txt"])
    messages = []
    for config in pairs:
        try:
            build_sources(config, 0)
        except ValueError as error:
            messages.append(str(error))
    text = r"data: none of the \d documents is left for training; see data\.validation_percent"
    assert len(messages) > 0
    assert all(re.fullmatch(text, message) for message in messages)


def test_few_documents_hold_out_one(tmp_path: Path) -> None:
    names = [f"a/{i}.txt" for i in range(3)]
    write_files(tmp_path, names)
    train, held_out = (names_in(source) for source in both(files(tmp_path, 1e-9), 0))
    assert len(train) == 2
    assert train | held_out == set(names)
    assert build_sources(files(tmp_path), 0, with_held_out=False)[1] == {}


BYTES = load_tokenizer("bytes")


def test_ids_of_another_tokenizer_name_the_source(tmp_path: Path) -> None:
    def build(*paths: Path) -> None:
        sources = [DataSource(type="tokens", path=str(path), name=path.name) for path in paths]
        config = Data(source="tokens", path=str(paths[0]), validation_percent=0.0)
        if len(paths) > 1:
            config = Data(sources=sources, validation_percent=0.0)
        build_sources(config, 0, tokenizer=BYTES)

    fingerprint = BYTES.fingerprint
    own = write_prepared(tmp_path / "own", [[[BYTES.n_vocab - 1]]], fingerprint=fingerprint)
    large = write_prepared(tmp_path / "large", [[[BYTES.n_vocab]]], fingerprint=fingerprint)
    other = write_prepared(tmp_path / "other", [DOCUMENTS], fingerprint="another")
    build(own)
    with pytest.raises(ValueError, match=r"^data\.path: token id 258 exceeds data\.tokenizer"):
        build(large)
    with pytest.raises(ValueError, match=r"^data\.path: tokenized with another tokenizer than"):
        build(other)
    mine = write_prepared(tmp_path / "mine", [DOCUMENTS], fingerprint="another", name="mine")
    with pytest.raises(ValueError, match=r"than data\.tokenizer bytes, by 'mine'$"):
        build(mine)
    with pytest.raises(ValueError, match=r"^data\.sources, other: path: tokenized with another"):
        build(own, other)


def test_read_error_of_a_source_stays_an_oserror() -> None:
    with (
        pytest.raises(OSError, match=r"^data\.sources, books: disk on fire"),
        named_errors("data.sources, books"),
    ):
        raise OSError("disk on fire")


def test_builtin_files_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(b"caf\xe9")
    monkeypatch.setattr("data.sources.builtin_files", lambda: [(path, "python/latin.py")])
    train = both(Data(validation_percent=0.0), 0)[0]
    assert epoch(train, 1) == ["caf\N{REPLACEMENT CHARACTER}"]


def test_builtin_source_needs_no_files() -> None:
    train, _ = both(Data(), 0)
    assert "import" in "".join(epoch(train, 20))


@pytest.mark.parametrize(
    ("markers", "text"),
    [
        ({"bos": "", "eos": None}, r"bos = unset .*: set data\.bos = '' and data\.eos = unset$"),
        ({"bos": "<|end_of_text|>", "eos": None}, r": set data\.bos = '<\|end_of_text\|>' and"),
        ({"bos": "<absent>", "eos": None}, r"another tokenizer than data\.tokenizer bytes$"),
        ({"bos": 3, "eos": []}, r"another tokenizer than data\.tokenizer bytes$"),
    ],
)
def test_ids_with_other_markers_name_the_keys(
    tmp_path: Path, markers: dict[str, str | None], text: str
) -> None:
    try:
        fingerprint = load_tokenizer("bytes", **markers).fingerprint
    except (TypeError, ValueError):
        fingerprint = "unknown"
    folder = write_prepared(tmp_path / "a", [[[1]]], fingerprint=fingerprint, **markers)
    config = Data(source="tokens", path=str(folder), validation_percent=0.0)
    with pytest.raises(ValueError, match=rf"^data\.path: tokenized with .*{text}"):
        build_sources(config, 0, tokenizer=BYTES)
