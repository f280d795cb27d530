"""Options of the tests that run training steps."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-golden``: rewrite the golden schedules instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/schedules/*.txt")
