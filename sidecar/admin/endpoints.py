"""What is known of every prefill endpoint, for people: the admin port's `/endpoints`."""

from typing import Any

from sidecar.prefill.discovery.discovery import Discovery, Standing
from sidecar.prefill.endpoints import Endpoint, Endpoints

MAX_ADAPTERS = 64
"""Shown of one endpoint."""


def shown(endpoints: Endpoints, discovery: Discovery | None) -> dict[str, Any]:
    """The source's state, and every endpoint: those that get requests, those whose last requests are running, and
    those that the source knows and does not call ready."""
    members = discovery.members if discovery is not None else {}
    records = []
    known = set()
    for endpoint in (*endpoints, *endpoints.leaving):
        known.add(endpoint.address)
        member = members.get(endpoint.address)
        records.append(_record(endpoint, member.standing if member else None, member.detail if member else ""))
    for address, member in members.items():
        if address not in known:
            record = {"address": str(address), "sources": ["discovery"], "standing": member.standing.value}
            records.append(record | ({"detail": member.detail} if member.detail else {}))
    state = None
    if discovery is not None:
        state = {
            "source": discovery.source,
            "known": discovery.is_known,
            "age_seconds": round(discovery.age_s, 3),
            "problem": discovery.problem,
        }
    return {"discovery": state, "endpoints": records}


def _record(endpoint: Endpoint, standing: Standing | None, detail: str) -> dict[str, Any]:
    sources = {
        "prefill": endpoint.configured,
        "discovery": endpoint.discovered,
        "header": not endpoint.configured and not endpoint.discovered and not endpoint.leaving,
    }
    record: dict[str, Any] = {
        "address": endpoint.label,
        "sources": [source for source, is_one in sources.items() if is_one],
        "breaker": endpoint.breaker.state.name.lower(),
        "blocked": endpoint.blocked,
        "block_size": endpoint.facts.block_size,
        "in_flight": endpoint.in_flight,
        "users": endpoint.users,
    }
    if standing is not None:
        record["standing"] = standing.value
    elif endpoint.leaving:
        record["standing"] = "left"
    if endpoint.models.served is not None:
        record["adapters"] = sorted(endpoint.models.served.adapters)[:MAX_ADAPTERS]
    return record | ({"detail": detail} if detail else {})
