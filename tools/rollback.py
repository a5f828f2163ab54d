"""Roll a run back to an older checkpoint: ``shardloom rollback RUN_FOLDER STEP``

Renames later checkpoints to ``abandoned-step-...``. The next start of the run resumes from STEP and
begins a new lineage there. It deletes later lines of metrics.jsonl and samples.jsonl, which are
copied to ``abandoned-metrics.jsonl-...`` before. No checkpoint is deleted.
"""

import os
import sys
import uuid
from pathlib import Path

from checkpoint.checkpoint_dir import quarantine, verify_checkpoint
from launcher.failures import record_end
from runtime import exit_codes
from runtime.filesystem import atomic_write_text, read_file
from runtime.log import logger, say
from runtime.run_folder import WriteAlarm, list_checkpoints, remove_file, step_of
from runtime.run_lock import lock_run
from tools.cli import Parser, path_argument, reporting_errors


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom rollback", description=__doc__)
    parser.add_argument("run_folder", type=path_argument)
    parser.add_argument("step", type=int)
    options = parser.parse_args(arguments)
    roll_back(options.run_folder, options.step)
    return exit_codes.DONE


def roll_back(run_folder: Path, step: int) -> None:
    """Make ``step`` the newest checkpoint of a run; rename the later ones, and copy its curves.

    Raises ``ValueError`` if the run is running, or if it has no checkpoint of ``step`` that
    verifies.
    """
    saved = run_folder / "checkpoints"
    if not saved.exists():
        raise ValueError(f"{run_folder}: no checkpoint of step {step}; found: none")
    chosen = saved / f"step-{step:08d}"
    lock_run(run_folder / "control").close()  # A run that trains is named at once.
    # Before the lock, because it reads all bytes, and a job that starts would find the run locked.
    unread = ["it was saved meanwhile; try again"]
    problems = verify_checkpoint(chosen) if chosen.is_dir() else unread
    with lock_run(run_folder / "control"):
        # Not before: a run that is just ending saves, and then releases the lock.
        checkpoints = {step_of(folder): folder for folder in list_checkpoints(saved)}
        if step not in checkpoints:
            found = ", ".join(str(step) for step in sorted(checkpoints)) or "none"
            raise ValueError(f"{run_folder}: no checkpoint of step {step}; found: {found}")
        if problems:
            raise ValueError(f"step {step} does not verify: {'; '.join(problems)}")
        abandoned = sorted((number for number in checkpoints if number > step), reverse=True)
        if abandoned:
            _copy_curves(run_folder)
        # Newest first: an interrupted rollback has still gone back part of the way.
        for later in abandoned:
            say(f"renamed to: {quarantine(checkpoints[later], 'abandoned')}")
        # The former end was that of steps that are gone.
        outcome = exit_codes.StopReason(f"{exit_codes.ROLLED_BACK}{step}", exit_codes.DONE).outcome
        control = run_folder / "control"
        for name, text in (("progress", step), ("outcome", outcome)):
            path = control / name
            with WriteAlarm().of(path):
                atomic_write_text(path, f"{text}\n")
        # Counted from a later step, failures and requeues would go on in spite of progress.
        record_end(control, outcome)
        remove_file(control / "requeues")
    say(f"rollback: {run_folder} will resume from step {step}")


def _copy_curves(run_folder: Path) -> None:
    """Copy the files whose later lines the next start deletes. Raises ``OSError`` without room."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        try:
            content = read_file(run_folder / name)
        except OSError as error:
            # The next start cannot read it either, and leaves it as it is.
            if not isinstance(error, FileNotFoundError):
                logger.warning("%s: not copied: %s", run_folder / name, error)
            continue
        copy = run_folder / f"abandoned-{name}-{uuid.uuid4().hex[:8]}"
        try:
            with copy.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            copy.unlink(missing_ok=True)
            raise OSError(
                error.errno, f"{error.strerror}; nothing was changed", str(copy)
            ) from None
        say(f"copied to: {copy}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
