"""All commands, ``./shardloom COMMAND ...``; and for notebooks, ``from shardloom import train``.

In a wheel this file is the package ``shardloom``, with the folders of the repository inside. It
imports the standard library only and runs each command in a process of its own, so a program that
imports it may have modules of its own called ``data`` or ``models``.
"""

# ``./shardloom --help`` needs no environment, so that its Python may be an old one.
from __future__ import annotations

import difflib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).absolute().parent
# Module and purpose of each command.
COMMANDS = {
    "train": ("launcher.launch", "train a model, or resume its run; also ./run_train.sh"),
    "plan": ("tools.plan", "show what a configuration trains: sizes, schedule, FLOPs"),
    "fetch": ("tools.fetch", "download tokenizers and models of the Hugging Face Hub"),
    "status": ("tools.status", "show the status of runs"),
    "generate": ("tools.generate", "generate text from a checkpoint"),
    "train-tokenizer": ("tools.train_tokenizer", "train a byte-pair tokenizer on text"),
    "prepare": ("tools.prepare", "tokenize text into shards of tokens"),
    "convert": ("tools.convert", "import or export a model of Hugging Face"),
    "import-config": ("tools.import_config", "translate a TOML file of torchtitan"),
    "rollback": ("tools.rollback", "go back to an older checkpoint of a run"),
    "preflight": ("tools.preflight", "check the nodes before a run"),
    "show-batch": ("tools.show_batch", "show the documents of a step of a run"),
    "check-ledger": ("tools.check_ledger", "check which data each step of a run consumed"),
    "profile": ("tools.profile_summary", "summarize profiler traces: why a step is slow"),
    "report": ("tools.report", "show runs as one HTML page, or serve it while they go on"),
    "tensorboard": ("tensorboard.main", "TensorBoard; --logdir outputs/NAME/tensorboard"),
}
# As in runtime/exit_codes.py.
BAD_ARGUMENTS, CLOSED_PIPE = 2, 141
USAGE = """\
usage: shardloom COMMAND [arguments]

{commands}
  python ...       run the interpreter of all commands, for example python -m pip list

shardloom COMMAND --help explains a command; shardloom train --help SECTION the keys of a table."""


class TrainingError(RuntimeError):
    """A run that ended with another exit code than 0; its last lines are the message."""

    def __init__(self, code: int, lines: list[str]) -> None:
        super().__init__("\n".join([f"exit code {code}", *lines]))
        self.code = code


def train(
    config: str | Path = "debug_model",
    keys: Mapping[str, Any] | None = None,
    *,
    ngpu: int | None = None,
    show: bool = True,
) -> None:
    """Train ``config``, a TOML file or the name of one in train_configs/, in processes of its own.

    ``keys``: values by ``section.key``, such as ``{"training.steps": 100}``. ``ngpu``: ranks; by
    default one per GPU, else two. ``show``: print the log. An interrupt saves a checkpoint; the
    same call resumes. Raises ``TrainingError``, and ``ValueError`` for a table in ``keys``.
    """
    overrides = [f"--{key}={_toml(key, value)}" for key, value in (keys or {}).items()]
    command = command_line("train", [str(config), *overrides])
    variables = environment() | ({} if ngpu is None else {"NGPU": str(ngpu)})
    # In a session of its own, an interrupt reaches it once: a second one would end it unsaved.
    process = subprocess.Popen(
        command, env=variables, start_new_session=True, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    last_lines: deque[str] = deque(maxlen=20)
    with process:
        while True:
            try:
                _read(process, last_lines, show=show)
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
            except BaseException:  # The run would go on without a reader.
                process.terminate()
                raise
    if process.returncode:
        raise TrainingError(process.returncode, list(last_lines))


def _read(process: subprocess.Popen[str], last_lines: deque[str], *, show: bool) -> None:
    """Read the output of ``process`` to its end."""
    assert process.stdout is not None
    for line in process.stdout:
        last_lines.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def _toml(key: str, value: Any) -> str:
    """Text of a value as on the command line. JSON's numbers, booleans and lists are TOML's."""
    if isinstance(value, Mapping):
        raise ValueError(f"{key}: give each entry of the table by its own key, {key}.NAME")
    if isinstance(value, str) and not value.startswith(('"', "'")):
        return value
    # NumPy's numbers and arrays have tolist().
    return json.dumps(
        value, default=lambda own: getattr(own, "tolist", own.__str__)(), ensure_ascii=False
    )


def environment() -> dict[str, str]:
    """Variables with which Python imports Shardloom, but nothing of the current folder."""
    # An empty entry stands for the current folder.
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(dict.fromkeys([str(ROOT), *entries]))
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def command_line(name: str, arguments: list[str]) -> list[str]:
    """Program and arguments of a command. Raises ``ValueError`` for an unknown one."""
    if name == "python":
        return [sys.executable, *arguments]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "shardloom --help lists all"
        raise ValueError(f"{name!r} is not a command; {hint}")
    if name == "train":
        return [sys.executable, "-m", *train_module(arguments)]
    return [sys.executable, "-m", COMMANDS[name][0], *arguments]


def train_module(arguments: list[str]) -> list[str]:
    """Module and arguments of ``train``. Raises ``ValueError`` if two configurations are given."""
    for option in ("--help", "-h"):
        if option in arguments:
            return ["config", "help", *arguments[arguments.index(option) + 1 :]]
    config, overrides = os.environ.get("CONFIG_FILE", ""), arguments
    if arguments and not arguments[0].startswith("-") and not is_assignment(arguments[0]):
        first, *overrides = arguments
        if config not in ("", first):
            raise ValueError(f"CONFIG_FILE={config}, but the command line names {first}")
        config = first
    return [COMMANDS["train"][0], config or "debug_model", *overrides]


def is_assignment(word: str) -> bool:
    """True for a word such as ``optimizer.lr=1e-3``, which lacks its dashes."""
    return "=" in word and not word.endswith(".toml")


def usage() -> str:
    """Help of this program."""
    commands = "\n".join(f"  {name:<16} {purpose}" for name, (_, purpose) in COMMANDS.items())
    return USAGE.format(commands=commands)


def main() -> NoReturn:
    """Run the command that ``sys.argv`` names in the place of this process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h", "help") and arguments[:1]:
        name, arguments = arguments[0], ["--help", *arguments[1:]]
    if name in ("--help", "-h", "help"):
        try:
            print(usage(), flush=True)
        except BrokenPipeError:  # The reader, such as head, has seen enough.
            os._exit(CLOSED_PIPE)
        sys.exit()
    try:
        command = command_line(name, arguments)
    except ValueError as error:
        print(f"shardloom: {error}", file=sys.stderr)
        sys.exit(BAD_ARGUMENTS)
    os.execve(command[0], command, environment())


if __name__ == "__main__":
    main()
