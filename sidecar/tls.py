"""TLS contexts from files, and their renewal while connections run. Knows certificates and keys, not who uses them.

A context is never changed once it has served: when its files change a new one is made, and only if that works do
new connections get it. A pair that is half written or does not match therefore changes nothing.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from sidecar.settings import Settings

_log = logging.getLogger("sidecar")

LOOK_EVERY_S = 1.0
ALPN = "http/1.1"


class BadTls(Exception):
    """What is wrong with the files, in one line: the flag that names them, the path, and what is wanted."""


PAIR = "DIR holds tls.crt and tls.key in PEM, as a Secret of type kubernetes.io/tls is mounted"
AUTHORITIES = "a PEM file with the certificates of the authorities is wanted"
KEY = "a file with one word of visible ASCII is wanted, the key"


# -- contexts ------------------------------------------------------------------------------------------------


class ServerContext(ssl.SSLContext):
    """Tells how each handshake went."""

    told: Callable[[str, str], None] = staticmethod(lambda _outcome, _detail: None)


class _Handshake(ssl.SSLObject):
    """One client's connection; `SSLContext.sslobject_class` is the documented place for it."""

    def do_handshake(self) -> None:
        context = cast("ServerContext", self.context)
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            context.told(_outcome(error), describe(error))
            raise
        context.told("ok", "")


_OUTCOMES = {
    "HTTP_REQUEST": "plain_http",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_certificate",
    "CERTIFICATE_VERIFY_FAILED": "bad_certificate",
    "UNSUPPORTED_PROTOCOL": "old_version",
    "TLSV1_ALERT_UNKNOWN_CA": "distrusted",
    "SSLV3_ALERT_BAD_CERTIFICATE": "distrusted",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "distrusted",
}
"""OpenSSL's reasons that an operator can do something about; all others are `other`."""


def _outcome(error: ssl.SSLError) -> str:
    return _OUTCOMES.get(error.reason or "", "other")


