"""From settings to the source that they ask for, and what can be said of it before it runs."""

import os
from typing import TYPE_CHECKING

from sidecar.prefill.address import parse
from sidecar.prefill.discovery.cluster import find_cluster
from sidecar.prefill.discovery.discovery import Source
from sidecar.prefill.discovery.spec import parse_spec

if TYPE_CHECKING:
    from sidecar.settings import Settings


def make_source(settings: "Settings") -> Source | None:
    """The source of `--discovery`, None for `none`. Settings have been checked."""
    spec = parse_spec(settings.discovery)
    if spec.kind == "file":
        from sidecar.prefill.discovery.file import FileSource

        return FileSource(spec.path)
    if spec.kind == "dns":
        from sidecar.prefill.discovery.dns import DnsSource

        return DnsSource(spec.host, spec.port, [parse(server) for server in settings.discovery_dns_server])
    if spec.kind == "kubernetes":
        from sidecar.prefill.discovery.kubernetes import MODEL_LABEL, KubernetesSource, join_selectors

        model = settings.discovery_model
        return KubernetesSource(
            find_cluster(
                settings.kubernetes_api, settings.kubernetes_account, settings.discovery_namespace, os.environ
            ),
            selector=join_selectors(settings.discovery_selector, f"{MODEL_LABEL}={model}" if model else ""),
            port=settings.discovery_port,
            pool=settings.inference_pool,
            pool_group=settings.pool_group,
        )
    return None


def doubts(settings: "Settings") -> list[str]:
    """What `--discovery` would not find now and may find later, one line each. Looks at files, asks nobody."""
    spec = parse_spec(settings.discovery)
    if spec.kind != "file":
        return []
    from sidecar.prefill.discovery.file import first_look

    problem = first_look(spec.path)
    if not problem:
        return []
    wanted = "until it lists endpoints (HOST:PORT a line, or a YAML list) none is found there"
    later = "it may be mounted later, and is read again every second"
    return [f"--discovery {settings.discovery}: {problem}; {wanted}; {later}"]
