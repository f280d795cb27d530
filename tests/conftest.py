"""Shared by all tests: the repository's root, and no network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that holds README.md."""
    return Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for the network fails, on every machine."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a test tried to open a network connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
