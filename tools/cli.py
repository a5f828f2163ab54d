"""Command-line parsing and error handling shared by the ``main`` functions of all tools."""

import argparse
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from config.paths import expand_path, is_url
from runtime import exit_codes
from runtime.filesystem import open_input
from runtime.log import discard, escape_on_stdout, report

MARKED_BYTES = 1024


class Parser(argparse.ArgumentParser):
    """Argument parser that prints ``description`` verbatim and raises ``ValueError`` on errors."""

    def __init__(self, prog: str, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def reporting_errors(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wrap ``main`` to print ``OSError`` and ``ValueError`` on stderr and return BAD_CONFIG.

    If the reader of stdout, such as ``head``, is gone, return CLOSED_PIPE.
    """

    @wraps(main)
    def wrapper(arguments: list[str]) -> int:
        escape_on_stdout()
        try:
            code = main(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            discard(sys.stdout)
            return exit_codes.CLOSED_PIPE
        except (OSError, ValueError) as error:
            report(error)
            return exit_codes.BAD_CONFIG

    return wrapper


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split ``arguments`` into the tool's own and config overrides (``--section.key``)."""
    own, overrides, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        key, is_given, _ = argument.partition("=")
        if not re.match(r"--[^.]+\.", key):
            own.append(argument)
            continue
        overrides.append(argument)
        if not is_given and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def toml_text(value: Any) -> str:
    """Format a TOML value on one line."""
    if isinstance(value, dict):
        pairs = (f"{toml_text(key)} = {toml_text(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").removesuffix("\n")


def run_name(folder: Path) -> list[str]:
    """Arguments of the command ``train`` for a run of its own, named like ``folder``."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.resolve().name)
    return ["--job.name", re.sub(r"^[.-]", "_", name)[:64] or "default"]


def path_text(text: str) -> str:
    """Argument type for a path, or a name such as a tokenizer's: expands ``~`` and variables."""
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def path_argument(text: str) -> Path:
    """Argument type for a path; expands ``~`` and variables, and rejects URLs."""
    path = path_text(text)
    if is_url(path):
        raise argparse.ArgumentTypeError(f"{path} is a URL, not a path of the file system")
    return Path(path)


def check_output(path: Path, mark: bytes) -> None:
    """Raise ``ValueError`` if ``path`` cannot be written, or is a file without ``mark``.

    Files of the tool have the mark in their first bytes; it would overwrite another one.
    """
    if path.is_dir():
        raise ValueError(f"{path}: a folder, not a file")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: no folder {path.parent}")
    if path.exists():
        with open_input(path) as file:
            if mark not in file.read(MARKED_BYTES):
                text = "exists and was not written by this command; choose another name"
                raise ValueError(f"{path}: {text}")


def whole_number(least: int, most: int = 10**18 - 1) -> Callable[[str], int]:
    """Argument type for an integer from ``least`` to ``most``."""

    def parse(text: str) -> int:
        # Python raises on thousands of digits; every bound has fewer than twenty.
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} to {most}")
        return int(text)

    return parse
