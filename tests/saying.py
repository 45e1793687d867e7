"""A port that says the same to everyone, right or not: for programs that ask one and have to say what they found.

Standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.ports import free_ports


@contextlib.contextmanager
def saying(answer: bytes | None, heard: list[bytes] | None = None) -> Iterator[str]:
    """The URL of a port that reads a request, answers this and closes; where nobody listens for None. `heard` gets
    the requests."""
    if answer is None:
        yield f"http://127.0.0.1:{free_ports()}"
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(
            target=_serve, args=(server, answer, heard if heard is not None else []), daemon=True
        )
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` alone does not
    thread.join(10)
    assert not thread.is_alive()


def _serve(server: socket.socket, answer: bytes, heard: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            peer, _ = server.accept()
            with peer, contextlib.suppress(OSError):
                heard.append(peer.recv(65536))
                peer.sendall(answer)
