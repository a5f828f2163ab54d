"""Validation sources are whole, apart from training, and named in every error."""

import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from config.job_config import Data, DataSource, ValidationSource
from data.sources import build_sources
from data.tokenizer import load_tokenizer
from data.validation_sources import ValidationData, build_validation_sources, reserved_files

TRAINED = Data(source="files", path="texts/*.txt", validation_percent=0.0)


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files ``texts/0.txt`` to ``texts/9.txt``, and a link to the last."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for number in range(10):
        Path(f"texts/{number}.txt").write_text(f"text {number}\n")
    Path("other.txt").write_text("other\n")
    os.link("texts/9.txt", "link.txt")


def opened(data: Data = TRAINED, **keys: Any) -> ValidationData:
    config = ValidationSource(name="own", **keys)
    return build_validation_sources([config], data, 0, load_tokenizer("bytes"))


def texts_of(source: Any) -> list[str]:
    return sorted(islice(source.documents(0, 1, 0), 100))


def trained(found: ValidationData, data: Data = TRAINED) -> list[str]:
    (source,), held_out = build_sources(data, 0, with_held_out=False, reserved=found.reserved)
    assert held_out == {}
    return sorted(islice(source.documents(0, 1, 0), source.n_documents))


def test_every_document_is_read_once() -> None:
    found = opened(path="texts/*.txt")
    assert texts_of(found.sources["own"]) == [f"text {number}\n" for number in range(10)]
    rows = [[*found.sources["own"].documents(row, 16, 0)] for row in range(16)]
    assert [len(row) for row in rows] == [1] * 10 + [0] * 6


def test_files_of_training_are_untouched() -> None:
    found = opened(path="other.txt")
    assert trained(found) == [f"text {number}\n" for number in range(10)]


def test_file_of_both_is_an_error_under_any_name() -> None:
    with pytest.raises(ValueError, match=r"data.path: texts/9.txt is also a file of validation.so"):
        trained(opened(path="link.txt"))


def test_excluded_file_is_left_out_of_training() -> None:
    found = opened(path="link.txt", exclude_from_training=True)
    assert texts_of(found.sources["own"]) == ["text 9\n"]
    assert trained(found) == [f"text {number}\n" for number in range(9)]


def test_error_names_the_source() -> None:
    with pytest.raises(ValueError, match=r"^validation.sources, own: path: no file matches 'ab'"):
        opened(path="ab")


def test_same_class_in_both_is_an_error() -> None:
    data = Data(source="planted:Source", args={"count": 5})
    with pytest.raises(ValueError, match=r"own: type: its documents are also trained on"):
        opened(data, type="planted:Source", args={"count": 5})


@pytest.mark.parametrize(
    "keys",
    [
        {"path": "link.txt"},
        {"path": "texts/[1-3].txt", "exclude_from_training": True},
        {"type": "text", "path": "texts/[1-3].txt"},
    ],
)
def test_files_are_reserved_as_in_a_run(keys: dict[str, Any]) -> None:
    assert (
        reserved_files([ValidationSource(name="own", **keys)], TRAINED) == opened(**keys).reserved
    )


def test_same_documents_without_files_are_an_error_too() -> None:
    for keys in (
        {"type": "planted:Source", "args": {"count": 5}},
        {"type": "huggingface", "path": "a/b"},
    ):
        source = DataSource.model_validate(keys)
        own = ValidationSource(name="own", split="train", **keys)
        with pytest.raises(ValueError, match=r"own: (type|split): .* also trained on"):
            reserved_files([own], Data(sources=[source]))
