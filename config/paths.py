"""One rule for ``~`` and variables in paths that users write, in TOML and on the command line."""

import os
import re
from collections.abc import Mapping

# A scheme has at least two letters: C:// is a drive.
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
# $$, ${NAME}, $NAME, or ${ that is neither. Any other $ stands for itself, as in a shell.
REFERENCE = re.compile(r"\$(?:\$|\{(\w+)\}|([A-Za-z_]\w*)|\{)", re.ASCII)


def expand_path(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Expand ``$NAME`` and ``${NAME}``, then a leading ``~`` or ``~user``; ``$$`` is one ``$``.

    Raises ``ValueError`` that names a variable that is not set or empty, or an unknown user, and
    for a URL with credentials, which it does not repeat.
    """
    _check_no_credentials(text)

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
    _check_no_credentials(path)
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{text!r}: {user} is no user's home; ./{user} is the file of that name")
    return expanded


def is_url(path: str) -> bool:
    """True for a URL such as s3://bucket/name."""
    return URL.match(path) is not None


def _check_no_credentials(path: str) -> None:
    """Raise ``ValueError`` for a URL with a password or a query, which may hold a signature.

    Paths are logged, and written to config.toml and checkpoints.
    """
    if not is_url(path):
        return
    scheme, _, rest = path.partition("://")
    user, at, _ = rest.partition("/")[0].rpartition("@")
    is_http = scheme.lower() in ("http", "https")
    if at and (is_http or ":" in user):
        what = "a user name or password"
    elif "?" in rest if is_http else re.search(r"\?[^/]*=", rest):
        what = "a query (?...), which may be a signature"
    else:
        return
    environment = "credentials belong into the environment"
    raise ValueError(f"a {scheme}:// URL with {what}: paths are logged and saved; {environment}")


def literal_path(path: str) -> str:
    """Escape ``path``, an expanded path, so that ``expand_path`` returns it."""
    return ("./" if path.startswith("~") else "") + path.replace("$", "$$")
