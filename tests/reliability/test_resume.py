"""A stopped or killed run that is started again equals an uninterrupted run."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import train_loop
from checkpoint.checkpoint_dir import verify_checkpoint
from checkpoint.manifest import read_manifest
from config import ConfigError, load_config
from resume import checkpoint_metadata, validate_resume
from run_spec import resolve
from runtime import exit_codes
from runtime.log import logger
from runtime.run_folder import step_of
from tests.lib.durability import file_size_limit
from tests.lib.forked import (
    CONFIG,
    checkpoints,
    codes,
    differences,
    log,
    options,
    run,
    started,
)
from tests.lib.launch import curve
from tests.lib.patience import PATIENCE_SECONDS
from tools import rollback
from tools.rollback import roll_back
from tools.status import read_status

FLOAT32 = {"training.dtype": "float32"}
STEPS = {"lr_scheduler.total_steps": "40", **FLOAT32}
LAYOUTS: dict[str, tuple[int, dict[str, str]]] = {
    "one device": (1, {}),
    "fsdp, accumulation": (2, {"training.global_batch_size": "12"}),
    "fsdp, last microbatch": (2, {"parallelism.fsdp_reduce_gradients": "last_microbatch"}),
    "hsdp": (4, {"parallelism.data_parallel_replicate_degree": "2"}),
    "tp": (2, {"parallelism.tensor_parallel_degree": "2", "training.global_batch_size": "2"}),
    "ddp": (2, {"parallelism.data_parallel": "ddp"}),
    "simple_fsdp": (2, {"parallelism.data_parallel": "simple_fsdp"}),
    "qwen3, documents, asynchronous saves": (
        2,
        {"model.name": "qwen3", "data.document_mask": "true", "checkpoint.async_mode": "async"},
    ),
    "qwen3_moe, ep, bias": (
        2,
        {
            "model.name": "qwen3_moe",
            "parallelism.expert_parallel_degree": "2",
            "experts.balance_bias_rate": "0.01",
        },
    ),
    "qwen3_next, cp, documents": (
        2,
        {
            "model.name": "qwen3_next",
            "parallelism.context_parallel_degree": "2",
            "parallelism.expert_parallel_degree": "2",
            "data.document_mask": "true",
            "training.global_batch_size": "2",
        },
    ),
    "bfloat16 compute": (2, {"training.mixed_precision_param": "bfloat16"}),
}
FAST_LAYOUTS = {
    "fsdp, accumulation",
    "tp",
    "qwen3, documents, asynchronous saves",
    "qwen3_next, cp, documents",
}


def log_timeouts() -> None:
    """Log each timeout of collectives that the loop sets."""
    original = train_loop.set_timeout

    def set_timeout(timeout: timedelta) -> None:
        logger.info("timeout of collectives: %s", timeout)
        original(timeout)

    train_loop.set_timeout = set_timeout


def wait_for(condition: Callable[[], Any], processes: list[BaseProcess], folder: Path) -> None:
    """Wait until ``condition`` holds; fail if a process exits before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert all(process.is_alive() for process in processes), log(folder)
        assert time.monotonic() < deadline, log(folder)
        time.sleep(0.005)


@pytest.mark.row(14, "Resumed is uninterrupted, bit for bit, on the same mesh")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in FAST_LAYOUTS else pytest.mark.slow) for n in LAYOUTS],
)
def test_resumed_run_equals_uninterrupted_run(
    tmp_path: Path, name: str, record_result: Callable[[str], None]
) -> None:
    world_size, layout = LAYOUTS[name]
    keys = STEPS | layout | {"training.steps": "8", "checkpoint.interval": "3"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, world_size, **keys)
    with started(parts, world_size, **keys) as processes:
        # Killed after step 3, during training or the save of step 6.
        wait_for(partial(checkpoints, parts), processes, parts)
        os.kill(processes[-1].pid or 0, signal.SIGKILL)
        assert codes(processes) & {-signal.SIGKILL}
    with started(parts, world_size, plant=log_timeouts, **keys) as processes:
        assert codes(processes) == {0}, log(parts)
    assert "resumed from step" in log(parts)
    # Once, after the first step of the resumed run, as in any other.
    assert log(parts).count("timeout of collectives: 0:05:00") == world_size
    assert curve(parts) == curve(whole)
    assert len(curve(whole)) == 8
    assert not differences(checkpoints(parts)[0], checkpoints(whole)[0])
    record_result(name)


