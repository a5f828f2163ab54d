"""What was saved comes back bit for bit, on any mesh; a failure of one rank is one of all."""

import json
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from checkpoint.checkpointer import Checkpointer, merge
from checkpoint.manifest import NAME, read_manifest
from checkpoint.states import ModelState
from checkpoint.storage import write_parts
from checkpoint.store import STATE_FILE
from config import ConfigError
from config.job_config import Checkpoint, Optimizer
from models import TransformerArgs
from runtime.log import logger
from tests.checkpoint.small_run import ARGS, Run, Values
from tests.layouts import REPLICATE, TP, Layout
from tests.ranks import GROUP_TIMEOUT, RankPool

LAYOUTS = [Layout(1), Layout(2), Layout(4), Layout(4, {REPLICATE: 2}), Layout(4, {TP: 2})]
TWO = Layout(2)
FOREIGN = {"step-999.bak", "old-step-00000500", "step-7", "corrupt-step-00000009-0"}
LEFTOVERS = {".tmp-step-00000009-dead", ".trash-dead"}
Loaded = tuple[int | None, dict[str, Any], dict[str, str]]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def save_run(folder: Path, layout: Layout, args: TransformerArgs = ARGS) -> dict[str, str]:
    run = Run(folder, layout, args=args)
    run.save(1, 2)
    return run.digests()


def load_runs(folders: list[Path], layout: Layout) -> list[Loaded]:
    """The step, values and digests that a new run finds in each folder."""
    found = []
    for folder in folders:
        run = Run(folder, layout)
        step = run.checkpointer.load_latest()
        found.append((step, run.values.state, run.digests()))
    return found


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, str]]:
    """A folder of checkpoints for each layout, and the digests of the last one."""
    folders = {tmp_path_factory.mktemp("saved"): layout for layout in LAYOUTS}
    return {
        f: ranks.run(save_run, layout.world_size, f, layout)[0] for f, layout in folders.items()
    }


@pytest.mark.row(16, "Any mesh loads what any mesh saved, bit for bit")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_mesh_loads_what_any_mesh_saved(
    ranks: RankPool,
    saved: dict[Path, dict[str, str]],
    layout: Layout,
    seen: Callable[[str], None],
) -> None:
    want = [(2, {"step": 2}, digests) for digests in saved.values()]
    for found in ranks.run(load_runs, layout.world_size, list(saved), layout):
        assert found == want
    seen(f"{layout} from {len(saved)} meshes")


def digests_of_steps(folder: Path, layout: Layout, optimizer: Optimizer) -> list[dict[str, str]]:
    """Of what is there after step 2, which is loaded if it was saved, and after step 3."""
    run = Run(folder, layout, optimizer=optimizer)
    if run.checkpointer.load_latest() is None:
        run.save(1, 2)
    found = [run.digests()]
    run.save(3)
    return [*found, run.digests()]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_every_optimizer_goes_on_as_it_was(
    ranks: RankPool, tmp_path: Path, name: str, state_dtype: str
) -> None:
    optimizer = Optimizer(name=name, state_dtype=state_dtype)
    [want, _] = ranks.run(digests_of_steps, 2, tmp_path, TWO, optimizer)
    for layout in (TWO, Layout(1), Layout(4, {TP: 2})):
        shutil.rmtree(tmp_path / "step-00000003")
        for found in ranks.run(digests_of_steps, layout.world_size, tmp_path, layout, optimizer):
            assert found[0] == want[0]
            # On another mesh a kernel may round otherwise where a shard ends.
            assert found[1] == want[1] or layout != TWO


def resume_with_other_options(folder: Path) -> None:
    Run(folder, TWO, optimizer=Optimizer(weight_decay=0.1, beta2=0.95)).save(1)
    resumed = Run(folder, TWO, optimizer=Optimizer(weight_decay=0.3, beta2=0.99))
    assert resumed.checkpointer.load_latest() == 1
    groups = resumed.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert {group["betas"][1] for group in groups} == {0.99}


