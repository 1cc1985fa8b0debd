from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from certificates import Authority, Pair

from scheduler_service.config import ConfigError, TlsFiles
from scheduler_service.engine_types import WorkersTls
from scheduler_service.health import HealthService
from scheduler_service.listener import bind, make_server
from scheduler_service.tls import server_credentials, worker_credentials

WAIT_S = 60


@pytest.fixture
def ca(tmp_path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def stranger(tmp_path) -> Authority:
    return Authority(tmp_path, "stranger")


@pytest.fixture
def files(ca) -> TlsFiles:
    pair = ca.pair("server")
    return TlsFiles(pair.cert, pair.key)


@asynccontextmanager
async def served(files: TlsFiles) -> AsyncIterator[str]:
    """A server whose every call echoes; its address."""

    async def echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = make_server(HealthService(1))
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),)
    )
    address = await bind(server, "127.0.0.1", 0, server_credentials(files))
    await server.start()
    yield address
    await server.stop(None)


class Client:
    """A connection of its own, and one stream of calls over it."""

    def __init__(self, address: str, ca: Authority | None, pair: Pair | None = None) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            key, chain = pair.content if pair else (None, None)
            credentials = grpc.ssl_channel_credentials(ca.content, key, chain)
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._call = self._channel.stream_stream("/test.Echo/Echo")(timeout=WAIT_S)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def echo(self, data: bytes) -> None:
        await self._call.write(data)
        assert await self._call.read() == data

    async def refusal(self) -> str:
        """The words that come with UNAVAILABLE, which must come."""
        assert await self._call.code() is grpc.StatusCode.UNAVAILABLE
        return await self._call.details()


async def works(address: str, ca: Authority, pair: Pair | None = None) -> None:
    async with Client(address, ca, pair) as client:
        await client.echo(b"hello")


class TestHandshake:
    async def test_who_trusts_the_authority_is_served(self, ca, files):
        async with served(files) as address:
            await works(address, ca)
            await works(address.replace("127.0.0.1", "localhost"), ca)

    async def test_another_authority_is_refused_by_the_client(self, ca, stranger, files):
        async with served(files) as address, Client(address, ca) as running:
            await running.echo(b"before")
            async with Client(address, stranger) as client:
                assert "CERTIFICATE_VERIFY_FAILED" in await client.refusal()
            await running.echo(b"after")

    async def test_another_host_name_is_refused_by_the_client(self, ca):
        pair = ca.pair("elsewhere", hosts=("elsewhere.example",))
        async with served(TlsFiles(pair.cert, pair.key)) as address, Client(address, ca) as client:
            assert "Hostname Verification Check failed" in await client.refusal()

    async def test_plain_clients_are_refused(self, ca, files):
        async with served(files) as address, Client(address, None) as client:
            await client.refusal()
            await works(address, ca)


class TestClientCertificates:
    @pytest.fixture
    def files(self, ca, stranger, files):
        return replace(files, client_ca=ca.path)

    async def test_one_of_the_authority_is_let_in(self, ca, files):
        async with served(files) as address:
            await works(address, ca, ca.client("client"))

    @pytest.mark.parametrize(
        "make",
        [
            lambda ca, stranger: None,
            lambda ca, stranger: stranger.client("foreign"),
            lambda ca, stranger: ca.pair("expired", days=(-3, -1)),
            lambda ca, stranger: ca.pair("early", days=(1, 3)),
        ],
        ids=["missing", "foreign", "expired", "early"],
    )
    async def test_all_others_are_refused_and_nobody_notices(self, ca, stranger, files, make):
        good = ca.client("client")
        async with served(files) as address, Client(address, ca, good) as running:
            await running.echo(b"before")
            async with Client(address, ca, make(ca, stranger)) as client:
                assert "127.0.0.1" in await client.refusal()
            await running.echo(b"after")


class TestReload:
    async def test_new_connections_get_the_new_pair_and_running_streams_go_on(
        self, ca, stranger, files
    ):
        own = Pair(files.cert, files.key)
        async with served(files) as address, Client(address, ca) as running:
            await running.echo(b"before")
            own.write(stranger.pair("new"))
            await works(address, stranger)
            await running.echo(b"after")
            async with Client(address, ca) as client:
                assert "CERTIFICATE_VERIFY_FAILED" in await client.refusal()
            await running.echo(b"still")

    async def test_a_pair_that_does_not_fit_is_not_used(self, ca, stranger, files, caplog):
        new = stranger.pair("new")
        async with served(files) as address, Client(address, ca) as running:
            files.cert.write_bytes(new.cert.read_bytes())
            await works(address, ca)
            assert "is not that of the certificate" in caplog.text
            files.key.write_bytes(new.key.read_bytes())
            await works(address, stranger)
            await running.echo(b"after")

    @pytest.mark.parametrize("content", [b"", b"no certificate", None])
    async def test_a_broken_pair_is_not_used(self, ca, files, caplog, content):
        async with served(files) as address:
            if content is None:
                files.cert.unlink()
            else:
                files.cert.write_bytes(content)
            await works(address, ca)
            await works(address, ca)
        assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1

    async def test_an_expired_pair_is_not_used(self, ca, files, caplog):
        async with served(files) as address:
            Pair(files.cert, files.key).write(ca.pair("old", days=(-3, -1)))
            await works(address, ca)
        assert "certificate has expired" in caplog.text

    async def test_the_authority_of_clients_is_read_again(self, ca, stranger, files):
        files = replace(files, client_ca=ca.path)
        mine, theirs = ca.client("mine"), stranger.client("theirs")
        trusted = Authority(ca.path.parent, "copy")
        trusted.path.write_bytes(ca.content)
        async with served(files) as address, Client(address, trusted, mine) as running:
            await running.echo(b"before")
            ca.path.write_bytes(stranger.content)
            await works(address, trusted, theirs)
            async with Client(address, trusted, mine) as client:
                await client.refusal()
            await running.echo(b"after")


