"""The command ``report``: files, names and mistakes. The page itself: tests/report."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from report.charts import build_charts
from report.page import MARKER
from report.pictures import file_names
from runtime import exit_codes
from tests.lib.metrics_files import lines_of, training_line, write_run
from tests.lib.repository import ROOT
from tools import report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", list(lines_of(20, validation_freq=5)))


def test_a_report_is_written_and_replaced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder.parent / "report.html"
    for _ in range(2):
        assert report.main([str(folder), "-o", str(output)]) == exit_codes.DONE
        assert output.read_bytes().startswith(MARKER)
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"report: {output}, 0.1 MB"
    assert captured.err == ""


def test_default_output_is_in_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report.main(["run"]) == exit_codes.DONE
    assert (tmp_path / "report.html").is_file()
    before = sorted(path.name for path in folder.rglob("*"))
    assert "report.html" not in before


def test_problems_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    assert report.main([str(folder), "-o", str(folder.parent / "r.html")]) == exit_codes.DONE
    expected = f"problem: {folder / 'metrics.jsonl'}:25: torn line (1 in all)\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: RUN_FOLDER"),
        (["{tmp}/none"], "none: not a run: no line in metrics.jsonl, no config.toml"),
        (["{tmp}"], "not a run"),
        (["{run}", "{run}/"], "a run is given twice"),
        (["{run}"] * 9, "9 runs: at most 8"),
        (["{run}", "-o", "{tmp}"], "{tmp}: a folder, not a file"),
        (["{run}", "-o", "{tmp}/no/r.html"], "no folder {tmp}/no"),
        (["{run}", "-o", "{run}/metrics.jsonl"], "metrics.jsonl: exists and was not written"),
        (["{run}", "-o", "{tmp}/empty"], "empty: exists and was not written"),
        (["{run}", "-o", "{tmp}/pipe"], "pipe"),
        (["{run}", "-o", "{tmp}/r.html", "--png", "{run}/config.toml"], "config.toml"),
        (["{run}", "--port", "1"], "--port has no effect without --watch"),
        (["{run}", "--watch", "-o", "x.html"], "--watch writes no file"),
        (["{run}", "--watch", "--png", "x"], "--watch writes no file"),
        (["{run}", "--watch", "--port", "65536"], "'65536' is not a whole number, 0 to 65535"),
        (["{run}", "--watch", "--port", "x"], "'x' is not a whole number"),
        (["{run}", "--json"], "unrecognized arguments: --json"),
    ],
)
def test_mistakes_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    tmp = folder.parent
    (tmp / "empty").touch()
    os.mkfifo(tmp / "pipe")
    before = (folder / "metrics.jsonl").read_bytes()
    filled = [argument.format(tmp=tmp, run=folder) for argument in arguments]
    assert report.main(filled) == exit_codes.BAD_CONFIG
    captured = capsys.readouterr()
    assert message.format(tmp=tmp) in captured.err
    assert "Traceback" not in captured.err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / parent / "run", list(lines_of(2))) for parent in ("first", "second")
    ]
    assert [run.name for run in report.read_runs(folders)] == ["first/run", "second/run"]
    assert [run.name for run in report.read_runs(folders[:1])] == ["run"]


@pytest.mark.parametrize(
    "names", [["metrics.jsonl"], ["config.toml"], ["metrics.jsonl", "config.toml"]]
)
def test_a_copy_of_some_files_is_shown(folder: Path, tmp_path: Path, names: list[str]) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in names:
        (copy / name).write_bytes((folder / name).read_bytes())
    (run,) = report.read_runs([copy])
    assert (run.state, run.why) == ("unknown", "no control/lock")
    assert report.main([str(copy), "-o", str(tmp_path / "report.html")]) == exit_codes.DONE


def test_pictures_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_run(folder.parent / "a $x^2$ run", list(lines_of(9000)))
    pictures = folder.parent / "pictures"
    for runs in ([folder], [folder, other]):
        output = folder.parent / "r.html"
        paths = [str(path).replace("$", "$$") for path in runs]
        arguments = [*paths, "-o", str(output), "--png", str(pictures)]
        assert report.main(arguments) == exit_codes.DONE
        for name in ("loss", "grad_norm", "lr", "rate", "mfu", "memory"):
            assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"picture: {pictures / 'loss.png'}" in capsys.readouterr().out


@pytest.mark.parametrize("losses", [[2.0], [2.0, None, 3.0, None, 4.0]])
def test_points_without_a_neighbor_are_in_the_picture(
    tmp_path: Path, losses: list[float | None]
) -> None:
    lines = [training_line(i, random.Random(i), loss=loss) for i, loss in enumerate(losses, 1)]
    folder = write_run(tmp_path / "run", lines)
    arguments = ["-o", str(tmp_path / "r.html"), "--png", str(tmp_path / "pictures")]
    assert report.main([str(folder), *arguments]) == exit_codes.DONE
    pixels = imread(tmp_path / "pictures" / "loss.png")[..., :3]
    blue = np.abs(pixels - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.05
    assert np.count_nonzero(blue) > 10 * len([loss for loss in losses if loss is not None])


def test_each_chart_has_a_picture(folder: Path) -> None:
    metrics = ["维基", "代码", "a+b", "a=b", "A-b", "a_b_2", "rate", "a" * 260, "维" * 255]
    with (folder / "metrics.jsonl").open("a") as file:
        line = training_line(21, random.Random(0)) | dict.fromkeys(metrics, 1.0)
        print(json.dumps(line), file=file)
    charts, _ = build_charts(report.read_runs([folder]))
    names = [*file_names(charts)]
    assert len({name.casefold() for name in names}) == len(charts)
    assert max(len(name.encode()) for name in names) <= 255
    of_metrics = ["维基", "代码", "a_b", "a_b_2", "A_b_3", "a_b_2_2", "rate_2"]
    assert names[-len(metrics) : -2] == [f"{name}.png" for name in of_metrics]


def test_another_picture_is_not_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib import pyplot

    pictures = folder.parent / "pictures"
    pictures.mkdir()
    figure = pyplot.figure()
    figure.savefig(pictures / "loss.png")
    pyplot.close(figure)
    (folder.parent / ".r.html").write_text("mine")
    before = (pictures / "loss.png").read_bytes()
    arguments = [str(folder), "-o", str(folder.parent / "r.html"), "--png", str(pictures)]
    assert report.main(arguments) == exit_codes.BAD_CONFIG
    assert "loss.png: exists and was not written by this command" in capsys.readouterr().err
    assert [path.name for path in pictures.iterdir()] == ["loss.png"]
    assert (pictures / "loss.png").read_bytes() == before
    assert not (folder.parent / "r.html").exists()
    (pictures / "loss.png").unlink()
    assert report.main(arguments) == exit_codes.DONE
    assert (folder.parent / ".r.html").read_text() == "mine"


def test_missing_matplotlib_is_named(folder: Path) -> None:
    script = "import sys; sys.modules['matplotlib'] = None; from tools import report;"
    script += " sys.exit(report.main(sys.argv[1:]))"
    output = folder.parent / "r.html"
    arguments = [str(folder), "-o", str(output), "--png", str(folder.parent / "pictures")]
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exit_codes.BAD_CONFIG
    command = f"{sys.executable} -m pip install 'matplotlib>=3.9'"
    assert done.stderr == f"--png needs matplotlib: {command}\n"
