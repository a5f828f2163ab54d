"""Faults planted in training ranks, and the reaction of the whole program."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import forward_backward
import train_step
from checkpoint.checkpointer import Checkpointer
from data.mixture import RowStream
from data.packing import ConcatPacker, PackedSequence
from metrics.history import split_history
from metrics.ledger import Ledger
from optim.spikes import LossSpikeDetector
from runtime import exit_codes
from runtime.dtensor import to_local
from runtime.log import logger
from runtime.run_folder import step_of
from tests.lib.forked import checkpoints, codes, log, run, spike_at_step_5, started, tensors
from tests.lib.launch import curve, records
from tools.check_ledger import replay
from tools.status import read_status

STEPS = {
    "training.steps": "8",
    "training.dtype": "float32",
    "training.global_batch_size": "4",
    "checkpoint.interval": "2",
    "checkpoint.keep_latest_k": "0",
    "lr_scheduler.total_steps": "12",
}


def nonfinite_loss_in_step_5() -> None:
    """Make the loss of rank 1, and so its gradients, NaN in step 5."""
    if os.environ["RANK"] == "0":
        return
    original, calls = forward_backward.cross_entropy_sum, 0

    def cross_entropy_sum(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return original(*args) * (float("nan") if calls == 5 else 1.0)

    forward_backward.cross_entropy_sum = cross_entropy_sum


def preempted_in_a_nonfinite_step() -> None:
    """Make a loss of step 2 NaN, and send SIGTERM to the only rank."""
    original, calls = forward_backward.cross_entropy_sum, 0

    def cross_entropy_sum(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        # Two microbatches per step.
        if calls != 3:
            return original(*args)
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args) * float("nan")

    forward_backward.cross_entropy_sum = cross_entropy_sum


def spike_at_step_11() -> None:
    LossSpikeDetector.is_spike = lambda self, step, **_: step == 11  # type: ignore[method-assign]


def preempted_in_the_spike_at_step_5() -> None:
    """Report a spike in step 5, and send SIGTERM to the only rank."""

    def is_spike(self: LossSpikeDetector, step: int, **values: float) -> bool:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return step == 5

    LossSpikeDetector.is_spike = is_spike  # type: ignore[method-assign]


def spikes_in_the_first_steps() -> None:
    LossSpikeDetector.is_spike = lambda self, step, **_: step < 5  # type: ignore[method-assign]


def invalid_ids() -> None:
    """Make the ids of rank 1's second document invalid."""
    if os.environ["RANK"] == "1":
        original, calls = RowStream._encode, 0

        def encode(self: RowStream, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(self, *arguments) + (100_000 if calls == 2 else 0)

        RowStream._encode = encode  # type: ignore[method-assign]


def unreadable_file() -> None:
    """Raise ``OSError`` on rank 1 in the 12th read."""
    if os.environ["RANK"] == "1":
        original, calls = ConcatPacker.read, 0

        def read(self: ConcatPacker, sequence: PackedSequence) -> Any:
            nonlocal calls
            calls += 1
            if calls == 12:
                raise OSError("books/1.txt: stale file handle")
            return original(self, sequence)

        ConcatPacker.read = read  # type: ignore[method-assign]


def flipped_weight() -> None:
    """Change a weight of rank 1 in step 3."""
    if os.environ["RANK"] == "1":
        original, calls = train_step.clip_grad_norm_, 0

        def clip(parameters: list[torch.nn.Parameter], *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                with torch.no_grad():
                    to_local(parameters[4]).view(-1)[7] += 1e-3
            return original(parameters, *args, **kwargs)

        train_step.clip_grad_norm_ = clip


def log_syncs_of_the_ledger() -> None:
    original = Ledger.sync

    def sync(self: Ledger) -> None:
        original(self)
        logger.info("ledger: synced")

    Ledger.sync = sync  # type: ignore[method-assign]


def disk_full_after_step_2() -> None:
    """Raise ENOSPC on rank 0, which creates the checkpoint folders."""
    original = Checkpointer._open_scratch

    def open_scratch(self: Checkpointer, step: int) -> Path:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, step)

    Checkpointer._open_scratch = open_scratch  # type: ignore[method-assign]


def expect_exit(plant: Callable[[], None], folder: Path, want: set[int], **keys: str) -> None:
    with started(folder, 2, plant=plant, **keys) as processes:
        assert codes(processes) == want, log(folder)


@pytest.mark.row(20, "What is not finite never enters weights or a checkpoint")
def test_nonfinite_loss_stops_the_run_or_is_skipped(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    # Step 6 is saved, but not logged.
    keys = STEPS | {"metrics.log_freq": "100"}
    stopped, skipped = tmp_path / "stopped", tmp_path / "skipped"
    expect_exit(nonfinite_loss_in_step_5, stopped, {exit_codes.DO_NOT_REQUEUE}, **keys)
    assert "step 5: the loss is not finite on some rank" in log(stopped)
    assert [path.name for path in checkpoints(stopped)] == ["step-00000004", "step-00000002"]
    skips = {"numerics.on_nonfinite": "skip"}
    expect_exit(nonfinite_loss_in_step_5, skipped, {exit_codes.DONE}, **keys, **skips)
    for path in (*checkpoints(stopped), *checkpoints(skipped)):
        assert all(tensor.isfinite().all() for tensor in tensors(path).values())
    assert records(skipped)[-1]["skipped_steps"] == 1
    # Adam has made one update less than there are steps.
    last = tensors(checkpoints(skipped)[0])
    assert {t.item() for fqn, t in last.items() if fqn.endswith(".step")} == {7.0}
    # A resumed run knows of it.
    run(skipped, 2, **keys | skips | {"training.steps": "9"})
    assert records(skipped)[-1]["skipped_steps"] == 1
    record_result(
        "the whole program: stop ends with 93 and keeps step 4; skip goes on, 1 step skipped"
    )


def test_nonfinite_step_that_is_neither_logged_nor_saved_stops_the_run(tmp_path: Path) -> None:
    """The signal ends the run before the host has read that step's values."""
    keys = STEPS | {"metrics.log_freq": "100", "checkpoint.interval": "100"}
    with started(tmp_path, 1, plant=preempted_in_a_nonfinite_step, **keys) as processes:
        assert codes(processes) == {exit_codes.DO_NOT_REQUEUE}, log(tmp_path)
    assert "step 2: the loss is not finite on some rank" in log(tmp_path)
    assert list(curve(tmp_path)) == [1]
    assert not checkpoints(tmp_path)


def test_spike_is_rolled_back_and_its_data_skipped(tmp_path: Path) -> None:
    keys = STEPS | {"numerics.on_spike": "rollback", "metrics.enable_ledger": "true"}
    plain, rolled = tmp_path / "plain", tmp_path / "rolled"
    expect_exit(log_syncs_of_the_ledger, plain, {exit_codes.DONE}, **keys)
    # On each of two ranks, before each of four checkpoints.
    assert [log(plain).count(text) for text in ("ledger: synced", "checkpoint: saved")] == [8, 8]
    assert len(re.findall(r"checkpoint: saved \S+ in \d+\.\d s\n", log(plain))) == 8
    assert log(plain).index("ledger: synced") < log(plain).index("checkpoint: saved")
    expect_exit(spike_at_step_5, rolled, {exit_codes.DONE}, **keys)
    assert "rollback: from step 5 to step 4" in log(rolled)
    lineage = replay(rolled / "debug_model")
    assert not lineage.violations
    assert lineage.skipped == {4: 1}
    # Equal up to step 4, then the same weights with other data.
    assert [curve(rolled)[n] == curve(plain)[n] for n in range(1, 9)] == [True] * 4 + [False] * 4
    # A resumed run knows its rollbacks and the skipped data.
    run(rolled, 2, **keys | {"training.steps": "10"})
    lineage = replay(rolled / "debug_model")
    assert not lineage.violations
    assert (lineage.skipped, len(lineage.steps)) == ({4: 1}, 10)
    # One more rollback exceeds the limit, and the run stops without a save.
    keys |= {"numerics.max_rollbacks": "1", "training.steps": "12"}
    expect_exit(spike_at_step_11, rolled, {exit_codes.DO_NOT_REQUEUE}, **keys)
    assert "stopped by too many spikes after step 11" in log(rolled)
    assert checkpoints(rolled)[0].name == "step-00000010"


def test_trackers_and_samples_have_what_a_rollback_did_not_undo(tmp_path: Path) -> None:
    keys = STEPS | {"numerics.on_spike": "rollback", "checkpoint.interval": "3"}
    keys |= {"validation.enable": "true", "validation.freq": "2", "validation.sample_tokens": "1"}
    keys |= {"metrics.trackers": '["tensorboard"]'}
    expect_exit(spike_at_step_5, tmp_path, {exit_codes.DONE}, **keys)
    assert "rollback: from step 5 to step 3" in log(tmp_path)
    folder = tmp_path / "debug_model"
    validated = [0, 2, 4, 6, 8]
    samples = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in samples] == validated
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(1, 9)]
    assert [event.step for event in events.Scalars("validation_loss")] == validated


