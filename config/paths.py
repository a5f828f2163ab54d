"""One rule for ``~`` and variables in paths that users write, in TOML and on the command line."""

import os
import re
from collections.abc import Mapping

# $$, ${NAME}, $NAME, or ${ that is neither. Any other $ stands for itself, as in a shell.
REFERENCE = re.compile(r"\$(?:\$|\{(\w+)\}|([A-Za-z_]\w*)|\{)", re.ASCII)


def expand_path(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Expand ``$NAME`` and ``${NAME}``, then a leading ``~`` or ``~user``; ``$$`` is one ``$``.

    Raises ``ValueError`` that names a variable that is not set or empty, or an unknown user.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if found[0] == "$$":
            return "$"
        if name is None:
            raise ValueError(f"{text!r}: only $NAME and ${{NAME}} are expanded; $$ is a literal $")
        if not environment.get(name):
            # An empty one would turn $DATA/x into /x.
            state = "empty" if name in environment else "not set"
            raise ValueError(f"{text!r}: the variable {name} is {state}; $$ is a literal $")
        return environment[name]

    path = REFERENCE.sub(value, text)
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{text!r}: {user} is no user's home; ./{user} is the file of that name")
    return expanded


def literal_path(path: str) -> str:
    """Escape ``path``, an expanded path, so that ``expand_path`` returns it."""
    return ("./" if path.startswith("~") else "") + path.replace("$", "$$")
