"""``python -m tools.build_site [FOLDER]`` builds the site of docs/, by default in build/site."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from runtime.commands import install_text
from runtime.log import say

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"


def build_site(folder: Path) -> None:
    """Write the site to ``folder``. Raises ``CalledProcessError`` for a broken link or anchor."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    subprocess.run([*command, "--site-dir", str(folder)], cwd=ROOT, check=True)


if __name__ == "__main__":
    if find_spec("material") is None:
        sys.exit(f"the site needs: {install_text('.[docs]')}")
    target = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else SITE
    build_site(target)
    say(str(target / "index.html"))
