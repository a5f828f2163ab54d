"""The files of docs/howto/extend.md train: an optimizer, a schedule and documents of one's own."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import tomli

from runtime import exit_codes
from tests.lib.cells import Cell
from tests.lib.forked import codes, log, started
from tests.lib.launch import curve, records, run
from tests.lib.layouts import PP, TP
from tests.lib.parity import Reference, check_cell, reference_of
from tests.lib.ranks import RankPool
from tests.lib.repository import ROOT

FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ("extend.md", "own_optimizer.md", "own_schedule.md", "own_data.md")
LION = "my_optim:Lion"
# The debug model's file sets no key that the functions of the page do not take.
KEYS = {"training.steps": "6", "lr_scheduler.total_steps": "8"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the pages' files, which can be imported."""
    pages = [(ROOT / "docs" / "howto" / name).read_text() for name in PAGES]
    files = dict(FILE.findall("\n".join(pages)))
    assert list(files) == ["own.toml", "my_optim.py", "my_schedule.py", "my_data.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "own.toml"))
    return tmp_path


def add_to_path(folder: Path) -> None:
    sys.path.append(str(folder))


def test_run_resumes_on_other_meshes_as_one_device_trains(folder: Path) -> None:
    keys = KEYS | {"job.name": "debug_model", "lr_scheduler.warmup_steps": "2"}
    output = run(folder / "whole", 1, **keys)
    assert "data: 1,963 documents for training" in output
    want = curve(folder / "whole")
    options = {"config": folder / "own.toml", "plant": partial(add_to_path, folder)}
    for key, steps in ((TP, "3"), (PP, "6")):
        parts = keys | {"training.steps": steps, f"parallelism.{key}": "2"}
        with started(folder / "parts", 2, **options, **parts) as ranks:
            assert codes(ranks) == {exit_codes.DONE}, log(folder / "parts")
    assert "resumed from step 3" in log(folder / "parts")
    got = curve(folder / "parts")
    assert [*got] == [*want] == [1, 2, 3, 4, 5, 6]
    for step, values in want.items():
        assert got[step] == pytest.approx(values, rel=1e-9)
    rates = [record["lr"] / 3e-4 for record in records(folder / "parts")]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0])


def check_on_rank(folder: Path, cell: Cell, reference: Reference) -> None:
    add_to_path(folder)
    check_cell(cell, reference)


@pytest.mark.parametrize(
    "cell",
    [
        # Experts have a mesh of their own.
        Cell(model="qwen3_moe", shard=2, expert=2, optimizer=LION),
        Cell(data_parallel="simple_fsdp", shard=2, tensor=2, optimizer=LION),
        Cell(data_parallel="ddp", pipeline="1F1B 2", tied=True, optimizer=LION),
    ],
    ids=str,
)
def test_lion_equals_one_device(ranks: RankPool, folder: Path, cell: Cell) -> None:
    ranks.run(check_on_rank, cell.world_size, folder, cell, reference_of(cell))


def test_page_shows_all_tables(folder: Path) -> None:
    tables = tomli.loads((folder / "own.toml").read_text())
    assert {"args"} <= tables["optimizer"].keys() & tables["lr_scheduler"].keys()


@pytest.mark.parametrize(
    ("module", "text", "keys", "message"),
    [
        ("my_optim", "class Lion(:\n", {}, "optimizer.name: 'my_optim:Lion' cannot be imported: "),
        ("my_data", "x = 1\n", {}, "data.source: 'my_data:Sums' cannot be imported: Attribute"),
        (None, "", {"optimizer.args.beta": "0.5"}, "optimizer.args.beta: my_optim:Lion has no"),
        (None, "", {"lr_scheduler.decay_ratio": "0.5"}, "lr_scheduler.decay_ratio: has no effect"),
    ],
)
def test_mistake_is_an_error_by_key(
    folder: Path,
    module: str | None,
    text: str,
    keys: dict[str, str],
    message: str,
) -> None:
    if module is not None:
        (folder / f"{module}.py").write_text(text)
    options = {"config": folder / "own.toml", "plant": partial(add_to_path, folder)}
    with started(folder / "run", 1, **options, **KEYS, **keys) as ranks:
        assert codes(ranks) == {exit_codes.BAD_CONFIG}
    assert message in log(folder / "run")
    assert module is None or str(folder / f"{module}.py") in log(folder / "run")
    assert "Traceback" not in log(folder / "run")
