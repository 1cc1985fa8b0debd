"""TLS of the public port and towards the workers: PEM files, checked before they are used."""

from __future__ import annotations

import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from .config import ConfigError, TlsFiles
from .engine_types import WorkersTls
from .secret_files import Reloaded, read_file

# Less is worth a warning, in seconds.
_SOON_S = 7 * 24 * 3600.0
# Each side of a handshake has its turn so often.
_NUM_TURNS = 4

log = logging.getLogger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For the port. Each new connection gets the files as they are then, and running ones go on; a
    change that is not good is logged, and the files before stay in use. ConfigError."""
    paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
    reloaded = Reloaded(paths, lambda: _read_server(files))
    return grpc.dynamic_ssl_server_credentials(
        reloaded.get(), reloaded.get, files.client_ca is not None
    )


def worker_credentials(files: WorkersTls) -> Callable[[], grpc.ChannelCredentials]:
    """Gives the credentials for a new connection to a worker; the files as of server_credentials.
    ConfigError."""
    paths = [Path(path) for path in (files.ca, files.cert, files.key) if path]
    return Reloaded(paths, lambda: _read_client(files)).get


def _read_client(files: WorkersTls) -> grpc.ChannelCredentials:
    ca = read_file(Path(files.ca), is_secret=False)
    _check_ca(Path(files.ca), ca)
    if not files.cert:
        return grpc.ssl_channel_credentials(ca)
    cert, key = _read_pair(Path(files.cert), Path(files.key), is_server=False)
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read_server(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key = _read_pair(files.cert, files.key, is_server=True)
    client_ca = None
    if files.client_ca is not None:
        client_ca = read_file(files.client_ca, is_secret=False)
        _check_ca(files.client_ca, client_ca)
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def _read_pair(cert: Path, key: Path, *, is_server: bool) -> tuple[bytes, bytes]:
    """Certificate chain and key. ConfigError unless a peer would take them now."""
    chain, secret = read_file(cert, is_secret=False), read_file(key, is_secret=True)
    for path, content, kind in ((cert, chain, "CERTIFICATE"), (key, secret, "PRIVATE KEY")):
        if f"{kind}-----".encode() not in content:
            raise ConfigError(f"{path} holds no {kind.lower()} in PEM")
    if b"ENCRYPTED" in secret:
        raise ConfigError(f"{key} is encrypted with a password; give the key without one")
    try:
        end_s = _try_pair(cert, key, chain, is_server=is_server)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"the certificate in {cert}: {error.verify_message}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"the key in {key} is not that of the certificate in {cert}"
            ) from None
        reason = f" ({error.reason})" if error.reason else ""
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its key in PEM{reason}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{cert} or {key} cannot be read: {error.strerror}") from error
    if end_s - time.time() < _SOON_S:
        days = (end_s - time.time()) / 86400
        log.warning("the certificate in %s is valid for only %.1f days more", cert, days)
    return chain, secret


def _try_pair(cert: Path, key: Path, chain: bytes, *, is_server: bool) -> float:
    """Makes a connection in memory with the pair; the end of its validity, of the Unix epoch.

    The peer trusts the certificate itself: who signed it is for the real peers to judge.
    """
    server, client = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    # Both sides need a pair to talk at all; one of them looks at the other's.
    for side in (server, client):
        side.load_cert_chain(cert, key)
    judge = client if is_server else server
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(cadata=chain.decode("ascii", "ignore"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_NUM_TURNS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    found = ends[0 if is_server else 1].getpeercert()
    assert found, "the handshake has not ended"
    return ssl.cert_time_to_seconds(str(found["notAfter"]))


def _check_ca(path: Path, content: bytes) -> None:
    """ConfigError unless there is a certificate that can vouch for others now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{path} holds no certificates in PEM") from None
    ends = [str(found["notAfter"]) for found in context.get_ca_certs()]
    if not ends:
        raise ConfigError(f"{path} holds no certificate of a CA; those of servers do not vouch")
    if max(map(ssl.cert_time_to_seconds, ends)) < time.time():
        raise ConfigError(f"{path}: its certificates have expired, the last one on {ends[-1]}")
