"""The report in a browser: it shows what the run's files say, and runs no script but its own."""

import io
import json
import random
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from launcher.failures import record_failure
from report.charts import KINDS
from report.watch import Source, build_server
from runtime import exit_codes
from tests.lib.browser import CHROMIUM, Page, browser_page
from tests.lib.metrics_files import TOKENS, lines_of, training_line, write_run
from tools import report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium on PATH: apt-get install chromium"
)
PLOT = "#charts figure:first-child .plot > svg"
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>{{DATA}}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The browser's page, in which no script may fail."""
    browser.errors.clear()
    browser.requests.clear()
    browser.prefer("light")
    yield browser
    assert browser.errors == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 400 steps whose loss falls from 8 to 4, with a restart and samples."""
    values = [
        training_line(step, random.Random(step), loss=8 - step / 100, restarts=int(step > 200))
        for step in range(1, 401)
    ]
    folder = write_run(tmp_path_factory.mktemp("runs") / "first", values)
    samples = [{"step": n, "prompt": "def ", "text": f"text of {n}", "seed": 1} for n in (100, 400)]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    return folder


def written(*folders: Path) -> str:
    """Write the report of runs; return its address."""
    output = folders[0].parent / "report.html"
    assert report.main([*map(str, folders), "-o", str(output)]) == exit_codes.DONE
    return f"file://{output}"


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def tip(page: Page, share: float) -> str:
    """Text beside the pointer at a share of the first chart's width."""
    left, top, width, height = page.box(PLOT)
    # The margins of chart.js.
    page.mouse("mouseMoved", left + 50 + share * (width - 62), top + height / 2)
    page.wait("document.querySelector('.tip').style.visibility === 'visible'")
    return text_of(page, ".tip")


def drag(page: Page, begin: float, end: float) -> None:
    left, top, width, height = page.box(PLOT)
    places = [left + 50 + share * (width - 62) for share in (begin, end)]
    page.drag((places[0], top + height / 2), (places[1], top + height / 2))
    page.wait("!document.getElementById('reset').disabled")


def view(page: Page) -> list[float]:
    return page.evaluate("page.view")


@pytest.mark.parametrize(
    ("scheme", "width", "is_light"),
    [("light", 1280, True), ("dark", 1280, False), ("light", 390, True)],
)
def test_page_is_shown(page: Page, folder: Path, scheme: str, width: int, is_light: bool) -> None:
    page.prefer(scheme)
    page.open(written(folder), width=width)
    pixels = imread(io.BytesIO(page.screenshot()))[..., :3]
    assert (pixels.mean() > 0.8) == is_light
    assert (pixels.mean() < 0.25) != is_light
    assert len(np.unique(pixels.sum(axis=2))) > 50
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('#charts .curve').length") >= 10
    assert text_of(page, "h1") == "first"
    assert len(page.requests) == 1
    page.evaluate("document.querySelector('#theme input[value=dark]').click()")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 20, 21)"


def test_pointer_shows_values(page: Page, folder: Path) -> None:
    page.open(written(folder))
    # Steps run from 1 to 400.
    shown = tip(page, 99 / 399)
    assert "step 100" in shown
    assert f"{100 * TOKENS / 1e3:.1f}k tokens" in shown
    assert "training7" in shown
    assert "restart 1, after step 200" in tip(page, 199 / 399)
    page.evaluate("document.querySelector('input[value=tokens]').click()")
    assert "step 100" in tip(page, 99 / 399)
    page.evaluate("document.querySelector('input[value=time]').click()")
    assert "step 100" in tip(page, 99 / 399)


