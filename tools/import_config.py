"""Translate a TOML file of torchtitan: ``shardloom import-config X.toml [-o OUT.toml]``

Prints the configuration, or writes it to OUT.toml, which must not exist; and on stderr what was
dropped, what differs and what is still missing. A key that changes what is trained and has no
equivalent is an error, with what to do; without -o nothing but the translation is on stdout.
Every key is explained in docs/reference/torchtitan_keys.md.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from config import ConfigError, JobConfig, load_config
from config.loader import read_toml
from data.matching import match_paths
from data.tokenizer import load_tokenizer
from models import find_model
from parallelisms.constraints import check_constraints
from runtime import exit_codes
from runtime.commands import command_text
from runtime.log import say
from runtime.printable import printable
from tools.cli import Parser, path_argument, reporting_errors
from tools.torchtitan.given import Translation
from tools.torchtitan.keys import KEYS
from tools.torchtitan.translate import translate

HEADER = "Translated by ./shardloom import-config from a TOML file of torchtitan"


@reporting_errors
def main(arguments: list[str]) -> int:
    parser = Parser("shardloom import-config", description=__doc__)
    parser.add_argument("file", type=path_argument, metavar="X.toml")
    parser.add_argument("-o", "--output", type=path_argument, metavar="OUT.toml")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.exists():
        raise ValueError(f"{options.output}: exists, and is not overwritten")
    tables, errors = read_toml(options.file)
    if errors:
        raise ConfigError(errors)
    translation = translate(tables, options.file.stem)
    report_lines("changes nothing of what is trained", translation.dropped_lines())
    if problems := translation.problems:
        if is_ours(options.file):
            hint = "also loads as a configuration of Shardloom; if it is one, train it as it is"
            problems = [*problems, hint]
        raise ConfigError([f"{options.file}: {problem}" for problem in problems])
    text = config_text(translation)
    config = check(text, options.file)
    report_lines("differs from torchtitan", translation.notes)
    lacking = missing(config)
    report_lines("still missing", lacking)
    if options.output is None:
        say(*text.splitlines())
        return exit_codes.DONE
    with options.output.open("x", encoding="utf-8") as file:
        file.write(text)
    then = "once that is there, " if lacking else ""
    command = command_text("train", options.output)
    say(f"wrote {options.output}; {then}{command} trains it", file=sys.stderr)
    return exit_codes.DONE


def report_lines(title: str, lines: list[str]) -> None:
    """Print ``lines`` under a title on stderr, if there are any."""
    if lines:
        say(f"{title}:", *(f"  {line}" for line in lines), file=sys.stderr)


def is_ours(path: Path) -> bool:
    """Return True if ``path`` needs no translation."""
    try:
        load_config(path, [])
    except ConfigError:
        return False
    return True


def config_text(translation: Translation) -> str:
    """Return the TOML text of a translation."""
    tables: dict[str, dict[str, Any]] = {}
    for section, field in JobConfig.model_fields.items():
        keys = {name: f"{section}.{name}" for name in type(field.default).model_fields}
        values = translation.keys
        table = {name: values[key] for name, key in keys.items() if key in values}
        tables |= {section: table} if table else {}
    lines = [HEADER, translation.description, *translation.notes]
    comments = [f"# {printable(line)}\n" for line in lines if line]
    return "".join(comments) + "\n" + tomli_w.dumps(tables)


def check(text: str, origin: Path) -> JobConfig:
    """Return ``text`` as a configuration. Raises ``ValueError`` if it is not one that runs.

    The ranks are as few as the degrees allow, with GPUs, which this machine may lack.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "translation.toml"
        path.write_text(text, encoding="utf-8")
        try:
            config = load_config(path, [])
        except ConfigError as error:
            messages = [message.removeprefix(f"{path}: ") for message in error.messages]
            raise ConfigError([with_origin(origin, message) for message in messages]) from None
    degrees = config.parallelism
    shards = degrees.data_parallel_shard_degree
    world_size = (
        degrees.data_parallel_replicate_degree
        * (degrees.expert_parallel_degree if shards == -1 else shards)
        * degrees.tensor_parallel_degree
        * degrees.context_parallel_degree
        * degrees.pipeline_parallel_degree
    )
    emulated = config.float8.model_copy(update={"emulate": config.float8.recipe != "none"})
    anywhere = config.model_copy(update={"float8": emulated})
    try:
        _, args = find_model(config.model.name, config.model.flavor, config.model.args)
        check_constraints(anywhere, args, world_size, has_gpu=True)
    except ConfigError as error:
        raise ConfigError([with_origin(origin, text) for text in error.messages]) from None
    return config


def with_origin(origin: Path, message: str) -> str:
    """Return a ``message`` that begins with a key of ours, with torchtitan's name for it."""
    ours = message.partition(":")[0]
    theirs = [key.name for key in KEYS if key.to == ours and key.name != ours]
    return f"{origin}: translated{f' from {theirs[0]}' if theirs else ''}: {message}"


def missing(config: JobConfig) -> list[str]:
    """Return what the configuration names and this folder lacks."""
    found = []
    tokenizer = config.data.tokenizer
    try:
        if "/" in tokenizer and not Path(tokenizer).exists():
            raise ValueError(f"data.tokenizer: {tokenizer!r} does not exist")
        load_tokenizer(tokenizer, bos=config.data.bos, eos=config.data.eos)
    except ValueError as error:
        found.append(f"{error}; put the tokenizer there, or set the key to where it is")
    if config.data.source == "files" and not match_paths(config.data.path):
        found.append(
            f"data.path: no file matches {config.data.path!r}; put the data there, or set the key"
            " to where it is"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
