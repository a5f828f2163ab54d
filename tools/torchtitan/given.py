"""The values of a TOML file of torchtitan, and the record of its translation."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.torchtitan.keys import BY_NAME, CONVERTERS, FEATURES, RENAMED

LAST_MONTH = "2026-02"


@dataclass
class Translation:
    """Keys of ours, and the record of all that they do not say."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Values by ``section.key``."""
    dropped: dict[str, list[str]] = field(default_factory=dict)
    """Given keys that change nothing of what is trained, by the reason."""
    notes: list[str] = field(default_factory=list)
    """Differences that remain although all keys are translated."""
    problems: list[str] = field(default_factory=list)
    """Keys that change what is trained and have no equivalent, with what to do."""
    description: str = ""

    def drop(self, key: str, reason: str) -> None:
        """Note that ``key`` is not translated."""
        self.dropped.setdefault(reason, []).append(key)

    def mentions(self, key: str) -> bool:
        """Return True if ``key`` was dropped or is a problem."""
        is_dropped = any(key in keys for keys in self.dropped.values())
        return is_dropped or any(problem.startswith(key) for problem in self.problems)

    def dropped_lines(self) -> list[str]:
        """One line per reason."""
        return [f"{', '.join(keys)}: {reason}" for reason, keys in self.dropped.items()]


@dataclass(frozen=True)
class Given:
    """Values of a file's keys by torchtitan's last names of them."""

    values: dict[str, Any]
    written: dict[str, str]
    """Name in the file of each."""
    month: str
    """Last month in which torchtitan had all of these names, in ISO format."""

    def __getitem__(self, name: str) -> Any:
        """Return the value, or torchtitan's default for a key that the file lacks."""
        return self.values.get(name, BY_NAME[name].default)

    def __contains__(self, name: str) -> bool:
        return name in self.values


def read(tables: Mapping[str, Any], result: Translation) -> Given:
    """Values by torchtitan's last name of each key, of the right types."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    months = [LAST_MONTH]
    for old, value in _flatten(tables):
        name, month = RENAMED.get(old, (old, LAST_MONTH))
        if name.partition(".")[0] in FEATURES:
            _read_feature(name, value, result)
        elif name.startswith(CONVERTERS):
            result.drop(old, "without effect, because its converter is off")
        elif name not in BY_NAME:
            near = difflib.get_close_matches(old, [*BY_NAME, *RENAMED], n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            result.problems.append(f"{old}: not a known key of torchtitan; {hint}")
        elif type(value) not in BY_NAME[name].kinds:
            kinds = " or ".join(kind.__name__ for kind in BY_NAME[name].kinds)
            result.problems.append(f"{old}: must be of type {kinds}, got {value!r}")
        elif name in values and values[name] != value:
            result.problems.append(
                f"{old}: {value!r}, but {written[name]} = {values[name]!r}: remove one"
            )
        else:
            values[name], written[name] = value, old
            months += [month, BY_NAME[name].until or LAST_MONTH]
    return Given(values, written, min(months))


def _read_feature(name: str, value: Any, result: Translation) -> None:
    table, _, key = name.partition(".")
    switch, reason = FEATURES[table]
    if key == switch and value is not False:
        result.problems.append(f"{name}: {reason}; remove the table")
    else:
        result.drop(name, "TorchFT is off")


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def list_of(value: list[Any] | str) -> list[str]:
    """A list, or the parts of a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]
