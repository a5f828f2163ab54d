"""Load a TOML file and ``--section.key value`` overrides into one validated ``JobConfig``.

Precedence: command line, then file, then defaults. All errors are reported together.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli
import tomli_w
from pydantic import ValidationError

from config.errors import ConfigError
from config.job_config import OUTSIDE_PATTERN, PATH, Job, JobConfig
from config.paths import expand_path, literal_path
from config.synonyms import advice, argument_advice, table_advice

# Numbers that Python and C write, but TOML does not: .001 and 5.
POINT_NUMBER = re.compile(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", re.ASCII)

# Arguments of other programs that name the configuration.
CONFIG_FILE_KEYS = ("config", "config-file", "config_file", "config_path", "job.config_file")
CONFIG_FILE_HINT = "name the configuration first: ./run_train.sh FILE.toml --section.key value"
# Keys of [job] that decide the run's folder.
JOB_KEYS = ("name", "output_dir")
# Configurations that come with Shardloom, each known by its name without the ending.
CONFIGS = Path(__file__).absolute().parents[1] / "train_configs"

# Of a TOML file. A device may have no end.
MAX_CHARACTERS = 1 << 24


def load_config(path: Path, overrides: list[str]) -> JobConfig:
    """Read ``path`` and apply ``overrides``; expand ``~`` and variables in ``path`` and path keys.

    ``path`` may be the name of a file in train_configs/, such as llama3_8b. Raises ``ConfigError``
    that names every bad key.
    """
    path = find_config(path)
    tables, errors = read_toml(path)
    from_command_line, malformed = parse_overrides(overrides)
    errors += malformed
    for key, value in from_command_line.items():
        section, name, *entry = key.split(".")
        table = tables.setdefault(section, {})
        if entry and isinstance(table.get(name, {}), dict):
            table[name] = {**table.get(name, {}), entry[0]: value}
        else:
            table[name] = value
    overridden = from_command_line.keys() | {key.partition(".")[0] for key in from_command_line}

    def origin(key: str) -> str:
        # A key with a bracket may be that of an item, or mistyped.
        return "command line" if overridden & {key, key.partition("[")[0]} else str(path)

    def expand(key: str, text: str) -> str:
        try:
            return expand_path(text)
        except ValueError as error:
            errors.append(f"{origin(key)}: {key}: {error}")
            return text

    try:
        config = JobConfig.model_validate(_map_paths(tables, expand))
    except ValidationError as error:
        errors += _messages(error, origin)
    else:
        errors += _misnamed_arguments(config, origin)
    if errors:
        raise ConfigError(errors)
    return config


def config_names() -> list[str]:
    """Names of the configurations in train_configs/."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))


