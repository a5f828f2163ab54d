"""Help text, page of the documentation and JSON schema, all generated from ``JobConfig``."""

import difflib
import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from config.job_config import OUTSIDE_PATTERN, JobConfig
from config.loader import ConfigError, config_names

USAGE = """\
usage: ./run_train.sh [CONFIG] [--section.key VALUE | --section.key=VALUE] ...
       ./run_train.sh --help [SECTION | SECTION.KEY] ...

Trains the model of CONFIG, a TOML file or one of these names: {configs}. The
default is debug_model. Each argument overrides one key; the last value of a key wins. Values are
written as in TOML: 3e-4, true, 100, name. In paths, also those of the TOML file, ~, $NAME and
${{NAME}} are expanded; $$ is a literal $.

environment:
  CONFIG_FILE  CONFIG, if none is given
  NGPU         ranks on this node; default: its GPUs, else 2
  LOG_RANK     ranks whose log is shown, such as 0,1; default: 0
  PYTHON       interpreter to use

sections: {sections}
"""

REFERENCE = """\
# Configuration

Every key with its default, type and range. A TOML file sets `key` in the table `[section]`, an
argument `--section.key VALUE`. `./run_train.sh --help SECTION` prints the same text. The page is
written by `./shardloom python -m config reference` from `config/job_config.py`. What cannot be
combined is in [unsupported configurations](constraints.md).
"""


def help_text(names: Sequence[str] = (), *, width: int = 100) -> str:
    """Usage and every key with its default, type, range and description, or only ``names``.

    ``names``: sections or keys. Raises ``ConfigError`` for one that does not exist.
    """
    sections = _sections()
    known = [*sections, *(f"{s}.{key}" for s, properties in sections.items() for key in properties)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"sections: {', '.join(sections)}"
            raise ConfigError([f"--help {name}: no such section or key; {hint}"])
    lines = [] if names else _usage(list(sections), width)
    for section, properties in sections.items():
        shown = {
            key: field
            for key, field in properties.items()
            if not names or section in names or f"{section}.{key}" in names
        }
        if shown:
            lines += _section_help(section, shown, width)
    return "\n".join(lines)


def _usage(sections: list[str], width: int) -> list[str]:
    text = USAGE.format(configs=", ".join(config_names()), sections=", ".join(sections))
    paragraphs = text.split("\n\n")
    is_prose = [not p.startswith(("usage:", "environment:")) for p in paragraphs]
    wrapped = [
        textwrap.fill(p, width) if prose else p
        for p, prose in zip(paragraphs, is_prose, strict=True)
    ]
    return ["\n\n".join(wrapped), ""]


def _section_help(section: str, properties: dict[str, Any], width: int) -> list[str]:
    lines = [f"[{section}]"]
    for name, field in properties.items():
        lines += _key_help(f"--{section}.{name}", field, width)
    lines.append("")
    for name, table in _arrays(properties).items():
        lines.append(f"[[{section}.{name}]]")
        for key, field in table.items():
            lines += _key_help(key, field, width)
        lines.append("")
    return lines


def _key_help(key: str, field: dict[str, Any], width: int) -> list[str]:
    default = field.get("default")
    default_text = "" if default is None else f" = {json.dumps(default)}"
    head = f"{key}{default_text}   ({_type_text(field)})"
    indent = " " * 6
    return [
        # Choices may be longer than a line.
        *textwrap.wrap(
            head, width, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False
        ),
        *textwrap.wrap(
            field["description"], width, initial_indent=indent, subsequent_indent=indent
        ),
    ]


def _arrays(properties: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys of each property that is an array of tables."""
    items = {name: field.get("items", {}) for name, field in properties.items()}
    refs = {name: item["$ref"] for name, item in items.items() if "$ref" in item}
    tables = JobConfig.model_json_schema()["$defs"]
    return {name: tables[ref.rsplit("/", 1)[1]]["properties"] for name, ref in refs.items()}


def reference_page() -> str:
    """Return the text of docs/reference/config.md."""
    lines = [REFERENCE]
    for section, properties in _sections().items():
        lines += [f"## {section}", "", *_reference_keys(properties), ""]
        for name, table in _arrays(properties).items():
            lines += [f"### {section}.{name}", "", f"Keys of `[[{section}.{name}]]`:", ""]
            lines += [*_reference_keys(table), ""]
    return "\n".join(lines)


def _reference_keys(properties: dict[str, Any]) -> list[str]:
    lines = []
    for name, field in properties.items():
        default = field.get("default")
        default_text = "" if default is None else f" = `{json.dumps(default)}`"
        lines.append(f"- **`{name}`**{default_text} (`{_type_text(field)}`)")
        parts = " ".join(field["description"].split()).split("`")
        # Outside of code, a word such as <job.name> is no tag, and *.txt no emphasis.
        parts[::2] = [re.sub(r"\*", r"\\*", part.replace("<", "&lt;")) for part in parts[::2]]
        text = "`".join(parts)
        lines += ["", *textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    "), ""]
    return lines


def schema_text() -> str:
    """JSON schema of the TOML config, for editors."""
    return json.dumps(JobConfig.model_json_schema(), indent=2) + "\n"


def _sections() -> dict[str, dict[str, Any]]:
    schema = JobConfig.model_json_schema()
    refs = {name: p["$ref"].rsplit("/", 1)[1] for name, p in schema["properties"].items()}
    return {name: schema["$defs"][ref]["properties"] for name, ref in refs.items()}


def _type_text(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return "table"
    if "anyOf" in field:
        return " or ".join(_type_text(f) for f in field["anyOf"] if f.get("type") != "null")
    if "const" in field or "enum" in field:
        return " | ".join(str(v) for v in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        items = field["items"]
        # The plural of a choice would be another value.
        return f"array of {_type_text(items)}" + ("" if "enum" in items else "s")
    if field["type"] == "object":
        return "table"
    if field.get("pattern") == OUTSIDE_PATTERN:
        return "module:attribute"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return " ".join([field["type"], ", ".join(limits)]).strip()