def test_optimizer_options_are_the_configurations(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(resume_with_other_options, 2, tmp_path)


def save_and_resume(folder: Path, keep: int, steps: list[int], **config: int) -> int | None:
    run = Run(folder, TWO, keep_latest_k=keep, **config)
    run.save(*steps)
    run.checkpointer.close()
    return Run(folder, TWO).checkpointer.load_latest()


@pytest.mark.parametrize(("keep", "kept"), [(1, {30}), (2, {2, 30}), (0, {1, 2, 30})])
def test_the_newest_are_kept_and_nothing_foreign_is_touched(
    ranks: RankPool, tmp_path: Path, keep: int, kept: set[int]
) -> None:
    for name in FOREIGN | LEFTOVERS:
        (tmp_path / name / "inside").mkdir(parents=True)
    assert set(ranks.run(save_and_resume, 2, tmp_path, keep, [1, 2, 30])) == {30}
    assert names(tmp_path) == {f"step-{step:08d}" for step in kept} | FOREIGN


def test_steps_of_nine_digits_are_newer(ranks: RankPool, tmp_path: Path) -> None:
    assert set(ranks.run(save_and_resume, 2, tmp_path, 1, [99_999_999, 100_000_000])) == {10**8}
    assert names(tmp_path) == {"step-100000000"}


def test_only_the_owner_may_look(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    ranks.run(save_and_resume, 2, folder, 1, [1])
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700}


def save_twice(folder: Path) -> list[dict[str, str]]:
    run = Run(folder, TWO)
    found = []
    for _ in range(2):
        run.save(1)
        found.append(run.digests())
    return found


def test_a_step_saved_again_overwrites_nothing(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(save_twice, 2, tmp_path)[0]
    assert first != second
    [replaced] = tmp_path.glob("replaced-step-00000001-*")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replaced.rename(elsewhere / "step-00000001")
    found = ranks.run(load_runs, 2, [tmp_path, elsewhere], TWO)[0]
    assert [digests for _, _, digests in found] == [second, first]


def begin_and_finish(run: Run, step: int) -> str:
    """What the alarm says, if there is one."""
    run.checkpointer.begin(step)
    with patch.object(logger, "error") as alarm:
        folder = run.checkpointer.finish()
    assert (folder is None) == alarm.called
    return str(alarm.call_args)


def save_values(folder: Path, values: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Save what each rank has; the error, and what is then found."""
    run = Run(folder, TWO)
    run.values.state = values[dist.get_rank()]
    error = begin_and_finish(run, 1)
    resumed = Run(folder, TWO)
    resumed.checkpointer.load_latest()
    return error, resumed.values.state


def test_values_are_the_union_over_ranks(ranks: RankPool, tmp_path: Path) -> None:
    values = [{"step": 1, "seen": {"a": 2}}, {"step": 1, "seen": {"b": 3}}]
    union = {"step": 1, "seen": {"a": 2, "b": 3}}
    assert ranks.run(save_values, 2, tmp_path, values) == [("None", union)] * 2
    assert json.loads((tmp_path / "step-00000001" / STATE_FILE).read_text()) == {"train": union}


def test_ranks_that_disagree_save_nothing(ranks: RankPool, tmp_path: Path) -> None:
    for error, found in ranks.run(save_values, 2, tmp_path, [{"step": 1}, {"step": 2}]):
        assert "ranks disagree on the state 'step': 1 and 2" in error
        assert found == {}


def save_a_number(folder: Path) -> str:
    run = Run(folder, TWO)
    state = {"number": 5}
    with (
        patch.object(ModelState, "state_dict", lambda self: state),
        patch.object(logger, "error") as alarm,
    ):
        run.checkpointer.begin(1)
    return str(alarm.call_args)


def test_what_is_not_a_tensor_is_not_saved_as_one(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks.run(save_a_number, 2, tmp_path):
        assert "not a tensor, so it could not be loaded: model.number" in error
    assert not any(tmp_path.glob("step-*"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"key": 1}, {"key": 2}),
        ({"key": {"inner": 1}}, {"key": 1}),
        ({"key": 1}, {"key": {"inner": 1}}),
        ({"key": 1}, {"key": {}}),
        ({"outer": {"key": [1, 2]}}, {"outer": {"key": [1]}}),
    ],
)
def test_a_disagreement_is_named(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'key'"):
        merge(first, second)


def fail_on_one(folder: Path, rank: int, target: str) -> tuple[str, Loaded]:
    """What this rank raises while ``target`` fails on ``rank``, and what is found afterwards."""
    run, resumed = Run(folder, TWO), Run(folder, TWO)
    run.save(1)
    is_broken = dist.get_rank() == rank
    with (
        patch(target, side_effect=OSError("disk on fire")) if is_broken else nullcontext(),
        patch.object(logger, "error") as alarm,
    ):
        try:
            run.save(2)
            resumed.checkpointer.load_latest()
            error = str(alarm.call_args)
        except BaseException as raised:  # DCP's are no Exceptions.
            error = str(raised)
    return error, load_runs([folder], TWO)[0]


@pytest.mark.parametrize(
    ("rank", "target", "step"),
    [
        (0, "pathlib.Path.mkdir", 1),
        (1, "os.fsync", 1),
        (1, "checkpoint.checkpointer.write_parts", 1),
        (0, "checkpoint.store.write_manifest", 1),
        (1, "checkpoint.checkpointer.read_index", 2),
        (0, "checkpoint.checkpointer.read_state", 2),
        (1, "checkpoint.storage.Reader.read_data", 2),
    ],
)
def test_no_rank_waits_for_one_that_failed(
    ranks: RankPool, tmp_path: Path, rank: int, target: str, step: int
) -> None:
    begin = time.monotonic()
    answers = ranks.run(fail_on_one, 2, tmp_path, rank, target)
    assert time.monotonic() - begin < GROUP_TIMEOUT.total_seconds() / 2
    for error, (found, values, _) in answers:
        assert "disk on fire" in error
        assert (found, values) == (step, {"step": step})


def load_initial(folder: Path, args: TransformerArgs) -> tuple[str, dict[str, str], dict[str, str]]:
    """The error, and the digests before and after."""
    run = Run(folder / "none", TWO, args=args, initial_load_path=str(folder / "step-00000002"))
    before, error = run.digests(), ""
    try:
        run.checkpointer.load_initial(run.model_state)
    except ValueError as raised:
        error = str(raised)
    return error, before, run.digests()


def test_initial_weights_come_without_the_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    digests = ranks.run(save_run, 2, tmp_path, TWO)[0]
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert not error
        assert after == {fqn: digests[fqn] for fqn in before}
        assert after != before


def test_broken_initial_weights_are_a_mistake_in_the_configuration(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save_run, 2, tmp_path, TWO)
    (tmp_path / "step-00000002" / STATE_FILE).write_text("{}")
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert error.startswith("checkpoint.initial_load_path: ")
        assert after == before
    (tmp_path / "step-00000002" / NAME).unlink()
    for error, _, _ in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert "step-00000002 has no manifest.json, as checkpoints have, nor Hugging" in error


def test_weights_of_a_deeper_model_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_run, 2, tmp_path, TWO, replace(ARGS, n_layers=2))
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert "of another model: it also has model.layers.1.attention.k_norm.weight" in error
        assert after == before


def when_to_save(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Of steps without a checkpoint, the due and the overdue ones."""
    found = []
    for keys in ({}, {"max_unsaved_steps": 5}, {"enable": False}):
        checkpointer = Checkpointer(
            folder, Checkpoint(interval=4, **keys), tensors={}, values={}, facts={},
            check=lambda _: None,
        )  # fmt: skip
        asked = checkpointer.is_due, checkpointer.is_overdue
        found.append(tuple([step for step in range(1, 15) if is_so(step)] for is_so in asked))
    return found


def test_every_interval_is_saved_and_three_without_are_too_many(
    ranks: RankPool, tmp_path: Path
) -> None:
    due = [4, 8, 12]
    want = [(due, [13, 14]), (due, list(range(6, 15))), ([], [])]
    assert ranks.run(when_to_save, 1, tmp_path) == [want]


class OneTensor:
    """Fewer tensors than ranks: a rank has nothing to write."""

    def __init__(self) -> None:
        self.tensors = {"weight": torch.arange(3.0)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict


def save_one_tensor(folder: Path) -> tuple[int, list[float]]:
    one = OneTensor()
    checkpointer = Checkpointer(
        folder, Checkpoint(), tensors={"model": one}, values={}, facts={}, check=lambda _: None
    )
    for step in (1, 2):
        one.tensors["weight"] += 1
        checkpointer.save(step, wait=True)
    one.tensors["weight"].zero_()
    assert checkpointer.load_latest() == 2
    checkpointer.close()
    return checkpointer.newest, one.tensors["weight"].tolist()


def test_ranks_without_a_share_save_too(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_one_tensor, 3, tmp_path) == [(2, [2.0, 3.0, 4.0])] * 3


class Small:
    """A checkpointer of one tensor and one value, and what it tells."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.one, self.values = OneTensor(), Values({"seen": [0]})
        self.told: list[int] = []
        self.checked: list[int] = []
        self.checkpointer = Checkpointer(
            folder,
            Checkpoint(**config),
            tensors={"model": self.one},
            values={"train": self.values},
            facts={"flavor": "small"},
            check=lambda manifest: self.checked.append(manifest["step"]),
            tell=self.told.append,
        )


def lineages(folder: Path) -> None:
    first, second = Small(folder), Small(folder)
    first.checkpointer.save(1, wait=True)
    assert (first.told, first.checkpointer.parent) == ([1], None)
    assert Small(folder, enable=False).checkpointer.load_latest() is None
    assert second.checkpointer.load_latest() == 1
    assert second.checked == [1]
    second.checkpointer.save(2, wait=True)
    begun, resumed = (read_manifest(folder / f"step-0000000{step}") for step in (1, 2))
    names = [first.checkpointer.attempt, second.checkpointer.attempt]
    assert [begun["attempt"], resumed["attempt"]] == names
    assert second.checkpointer.parent == names[0] != names[1]
    assert begun["run"] == resumed["run"] == names[0]
    parent = {"run": names[0], "attempt": names[0], "step": 1}
    assert (begun["parent"], resumed["parent"]) == (None, parent)
    assert {(m["world_size"], m["flavor"]) for m in (begun, resumed)} == {(1, "small")}
    # A rollback is an attempt of its own, and may leave values as they are.
    second.values.state = {"seen": [9]}
    assert second.checkpointer.load_latest(leave={"train"}) == 2
    assert second.values.state == {"seen": [9]}
    assert second.checkpointer.parent == names[1] != second.checkpointer.attempt
    other = Small(folder / "other", initial_load_path=str(folder / "step-00000002"))
    other.checkpointer.load_initial(other.one)
    other.checkpointer.save(1, wait=True)
    taken = read_manifest(folder / "other" / "step-00000001")
    assert taken["run"] == taken["attempt"] == other.checkpointer.attempt
    assert taken["parent"] == {"run": names[0], "attempt": names[1], "step": 2}


def test_a_checkpoint_says_what_it_came_from(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(lineages, 1, tmp_path)


def load_into_float64(folder: Path) -> None:
    saved = Small(folder)
    saved.checkpointer.save(1, wait=True)
    resumed = Small(folder)
    begun = Small(folder / "other", initial_load_path=str(folder / "step-00000001"))
    for small in (resumed, begun):
        small.one.tensors = {"weight": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ConfigError, match=r"its model\.weight is float32"):
        resumed.checkpointer.load_latest()
    begun.checkpointer.load_initial(begun.one)
    assert torch.equal(begun.one.tensors["weight"], saved.one.tensors["weight"].double())


def test_weights_alone_may_change_their_dtype(ranks: RankPool, tmp_path: Path) -> None:
    """Not those of a run that goes on."""
    ranks.run(load_into_float64, 1, tmp_path)


def change_while_it_is_written(folder: Path, mode: str) -> None:
    small = Small(folder, async_mode=mode)

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return write_parts(*args)

    with patch("checkpoint.checkpointer.write_parts", slow):
        small.checkpointer.save(1, wait=False)
        small.one.tensors["weight"] += 1
        small.values.state["seen"][0] = 1
        # It finishes the last one.
        small.checkpointer.save(2, wait=True)
    assert small.told == [1, 2]
    for step in (2, 1):
        assert small.checkpointer.load_latest() == step
        assert small.one.tensors["weight"].tolist() == [step - 1.0, step, step + 1.0]
        assert small.values.state == {"seen": [step - 1]}
        shutil.rmtree(folder / f"step-0000000{step}")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_what_was_there(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    ranks.run(change_while_it_is_written, 1, tmp_path, mode)
