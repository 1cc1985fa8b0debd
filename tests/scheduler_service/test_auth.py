from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from scheduler_service import auth
from scheduler_service.auth import Caller, Callers, Gate, read_tokens
from scheduler_service.config import ConfigError
from scheduler_service.errors import PermissionDeniedError, UnauthenticatedError
from scheduler_service.health import HealthService
from scheduler_service.listener import bind, make_server
from scheduler_service.request import ClientLimits
from slotwise.v1 import inference_pb2 as pb

TOKEN = "a-token-of-alice-0123"
OPERATOR = "a-token-of-bob-456789"
ENTRIES = [
    {"name": "alice", "token": TOKEN, "max_running": 2, "max_waiting": 5},
    {"name": "bob", "token_sha256": hashlib.sha256(OPERATOR.encode()).hexdigest().upper()}
    | {"operator": True},
]
WAIT_S = 60


def write(folder: Path, content: object, name: str = "tokens.json") -> Path:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def bearer(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"{scheme} {token}"),)


@pytest.fixture
def tokens(tmp_path) -> Path:
    return write(tmp_path, ENTRIES)


class TestFile:
    def test_an_entry_says_who_and_how_much(self, tokens):
        alice, bob = read_tokens(tokens)
        assert alice.caller == Caller("alice", is_operator=False, limits=ClientLimits(2, 5))
        assert bob.caller == Caller("bob", is_operator=True, limits=ClientLimits(0, 0))
        assert TOKEN not in repr((alice, bob))

    def test_an_object_with_a_list_and_toml_are_read_too(self, tokens, tmp_path):
        wrapped = write(tmp_path, {"tokens": ENTRIES}, "wrapped.json")
        text = "".join(
            "[[tokens]]\n" + "".join(f"{key} = {json.dumps(entry[key])}\n" for key in entry)
            for entry in ENTRIES
        )
        toml = write(tmp_path, text, "tokens.toml")
        assert read_tokens(wrapped) == read_tokens(toml) == read_tokens(tokens)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("{", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ("[]", "holds no list of tokens"),
            ("{}", "holds no list of tokens"),
            ("3", "holds no list of tokens"),
            ('{"tokens": {}}', "holds no list of tokens"),
            ('["secret-secret-secret"]', "entry 1 is not an object"),
        ],
    )
    def test_what_is_no_list_of_tokens(self, tmp_path, content, words):
        path = write(tmp_path, content)
        with pytest.raises(ConfigError, match=words) as caught:
            read_tokens(path)
        assert str(path) in str(caught.value)
        assert "secret" not in str(caught.value)

    def test_bad_toml_and_bytes(self, tmp_path):
        with pytest.raises(ConfigError, match="not valid TOML"):
            read_tokens(write(tmp_path, "secret secret", "tokens.toml"))
        path = write(tmp_path, "")
        path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not valid JSON in UTF-8"):
            read_tokens(path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"name": ""}, "name must be 1 to 64"),
            ({"name": "a" * 65}, "name must be 1 to 64"),
            ({"name": "a\nb"}, "name must be 1 to 64"),
            ({"name": "é"}, "name must be 1 to 64"),
            ({"name": 3}, "name must be 1 to 64"),
            ({"token": "short"}, "token must be 16 to 4096"),
            ({"token": "x" * 4097}, "token must be 16 to 4096"),
            ({"token": "with spaces in the token"}, "token must be 16 to 4096"),
            ({"token": "with a line\nin the token"}, "token must be 16 to 4096"),
            ({"token": 1234567890123456789}, "token must be 16 to 4096"),
            ({"token": None}, "needs either token or token_sha256"),
            ({"token_sha256": "0" * 64}, "needs either token or token_sha256"),
            ({"token": None, "token_sha256": "0" * 63}, "64 hexadecimal digits"),
            ({"token": None, "token_sha256": "0x" + "0" * 62}, "64 hexadecimal digits"),
            ({"max_running": 0}, "max_running must be an integer from 1"),
            ({"max_running": True}, "max_running must be an integer from 1"),
            ({"max_waiting": -1}, "max_waiting must be an integer from 1"),
            ({"max_waiting": 1.5}, "max_waiting must be an integer from 1"),
            ({"operator": "yes"}, "operator must be true or false"),
            ({"Token": "a-secret-in-a-wrong-key"}, "keys among"),
        ],
    )
    def test_a_bad_entry_is_named_by_its_place_and_not_shown(self, tmp_path, change, words):
        path = write(tmp_path, [ENTRIES[1], ENTRIES[0] | change])
        with pytest.raises(ConfigError, match=f"entry 2.*{words}") as caught:
            read_tokens(path)
        assert TOKEN not in str(caught.value)
        assert not any(
            isinstance(value, str) and len(value) > 10 and value in str(caught.value)
            for value in change.values()
        )

    def test_names_and_tokens_differ(self, tmp_path):
        with pytest.raises(ConfigError, match="the same name"):
            read_tokens(write(tmp_path, [ENTRIES[0], ENTRIES[1] | {"name": "alice"}]))
        with pytest.raises(ConfigError, match="the same token"):
            read_tokens(write(tmp_path, [ENTRIES[0], ENTRIES[0] | {"name": "carol"}]))

    def test_a_file_that_all_may_read_is_refused(self, tokens):
        tokens.chmod(0o644)
        with pytest.raises(ConfigError, match="every user of this machine"):
            Callers(tokens)