@pytest.mark.row(9, "Preemption saves, on all ranks at the same step")
def test_signals_save_and_run_resumes(
    tmp_path: Path, trials: Callable[..., int], record_result: Callable[[str], None]
) -> None:
    rng = random.Random(0)
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]
    count, saved = trials(60, len(numbers)), 0
    # Endless, with checkpoints only on signals.
    endless = {"training.steps": "100000", "lr_scheduler.total_steps": "100000"}
    keys = FLOAT32 | endless | {"checkpoint.interval": "100000"}
    for trial in range(count):
        number = numbers[trial % len(numbers)]
        keys["checkpoint.async_mode"] = rng.choice(["async", "disabled"])
        with started(tmp_path, rng.choice([1, 2, 4]), **keys) as processes:
            wait_for(partial(has_step_after, tmp_path, saved), processes, tmp_path)
            for process in rng.sample(processes, len(processes)):
                time.sleep(rng.uniform(0.0, 0.004))
                os.kill(process.pid or 0, number)
            assert codes(processes) == {exit_codes.PREEMPTED}, log(tmp_path)
        control = tmp_path / "debug_model" / "control"
        assert (control / "outcome").read_text() == f"stopped {number.name}\n"
        newest = checkpoints(tmp_path)[0]
        assert not verify_checkpoint(newest)
        assert step_of(newest) == int((control / "progress").read_text()) > saved
        saved = step_of(newest)
    assert sorted(curve(tmp_path)) == list(range(1, max(curve(tmp_path)) + 1))
    record_result(
        f"{count} of {count} signals (TERM, USR1, USR2, INT; up to 4 ms apart; 1, 2, 4 ranks)"
    )


def has_step_after(folder: Path, step: int) -> bool:
    has_log = (folder / "debug_model" / "metrics.jsonl").exists()
    return has_log and max(curve(folder), default=0) > step


@pytest.mark.row(8, "A rollback starts a new lineage, which restarts follow")
def test_restarts_follow_a_rollback(tmp_path: Path, record_result: Callable[[str], None]) -> None:
    keys = STEPS | {"checkpoint.interval": "2", "checkpoint.keep_latest_k": "0"}
    run(tmp_path, 1, **keys, **{"training.steps": "8", "metrics.log_freq": "1"})
    curve = (tmp_path / "debug_model" / "metrics.jsonl").read_text()
    # Without room for a copy of the curves, nothing changes.
    before = sorted((tmp_path / "debug_model").rglob("*"))
    with file_size_limit(1024):
        assert rollback.main([str(tmp_path / "debug_model"), "4"]) == exit_codes.BAD_CONFIG
    assert sorted((tmp_path / "debug_model").rglob("*")) == before
    roll_back(tmp_path / "debug_model", 4)
    [abandoned] = (tmp_path / "debug_model").glob("abandoned-*")
    assert abandoned.name.startswith("abandoned-metrics.jsonl-")
    assert abandoned.read_text() == curve
    assert '"step": 8' in curve
    assert [step_of(path) for path in checkpoints(tmp_path)] == [4, 2]
    status = read_status(tmp_path / "debug_model", time.time())
    assert (status.state, status.why, status.step) == ("stopped", "rolled back to step 4", 4)
    slower = {"optimizer.lr": "1e-4"}
    run(tmp_path, 1, **keys, **slower, **{"training.steps": "5"})
    run(tmp_path, 1, **keys, **slower, **{"training.steps": "9"})
    assert "resumed from step 5" in log(tmp_path)
    assert abandoned.read_text() == curve
    assert [step_of(path) for path in checkpoints(tmp_path)] == [9, 8, 6, 5, 4, 2]
    folder = tmp_path / "debug_model" / "checkpoints"
    assert len(list(folder.glob("abandoned-step-*"))) == 2
    with pytest.raises(ValueError, match="found: 2, 4, 5, 6, 8, 9"):
        roll_back(tmp_path / "debug_model", 7)
    assert rollback.main([str(tmp_path / "debug_model"), "step-00000004"]) == exit_codes.BAD_CONFIG
    # Checkpoints without a control folder are not a run.
    shutil.rmtree(tmp_path / "debug_model" / "control")
    assert rollback.main([str(tmp_path / "debug_model"), "4"]) == exit_codes.BAD_CONFIG
    record_result("back to 4 of 8, on to 5, restarted: on to 9; the old 6 and 8 are abandoned")


