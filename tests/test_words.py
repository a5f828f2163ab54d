"""The language of the project: words that were retired in favor of the field's do not come back."""

import re
from pathlib import Path

import pytest

from tests.lib.repository import ROOT, python_files

# Pattern: the word to use instead. In identifiers, comments, docstrings, texts and docs.
RETIRED = {
    r"\b(own|rank's)[ _]part\b": "shard",
    r"\bpieces? of a (block|model)\b": "compile region, stage",
    r"\bmatrix products?\b|\bproducts of (matri|the blocks)": "matmul",
    r"\btravel(s|led)?\b": "is sent, is all-gathered",
    r"\blast words\b": "rank report",
    r"\beverywhere\b": "on all ranks",
    r"\banew\b": "again",
    r"\b(witness|accuse)": "heartbeat, add_violation",
    r"\bset[ _]aside\b": "quarantine",
    r"\bdealt\b": "assigned",
    r"\btold\b": "logged, reported",
    r"\bdrawn\b": "sampled",
    r"\bgiven? back\b": "freed",
    r"\b(left|leaves?) out\b": "skip, omit",
    r"\b(is|are) refused\b|\brefus(es|al)": "is rejected",
    r"\blooks? at\b": "reads, polls",
    r", for (it|they|those) ": "because",
    r"\bwarn_of_": "warn_if_",
    r"\bfacts_of\b": "metadata",
}
# A docstring begins with a noun or a verb.
CLAUSES = re.compile(r'"""(What|Which|Where|Whether|How|Have|Let|As if)\b')
EXEMPT = {"tests/test_words.py", "CHANGELOG.md"}


def our_texts() -> list[Path]:
    docs = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return [*python_files(), *(path.relative_to(ROOT) for path in docs)]


def findings(file: str, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), start=1)
    return [
        f"{file}:{number}: {match[0]!r}: say {instead!r}"
        for number, line in lines
        for pattern, instead in [*RETIRED.items(), (CLAUSES.pattern, "a noun or a verb")]
        if (match := re.search(pattern, line))
    ]


def test_no_retired_word() -> None:
    files = [path for path in our_texts() if str(path) not in EXEMPT]
    assert len(files) > 200
    found = [text for path in files for text in findings(str(path), (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    ["tokens travel", "# gathered anew", '    """What a rank holds."""', "matrix products"],
)
def test_a_retired_word_is_seen(line: str) -> None:
    assert findings("models/x.py", line)
