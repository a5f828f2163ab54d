"""Decide whether a Slurm job goes on: ``tools.slurm_end RUN_FOLDER [warned]``

For ``slurm/train.sbatch``, once all launchers have ended: prints ``requeue`` or ``stop`` and why,
and exits with 75 for a requeue, else with what the job is to end with. ``warned`` if the batch
script was. It imports no torch: within a preemption's grace, seconds count.
"""

import json
import sys
from pathlib import Path

from runtime import exit_codes
from runtime.failures import MOST_ATTEMPTS, published_step, record_failure
from runtime.run_folder import write_whole

# Requeues in a row without a newer checkpoint, whatever their reasons.
MOST_REQUEUES = 10
ENDS = {
    exit_codes.BAD_CONFIG: "the configuration is wrong, see above",
    exit_codes.DO_NOT_REQUEUE: "trying again would not help, see above and control/failures",
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[1:] not in ([], ["warned"]):
        print(__doc__, file=sys.stderr)
        return exit_codes.BAD_CONFIG
    code, reason = decide(Path(arguments[0]) / "control", is_warned=len(arguments) > 1)
    print("requeue:" if code == exit_codes.PREEMPTED else "stop:", reason)
    return code


def decide(control: Path, *, is_warned: bool) -> tuple[int, str]:
    """The exit code of the job, 75 to requeue it, and why. Counts failures and requeues."""
    code = exit_codes.reported(control)
    if code == exit_codes.DONE:
        return code, (control / "outcome").read_text().strip()
    if code in ENDS:
        return code, ENDS[code]
    if (control / "stop").exists():
        # Somebody asked it to end, and it has ended, even if for another reason.
        is_saved = code == exit_codes.PREEMPTED
        return exit_codes.DONE if is_saved else exit_codes.FAILED, f"{control / 'stop'} is there"
    reason = "stopped by a signal, and saved"
    if code != exit_codes.PREEMPTED:
        reason = f"the launcher ended with {code}"
        if code is None:
            reason = "the first node's launcher was killed, or never began"
        if is_warned:
            reason += ", after Slurm's warning"
        # A launcher records failures itself, and ends with 93 after too many of them.
        if code is None or is_warned:
            attempt = record_failure(control, lines=[reason], codes={})
            if attempt >= MOST_ATTEMPTS:
                return exit_codes.DO_NOT_REQUEUE, f"{reason}; {attempt} attempts without progress"
    count = count_requeue(control)
    if count > MOST_REQUEUES:
        reason += f"; {MOST_REQUEUES} requeues without a newer checkpoint"
        return exit_codes.DO_NOT_REQUEUE, reason
    return exit_codes.PREEMPTED, reason


def count_requeue(control: Path) -> int:
    """Count the requeue to come; return how many there are since the newest checkpoint, with it."""
    path, step = control / "requeues", published_step(control)
    last = json.loads(path.read_text()) if path.exists() else {"count": 0, "progress": -1}
    count = last["count"] + 1 if step <= last["progress"] else 1
    write_whole(path, json.dumps({"count": count, "progress": step}) + "\n")
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
