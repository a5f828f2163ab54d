"""Load a TOML file and ``--section.key value`` overrides into one validated ``JobConfig``.

Precedence: command line, then file, then defaults. All errors are reported together.
"""

import difflib
import re
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import tomli
import tomli_w
from pydantic import ValidationError

from config.job_config import JobConfig


class ConfigError(ValueError):
    """Invalid configuration; ``messages`` has one text per error."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


def load_config(path: Path, overrides: list[str]) -> JobConfig:
    """Read ``path`` and apply ``overrides``. Raises ``ConfigError`` that names every bad key."""
    try:
        tables = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not a file, not UTF-8, not TOML
        raise ConfigError([f"{path}: {error}"]) from None
    scalars = [key for key, value in tables.items() if not isinstance(value, dict)]
    errors = [f"{path}: {key} must be in a [table]" for key in scalars]
    tables = {key: value for key, value in tables.items() if key not in scalars}
    from_command_line, malformed = parse_overrides(overrides)
    errors += malformed
    for key, value in from_command_line.items():
        section, _, name = key.partition(".")
        tables.setdefault(section, {})[name] = value
    try:
        config = JobConfig.model_validate(tables)
    except ValidationError as error:
        errors += _messages(error, path, set(from_command_line))
    if errors:
        raise ConfigError(errors)
    return config


def parse_overrides(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse ``["--a.b", "1", "--c.d=x"]`` to ``{"a.b": 1, "c.d": "x"}``, and list all errors."""
    values: dict[str, Any] = {}
    errors = []
    rest = list(arguments)
    while rest:
        key, is_given, raw = rest.pop(0).partition("=")
        if not is_given and key.startswith("--") and rest and not rest[0].startswith("--"):
            is_given, raw = "=", rest.pop(0)
        if not re.fullmatch(r"--[^.]+\.[^.]+", key):
            errors.append(f"command line: {key!r} is not --section.key; see --help")
        elif not is_given:
            errors.append(f"command line: {key} needs a value: {key} VALUE or {key}=VALUE")
        elif not _is_unicode(key + raw):
            errors.append(f"command line: {key}: {raw!r} is not UTF-8")
        else:
            key = key.removeprefix("--")
            values[key] = _parse_value(key, raw)
    return values, errors


def dump_toml(config: JobConfig) -> str:
    """TOML text of all keys, defaults included. Loading it gives an equal ``config``."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def _is_unicode(text: str) -> bool:
    """True if ``text`` is valid UTF-8. Python decodes invalid argument bytes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_value(key: str, raw: str) -> Any:
    """Parse ``raw`` as a TOML value, else return it. A string key needs no quotes."""
    section, _, name = key.partition(".")
    field = _fields(section).get(name)
    try:
        (value,) = tomli.loads(f"value = {raw}").values()
    except (ValueError, RecursionError):  # not TOML, or several values on several lines
        return raw
    is_string = field is not None and field.annotation is str
    return raw if is_string and not isinstance(value, str) else value


def _fields(section: str) -> dict[str, Any]:
    if section not in JobConfig.model_fields:
        return {}
    return type(JobConfig.model_fields[section].default).model_fields


def _messages(error: ValidationError, path: Path, from_command_line: set[str]) -> list[str]:
    """One message per key, because pydantic reports each branch of a union separately."""
    # Pairs of value and reason. A dict, because it keeps the order and no pair twice.
    reasons: dict[str, dict[tuple[str, str], None]] = {}
    for item in error.errors():
        key = _key(item["loc"])
        is_unknown = item["type"] == "extra_forbidden"
        value = "" if is_unknown else f", got {item['input']!r}"
        reasons.setdefault(key, {})[value, _unknown(key) if is_unknown else item["msg"]] = None
    overridden = from_command_line | {key.partition(".")[0] for key in from_command_line}
    origin = {key: "command line" if key in overridden else str(path) for key in reasons}
    return [f"{origin[key]}: {key}: {_join(pairs)}" for key, pairs in reasons.items()]


def _join(pairs: Iterable[tuple[str, str]]) -> str:
    """Join reasons by "or", with their value once."""
    by_value = groupby(pairs, key=itemgetter(0))
    return " or ".join(" or ".join(r for _, r in group) + value for value, group in by_value)


def _key(location: tuple[int | str, ...]) -> str:
    """``section.name``, or ``section.name[0].key`` in an array of tables.

    Names of union branches, which pydantic appends, are dropped.
    """
    key = ".".join(str(part) for part in location[:2])
    if len(location) > 2 and isinstance(location[2], int):
        key += f"[{location[2]}]" + "".join(f".{part}" for part in location[3:4])
    return key


def _unknown(key: str) -> str:
    section, _, name = key.partition(".")
    array = _fields(section).get(name.partition("[")[0])
    if "[" in name and array is not None:
        names = [
            n for item in get_args(array.annotation) for n in getattr(item, "model_fields", ())
        ]
        near = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
        return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if not name:
        near = difflib.get_close_matches(section, JobConfig.model_fields, n=1)
        hint = f"; did you mean [{near[0]}]?" if near else ""
        return f"unknown table{hint}"
    near = difflib.get_close_matches(name, _fields(section), n=1)
    other_sections = [s for s in JobConfig.model_fields if name in _fields(s)]
    candidates = [f"{section}.{n}" for n in near] or [f"{s}.{name}" for s in other_sections[:1]]
    return "unknown key" + (f"; did you mean {candidates[0]}?" if candidates else "")
