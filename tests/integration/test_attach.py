"""Streams that are read on: after a lost connection, a killed server, and as a replay."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from free_ports import fixed_port

from chaos.service import poll
from checkpoints import make_checkpoint
from integration.servers import ANSWER_TIMEOUT_S, STOP_TIMEOUT_S, Server, running_server
from slotwise.v1 import inference_pb2 as pb
from slotwise.v1 import inference_pb2_grpc as rpc

TOKENS = 600


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=4096)
    return folder


@contextmanager
def journalled_server(model: Path, journal: Path, port: int, *flags: str) -> Iterator[Server]:
    keep = ("--journal", str(journal), "--max-seq-len", "2048", "--num-slots", "4")
    with running_server(model, *keep, *flags, port=port) as server:
        yield server


def request(name: str, **options) -> pb.GenerateRequest:
    options = {"max_new_tokens": TOKENS, "ignore_eos": True, **options}
    return pb.GenerateRequest(
        request_id=name,
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(temperature=1.0, seed=3),
        attach_window_ms=300_000,
        **options,
    )


@dataclass
class Reader:
    """What a client has of a stream, and reads it on by the rules of the API."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    next_index: int = 0
    finished: pb.Finished | None = None

    def read(self, responses: Iterator[pb.GenerateResponse], at_least: int = 1 << 30) -> None:
        """Until it has so many tokens, or the end."""
        for place, response in enumerate(responses):
            assert response.request_id == self.name
            assert response.HasField("accepted") == (place == 0)
            if response.HasField("delta"):
                self._add(response.delta)
            if response.HasField("finished"):
                self.finished = response.finished
            if len(self.token_ids) >= at_least:
                return

    def attach(self, server: Server, at_least: int = 1 << 30) -> None:
        """Over a connection of its own, which is lost at the end."""
        with grpc.insecure_channel(server.address) as channel:
            ask = pb.AttachRequest(request_id=self.name, next_token_index=self.next_index)
            self.read(rpc.InferenceStub(channel).Attach(ask, timeout=ANSWER_TIMEOUT_S), at_least)

    def _add(self, delta: pb.Delta) -> None:
        assert delta.first_token_index == self.next_index
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += [one.token.logprob for one in delta.logprobs]
        self.next_index += len(delta.token_ids) or 1


def read_whole(server: Server, asked: pb.GenerateRequest) -> Reader:
    whole = Reader(asked.request_id)
    whole.read(server.stub.Generate(asked, timeout=ANSWER_TIMEOUT_S))
    assert whole.finished is not None
    return whole


def start_and_lose(server: Server, asked: pb.GenerateRequest, at_least: int) -> Reader:
    reader = Reader(asked.request_id)
    with grpc.insecure_channel(server.address) as channel:
        reader.read(rpc.InferenceStub(channel).Generate(asked, timeout=ANSWER_TIMEOUT_S), at_least)
    return reader


def refused(server: Server, code: grpc.StatusCode, words: str, **ask) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        list(server.stub.Attach(pb.AttachRequest(**ask), timeout=ANSWER_TIMEOUT_S))
    assert refusal.value.code() is code
    assert words in refusal.value.details()


def test_a_lost_connection_costs_nothing(tiny_model):
    flags = ("--max-seq-len", "2048", "--num-slots", "4")
    with running_server(tiny_model, *flags) as server:
        want = read_whole(server, request("whole", logprobs=2))
        reader = start_and_lose(server, request("lost", logprobs=2), 20)
        for goal in itertools.count(60, 90):
            reader.attach(server, goal)
            if reader.finished is not None:
                break
        assert reader.token_ids == want.token_ids
        assert reader.text == want.text
        assert reader.logprobs == want.logprobs
        assert reader.finished.usage.completion_tokens == TOKENS
        # It has ended, and can be read again, from anywhere.
        tail = Reader("lost", next_index=TOKENS - 5)
        tail.attach(server)
        assert tail.token_ids == want.token_ids[-5:]
        not_found, out_of_range = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE
        refused(server, not_found, "'nobody'", request_id="nobody")
        refused(server, out_of_range, "beyond", request_id="lost", next_token_index=TOKENS + 2)
        assert server.stub.GetLoad(pb.GetLoadRequest()).num_unread == 0


