"""Certificates for the tests: authorities, and what they sign, good and bad."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)
HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key; the key's is for its owner only."""

    cert: Path
    key: Path

    def write(self, other: Pair) -> None:
        """Puts another pair into these files."""
        self.cert.write_bytes(other.cert.read_bytes())
        self.key.write_bytes(other.key.read_bytes())

    @property
    def content(self) -> tuple[bytes, bytes]:
        """As gRPC's functions want it: key, chain."""
        return self.key.read_bytes(), self.cert.read_bytes()


class Authority:
    """Signs for everybody. Its own certificate is in `path`."""

    def __init__(self, folder: Path, name: str, days: tuple[int, int] = (-2, 2)) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(self._name, self._key, days).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()

    def pair(
        self,
        name: str,
        hosts: tuple[str, ...] = HOSTS,
        days: tuple[int, int] = (-1, 1),
        usage: x509.ObjectIdentifier | None = None,
        password: bytes | None = None,
    ) -> Pair:
        """days: first and last day of its validity, from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, days).add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
        )
        if usage is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.touch(mode=0o600)
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            encryption = serialization.BestAvailableEncryption(password)
        form = serialization.PrivateFormat.PKCS8
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
        return pair

    def client(self, name: str) -> Pair:
        """Good for clients only."""
        return self.pair(name, usage=ExtendedKeyUsageOID.CLIENT_AUTH)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: tuple[int, int]
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
        )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