def test_run_that_ends_right_after_a_rollback_shows_no_undone_step(tmp_path: Path) -> None:
    """Nobody repeats the undone steps 4 and 5."""
    keys = STEPS | {"numerics.on_spike": "rollback", "checkpoint.interval": "3"}
    keys |= {"validation.enable": "true", "validation.freq": "4"}
    keys |= {"metrics.trackers": '["tensorboard"]'}
    with started(tmp_path, 1, plant=preempted_in_the_spike_at_step_5, **keys) as processes:
        assert codes(processes) == {exit_codes.PREEMPTED}, log(tmp_path)
    assert "rollback: from step 5 to step 3" in log(tmp_path)
    folder = tmp_path / "debug_model"
    history = split_history(records(tmp_path))
    assert [line["step"] for line in history.training] == [1, 2, 3]
    assert [line["step"] for line in history.other] == [0]
    assert [[line["step"] for line in lines] for lines in history.undone] == [[4, 5]]
    status = read_status(folder, time.time())
    assert (status.step, status.loss) == (3, curve(tmp_path)[3][0])
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("validation_loss")] == [0]


def test_spike_without_a_checkpoint_is_not_rolled_back(tmp_path: Path) -> None:
    keys = STEPS | {"numerics.on_spike": "rollback", "numerics.max_rollbacks": "1"}
    keys |= {"training.steps": "6", "checkpoint.interval": "100"}
    expect_exit(spikes_in_the_first_steps, tmp_path, {exit_codes.DONE}, **keys)
    # Logged in 4 steps on each of two ranks.
    assert log(tmp_path).count("there is no checkpoint to load") == 2 * 4
    assert list(curve(tmp_path)) == [*range(1, 7)]


