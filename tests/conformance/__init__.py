"""Suites that every implementation of an interface has to pass."""

import pytest

pytest.register_assert_rewrite("tests.conformance.store_suite")
