"""Marks of parametrized cases."""

from functools import partial

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
