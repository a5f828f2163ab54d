"""The plan of a run's step beside what was measured, so that a slow link or node shows."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.imports import import_variables
from runtime.log import logger

# The first steps of a start compile, and fill caches.
FIRST_STEPS = 10
# The lowest priority: ranks and their threads come first.
NICE = 19
GIB = 2**30
# A rank that fails ends at once, without ``close``.
PROGRAM = """\
import sys
from runtime.signals import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from tools.plan import main
sys.exit(main(sys.argv[1:]))
"""


def start_plan(config: str, *, world_size: int, device_name: str) -> "PlannedStep | None":
    """Return ``PlannedStep`` of these; None, with a line in the log, if it cannot start."""
    try:
        return PlannedStep(config, world_size=world_size, device_name=device_name)
    except OSError as error:  # Such as a full disk, or too many processes.
        logger.info("plan: none: %s", error)
        return None


class PlannedStep:
    """Plans the step of a run in a process of low priority, and compares the two once."""

    def __init__(self, config: str, *, world_size: int, device_name: str) -> None:
        """Start ``shardloom plan`` for ``config``. ``device_name``: of the GPU, as CUDA has it.

        ``config``: TOML of this process, because that of a run's folder may be anyone's, and name
        code.
        """
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._out, self._err, path = (folder / name for name in ("out", "err", "config.toml"))
        path.write_text(config, encoding="utf-8")
        own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        arguments = [str(path), "--json", f"--world-size={world_size}", "--device", device_name]
        n_local = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
        if n_local < world_size:
            arguments.append(f"--gpus-per-node={n_local}")
        python = [sys.executable, "-c", PROGRAM, str(os.getpid())]
        command = ["nice", "-n", str(NICE), *python, *arguments]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                env=os.environ | import_variables(os.environ) | own,
                stdout=out,
                stderr=err,
            )

    def text(self, measured: Mapping[str, Any]) -> str | None:
        """Return plan and measurement as a line, or why there is no plan; None as long as it runs.

        ``measured``: ``tokens_per_second`` of all ranks, and ``memory_gib`` of this one.
        """
        code = self._process.poll()
        if code is None:
            return None
        try:
            return self._text(code, measured)
        # The run goes on if a file was removed, or is no plan.
        except (OSError, ValueError, KeyError) as error:
            return f"none: {type(error).__name__}: {error}"

    def _text(self, code: int, measured: Mapping[str, Any]) -> str:
        if code != 0:
            lines = self._err.read_text(errors="replace").splitlines()
            # Packages may warn before.
            return f"none: {lines[-1] if lines else f'exit code {code}'}"
        plan = json.loads(self._out.read_text())
        # Rank 0, whose memory is measured, is of the first stage.
        peak = plan["stages"][0]["memory"]["peak"]
        rate, found = plan["modelled"]["tokens_per_second"], measured["tokens_per_second"]
        return (
            f"{rate:,.0f} tokens/s on {plan['device']}, measured {found:,.0f}"
            f" ({100 * (found / rate - 1):+.0f} %); {peak / GIB:.2f} GiB of tensors at the peak,"
            f" {measured['memory_gib']:.2f} reserved"
        )

    def close(self) -> None:
        """End the plan, if it is not done."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
