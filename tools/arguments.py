"""The command lines of tools, and what their ``main`` functions have in common."""

import argparse
import re
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from runtime import exit_codes


class Parser(argparse.ArgumentParser):
    """Shows ``description`` as it is written; raises ``ValueError`` for what it cannot read."""

    def __init__(self, prog: str, **options: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, formatter_class=formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def telling_mistakes(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Wrap ``main``: ``OSError`` and ``ValueError`` become a line on stderr and BAD_CONFIG."""

    @wraps(main)
    def told(arguments: list[str]) -> int:
        try:
            return main(arguments)
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return exit_codes.BAD_CONFIG

    return told


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The tool's own arguments, and the overrides of a run's keys (``--section.key``)."""
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


def whole_number(least: int, most: int = 10**18 - 1) -> Callable[[str], int]:
    """The type of an argument that is one of ``least`` to ``most``."""

    def parse(text: str) -> int:
        # Twenty digits are more than any bound; Python refuses to read thousands.
        is_number = text.isascii() and text.isdecimal() and len(text) < 20
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {least} to {most}")
        return int(text)

    return parse
