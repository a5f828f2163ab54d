"""Decide whether to requeue a Slurm job: ``tools.slurm_end RUN_FOLDER [FLAG...]``

For ``slurm/train.sbatch``, after all launchers have ended: prints ``requeue`` or ``stop`` with the
reason. Exits with 75 for a requeue, otherwise with the job's exit code. Flags: ``warned``: Slurm
warned the batch script. ``cut-off``: a signal came before the launcher was started, or could handle
it. ``rejected``: launchers exited with 2. Imports no torch, because a preemption's grace time is
short.
"""

import json
import os
import sys
from pathlib import Path

from launcher.failures import MOST_ATTEMPTS, newest_saved_step, record_failure
from runtime import exit_codes
from runtime.filesystem import atomic_write_text, parse_object
from runtime.log import escape_on_stdout, say
from runtime.run_folder import OLD_STOP, read_text, remove_stop_file

# Bound on consecutive requeues without a newer checkpoint.
MOST_REQUEUES = 10
FLAGS = {"warned", "cut-off", "rejected"}
ENDS = {
    exit_codes.BAD_CONFIG: "this start was rejected, see above",
    exit_codes.DO_NOT_REQUEUE: "a requeue would fail again; shardloom status says why",
}


def main(arguments: list[str]) -> int:
    """Print the decision; return the exit code of the job."""
    escape_on_stdout()
    if not arguments or not {*arguments[1:]} <= FLAGS:
        print(__doc__, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    code, reason = decide(
        Path(arguments[0]) / "control",
        is_warned="warned" in arguments[1:],
        is_cut_off="cut-off" in arguments[1:],
        is_rejected="rejected" in arguments[1:],
    )
    say(f"{'requeue' if code == exit_codes.PREEMPTED else 'stop'}: {reason}")
    return code


def decide(
    control: Path, *, is_warned: bool, is_cut_off: bool = False, is_rejected: bool = False
) -> tuple[int, str]:
    """Exit code of the job, 75 to requeue it, and the reason. Counts failures and requeues."""
    code = exit_codes.read_exit_code(control)
    if code is None and is_rejected:
        # It did not lock the run, which another job may train: a failure here would be that job's.
        return exit_codes.BAD_CONFIG, ENDS[exit_codes.BAD_CONFIG]
    if code is None and is_cut_off:
        code = exit_codes.PREEMPTED
        exit_codes.write_exit_code(control, code)
    if code == exit_codes.DONE:
        outcome = read_text(control / "outcome") or "done"
        by_file = outcome == exit_codes.STOP_FILE.outcome
        return code, "stopped by the stop file" if by_file else outcome
    if code in ENDS:
        return code, ENDS[code]
    # Ranks that did not lock the run have left it, and the next start would obey it.
    remove_stop_file(control, os.environ.get(OLD_STOP, ""))
    if os.path.lexists(control / "stop"):
        # The user asked the run to stop; never requeue it, even if it ended for another reason.
        is_saved = code == exit_codes.PREEMPTED
        return exit_codes.DONE if is_saved else exit_codes.FAILED, f"{control / 'stop'} exists"
    saved = newest_saved_step(control)
    reason = f"stopped by a signal; newest checkpoint: {f'step {saved}' if saved else 'none'}"
    if code != exit_codes.PREEMPTED:
        reason = f"the launcher exited with {code}"
        if code is None:
            reason = "the launcher of node 0 was killed, never started or could not write its end"
        if is_warned:
            reason += ", after Slurm's warning; the job's log says why"
        # A live launcher records failures itself and exits with 93 after too many of them.
        if code is None or is_warned:
            attempt = record_failure(control, lines=[reason], codes={})
            if attempt >= MOST_ATTEMPTS:
                return exit_codes.DO_NOT_REQUEUE, f"{reason}; {attempt} attempts without progress"
    try:
        count = count_requeue(control)
    except OSError as error:
        # Without a count, a job that saves nothing would be requeued for ever.
        return exit_codes.DO_NOT_REQUEUE, f"{reason}; cannot count the requeues: {error}"
    if count > MOST_REQUEUES:
        reason += f"; {MOST_REQUEUES} requeues without a newer checkpoint"
        return exit_codes.DO_NOT_REQUEUE, reason
    return exit_codes.PREEMPTED, reason


def count_requeue(control: Path) -> int:
    """Number of requeues since the newest checkpoint with another one, which is counted."""
    path, step = control / "requeues", newest_saved_step(control)
    last = parse_object(read_text(path).encode())
    before, progress = last.get("count"), last.get("progress")
    count = 1
    if isinstance(before, int) and isinstance(progress, int) and step <= progress:
        count += before
    if count <= MOST_REQUEUES:
        atomic_write_text(path, json.dumps({"count": count, "progress": step}) + "\n")
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
