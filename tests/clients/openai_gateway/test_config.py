from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from slotwise_client import TlsOptions
from slotwise_gateway.config import Config, ConfigError, Limits, is_local, parse_arguments
from slotwise_gateway.logs import JsonFormatter, TextFormatter
from slotwise_gateway.process import Process


def test_defaults():
    assert parse_arguments([], {}) == Config()
    assert Config().limits == Limits()


def test_every_flag():
    config = parse_arguments(
        [
            *("--server", "h:1", "--balanced", "--host", "0.0.0.0", "--port", "0"),
            *("--tls-ca", "ca"),
            *("--tls-cert", "c", "--tls-key", "k", "--tls-server-name", "n"),
            *("--https-cert", "hc", "--https-key", "hk", "--insecure-tokens"),
            *("--max-body-mb", "2", "--max-bodies-mb", "6"),
            *("--body-timeout", "3", "--headers-timeout", "4"),
            *("--max-connections", "5", "--keep-alive", "6", "--grace", "7"),
            *("--model-alias", "a", "--model-alias", "b", "--log-level", "debug"),
            *("--log-format", "json", "--events", "--no-status-page"),
        ],
        {"SLOTWISE_TOKEN": "secret"},
    )
    assert config == Config(
        server="h:1",
        balanced=True,
        host="0.0.0.0",
        port=0,
        tls=TlsOptions(Path("ca"), Path("c"), Path("k"), "n"),
        token="secret",
        insecure_tokens=True,
        https_cert=Path("hc"),
        https_key=Path("hk"),
        limits=Limits(
            max_body_bytes=2 << 20,
            max_bodies_bytes=6 << 20,
            body_s=3,
            headers_s=4,
            max_connections=5,
        ),
        keep_alive_s=6,
        grace_s=7,
        model_aliases=("a", "b"),
        status_page=False,
        log_level="debug",
        log_format="json",
        events=True,
    )
    assert "secret" not in repr(config)
    assert parse_arguments(["--tls"], {}).tls == TlsOptions()
    assert parse_arguments(["--token", "t"], {"SLOTWISE_TOKEN": "u"}).token == "t"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--frob"], "frob"),
        (["--port", "x"], "port"),
        (["--port", "65536"], "port is 65536; 0 to 65535"),
        (["--host", ""], "host is empty"),
        (["--server", ""], "server is empty"),
        (["--server", "far"], "server is 'far'; its port is missing"),
        (["--grace", "-1"], "grace is -1"),
        (["--grace", "nan"], "grace is nan"),
        (["--body-timeout", "0"], "body_timeout is 0"),
        (["--headers-timeout", "0"], "headers_timeout"),
        (["--keep-alive", "inf"], "keep_alive"),
        (["--max-body-mb", "9", "--max-bodies-mb", "8"], "max_bodies_mb is 8; 9 to"),
        (["--max-body-mb", "0"], "max_body_mb is 0; 1 to 1024"),
        (["--max-connections", "0"], "max_connections"),
        (["--https-cert", "c"], "go together"),
        (["--model-alias", ""], "model-alias is empty"),
        (["--log-level", "loud"], "loud"),
        (["--token", "a b"], "printable ASCII"),
        (["--token", "t", "--server", "far:1"], "not encrypted"),
    ],
)
def test_what_cannot_be(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_arguments(words, {})


@pytest.mark.parametrize(
    ("server", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x", True),
        ("dns:///localhost:1", True),
        ("scheduler:50051", False),
        ("10.0.0.1:1", False),
        ("localhost.evil:1", False),
    ],
)
def test_which_servers_are_on_this_machine(server, local):
    assert is_local(server) == local
    assert Config(server=server).may_send_tokens == local
    assert Config(server=server, insecure_tokens=True).may_send_tokens
    assert Config(server=server, tls=TlsOptions()).may_send_tokens


async def test_where_it_cannot_listen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = f"cannot listen on 127.0.0.1 port {port}: Address already in use; another --port"
        with pytest.raises(ConfigError, match=told):
            await Process(Config(port=port)).run()
    for host, reason in (
        ("203.0.113.7", "Cannot assign requested address"),
        ("no.such.host.invalid", ".*"),
    ):
        # No port is better there.
        with pytest.raises(ConfigError, match=f"on {host} port 1: {reason}$") as raised:
            await Process(Config(host=host, port=1)).run()
        assert "--port" not in str(raised.value)


def test_a_log_line_is_one_line():
    record = logging.LogRecord("n", logging.INFO, "", 1, "a %s", ("b\r\nc",), None)
    assert TextFormatter().format(record).endswith(" INFO n: a b\\r\\nc")
    assert '"message": "a b\\r\\nc"' in JsonFormatter().format(record)
