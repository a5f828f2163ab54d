"""Go back to an older step of a run: ``python -m tools.rollback RUN_FOLDER STEP``

Later checkpoints are renamed to ``abandoned-step-...``, so that the next start of the run resumes
from STEP and begins a new lineage there. Nothing is deleted.
"""

import sys
from pathlib import Path

from checkpoint.store import problems_of, published, set_aside, step_of
from runtime import exit_codes
from runtime.control import lock_run
from runtime.run_folder import write_whole
from tools.arguments import Parser, telling_mistakes


@telling_mistakes
def main(arguments: list[str]) -> int:
    parser = Parser("python -m tools.rollback", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("step", type=int)
    options = parser.parse_args(arguments)
    roll_back(options.run_folder, options.step)
    return exit_codes.DONE


def roll_back(run_folder: Path, step: int) -> None:
    """Make ``step`` the newest checkpoint of a run.

    Raises ``ValueError`` if the run is running, or has no such checkpoint that verifies.
    """
    checkpoints = {step_of(folder): folder for folder in published(run_folder / "checkpoints")}
    if step not in checkpoints:
        there = ", ".join(str(step) for step in sorted(checkpoints)) or "none"
        raise ValueError(f"{run_folder}: no checkpoint of step {step}; there are: {there}")
    with lock_run(run_folder / "control"):
        problems = problems_of(checkpoints[step])
        if problems:
            raise ValueError(f"step {step} does not verify: {'; '.join(problems)}")
        # The newest first, so that a rollback cut short has gone back at least part of the way.
        for later in sorted((number for number in checkpoints if number > step), reverse=True):
            print(f"set aside: {set_aside(checkpoints[later], 'abandoned')}")
        write_whole(run_folder / "control" / "progress", f"{step}\n")
    print(f"the next start of {run_folder} resumes from step {step}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