def write_texts(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{text} {number} " * 50)


def _check_key_and_remedy(folder: Path, keys: dict[str, str], manifest: dict[str, Any]) -> None:
    """Check what a start says that adds or drops an entry of ``[model.args]``."""
    sizes = {"model.args.n_layers": "3"}
    more = resolve(load_config(CONFIG, options(folder, **keys, **sizes)), world_size=1)
    less = resolve(load_config(CONFIG, options(folder, **keys)), world_size=1)
    for run_spec, saved in ((more, less), (less, more)):
        with pytest.raises(ConfigError) as caught:
            validate_resume(run_spec, manifest | checkpoint_metadata(saved))
        before, after = (spec.model_args.n_layers for spec in (saved, run_spec))
        (message,) = caught.value.messages
        assert message == (
            f"model.args.n_layers: {before} to {after} since the checkpoint in"
            f" {folder / 'debug_model'}; cannot change on resume: set a new job.name"
        )


@pytest.mark.row(23, "Another model, tokenizer or data is rejected on resume")
def test_resume_rejects_another_run_by_key(
    tmp_path: Path, record_result: Callable[[str], None]
) -> None:
    texts = tmp_path / "texts"
    write_texts(texts, "one")
    source = {"data.source": "files", "data.path": f"{texts}/*.txt", "data.validation_percent": "0"}
    keys = STEPS | source | {"training.steps": "2"}
    run(tmp_path, 1, **keys)
    manifest = read_manifest(checkpoints(tmp_path)[0])
    changes: dict[str, Callable[[], dict[str, str]]] = {
        "model.name": lambda: {"model.name": "qwen3"},
        "model.vocab_size": lambda: {"model.vocab_size": "384"},
        "training.dtype": lambda: {"training.dtype": "float64"},
        "training.global_batch_size": lambda: {"training.global_batch_size": "4"},
        "debug.seed": lambda: {"debug.seed": "3"},
        "data.document_mask": lambda: {"data.document_mask": "true"},
        # The same folder with other texts.
        "documents of [data]": lambda: write_texts(texts, "two") or {},
    }
    for name, change in changes.items():
        changed = keys | {"training.steps": "3"} | change()
        with started(tmp_path, 1, **changed) as processes:
            assert codes(processes) == {exit_codes.BAD_CONFIG}, log(tmp_path)
        assert name in log(tmp_path)
        assert "cannot change on resume: " in log(tmp_path)
        assert "Traceback" not in log(tmp_path)
    # Heads and RoPE base change no shape, so only the manifest shows the difference.
    write_texts(texts, "one")
    job = resolve(load_config(CONFIG, options(tmp_path, **keys)), world_size=1)
    arguments = manifest["model_args"]
    for name, value in (("n_heads", 1), ("rope_theta", 1.0), ("norm_eps", 1.0)):
        with pytest.raises(ConfigError, match=f"^model.flavor: {name}: "):
            validate_resume(job, manifest | {"model_args": arguments | {name: value}})
    _check_key_and_remedy(tmp_path, keys, manifest)
    record_result(f"{len(changes) + 3} of {len(changes) + 3}, each by name")
