"""Where the Kubernetes API is and who we are there: a pod's environment and service account, or flags."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sidecar.prefill.address import BadAddress, canonical_host, is_loopback_or_unspecified
from sidecar.prefill.discovery.spec import BadSpec

if TYPE_CHECKING:
    from sidecar.settings import Settings

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class NotInCluster(ValueError):
    """One line for each thing that is missing."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Cluster:
    """`url` without a final slash. `token` and `ca` are paths, None over plain HTTP: `kubectl proxy` needs neither.
    `pod` is our own name, "" if unknown."""

    url: str
    namespace: str
    token: Path | None
    ca: Path | None
    pod: str


def check_api(url: str) -> None:
    """`https://HOST[:PORT]`, or http to this machine. Raises `BadSpec`."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        if parts.scheme not in ("http", "https") or not host:
            raise BadSpec(f"{url!r} is not https://HOST:PORT")
        if parts.username or parts.query or parts.fragment:
            raise BadSpec("the URL of the API server holds no user, query or fragment")
        is_here = is_loopback_or_unspecified(canonical_host(host))
    except BadAddress as error:
        raise BadSpec(str(error)) from None
    except ValueError:
        raise BadSpec(f"{url!r} is not https://HOST:PORT") from None
    if parts.scheme == "http" and not is_here:
        raise BadSpec(f"{url!r}: without TLS only on this machine (kubectl proxy)")


def find_cluster(api: str, account: str, namespace: str, environ: Mapping[str, str]) -> Cluster:
    """From the flags, and for what they leave open from the pod's environment and files. Raises `NotInCluster`."""
    missing: list[str] = []
    url = api.rstrip("/") or _url_of(environ)
    folder = Path(account)
    token = ca = None
    if not url.startswith("http://"):
        token, ca = folder / "token", folder / "ca.crt"
        missing += [
            f"{path}: {problem} (is automountServiceAccountToken off?)"
            for path in (token, ca)
            if (problem := _unreadable(path))
        ]
    if not namespace:
        path = folder / "namespace"
        if problem := _unreadable(path):
            missing.append(f"{path}: {problem}; --discovery-namespace names it too")
        else:
            namespace = path.read_text(encoding="utf-8").strip()
    if missing:
        raise NotInCluster(missing)
    return Cluster(url, namespace, token, ca, environ.get("POD_NAME") or environ.get("HOSTNAME", ""))


def _url_of(environ: Mapping[str, str]) -> str:
    """Raises `NotInCluster` with this alone: where there is no cluster, nothing else of it is there either."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        name = "PORT" if host else "HOST"
        raise NotInCluster(
            [f"KUBERNETES_SERVICE_{name} is not set: this is no pod (--kubernetes-api names another API server)"]
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _unreadable(path: Path) -> str:
    try:
        with path.open("rb"):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def misplaced(settings: "Settings", environ: Mapping[str, str]) -> list[str]:
    """What does not go together with --discovery, or with where we are."""
    if settings.discovery != "kubernetes":
        names = ("inference_pool", "discovery_model")
        given = [name for name in names if getattr(settings, name)]
        return [f"--{name.replace('_', '-')} is of use with --discovery kubernetes only" for name in given]
    mistakes = []
    if not settings.discovery_selector and not settings.inference_pool:
        mistakes.append(
            "--discovery-selector is empty: every pod of the namespace; name labels or an --inference-pool"
        )
    try:
        find_cluster(settings.kubernetes_api, settings.kubernetes_account, settings.discovery_namespace, environ)
    except NotInCluster as error:
        mistakes += [f"--discovery kubernetes: {mistake}" for mistake in error.mistakes]
    return mistakes
