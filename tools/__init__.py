"""Commands beside training: ``python -m tools.NAME`` in the root of the repository."""

import os
import sys
from contextlib import suppress

# ``python -m`` puts the current folder first. Elsewhere than in the root, where its files are not
# Shardloom's, only PYTHONPATH and the installed packages count.
with suppress(FileNotFoundError):
    _root, _first = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path[0]
    if os.path.abspath(_first) != _root and _first in ("", os.getcwd()) and not sys.flags.safe_path:
        del sys.path[0]
