"""Traces through the gateway, and what its log tells at a request's end."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import sys
import time

import pytest
from clients.gateways import make_chat_checkpoint, running_gateway
from tracing.collector import PARENT, TIMEOUT_S, collecting, values

from integration.servers import running_server
from slotwise_client import Client
from slotwise_gateway import outcome
from slotwise_gateway.config import Config, ConfigError
from slotwise_gateway.gateway import Gateway

STATE = "vendor=1"
SECRET = "zebra quagga"


@pytest.fixture(scope="module", autouse=True)
def often():
    """Spans are sent soon, not every five seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server that is traced, its collector, and the flag that names it."""
    model = make_chat_checkpoint(tmp_path_factory.mktemp("chat"))
    with collecting() as (collector, endpoint):
        flags = ("--otlp-endpoint", endpoint)
        with running_server(model, "--threads", "1", "--log-format", "json", *flags) as server:
            yield server, collector, flags


@pytest.fixture(scope="module")
def traced(served):
    server, _, flags = served
    flags = (*flags, "--log-format", "json", "--model-alias", "m")
    with running_gateway(server.address, *flags) as gateway:
        yield gateway


def post(gateway, body: dict, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*gateway.host_port, timeout=TIMEOUT_S)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["content-type"] = "application/json"
    connection.request("POST", "/v1/completions", json.dumps(body), named)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, dict(response.getheaders())


def asked(**given) -> dict:
    return {"model": "m", "prompt": SECRET, "max_tokens": 5, "seed": 1, **given}


def line_of(process, request_id: str) -> dict:
    """Of the log, at the request's end."""
    process.wait_for_log(f'"message": "ended: request_id={request_id} ')
    lines = [json.loads(line) for line in process.log if line.startswith("{")]
    [found] = [
        line
        for line in lines
        if line.get("request_id") == request_id and line["message"].startswith("ended: ")
    ]
    return found


def scheduler_line(server, request_id: str) -> dict:
    ends = time.monotonic() + TIMEOUT_S
    while True:
        lines = [json.loads(line) for line in server.log if "ended: " in line]
        for line in lines:
            if line["request_id"] == request_id:
                return line
        assert time.monotonic() < ends, "".join(server.log)
        time.sleep(0.05)


@pytest.mark.parametrize("streams", [False, True])
def test_one_trace_from_the_caller_to_the_steps(served, traced, streams):
    server, collector, _ = served
    trace_id, name = f"{1 + streams:032x}", f"whole-{streams}"
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "tracestate": STATE}
    status, _, _ = post(traced, asked(stream=streams), x_request_id=name, **headers)
    assert status == 200
    front = collector.wait_for(
        lambda span: span.name == "POST /v1/completions" and span.trace_id.hex() == trace_id
    )
    spans = collector.trace_of(name)
    [call] = [span for span in spans if span.name == "slotwise.generate"]
    assert (front.parent_span_id.hex(), call.parent_span_id) == (PARENT, front.span_id)
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    assert {span.name for span in spans if span.parent_span_id == call.span_id} >= {
        *("queue", "prefill", "step")
    }
    assert (front.trace_state, call.trace_state) == (STATE, STATE)
    told = values(front)
    assert (told["http.route"], told["http.response.status_code"]) == ("/v1/completions", 200)
    assert told["gen_ai.request.id"] == name
    # The same ids in the logs of both; nothing of the prompt is in either.
    line = line_of(traced, name)
    assert (line["trace_id"], line["span_id"]) == (trace_id, front.span_id.hex())
    assert (line["status"], line["finish_reason"]) == (200, "length")
    assert line["completion_tokens"] == 5
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    theirs = scheduler_line(server, name)
    assert (theirs["trace_id"], theirs["span_id"]) == (trace_id, call.span_id.hex())
    assert (theirs["finish_reason"], theirs["completion_tokens"]) == ("length", 5)
    assert SECRET not in "".join([*traced.log, *server.log])


def test_a_caller_that_does_not_sample_is_not_traced(served, traced):
    _, collector, _ = served
    trace_id = "b" * 32
    post(traced, asked(), traceparent=f"00-{trace_id}-{PARENT}-00")
    post(traced, asked(), x_request_id="behind")
    collector.trace_of("behind")
    assert trace_id not in {span.trace_id.hex() for span in collector.spans}


