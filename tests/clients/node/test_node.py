"""The Node client, packed and installed: its examples, its types, and what it does."""

from __future__ import annotations

import json
import subprocess
from collections import deque
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from clients.lossy_server import (
    DRAINS,
    EXPIRED,
    FAULT,
    LOST,
    NOT_FOUND,
    NUM_TOKENS,
    OUT_OF_RANGE,
    POISON,
    RESET,
    SLOW,
    SUPERSEDED,
    Fault,
    Proxy,
)
from clients.npm import npm, run
from clients.scripted_server import SERVICE, bad_field, queue_full, scripted_server
from grpc_health.v1 import health_pb2

from slotwise.v1 import inference_pb2 as pb
from slotwise_client import Client, Delta

pytestmark = pytest.mark.clients

TIMEOUT_S = 60
QUESTION = "What is the capital of France?"
ALL = {"logprobs": 1, "promptLogprobs": 1, "n": 2, "parseOutput": True}


def node(package, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["node", program, *words]
    return subprocess.run(
        command, cwd=package.app, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def answer(server, **options) -> tuple[str, list[int]]:
    """Of the Python client, to the examples' question."""
    with Client(server.address) as client:
        events = list(client.chat(QUESTION, temperature=0, **options))
    deltas = [event for event in events if isinstance(event, Delta)]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids


def load(server) -> pb.GetLoadResponse:
    return server.stub.GetLoad(pb.GetLoadRequest(), timeout=TIMEOUT_S)


# The package


def test_the_units(package):
    assert "# fail 0" in npm("test", cwd=package.folder)


def test_the_sources_are_formatted(package):
    npm("run", "lint", cwd=package.folder)


def test_what_is_in_the_package(package):
    made = package.app / "node_modules" / "slotwise-client"
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert {"package.json", "LICENSE", "README.md", "index.d.ts", "src/index.js"} <= files
    assert "protos/slotwise/v1/inference.proto" in files
    assert not [name for name in files if name.startswith(("test", "examples", "node_modules"))]


def test_the_lock_file_names_no_host():
    lock = Path(__file__).parents[3] / "clients" / "node" / "package-lock.json"
    assert "resolved" not in lock.read_text()


def test_types_and_client_know_the_same_options(package, served):
    """test/program.ts has every option that the types know; here it is every field of the proto."""
    npm("run", "types", cwd=package.folder)
    program = package.folder / "build" / "test" / "program.js"
    lines = run("node", program, served.address, cwd=package.folder).splitlines()
    events, text, (health, ids, detokenized), (model, busy), field = map(json.loads, lines)
    request = served.script.requests[0]
    unset = {f.name for f in request.DESCRIPTOR.fields} - {f.name for f, _ in request.ListFields()}
    inputs, constraints = (
        {field.name for field in request.DESCRIPTOR.oneofs_by_name[name].fields}
        for name in ("input", "constraint")
    )
    assert unset == inputs - {"text"} | constraints
    assert {f.name for f, _ in request.sampling.ListFields()} == {
        f.name for f in request.sampling.DESCRIPTOR.fields
    }
    assert request.sampling.seed == 2**64 - 1
    assert dict(request.sampling.logit_bias) == {3: -1.5}
    assert [event["type"] for event in events][:2] == ["accepted", "promptLogprobs"]
    assert events[0]["seed"] == str(2**63 + 5)
    assert events[-1]["timings"]["decodeNs"] == "80000000"
    assert [one.WhichOneof("constraint") for one in served.script.requests[1:7]] == [
        *("json_schema", "json_schema", "json_object", "regex", "grammar", "choice")
    ]
    turns = served.script.requests[7].chat
    assert [turn.role for turn in turns.messages] == ["system", "assistant", "tool"]
    assert [turn.HasField("content") for turn in turns.messages] == [True, False, True]
    assert turns.messages[1].tool_calls[0].name == "find"
    assert json.loads(turns.tools[0].parameters_json) == {"type": "object"}
    assert json.loads(turns.template_kwargs_json) == {"enable_thinking": False}
    assert text == "The capital is Paris."
    assert (health, ids, detokenized) == ("serving", [97, 98], "ab")
    assert (model["name"], model["defaultSampling"]["temperature"]) == ("script", 1)
    assert (busy["numRunning"], busy["requests"]["accepted"]) == (1, "5")
    assert field == "sampling.seed"
    assert set(served.script.tokens) == {"Bearer secret"}


MISTAKES = {
    "client.generate('x', { maxNewTokens: '5' });": "not assignable to type 'number",
    "client.generate('x', { maxTokens: 5 });": "'maxTokens' does not exist",
    "for await (const event of client.chat('x')) event.text;": "'text' does not exist",
    "const { seed }: { seed: number } = { seed: 1n };": "'bigint' is not assignable",
}


def test_types_find_mistakes(package):
    """All in one program: the compiler takes its time."""
    head = "import { Client } from 'slotwise-client';\nconst client = new Client();\n"
    program = package.folder / "test" / "mistakes.ts"
    program.write_text(head + "\n".join(MISTAKES))
    settings = json.loads((package.folder / "tsconfig.json").read_text())
    settings["include"] = ["test/mistakes.ts"]
    (package.folder / "mistakes.json").write_text(json.dumps(settings))
    command = "exec", "--no", "--", "tsc", "--project", "mistakes.json"
    with pytest.raises(AssertionError) as caught:
        npm(*command, cwd=package.folder)
    found = [line for line in str(caught.value).splitlines() if "mistakes.ts(" in line]
    # Line by line: the first two are the head.
    for number, (line, words) in enumerate(zip(found, MISTAKES.values(), strict=True), 3):
        assert f"mistakes.ts({number}," in line
        assert words in line


# The examples, against a real server


def test_example_chat(package, server):
    done = node(package, "chat.mjs", server.address)
    text, ids = answer(server, max_new_tokens=32)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, len(ids)) == (text + "\n", 32)
    own = (package.app / "chat.mjs").read_text().splitlines()
    assert len(own) < 30


def test_example_cancel(package, server):
    before = load(server).requests.cancelled
    done = node(package, "cancel.mjs", server.address)
    assert done.stderr == ""
    assert done.stdout == "by its id: cancelled\nby leaving the loop: 0 running\n"
    assert load(server).requests.cancelled == before + 2


def test_example_health(package, server, served):
    done = node(package, "health.mjs", server.address)
    assert (done.returncode, done.stdout, done.stderr) == (0, "serving\n", "")
    served.health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    done = node(package, "health.mjs", served.address)
    assert (done.returncode, done.stdout) == (1, "not_serving\n")
    done = node(package, "health.mjs", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no answer from 127.0.0.1:1: ")


def test_example_attach(package, server):
    text, ids = answer(server, max_new_tokens=32, request_id="attached")
    done = node(package, "attach.mjs", server.address)
    assert (done.stdout, done.stderr) == (text + "\n", "")
    head, _ = answer(server, max_new_tokens=7)
    done = node(package, "attach.mjs", server.address, "attached", "7")
    # What of the head's text was held back until its end comes with the rest.
    assert text.endswith(done.stdout.rstrip("\n"))
    assert len(done.stdout) - 1 >= len(text) - len(head)
    assert len(ids) == 32


def test_attach_from_a_token(server, driver):
    text, ids = answer(server, max_new_tokens=32, request_id="from-7")
    seen = driver.play(server.address, "attach", "from-7", 7)
    deltas = [event for event in seen["events"] if event["type"] == "delta"]
    assert deltas[0]["firstTokenIndex"] == 7
    assert [i for delta in deltas for i in delta["tokenIds"]] == ids[7:]
    assert text.endswith("".join(delta["text"] for delta in deltas))
    assert seen["events"][-1]["finishReason"] == "length"


@pytest.mark.parametrize("how", ["leave", "abort"])
def test_leaving_in_the_middle_frees_the_slot(server, driver, how):
    """At once: the driver answers when its loop is left, and the server knows by then."""
    options = {"maxNewTokens": 1500, "ignoreEos": True}
    before = load(server).requests.cancelled
    seen = driver.play(server.address, "chat", QUESTION, options, **{how: True})
    assert seen["events"][-1]["type"] == "delta"
    assert seen.get("error", {}).get("name") == {"leave": None, "abort": "AbortError"}[how]
    if how == "abort":
        # The next call's answer comes after the aborted client has closed.
        driver.play(server.address, "health")
    now = load(server)
    assert (now.num_running, now.requests.cancelled) == (0, before + 1)


def test_bad_input_is_named(server, driver):
    seen = driver.play(server.address, "chat", QUESTION, {"topP": 7})
    error = seen["error"]
    assert (error["name"], error["field"]) == ("InvalidArgumentError", "sampling.top_p")
    assert "7" in error["message"]
    seen = driver.play(server.address, "cancel", "nobody")
    assert seen["error"]["name"] == "NotFoundError"


CUT_READER = """
import { once } from 'node:events';
import { Client } from 'slotwise-client';
const client = new Client(process.argv.at(-1));
const options = { temperature: 0, maxNewTokens: 1500, ignoreEos: true };
let text = '';
const ids = [];
for await (const event of client.chat('What is the capital of France?', options)) {
  if (event.type !== 'delta') continue;
  if (event.firstTokenIndex === 0) console.log('begun');
  text += event.text;
  ids.push(...event.tokenIds);
}
console.log(JSON.stringify([text, ids]));
await once(process.stdin, 'data');
process.exit(0);
"""


def test_a_connection_that_is_cut_loses_no_token(package, server):
    want = answer(server, max_new_tokens=1500, ignore_eos=True)
    proxy = Proxy(server.address, cut_after=2000)
    command = ["node", "--input-type=module", "-e", CUT_READER, proxy.address]
    with subprocess.Popen(
        command, cwd=package.app, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            got = json.loads(process.stdout.readline())
            assert proxy.num_cuts >= 1
            # It ends well without a connection too.
            proxy.cut()
            process.stdin.write("end\n")
        finally:
            process.stdin.close()
            proxy.close()
    assert process.returncode == 0
    assert tuple(got) == want


# Losses, against a server that plays them


def summary(events: list[dict]) -> dict:
    """All that a reader is told, however it was cut into events."""
    told: dict = {}
    for delta in (event for event in events if event["type"] == "delta"):
        mine = told.setdefault(delta["index"], {"ids": [], "text": "", "calls": [], "rows": []})
        if delta["tokenIds"]:
            assert delta["firstTokenIndex"] == len(mine["ids"]), "a gap or an overlap"
        mine["ids"] += delta["tokenIds"]
        mine["text"] += delta["text"]
        mine.setdefault("reasoning", "")
        mine["reasoning"] += delta["reasoningText"]
        for part in delta["toolCalls"]:
            mine["calls"] += [(part["name"],)] if part["name"] else []
            mine["calls"] += list(part["argumentsJson"])
        mine["rows"] += [row["token"] for row in delta["logprobs"]]
    rows = [event for event in events if event["type"] == "promptLogprobs"]
    return {
        "told": told,
        "accepted": [event["type"] for event in events].count("accepted"),
        "finished": [event["index"] for event in events if event["type"] == "finished"],
        "prompt": [row["token"]["tokenId"] for event in rows for row in event["logprobs"]],
    }


def generate(lossy, driver, faults=(), **options) -> dict:
    lossy.script.calls.clear()
    lossy.script.faults = deque(faults)
    seen = driver.play(lossy.address, "generate", "x", {"timeoutMs": 30_000, **options})
    assert "error" not in seen, seen["error"]
    return summary(seen["events"])


def test_each_part_of_a_stream_undisturbed(lossy, driver):
    got = generate(lossy, driver, **ALL)
    assert (got["accepted"], got["finished"], got["prompt"]) == (1, [0, 1], [1, 2, 3])
    assert got["told"][1]["ids"] == [200 + i for i in range(NUM_TOKENS)]
    assert got["told"][1]["reasoning"] == "r2r3"
    assert got["told"][1]["calls"] == [("find",), *'{"a": 1}']
    row = got["told"][0]["rows"][0]
    assert (row["tokenId"], row["logprob"], row["rank"], row["text"]) == (100, -1.5, 2, "x")


@pytest.mark.parametrize("after", [1, 2, 4, 5, 6, 7, 8, 9, 12, 14])
@pytest.mark.parametrize("forgets", [True, False])
def test_a_loss_is_not_seen(lossy, driver, after, forgets):
    want = generate(lossy, driver, **ALL)
    assert generate(lossy, driver, [Fault(after, forgets=forgets)], **ALL) == want
    assert len(lossy.script.calls) > 1
    assert lossy.script.cancelled == []


def test_many_losses_of_many_kinds(lossy, driver):
    want = generate(lossy, driver, **ALL)
    faults = [Fault(2, LOST), Fault(5, RESET), Fault(4, is_silent=True), Fault(3, SLOW)]
    faults += [Fault(0, DRAINS), Fault(6, forgets=True), Fault(0, OUT_OF_RANGE)]
    assert generate(lossy, driver, faults, **ALL) == want


@pytest.mark.parametrize("refusal", [NOT_FOUND, EXPIRED])
def test_what_a_server_knows_no_more_is_asked_anew(lossy, driver, refusal):
    want = generate(lossy, driver)
    faults = [Fault(3, LOST), Fault(0, refusal, forgets=True)]
    assert generate(lossy, driver, faults) == want
    assert lossy.script.calls == ["Generate", "Attach 2", "Generate"]
    first, *_, last = lossy.script.requests[-3:]
    assert first == last, "the same id, seed and parameters"


def test_another_answer_is_an_error_and_cancelled(lossy, driver):
    lossy.script.faults = deque([Fault(6, LOST, forgets=True, shift=50)])
    seen = driver.play(lossy.address, "generate", "x", {"requestId": "mine"})
    assert seen["error"]["name"] == "AnswerChangedError"
    assert "token 2 is 152 and was 102" in seen["error"]["message"]
    assert lossy.script.was_cancelled.wait(TIMEOUT_S)
    assert lossy.script.cancelled == ["mine"]


@pytest.mark.parametrize(
    ("status", "name"),
    [(SUPERSEDED, "SupersededError"), (POISON, "InternalError"), (FAULT, "InternalError")],
)
def test_what_is_not_to_be_tried_again(lossy, driver, status, name):
    lossy.script.faults = deque([Fault(3, status)])
    seen = driver.play(lossy.address, "generate", "x")
    assert (seen["error"]["name"], lossy.script.calls) == (name, ["Generate"])
    assert lossy.script.cancelled == []


def test_a_server_without_attach_windows(lossy, driver):
    lossy.script.max_window_ms = 0
    assert generate(lossy, driver)["finished"] == [0]
    sent = lossy.script.requests[-2:]
    assert [one.HasField("attach_window_ms") for one in sent] == [True, False]


def test_without_reconnect_nothing_is_added(lossy, driver):
    lossy.script.faults = deque([Fault(3, LOST)])
    how = {"client": {"reconnect": False}}
    seen = driver.play(lossy.address, "generate", "x", **how)
    assert seen["error"]["name"] == "UnavailableError"
    assert "Socket closed" in seen["error"]["message"]
    assert [event["type"] for event in seen["events"]] == ["accepted", "delta", "delta"]
    sent = lossy.script.requests[-1]
    assert sent == pb.GenerateRequest(text="x", sampling=pb.SamplingParams())


@pytest.mark.parametrize("fault", [None, Fault(forgets=True), Fault(0, LOST), Fault(0, DRAINS)])
def test_complete_is_one_whole_answer_all_the_same(lossy, driver, fault):
    options = {**ALL, "requestId": "mine", "seed": f"{2**64 - 1}n"}
    lossy.script.faults = deque([fault])
    seen = driver.play(lossy.address, "complete", "x", options)
    value = seen["value"]
    assert value["requestId"] == "mine"
    assert lossy.script.requests[0].sampling.seed == 2**64 - 1
    if fault is None:
        assert lossy.script.calls == ["Complete"]
        assert value["choices"][1]["text"] == "The capital is Paris."
        assert value["choices"][1]["toolCalls"] == [
            {"id": "call_0", "name": "find", "argumentsJson": "{}"}
        ]
        assert value["choices"][0]["finished"]["matchedStop"] == 2
        return
    assert value["accepted"]["seed"] == f"{2**64 - 1}n"
    assert [one["tokenIds"][0] for one in value["choices"]] == [100, 200]
    assert value["choices"][0]["text"] == " 100 104 105!"
    assert value["choices"][0]["toolCalls"][0]["argumentsJson"] == '{"a": 1}'
    assert len(value["promptLogprobs"]) == 3


@pytest.mark.parametrize(("reconnect", "cancelled"), [(True, ["mine"]), (False, [])])
def test_an_aborted_complete_ends_its_request(lossy, driver, reconnect, cancelled):
    """By its id; without reconnecting, by its call, as gRPC does."""
    lossy.script.break_connections.clear()
    lossy.script.faults = deque([Fault()])
    how = {"client": {"reconnect": reconnect}, "abort": True}
    seen = driver.play(lossy.address, "complete", "x", {"requestId": "mine"}, **how)
    assert seen["error"]["name"] == "AbortError"
    assert lossy.script.cancelled == cancelled


# What a server says


def test_a_full_queue_says_when(served, driver):
    served.script.error = queue_full(1, 500_000_000)
    error = driver.play(served.address, "generate", "x")["error"]
    assert (error["name"], error["retryAfterMs"]) == ("QueueFullError", 1500)


def test_a_field_is_named(served, driver):
    served.script.error = bad_field("max_new_tokens", "0 is below 1")
    error = driver.play(served.address, "complete", "x")["error"]
    assert (error["name"], error["field"]) == ("InvalidArgumentError", "max_new_tokens")
    assert (error["message"], error["code"]) == ("max_new_tokens: 0 is below 1", 3)


def test_a_timeout(served, driver):
    served.script.blocked = True
    seen = driver.play(served.address, "generate", "x", {"timeoutMs": 200})
    assert seen["error"]["name"] == "DeadlineError"
    assert served.script.ended.wait(TIMEOUT_S)


def test_tls_and_a_token(tmp_path, driver):
    authority = Authority(tmp_path, "authority")
    other = Authority(tmp_path, "other")
    pair = authority.pair("server", hosts=("models.example",))
    credentials = grpc.ssl_server_credentials([pair.content])
    with scripted_server(credentials=credentials) as served:
        tls = {"ca": authority.content.decode(), "serverName": "models.example"}
        how = {"client": {"tls": tls, "token": "secret"}}
        seen = driver.play(served.address, "generate", "x", **how)
        assert seen["events"][-1]["type"] == "finished"
        assert served.script.tokens == ["Bearer secret"]
        tls["ca"] = other.content.decode()
        seen = driver.play(served.address, "health", **how)
        assert seen["error"]["name"] == "UnavailableError"
        del tls["ca"], tls["serverName"]
        seen = driver.play(served.address, "health", **how)
        assert seen["error"]["name"] == "UnavailableError"