def describe(error: ssl.SSLError) -> str:
    """OpenSSL's words without its codes and source lines."""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_message:
        return f"certificate not accepted: {error.verify_message}"
    return (error.reason or error.strerror or type(error).__name__).lower().replace("_", " ")


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ServerContext:
    """For the serving port: TLS 1.2 at least, HTTP/1.1; with `client_ca` a client needs a certificate of it. Raises
    `BadTls`."""
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.sslobject_class = _Handshake
    context.set_alpn_protocols([ALPN])
    _show(context, "--cert-path", cert, key)
    if client_ca is not None:
        _trust(context, "--client-ca", client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path | None, *, verify: bool, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Towards engines: `ca` in place of the system's authorities; `own` is the certificate and its key for those
    that ask for one. Raises `BadTls`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([ALPN])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif ca is None:
        context.load_default_certs()
    else:
        _trust(context, "--tls-ca", ca)
    if own is not None:
        _show(context, "--tls-client-cert", *own)
    return context


def _show(context: ssl.SSLContext, flag: str, cert: Path, key: Path) -> None:
    for path in (cert, key):
        _read(flag, path, PAIR)  # OpenSSL does not say which of the two it could not read
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadTls(f"{flag}: {key} is not the key of {cert}; put the two of one Secret there") from None
        raise BadTls(f"{flag}: {cert} and {key}: no PEM pair ({describe(error)}); {PAIR}") from None
    except (OSError, ValueError) as error:
        raise BadTls(f"{flag}: {cert} and {key}: {getattr(error, 'strerror', None) or error}; {PAIR}") from None


def _trust(context: ssl.SSLContext, flag: str, ca: Path) -> None:
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # an intermediate that the file names is trusted by itself
    _read(flag, ca, AUTHORITIES)
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise BadTls(f"{flag}: {ca}: no PEM certificates ({describe(error)}); {AUTHORITIES}") from None
    except OSError as error:
        raise BadTls(f"{flag}: {ca}: {error.strerror}; {AUTHORITIES}") from None


def _read(flag: str, path: Path, wanted: str) -> bytes:
    """Raises `BadTls`, which says what is `wanted` there, or who may not read it."""
    try:
        return path.read_bytes()
    except PermissionError as error:
        advice = f"this process is user {os.getuid()}: let it read that (a pod's fsGroup, a Secret's defaultMode)"
        raise BadTls(f"{flag}: {path}: {error.strerror}; {advice}") from None
    except OSError as error:
        raise BadTls(f"{flag}: {path}: {error.strerror}; {wanted}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody could enter its password")


def _check_dates(flag: str, cert: Path) -> float:
    """When the certificate ends, as Unix time. Raises `BadTls` if that is past or it has not begun."""
    try:
        text = _read(flag, cert, PAIR).decode("ascii")
        begins, ends = validity(ssl.PEM_cert_to_DER_cert(_first_pem(text)))
    except (ValueError, IndexError):
        raise BadTls(f"{flag}: {cert}: no PEM certificate; {PAIR}") from None
    now = time.time()
    if now > ends:
        raise BadTls(f"{flag}: {cert} expired at {_written(ends)}; renew it")
    if now < begins:
        raise BadTls(f"{flag}: {cert} is not valid before {_written(begins)}; is the clock right?")
    return ends


def _written(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _first_pem(text: str) -> str:
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    start = text.index(begin)
    return text[start : text.index(end, start) + len(end)] + "\n"


def validity(der: bytes) -> tuple[float, float]:
    """When a certificate begins and ends, as Unix times. Python's ssl tells that of verified peers only, so the few
    fields before it are stepped over (RFC 5280 4.1: version, serial, algorithm, issuer, validity). Raises
    `ValueError` or `IndexError`."""
    start, _, _ = _element(der, 0)
    at, _, _ = _element(der, start)
    if der[at] == 0xA0:  # the explicit version, which v1 certificates do not have
        at = _element(der, at)[1]
    for _ in range(3):
        at = _element(der, at)[1]
    start, _, _ = _element(der, at)
    first_start, first_end, first_tag = _element(der, start)
    second_start, second_end, second_tag = _element(der, first_end)
    return _time(der[first_start:first_end], first_tag), _time(der[second_start:second_end], second_tag)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Where the content of the element at `at` starts and ends, and its tag."""
    size, start = der[at + 1], at + 2
    if size & 0x80:
        octets = size & 0x7F
        size, start = int.from_bytes(der[start : start + octets]), start + octets
    return start, start + size, der[at]


def _time(content: bytes, tag: int) -> float:
    text = content.decode("ascii")
    if tag == 0x17:  # UTCTime: two digits of the year, 1950 to 2049
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


# -- renewal -------------------------------------------------------------------------------------------------


class Renewable(ssl.SSLContext):
    """A context that hands every new connection to the newest one made from its files."""

    _make: Callable[[], ssl.SSLContext]
    _files: tuple[Path, ...]
    _seen: list[bytes]
    _newest: ssl.SSLContext
    _what: str

    @classmethod
    def of(cls, what: str, protocol: int, files: Sequence[Path], make: Callable[[], ssl.SSLContext]) -> "Renewable":
        """Raises `BadTls`. `what` is for the log."""
        renewable = cls(protocol)
        renewable._what, renewable._files, renewable._make = what, tuple(files), make
        renewable._seen = renewable._contents()
        renewable._newest = make()
        return renewable

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self._newest.wrap_bio(*args, **options)

    def _contents(self) -> list[bytes]:
        return [_content(path) for path in self._files]

    def look(self) -> None:
        """Takes changed files over. What counts is the content: secrets are swapped by a symbolic link, and a
        file that was written in two steps may end with the time that it had in between."""
        contents = self._contents()
        if contents == self._seen:
            return
        self._seen = contents
        try:
            self._newest = self._make()
        except BadTls as error:
            _log.error("%s: changed, and not taken over: %s; the old one stays", self._what, error)
        else:
            _log.info("%s: changed, new connections use the new one", self._what)


def _content(path: Path) -> bytes:
    """b"" for what cannot be read: why, is said by whoever makes something of it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


class KeyFile:
    """A bearer key that is read again when its file changes; "" without a file. Never shown."""

    def __init__(self, flag: str, path: str) -> None:
        """Raises `BadTls`."""
        self._flag = flag
        self._path = Path(path) if path else None
        self._problem = ""
        self.key = _key(flag, self._path) if self._path is not None else ""

    def look(self) -> None:
        if self._path is None:
            return
        try:
            self.key = _key(self._flag, self._path)
        except BadTls as error:
            if str(error) != self._problem:
                _log.error("key file changed, and not taken over: %s; the old key stays", error)
            self._problem = str(error)
        else:
            self._problem = ""


def _key(flag: str, path: Path) -> str:
    """Raises `BadTls`, which never holds the content."""
    key = _read(flag, path, KEY).strip()
    if not key or not key.isascii() or any(byte <= 0x20 or byte == 0x7F for byte in key):
        raise BadTls(f"{flag}: {path}: holds no key; {KEY}")
    return key.decode("ascii")


# -- what the settings ask for -------------------------------------------------------------------------------


class Tls:
    """The contexts and the key of one process; None where TLS is not wanted."""

    def __init__(
        self, settings: Settings, told: Callable[[str, str], None] = lambda _outcome, _detail: None
    ) -> None:
        """`told` hears the outcome of each handshake with a client and what was wrong. Raises `BadTls`."""
        self._told = told
        self.serving_ends = 0.0
        """When the serving certificate ends, as Unix time; 0.0: there is none."""
        self.serving = self._serving(settings)
        self.prefill = _towards("prefiller", settings)
        self.decode = _towards("decoder", settings)
        self.probe_key = KeyFile("--probe-token-file", settings.probe_token_file)
        self.admin_key = KeyFile("--admin-token-file", settings.admin_token_file)

    def _serving(self, settings: Settings) -> Renewable | None:
        if settings.secure_serving == "off":
            if settings.cert_path or settings.client_ca:
                raise BadTls("--cert-path and --client-ca are for the serving port: set --secure-serving on")
            return None
        if not settings.cert_path:
            raise BadTls("--secure-serving on needs --cert-path DIR with tls.crt and tls.key")
        cert, key = _pair(settings.cert_path)
        client_ca = Path(settings.client_ca) if settings.client_ca else None

        def make() -> ssl.SSLContext:
            context = server_context(cert, key, client_ca)
            context.told = self._told
            self.serving_ends = _check_dates("--cert-path", cert)
            return context

        files = [cert, key] + ([client_ca] if client_ca is not None else [])
        return Renewable.of("certificate of the serving port", ssl.PROTOCOL_TLS_SERVER, files, make)

    async def watch(self) -> None:
        """Looks every second whether a file has changed."""
        loop = asyncio.get_running_loop()
        contexts = [one for one in (self.serving, self.prefill, self.decode) if one is not None]
        looks = [self.probe_key.look, self.admin_key.look, *(one.look for one in contexts)]
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for look in looks:
                await loop.run_in_executor(None, look)

    @property
    def in_use(self) -> bool:
        """Whether TLS is spoken with anyone."""
        return any((self.serving, self.prefill, self.decode))

    @property
    def reads_files(self) -> bool:
        return self.in_use or bool(self.probe_key.key or self.admin_key.key)


def _towards(role: str, settings: Settings) -> Renewable | None:
    if role not in settings.enable_tls:
        if role in settings.tls_insecure_skip_verify:
            raise BadTls(f"--tls-insecure-skip-verify {role} is for TLS: set --enable-tls {role}")
        return None
    if role == "decoder" and settings.model_server_uds:
        raise BadTls("--enable-tls decoder: no TLS is spoken on --model-server-uds")
    verify = role not in settings.tls_insecure_skip_verify
    ca = Path(settings.tls_ca) if settings.tls_ca and verify else None
    own = _pair(settings.tls_client_cert) if settings.tls_client_cert else None

    def make() -> ssl.SSLContext:
        if own is not None:
            _check_dates("--tls-client-cert", own[0])
        return client_context(ca, verify=verify, own=own)

    files = [*([ca] if ca else []), *(own or ())]
    return Renewable.of(f"certificates towards the {role}", ssl.PROTOCOL_TLS_CLIENT, files, make)


def _pair(folder: str) -> tuple[Path, Path]:
    """Certificate and key, as a Secret of type kubernetes.io/tls is mounted."""
    return Path(folder) / "tls.crt", Path(folder) / "tls.key"


def problem(settings: Settings) -> str:
    """What is wrong with the files that the settings name, in one line, or ""."""
    if (settings.tls_ca or settings.tls_client_cert) and not settings.enable_tls:
        return "--tls-ca and --tls-client-cert are for TLS towards engines: set --enable-tls prefiller or decoder"
    try:
        Tls(settings)
    except BadTls as error:
        return str(error)
    return ""
