"""Links, anchors, generated parts and plain English of README and docs."""

import os
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardloom
from config import load_config
from config.constraints import CONFIG_CONSTRAINTS
from config.describe import reference_page
from runtime import exit_codes
from tests.lib.pages import FENCED, Page, all_pages
from tests.lib.repository import ROOT, python_files
from tools.build_site import build_site

PAGES = all_pages()
BY_PATH = {str(page.path): page for page in PAGES}
HOWTO = [page for page in PAGES if page.path.parent == Path("docs/howto")]
MOST_WORDS = 25
"""Of a page's sentences, on average."""
MOST_CHARACTERS = 160
"""Of a cell of a table."""
MOST_LINES = {"README.md": 150} | {str(page.path): 80 for page in HOWTO}
IN_CODE = re.compile(r"\bdocs/[\w/]+\.md\b")
# Files of the repository that a page names, not those of a run or of a user.
NAMED_FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|sbatch|sh|toml|txt))`")
COMMAND = re.compile(r"`\./\w+ [^`]+`")
TOML = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.path))


def broken_links(page: Page) -> list[str]:
    found = []
    for link in page.links:
        file, _, anchor = link.partition("#")
        path = os.path.normpath(page.path.parent / file) if file else str(page.path)
        if not (ROOT / path).exists():
            found.append(f"{page.path}: {link}: no such file")
        elif anchor and anchor not in BY_PATH[path].anchors:
            found.append(f"{page.path}: {link}: no such heading")
    return found


@each_page
def test_links_and_anchors_exist(page: Page) -> None:
    assert broken_links(page) == []


def test_a_broken_link_and_anchor_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page(Path("docs/index.md"))
    text = "[a](none.md) [b](glossary.md#none) [c](glossary.md#glossary)\n```\n[d](no.md)\n```\n"
    monkeypatch.setitem(page.__dict__, "text", text)
    assert [text.split(": ")[1] for text in broken_links(page)] == ["none.md", "glossary.md#none"]


@each_page
def test_prose_is_plain(page: Page) -> None:
    words = [len(sentence.split()) for sentence in page.sentences]
    longest = max(page.sentences, key=lambda s: len(s.split()), default="")
    assert sum(words) <= MOST_WORDS * len(words), f"the longest: {longest}"
    assert [cell for cell in page.table_cells if len(cell) > MOST_CHARACTERS] == []


def test_sentences_are_counted() -> None:
    page = Page(Path("x.md"))
    text = "# No sentence.\n\nOne `a b` is\nhere. And [two words](x.md).\n- Item one\n- item two\n"
    page.__dict__["text"] = text + "```\nnot this. nor that.\n```\n| a | b |\n"
    counts = [len(sentence.split()) for sentence in page.sentences]
    assert counts == [4, 3, 2, 2]


@pytest.mark.parametrize("path", MOST_LINES)
def test_page_is_short(path: str) -> None:
    assert len(BY_PATH[path].text.splitlines()) <= MOST_LINES[path]


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.path.stem)
def test_how_to_says_when_how_and_by_which_test(page: Page) -> None:
    assert {"when-to-use", "tested-by"} <= page.anchors
    assert FENCED.search(page.text) or COMMAND.search(page.text)


def test_exit_codes_page_has_all_codes() -> None:
    codes = {str(code) for code in vars(exit_codes).values() if type(code) is int}
    text = BY_PATH["docs/reference/exit_codes.md"].text
    assert {
        code for code in codes if not re.search(rf"^\| {code}[, ]", text, re.MULTILINE)
    } == set()


def test_every_page_is_in_the_site() -> None:
    listed = re.findall(r"\b([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path[5:] for path in BY_PATH if path.startswith("docs/"))


@pytest.mark.parametrize("start", ["README.md", "docs/index.md"])
def test_every_page_is_two_clicks_away(start: str) -> None:
    def linked(path: str) -> set[str]:
        files = (link.partition("#")[0] for link in BY_PATH[path].links)
        return {os.path.normpath(Path(path).parent / file) for file in files} & BY_PATH.keys()

    once = linked(start)
    reached = once.union(*map(linked, once)) | {start, "README.md"}
    assert sorted(BY_PATH.keys() - reached) == []


def test_pages_that_code_names_exist() -> None:
    others = [*ROOT.glob("slurm/*"), *ROOT.glob("tools/*.sh"), ROOT / "pyproject.toml"]
    files = [*(ROOT / path for path in python_files()), *(p for p in others if p.is_file())]
    named = {name for file in files for name in IN_CODE.findall(file.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@each_page
def test_files_that_a_page_names_exist(page: Page) -> None:
    named = set(NAMED_FILE.findall(FENCED.sub("", page.text)))
    # A cluster's own settings are not in the repository.
    ours = {name for name in named - {"slurm/site.sh"} if (ROOT / name.split("/")[0]).is_dir()}
    assert [name for name in sorted(ours) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.path.stem)
def test_toml_of_a_page_is_a_configuration(page: Page, tmp_path: Path) -> None:
    for number, text in enumerate(TOML.findall(page.text)):
        if page.path.name in ("extend.md", "sweeps.md"):
            assert tomllib.loads(text)  # Names code of another page; the runs of a sweep.
            continue
        path = tmp_path / f"page_{number}.toml"
        path.write_text(text)
        config = load_config(path, [])
        assert [row.message(config) for row in CONFIG_CONSTRAINTS if row.violated(config)] == []


def test_configuration_page_is_current() -> None:
    on_disk = (ROOT / "docs" / "reference" / "config.md").read_text()
    assert on_disk == reference_page(), "run: ./shardloom python -m config reference"


def test_commands_page_has_all_commands() -> None:
    text = BY_PATH["docs/reference/cli.md"].text
    rows = [f"| `{name}` | {what} |" for name, (_, what) in shardloom.COMMANDS.items()]
    assert [row for row in rows if row not in text] == []


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `([^`]+)`", BY_PATH["docs/troubleshooting.md"].text, re.MULTILINE)
    assert len(rows) > 20
    paths = [path for path in python_files() if path.parts[0] != "tests"]
    # Texts that are split over lines are joined.
    code = re.sub(r'"\s*f?"', "", "\n".join((ROOT / path).read_text() for path in paths))
    varies = re.compile(r"^ALARM: |^slow: |\.\.\.|\b\d[\d.]*\b|host2")
    fixed = {row: max(varies.split(row), key=len).strip(" :") for row in rows}
    assert [row for row, text in fixed.items() if text not in code] == []


@pytest.mark.skipif(find_spec("material") is None, reason="needs the extra docs")
def test_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build_site(tmp_path)
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    loaded = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="https?://[^"]*"')
    pages = [path.read_text() for path in tmp_path.rglob("*.html")]
    assert len(pages) >= len(PAGES) - 1
    found = {match for page in pages for match in loaded.findall(page)}
    assert {match for match in found if 'rel="canonical"' not in match} == set()
