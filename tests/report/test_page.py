"""The page as a file: one script, whose hash its policy has, and nothing from elsewhere."""

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

from report.history import Axis
from report.page import MARKER, _axis, build_data, render
from report.run import read_run
from tests.lib.metrics_files import lines_of, write_run
from tools.status import state_of


def page_of(tmp_path: Path) -> str:
    run = read_run(write_run(tmp_path / "run", list(lines_of(30))), "run", 2e9, state_of)
    return render(build_data([run], 2e9)).decode()


def policy_of(page: str) -> dict[str, str]:
    match = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert match is not None
    return dict(part.split(" ", 1) for part in match[1].split("; "))


def test_policy_allows_the_page_s_own_script_and_style_only(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    policy = policy_of(page)
    assert policy["default-src"] == policy["connect-src"] == policy["form-action"] == "'none'"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert policy_of(render(None).decode())["connect-src"] == "'self'"


def test_page_refers_to_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert page.startswith(MARKER.decode())
    addresses = set(re.findall(r"https?://[^\"' ]+", page))
    # The name of a format, which no browser asks for.
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"data:,"}


def test_data_are_base64_of_json(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    (text,) = re.findall(r'<script type="text/plain" id="data">(.*?)</script>', page, re.DOTALL)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    data = json.loads(gzip.decompress(base64.b64decode(text)))
    (loss,) = (chart for chart in data["charts"] if chart["id"] == "loss")
    assert len(loss["series"][0]["mean"]) == 30
    # Every line has a point of its own, so its value is the lowest and highest too.
    assert "low" not in loss["series"][0]


def test_places_are_differences() -> None:
    axis = _axis(Axis([1, 5, 6], [10.4, 20.6, 20.6], [0.0, 0.125, 3.0]))
    assert axis == {"step": [1, 4, 1], "tokens": [10, 11, 0], "time": [0, 12, 288]}
    assert _axis(Axis([1], None, None)) == {"step": [1], "tokens": None, "time": None}


def test_script_inserts_text_only_as_text() -> None:
    parts = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(")
    page = render(None).decode()
    assert not [part for part in parts if part in page]
