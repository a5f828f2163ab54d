"""Pages of the documentation as their tests read them: prose, tables, headings and links."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.lib.repository import ROOT

DOCS = ROOT / "docs"
FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?:;](?:\s|$)")


@dataclass(frozen=True)
class Page:
    path: Path
    """Relative to the repository."""

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text()

    @cached_property
    def unfenced(self) -> str:
        return COMMENT.sub("", FENCED.sub("", self.text))

    @cached_property
    def anchors(self) -> set[str]:
        return {anchor_of(heading) for heading in HEADING.findall(self.unfenced)}

    @cached_property
    def links(self) -> list[str]:
        """Targets within the documentation, in the order of the page."""
        targets = LINK.findall(self.unfenced)
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    @cached_property
    def table_cells(self) -> list[str]:
        rows = [line for line in self.unfenced.splitlines() if line.lstrip().startswith("|")]
        # A link counts as its text.
        shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", row) for row in rows]
        return [cell.strip() for row in shown for cell in re.split(r"(?<!\\)\|", row)]

    @cached_property
    def sentences(self) -> list[str]:
        """Sentences of paragraphs and list items; a code span counts as one word."""
        others = re.compile(r" *(#|\||!\[|--8<--)")
        lines = [line for line in self.unfenced.splitlines() if not others.match(line)]
        text = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", "\n".join(lines), flags=re.MULTILINE)
        text = re.sub(r"`[^`]*`", "code", text)
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        found = [s for part in re.split(r"\n\s*\n", text) for s in SENTENCE_END.split(part)]
        return [sentence for sentence in found if len(sentence.split()) > 1]


def anchor_of(heading: str) -> str:
    """Return the anchor that Markdown's table of contents gives a heading."""
    shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())


def all_pages() -> list[Page]:
    """README and every page of docs."""
    paths = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [Page(path.relative_to(ROOT)) for path in paths]