def missing_key(files: TlsFiles, ca: Authority) -> str:
    files.key.unlink()
    return r"server\.key cannot be read: No such file"


def open_key(files: TlsFiles, ca: Authority) -> str:
    files.key.chmod(0o644)
    return r"server\.key holds a secret, and its mode is 0644.*chmod o-rwx"


def locked_key(files: TlsFiles, ca: Authority) -> str:
    files.key.write_bytes(ca.pair("locked", password=b"pass").key.read_bytes())
    return r"server\.key is encrypted with a password"


def other_key(files: TlsFiles, ca: Authority) -> str:
    files.key.write_bytes(ca.pair("other").key.read_bytes())
    return r"the key in .*server\.key is not that of the certificate in .*server\.pem"


def no_key(files: TlsFiles, ca: Authority) -> str:
    files.key.write_bytes(b"no key")
    return r"server\.key holds no private key in PEM"


def missing_cert(files: TlsFiles, ca: Authority) -> str:
    files.cert.unlink()
    return r"server\.pem cannot be read: No such file"


def binary_cert(files: TlsFiles, ca: Authority) -> str:
    files.cert.write_bytes(bytes(range(256)))
    return r"server\.pem holds no certificate in PEM"


def cut_cert(files: TlsFiles, ca: Authority) -> str:
    files.cert.write_bytes(files.cert.read_bytes()[:100] + b"\n-----END CERTIFICATE-----\n")
    return r"server\.pem and .*server\.key are not a certificate and its key in PEM"


def expired_cert(files: TlsFiles, ca: Authority) -> str:
    Pair(files.cert, files.key).write(ca.pair("expired", days=(-3, -1)))
    return r"the certificate in .*server\.pem: certificate has expired"


def early_cert(files: TlsFiles, ca: Authority) -> str:
    Pair(files.cert, files.key).write(ca.pair("early", days=(1, 3)))
    return r"the certificate in .*server\.pem: certificate is not yet valid"


def client_cert(files: TlsFiles, ca: Authority) -> str:
    Pair(files.cert, files.key).write(ca.client("client"))
    return r"the certificate in .*server\.pem: unsuitable certificate purpose"


def no_ca(files: TlsFiles, ca: Authority) -> str:
    ca.path.write_bytes(b"nothing")
    return r"ca\.pem holds no certificates in PEM"


def leaf_ca(files: TlsFiles, ca: Authority) -> str:
    ca.path.write_bytes(files.cert.read_bytes())
    return r"ca\.pem holds no certificate of a CA"


def expired_ca(files: TlsFiles, ca: Authority) -> str:
    old = Authority(ca.path.parent, "old", days=(-3, -1))
    ca.path.write_bytes(old.content)
    return r"ca\.pem: its certificates have expired"


SPOILERS = [
    missing_key,
    open_key,
    locked_key,
    other_key,
    no_key,
    missing_cert,
    binary_cert,
    cut_cert,
]
SPOILERS += [expired_cert, early_cert, no_ca, leaf_ca, expired_ca]


class TestFilesAtStart:
    @pytest.mark.parametrize("spoil", [*SPOILERS, client_cert])
    def test_a_bad_file_is_refused_in_words(self, ca, files, spoil: Callable[..., str]):
        files = replace(files, client_ca=ca.path)
        words = spoil(files, ca)
        with pytest.raises(ConfigError, match=words):
            server_credentials(files)

    @pytest.mark.parametrize("spoil", SPOILERS)
    def test_and_so_towards_the_workers(self, ca, files, spoil: Callable[..., str]):
        words = spoil(files, ca)
        with pytest.raises(ConfigError, match=words):
            worker_credentials(WorkersTls(str(ca.path), str(files.cert), str(files.key)))

    def test_a_certificate_for_clients_only_is_good_towards_workers(self, ca):
        pair = ca.client("scheduler")
        files = WorkersTls(str(ca.path), str(pair.cert), str(pair.key))
        assert isinstance(worker_credentials(files)(), grpc.ChannelCredentials)
        assert isinstance(worker_credentials(WorkersTls(str(ca.path)))(), grpc.ChannelCredentials)

    def test_a_certificate_that_ends_soon_is_warned_of(self, ca, files, caplog):
        server_credentials(files)
        assert "is valid for only 1.0 days more" in caplog.text
        caplog.clear()
        pair = ca.pair("long", days=(-1, 90))
        server_credentials(TlsFiles(pair.cert, pair.key))
        assert caplog.text == ""

    def test_text_around_the_certificates_does_no_harm(self, ca, files):
        for path in (files.cert, ca.path):
            path.write_bytes("Aussteller: Prüfstelle\n".encode() + path.read_bytes())
        server_credentials(replace(files, client_ca=ca.path))

    def test_a_newer_authority_beside_an_expired_one_is_enough(self, ca, files):
        old = Authority(Path(ca.path.parent), "old", days=(-3, -1))
        ca.path.write_bytes(old.content + ca.content)
        server_credentials(replace(files, client_ca=ca.path))
