"""Stores that both engines share: prefill writes the KV, decode finds it by the prompt. Nothing crosses here.

Prefill first is the only order there is: vLLM 0.32 reads no `cache_hit_threshold`, so decode cannot be asked first
and say that it misses too much. Whether it found anything only its own metrics tell (prompt_tokens_by_source).
"""

from sidecar.connectors.connector import Channel, Connector, Handoff, PrefillAnswer, Rejection, Source


def _read(answer: PrefillAnswer, _source: Source) -> Handoff | Rejection:
    usage = answer.usage
    if usage is None or usage.total <= 0:
        return Rejection("missing", "the prefill answer does not say how many prompt tokens it had")
    return Handoff(params=b"", prompt_tokens=usage.total, prefill_cached_tokens=usage.cached or 0)


def _store(name: str) -> Connector:
    return Connector(
        name=name,
        splits=True,
        channel=Channel.NONE,
        releases=False,
        never=frozenset(),
        prefill_params=lambda _name: b"",
        read=_read,
        fits=lambda *_: None,
        decode_params=lambda handoff: handoff.params,
    )


SHARED_STORAGE = _store("shared-storage")
LMCACHE = _store("lmcache")
