"""Mooncake: the prefill engine holds the blocks under a transfer's name, decode asks its workers to write them.

What vLLM 0.32 reads (kv_connector/v1/mooncake/mooncake_connector.py): `do_remote_decode` and `transfer_id` on the
prefill leg, and the request must end by its length; on the decode leg all of `do_remote_prefill`, `transfer_id`,
`remote_engine_id` and `remote_bootstrap_addr`, or decode waits for ever. The engine id is the bootstrap server's to
say (prefill/bootstrap.py); a name that prefill does not know, or knows no more, makes decode wait for minutes
(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480 s), so decode is asked once prefill has answered.
"""

import msgspec

from sidecar.connectors.connector import Channel, Connector, Handoff, PrefillAnswer, Rejection, Source
from sidecar.exchange.splice import replaced


def _prefill_params(transfer_id: str) -> bytes:
    return b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%b}' % msgspec.json.encode(
        transfer_id
    )


def _read(answer: PrefillAnswer, source: Source) -> Handoff | Rejection:
    usage = answer.usage
    if usage is None or usage.total <= 0:
        return Rejection("missing", "the prefill answer does not say how many prompt tokens it had")
    block_size = source.facts.block_size or source.fallback_block_size
    host = f"[{source.channel_host}]" if ":" in source.channel_host else source.channel_host
    bootstrap = f"http://{host}:{source.channel_port}"
    return Handoff(
        params=b'{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":%b,"remote_bootstrap_addr":%b}'
        % (msgspec.json.encode(source.transfer_id), msgspec.json.encode(bootstrap)),
        prompt_tokens=usage.total,
        host=source.channel_host,
        port=source.channel_port,
        rank=source.rank,
        blocks=-(-usage.total // block_size) if block_size else 1,  # the last one crosses too, full or not
        cached_tokens=usage.cached,
        prefill_cached_tokens=usage.cached or 0,
    )


def from_engine(handoff: Handoff, engine_id: str) -> Handoff:
    """The handoff with the engine that holds its blocks."""
    params = replaced(handoff.params, {"remote_engine_id": msgspec.json.encode(engine_id)})
    return msgspec.structs.replace(handoff, params=params, engine_id=engine_id)


MOONCAKE = Connector(
    name="mooncake",
    splits=True,
    channel=Channel.MOONCAKE,
    releases=True,
    never=frozenset(),
    prefill_params=_prefill_params,
    read=_read,
    fits=lambda *_: None,
    decode_params=Handoff.with_token_ids,
)
