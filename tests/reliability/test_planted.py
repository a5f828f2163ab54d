"""Faults planted in ranks that train: what the whole program makes of them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forward_backward
import train
from checkpoint.checkpointer import Checkpointer
from data.packing import Concatenated, Sequence
from data.tokenizer import Tokenizer
from optim.spikes import SpikeGuard
from runtime import exit_codes
from tests.reliability.forked import checkpoints, codes, curve, log, run, started, tensors
from tests.test_train import records
from tools.check_ledger import replay

STEPS = {
    "training.steps": "8",
    "training.dtype": "float32",
    "checkpoint.interval": "2",
    "checkpoint.keep_latest_k": "0",
    "lr_scheduler.total_steps": "12",
}


def not_finite_in_step_5() -> None:
    """The loss of rank 1, whose gradients are NaN then."""
    if os.environ["RANK"] == "0":
        return
    original, calls = forward_backward.cross_entropy_sum, 0

    def cross_entropy_sum(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        # Two microbatches a step.
        return original(*args) * (float("nan") if calls == 9 else 1.0)

    forward_backward.cross_entropy_sum = cross_entropy_sum


def spike_at_step_5() -> None:
    """All ranks see one, once."""
    original = SpikeGuard.is_spike

    def is_spike(self: SpikeGuard, step: int, **values: float) -> bool:
        if step == 5 and self.rollbacks == 0:
            return True
        return original(self, step, **values)

    SpikeGuard.is_spike = is_spike  # type: ignore[method-assign]


def spike_at_step_11() -> None:
    SpikeGuard.is_spike = lambda self, step, **_: step == 11  # type: ignore[method-assign]


def spikes_in_the_first_steps() -> None:
    SpikeGuard.is_spike = lambda self, step, **_: step < 5  # type: ignore[method-assign]


def foreign_ids() -> None:
    """In rank 1's third document."""
    if os.environ["RANK"] == "1":
        original, calls = Tokenizer.encode_document, 0

        def encode(self: Tokenizer, text: str) -> Any:
            nonlocal calls
            calls += 1
            return original(self, text) + (100_000 if calls == 3 else 0)

        Tokenizer.encode_document = encode  # type: ignore[method-assign]


def unreadable_file() -> None:
    """For rank 1, after a while."""
    if os.environ["RANK"] == "1":
        original, calls = Concatenated.read, 0

        def read(self: Concatenated, sequence: Sequence) -> Any:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise OSError("books/1.txt: stale file handle")
            return original(self, sequence)

        Concatenated.read = read  # type: ignore[method-assign]


def flipped_weight() -> None:
    """A bit of rank 1, after three steps."""
    if os.environ["RANK"] == "1":
        original, calls = train.clip_grad_norm_, 0

        def clip(parameters: list[torch.nn.Parameter], *args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 3:
                with torch.no_grad():
                    parameters[4].to_local().view(-1)[7] += 1e-3
            return original(parameters, *args, **kwargs)

        train.clip_grad_norm_ = clip


def no_room_after_step_2() -> None:
    """For checkpoints, on rank 0, which makes their folders."""
    original = Checkpointer._open_scratch

    def open_scratch(self: Checkpointer, step: int) -> Path:
        if step > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, step)

    Checkpointer._open_scratch = open_scratch  # type: ignore[method-assign]


def end_with(plant: Callable[[], None], folder: Path, want: set[int], **keys: str) -> None:
    with started(folder, 2, plant=plant, **keys) as processes:
        assert codes(processes) == want, log(folder)


