"""Runs killed at random and restarted on other numbers of ranks equal an uninterrupted run."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from checkpoint.checkpoint_dir import verify_checkpoint
from checkpoint.hashed_file import describe_file
from checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from runtime.run_folder import step_of
from tests.lib.forked import checkpoints, codes, differences, log, run, started
from tests.lib.launch import curve
from tests.lib.marks import slow
from tests.lib.patience import PATIENCE_SECONDS
from tools.check_ledger import compare, replay

# Four microbatches per step, on 1, 2 or 4 ranks.
KEYS = {
    "debug.deterministic": "elastic",
    "training.dtype": "float32",
    "training.local_batch_size": "1",
    "training.global_batch_size": "4",
    "checkpoint.interval": "2",
    "metrics.enable_ledger": "true",
}
STEPS = ("training.steps", "lr_scheduler.total_steps")
STEPS_PER_KILL = 4
# With --full and without.
KILLS = 30, 2


def kill_one(folder: Path, processes: list[BaseProcess], rng: random.Random) -> None:
    """Kill one rank after some progress, at a random moment or during a save."""
    before = newest_step(folder)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while newest_step(folder) <= before:
        assert all(process.is_alive() for process in processes), log(folder)
        assert time.monotonic() < deadline, log(folder)
        time.sleep(0.005)
    if rng.random() < 0.5:
        scratch = folder / "debug_model" / "checkpoints"
        while time.monotonic() < deadline and not any(scratch.glob(".tmp-step-*")):
            if not all(process.is_alive() for process in processes):
                break
            time.sleep(0.001)
    else:
        time.sleep(rng.uniform(0.0, 0.5))
    os.kill(rng.choice(processes).pid or 0, signal.SIGKILL)
    # The other ranks detect it and exit on their own.
    assert None not in codes(processes), log(folder)


def newest_step(folder: Path) -> int:
    return step_of(found[0]) if (found := checkpoints(folder)) else 0


def chaos(folder: Path, n_kills: int, seed: int, **overrides: str) -> tuple[int, list[int]]:
    """Train with ``n_kills`` kills; return their actual number and the world sizes."""
    rng = random.Random(seed)
    steps = str(STEPS_PER_KILL * (n_kills + 1))
    kills, worlds = 0, []
    while newest_step(folder) < int(steps):
        worlds.append(rng.choice([1, 2, 4]))
        mode = rng.choice(["async", "disabled"])
        keys = KEYS | dict.fromkeys(STEPS, steps) | overrides
        with started(folder, worlds[-1], **keys, **{"checkpoint.async_mode": mode}) as processes:
            if kills < n_kills:
                kill_one(folder, processes, rng)
                kills += 1
            else:
                assert codes(processes) == {0}, log(folder)
        for path in checkpoints(folder):
            assert not verify_checkpoint(path)
    return kills, worlds


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, trials: Callable[..., int]) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    steps = str(STEPS_PER_KILL * (trials(*KILLS) + 1))
    run(folder, 2, **KEYS, **dict.fromkeys(STEPS, steps))
    return folder


@pytest.mark.row(17, "Kills, restarts and other numbers of ranks: every token exactly once")
def test_killed_run_equals_uninterrupted_run(
    uninterrupted: Path,
    tmp_path: Path,
    trials: Callable[..., int],
    record_result: Callable[[str], None],
) -> None:
    kills, worlds = chaos(tmp_path, trials(*KILLS), seed=1)
    ledgers = [replay(folder / "debug_model") for folder in (tmp_path, uninterrupted)]
    assert not [text for ledger in ledgers for text in ledger.violations]
    unequal, text = compare(*ledgers)
    assert not unequal
    assert curve(tmp_path) == curve(uninterrupted)
    assert not differences(checkpoints(tmp_path)[0], checkpoints(uninterrupted)[0])
    leftovers = [p.name for p in (tmp_path / "debug_model" / "checkpoints").glob(".*")]
    assert not leftovers
    record_result(f"{kills} kills, {len(worlds)} starts on {worlds} ranks; {text}")


# test_data_runs.py compares the same mixture with concat packing.
@pytest.mark.parametrize("packing", [slow("concat"), "best_fit"])
def test_killed_run_on_a_mixture(tmp_path: Path, trials: Callable[..., int], packing: str) -> None:
    """A mixture of JSON lines and text files, with bad records and a source that ends early."""
    rng = random.Random(2)
    lines = [{"text": f"line {i} " * rng.randint(0, 9)} if i % 9 else [i] for i in range(80)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "files").mkdir()
    for i in range(40):
        (tmp_path / "files" / f"{i}.txt").write_text(f"file {i} " * rng.randint(1, 30))
    sources = (
        f'[{{path = "{tmp_path}/lines.jsonl", weight = 0.4, repeat = false}},'
        f' {{path = "{tmp_path}/files/*"}}]'
    )
    data = {"data.sources": sources, "data.packing": packing, "data.on_bad_record": "skip"}
    n_kills, folders = trials(20, 1), (tmp_path / "killed", tmp_path / "whole")
    chaos(folders[0], n_kills, 2, **data)
    steps = str(STEPS_PER_KILL * (n_kills + 1))
    run(folders[1], 2, **KEYS, **data, **dict.fromkeys(STEPS, steps))
    ledgers = [replay(folder / "debug_model") for folder in folders]
    assert not [text for ledger in ledgers for text in ledger.violations]
    unequal, _ = compare(*ledgers)
    assert not unequal
    assert curve(folders[0]) == curve(folders[1])


def test_resume_from_wrong_position_is_a_violation(tmp_path: Path) -> None:
    """The ledger detects a data position of a step that was read but not trained."""
    keys = KEYS | {"lr_scheduler.total_steps": "8"}
    run(tmp_path, 1, **keys, **{"training.steps": "4"})
    state = checkpoints(tmp_path)[0] / "state.json"
    saved = json.loads(state.read_text())
    saved["data"]["rows"]["2"]["token"] += 32
    replace_file(state, json.dumps(saved))
    run(tmp_path, 1, **keys, **{"training.steps": "8"})
    violations = replay(tmp_path / "debug_model").violations
    assert len(violations) == 1
    assert "row 2 of step 5" in violations[0]


def replace_file(path: Path, text: str) -> None:
    """Overwrite a file of a checkpoint and its entry in the manifest."""
    path.write_text(text)
    manifest = read_manifest(path.parent)
    manifest["files"][path.name] = describe_file(path)
    (path.parent / MANIFEST_FILE).unlink()
    write_manifest(path.parent, manifest.pop("files"), manifest)
