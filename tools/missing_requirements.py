"""Print the requirements of pyproject.toml, and of a named extra, that this interpreter lacks.

Imports the standard library only, so that it runs on any interpreter and starts fast.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def missing(requirements: list[str]) -> list[str]:
    """Return the requirements (``name>=version``) that are not installed or too old."""
    found = []
    for requirement in requirements:
        name, minimum = requirement.split(">=")
        try:
            # A package whose metadata are damaged has none.
            installed: str | None = version(name.partition("[")[0])
            if _numbers(installed or "") < _numbers(minimum):
                found.append(requirement)
        except PackageNotFoundError:
            found.append(requirement)
    return found


def _numbers(text: str) -> list[int]:
    """Parse the release part of a version: 2.13.0+cpu to [2, 13, 0]."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]


if __name__ == "__main__":
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())[
        "project"
    ]
    extras = [r for name in sys.argv[1:] for r in project["optional-dependencies"][name]]
    requirements = project["dependencies"] + extras
    # In an environment that pip is changing, or was interrupted in, all requirements are missing.
    is_unfinished = Path(sys.prefix, "unfinished").exists()
    print("\n".join(requirements if is_unfinished else missing(requirements)), end="")
