"""A path that matches nothing gets advice about what in it has no meaning."""

from pathlib import Path

import pytest

from data.files import relative_names
from data.matching import match_paths, unmatched_hint


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("data/{a,b}.jsonl", "braces"),
        ("{rows.jsonl,broken.json}", "braces"),
        ("part-{00..07}.txt", "braces"),
        ("a.jsonl,b.jsonl", "a comma"),
        ("a.jsonl, b.jsonl", "a comma"),
        ("a.jsonl,", "a comma"),
        ("a/*;b/*", "a semicolon"),
        ("/a/x.txt:/b/y.txt", "a colon"),
        ("a.txt b.txt", "a space"),
        ("books/ web/", "a space"),
        (" a.txt", "white space"),
        ("a.txt\n", "white space"),
        ("books/", "ends with /"),
        ("books/*.txt/", "ends with /"),
        ("'a.txt'", "quotation marks"),
        ('"a.txt"', "quotation marks"),
        ("C:\\data\\*.txt", "backslash"),
        ("s3://bucket/{a,b}.txt", "braces"),
        ("s3://bucket/a.txt,s3://bucket/b.txt", "a comma"),
        ("https://host/a.txt", "the server has no such file"),
    ],
)
def test_meaningless_part_is_named(pattern: str, hint: str) -> None:
    assert hint in unmatched_hint(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["", "a.txt", "books/**/*.txt", "my books/a.txt", "Smith, John.txt", "a{1}.txt", "12:30.txt"],
)
def test_ordinary_path_gets_no_hint(pattern: str) -> None:
    assert unmatched_hint(pattern) == ""


@pytest.mark.parametrize("slashes", ["/", "//", "///"])
def test_slashes_in_front_are_one(slashes: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    pattern = f"{slashes}{str(tmp_path)[1:]}/*/x.txt"
    assert [name for _, name in relative_names(pattern, match_paths(pattern))] == ["a/x.txt"]
