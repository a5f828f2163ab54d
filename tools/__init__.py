"""Commands beside training: ``python -m tools.NAME`` in the root of the repository."""

import os
import sys
from contextlib import suppress

# ``python -m`` puts the current folder first. Elsewhere than in the root, where its files are not
# Shardloom's, only PYTHONPATH and the installed packages count.
with suppress(FileNotFoundError):
    _root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.path[0] != _root and sys.path[0] in ("", os.getcwd()) and not sys.flags.safe_path:
        del sys.path[0]
