"""Fixtures shared by tests that start processes."""

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
