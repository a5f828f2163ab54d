"""Each mutation of ``tests/mutations`` still applies to the code, and names tests that exist."""

import ast
from collections import Counter

import pytest

from tests.lib.cells import DIMENSIONS
from tests.lib.repository import ROOT
from tests.mutations.mutations import MUTATIONS, CellWith, Mutation

FEWEST = 60


def test_names_are_unique() -> None:
    assert len(MUTATIONS) >= FEWEST
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_applies_and_changes_the_program(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    before, after = (ast.dump(ast.parse(each)) for each in (text, mutation.apply(text)))
    assert before != after


def test_named_tests_exist() -> None:
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            if isinstance(test, CellWith):
                assert all(value in DIMENSIONS[name] for name, value in test.values), test
                continue
            file, _, rest = test.partition("::")
            function = rest.partition("[")[0]
            assert (ROOT / file).is_file(), test
            assert not function or f"def {function}(" in (ROOT / file).read_text(), test


@pytest.mark.parametrize("text", ["", "a b b"])
def test_ambiguous_place_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"fault: file\.py has \d of 'b'"):
        Mutation("fault", "file.py", before="b", after="c", tests=()).apply(text)
