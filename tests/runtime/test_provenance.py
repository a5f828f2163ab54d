"""A run's provenance: one file per attempt, shared contents once, and what changed."""

import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runtime.attempt import describe_machine, installed_packages, merge_nodes
from runtime.provenance import (
    attempt_numbers,
    changes,
    config_at,
    config_changes,
    describe,
    path_of,
    read_attempt,
    write_attempt,
    write_content,
)
from tests.lib.attempts import SOFTWARE, attempt_of
from tests.lib.damage import DAMAGES, damage


def test_attempts_share_what_is_equal(tmp_path: Path) -> None:
    for number in (1, 2, 11):
        write_attempt(tmp_path, replace(attempt_of(tmp_path), number=number))
    assert attempt_numbers(tmp_path) == [1, 2, 11]
    assert read_attempt(tmp_path, 2) == replace(attempt_of(tmp_path), number=2)
    # Besides the attempts, one file of each kind, however many starts there are.
    assert len(list(tmp_path.iterdir())) == 3 + 2
    assert path_of(tmp_path, 1).stat().st_size < 4096


def test_configuration_at_a_time_is_that_of_the_newest_start_before(tmp_path: Path) -> None:
    first = attempt_of(tmp_path)
    config = write_content(tmp_path, "config", "toml", "[training]\nsteps = 2\n")
    second = replace(first, number=2, time="2026-11-26T01:00:00+0000", config=config)
    for attempt in (first, second):
        write_attempt(tmp_path, attempt)
    began = datetime(2026, 11, 26, tzinfo=UTC).timestamp()
    found = [config_at(tmp_path, began + seconds) for seconds in (-1, 0, 3599, 3600)]
    tables = [{"training": {"steps": steps}} for steps in (1, 2)]
    assert found == [None, tables[0], tables[0], tables[1]]
    path = tmp_path / read_attempt(tmp_path, 2).config
    path.write_text("[training\n")
    with pytest.raises(ValueError, match=path.name):
        config_at(tmp_path, began + 3600)
    path_of(tmp_path, 2).write_text("{")
    assert config_at(tmp_path, began + 3600) == tables[0]


def test_description_and_changes(tmp_path: Path) -> None:
    before = attempt_of(tmp_path)
    text = "\n".join(describe(tmp_path, before))
    for part in ("'a b'", "0123456789ab (main)", "changed: train.py", "PyTorch 2.13.0", "a, b"):
        assert part in text
    assert "CUDA" not in text
    assert changes(tmp_path, before, before) == []
    node = replace(before.nodes[0], hosts=["a"])
    software = SOFTWARE.replace("2.0.0", "2.1.0").replace("tiktoken", "tokenizers")
    after = replace(
        attempt_of(tmp_path, software.replace("abc", "def")),
        commit="fedcba9876543210", diff="diff-0.diff", world_size=8, nodes=[node],
        variables={"SLURM_JOB_ID": "2", "OMP_NUM_THREADS": "4"},
    )  # fmt: skip
    assert changes(tmp_path, before, after) == [
        "commit: 0123456789ab main to fedcba987654 main",
        "uncommitted changes: none to diff-0.diff",
        "ranks: 16 to 8",
        "hosts: a, b to a",
        "numpy: 2.0.0 to 2.1.0",
        "tiktoken: 0.11.0 to absent",
        "tokenizers: absent to 0.11.0",
        "sources: train.py",
        "variable NCCL_ALGO: Ring to absent",
        "variable OMP_NUM_THREADS: absent to 4",
    ]


def test_changed_keys_of_the_configuration(tmp_path: Path) -> None:
    tables = ("[training]\nsteps = 1\n", '[training]\nsteps = 2\n[model]\nname = "a"\n')
    before, after = (
        replace(attempt_of(tmp_path), config=write_content(tmp_path, "config", "toml", text))
        for text in tables
    )
    assert config_changes(tmp_path, before, before) == []
    assert config_changes(tmp_path, before, after) == [
        "model.name: absent to 'a'",
        "training.steps: 1 to 2",
    ]
    (tmp_path / after.config).unlink()
    with pytest.raises(OSError, match=after.config):
        config_changes(tmp_path, before, after)


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("file", ["attempt", "software"])
def test_damage_is_named(tmp_path: Path, name: str, file: str) -> None:
    write_attempt(tmp_path, attempt_of(tmp_path))
    path = next(tmp_path.glob(f"{file}-*"))
    damage(path, name)
    with pytest.raises((OSError, ValueError), match=path.name):
        describe(tmp_path, read_attempt(tmp_path, 1))


@pytest.mark.parametrize(
    "changed",
    [
        {"number": "1"},
        {"command": "rm"},
        {"nodes": [{"hosts": "a", "ranks": 1, "machine": {}}]},
        {"nodes": [{"hosts": ["a"], "ranks": 1, "machine": {"cpu": 1}}]},
        {"nodes": None},
        {"variables": []},
        {"resumed_from": 1.5},
        {"unknown": 1},
        {"software": "../../secret.toml"},
        {"software": "attempt-00001.json"},
    ],
)
def test_attempt_of_other_types_is_an_error(tmp_path: Path, changed: dict[str, object]) -> None:
    write_attempt(tmp_path, attempt_of(tmp_path))
    path = path_of(tmp_path, 1)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ValueError, match=str(tmp_path)):
        describe(tmp_path, read_attempt(tmp_path, 1))


def test_content_is_written_beside_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "provenance"
    name = write_content(folder, "diff", "diff", "text")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "absent")
    write_content(folder, "diff", "diff", "text")
    path_of(folder, 1).symlink_to(victim)
    write_attempt(folder, attempt_of(folder))
    assert victim.read_text() == "precious"
    assert not (tmp_path / "absent").exists()


def test_packages_are_those_that_pip_lists() -> None:
    found = installed_packages()
    import importlib.metadata

    for name in ("torch", "numpy", "pydantic", "typing-extensions"):
        assert found[name] == importlib.metadata.version(name)


def test_first_package_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "1.0"), ("second", "2.0")):
        (tmp_path / folder / f"My_Package-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "second" / "other-3.1-py3.11.egg-info").mkdir()
    entries = ["first", "second", "absent"]
    monkeypatch.setattr(sys, "path", [str(tmp_path / entry) for entry in entries])
    assert installed_packages() == {"my-package": "1.0", "other": "3.1"}


def test_nodes_that_are_alike_are_merged() -> None:
    machine = describe_machine()
    assert machine["cpu"].partition(" x ")[0] == str(len(os.sched_getaffinity(0)))
    found = [("a", 2, machine), None, ("b", 2, machine), None, ("c", 1, machine)]
    nodes = merge_nodes(found)
    assert [(node.hosts, node.ranks) for node in nodes] == [(["a", "b"], 2), (["c"], 1)]
    assert nodes[0].machine == machine
