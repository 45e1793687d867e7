"""Envoy as the gateway in front of decode pods, told of them as in a cluster: a list that others keep (EDS).

It retries what common gateways retry by default: connections that were refused, and 503. Must not know why a pod is
on the list.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from e2e.cluster.network import Namespace

PORT, ADMIN_PORT = 8080, 9901
POD = "x-pod"
"""The answer's header that says which pod it is of."""
READY_TIMEOUT_S = 20.0
_TYPES = "type.googleapis.com/envoy"
_ROUTER = f"{_TYPES}.extensions.filters.http.router.v3.Router"
_HTTP = f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_OPTIONS = f"{_TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions"


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _config(endpoints: Path) -> dict[str, Any]:
    retries = {
        "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
        "host_selection_retry_max_attempts": 5,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": f"{_TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
    }
    route = {"cluster": "decode", "timeout": "0s", "retry_policy": retries}
    manager = {
        "@type": _HTTP,
        "stat_prefix": "clients",
        "stream_idle_timeout": "0s",
        "route_config": {
            "response_headers_to_add": [{"header": {"key": POD, "value": "%UPSTREAM_HOST%"}}],
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ],
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {"@type": _ROUTER}}],
    }
    plenty = {"max_connections": 65536, "max_pending_requests": 65536, "max_requests": 65536, "max_retries": 65536}
    cluster = {
        "name": "decode",
        "type": "EDS",
        "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(endpoints)}}},
        "connect_timeout": "1s",
        "lb_policy": "LEAST_REQUEST",
        "circuit_breakers": {"thresholds": [plenty]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _OPTIONS,
                "explicit_http_config": {"http_protocol_options": {}},
                # Shorter than --client-idle-timeout: the side that reuses a connection is the one that closes it.
                "common_http_protocol_options": {"idle_timeout": "600s"},
            }
        },
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": _address("127.0.0.1", ADMIN_PORT)},
        "static_resources": {
            "listeners": [{"address": _address("0.0.0.0", PORT), "filter_chains": [{"filters": filters}]}],
            "clusters": [cluster],
        },
    }


class Gateway:
    """An Envoy in a namespace of its own."""

    def __init__(self, binary: Path, namespace: Namespace, address: str, folder: Path) -> None:
        self.address = address
        self._namespace = namespace
        self._endpoints = folder / "endpoints.yaml"
        self._versions = 0
        self.tell([])
        (folder / "envoy.yaml").write_text(yaml.safe_dump(_config(self._endpoints)))
        self._log = folder / "envoy.log"
        with namespace.entered(), self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [binary, "-c", folder / "envoy.yaml", "--concurrency", "1", "--disable-hot-restart"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait()

    def tell(self, pods: list[str]) -> None:
        """These are the decode pods, HOST:PORT each."""
        self._versions += 1
        ends = [{"endpoint": {"address": _address(pod.split(":")[0], int(pod.split(":")[1]))}} for pod in pods]
        assignment = {
            "@type": f"{_TYPES}.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "decode",
            "endpoints": [{"lb_endpoints": ends}],
        }
        text = yaml.safe_dump({"version_info": str(self._versions), "resources": [assignment]})
        unfinished = self._endpoints.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(self._endpoints)  # it looks again when a file is moved here

    def _get(self, path: str) -> str:
        with self._namespace.entered():
            connection = http.client.HTTPConnection("127.0.0.1", ADMIN_PORT, timeout=5)
            try:
                connection.request("GET", path)
                return connection.getresponse().read().decode()
            finally:
                connection.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-2000:]
            with contextlib.suppress(OSError):
                if self._get("/ready").strip() == "LIVE":
                    return
            assert time.monotonic() < deadline, self._log.read_text(errors="replace")[-2000:]
            time.sleep(0.1)

    def stats(self) -> dict[str, int]:
        """Envoy's own counters and gauges of the cluster of decode pods."""
        found = json.loads(self._get(r"/stats?format=json&filter=^cluster\.decode\."))["stats"]
        return {
            re.sub(r"^cluster\.decode\.", "", one["name"]): int(one["value"]) for one in found if "value" in one
        }

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
