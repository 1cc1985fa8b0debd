"""The logs of three real processes at their lowest level: what they hold, and what never."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from clients.gateways import Gateway, make_chat_checkpoint, running_gateway

from integration.servers import Server, running_server
from slotwise.v1 import inference_pb2 as pb

TIMEOUT_S = 60
# One word of the vocabulary's alphabet; in no name of ours.
SECRET = "quaggazebra"
CHAT = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
# What is wrong with each is told to the client in words that may quote it.
BAD_BODIES: list[dict[str, Any]] = [
    {**CHAT, "messages": [{"role": SECRET, "content": SECRET}]},
    {**CHAT, "stop": [SECRET] * 99},
    {**CHAT, "temperature": SECRET},
    {**CHAT, "response_format": {"type": SECRET}},
    {**CHAT, "tools": [{"type": SECRET}]},
    {"model": "m", "messages": SECRET},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_chat_checkpoint(tmp_path_factory.mktemp("chat"))
    flags = ("--threads", "1", "--log-level", "debug", "--log-format", "json")
    with running_server(model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    flags = ("--model-alias", "m", "--log-level", "debug")
    with running_gateway(server.address, *flags) as running:
        yield running


def post(gateway: Gateway, body: object, request_id: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*gateway.host_port, timeout=TIMEOUT_S)
    headers = {
        "content-type": "application/json",
        "x-request-id": request_id,
        "authorization": f"Bearer token-{SECRET}",
    }
    data = body if isinstance(body, str) else json.dumps(body)
    connection.request("POST", "/v1/chat/completions", data, headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def wait_for(found: Callable[[], bool], log: list[str]) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not found():
        assert time.monotonic() < ends, "".join(log)
        time.sleep(0.02)


def lines_of(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(server.log) if line.startswith("{")]


def test_a_request_is_found_by_its_id_in_both_logs(gateway: Gateway, server: Server) -> None:
    status, _ = post(gateway, {**CHAT, "stream": True}, "found-1")
    assert status == 200
    gateway.wait_for_log("request_id=found-1 ")
    [told] = [line for line in gateway.log if "ended: request_id=found-1 " in line]
    for word in ("status=200", "streamed=True", "completion_tokens=", "ttft_ms=", "duration_ms="):
        assert f" {word}" in told
    wait_for(
        lambda: any(one.get("request_id") == "found-1" for one in lines_of(server)), server.log
    )
    [end] = [one for one in lines_of(server) if one.get("request_id") == "found-1"]
    assert end["level"] == "info"
    assert {"finish_reason", "completion_tokens", "queue_ms", "prefill_ms", "decode_ms"} <= set(end)


def test_lines_of_a_worker_have_its_rank_and_epoch(server: Server) -> None:
    def of_worker() -> list[dict[str, Any]]:
        return [one for one in lines_of(server) if one["logger"] == "slotwise.worker"]

    wait_for(lambda: any("epoch" in one for one in of_worker()), server.log)
    assert {one["rank"] for one in of_worker()} == {0}
    # Fields, and no JSON within the message.
    assert not any("{" in one["message"] for one in of_worker())


def test_what_was_asked_and_answered_is_in_no_log(gateway: Gateway, server: Server) -> None:
    status, text = post(gateway, CHAT, "secret-ok")
    assert status == 200
    answer = json.loads(text)["choices"][0]["message"]["content"]
    for number, body in enumerate(BAD_BODIES):
        status, text = post(gateway, body, f"secret-{number}")
        assert status == 400, text
    assert post(gateway, f'{{"messages": {SECRET}', "secret-broken")[0] == 400
    bad = pb.GenerateRequest(text=SECRET, max_new_tokens=4, regex=f"({SECRET}")
    with pytest.raises(grpc.RpcError):
        list(server.stub.Generate(bad, timeout=TIMEOUT_S))
    with pytest.raises(grpc.RpcError):
        server.stub.Cancel(pb.CancelRequest(request_id=f"{SECRET}\n{SECRET}"), timeout=TIMEOUT_S)
    gateway.wait_for_log("request_id=secret-broken ")
    wait_for(lambda: "secret-ok" in "".join(server.log), server.log)
    all_lines = "".join([*gateway.log, *server.log])
    # They are told, by their fields.
    assert "status=400" in all_lines
    assert SECRET not in all_lines
    if len(answer) > 8:
        assert answer not in all_lines


def test_an_id_is_one_word_or_replaced(gateway: Gateway) -> None:
    long = "x" * 5000
    for name in ("a status=500", "a\tERROR", long):
        status, _ = post(gateway, CHAT, name)
        assert status == 200
    gateway.wait_for_log("request_id='a status=500' ")
    log = "".join(gateway.log)
    assert log.count("a status=500") == log.count("'a status=500'")
    assert "a\tERROR" not in log
    assert long not in log
