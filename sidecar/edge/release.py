"""Gives a handoff's blocks back to the prefill engine, in place of the lease running out.

The local engine is asked for a model that does not exist, with the handoff attached: it refuses with 404 and tells
the prefill engine to free the blocks (vLLM 0.32, generate/base/serving.py: notify_kv_transfer_request_rejected). It
lives beside the request that the handoff came from, which may be over. Nobody waits for its answer.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from sidecar.connectors.connector import Handoff
from sidecar.edge.head import Head
from sidecar.edge.legs import Leg
from sidecar.edge.request import Headers
from sidecar.edge.service import Service

if TYPE_CHECKING:
    from sidecar.edge.runner import Runner

_MODEL = b"pd-sidecar/released-handoff"

LINGER_S = 5.0
"""An engine that has never met the prefill engine begins its handshake after it has answered; it waits so long for
one (vLLM 0.32, nixl/base_worker.py), and the prefill endpoint's side channel must be there for it."""


class Release(Leg):
    """One handoff on its way back, for at most `--pull-timeout`."""

    def __init__(self, service: Service, handoff: Handoff, headers: Headers, over: Callable[[], None]) -> None:
        """`headers`: the client's, of which the engine may want to see the key. `over` is called when the prefill
        endpoint is needed no more."""
        body = b'{"model":"%b","prompt":[1],"max_tokens":1,"kv_transfer_params":%b}' % (
            _MODEL,
            handoff.params,
        )
        key = b"".join([b"%b: %b\r\n" % header for header in headers if header[0].lower() == b"authorization"])
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"%bcontent-length: %d\r\n\r\n"
        ) % (key, len(body))
        super().__init__(cast("Runner", None), (head, body))
        self._observer = service.observer
        self._over = over
        self._loop = service.loop
        self._observer.leg_started("release")
        self._timer = service.loop.call_later(service.settings.pull_timeout, self._end)
        self.acquire(service.engine)

    def _end(self) -> None:
        if not self._dropped:
            self._timer.cancel()
            self._observer.leg_ended("release")
            self.drop()
            self._loop.call_later(LINGER_S, self._over)

    def head(self, head: Head) -> None:
        """Whatever it says."""

    def data(self, raw: bytes, pieces: Sequence[bytes], last: bool) -> None:
        if last:
            self._connection = None
            self._end()

    def failed(self, fault: str, detail: str, untouched: bool) -> None:
        """The lease will do it."""
        self._connection = None
        self._end()


__all__ = ["Release"]
