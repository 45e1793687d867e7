"""Certificates for tests: an authority, and what it signs. Elliptic-curve keys: they take no time to make."""

from __future__ import annotations

import ipaddress
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Pair:
    """A certificate and its key, as PEM."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.certificate = certificate
        self.cert_pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.key_pem = self._key_pem(key, serialization.NoEncryption())
        self.encrypted_key_pem = self._key_pem(key, serialization.BestAvailableEncryption(b"password"))

    @staticmethod
    def _key_pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
        return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)

    @property
    def serial(self) -> int:
        return self.certificate.serial_number

    def write(self, folder: Path) -> Path:
        """`tls.crt` and `tls.key`, as a Secret is mounted."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tls.crt").write_bytes(self.cert_pem)
        (folder / "tls.key").write_bytes(self.key_pem)
        return folder

    def mount(self, folder: Path) -> Path:
        """The same with the symbolic links of a kubelet: swapped in one step."""
        folder.mkdir(parents=True, exist_ok=True)
        data = self.write(folder / f"..{self.serial}")
        link = folder / "..new"
        link.symlink_to(data.name)
        link.replace(folder / "..data")
        for name in ("tls.crt", "tls.key"):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        return folder

    def server_context(self, folder: Path) -> ssl.SSLContext:
        """For a simulated engine."""
        self.write(folder)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {os.urandom(4).hex()}")])
        self._certificate = self._sign(self._name, self._key, [], -DAY, DAY, is_authority=True)
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.pem)
        return path

    def issue(self, *names: str, begins: timedelta = -DAY, ends: timedelta = DAY) -> Pair:
        """For host names and addresses; times from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        return Pair(self._sign(subject, key, list(names), begins, ends, is_authority=False), key)

    def client_context(self, pair: Pair | None = None, folder: Path | None = None) -> ssl.SSLContext:
        """Trusts this authority, and shows `pair`."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        context.set_alpn_protocols(["h2", "http/1.1"])
        if pair is not None and folder is not None:
            pair.write(folder)
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: list[str],
        begins: timedelta,
        ends: timedelta,
        *,
        is_authority: bool,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + ends)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if is_authority:
            usage = dict.fromkeys(
                (
                    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
                    *("key_agreement", "encipher_only", "decipher_only"),
                ),
                False,
            )
            builder = builder.add_extension(
                x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True
            )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