class TestCallers:
    def test_without_a_file_everybody_is_an_operator(self):
        assert Callers().find(()) == Caller("", is_operator=True)
        assert not Callers().wants_tokens

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
    def test_a_token_tells_its_caller(self, tokens, scheme):
        callers = Callers(tokens)
        assert callers.wants_tokens
        assert callers.find(bearer(TOKEN, scheme)).name == "alice"
        assert callers.find((("x", "y"), *bearer(OPERATOR, scheme))).name == "bob"

    @pytest.mark.parametrize(
        "metadata",
        [
            (),
            bearer(""),
            bearer(TOKEN[:-1]),
            bearer(TOKEN + "x"),
            bearer(TOKEN.upper()),
            bearer(TOKEN, "Basic"),
            bearer(TOKEN) + bearer(TOKEN),
            bearer("x" * 5000),
            (("authorization", TOKEN),),
            (("authorization", ""),),
            (("authorization", b"\xff\xfe"),),
            (("token", TOKEN),),
            bearer(hashlib.sha256(TOKEN.encode()).hexdigest()),
        ],
    )
    def test_all_else_is_refused_in_the_same_words(self, tokens, metadata):
        with pytest.raises(UnauthenticatedError) as caught:
            Callers(tokens).find(metadata)
        assert str(caught.value) == (
            "the call needs a good token: send authorization: Bearer TOKEN in its metadata"
        )

    def test_the_digest_of_nothing_lets_nobody_in(self, tmp_path):
        empty = {"name": "empty", "token_sha256": hashlib.sha256(b"").hexdigest()}
        callers = Callers(write(tmp_path, [empty]))
        for metadata in ((), bearer("")):
            with pytest.raises(UnauthenticatedError):
                callers.find(metadata)

    @pytest.mark.parametrize("token", [TOKEN, OPERATOR, "wrong-wrong-wrong-wrong"])
    def test_every_entry_is_compared_in_constant_time(self, tokens, monkeypatch, token):
        compared, really = [], hmac.compare_digest

        def compare(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return really(one, other)

        callers = Callers(tokens)
        monkeypatch.setattr(auth.hmac, "compare_digest", compare)
        with suppress(UnauthenticatedError):
            callers.find(bearer(token))
        assert compared == [(32, 32), (32, 32)]

    def test_a_new_file_counts_at_the_next_call(self, tokens):
        callers = Callers(tokens)
        write(tokens.parent, [ENTRIES[1]])
        with pytest.raises(UnauthenticatedError):
            callers.find(bearer(TOKEN))
        assert callers.find(bearer(OPERATOR)).name == "bob"

    def test_a_bad_new_file_changes_nothing_and_is_logged(self, tokens, caplog):
        callers = Callers(tokens)
        write(tokens.parent, f'[{{"name": "alice", "token": "{TOKEN}"')
        assert callers.find(bearer(TOKEN)).name == "alice"
        assert "stays in use" in caplog.text
        assert TOKEN not in caplog.text

    def test_whose_a_request_is(self):
        alice, bob = Caller("alice", is_operator=False), Caller("bob", is_operator=True)
        alice.check_owner("alice")
        bob.check_owner("alice", or_operator=True)
        for caller, options in ((bob, {}), (Caller("eve", False), {"or_operator": True})):
            with pytest.raises(PermissionDeniedError, match="another caller's"):
                caller.check_owner("alice", **options)


def handlers(seen: list[str]) -> grpc.GenericRpcHandler:
    """Inference whose calls are only noted."""

    async def one(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        seen.append("one")
        return b""

    async def many(request: bytes, context: grpc.aio.ServicerContext) -> None:
        seen.append("many")

    described = pb.DESCRIPTOR.services_by_name["Inference"]
    made = {
        method.name: grpc.unary_stream_rpc_method_handler(many)
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler(one)
        for method in described.methods
    }
    return grpc.method_handlers_generic_handler(described.full_name, made)


@asynccontextmanager
async def gated(
    path: Path | None, operator_calls: bool = True, with_reflection: bool = True
) -> AsyncIterator[tuple[grpc.aio.Channel, list[str]]]:
    seen: list[str] = []
    gate = Gate(Callers(path), operator_calls=operator_calls)
    server = make_server(HealthService(1), gate, with_reflection=with_reflection)
    server.add_generic_rpc_handlers((handlers(seen),))
    address = await bind(server, "127.0.0.1", 0)
    await server.start()
    options = [("grpc.max_send_message_length", 1 << 30)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel, seen
    await server.stop(None)


async def status(
    channel: grpc.aio.Channel, name: str, token: str = "", body: bytes = b""
) -> tuple[str, str]:
    """Of a call: its code and words; ("OK", "") when it is served."""
    metadata = bearer(token) if token else ()
    path = f"/slotwise.v1.Inference/{name}"
    try:
        if name in ("Generate", "Attach", "Replay"):
            call = channel.unary_stream(path)(body, metadata=metadata, timeout=WAIT_S)
            assert await call.read() is grpc.aio.EOF
        else:
            await channel.unary_unary(path)(body, metadata=metadata, timeout=WAIT_S)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


NAMES = [method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods]


async def listed(channel: grpc.aio.Channel, token: str = "") -> set[str]:
    """Services that reflection names."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(timeout=WAIT_S, metadata=bearer(token) if token else ())
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise AssertionError(await call.code())
    call.cancel()
    return {service.name for service in answer.list_services_response.service}


class TestGate:
    @pytest.mark.parametrize("name", NAMES)
    async def test_no_call_is_served_without_a_token(self, tokens, name):
        async with gated(tokens) as (channel, seen):
            for token in ("", "a-token-of-nobody-01"):
                code, words = await status(channel, name, token)
                assert code == "UNAUTHENTICATED"
                assert "nobody" not in words
            assert seen == []
            assert await status(channel, name, OPERATOR) == ("OK", "")

    async def test_calls_that_are_not_there_are_not_told_without_a_token(self, tokens):
        async with gated(tokens) as (channel, _):
            assert (await status(channel, "Secrets"))[0] == "UNAUTHENTICATED"
            assert (await status(channel, "Secrets", TOKEN))[0] == "UNIMPLEMENTED"

    async def test_the_refusal_carries_the_reason(self, tokens):
        async with gated(tokens) as (channel, _):
            call = channel.unary_unary("/slotwise.v1.Inference/GetLoad")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=WAIT_S)
            detail = rpc_status.from_call(caught.value).details[0]
            assert b"UNAUTHENTICATED" in detail.value

    async def test_a_large_message_of_a_stranger_is_not_read(self, tokens):
        # Longer than any message may be: reading it would give RESOURCE_EXHAUSTED.
        async with gated(tokens) as (channel, _):
            body = bytes(65 << 20)
            assert (await status(channel, "GetLoad", "", body))[0] == "UNAUTHENTICATED"
            assert (await status(channel, "GetLoad", TOKEN, body))[0] == "RESOURCE_EXHAUSTED"

    async def test_only_operators_make_their_calls(self, tokens):
        async with gated(tokens) as (channel, seen):
            for name in ("ListSlots", "FlushCache"):
                code, words = await status(channel, name, TOKEN)
                assert code == "PERMISSION_DENIED"
                assert words == f"{name} is for operators, and the token of 'alice' is not one's"
            assert seen == []
            assert await status(channel, "ListSlots", OPERATOR) == ("OK", "")

    @pytest.mark.parametrize("has_tokens", [True, False])
    async def test_calls_of_operators_can_be_switched_off(self, tokens, has_tokens):
        path = tokens if has_tokens else None
        async with gated(path, operator_calls=False) as (channel, seen):
            for name in NAMES:
                code, _ = await status(channel, name, OPERATOR)
                off = name in ("ListSlots", "FlushCache")
                assert code == ("UNIMPLEMENTED" if off else "OK")
            assert len(seen) == len(NAMES) - 2

    async def test_without_tokens_everything_is_served(self):
        async with gated(None) as (channel, _):
            assert {await status(channel, name) for name in NAMES} == {("OK", "")}

    async def test_health_needs_no_token(self, tokens):
        async with gated(tokens) as (channel, _):
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()

    async def test_a_name_that_begins_like_health_is_not_open(self, tokens):
        async with gated(tokens) as (channel, _):
            call = channel.unary_unary("/grpc.health.v1.HealthX/Check")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    async def test_reflection_needs_a_token(self, tokens):
        async with gated(tokens) as (channel, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listed(channel)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "slotwise.v1.Inference" in await listed(channel, TOKEN)

    async def test_reflection_can_be_switched_off(self, tokens):
        async with gated(None, with_reflection=False) as (channel, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listed(channel)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async def test_no_token_is_logged(self, tokens, caplog):
        with caplog.at_level(logging.DEBUG):
            async with gated(tokens) as (channel, _):
                for token in (TOKEN, OPERATOR, "a-token-of-nobody-01"):
                    await status(channel, "GetLoad", token)
                write(tokens.parent, ENTRIES[:1])
                await status(channel, "GetLoad", OPERATOR)
        assert "a-token-of" not in caplog.text
