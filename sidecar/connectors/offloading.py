"""Offloading with a P2P tier: the prefill engine keeps the blocks for whoever names the transfer, and writes them.

What vLLM 0.32 reads (v1/kv_offload/tiering/p2p/manager.py): `remote_decoder` on the prefill leg, `remote_prefiller`
on the decode leg, `remote_kv_source` on a leg that computes and may fetch a prefix from any peer; each with a
`kv_request_id` that is ours to make up. Blocks are found by the hash of their tokens, so another prompt's are
never read; but decode believes that prefill has every block it asks for and waits 40 s for one that it has not,
and a value that is no object ends the engine. The prefill answer says nothing.
"""

import msgspec

from sidecar.connectors.connector import (
    NO_BLOCK_SIZE,
    Channel,
    Connector,
    Handoff,
    PrefillAnswer,
    Rejection,
    Source,
)
from sidecar.exchange.splice import replaced


def _address(transfer_id: str, host: str, port: int) -> bytes:
    bracketed = f"[{host}]" if ":" in host else host  # the engine makes a tcp:// address of it
    return msgspec.json.encode({"kv_request_id": transfer_id, "remote_host": bracketed, "remote_port": port})


def _prefill_params(transfer_id: str) -> bytes:
    return b'{"remote_decoder":%b}' % msgspec.json.encode({"kv_request_id": transfer_id})


def _read(answer: PrefillAnswer, source: Source) -> Handoff | Rejection:
    usage = answer.usage
    if usage is None or usage.total <= 0:
        return Rejection("missing", "the prefill answer does not say how many prompt tokens it had")
    block_size = source.facts.block_size or source.fallback_block_size
    if not block_size:
        return NO_BLOCK_SIZE
    return Handoff(
        params=b'{"remote_prefiller":%b}' % _address(source.transfer_id, source.channel_host, source.channel_port),
        prompt_tokens=usage.total,
        host=source.channel_host,
        port=source.channel_port,
        blocks=usage.total // block_size,  # whole ones alone are kept
        cached_tokens=usage.cached,
        prefill_cached_tokens=usage.cached or 0,
    )


def with_kv_source(params: bytes, transfer_id: str, host: str, port: int) -> bytes:
    """`params` of a leg that computes (b"": none), with a peer that may hold some prefix of its prompt."""
    return replaced(params or b"{}", {"remote_kv_source": _address(transfer_id, host, port)})


OFFLOADING = Connector(
    name="offloading",
    splits=True,
    channel=Channel.P2P,
    releases=False,  # a refused request tells the prefill engine nothing (tried on vLLM 0.32)
    never=frozenset(),
    prefill_params=_prefill_params,
    read=_read,
    fits=lambda *_: None,
    decode_params=Handoff.with_token_ids,
)
