"""Help text and JSON schema, both generated from ``JobConfig``."""

import json
import textwrap
from typing import Any

from config.job_config import JobConfig

USAGE = """\
usage: ./run_train.sh [--section.key VALUE | --section.key=VALUE] ...

Trains the model of CONFIG_FILE (default train_configs/debug_model.toml). Each argument overrides
one key; the last value of a key wins. Values are written as in TOML: 3e-4, true, 100, name. In
paths, also those of the TOML file, ~, $NAME and ${NAME} are expanded; $$ is a literal $.

environment:
  CONFIG_FILE  TOML file                    NGPU      ranks on this node (default: GPUs, else 2)
  PYTHON       interpreter to use           LOG_RANK  ranks whose log is shown (default 0): 0,1
"""


def help_text() -> str:
    """Usage, then every key with its default, type, range and description."""
    lines = [USAGE]
    for section, properties in _sections().items():
        lines.append(f"[{section}]")
        for name, field in properties.items():
            lines += _key_help(f"--{section}.{name}", field)
        lines.append("")
        for name, table in _arrays(properties).items():
            lines.append(f"[[{section}.{name}]]")
            for key, field in table.items():
                lines += _key_help(key, field)
            lines.append("")
    return "\n".join(lines)


def _key_help(key: str, field: dict[str, Any]) -> list[str]:
    default = field.get("default")
    default_text = "" if default is None else f" = {json.dumps(default)}"
    text = textwrap.wrap(
        field["description"], 90, initial_indent=" " * 6, subsequent_indent=" " * 6
    )
    return [f"  {key}{default_text}   ({_type_text(field)})", *text]


def _arrays(properties: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys of each property that is an array of tables."""
    items = {name: field.get("items", {}) for name, field in properties.items()}
    refs = {name: item["$ref"] for name, item in items.items() if "$ref" in item}
    tables = JobConfig.model_json_schema()["$defs"]
    return {name: tables[ref.rsplit("/", 1)[1]]["properties"] for name, ref in refs.items()}


def schema_text() -> str:
    """JSON schema of the TOML config, for editors."""
    return json.dumps(JobConfig.model_json_schema(), indent=2) + "\n"


def _sections() -> dict[str, dict[str, Any]]:
    schema = JobConfig.model_json_schema()
    refs = {name: p["$ref"].rsplit("/", 1)[1] for name, p in schema["properties"].items()}
    return {name: schema["$defs"][ref]["properties"] for name, ref in refs.items()}


def _type_text(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type_text(f) for f in field["anyOf"] if f.get("type") != "null")
    if "const" in field or "enum" in field:
        return " | ".join(str(v) for v in field.get("enum", [field.get("const")]))
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = [f"{sign} {field[key]:g}" for key, sign in signs.items() if key in field]
    return " ".join([field["type"], ", ".join(limits)]).strip()
