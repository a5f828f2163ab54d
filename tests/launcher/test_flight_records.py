"""Flight records say which rank never entered the collective that the others wait in."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import flight_records
from launcher.flight_records import hanging_ranks, plain_values
from launcher.post_mortem import FailureReport, explained


def entry(number: int, name: str, group: tuple[str, str], **changes: Any) -> dict[str, Any]:
    return {
        "process_group": group,
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [[64, 8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "frames": [
            {"name": "all_reduce", "filename": "/site-packages/torch/c10d.py", "line": 1},
            {"name": "norm", "filename": f"{flight_records.ROOT}optim/grad_norm.py", "line": 66},
        ],
    } | changes


def record(*entries: dict[str, Any], **groups: str) -> dict[str, Any]:
    config = {name: {"name": name, "ranks": ranks} for name, ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


OPEN = {"state": "started", "retired": False}
DP, TP = ("7", "dp_shard"), ("9", "tp")


def lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, records: Mapping[str, dict[str, Any]]
) -> list[str]:
    for name in records:
        (folder / f"flight-record-{name}").touch()
    monkeypatch.setattr(
        flight_records,
        "read_record",
        lambda path: records[path.name.removeprefix("flight-record-")],
    )
    return hanging_ranks(folder, 8)


def test_rank_that_never_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = entry(41, "all_gather", DP)
    waits = entry(42, "all_reduce", DP, **OPEN)
    # A host is ahead of its device.
    ahead = entry(43, "all_gather", DP, state="scheduled", retired=False)
    records = {"0": record(done, waits, ahead), "1": record(done, waits), "3": record(done)}
    found = lines(tmp_path, monkeypatch, records)
    assert found == [
        "rank 3 never entered nccl:all_reduce of dp_shard, its collective 42, float [64, 8] (at"
        " optim/grad_norm.py:66), where ranks 0, 1 waited"
    ]


def test_cause_is_before_what_it_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tp, dp = entry(5, "all_reduce", TP, **OPEN), entry(2, "all_gather", DP, **OPEN)
    # Rank 2 stands still, so rank 3 waits for it, so rank 1 for rank 3.
    records = {
        "1": record(entry(1, "all_gather", DP), dp),
        "2": record(entry(4, "all_reduce", TP)),
        "3": record(entry(1, "all_gather", DP), entry(4, "all_reduce", TP), tp),
    }
    first, second = lines(tmp_path, monkeypatch, records)
    assert first.startswith("rank 2 never entered nccl:all_reduce of tp")
    assert second.startswith("rank 3 never entered nccl:all_gather of dp_shard")


def test_other_kinds_of_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"7": "[0, 1, 2]"}
    waits = record(entry(9, "all_reduce", DP, **OPEN), **whole)
    [found] = lines(tmp_path, monkeypatch, {"0": waits, "2": waits})
    assert found.startswith("rank 1 left no flight record; ranks 0, 2 waited in nccl:all_reduce")
    [found] = lines(tmp_path, monkeypatch, {"0": waits, "1": waits, "2": waits})
    assert found.startswith("ranks 0, 1, 2 entered nccl:all_reduce")
    assert "did not end" in found
    other = record(entry(9, "broadcast", DP, **OPEN), **whole)
    [found] = lines(tmp_path, monkeypatch, {"0": waits, "1": other, "2": waits})
    assert found.startswith("rank 1 entered nccl:broadcast (at optim/grad_norm.py:66) instead of")
    done = record(entry(9, "all_reduce", DP), **whole)
    assert lines(tmp_path, monkeypatch, {"0": done, "1": done, "2": done}) == []
    # Those of the CPU have numbers of their own.
    records = {"0": done, "1": done, "2": done, "cpu-0": waits, "cpu-1": done, "cpu-2": waits}
    [found] = lines(tmp_path, monkeypatch, records)
    assert found.startswith("ranks 0, 1, 2 entered")


def test_damaged_records_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flight-record-0").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (tmp_path / "flight-record-1").write_bytes(b"\x80\x02}.")
    (tmp_path / "flight-record-2").symlink_to("flight-record-1")
    (tmp_path / "flight-record-x").touch()
    assert hanging_ranks(tmp_path, 8) == []
    whole = record(entry(1, "all_reduce", DP, **OPEN))
    damaged = record({"process_group": None, "is_p2p": False})
    (tmp_path / "whole").mkdir()
    assert lines(tmp_path / "whole", monkeypatch, {"0": whole, "1": damaged}) == []
    records = {"0": whole, "1": damaged, "2": whole}
    [found] = lines(tmp_path / "whole", monkeypatch, records)
    assert found.startswith("ranks 0, 2 entered")


def test_reading_many_records_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of ten ranks are read in the time that there is."""
    waits = record(entry(9, "all_reduce", DP, **OPEN), **{"7": str([*range(10)])})
    ticks = iter([0.0, 1.0, flight_records.READ_SECONDS, *[flight_records.READ_SECONDS + 1] * 20])
    monkeypatch.setattr(flight_records, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    hung, rest = lines(tmp_path, monkeypatch, {str(rank): waits for rank in range(10)})
    assert hung.startswith("ranks 0, 1 entered nccl:all_reduce")
    assert hung.endswith("it did not end: of 8 other ranks no record was read")
    assert rest == "8 of 10 flight records were not read, after 60 s"


def test_records_are_not_held_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(dict[str, Any]):
        pass

    alive: list[weakref.ref[Whole]] = []

    def read(path: Path) -> Whole:
        assert not [each for each in alive if each() is not None]
        whole = Whole(record(entry(9, "all_reduce", DP, **OPEN)))
        alive.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr(flight_records, "read_record", read)
    for rank in range(3):
        (tmp_path / f"flight-record-{rank}").touch()
    assert len(hanging_ranks(tmp_path, 8)) == 1
    assert len(alive) == 3


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01M\x00\x01J\xff\xff\xff\xffeu.",
         {"a": [1, 256, -1]}),
        (b"\x80\x02X\x01\x00\x00\x00bq\x00h\x00N\x87.", ("b", "b", None)),
        (b"\x80\x02\x8a\x08\x00\x00\x00\x00\x01\x00\x00\x00\x88\x86.", (1 << 32, True)),
    ],
)  # fmt: skip
def test_values_of_a_pickle(data: bytes, value: object) -> None:
    assert plain_values(data) == value


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x02", b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02e.", b"\x80\x02K\x01(K\x01e.", b"\x80\x02h\x00.", b"garbage",
        b"\x80\x02}(K\x01u.", b"\x80\x02}(]K\x01u.",
    ],
)  # fmt: skip
def test_other_pickles_are_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a pickle of plain values"):
        plain_values(data)


def test_only_a_hang_is_explained_by_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.post_mortem.hanging_ranks", lambda logs, most: ["found"])
    failed = FailureReport(["cause", "rest"], "", [], n_causes=1)
    assert explained(failed, tmp_path) == failed
    hung = FailureReport(["cause", "rest"], "", [], n_causes=1, is_hang=True)
    found = explained(hung, tmp_path)
    assert found is not None
    assert found.lines == ["cause", "found", "rest"]