@pytest.mark.row(19, "No id outside the vocabulary reaches the model")
def test_invalid_id_is_one_error_on_every_rank(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    for name, keys in (("fsdp", {}), ("tp", {"parallelism.tensor_parallel_degree": "2"})):
        expect_exit(invalid_ids, tmp_path / name, {exit_codes.BAD_CONFIG}, **STEPS, **keys)
        lines = [path.read_text().splitlines()[-1] for path in (tmp_path / name).glob("rank-*")]
        assert "rank 1: ValueError: data: " in lines[0]
        assert "model.vocab_size is 320" in lines[0]
        assert lines[0] == lines[1]
    record_result("the whole program, with tensor parallel and without: one message, exit code 2")


def test_unreadable_file_is_retried_by_a_restart(tmp_path: Path) -> None:
    expect_exit(unreadable_file, tmp_path, {exit_codes.FAILED}, **STEPS)
    for path in tmp_path.glob("rank-*.log"):
        assert "rank 1: OSError: books/1.txt: stale file handle" in path.read_text()
    # The steps before it are saved, although their checkpoint was not due.
    assert step_of(checkpoints(tmp_path)[0]) % int(STEPS["checkpoint.interval"])


@pytest.mark.row(21, "Replicas that differ are caught")
def test_diverged_replica_ends_the_run(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    keys = {"parallelism.data_parallel": "ddp", "numerics.replica_check_freq": "2"}
    expect_exit(flipped_weight, tmp_path, {exit_codes.FAILED}, **STEPS, **keys)
    assert "replicas along dp_replicate differ, first in " in log(tmp_path)
    assert checkpoints(tmp_path)[0].name == "step-00000002"
    record_result("the whole program: a weight changed in step 3, found in step 4")


def test_max_unsaved_steps_ends_the_run(tmp_path: Path) -> None:
    keys = STEPS | {"checkpoint.max_unsaved_steps": "3"}
    expect_exit(disk_full_after_step_2, tmp_path, {exit_codes.FAILED}, **keys)
    assert "ALARM: checkpoint save failed at step 4 (newest checkpoint: 2)" in log(tmp_path)
    assert "stopped by checkpoints that could not be saved after step 6" in log(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]
    assert list(curve(tmp_path)) == [*range(1, 7)]
    # With free space again, the same command resumes.
    run(tmp_path, 2, **keys)
    assert checkpoints(tmp_path)[0].name == "step-00000008"


def test_run_whose_last_save_fails_has_failed(tmp_path: Path) -> None:
    keys = STEPS | {"training.steps": "3"}
    with started(tmp_path, 1, plant=disk_full_after_step_2, **keys) as processes:
        assert codes(processes) == {exit_codes.FAILED}, log(tmp_path)
    assert "stopped by checkpoints that could not be saved after step 3" in log(tmp_path)
    assert not (tmp_path / "debug_model/control/outcome").exists()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]
