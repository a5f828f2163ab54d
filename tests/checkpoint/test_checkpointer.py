"""Checkpoints load bit for bit on any mesh; an error of one rank is raised on all ranks."""

import json
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import chdir, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from checkpoint.checkpoint_dir import STATE_FILE, purge
from checkpoint.checkpointer import Checkpointer, merge
from checkpoint.manifest import MANIFEST_FILE, read_manifest, sizes_of
from checkpoint.states import ModelState
from checkpoint.tensor_files import Reader, write_tensor_file
from checkpoint.tensor_index import TensorRecord, index_content, read_index
from config import ConfigError
from config.job_config import Checkpoint, Optimizer
from models import TransformerArgs
from runtime.log import logger
from runtime.run_folder import list_checkpoints
from tests.lib.durability import assert_durable, recorded_durability
from tests.lib.layouts import REPLICATE, TP, Layout
from tests.lib.ranks import GROUP_TIMEOUT, RankPool
from tests.lib.small_run import ARGS, Run, Values

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
    """Step, values and digests of a new run that loads from each folder."""
    found = []
    for folder in folders:
        run = Run(folder, layout)
        step = run.checkpointer.load_latest()
        found.append((step, run.values.state, run.digests()))
    return found


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, str]]:
    """Folders of checkpoints, one for each layout, and the digests of the last checkpoint."""
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
    record_result: Callable[[str], None],
) -> None:
    want = [(2, {"step": 2}, digests) for digests in saved.values()]
    for found in ranks.run(load_runs, layout.world_size, list(saved), layout):
        assert found == want
    record_result(f"{layout} from {len(saved)} meshes")


def digests_of_steps(
    folder: Path, layout: Layout, optimizer: Optimizer, dtype: str
) -> list[dict[str, str]]:
    """Digests after step 2, loaded if it was saved before, and after step 3."""
    run = Run(folder, layout, optimizer=optimizer, dtype=dtype)
    if run.checkpointer.load_latest() is None:
        run.save(1, 2)
    found = [run.digests()]
    run.save(3)
    return [*found, run.digests()]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")],
)
def test_optimizer_resumes_bit_for_bit(
    ranks: RankPool, tmp_path: Path, name: str, dtype: str, state_dtype: str
) -> None:
    optimizer = Optimizer(name=name, state_dtype=state_dtype)
    [want, _] = ranks.run(digests_of_steps, 2, tmp_path, TWO, optimizer, dtype)
    for layout in (TWO, Layout(1), Layout(4, {TP: 2})):
        shutil.rmtree(tmp_path / "step-00000003")
        run = (tmp_path, layout, optimizer, dtype)
        for found in ranks.run(digests_of_steps, layout.world_size, *run):
            assert found[0] == want[0]
            # On another mesh, kernels may round differently at the end of a shard.
            assert found[1] == want[1] or layout != TWO


def resume_without_state(folder: Path, optimizer: Optimizer, layout: Layout) -> None:
    """Save before the first update, and with a parameter that no update changes; load each."""
    unused, run = "layers.0.attention.wq.weight", Run(folder, layout, optimizer=optimizer)
    first = run.digests()
    run.checkpointer.save(1, wait=True)
    loaded = Run(folder, layout, optimizer=optimizer)
    assert loaded.checkpointer.load_latest() == 1
    assert loaded.digests() == first
    for each in (loaded, run):
        each.save(2, unused=unused)
    want = run.digests()
    assert loaded.digests() == want
    assert len(want) > len(first)
    assert not any(name.startswith(f"{unused}.") for name in want)
    again = Run(folder, layout, optimizer=optimizer)
    # One that has the state, as at a rollback, and one that does not.
    run.save(3)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-00000003")
    for each in (run, again):
        assert each.checkpointer.load_latest() == 2
        assert each.digests() == want


@pytest.mark.parametrize("name", ["adamw", "muon", "torch.optim:AdamW"])
def test_state_that_is_not_saved_stays_absent(ranks: RankPool, tmp_path: Path, name: str) -> None:
    optimizer = Optimizer(name=name)
    ranks.run(resume_without_state, 2, tmp_path, optimizer, TWO)
    assert set(ranks.run(load_step, 4, tmp_path, optimizer, Layout(4, {TP: 2}))) == {2}


def load_step(folder: Path, optimizer: Optimizer, layout: Layout) -> int | None:
    return Run(folder, layout, optimizer=optimizer).checkpointer.load_latest()


