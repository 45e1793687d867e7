"""TLS from files: every mistake in one line, and a renewal that never makes things worse."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from sidecar import compat, tls
from sidecar.cli import main
from sidecar.config import load
from tests.certificates import DAY, Authority, Pair

CA = Authority()
GOOD, OTHER = CA.issue("localhost", "127.0.0.1"), CA.issue("localhost")

Prepare = Callable[[Path], list[str]]


def serving(folder: Path) -> list[str]:
    return ["--secure-serving", "on", "--cert-path", str(folder)]


def _mismatch(folder: Path) -> list[str]:
    GOOD.write(folder)
    (folder / "tls.key").write_bytes(OTHER.key_pem)
    return serving(folder)


def _without(name: str) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        GOOD.write(folder)
        (folder / name).unlink()
        return serving(folder)

    return prepare


def _folder(name: str) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        flags = _without(name)(folder)
        (folder / name).mkdir()
        return flags

    return prepare


def _with(name: str, content: bytes, *flags: str) -> Prepare:
    def prepare(folder: Path) -> list[str]:
        GOOD.write(folder)
        (folder / name).write_bytes(content)
        return [*serving(folder), *(flag.replace("DIR", str(folder)) for flag in flags)]

    return prepare


def _issued(begins: timedelta, ends: timedelta) -> Prepare:
    return lambda folder: serving(CA.issue("localhost", begins=begins, ends=ends).write(folder))


MISTAKES: dict[str, tuple[Prepare, str]] = {
    "no folder named": (lambda _: ["--secure-serving", "on"], "--cert-path"),
    "folder is empty": (serving, "--cert-path: DIR/tls.crt: No such file"),
    "no key": (_without("tls.key"), "--cert-path: DIR/tls.key: No such file"),
    "no certificate": (_without("tls.crt"), "--cert-path: DIR/tls.crt: No such file"),
    "a folder in place of a key": (_folder("tls.key"), "--cert-path: DIR/tls.key: Is a directory"),
    "key of another": (_mismatch, "--cert-path: DIR/tls.key is not the key of DIR/tls.crt; "),
    "no PEM": (_with("tls.crt", b"nonsense"), "--cert-path: DIR/tls.crt and DIR/tls.key: no PEM pair"),
    "half a certificate": (_with("tls.crt", GOOD.cert_pem[:200]), "no PEM pair"),
    "half a key": (_with("tls.key", GOOD.key_pem[:60]), "no PEM pair"),
    "encrypted key": (_with("tls.key", GOOD.encrypted_key_pem), "encrypted"),
    "expired": (_issued(-2 * DAY, -DAY), "--cert-path: DIR/tls.crt expired at "),
    "not yet valid": (_issued(DAY, 2 * DAY), "not valid before "),
    "no client CA": (_with("x", b"", "--client-ca", "DIR/nowhere"), "--client-ca: DIR/nowhere: No such file"),
    "garbage client CA": (_with("ca", b"x", "--client-ca", "DIR/ca"), "--client-ca: DIR/ca: no PEM certificates"),
    "certificate without TLS": (lambda f: ["--cert-path", str(f)], "--secure-serving on"),
    "client CA without TLS": (lambda _: ["--client-ca", "x"], "--secure-serving on"),
    "no engine CA": (
        lambda f: ["--enable-tls", "prefiller", "--tls-ca", f"{f}/none"],
        "--tls-ca: DIR/none: No such file",
    ),
    "engine CA without TLS": (lambda f: ["--tls-ca", f"{f}/none"], "--enable-tls"),
    "own certificate without TLS": (lambda f: ["--tls-client-cert", str(f)], "--enable-tls"),
    "no own certificate": (
        lambda f: ["--enable-tls", "decoder", "--tls-client-cert", str(f)],
        "--tls-client-cert: DIR/tls.crt: No such file",
    ),
    "own certificate expired": (
        lambda f: [
            *("--enable-tls", "decoder", "--tls-client-cert"),
            str(CA.issue("x", begins=-2 * DAY, ends=-DAY).write(f)),
        ],
        "--tls-client-cert: DIR/tls.crt expired at",
    ),
    "no check without TLS": (
        lambda _: ["--enable-tls", "decoder", "--tls-insecure-skip-verify", "prefiller"],
        "--enable-tls prefiller",
    ),
    "TLS on a Unix socket": (lambda _: ["--enable-tls", "decoder", "--model-server-uds", "/x"], "uds"),
    "no token file": (
        lambda f: ["--probe-token-file", f"{f}/none"],
        "--probe-token-file: DIR/none: No such file",
    ),
    "no admin token file": (
        lambda f: ["--admin-token-file", f"{f}/none"],
        "--admin-token-file: DIR/none: No such file",
    ),
    "empty token file": (
        lambda f: [*_with("token", b" \n")(f), "--probe-token-file", f"{f}/token"],
        "--probe-token-file: DIR/token: holds no key",
    ),
    "two words of a token": (
        lambda f: [*_with("token", b"hidden words")(f), "--probe-token-file", f"{f}/token"],
        "no key",
    ),
}


@pytest.mark.parametrize("command", ["check-config", "serve"])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_files_end_the_start(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, hint = MISTAKES[name]
    assert main([command, *prepare(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert hint.replace("DIR", str(tmp_path)) in err
    assert "hidden" not in err


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (("--secure-serving", "on", "--cert-path", "DIR"), "--cert-path"),
        (("--enable-tls", "decoder", "--tls-ca", "DIR/tls.crt"), "--tls-ca"),
        (("--admin-token-file", "DIR/tls.key"), "--admin-token-file"),
    ],
)
def test_a_file_that_others_may_read(
    flags: tuple[str, ...],
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The usual cause in a pod that runs as a user of its own: a Secret with mode 0400."""
    GOOD.write(tmp_path)

    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert main(["check-config", *(one.replace("DIR", str(tmp_path)) for one in flags)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pd-sidecar: {flag}: {tmp_path}/tls.")
    assert f"Permission denied; this process is user {os.getuid()}" in line


def test_what_is_right_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ca = str(CA.write(tmp_path / "ca.crt"))
    flags = ["--client-ca", ca, "--enable-tls", "prefiller,decoder", "--tls-ca", ca]
    assert main(["check-config", *serving(GOOD.mount(tmp_path)), *flags]) == 0
    assert "tls.crt" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("theirs", "meant"),
    [(["-secure-proxy"], "on"), (["--secure-serving=false"], "off"), (["--secure-proxy", "on"], "on")],
)
def test_flags_as_llm_d_writes_them(theirs: list[str], meant: str) -> None:
    flags, notes = compat.translated(theirs)
    assert load(flags, {})[0].secure_serving == meant
    assert notes == []


@pytest.mark.parametrize("years", [1, 40])
def test_validity_is_read_as_written(years: int) -> None:
    """Before 2050 a time has two digits of its year, from then on four."""
    certificate = CA.issue("x", ends=years * 365 * DAY).certificate
    found = tls.validity(certificate.public_bytes(Encoding.DER))
    assert found == (certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


# -- contexts --------------------------------------------------------------------------------------------------


def test_old_versions_are_refused(tmp_path: Path) -> None:
    GOOD.write(tmp_path)
    for context in (
        tls.server_context(tmp_path / "tls.crt", tmp_path / "tls.key", None),
        tls.client_context(None, verify=True),
        tls.client_context(None, verify=False),
    ):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def shown(server: ssl.SSLContext, client: ssl.SSLContext) -> int:
    """The serial number of the certificate that a new connection is shown."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    far = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (near, far):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert near.selected_alpn_protocol() == "http/1.1"
    certificate = near.getpeercert()
    assert certificate is not None
    return int(str(certificate["serialNumber"]), 16)


def made(folder: Path) -> tls.Renewable:
    context = tls.Tls(load(serving(folder), {})[0]).serving
    assert context is not None
    return context


def test_rotation_by_a_swapped_link(tmp_path: Path) -> None:
    """Case 41, as a kubelet does it: the time stamps of the links stay what they were."""
    context = made(GOOD.mount(tmp_path))
    assert shown(context, CA.client_context()) == GOOD.serial
    OTHER.mount(tmp_path)
    context.look()
    assert shown(context, CA.client_context()) == OTHER.serial


def _half(pair: Pair, folder: Path) -> None:
    (folder / "tls.crt").write_bytes(pair.cert_pem)


def _cut(pair: Pair, folder: Path) -> None:
    pair.write(folder)
    (folder / "tls.key").write_bytes(pair.key_pem[: len(pair.key_pem) // 2])


def _gone(_pair: Pair, folder: Path) -> None:
    (folder / "tls.crt").unlink()


def _old(_pair: Pair, folder: Path) -> None:
    CA.issue("localhost", begins=-2 * DAY, ends=-DAY).write(folder)


@pytest.mark.parametrize("spoil", [_half, _cut, _gone, _old])
def test_what_cannot_serve_changes_nothing(
    spoil: Callable[[Pair, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 41: half-written pairs keep the old one, and say so once; what follows is taken over."""
    context = made(GOOD.write(tmp_path))
    spoil(OTHER, tmp_path)
    for _ in range(3):
        context.look()
    assert shown(context, CA.client_context()) == GOOD.serial
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "not taken over" in line
    assert "the old one stays" in line
    OTHER.write(tmp_path)
    context.look()
    assert shown(context, CA.client_context()) == OTHER.serial


def test_a_file_that_becomes_unreadable_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    context = made(GOOD.write(tmp_path))

    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refused)
        for _ in range(3):
            context.look()
    (record,) = caplog.records
    assert f"--cert-path: {tmp_path}/tls.crt: Permission denied" in record.getMessage()
    assert shown(context, CA.client_context()) == GOOD.serial


def test_key_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text("first-key\n", encoding="ascii")
    key = tls.KeyFile("--probe-token-file", str(path))
    assert key.key == "first-key"
    path.write_text("", encoding="ascii")
    for _ in range(3):
        key.look()
    assert key.key == "first-key"
    assert len(caplog.records) == 1
    path.write_text("second-key", encoding="ascii")
    key.look()
    assert key.key == "second-key"
    assert "-key" not in caplog.text.replace("--probe-token-file", "")


def test_no_key_file() -> None:
    assert tls.KeyFile("--probe-token-file", "").key == ""
