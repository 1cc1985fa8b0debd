"""TLS of a worker's TCP port: refusals at start, who is let in, files that change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair
from grpc_health.v1 import health_pb2, health_pb2_grpc

from worker.__main__ import main
from worker.config import TlsFiles, WorkerConfig
from worker.rank import Rank
from worker.server import start_server
from worker.tls import server_credentials

TIMEOUT_S = 60


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def files(ca: Authority) -> TlsFiles:
    pair = ca.pair("worker")
    return TlsFiles(pair.cert, pair.key, ca.path)


@asynccontextmanager
async def served(folder: Path, files: TlsFiles) -> AsyncIterator[str]:
    server, servicer, address = await start_server("127.0.0.1:0", Rank(folder, 1), print, tls=files)
    yield address
    await server.stop(grace=0)
    await servicer.close()


async def check(address: str, roots: bytes | None, pair: Pair | None = None) -> str:
    """The status of a health call over a new connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if roots is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        credentials = grpc.ssl_channel_credentials(roots, *(pair.content if pair else ()))
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    async with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_only_a_scheduler_with_a_certificate_is_let_in(
    tmp_path: Path, ca: Authority, files: TlsFiles
) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with served(tmp_path, files) as address:
        assert await check(address, ca.content, ca.client("scheduler")) == "OK"
        for pair in (None, stranger.client("foreign"), ca.pair("expired", days=(-3, -1))):
            assert await check(address, ca.content, pair) == "UNAVAILABLE"
        assert await check(address, None) == "UNAVAILABLE"
        assert await check(address, ca.content, ca.client("again")) == "OK"


async def test_without_a_client_ca_any_scheduler_is_let_in(
    tmp_path: Path, ca: Authority, files: TlsFiles
) -> None:
    async with served(tmp_path, replace(files, client_ca=None)) as address:
        assert await check(address, ca.content) == "OK"


async def test_a_new_connection_gets_the_new_files_unless_they_are_bad(
    tmp_path: Path, ca: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    stranger, own = Authority(tmp_path, "stranger"), ca.client("scheduler")
    new = stranger.pair("new")
    async with served(tmp_path, files) as address:
        files.cert.write_bytes(new.cert.read_bytes())
        assert await check(address, ca.content, own) == "OK"
        assert "as read before stay in use" in caplog.text
        files.key.write_bytes(new.key.read_bytes())
        assert await check(address, ca.content, own) == "UNAVAILABLE"
        assert await check(address, stranger.content, own) == "OK"


def missing_key(files: TlsFiles, ca: Authority) -> str:
    files.key.unlink()
    return r"worker\.key cannot be read: No such file"


def open_key(files: TlsFiles, ca: Authority) -> str:
    files.key.chmod(0o604)
    return r"worker\.key holds a secret, and its mode is 0604"


def locked_key(files: TlsFiles, ca: Authority) -> str:
    files.key.write_bytes(ca.pair("locked", password=b"pass").key.read_bytes())
    return r"worker\.key is encrypted with a password"


def other_key(files: TlsFiles, ca: Authority) -> str:
    files.key.write_bytes(ca.pair("other").key.read_bytes())
    return r"the key in .*worker\.key is not that of the certificate"


def no_cert(files: TlsFiles, ca: Authority) -> str:
    files.cert.write_bytes(bytes(range(256)))
    return r"worker\.pem holds no certificate in PEM"


def expired_cert(files: TlsFiles, ca: Authority) -> str:
    Pair(files.cert, files.key).write(ca.pair("expired", days=(-3, -1)))
    return r"the certificate in .*worker\.pem: certificate has expired"


def early_cert(files: TlsFiles, ca: Authority) -> str:
    Pair(files.cert, files.key).write(ca.pair("early", days=(1, 3)))
    return r"the certificate in .*worker\.pem: certificate is not yet valid"


def no_ca(files: TlsFiles, ca: Authority) -> str:
    ca.path.write_bytes(b"nothing")
    return r"ca\.pem holds no certificates in PEM"


def leaf_ca(files: TlsFiles, ca: Authority) -> str:
    ca.path.write_bytes(files.cert.read_bytes())
    return r"ca\.pem holds no certificate of a CA"


SPOILERS = [missing_key, open_key, locked_key, other_key, no_cert, expired_cert, early_cert]
SPOILERS += [no_ca, leaf_ca]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_bad_files_are_refused_in_words(
    ca: Authority, files: TlsFiles, spoil: Callable[[TlsFiles, Authority], str]
) -> None:
    words = spoil(files, ca)
    with pytest.raises(ValueError, match=words):
        server_credentials(files)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tls-cert", "{folder}/none.pem"], "TLS needs both --tls-cert and --tls-key"),
        (["--tls-client-ca", "{folder}/none.pem"], "TLS needs both --tls-cert and --tls-key"),
        (
            ["--tls-cert", "{folder}/none.pem", "--tls-key", "{folder}/none.key"],
            "none.pem cannot be read: No such file or directory",
        ),
    ],
)
def test_the_process_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    words = [word.format(folder=tmp_path) for word in words]
    assert main(["--listen", "127.0.0.1:0", "--model", str(tmp_path), *words]) == 1
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listen", "exposed"),
    [
        ("unix:/tmp/w.sock", False),
        ("127.0.0.1:5", False),
        ("127.8.0.1:5", False),
        ("localhost:5", False),
        ("[::1]:5", False),
        ("0.0.0.0:5", True),
        ("[::]:5", True),
        ("10.0.0.1:5", True),
        ("worker-0:5", True),
    ],
)
def test_who_may_be_reached_from_elsewhere(files: TlsFiles, listen: str, exposed: bool) -> None:
    config = WorkerConfig(listen, Path(), 1)
    assert config.is_exposed is exposed
    if not listen.startswith("unix:"):
        assert not replace(config, tls=files).is_exposed
        assert replace(config, tls=replace(files, client_ca=None)).is_exposed is exposed


def test_a_unix_socket_needs_no_tls(files: TlsFiles) -> None:
    with pytest.raises(ValueError, match="it needs no TLS"):
        WorkerConfig("unix:/tmp/w.sock", Path(), 1, tls=files)
