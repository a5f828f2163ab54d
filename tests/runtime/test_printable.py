"""Printed text controls no terminal and forges no line."""

import ast
import io
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from config import ConfigError
from launcher import launch
from runtime.log import OF_LINES, error_text, init_logging, logger, report, say
from runtime.printable import error_line, format_traceback, printable, printable_lines
from tests.lib.repository import ROOT, python_files
from tools import slurm_end, status

ROW = pytest.mark.row(35, "Nothing printed controls a terminal or forges a line")
FORGED = "12:00:00 checkpoint: saved outputs/run"
HOSTILE = {
    "line break": f"x\n{FORGED}",
    "carriage return": f"x\r{FORGED}",
    "both": f"x\r\n{FORGED}",
    "vertical tab": f"x\v{FORGED}",
    "next line": f"x\x85{FORGED}",
    "line separator": f"x\u2028{FORGED}",
    "paragraph separator": f"x\u2029{FORGED}",
    "escape": "x\x1b[2J\x1b]0;title\x07",
    "C1": "x\x9b2J",
    "backspace": "x\x08\x08\x08y",
    "delete": "x\x7f",
    "NUL": "x\0y",
    "override": "x\u202egnp.exe",
    "isolate": "x\u2066y\u2069",
    "mark": "x\u200fy",
    "zero width": "x\u200by",
    "surrogate": "x\udcff",
}


def printed(act: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines that ``act`` prints, split only where a terminal would."""
    act()
    out, err = capsys.readouterr()
    return (out + err).removesuffix("\n").split("\n")


@ROW
@pytest.mark.parametrize("name", HOSTILE)
def test_each_way_of_printing_escapes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE[name]
    init_logging()
    ways: list[Callable[[], object]] = [
        lambda: logger.info("data: %s", text),
        lambda: logger.warning(f"data: {text}"),
        lambda: say(f"data: {text}"),
        lambda: report(ValueError(text)),
        lambda: report(ConfigError([text])),
        lambda: print(error_text(OSError(text))),
    ]
    for way in ways:
        (line,) = printed(way, capsys)
        assert line.isprintable()
        assert not line.startswith(FORGED)
        assert ascii(text)[1:-1].replace("\\\\", "\\")[-4:] in ascii(line)
    # Of texts of several lines, none but the first begins where a log line does.
    first, *others = printed(lambda: logger.info("sample:\n%s", text, extra=OF_LINES), capsys)
    assert first.endswith("sample:")
    assert all(line.startswith("  ") for line in others)
    try:
        raise ValueError(text)
    except ValueError as error:
        first, *others = format_traceback(error).removesuffix("\n").split("\n")
    assert first.startswith("Traceback")
    assert all(line.startswith("  ") for line in others)


def test_text_is_kept() -> None:
    for text in ("", "outputs/run", "naïve «世界» 🙂", "a\\b", "%s {0}"):
        assert printable(text) == printable_lines(text) == text
    family = "👩\u200d👩\u200d👧\n\tif x:\n"
    assert printable_lines(family) == family
    assert printable_lines("a\x1b[2J\x07\x9b b\r\tc\n\u202eé\ufffd") == (
        "a\\x1b[2J\\x07\\x9b b\\r\tc\n\\u202eé\ufffd"
    )


@pytest.mark.parametrize(
    "begin",
    [
        init_logging,
        lambda: launch.main([], {}),
        lambda: slurm_end.main([]),
        lambda: status.main(["--unknown"]),
    ],
    ids=["rank", "launcher", "slurm_end", "tool"],
)
def test_what_stdout_cannot_encode_is_escaped(
    begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_ = io.BytesIO()
    monkeypatch.setattr("sys.stdout", stdout := io.TextIOWrapper(bytes_, encoding="latin-1"))
    begin()
    say("caf\u00e9 \u2193 \u4e16")
    logger.info("\u2193")
    stdout.flush()
    assert bytes_.getvalue().startswith(b"caf\xe9 \\u2193 \\u4e16\n")
    if begin is init_logging:
        assert bytes_.getvalue().endswith(b" \\u2193\n")
    monkeypatch.undo()
    init_logging()


def test_messages_of_a_config_error_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(lambda: report(ConfigError(["a: 1", "b\n: 2"])), capsys) == ["a: 1", "b\\n: 2"]


# The first two run before any package is installed; the third prints a text as it is. The others
# quote only the user's own command line, and lines that the launcher has escaped.
MAY_PRINT = (
    "tools/make_environment.py", "tools/missing_requirements.py", "tools/generate.py",
    "config/__main__.py", "shardloom.py",
)  # fmt: skip
SAFE = {"error_text", "format_traceback", "help_text"}


def raw_prints(source: str) -> list[str]:
    """Calls of ``print`` with anything but constants, docstrings and escaped text."""

    def is_safe(node: ast.expr) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return node.func.id in SAFE
        return isinstance(node, ast.Constant) or ast.unparse(node) == "__doc__"

    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    prints = [call for call in calls if ast.unparse(call.func) == "print"]
    return [ast.unparse(call) for call in prints if not all(map(is_safe, call.args))]


@ROW
def test_tools_print_escaped_text_only(record_result: Callable[[str], None]) -> None:
    folders = ("tools", "launcher", "checkpoint", "config", "metrics", "resume", "run_spec")
    files = [
        file
        for file in python_files()
        if (file.parts[0] in folders or len(file.parts) == 1) and str(file) not in MAY_PRINT
    ]
    assert {Path("train.py"), Path("saved_model.py"), Path("tools/status.py")} <= {*files}
    found = {str(file): raw_prints((ROOT / file).read_text()) for file in files}
    # Escaped before ranks sent it, or before it was gathered.
    known = {"print(config_error, file=sys.stderr)",
             "print(red(rejection), file=sys.stderr)",
             "print(end.verdict.traceback, end='', file=sys.stderr)"}  # fmt: skip
    assert {text for texts in found.values() for text in texts} == known
    assert raw_prints("print(f'{path}: {error}')")
    assert raw_prints("print('a', error, file=file)")
    assert not raw_prints("print('a', __doc__, error_text(error))")
    record_result(
        f"{len(HOSTILE)} texts in 8 ways of printing: 0 raw; {len(files)} files, 0 raw prints"
    )


def test_formatter_is_on_the_logger() -> None:
    init_logging()
    (handler,) = logger.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream := io.StringIO())
    logger.info("a\nb")
    assert stream.getvalue().endswith(" a\\nb\n")
    init_logging()


def test_line_of_an_error_has_causes_that_its_text_does_not_quote() -> None:
    # As PyTorch's pipelines raise it.
    stage = RuntimeError("\n            [Stage 1] failed to run forward:\n            args: ()\n")
    stage.__cause__ = cause = KeyError("w1")
    assert error_line(stage) == "RuntimeError: [Stage 1] failed to run forward: KeyError: 'w1'"
    assert error_line(cause) == "KeyError: 'w1'"
    quoting = ValueError("config.json: 'w1'")
    quoting.__cause__ = stage.__cause__
    assert error_line(quoting) == "ValueError: config.json: 'w1'"
    assert error_line(ValueError()) == "ValueError"
