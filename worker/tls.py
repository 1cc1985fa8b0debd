"""TLS of a worker that listens on TCP: PEM files, checked before they are used."""

from __future__ import annotations

import contextlib
import logging
import ssl
import stat
from pathlib import Path

import grpc

from worker.config import TlsFiles

# Each side of a handshake has its turn so often.
_NUM_TURNS = 4

_LOG = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Reads the files for each new connection, a rare event; where they are not good then, that is
    logged and those before stay in use. ValueError when they are not good now."""

    def read_again() -> grpc.ServerCertificateConfiguration | None:
        try:
            return _read(files)
        except ValueError as error:
            _LOG.error("the TLS files as read before stay in use: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(
        _read(files), read_again, files.client_ca is not None
    )


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    try:
        cert, key = files.cert.read_bytes(), files.key.read_bytes()
        client_ca = files.client_ca.read_bytes() if files.client_ca else None
        mode = stat.S_IMODE(files.key.stat().st_mode)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    if mode & stat.S_IRWXO:
        raise ValueError(
            f"{files.key} holds a secret, and its mode is {mode:04o}: every user of this machine "
            f"may read or change it; run chmod o-rwx {files.key}"
        )
    for path, content, kind in (
        (files.cert, cert, "CERTIFICATE"),
        (files.key, key, "PRIVATE KEY"),
    ):
        if f"{kind}-----".encode() not in content:
            raise ValueError(f"{path} holds no {kind.lower()} in PEM")
    if b"ENCRYPTED" in key:
        raise ValueError(f"{files.key} is encrypted with a password; give the key without one")
    _check_pair(files, cert)
    if files.client_ca and client_ca is not None:
        _check_ca(files.client_ca, client_ca)
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def _check_pair(files: TlsFiles, cert: bytes) -> None:
    """ValueError unless a client that trusts the certificate would take it now."""
    try:
        _connect_in_memory(files, cert)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"the certificate in {files.cert}: {error.verify_message}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            words = f"the key in {files.key} is not that of the certificate in {files.cert}"
            raise ValueError(words) from None
        raise ValueError(
            f"{files.cert} and {files.key} are not a certificate and its key in PEM"
        ) from None


def _connect_in_memory(files: TlsFiles, cert: bytes) -> None:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.cert, files.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=cert.decode("ascii", "ignore"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_NUM_TURNS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _check_ca(path: Path, content: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path} holds no certificates in PEM") from None
    if not context.get_ca_certs():
        raise ValueError(f"{path} holds no certificate of a CA; those of clients do not vouch")
