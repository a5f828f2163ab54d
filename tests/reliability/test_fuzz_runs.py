"""Random damage to a run's folder: each program that reads it names the file, or is not affected.

The run itself resumes to the same weights.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from runtime import exit_codes
from tests.lib.forked import checkpoints, codes, differences, log, run, started
from tests.lib.limits import limited_memory, time_limit
from tests.lib.patience import PATIENCE_SECONDS
from tests.lib.random_damage import contents, damage
from tools import check_ledger, convert, generate, rollback, status

COUNT = 400
# A resume costs 200 times as much as a tool.
RESUMES = 20
KEYS = {
    "lr_scheduler.total_steps": "6",
    "training.dtype": "float32",
    "training.seq_len": "16",
    "model.args.n_layers": "1",
    "checkpoint.interval": "2",
    "metrics.enable_ledger": "true",
    "metrics.trackers": '["tensorboard"]',
}


@dataclass(frozen=True)
class Answer:
    """End of a program: exit code, result, and all that it said."""

    code: int
    result: Any
    said: str


@dataclass(frozen=True)
class Program:
    run: Callable[[Path], Answer]
    reads: tuple[str, ...]
    """Beginnings of the names of files whose content it believes: any result is right."""


def answer_of(main: Callable[[list[str]], int], *arguments: str) -> Answer:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), time_limit(), limited_memory():
        code = main(list(arguments))
    return Answer(code, out.getvalue(), out.getvalue() + err.getvalue())


def show_status(folder: Path) -> Answer:
    answer = answer_of(status.main, str(folder), "--json")
    found = json.loads(answer.result) if answer.result else {}
    others = {name for name in found if name.endswith("_age")} | {"problems", "run"}
    found = {key: value for key, value in found.items() if key not in others}
    return Answer(answer.code, found, answer.said)


def check(folder: Path) -> Answer:
    answer = answer_of(check_ledger.main, str(folder))
    is_found = answer.code == exit_codes.FAILED
    text = answer.result.replace(str(folder), "")
    return Answer(exit_codes.BAD_CONFIG if is_found else answer.code, text, answer.said)


def write_text(folder: Path) -> Answer:
    return answer_of(generate.main, str(folder), "--tokens", "3", "--temperature", "0")


def export(folder: Path) -> Answer:
    target = folder.parent / "exported"
    answer = answer_of(convert.main, "export", str(folder), str(target))
    return Answer(answer.code, contents(target) if target.exists() else {}, answer.said)


def roll_back(folder: Path) -> Answer:
    answer = answer_of(rollback.main, str(folder), "2")
    steps = [path.name for path in sorted((folder / "checkpoints").glob("step-*"))]
    return Answer(answer.code, steps, answer.said)


def resume(folder: Path) -> Answer:
    overrides = {"training.steps": "6", "job.output_dir": str(folder.parent)}
    with started(folder.parent / "logs", 1, **KEYS | overrides) as processes:
        processes[0].join(PATIENCE_SECONDS)
        [code] = codes(processes)
    said = log(folder.parent / "logs")
    newest = checkpoints(folder.parent)
    same = newest and not differences(newest[0], resumed(folder.parents[1]))
    return Answer(-1 if code is None else code, bool(same), said)


@cache
def trained(base: Path) -> Path:
    """Folder of a run that stopped after step 4 of 6, with checkpoints of steps 2 and 4."""
    run(base / "intact", 1, **KEYS, **{"training.steps": "4"})
    return base / "intact" / "debug_model"


@cache
def resumed(base: Path) -> Path:
    """Checkpoint of step 6 of the run without damage."""
    shutil.copytree(trained(base), base / "resumed" / "debug_model")
    run(base / "resumed", 1, **KEYS, **{"training.steps": "6"})
    return checkpoints(base / "resumed")[0]


@cache
def right_answers(base: Path, name: str) -> list[Any]:
    """Results without damage: of the newest checkpoint, and of the one before."""
    found = []
    for unused in (None, "step-00000004"):
        shutil.rmtree(base / "right", ignore_errors=True)
        folder = base / "right" / "debug_model"
        shutil.copytree(trained(base), folder)
        if unused is not None:
            shutil.rmtree(folder / "checkpoints" / unused)
        found.append(PROGRAMS[name].run(folder).result)
    return found


PROGRAMS = {
    "status": Program(show_status, ("metrics.jsonl", "control/", "config.toml", "provenance/")),
    "check-ledger": Program(check, ("ledger/",)),
    "generate": Program(write_text, ()),
    "convert": Program(export, ()),
    "rollback": Program(roll_back, ()),
    "resume": Program(resume, ()),
}


def run_trial(name: str, seed: int, base: Path) -> tuple[str, str]:
    """Damage a file of a run and run a program on it. Return the outcome and what is wrong."""
    rng, program = random.Random(seed), PROGRAMS[name]
    trial = base / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    folder = trial / "debug_model"
    shutil.copytree(trained(base), folder)
    right = [True] if name == "resume" else right_answers(base, name)
    (trial / "outside").mkdir()
    (trial / "outside" / "file").write_bytes(rng.randbytes(50))
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    path = rng.choice(files)
    way = damage(rng, path)
    file = path.relative_to(folder).as_posix()
    where = f"{name}: {way} {file}: "
    before, intact = contents(trial / "outside"), contents(base / "intact")
    try:
        answer = program.run(folder)
    except BaseException as error:
        return "broken", f"{where}{type(error).__name__}: {str(error)[:300]}"
    # What is gone can be named only by its folder.
    is_gone = not path.is_file()
    is_named = path.name in answer.said or (is_gone and path.parent.name in answer.said)
    if "Traceback" in answer.said:
        outcome, wrong = "broken", f"{where}traceback: {answer.said[-900:]}"
    elif answer.code == exit_codes.BAD_CONFIG:
        outcome, wrong = "rejected", "" if is_named else f"{where}no name in {answer.said[:300]!r}"
    elif answer.code != exit_codes.DONE:
        outcome, wrong = "broken", f"{where}exit code {answer.code}: {answer.said[-900:]}"
    elif answer.result == right[0] or file.startswith(program.reads or ("no file",)):
        outcome, wrong = "harmless", ""
    else:
        # What was read is the checkpoint before, and it is said why.
        is_older = answer.result == right[-1] or file.endswith(("state.json", "tensors.json"))
        is_older = is_older or name == "status"
        outcome = "named"
        wrong = "" if is_older and is_named else f"{where}{answer.result}; {answer.said[:300]}"
    if contents(trial / "outside") != before or contents(base / "intact") != intact:
        wrong += f"; {where}a file outside was changed"
    return outcome, wrong


def run_trials(
    names: list[str], seeds: Iterator[int], base: Path, record_result: Callable[[str], None]
) -> None:
    ends = Counter[str]()
    for seed in seeds:
        outcome, wrong = run_trial(names[seed % len(names)], seed, base)
        assert not wrong
        ends[outcome] += 1
    seen = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(ends.items()))
    record_result(f"{ends.total():,} damages to a run's files, read by {', '.join(names)}: {seen}")


ROW = partial(pytest.mark.row, 40, "Random damage is rejected by name, or harmless")


@ROW()
def test_damaged_run_folder_is_read_by_tools(
    tmp_path: Path, seeds: Callable[[int], Iterator[int]], record_result: Callable[[str], None]
) -> None:
    tools = [name for name in PROGRAMS if name != "resume"]
    run_trials(tools, seeds(COUNT - RESUMES), tmp_path, record_result)


@ROW()
def test_damaged_run_resumes_or_is_rejected(
    tmp_path: Path, seeds: Callable[[int], Iterator[int]], record_result: Callable[[str], None]
) -> None:
    run_trials(["resume"], seeds(RESUMES), tmp_path, record_result)