def test_a_stop_string_ends_what_nobody_reads(tiny_model):
    flags = ("--max-seq-len", "2048", "--num-slots", "4")
    with running_server(tiny_model, *flags) as server:
        text = read_whole(server, request("whole")).text
        stop = text[len(text) // 2 :][:6]
        want = read_whole(server, request("stopped", stop=[stop]))
        reader = start_and_lose(server, request("lost", stop=[stop]), 1)
        reader.attach(server)
        assert (reader.token_ids, reader.text) == (want.token_ids, want.text)
        assert reader.finished.matched_stop_string == stop


def test_a_killed_server_costs_nothing(tiny_model, tmp_path):
    """Running, unread, ended; greedy, with logprobs, with a stop string, under a constraint."""
    port = fixed_port()
    kinds = {
        # Long enough to be met by a kill that comes late.
        "plain": {"max_new_tokens": 2000},
        "logprobs": {"logprobs": 3, "prompt_logprobs": 0},
        "regex": {"regex": "[a-z]{400}"},
        "two": {"n": 1, "min_new_tokens": 5},
    }
    with running_server(tiny_model, "--max-seq-len", "2048", "--num-slots", "4") as server:
        want = {name: read_whole(server, request(name, **more)) for name, more in kinds.items()}
    with journalled_server(tiny_model, tmp_path / "j", port) as server:
        ended = read_whole(server, request("ended"))
        readers = [
            start_and_lose(server, request(name, **more), 10) for name, more in kinds.items()
        ]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with journalled_server(tiny_model, tmp_path / "j", port) as server:
        load = server.stub.GetLoad(pb.GetLoadRequest())
        assert load.num_resumed >= 1
        for reader in readers:
            reader.attach(server)
            assert reader.token_ids == want[reader.name].token_ids
            assert reader.text == want[reader.name].text
            assert reader.logprobs == want[reader.name].logprobs
            assert reader.finished.finish_reason == want[reader.name].finished.finish_reason
        again = Reader("ended")
        again.attach(server)
        assert (again.token_ids, again.text) == (ended.token_ids, ended.text)
        assert server.stub.GetServerInfo(pb.GetServerInfoRequest()).journal == (pb.JOURNAL_STATE_ON)


def test_what_a_drain_cuts_off_goes_on_after_the_restart(tiny_model, tmp_path):
    port = fixed_port()
    with journalled_server(tiny_model, tmp_path / "j", port, "--grace", "0.1") as server:
        want = read_whole(server, request("whole", max_new_tokens=2000))
        reader = start_and_lose(server, request("cut", max_new_tokens=2000), 10)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(STOP_TIMEOUT_S) == 0
    with journalled_server(tiny_model, tmp_path / "j", port) as server:
        reader.attach(server)
        assert reader.token_ids == want.token_ids


def test_replay(tiny_model, tmp_path):
    """The record, and the same tokens; after a restart too, but not on another set-up."""
    port = fixed_port()
    with journalled_server(tiny_model, tmp_path / "j", port) as server:
        want = read_whole(server, request("first"))
        record, tokens = replayed(server, "first")
        assert tokens == list(record.answers[0].token_ids) == want.token_ids
        assert record.request.sampling.temperature == 1.0
        assert list(record.prompt_token_ids) == [5, 6, 7]
        info = server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert record.setup == info.setup
        assert info.setup.world_size == 1
    with journalled_server(tiny_model, tmp_path / "j", port) as server:
        assert replayed(server, "first")[1] == want.token_ids
    with journalled_server(tiny_model, tmp_path / "j", port, "--kv-dtype", "bfloat16") as server:
        with pytest.raises(grpc.RpcError) as refusal:
            replayed(server, "first")
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "kv_dtype is 'bfloat16' and was 'float32'" in refusal.value.details()


def replayed(server: Server, name: str) -> tuple[pb.RequestRecord, list[int]]:
    first, *rest = server.stub.Replay(pb.ReplayRequest(request_id=name), timeout=ANSWER_TIMEOUT_S)
    return first.record, [i for one in rest for i in one.response.delta.token_ids]


def num_slow_readers(server: Server) -> int:
    return server.stub.GetLoad(pb.GetLoadRequest()).requests.slow_reader


def test_a_slow_reader_is_cut_off_and_can_come_back(tiny_model):
    """It stalls nobody, holds no slot for ever, and loses nothing."""
    # The timeout is short enough to wait for; who reads must not come so late on a busy machine.
    flags = ("--max-seq-len", "4096", "--num-slots", "4", "--slow-reader-timeout", "3")
    options = {"max_new_tokens": 4000, "logprobs": 20}
    small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    with running_server(tiny_model, *flags) as server:
        with grpc.insecure_channel(server.address, options=small) as channel:
            asked = request("slow", **options)
            call = rpc.InferenceStub(channel).Generate(asked, timeout=ANSWER_TIMEOUT_S)
            reader = Reader("slow")
            reader.read(itertools.islice(call, 3))
            other = read_whole(server, request("other", **options))
            poll(lambda: num_slow_readers(server) == 1, ANSWER_TIMEOUT_S, "it is cut off")
            server.collect(request("more", max_new_tokens=50))
            with pytest.raises(grpc.RpcError) as cut:
                list(call)
            assert cut.value.code() is grpc.StatusCode.ABORTED
            assert "3 s" in cut.value.details()
        reader.attach(server)
        assert (reader.token_ids, reader.text) == (other.token_ids, other.text)
        assert server.stub.GetLoad(pb.GetLoadRequest()).requests.cancelled == 0
