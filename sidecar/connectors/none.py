"""No KV connector: every request is decoded where it arrives."""

from sidecar.connectors.connector import Channel, Connector, Handoff, PrefillAnswer, Rejection, Source


def _read(_answer: PrefillAnswer, _source: Source) -> Handoff | Rejection:
    return Rejection("missing", "--kv-connector none never prefills remotely")


NONE = Connector(
    name="none",
    splits=False,
    channel=Channel.NONE,
    releases=False,
    never=frozenset(),
    prefill_params=lambda _name: b"{}",
    read=_read,
    fits=lambda *_: None,
    decode_params=lambda handoff: handoff.params,
)
