from pathlib import Path

import numpy as np
import pytest

from config.job_config import Data
from data.files import TOKEN_INDEX_FILE
from data.matching import matching_files
from data.text_files import PIECE_BYTES, TextFiles, builtin_files
from tests.lib.corpora import both

ALPHABETS = {
    "short lines": ["a", "b", "\n"],
    "long lines": [*"abcdefghij" * 10, "\n"],
    "one line": ["a", "é"],
    "crlf": ["a", "b", "c", "\r\n", "\r", "\n"],
    "multibyte": ["é", "漢", "🙂", "\u2028", "\n"],
    "multibyte, long lines": ["é", "漢", "🙂"] * 20 + ["\n"],
    "nul": ["\0", "\n", "\0\0\0"],
}


def pieces(contents: list[bytes], folder: Path, errors: str = "strict") -> list[str]:
    paths = [folder / str(i) for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    sizes = {path: len(content) for path, content in zip(paths, contents, strict=True)}
    texts = TextFiles([(path, path.name) for path in paths], sizes, encoding_errors=errors)
    return [texts[i] for i in range(len(texts))]


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_pieces_join_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alphabet: str
) -> None:
    monkeypatch.setattr("data.text_files.PIECE_BYTES", 32)
    rng = np.random.default_rng(0)
    for _ in range(60):
        # Include empty files, and sizes around every split.
        lengths = rng.integers(0, 130, 4) * rng.integers(0, 2, 4)
        contents = ["".join(rng.choice(ALPHABETS[alphabet], n)).encode() for n in lengths]
        found = pieces(contents, tmp_path)
        assert "".join(found).encode() == b"".join(contents)
        assert max([len(piece.encode()) for piece in found], default=0) <= 2 * 32 + 3


def test_pieces_of_arbitrary_bytes_join_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.text_files.PIECE_BYTES", 32)
    rng = np.random.default_rng(0)
    for high in (64, 256):
        contents = [rng.integers(0, high, n, np.uint8).tobytes() for n in range(200)]
        found = "".join(pieces(contents, tmp_path, "surrogateescape"))
        assert found.encode(errors="surrogateescape") == b"".join(contents)


def test_pieces_end_at_lines_and_never_span_files(tmp_path: Path) -> None:
    lines = [f"{'x' * (i % 200)}\n" for i in range(2000)]
    text = "".join(lines).encode()
    found = pieces([text, b"", b"no newline at the end"], tmp_path)
    assert len(found) == len(text) // PIECE_BYTES + 2
    assert all(piece.endswith("\n") for piece in found[:-1])
    assert found[-1] == "no newline at the end"


def test_overlong_line_is_split(tmp_path: Path) -> None:
    found = pieces([b"x" * (20 * PIECE_BYTES)], tmp_path)
    assert {len(piece) for piece in found} == {PIECE_BYTES}


def test_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0, byte 3: not UTF-8"):
        pieces([b"caf\xe9"], tmp_path)
    assert pieces([b"caf\xe9"], tmp_path, "replace") == ["caf\N{REPLACEMENT CHARACTER}"]


def test_builtin_files_are_library_code_without_tests() -> None:
    files = builtin_files()
    names = [name for _, name in files]
    assert {"python/json/decoder.py", "torch/nn/modules/linear.py"} <= set(names)
    assert names == sorted(set(names))
    assert all(path.is_file() and path.suffix == ".py" for path, _ in files)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages"}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.txt", ["a/1.txt", "a/2.txt", "ab/1.txt", "ab/c/3.txt", "top.txt"]),
        ("*.txt", ["top.txt"]),
        ("a/*", ["1.txt", "2.txt"]),
        ("a*/1.txt", ["a/1.txt", "ab/1.txt"]),
        ("a?/1.txt", ["ab/1.txt"]),
        ("[a-z]/?.txt", ["a/1.txt", "a/2.txt"]),
        ("ab/c/3.txt", ["3.txt"]),
    ],
)
def test_names_are_relative_to_the_globs_fixed_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: list[str]
) -> None:
    for name in ("top.txt", "a/1.txt", "a/2.txt", "ab/1.txt", "ab/c/3.txt", "a/skipped/folder/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [name for _, name in matching_files(f"{tmp_path}/{pattern}", {}, "a")] == names
    monkeypatch.chdir(tmp_path)
    assert [name for _, name in matching_files(pattern, {}, "a")] == names


def test_glob_without_match_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for pattern in (tmp_path / "*.txt", tmp_path / "folder"):
        with pytest.raises(ValueError, match=r"data\.path: no file matches"):
            matching_files(str(pattern), {}, "a")
    with pytest.raises(ValueError, match=r"it is a folder: try .*/folder/\*\*/\*\.txt"):
        matching_files(f"{tmp_path}/folder/", {}, "a")
    (tmp_path / "folder" / TOKEN_INDEX_FILE).touch()
    with pytest.raises(ValueError, match=r'prepared tokens, which data\.source = "tokens" reads'):
        matching_files(f"{tmp_path}/folder", {}, "a")


def test_single_file_is_held_out_by_pieces(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a line of text\n" * 20_000)
    config = Data(source="files", path=str(path), validation_percent=30.0)
    train, held_out = both(config, 0)
    counts = [int(source.description.split()[0]) for source in (train, held_out)]
    assert min(counts) > 0
    texts = TextFiles([(path, "book")], {path: path.stat().st_size}, encoding_errors="strict")
    assert sum(counts) == len(texts)


def test_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a line of text\n" * 20_000)
    texts = TextFiles([(path, "book")], {path: path.stat().st_size}, encoding_errors="strict")
    path.write_text("a line of text\n")
    for index in (0, 9):
        with pytest.raises(OSError, match=r"book\.txt changed from 300,000 to 15 bytes while"):
            texts[index]


def test_empty_file_does_not_change_the_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line of text\n" * 20_000)
    config = Data(source="files", path=str(tmp_path / "*.txt"))
    before = [source.description for source in both(config, 0)]
    (tmp_path / "b.txt").touch()
    assert [source.description for source in both(config, 0)] == before