def find_config(path: Path) -> Path:
    """``path`` with ``~`` and variables expanded, or the file in train_configs/ of that name.

    Raises ``ConfigError`` if it is neither a file nor such a name.
    """
    try:
        file = Path(expand_path(str(path)))
    except ValueError as error:
        raise ConfigError([f"{path}: {error}"]) from None
    section, _, name = str(path).partition(".")
    # A run's folder may be named like its configuration, and be here.
    is_given = file.exists() and not file.is_dir()
    if not is_given and name in _fields(section):
        raise ConfigError([f"{path}: is a key, not a configuration; write --{path}=VALUE"])
    # Before suffixes, because a name may have a dot: qwen3_0.6b.
    if not is_given and str(path) in config_names():
        return CONFIGS / f"{path}.toml"
    if file.exists() or file.suffix or len(file.parts) != 1:
        return file
    near = difflib.get_close_matches(path.name, config_names(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"the names are {', '.join(config_names())}"
    raise ConfigError([f"{path}: neither a file nor a configuration of train_configs/; {hint}"])


def parse_overrides(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Parse ``["--a.b", "1", "--c.d=x"]`` to ``{"a.b": 1, "c.d": "x"}``, and list all errors.

    The last value of a key wins.
    """
    values: dict[str, Any] = {}
    errors = []
    rest = list(arguments)
    while rest:
        key, is_given, raw = rest.pop(0).partition("=")
        if not is_given and key.startswith("-") and rest and not rest[0].startswith("--"):
            is_given, raw = "=", rest.pop(0)
        if not _is_key(key):
            # A pattern that the shell expanded may leave thousands of words: report the first.
            others = 0
            while not key.startswith("-") and rest and not rest[0].startswith("-"):
                rest.pop(0)
                others += 1
            more = f" (and {others} more)" if others else ""
            errors.append(f"command line: {key!r} is not --section.key{more}; {_hint(key, raw)}")
        elif not is_given:
            errors.append(f"command line: {key} needs a value: {key} VALUE or {key}=VALUE")
        elif not _is_unicode(key + raw):
            errors.append(f"command line: {key}: {raw!r} is not UTF-8")
        else:
            key = key.removeprefix("--")
            # A key that is set again must follow the table that holds it, if that is set between.
            values.pop(key, None)
            values[key] = _parse_value(key, raw)
    return values, errors


def _is_key(argument: str) -> bool:
    """True for --section.key, and for --section.key.entry where the key is a table."""
    match = re.fullmatch(r"--([^.]+)\.([^.]+)(\.[^.]+)?", argument)
    if match is None or match[3] is None:
        return match is not None
    return is_table(match[1], match[2])


def is_table(section: str, name: str) -> bool:
    """True if the key is a table of the user's own entries, such as ``model.args``."""
    field = _fields(section).get(name)
    return field is not None and get_origin(field.annotation) is dict


def dump_toml(config: JobConfig) -> str:
    """TOML text of all keys, defaults included. Loading it gives an equal ``config``."""
    tables = config.model_dump(exclude_none=True)
    return tomli_w.dumps(_map_paths(tables, lambda _, path: literal_path(path)))


def read_toml(path: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Tables of a TOML file, and an error for each key outside of them."""
    try:
        # Editors on Windows write a byte-order mark, which TOML does not know.
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"longer than {MAX_CHARACTERS:,} characters")
        tables = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        wrong = text.split("\n")[int(line[1]) - 1].strip() if line else ""
        raise ConfigError([f"{path}: {error}" + (f": {wrong[:80]}" if wrong else "")]) from None
    except (OSError, ValueError, RecursionError) as error:  # not a file, not UTF-8, not TOML
        raise ConfigError([f"{path}: {getattr(error, 'strerror', None) or error}"]) from None
    scalars = [key for key, value in tables.items() if not isinstance(value, dict)]
    errors = [f"{path}: {key} must be in a [table]{advice(key)}" for key in scalars]
    return {key: value for key, value in tables.items() if key not in scalars}, errors


def find_run_folder(path: Path, overrides: list[str]) -> Path | None:
    """Folder of the run that a configuration describes, even if other keys are wrong; else None.

    None also for a pipe, which can be read once.
    """
    try:
        file = find_config(path)
        if not file.is_file():
            return None
        job = read_toml(file)[0].get("job", {})
        given = parse_overrides(overrides)[0]
        job |= {name: given[key] for name in JOB_KEYS if (key := f"job.{name}") in given}
        job = _map_paths({"job": job}, lambda key, text: expand_path(text))["job"]
        return Job.model_validate({name: job[name] for name in JOB_KEYS if name in job}).folder
    except ValueError:
        return None


def _map_paths(tables: dict[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Copy ``tables`` with ``change(key, path)`` for the path of each key marked ``PATH``."""

    def mapped(prefix: str, table: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        result = dict(table)
        for name, value in table.items():
            key, field = f"{prefix}.{name}", fields.get(name)
            if field is None:
                continue
            if isinstance(value, str) and PATH in field.metadata:
                result[name] = change(key, value)
            elif isinstance(value, list) and (items := _item_fields(field)):
                result[name] = [
                    mapped(f"{key}[{i}]", item, items) if isinstance(item, dict) else item
                    for i, item in enumerate(value)
                ]
        return result

    return {section: mapped(section, table, _fields(section)) for section, table in tables.items()}


def _is_unicode(text: str) -> bool:
    """True if ``text`` is valid UTF-8. Python decodes invalid argument bytes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_value(key: str, raw: str) -> Any:
    """Parse ``raw`` as a TOML value, else return it. A string key needs no quotes."""
    section, name, *entry = key.split(".")
    field = _fields(section).get(name)
    annotation = None if field is None or entry else field.annotation
    kinds = [getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))]
    if (entry or float in kinds) and POINT_NUMBER.fullmatch(raw.strip()):
        return float(raw)
    try:
        (value,) = tomli.loads(f"value = {raw}").values()
        # In an array a comment, which would be cut off, also hides the closing bracket.
        (values,) = tomli.loads(f"values = [{raw}]").values()
    except (ValueError, RecursionError):  # not TOML, or several values on several lines
        return raw
    return raw if len(values) != 1 or (annotation is str and not isinstance(value, str)) else value


def _hint(argument: str, value: str) -> str:
    """Advice for an ``argument`` that is no key."""
    key = argument.lstrip("-")
    section, _, name = key.partition(".")
    if name in _fields(section):
        return f"write --{key}={value or 'VALUE'}"
    if key in CONFIG_FILE_KEYS or argument.endswith(".toml"):
        return f"{CONFIG_FILE_HINT}; see --help"
    if argument.startswith("--") and advice(key):
        return advice(key).removeprefix("; ")
    if not argument.startswith("-"):
        return "quote a value with spaces, and a pattern such as '*.txt'; see --help"
    return "see --help"


def _fields(section: str) -> dict[str, Any]:
    if section not in JobConfig.model_fields:
        return {}
    return type(JobConfig.model_fields[section].default).model_fields


def _item_fields(field: Any) -> dict[str, Any]:
    """Fields of the tables in an array of tables; none of any other field."""
    items = [item for item in get_args(field.annotation) if hasattr(item, "model_fields")]
    return items[0].model_fields if items else {}


def _is_tables(key: str) -> bool:
    """True if the value of ``key`` is an array of tables."""
    section, _, name = key.partition(".")
    return name in (fields := _fields(section)) and bool(_item_fields(fields[name]))


def _messages(error: ValidationError, origin: Callable[[str], str]) -> list[str]:
    """One message per key, because pydantic reports each branch of a union separately."""
    # Pairs of value and reason. A dict, because it keeps the order and no pair twice.
    reasons: dict[str, dict[tuple[str, str], None]] = {}
    for item in error.errors():
        key = _key(item["loc"])
        is_unknown = item["type"] == "extra_forbidden"
        value = "" if is_unknown else f", got {item['input']!r}"
        reason = _unknown(key, item["input"]) if is_unknown else item["msg"]
        if item["type"] == "bool_type":
            reason += ", true or false"
        if item["type"] == "list_type" and isinstance(item["input"], dict) and _is_tables(key):
            reason = f"Input should be an array of tables: write [[{key}]]"
        if item.get("ctx", {}).get("pattern") == OUTSIDE_PATTERN:
            reason = "module:attribute"
        reasons.setdefault(key, {})[value, reason] = None
    return [f"{origin(key)}: {key}: {_join(pairs)}" for key, pairs in reasons.items()]


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


def _misnamed_arguments(config: JobConfig, origin: Callable[[str], str]) -> list[str]:
    """Return an error for each entry of ``[model.args]`` that has another program's name."""
    # A family of the user's own may have any arguments.
    names = [] if config.model.is_outside else config.model.args
    keys = {f"model.args.{name}": argument_advice(name) for name in names}
    return [f"{origin(key)}: {key}: unknown argument{hint}" for key, hint in keys.items() if hint]


def _unknown(key: str, value: Any) -> str:
    if key in CONFIG_FILE_KEYS:
        return f"unknown key; {CONFIG_FILE_HINT}"
    if "." in key:
        return f"unknown key{advice(key)}"
    return f"unknown table{table_advice(key, value if isinstance(value, dict) else ())}"
