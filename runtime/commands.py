"""Command lines that a user can paste into a shell in the current folder."""

import os
import shlex
import sys

from runtime.imports import ROOT

# The launcher's command as JSON, for the ranks that it starts.
COMMAND_VARIABLE = "LAUNCHER_COMMAND"


def command_text(*words: object) -> str:
    """Text of a command: ``command_text("status", folder)`` is ``./shardloom status outputs/x``."""
    return shlex.join([program(), *map(str, words)])


def install_text(*packages: str) -> str:
    """Text of the command that installs packages where this program finds them."""
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def program() -> str:
    """Path of the program ``shardloom``, or its bare name if Shardloom is installed."""
    script = ROOT / "shardloom"
    if not script.is_file():
        return script.name
    relative = os.path.relpath(script)
    # A shell searches PATH for a name without a slash.
    relative = relative if os.sep in relative else os.path.join(os.curdir, relative)
    return min(relative, str(script), key=len)