@pytest.mark.parametrize("text", ["", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "x" * 900])
def test_a_malformed_traceparent_begins_a_new_trace(served, traced, text):
    _, collector, _ = served
    name = f"malformed-{len(text)}"
    status, _, _ = post(traced, asked(), traceparent=text, x_request_id=name)
    assert status == 200
    [call] = [span for span in collector.trace_of(name) if span.name == "slotwise.generate"]
    front = collector.wait_for(lambda span: span.span_id == call.parent_span_id)
    assert not front.parent_span_id


def test_a_gateway_that_is_not_traced_passes_the_trace_on(served):
    server, collector, _ = served
    trace_id = "d" * 32
    with running_gateway(server.address, "--model-alias", "m") as gateway:
        headers = {"traceparent": f"00-{trace_id}-{PARENT}-01", "tracestate": STATE}
        assert post(gateway, asked(), x_request_id="passed", **headers)[0] == 200
        gateway.wait_for_log("ended: request_id=passed ")
    [call] = [span for span in collector.trace_of("passed") if span.name == "slotwise.generate"]
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (trace_id, PARENT)
    assert call.trace_state == STATE


def test_the_python_client_joins_a_trace(served):
    server, collector, _ = served
    trace_id = "e" * 32
    with Client(server.address) as client:
        traced = client.with_trace(f"00-{trace_id}-{PARENT}-01", STATE)
        traced.complete("x", max_new_tokens=2, request_id="client-1", timeout=TIMEOUT_S)
        # The one that it was made of does not.
        client.complete("x", max_new_tokens=2, request_id="client-2", timeout=TIMEOUT_S)
        with pytest.raises(ValueError, match="traceparent"):
            client.with_trace("00-1-2-3")
        with pytest.raises(ValueError, match="tracestate"):
            client.with_trace(f"00-{trace_id}-{PARENT}-01", "a\nb")
    for name, is_in in (("client-1", True), ("client-2", False)):
        [call] = [span for span in collector.trace_of(name) if span.name == "slotwise.generate"]
        assert (call.trace_id.hex() == trace_id) is is_in


def test_a_refusal_names_the_field_and_quotes_nothing(served, traced):
    status, _, headers = post(traced, asked(max_tokens=-1), x_request_id="refused")
    assert (status, headers["x-request-id"]) == (400, "refused")
    line = line_of(traced, "refused")
    assert (line["status"], line["param"]) == (400, "max_tokens")
    front = served[1].wait_for(lambda span: span.span_id.hex() == line["span_id"])
    # The caller's fault is no error of a server.
    assert (front.status.code, front.status.message) == (0, "")


def test_a_flood_of_refusals_does_not_fill_the_log(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    now = [7.0]
    monkeypatch.setattr(outcome.time, "monotonic", lambda: now[0])
    ends = outcome.EndLog()
    refused = {"request_id": "x", "status": 429}
    for _ in range(50):
        ends.tell(refused, {}, logging.INFO)
    # What was served is told whatever else comes.
    ends.tell({"request_id": "served", "status": 200}, {}, logging.INFO)
    assert len(caplog.messages) == outcome.MAX_REFUSALS + 1
    now[0] += 1
    ends.tell(refused, {}, logging.INFO)
    assert caplog.messages[-2].startswith("30 more requests were refused")
    assert caplog.messages[-1] == "ended: request_id=x status=429"


def test_a_request_id_cannot_forge_a_line(traced):
    post(traced, asked(), x_request_id="a status=200 user=root")
    traced.wait_for_log("request_id='a status=200 user=root'")


def test_refusals_of_a_connection_are_counted(traced):
    with socket.create_connection(traced.host_port, TIMEOUT_S) as raw:
        raw.sendall(b"no http at all\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")
    connection = http.client.HTTPConnection(*traced.host_port, timeout=TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    assert 'slotwise_gateway:requests_total{route="connection",status="400"} 1.0' in text


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "slotwise_gateway.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"slotwise\[trace\]"):
        Gateway(Config(otlp_endpoint="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"otlp_endpoint": "127.0.0.1:4317"}, "--otlp-endpoint is '127.0.0.1:4317'"),
        ({"trace_sample_ratio": 1.5}, "--trace-sample-ratio is 1.5"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(ConfigError, match=words):
        Config(**settings)
