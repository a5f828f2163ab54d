"""Documents of a class outside: what it may return, and what ends the run by name."""

import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from config.job_config import Data, DataSource
from data.outside import OutsideDocuments
from data.sources import build_sources

NAME = "planted_data:Source"


class Source:
    """``count`` documents; those in ``special`` are returned, or raised, instead."""

    special: dict[int, Any] = {}  # noqa: RUF012, a test replaces it
    print_ = "one"

    def __init__(self, count: int = 200, path: str = "") -> None:
        self.count, self.path = count, path

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        found = self.special.get(index, f"document {index} of {self.path}")
        if isinstance(found, Exception):
            raise found
        return found

    def fingerprint(self) -> str:
        return self.print_


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> type[Source]:
    kind = type("Source", (Source,), {})
    module = ModuleType("planted_data")
    module.Source = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_data", module)
    return kind


def opened(*, skips_bad: bool = False, **keys: Any) -> OutsideDocuments:
    return OutsideDocuments(DataSource(type=NAME, **keys), skips_bad=skips_bad)


def test_every_document_is_trained_on_or_held_out(planted: type[Source]) -> None:
    config = Data(source=NAME, path="here", args={"count": 50}, validation_percent=20.0)
    (train,), held_out = build_sources(config, 0)
    sides = [[*islice(s.documents(0, 1, 0), s.n_documents)] for s in (train, *held_out.values())]
    assert 2 < len(sides[1]) < 25
    assert sorted([*sides[0], *sides[1]]) == sorted(f"document {i} of here" for i in range(50))
    # Held-out documents do not repeat.
    assert len([*held_out["here"].documents(0, 1, 0)]) == len(sides[1])


def test_token_ids_are_used_as_they_are(planted: type[Source]) -> None:
    planted.special = {1: [3, 4, 5], 2: np.array([6], np.uint16), 3: []}
    documents = opened()
    found = [np.asarray(documents[index]).tolist() for index in (1, 2, 3)]
    assert found == [[3, 4, 5], [6], []]


@pytest.mark.parametrize("dtype", [">u2", ">i4", "<i8"])
def test_token_ids_are_copies_in_the_byte_order_of_the_machine(
    planted: type[Source], dtype: str
) -> None:
    """A source may fill the same array for each document."""
    planted.special = {1: np.array([3, 4], dtype)}
    document = opened()[1]
    planted.special[1][:] = 5
    assert isinstance(document, np.ndarray)
    assert document.tolist() == [3, 4]
    assert document.dtype.isnative


@pytest.mark.parametrize(
    "value", [None, b"bytes", 5, [1.5], [True], [[1]], ["a"], [2**70], "\ud800", ValueError("no")]
)
def test_bad_record_raises_or_is_none(planted: type[Source], value: Any) -> None:
    documents, others = opened(), opened(skips_bad=True)
    planted.special = {7: value}
    with pytest.raises(ValueError, match=f"data.source: '{NAME}': document 7: "):
        documents[7]
    assert others[7] is None


def test_mistake_in_the_code_is_never_skipped(planted: type[Source]) -> None:
    documents = opened(skips_bad=True)
    planted.special = {7: KeyError("text"), 8: OSError("disk")}
    with pytest.raises(ValueError, match=rf"document 7: KeyError: 'text' \({__file__}, line \d+"):
        documents[7]
    with pytest.raises(OSError, match="document 8: OSError: disk"):
        documents[8]


def test_fingerprint_tells_documents_apart(planted: type[Source]) -> None:
    first = opened().fingerprint
    assert opened().fingerprint == first
    planted.print_ = "two"
    second = opened().fingerprint
    planted.special = {0: "another"}
    third = opened().fingerprint
    assert len({first, second, third, opened(args={"count": 201}).fingerprint}) == 4


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        ({"__len__": lambda self: 0}, {}, f"data.source: '{NAME}': has 0 documents"),
        ({"__len__": lambda self: 1 // 0}, {}, "__len__: ZeroDivisionError"),
        ({"fingerprint": lambda self: None}, {}, r"fingerprint\(\) is None, not a text"),
        ({"fingerprint": None}, {}, "Source has no method fingerprint"),
        ({"__init__": lambda self: None}, {"path": "x"}, "data.path: has no effect"),
        ({}, {"args": {"cuont": 1}}, "data.args.cuont: .*did you mean count"),
        ({}, {"args": {"count": "many"}}, "data.args.count: .*integer.*got 'many'"),
        ({}, {"path": "x", "args": {"path": "y"}}, "data.args.path: set path instead"),
        ({"__init__": lambda self, count: None}, {}, "data.args.count: must be set"),
    ],
)
def test_mistake_is_an_error_by_key(
    planted: type[Source], change: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(planted, name, value)
    with pytest.raises(ValueError, match=message):
        opened(**keys)


def test_changing_documents_are_an_error(planted: type[Source]) -> None:
    counts = iter(range(10**6))
    planted.__getitem__ = lambda self, index: f"{next(counts)}"  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="the same index gives different documents"):
        opened()


def test_constructor_that_raises_is_named(planted: type[Source], tmp_path: Path) -> None:
    planted.__init__ = lambda self, path: Path(path).stat()  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=rf"data.source: '{NAME}': FileNotFoundError: .*absent"):
        opened(path=str(tmp_path / "absent"))