def resume_with_other_options(folder: Path) -> None:
    Run(folder, TWO, optimizer=Optimizer(weight_decay=0.1, beta2=0.95)).save(1)
    resumed = Run(folder, TWO, optimizer=Optimizer(weight_decay=0.3, beta2=0.99))
    assert resumed.checkpointer.load_latest() == 1
    groups = resumed.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}
    assert {group["betas"][1] for group in groups} == {0.99}


def test_optimizer_options_come_from_the_config(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(resume_with_other_options, 2, tmp_path)


def save_and_resume(folder: Path, keep: int, steps: list[int], **config: int) -> int | None:
    run = Run(folder, TWO, keep_latest_k=keep, **config)
    run.save(*steps)
    run.checkpointer.close()
    return Run(folder, TWO).checkpointer.load_latest()


@pytest.mark.parametrize(("keep", "kept"), [(1, {30}), (2, {2, 30}), (0, {1, 2, 30})])
def test_retention_keeps_newest_and_foreign_folders(
    ranks: RankPool, tmp_path: Path, keep: int, kept: set[int]
) -> None:
    for name in FOREIGN | LEFTOVERS:
        (tmp_path / name / "inside").mkdir(parents=True)
    assert set(ranks.run(save_and_resume, 2, tmp_path, keep, [1, 2, 30])) == {30}
    assert names(tmp_path) == {f"step-{step:08d}" for step in kept} | FOREIGN


def test_steps_of_nine_digits_sort_as_newer(ranks: RankPool, tmp_path: Path) -> None:
    assert set(ranks.run(save_and_resume, 2, tmp_path, 1, [99_999_999, 100_000_000])) == {10**8}
    assert names(tmp_path) == {"step-100000000"}


def test_checkpoints_are_readable_by_owner_only(ranks: RankPool, tmp_path: Path) -> None:
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


def test_saving_a_step_again_overwrites_nothing(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(save_twice, 2, tmp_path)[0]
    assert first != second
    [replaced] = tmp_path.glob("replaced-step-00000001-*")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    replaced.rename(elsewhere / "step-00000001")
    found = ranks.run(load_runs, 2, [tmp_path, elsewhere], TWO)[0]
    assert [digests for _, _, digests in found] == [second, first]


def begin_and_finish(run: Run, step: int) -> str:
    """Save; return the logged error, if any."""
    run.checkpointer.begin(step)
    with patch.object(logger, "error") as alarm:
        folder = run.checkpointer.finish()
    assert (folder is None) == alarm.called
    return str(alarm.call_args)


def save_values(folder: Path, values: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Save each rank's values; return the error and the values that then load."""
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


def test_save_fails_if_ranks_disagree(ranks: RankPool, tmp_path: Path) -> None:
    for error, found in ranks.run(save_values, 2, tmp_path, [{"step": 1}, {"step": 2}]):
        assert "ranks disagree on the state 'step': 1 and 2" in error
        assert found == {}


def save_non_tensor(folder: Path) -> str:
    run = Run(folder, TWO)
    state = {"number": 5}
    with (
        patch.object(ModelState, "state_dict", lambda self: state),
        patch.object(logger, "error") as alarm,
    ):
        run.checkpointer.begin(1)
    return str(alarm.call_args)


def test_non_tensor_state_is_rejected(ranks: RankPool, tmp_path: Path) -> None:
    for error in ranks.run(save_non_tensor, 2, tmp_path):
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
def test_merge_error_names_the_key(first: dict[str, Any], second: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'key'"):
        merge(first, second)


def fail_on_one(folder: Path, rank: int, target: str) -> tuple[str, Loaded]:
    """Error on this rank while ``target`` fails on ``rank``, and what loads afterwards."""
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
        except BaseException as raised:  # DCP's CheckpointException is no Exception.
            error = str(raised)
    return error, load_runs([folder], TWO)[0]


@pytest.mark.parametrize(
    ("rank", "target", "step"),
    [
        (0, "pathlib.Path.mkdir", 1),
        (1, "os.fsync", 1),
        (1, "checkpoint.checkpointer.write_tensor_file", 1),
        (0, "checkpoint.checkpoint_dir.write_manifest", 1),
        (1, "checkpoint.checkpointer.read_index", 2),
        (0, "checkpoint.checkpointer.read_state", 2),
        (1, "checkpoint.tensor_files.Reader.read_data", 2),
    ],
)
def test_error_on_one_rank_is_raised_on_all(
    ranks: RankPool, tmp_path: Path, rank: int, target: str, step: int
) -> None:
    begin = time.monotonic()
    answers = ranks.run(fail_on_one, 2, tmp_path, rank, target)
    assert time.monotonic() - begin < GROUP_TIMEOUT.total_seconds() / 2
    for error, (found, values, _) in answers:
        assert "disk on fire" in error
        assert (found, values) == (step, {"step": step})


def load_initial(
    folder: Path, args: TransformerArgs, name: str = "step-00000002"
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Error of loading initial weights, and the digests before and after."""
    run = Run(folder / "none", TWO, args=args, initial_load_path=str(folder / name))
    before, error = run.digests(), ""
    try:
        run.checkpointer.load_initial(run.model_state)
    except ValueError as raised:
        error = str(raised)
    return error, before, run.digests()


def test_initial_load_takes_weights_only(ranks: RankPool, tmp_path: Path) -> None:
    digests = ranks.run(save_run, 2, tmp_path, TWO)[0]
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert not error
        assert after == {fqn: digests[fqn] for fqn in before}
        assert after != before


def test_damaged_initial_weights_are_a_config_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_run, 2, tmp_path, TWO)
    (tmp_path / "step-00000002" / STATE_FILE).write_text("{}")
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert error.startswith("checkpoint.initial_load_path: ")
        assert after == before
    (tmp_path / "step-00000002" / MANIFEST_FILE).unlink()
    for error, _, _ in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert "step-00000002 has no manifest.json (Shardloom), nor config.json (Hugging" in error


def test_run_folder_in_place_of_initial_weights_is_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_run, 2, tmp_path / "run" / "checkpoints", TWO)
    for error, _, _ in ranks.run(load_initial, 2, tmp_path, ARGS, "run"):
        assert error.endswith(f", such as {tmp_path}/run/checkpoints/step-00000002")


def load_on_local_disks(disks: list[Path]) -> tuple[list[str], bool]:
    """Errors on resume and of initial weights, and whether nothing was loaded."""
    with chdir(disks[dist.get_rank()]):
        run = Run(Path(), TWO, initial_load_path="step-00000002")
        before, errors = run.digests(), []
        for load in (
            run.checkpointer.load_latest,
            lambda: run.checkpointer.load_initial(run.model_state),
        ):
            with pytest.raises(ConfigError) as raised:
                load()
            errors.append(str(raised.value))
        return errors, run.digests() == before


def test_ranks_that_find_different_checkpoints_load_none(ranks: RankPool, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
        ranks.run(save_run, 2, disk, TWO)
    for errors, is_untouched in ranks.run(load_on_local_disks, 2, disks):
        assert is_untouched
        assert len(errors) == 2
        for error in errors:
            assert error.startswith("checkpoint step-00000002 must be equal on all ranks: ")
            assert "on rank 1 (" in error
    assert {path.name for path in disks[0].iterdir()} == {path.name for path in disks[1].iterdir()}


def test_weights_of_a_deeper_model_are_rejected(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_run, 2, tmp_path, TWO, replace(ARGS, n_layers=2))
    for error, before, after in ranks.run(load_initial, 2, tmp_path, ARGS):
        assert (
            "does not match the model: unexpected tensor model.layers.1.attention.k_norm.weight"
            in error
        )
        assert after == before


def due_and_overdue(folder: Path) -> list[tuple[list[int], list[int]]]:
    """Steps at which a save is due, and overdue if none succeeded, for each config."""
    found = []
    for keys in ({}, {"max_unsaved_steps": 5}, {"enable": False}):
        checkpointer = Checkpointer(
            folder, Checkpoint(interval=4, **keys), tensor_states={}, json_states={}, metadata={},
            validate=lambda _: None,
        )  # fmt: skip
        predicates = checkpointer.is_due, checkpointer.is_overdue
        found.append(tuple([step for step in range(1, 15) if test(step)] for test in predicates))
    return found


def test_save_is_due_each_interval_and_overdue_after_three(ranks: RankPool, tmp_path: Path) -> None:
    due = [4, 8, 12]
    want = [(due, [13, 14]), (due, list(range(6, 15))), ([], [])]
    assert ranks.run(due_and_overdue, 1, tmp_path) == [want]


class OneTensor:
    """``TensorState`` of one tensor: on several ranks, some have nothing to write."""

    def __init__(self) -> None:
        self.tensors = {"weight": torch.arange(3.0)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_targets(self, saved: Collection[str]) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.tensors = state_dict


def save_one_tensor(folder: Path) -> tuple[int, list[float]]:
    one = OneTensor()
    checkpointer = Checkpointer(
        folder,
        Checkpoint(),
        tensor_states={"model": one},
        json_states={},
        metadata={},
        validate=lambda _: None,
    )
    for step in (1, 2):
        one.tensors["weight"] += 1
        checkpointer.save(step, wait=True)
    one.tensors["weight"].zero_()
    assert checkpointer.load_latest() == 2
    checkpointer.close()
    return checkpointer.newest_step, one.tensors["weight"].tolist()


def test_ranks_without_shards_can_save(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(save_one_tensor, 3, tmp_path) == [(2, [2.0, 3.0, 4.0])] * 3


class Small:
    """Checkpointer of one tensor and one value that records its callbacks."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.one, self.values = OneTensor(), Values({"seen": [0]})
        self.saved: list[int] = []
        self.validated: list[int] = []
        self.checkpointer = Checkpointer(
            folder,
            Checkpoint(**config),
            tensor_states={"model": self.one},
            json_states={"train": self.values},
            metadata={"flavor": "small"},
            validate=lambda manifest: self.validated.append(manifest["step"]),
            on_saved=self.saved.append,
        )


def check_lineages(folder: Path) -> None:
    first, second = Small(folder), Small(folder)
    first.checkpointer.save(1, wait=True)
    assert (first.saved, first.checkpointer.parent_attempt) == ([1], None)
    assert Small(folder / "new", enable=False).checkpointer.load_latest() is None
    # It would begin again, in the files of the run.
    with pytest.raises(ConfigError, match=r"checkpoint\.enable: false, but the run has"):
        Small(folder, enable=False).checkpointer.load_latest()
    (folder / "step-00000001").rename(folder / "step-00000007")
    with pytest.raises(ConfigError, match="step-00000007 has the checkpoint of step 1: rename it"):
        second.checkpointer.load_latest()
    (folder / "step-00000007").rename(folder / "step-00000001")
    assert second.checkpointer.load_latest() == 1
    assert second.validated == [1]
    second.checkpointer.save(2, wait=True)
    begun, resumed = (read_manifest(folder / f"step-0000000{step}") for step in (1, 2))
    names = [first.checkpointer.attempt, second.checkpointer.attempt]
    assert [begun["attempt"], resumed["attempt"]] == names
    assert second.checkpointer.parent_attempt == names[0] != names[1]
    assert begun["run"] == resumed["run"] == names[0]
    parent = {"run": names[0], "attempt": names[0], "step": 1}
    assert (begun["parent"], resumed["parent"]) == (None, parent)
    assert {(m["world_size"], m["flavor"]) for m in (begun, resumed)} == {(1, "small")}
    # A rollback begins a new attempt, and can skip values.
    second.values.state = {"seen": [9]}
    assert second.checkpointer.load_latest(skip={"train"}) == 2
    assert second.values.state == {"seen": [9]}
    assert second.checkpointer.parent_attempt == names[1] != second.checkpointer.attempt
    other = Small(folder / "other", initial_load_path=str(folder / "step-00000002"))
    other.checkpointer.load_initial(other.one)
    other.checkpointer.save(1, wait=True)
    taken = read_manifest(folder / "other" / "step-00000001")
    assert taken["run"] == taken["attempt"] == other.checkpointer.attempt
    assert taken["parent"] == {"run": names[0], "attempt": names[1], "step": 2}


def test_manifest_records_the_lineage(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_lineages, 1, tmp_path)


def load_during_retention(folder: Path) -> list[str]:
    """Names of the checkpoints after a load that began while one was being deleted."""
    small = Small(folder, keep_latest_k=1)

    def slow(*args: Any, **keys: Any) -> None:
        time.sleep(0.3)
        purge(*args, **keys)

    with patch("checkpoint.checkpointer.purge", slow):
        for step in (1, 2):
            small.checkpointer.save(step, wait=True)
        small.checkpointer.load_latest()
        return [path.name for path in list_checkpoints(folder)]


def test_load_waits_for_retention(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(load_during_retention, 1, tmp_path) == [["step-00000002"]]


def close_during_verification(folder: Path) -> list[str]:
    """Names of the checkpoints after a run that ended while retention verified one."""
    first, second = Small(folder), Small(folder, keep_latest_k=3)
    for step in (1, 2):
        first.checkpointer.save(step, wait=True)
    second.checkpointer.load_latest()

    def verify_for_hours(path: Path, *, raise_if_stopped: Callable[[], None]) -> list[str]:
        while True:
            raise_if_stopped()
            time.sleep(0.01)

    with patch("checkpoint.checkpoint_dir.verify_checkpoint", verify_for_hours):
        second.checkpointer.save(3, wait=True)
        second.checkpointer.close()
    return [path.name for path in list_checkpoints(folder)]


def test_end_of_a_run_does_not_wait_for_verification(ranks: RankPool, tmp_path: Path) -> None:
    names = [f"step-0000000{step}" for step in (3, 2, 1)]
    assert ranks.run(close_during_verification, 1, tmp_path) == [names]


def save_durably(folder: Path) -> None:
    small = Small(folder)
    with recorded_durability() as calls:
        small.checkpointer.save(1, wait=True)
    assert_durable(calls, folder / "step-00000001")


def test_checkpoint_survives_a_power_cut(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_durably, 1, tmp_path)


def load_into_float64(folder: Path) -> None:
    saved = Small(folder)
    saved.checkpointer.save(1, wait=True)
    resumed = Small(folder)
    begun = Small(folder / "other", initial_load_path=str(folder / "step-00000001"))
    for small in (resumed, begun):
        small.one.tensors = {"weight": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ConfigError, match=r"tensor model\.weight is float32"):
        resumed.checkpointer.load_latest()
    begun.checkpointer.load_initial(begun.one)
    assert torch.equal(begun.one.tensors["weight"], saved.one.tensors["weight"].double())


def test_initial_load_converts_dtype_but_resume_rejects_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(load_into_float64, 1, tmp_path)


def change_state_during_write(folder: Path, mode: str) -> None:
    small = Small(folder, async_mode=mode)

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return write_tensor_file(*args)

    with patch("checkpoint.checkpointer.write_tensor_file", slow):
        small.checkpointer.save(1, wait=False)
        small.one.tensors["weight"] += 1
        small.values.state["seen"][0] = 1
        # Finishes the previous save first.
        small.checkpointer.save(2, wait=True)
    assert small.saved == [1, 2]
    for step in (2, 1):
        assert small.checkpointer.load_latest() == step
        assert small.one.tensors["weight"].tolist() == [step - 1.0, step, step + 1.0]
        assert small.values.state == {"seen": [step - 1]}
        shutil.rmtree(folder / f"step-0000000{step}")


def shards_looked_at(folder: Path) -> tuple[int, int]:
    """Largest number of shards of a tensor, in the checkpoint and as DCP sees it on this rank."""
    Run(folder, TWO).save(1)
    with patch("checkpoint.tensor_files.Reader", wraps=Reader) as reader:
        Run(folder, TWO).checkpointer.load_latest()
    needed: dict[str, TensorRecord] = reader.call_args.args[1]
    checkpoint = folder / "step-00000001"
    index = read_index(checkpoint, sizes_of(read_manifest(checkpoint)))
    assert index.keys() == needed.keys()
    longest, shortest = (
        max(len(record.shards) for record in records.values()) for records in (index, needed)
    )
    return longest, shortest


def test_a_rank_looks_only_at_shards_that_it_reads(ranks: RankPool, tmp_path: Path) -> None:
    """DCP's plan takes longer for each shard, and large runs have millions."""
    assert ranks.run(shards_looked_at, 2, tmp_path) == [(2, 1), (2, 1)]


def count_plans(folder: Path) -> None:
    small = Small(folder)
    with patch("checkpoint.write_plan.index_content", wraps=index_content) as indexed:
        for step in (1, 2):
            small.checkpointer.save(step, wait=True)
    assert small.saved == [1, 2]
    assert indexed.call_count == (dist.get_rank() == 0)


def test_index_of_tensors_is_made_once(ranks: RankPool, tmp_path: Path) -> None:
    """Its time grows with the shards of all ranks, and all ranks would wait for it."""
    ranks.run(count_plans, 2, tmp_path)


def change_a_size(folder: Path) -> None:
    small = Small(folder)
    small.checkpointer.save(1, wait=True)
    small.one.tensors["weight"] = torch.ones(4)
    with patch.object(logger, "error") as alarm:
        small.checkpointer.save(2, wait=True)
    assert small.saved == [1]
    assert "weight: its size changed since writes were planned" in str(alarm.call_args)


def test_changed_size_fails_the_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(change_a_size, 1, tmp_path)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_save_captures_state_at_begin(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    ranks.run(change_state_during_write, 1, tmp_path, mode)
