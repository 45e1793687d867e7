"""The world of every play, new for each test."""

import pytest

from tests.unit.exchange.playbook import World


@pytest.fixture
def world() -> World:
    return World()