def test_drag_zooms_all_charts_and_double_click_shows_all(page: Page, folder: Path) -> None:
    page.open(written(folder))
    drag(page, 0.25, 0.5)
    low, high = view(page)
    assert (low, high) == (pytest.approx(101, abs=2), pytest.approx(200, abs=2))
    assert page.evaluate("page.shownCharts().every((c) => c.x.low === page.view[0])")
    page.evaluate("document.querySelector('input[value=tokens]').click()")
    assert view(page) == [pytest.approx(low * TOKENS), pytest.approx(high * TOKENS)]
    left, top, _, _ = page.box(PLOT)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, left + 90, top + 90, button="left", clickCount=count)
    page.wait("document.getElementById('reset').disabled")
    assert view(page) is None


def test_keys_move_the_cursor_and_zoom(page: Page, folder: Path) -> None:
    page.open(written(folder))
    page.evaluate(f"document.querySelector({json.dumps(PLOT)}).focus()")
    page.press("Home")
    assert text_of(page, "#live").startswith("step 1 ")
    page.press("End")
    assert text_of(page, "#live").startswith("step 400 ")
    page.press("ArrowLeft")
    assert text_of(page, "#live").startswith("step 396 ")
    page.press("+")
    assert view(page) is not None
    page.press("Escape")
    assert view(page) is None


def test_limit_and_plan_do_not_say_where_the_cursor_is(page: Page, folder: Path) -> None:
    page.open(written(folder))
    for chart in ("grad_norm", "lr"):
        page.evaluate(f"page.moveCursor(page.charts.get('{chart}'), 100)")
        text = page.evaluate(f"page.charts.get('{chart}').tip.textContent")
        assert text.startswith("step 100 "), text


def test_click_beside_the_plot_zooms_nothing(page: Page, folder: Path) -> None:
    page.open(written(folder))
    left, top, width, _ = page.box(PLOT)
    for x in (left + 20, left + width - 2):
        for kind in ("mousePressed", "mouseReleased"):
            page.mouse(kind, x, top + 90, button="left", clickCount=1)
        assert view(page) is None
    # A view without width is none.
    page.evaluate("page.zoom([40, 40])")
    assert view(page) is None


def test_view_does_not_leave_the_data(page: Page, folder: Path) -> None:
    page.open(written(folder))
    # The planned learning rate goes on after the last line.
    low, high = page.evaluate(
        "page.shownCharts().map((c) => c.whole())"
        ".reduce(([a, b], [c, d]) => [Math.min(a, c), Math.max(b, d)])"
    )
    for shift in (5000, -5000):
        page.evaluate(f"page.zoom([{shift + 100}, {shift + 200}])")
        assert view(page) == ([high - 100, high] if shift > 0 else [low, low + 100])
    page.evaluate(f"document.querySelector({json.dumps(PLOT)}).focus()")
    page.press("ArrowLeft")
    assert view(page) == [low, low + 100]


@pytest.mark.parametrize("is_log", [False, True])
def test_ticks_of_a_small_part_differ(page: Page, tmp_path: Path, is_log: bool) -> None:
    lines = [
        training_line(step, random.Random(step), loss=2.3451 + 1e-5 * (step % 80))
        for step in range(54_000, 54_400)
    ]
    page.open(written(write_run(tmp_path / "run", lines)))
    if is_log:
        page.evaluate("document.getElementById('log-x').click()")
    for axis in ("step", "tokens", "time"):
        page.evaluate(f"document.querySelector('input[value={axis}]').click()")
        page.evaluate("{const [a, b] = page.charts.get('loss').whole();"
                      " page.zoom([a + (b - a) * 0.5, a + (b - a) * 0.6])}")  # fmt: skip
        texts = page.evaluate(
            "[...document.querySelectorAll('#charts figure:first-child .plot text')]"
            ".map((t) => t.textContent)"
        )
        assert len(texts) == len(set(texts)) > 4, texts


def test_logarithm_of_the_first_time_is_not_drawn(page: Page, folder: Path) -> None:
    page.open(written(folder))
    page.evaluate("document.getElementById('log-x').click()")
    page.evaluate("page.zoom([1, 100])")
    page.evaluate("document.querySelector('input[value=time]').click()")
    assert view(page) == [pytest.approx(0.5), pytest.approx(49.5, abs=1)]
    assert "NaN" not in page.evaluate("document.getElementById('charts').innerHTML")


