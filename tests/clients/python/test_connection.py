"""TLS and tokens of the clients."""

from __future__ import annotations

import grpc
import pytest
from certificates import Authority
from clients.scripted_server import scripted_server

from slotwise_client import AsyncClient, Client, TlsOptions, UnavailableError

TIMEOUT_S = 60


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


def served_with_tls(authority, *, wants_client=False, **pair):
    server = authority.pair("server", **pair)
    credentials = grpc.ssl_server_credentials(
        [server.content], authority.content if wants_client else None, wants_client
    )
    return scripted_server(credentials=credentials)


def test_tls_with_a_token(authority):
    with (
        served_with_tls(authority) as server,
        Client(server.address, tls=TlsOptions(ca=authority.path), token="secret") as client,
    ):
        assert client.model_info(timeout=TIMEOUT_S).name == "script"
        assert list(client.generate("x", timeout=TIMEOUT_S))
        client.wait_ready(TIMEOUT_S)
        assert set(server.script.tokens) == {"Bearer secret"}


async def test_tls_with_a_token_async(authority):
    options = TlsOptions(ca=authority.path)
    with served_with_tls(authority) as server:
        async with AsyncClient(server.address, tls=options, token="secret") as client:
            assert (await client.complete("x", timeout=TIMEOUT_S)).text
            async with client.generate("x", timeout=TIMEOUT_S) as stream:
                await anext(stream)
            await client.wait_ready(TIMEOUT_S)
        # The request that was left is cancelled, with the token too.
        assert {"CancelRequest"} <= {r.DESCRIPTOR.name for r in server.script.requests}
        assert set(server.script.tokens) == {"Bearer secret"}


def test_a_certificate_of_ones_own_where_it_is_wanted(authority):
    mine = authority.pair("client")
    with served_with_tls(authority, wants_client=True) as server:
        options = TlsOptions(authority.path, mine.cert, mine.key)
        with Client(server.address, tls=options) as client:
            assert client.model_info(timeout=TIMEOUT_S).name == "script"
        with (
            Client(server.address, tls=TlsOptions(authority.path)) as client,
            pytest.raises(UnavailableError),
        ):
            client.model_info(timeout=TIMEOUT_S)


def test_who_is_not_trusted_is_not_talked_to(authority, tmp_path):
    with served_with_tls(authority) as server:
        other = Authority(tmp_path, "other")
        for tls in (TlsOptions(other.path), True):
            with (
                Client(server.address, tls=tls) as client,
                pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                list(client.generate("x", timeout=TIMEOUT_S))
        assert not server.script.requests


def test_another_name_in_the_certificate(authority):
    with served_with_tls(authority, hosts=("models.example",)) as server:
        with (
            Client(server.address, tls=TlsOptions(authority.path)) as client,
            pytest.raises(UnavailableError),
        ):
            client.model_info(timeout=TIMEOUT_S)
        options = TlsOptions(authority.path, server_name="models.example")
        with Client(server.address, tls=options) as client:
            assert client.model_info(timeout=TIMEOUT_S).name == "script"


def test_files_that_cannot_be_used_are_named(authority, tmp_path):
    mine, other = authority.pair("client"), authority.pair("other")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    locked = authority.pair("locked", password=b"secret")
    for options, words in [
        (TlsOptions(cert=mine.cert), "needs its key"),
        (TlsOptions(key=mine.key), "needs its key"),
        (TlsOptions(ca=nonsense), "nonsense.pem"),
        (TlsOptions(cert=mine.cert, key=other.key), "client"),
        (TlsOptions(cert=locked.cert, key=locked.key), "locked"),
        (TlsOptions(ca=tmp_path / "missing"), "missing cannot be used"),
        (TlsOptions(cert=mine.cert, key=tmp_path / "missing"), "missing cannot be used"),
    ]:
        with pytest.raises(ValueError, match=words):
            Client("127.0.0.1:1", tls=options)


@pytest.mark.parametrize(
    ("target", "is_local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("ipv4:127.0.0.2:1", True),
        ("unix:/tmp/x", True),
        ("localhost", True),
        ("10.0.0.1:1", False),
        ("models.example:1", False),
        ("localhost.example:1", False),
        ("[2001:db8::1]:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("dns:///models.example:1", False),
    ],
)
def test_a_token_leaves_this_machine_only_if_it_may(target, is_local):
    if not is_local:
        with pytest.raises(ValueError, match="unencrypted") as refused:
            Client(target, token="secret")
        assert "secret" not in str(refused.value)
        Client(target, token="secret", insecure_token=True).close()
        Client(target, token="secret", tls=True).close()
    else:
        Client(target, token="secret").close()
    Client(target).close()


@pytest.mark.parametrize("token", ["", "two words", "line\n", "ü"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token):
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        Client("127.0.0.1:1", token=token)
    assert not token.strip() or token not in str(refused.value)


def test_without_a_token_none_is_sent(served):
    with Client(served.address) as client:
        client.model_info(timeout=TIMEOUT_S)
    assert served.script.tokens == [None]
