"""Tests. Assertions of their helpers show values too."""

import pytest

pytest.register_assert_rewrite("tests.lib")
