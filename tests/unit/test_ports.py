"""Ports of the tests: none is given twice, and none at which anybody listens."""

import socket

import pytest

from tests import ports


def test_none_is_given_twice() -> None:
    given = [ports.free_ports(count) for count in (1, 3, 8) * 50]
    taken = [first + n for first, count in zip(given, (1, 3, 8) * 50, strict=True) for n in range(count)]
    assert len(set(taken)) == len(taken)
    assert all(port in ports.PORTS for port in taken)


HOSTS = ["127.0.0.9", *(["::1"] if ports.HAS_IPV6 else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_listener_is_seen_at_whatever_address(host: str) -> None:
    port = ports.free_ports()
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        assert not ports.bindable(port)
    assert ports.bindable(port)