def test_last_failure_is_within_the_time_axis(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", list(lines_of(400)))
    # As if its lines were of some minutes ago.
    record_failure(folder / "control", lines=["planted"], codes={0: 1})
    begin = time.time() - 320
    lines = [
        training_line(step, random.Random(step), time=begin + step / 2) for step in range(1, 401)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.open(written(folder))
    page.evaluate("document.querySelector('input[value=time]').click()")
    marks = page.evaluate("page.allMarks.filter((m) => m.kind === 'failure').map((m) => m.place())")
    assert len(marks) == 1
    assert marks[0] > 250
    assert page.evaluate("document.querySelectorAll('#charts .k-failure').length") > 5


def test_smoothing_and_logarithms(page: Page, folder: Path) -> None:
    page.open(written(folder))
    curve = "document.querySelector('#charts .curve.line').getAttribute('d')"
    before = page.evaluate(curve)
    page.evaluate(
        "{const s = document.getElementById('smoothing'); s.value = 90;"
        " s.dispatchEvent(new Event('input'))}"
    )
    assert page.evaluate(curve) != before
    assert page.evaluate("document.querySelectorAll('#charts figure:first-child .raw').length") == 1
    # The mean of what came before lags behind a falling loss.
    assert "training7.0" in tip(page, 99 / 399)
    for selector in ("#charts figure:first-child figcaption button", "#log-x"):
        page.evaluate(f"document.querySelector('{selector}').click()")
    assert page.evaluate("page.charts.get('loss').y.isLog && page.charts.get('loss').x.isLog")
    assert "NaN" not in page.evaluate("document.getElementById('charts').innerHTML")


def test_controls_have_names_and_nothing_shifts(page: Page, folder: Path) -> None:
    page.open(written(folder))
    unnamed = "[...document.querySelectorAll('input, button')].filter((e) => !e.ariaLabel"
    unnamed += " && !e.labels?.length && !e.textContent.trim()).length"
    assert page.evaluate(unnamed) == 0
    labels = page.evaluate("[...document.querySelectorAll('.plot > svg')].map((e) => e.ariaLabel)")
    assert labels[0].startswith("Loss, nats per token: training from 7.99 to 4.")
    tip(page, 0.3)
    drag(page, 0.2, 0.8)
    shift = "new Promise((done) => new PerformanceObserver((list) => done(list.getEntries()"
    shift += ".filter((e) => !e.hadRecentInput).reduce((sum, e) => sum + e.value, 0)))"
    shift += ".observe({type: 'layout-shift', buffered: true}) ?? setTimeout(() => done(0), 200))"
    assert page.evaluate(shift) == 0


def test_samples_and_events(page: Page, folder: Path) -> None:
    page.open(written(folder))
    assert text_of(page, "#samples pre") == "def text of 400"
    page.evaluate("{const s = document.querySelector('#samples input'); s.value = 0; s.oninput()}")
    assert text_of(page, "#samples pre") == "def text of 100"
    assert "restart 1, after step 200" in text_of(page, "#events tbody")


def test_runs_are_compared(page: Page, folder: Path) -> None:
    other = write_run(folder.parent / "second", list(lines_of(300, validation_freq=50)))
    text = (folder / "config.toml").read_text()
    (other / "config.toml").write_text(text.replace("lr = 0.0003", "lr = 0.001"))
    page.open(written(folder, other))
    rows = page.evaluate("[...document.querySelectorAll('#config tbody tr')].map(r => r.innerText)")
    assert [row.split() for row in rows] == [["optimizer.lr", "0.0003", "0.001"]]
    legend = "[...document.querySelectorAll('.legend button')].map((b) => b.textContent)"
    assert {"first: training", "second: training", "second: validation", "first"} <= set(
        page.evaluate(legend)
    )
    shown = tip(page, 0.2)
    assert "first: training" in shown
    assert "second: training" in shown


LAYERS = ("tok_embeddings", *map(str, range(32)), "norm", "output")
LOOKS = """[...document.querySelectorAll('#charts figure')].map((figure) => [
  figure.querySelector('h2').textContent,
  [...figure.querySelectorAll('.curve')]
    .map((curve) => getComputedStyle(curve))
    .map((style) => [style.color, style.strokeDasharray]),
])"""


def with_layers(lines: Iterable[dict[str, Any]], freq: int) -> Iterator[dict[str, Any]]:
    """Add statistics of 32 layers to every ``freq``-th line, and 12 sources to validations."""
    keys = [key for kind in KINDS if kind.id.startswith("layer_") for key in kind.curves]
    for line in lines:
        loss = line.get("validation_loss")
        yield line | ({} if loss is None else {f"validation_loss/{i}": loss + i for i in range(12)})
        if line["step"] % freq == 0 and "loss" in line:
            noise = random.Random(line["step"])
            values = {f"{key}{layer}": noise.random() for key in keys for layer in LAYERS}
            yield {"step": line["step"], "time": line["time"], "restarts": 0} | values


def lightness(color: str) -> float:
    """Of a color as browsers print it: ``oklch(0.7 0.14 70)``."""
    return float(color.partition("(")[2].split()[0])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_tell_layers_apart_in_their_order(page: Page, tmp_path: Path, scheme: str) -> None:
    lines = list(with_layers(lines_of(40, validation_freq=2), 4))
    folders = [write_run(tmp_path / name, lines) for name in ("first", "second")]
    page.prefer(scheme)
    page.open(written(folders[0]))
    looks = dict(page.evaluate(LOOKS))
    assert len(looks["Validation loss by source"]) == 12
    for look in looks.values():
        assert len({tuple(part) for part in look}) == len(look)
    for title in ("Weights of layers", "Dead experts of layers"):
        shades = [lightness(color) for color, _ in looks[title]]
        assert len(shades) == 24
        assert shades == sorted(shades, reverse=True)
        # Readable on the card, which is white or nearly black.
        assert 0.28 < min(shades) < max(shades) < 0.72 if scheme == "light" else min(shades) > 0.5
    # Two runs have a color each, and shades of it.
    page.open(written(*folders))
    looks = dict(page.evaluate(LOOKS))
    for title, count in (("Weights of layers", 48), ("Validation loss by source", 24), ("MFU", 4)):
        assert len({tuple(part) for part in looks[title]}) == len(looks[title]) == count


def test_hostile_texts_stay_texts(page: Page, tmp_path: Path) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    lines = [training_line(n, random.Random(0)) | {HOSTILE: 1.0, "__proto__": 1} for n in (1, 2)]
    lines.append({"step": 2, "validation_loss": 1.0, f"validation_loss/{HOSTILE}": 1.0})
    folder = write_run(tmp_path / name, lines)
    config = json.dumps(HOSTILE)
    with (folder / "config.toml").open("a") as file:
        file.write(f"\n[hostile]\n{config} = {config}\n__proto__ = {config}\n")
    sample = {"step": 1, "prompt": HOSTILE, "text": HOSTILE, "seed": 1}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + f"\n{HOSTILE}")
    (folder / "control" / "outcome").write_text(f"stopped {HOSTILE}")
    failure = {"time": "2027-01-15T08:00:12+0000", "attempt": 1, "reason": HOSTILE}
    (folder / "control" / "failures").write_text(json.dumps(failure))
    (folder / "provenance").mkdir()
    record = {HOSTILE: HOSTILE, "__proto__": {"a": HOSTILE}, "constructor": HOSTILE}
    (folder / "provenance" / "a<b>.json").write_text(json.dumps(record))
    page.open(written(folder))
    tip(page, 0.0)
    assert text_of(page, "h1") == name
    assert text_of(page, "#samples pre") == HOSTILE * 2
    assert HOSTILE in text_of(page, "#events")
    assert HOSTILE in text_of(page, "#provenance")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, script').length") == 2
    assert len(page.requests) == 1


def test_policy_stops_what_is_not_the_page_s_own_script(browser: Page, folder: Path) -> None:
    browser.open(written(folder))
    browser.errors.clear()
    attacks = (
        "{const s = document.createElement('script'); document.body.append(s);"
        " try {s.text = 'window.hacked = 1'} catch {}}",
        "try {document.body.innerHTML = '<img src=x onerror=window.hacked=1>'} catch {}",
        "fetch('http://127.0.0.1:9/').catch(() => 0)",
    )
    for attack in attacks:
        browser.evaluate(attack)
    assert browser.evaluate("window.hacked") is None
    assert len(browser.errors) >= 3
    assert all("Content Security Policy" in error or "Trusted" in error for error in browser.errors)


def test_a_long_run_is_small_fast_and_shows_its_spike(page: Page, tmp_path: Path) -> None:
    lines = [
        line | ({"loss": 66.5} if line["step"] == 54_321 and "loss" in line else {})
        for line in lines_of(100_000)
    ]
    folder = write_run(tmp_path / "long", with_layers(lines, 20))
    address = written(folder)
    assert Path(address.removeprefix("file://")).stat().st_size < 3_000_000
    page.call("Performance.enable")
    page.open(address)
    metrics = {m["name"]: m["value"] for m in page.call("Performance.getMetrics")["metrics"]}
    assert metrics["TaskDuration"] < 2.0
    assert text_of(page, "#reading").startswith("A curve has at most 4,000 points. ")
    shown = tip(page, 54_320 / 99_999)
    assert "steps 54,301 to 54,325" in shown
    assert "to 66.5)" in shown
    # The band reaches the top of the chart, one twelfth of its height above the highest value.
    band = page.evaluate("document.querySelector('#charts .band').getAttribute('d')")
    heights = [float(part.split()[1].rstrip("Z")) for part in band[1:].split("L")]
    assert min(heights) < 60
    drag(page, 0.54, 0.55)
    assert page.evaluate("page.view[1] - page.view[0]") < 1200
    assert "NaN" not in page.evaluate("document.getElementById('charts').innerHTML")


@pytest.mark.parametrize(
    "values",
    [
        {"loss": 1.7e308, "grad_norm": -1.7e308}, {"loss": 5e-324}, {"loss": None},
        {"time": None, "tokens": None}, {"step": 2**53 - 1}, {"tokens": 2**62, "time": 1e300},
    ],
)  # fmt: skip
def test_extreme_values_are_plotted(page: Page, tmp_path: Path, values: dict[str, Any]) -> None:
    lines = [training_line(n, random.Random(n)) for n in (1, 2, 3)]
    folder = write_run(tmp_path / "run", [*lines, training_line(4, random.Random(4)) | values])
    page.open(written(folder))
    for axis in ("tokens", "time", "step"):
        page.evaluate(f"document.querySelector('input[value={axis}]').click()")
        for _ in range(2):
            page.evaluate("document.querySelectorAll('figcaption button').forEach(b => b.click())")
            html = page.evaluate("document.getElementById('charts').innerHTML")
            assert "NaN" not in html
            assert "Infinity" not in html


@contextmanager
def watched(*folders: Path) -> Iterator[str]:
    """Serve the report of runs; yield its address."""
    source = Source(lambda: report.page_data(folders), folders)
    with build_server(source, "token", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/token/"
        finally:
            server.shutdown()
            thread.join()


def test_watch_shows_new_lines_and_keeps_what_the_reader_chose(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", list(lines_of(200, validation_freq=50)))
    with watched(folder) as address:
        page.open(address)
        drag(page, 0.25, 0.5)
        before = view(page)
        page.evaluate("document.querySelector('#charts .legend button').click()")
        page.evaluate("document.querySelector('#differing').click()")
        with (folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(training_line(201, random.Random(0), loss=1.25)), file=file)
        page.wait("document.querySelector('dd').textContent.startsWith('201')")
        assert view(page) == before
        assert page.evaluate("page.charts.get('loss').hidden.size") == 1
        assert page.evaluate("document.querySelectorAll('#config tbody tr').length") > 50
        assert page.evaluate("page.charts.get('loss').curves[0].mean.at(-1)") == 1.25


def test_watch_keeps_focus_and_what_is_scrolled(page: Page, folder: Path, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / (50 * name), list(lines_of(20))) for name in "ab"]
    for each in folders:
        shutil.copy(folder / "samples.jsonl", each)
    with watched(*folders) as address:
        page.open(address, width=390)
        page.evaluate("document.querySelector('#facts .scroll').scrollLeft = 20")
        for selector in ("#samples input", "#samples pre", "#facts .scroll"):
            focused = f"document.querySelector({json.dumps(selector)})"
            page.evaluate(f"{focused}.focus()")
            n_lines = page.evaluate("page.charts.get('loss').curves[0].mean.length")
            with (folders[0] / "metrics.jsonl").open("a") as file:
                print(json.dumps(training_line(n_lines + 1, random.Random(0))), file=file)
            page.wait(f"page.charts.get('loss').curves[0].mean.length > {n_lines}")
            assert page.evaluate(f"document.activeElement === {focused}"), selector
        assert page.evaluate("document.querySelector('#facts .scroll').scrollLeft") == 20


def test_watch_keeps_controls_that_get_more(page: Page, folder: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", list(lines_of(20)))
    shutil.copy(folder / "samples.jsonl", run)
    (run / "provenance").mkdir()
    (run / "provenance" / "start-1.json").write_text('{"argv": "a"}')
    with watched(run) as address:
        page.open(address)
        page.evaluate("document.querySelector('#charts .legend button')?.click()")
        page.evaluate("document.querySelector('#provenance details').open = true")
        for selector in ("#samples input", "#kinds input"):
            focused = f"document.querySelector({json.dumps(selector)})"
            page.evaluate(f"window.before = {focused}; before.focus()")
            n_kinds = page.evaluate("document.querySelectorAll('#kinds input').length")
            name, line = {
                "#samples input": ("samples.jsonl", {"step": 500, "prompt": "a", "text": "b"}),
                "#kinds input": ("metrics.jsonl", training_line(19, random.Random(0), restarts=1)),
            }[selector]
            with (run / name).open("a") as file:
                print("", json.dumps(line | {"seed": 1}), sep="\n", file=file)
            if name == "samples.jsonl":
                page.wait(f"{focused}.max === '2'")
            else:
                page.wait(f"document.querySelectorAll('#kinds input').length > {n_kinds}")
            assert page.evaluate("document.activeElement === before")
        (run / "provenance" / "start-2.json").write_text('{"argv": "b"}')
        page.wait("document.querySelectorAll('#provenance details').length > 1")
        assert page.evaluate("document.querySelector('#provenance details').open")


def test_watch_keeps_what_is_hidden_named_so(page: Page, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", list(lines_of(20, validation_freq=10)))
    with watched(folder) as address:
        page.open(address)
        button = "document.querySelector('#charts .legend button')"
        page.evaluate(f"{button}.click()")
        n_buttons = page.evaluate("document.querySelectorAll('#charts .legend button').length")
        with (folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(training_line(15, random.Random(0), restarts=1)), file=file)
        page.wait(f"document.querySelectorAll('#charts .legend button').length > {n_buttons}")
        assert page.evaluate(f"{button}.getAttribute('aria-pressed')") == "false"
        assert page.evaluate("page.charts.get('loss').hidden.size") == 1
