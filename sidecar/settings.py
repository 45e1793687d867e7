"""`Settings`: the only list of flags. The command line, the environment, the file, the JSON schema, `/config` and
the README's table are made from it (config.py). Says what a setting means, not what is done with it.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sidecar.prefill.discovery.cluster import ACCOUNT


def _m(description: str, **bounds: Any) -> Meta:
    return Meta(description=description, **bounds)


ROLE_SELECTOR = "llm-d.ai/role in (prefill,prefill-decode)"


class Settings(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """What `serve` is told. Times are seconds, sizes bytes."""

    host: Annotated[str, _m("address to listen on; empty: every one, IPv4 and IPv6")] = ""
    port: Annotated[int, _m("where clients come in; rank r listens on port + r", ge=1, le=65535)] = 8000
    model_server_host: Annotated[str, _m("host of the local decode engine", min_length=1)] = "127.0.0.1"
    model_server_port: Annotated[
        int, _m("port of the local decode engine; rank r on port + r (alias --vllm-port)", ge=1, le=65535)
    ] = 8200
    model_server_uds: Annotated[str, _m("Unix socket of the local decode engine, in place of host and port")] = ""
    data_parallel_size: Annotated[int, _m("local decode ranks", ge=1, le=256)] = 1
    workers: Annotated[
        int,
        _m(
            "processes that serve the port together, for pods with cores to spare: one more holds the admin port, "
            "side channels, breakers and budget. Not with --kv-events on",
            ge=1,
            le=64,
        ),
    ] = 1
    metrics_host: Annotated[str, _m("address of the admin port; empty: every one")] = ""
    metrics_port: Annotated[
        int,
        _m("admin port: /metrics /livez /readyz /startupz /config /decisions /endpoints /disagg", ge=1, le=65535),
    ] = 9090
    admin_token_file: Annotated[
        str,
        _m(
            "file with the bearer key for /config, /decisions, /endpoints and /disagg from outside the pod; "
            "empty: from within it only"
        ),
    ] = ""
    disagg: Annotated[
        Literal["off", "on", "auto"],
        _m("off: pass through; on: remote whenever possible; auto: the decision rules choose. Hot-reloaded"),
    ] = "auto"
    kv_connector: Annotated[
        str,
        _m(
            "how the engines move KV: nixlv2 (pull), nixl-push, offloading (P2P tier), mooncake, "
            "a store of both (shared-storage, lmcache) or none"
        ),
    ] = "nixlv2"
    prefill: Annotated[list[str], _m("static prefill endpoint HOST:PORT (repeatable)")] = []
    prefill_allow: Annotated[
        list[str],
        _m("targets that x-prefiller-host-port may name besides: CIDR, HOST:PORT or any (repeatable)"),
    ] = []
    enable_prefiller_sampling: Annotated[
        Literal["on", "off"],
        _m(
            "of several targets in x-prefiller-host-port any may be tried first; off: they are tried in their order"
        ),
    ] = "off"
    secure_serving: Annotated[
        Literal["on", "off"],
        _m("TLS on the serving port, 1.2 at least (alias --secure-proxy)"),
    ] = "off"
    cert_path: Annotated[
        str, _m("folder with tls.crt and tls.key of the serving port; taken over when they change")
    ] = ""
    client_ca: Annotated[
        str, _m("PEM file of authorities: clients of the serving port need a certificate of one of them")
    ] = ""
    enable_tls: Annotated[
        list[Literal["prefiller", "decoder"]],
        _m("TLS towards prefill engines, the decode engine, or both (repeatable)"),
    ] = []
    tls_insecure_skip_verify: Annotated[
        list[Literal["prefiller", "decoder"]],
        _m("take any certificate from prefill engines or the decode engine (repeatable)"),
    ] = []
    tls_ca: Annotated[
        str, _m("PEM file of authorities for the engines' certificates; empty: those of the system")
    ] = ""
    tls_client_cert: Annotated[
        str,
        _m("folder with tls.crt and tls.key for engines that ask for a certificate; taken over when they change"),
    ] = ""
    probe_token_file: Annotated[
        str, _m("file with the bearer key for probes of engines and warm-up; taken over when it changes")
    ] = ""
    discovery: Annotated[
        str,
        _m(
            "where prefill endpoints are found besides: kubernetes, dns:NAME:PORT (headless Service), "
            "file:PATH (HOST:PORT a line, or a YAML list; read again when it changes) or none"
        ),
    ] = "none"
    discovery_dns_server: Annotated[
        list[str],
        _m("IP:PORT of a DNS server that dns: asks in place of those of /etc/resolv.conf (repeatable)"),
    ] = []
    discovery_selector: Annotated[str, _m("kubernetes: labels of the pods that prefill")] = ROLE_SELECTOR
    discovery_model: Annotated[
        str, _m("kubernetes: value of their label llm-d.ai/model; empty: whatever it is")
    ] = ""
    discovery_port: Annotated[
        int, _m("kubernetes: port of these pods' engines, where no InferencePool says it", ge=1, le=65535)
    ] = 8000
    discovery_namespace: Annotated[str, _m("kubernetes: namespace of the pods; empty: the service account's")] = ""
    inference_pool: Annotated[
        str,
        _m("kubernetes: InferencePool whose pods, of those with these labels, are used at its targetPorts"),
    ] = ""
    pool_group: Annotated[
        Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"],
        _m("kubernetes: API group of the InferencePool (v1, or v1alpha2 before it)"),
    ] = "inference.networking.k8s.io"
    kubernetes_api: Annotated[
        str, _m("URL of the API server; empty: that of the cluster. Without TLS (kubectl proxy) on loopback only")
    ] = ""
    kubernetes_account: Annotated[
        str, _m("folder of the service account: token, ca.crt, namespace", min_length=1)
    ] = ACCOUNT
    split_remote_media: Annotated[
        Literal["on", "off"],
        _m("prompts with media behind URLs may go remote: both engines fetch them, so they must never change"),
    ] = "off"
    min_remote_tokens: Annotated[
        int, _m("auto: prompts of fewer tokens stay local; 0: every prompt may go remote", ge=0)
    ] = 256
    decision_rule: Annotated[
        Literal["cost", "static"],
        _m("auto, from --min-remote-tokens on: cost compares what both ways are learnt to take; static: remote"),
    ] = "cost"
    stall_weight: Annotated[
        float,
        _m("how much a second that running streams lose counts against one that a prompt waits", ge=0, le=1000),
    ] = 30.0
    kv_events: Annotated[
        Literal["on", "off"],
        _m("listen for the decode engine's KV events (its --kv-events-config), to know which prefixes it holds"),
    ] = "off"
    kv_events_port: Annotated[
        int, _m("loopback port that the decode engine publishes to; rank r to port + r", ge=1, le=65535)
    ] = 5557
    kv_events_replay_port: Annotated[
        int, _m("port of the decode engine's replay endpoint, rank r on port + r; 0: none", ge=0, le=65535)
    ] = 0
    on_prefill_failure: Annotated[
        Literal["recompute", "fail"], _m("what follows a failed remote prefill: local recompute, or an error")
    ] = "recompute"
    recompute_max_concurrent: Annotated[
        int, _m("failed prefills recomputed locally at once; beyond it 503 with Retry-After", ge=0)
    ] = 4
    recompute_max_tokens: Annotated[int, _m("their prompt tokens at once; 0: no limit", ge=0)] = 0
    prefill_attempts: Annotated[int, _m("prefill endpoints tried for one request", ge=1, le=16)] = 2
    prefill_connect_timeout: Annotated[float, _m("seconds to connect to a prefill endpoint", gt=0, le=600)] = 1.0
    prefill_timeout: Annotated[float, _m("seconds for the whole prefill stage", gt=0, le=86400)] = 120.0
    pull_timeout: Annotated[
        float,
        _m(
            "seconds that decode may wait for KV while the prefill peer answers no probe; three times if it does",
            gt=0,
            le=86400,
        ),
    ] = 10.0
    kv_lease: Annotated[
        float,
        _m(
            "seconds that prefill engines hold blocks (their kv_lease_duration); older handoffs are dropped",
            gt=1,
            le=86400,
        ),
    ] = 30.0
    nixl_relay: Annotated[
        Literal["on", "off"],
        _m("answer the decode engine's NIXL handshakes here and check prefill engines before they are used"),
    ] = "on"
    nixl_relay_port: Annotated[int, _m("port of the relay's loopback addresses", ge=1, le=65535)] = 5601
    prefill_side_channel_port: Annotated[
        int, _m("usual side-channel port of prefill engines; asked until a handoff names another", ge=1, le=65535)
    ] = 5600
    local_side_channel: Annotated[
        str,
        _m(
            "HOST:PORT of the decode engine's own side channel; "
            "empty: VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, else the engine's host and 5600"
        ),
    ] = ""
    p2p_connector_port: Annotated[
        int, _m("control port of the P2P tier of prefill engines; rank r on port + r", ge=1, le=65280)
    ] = 7777
    mooncake_bootstrap_port: Annotated[
        int, _m("port of the Mooncake bootstrap server of prefill engines", ge=1, le=65535)
    ] = 8998
    enable_p2p_pull: Annotated[
        Literal["on", "off"],
        _m("whichever engine computes may fetch a prefix from the peer that x-kv-cache-source-host-port names"),
    ] = "off"
    prefill_from_decode: Annotated[
        Literal["on", "off"],
        _m("prefill may fetch what the decode engine holds of a prompt, earlier turns, from its P2P tier"),
    ] = "off"
    local_p2p: Annotated[
        str,
        _m(
            "HOST:PORT of the decode engine's own P2P tier, rank r on port + r; empty: VLLM_P2P_SIDE_CHANNEL_HOST "
            "and _PORT, else it is not asked"
        ),
    ] = ""
    tokenize_once: Annotated[
        Literal["on", "off"],
        _m(
            "chat of text: decode takes the token ids of prefill, so both mean the same prompt and one tokenises it"
        ),
    ] = "on"
    warm_up: Annotated[
        Literal["on", "off"],
        _m(
            "send one tiny request through each new pair of engines, so that no user's request has to connect "
            "them; an endpoint with a dead side channel gets one every 30 s in any case"
        ),
    ] = "on"
    warm_up_timeout: Annotated[
        float,
        _m("seconds that readiness waits for the warm-up of engines known at the start", ge=0, le=600),
    ] = 10.0
    max_body_bytes: Annotated[
        int, _m("larger requests get 413; prefill answers have the same bound", ge=1024, le=2**40)
    ] = 64 << 20
    drain_timeout: Annotated[float, _m("seconds that open answers get after SIGTERM", ge=0, le=86400)] = 60.0
    client_head_timeout: Annotated[float, _m("seconds that a request head may take", gt=0, le=86400)] = 30.0
    client_body_timeout: Annotated[
        float, _m("seconds without progress that a request body may take", gt=0, le=86400)
    ] = 30.0
    client_idle_timeout: Annotated[
        float, _m("seconds that an idle client connection is kept; longer than the gateway's", gt=0, le=86400)
    ] = 660.0
    engine_idle_timeout: Annotated[
        float, _m("seconds that an idle engine connection is kept; shorter than the engine's", gt=0, le=86400)
    ] = 4.0
    decision_header: Annotated[Literal["on", "off"], _m("write x-pd-decision to the client")] = "on"
    tracing: Annotated[Literal["on", "off"], _m("OpenTelemetry spans of requests, sent as OTLP over HTTP")] = "off"
    trace_sample: Annotated[
        float,
        _m(
            "share of the requests without a trace context that are traced; others: as their context says",
            ge=0,
            le=1,
        ),
    ] = 0.01
    otlp_endpoint: Annotated[
        str, _m("base URL of the collector; empty: OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318")
    ] = ""
    log_format: Annotated[Literal["text", "json"], _m("log lines as text or JSON")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _m("least level that is logged")] = "info"

    @property
    def channel_port(self) -> int:
        """Where prefill engines have the control channel of connectors whose answers do not say it."""
        return self.mooncake_bootstrap_port if self.kv_connector == "mooncake" else self.p2p_connector_port

    @property
    def handoff_max_age(self) -> float:
        """Seconds after which a handoff is no longer used: the lease less what its journey may still take. The
        decode engine does not notice that it reads blocks that hold another prompt by now."""
        return self.kv_lease - min(5.0, self.kv_lease / 3)