@pytest.mark.row(20, "What is not finite never enters weights or a checkpoint")
def test_what_is_not_finite_ends_the_run_or_is_skipped(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    keys = STEPS | {"metrics.log_freq": "3"}
    stopped, skipped = tmp_path / "stopped", tmp_path / "skipped"
    end_with(not_finite_in_step_5, stopped, {exit_codes.DO_NOT_REQUEUE}, **keys)
    assert "step 5: the loss is not finite on some rank" in log(stopped)
    assert [path.name for path in checkpoints(stopped)] == ["step-00000004", "step-00000002"]
    skips = {"numerics.on_nonfinite": "skip"}
    end_with(not_finite_in_step_5, skipped, {exit_codes.DONE}, **keys, **skips)
    for path in (*checkpoints(stopped), *checkpoints(skipped)):
        assert all(tensor.isfinite().all() for tensor in tensors(path).values())
    assert records(skipped)[-1]["skipped_steps"] == 1
    # Adam's count of updates is one short of the steps.
    last = tensors(checkpoints(skipped)[0])
    assert {t.item() for fqn, t in last.items() if fqn.endswith(".step")} == {7.0}
    seen("the whole program: stop ends with 93 and keeps step 4; skip goes on, 1 step left out")


def test_a_spike_is_rolled_back_and_its_data_left_out(tmp_path: Path) -> None:
    keys = STEPS | {"numerics.on_spike": "rollback", "metrics.enable_ledger": "true"}
    plain, rolled = tmp_path / "plain", tmp_path / "rolled"
    run(plain, 2, **keys)
    end_with(spike_at_step_5, rolled, {exit_codes.DONE}, **keys)
    assert "went back from step 5 to step 4" in log(rolled)
    lineage = replay(rolled / "debug_model")
    assert not lineage.violations
    assert lineage.left_out == {4: 1}
    # The same up to step 4, then the same weights and other data.
    assert [curve(rolled)[n] == curve(plain)[n] for n in range(1, 9)] == [True] * 4 + [False] * 4
    # A run that resumes knows that it went back once, and what it left out.
    run(rolled, 2, **keys | {"training.steps": "10"})
    lineage = replay(rolled / "debug_model")
    assert not lineage.violations
    assert (lineage.left_out, len(lineage.steps)) == ({4: 1}, 10)
    # So that one more may be too many, and what it made is not saved.
    keys |= {"numerics.max_rollbacks": "1", "training.steps": "12"}
    end_with(spike_at_step_11, rolled, {exit_codes.DO_NOT_REQUEUE}, **keys)
    assert "stopped by too many spikes after 11" in log(rolled)
    assert checkpoints(rolled)[0].name == "step-00000010"


def test_without_a_checkpoint_spikes_are_no_rollbacks(tmp_path: Path) -> None:
    keys = STEPS | {"numerics.on_spike": "rollback", "numerics.max_rollbacks": "1"}
    keys |= {"training.steps": "6", "checkpoint.interval": "100"}
    end_with(spikes_in_the_first_steps, tmp_path, {exit_codes.DONE}, **keys)
    # On each of two ranks.
    assert log(tmp_path).count("no checkpoint to go back to") == 2 * 4
    assert list(curve(tmp_path)) == [*range(1, 7)]


@pytest.mark.row(19, "No id outside the vocabulary reaches the model")
def test_a_foreign_id_is_one_error_on_every_rank(
    tmp_path: Path, seen: Callable[[str], None]
) -> None:
    for name, keys in (("fsdp", {}), ("tp", {"parallelism.tensor_parallel_degree": "2"})):
        end_with(foreign_ids, tmp_path / name, {exit_codes.BAD_CONFIG}, **STEPS, **keys)
        lines = [path.read_text().splitlines()[-1] for path in (tmp_path / name).glob("rank-*")]
        assert "rank 1: ValueError: data: " in lines[0]
        assert "model.vocab_size is 320" in lines[0]
        assert lines[0] == lines[1]
    seen("the whole program, with tensor parallel and without: one message, exit code 2")


def test_a_file_that_cannot_be_read_now_is_worth_another_try(tmp_path: Path) -> None:
    end_with(unreadable_file, tmp_path, {exit_codes.FAILED}, **STEPS)
    for path in tmp_path.glob("rank-*.log"):
        assert "rank 1: OSError: books/1.txt: stale file handle" in path.read_text()


@pytest.mark.row(21, "Replicas that differ are caught")
def test_a_replica_that_drifts_ends_the_run(tmp_path: Path, seen: Callable[[str], None]) -> None:
    keys = {"parallelism.data_parallel": "ddp", "numerics.replica_check_freq": "2"}
    end_with(flipped_weight, tmp_path, {exit_codes.FAILED}, **STEPS, **keys)
    assert "replicas along dp_replicate differ, first in " in log(tmp_path)
    assert checkpoints(tmp_path)[0].name == "step-00000002"
    seen("the whole program: a weight changed in step 3, found in step 4")


def test_a_run_ends_before_more_is_unsaved_than_may_be_lost(tmp_path: Path) -> None:
    keys = STEPS | {"checkpoint.max_unsaved_steps": "3"}
    end_with(no_room_after_step_2, tmp_path, {exit_codes.FAILED}, **keys)
    assert "ALARM: step 4 was not saved (newest checkpoint: 2)" in log(tmp_path)
    assert "stopped by checkpoints that could not be saved after 6" in log(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002"]
    assert list(curve(tmp_path)) == [*range(1, 7)]
    # Where there is room again, the same command goes on from there.
    run(tmp_path, 2, **keys)
    assert checkpoints(tmp_path)[0].name == "step-00000008"
