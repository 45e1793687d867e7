"""From settings to the source that they ask for."""

from sidecar.config import Settings
from sidecar.prefill.address import parse
from sidecar.prefill.discovery.discovery import Source
from sidecar.prefill.discovery.file import FileSource
from sidecar.prefill.discovery.spec import parse_spec


def make_source(settings: Settings) -> Source | None:
    """The source of `--discovery`, None for `none`. Settings have been checked."""
    spec = parse_spec(settings.discovery)
    if spec.kind == "file":
        return FileSource(spec.path)
    if spec.kind == "dns":
        from sidecar.prefill.discovery.dns import DnsSource

        return DnsSource(spec.host, spec.port, [parse(server) for server in settings.discovery_dns_server])
    return None
