"""No KV connector: every request is decoded where it arrives."""

from sidecar.connectors.connector import Connector, Handoff, PrefillAnswer, Rejection, Source


def _read(_answer: PrefillAnswer, _source: Source) -> Handoff | Rejection:
    return Rejection("missing", "--kv-connector none never prefills remotely")


NONE = Connector(
    name="none",
    splits=False,
    hands_off=False,
    releases=False,
    never=frozenset(),
    prefill_params=b"{}",
    read=_read,
    fits=lambda *_: None,
    decode_params=lambda handoff: handoff.params,
)
