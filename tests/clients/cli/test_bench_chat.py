"""`bench chat` against a scripted server whose prefix cache is a list of what it has seen."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from dataclasses import dataclass, field

import pytest
from clients.scripted_server import BLOCKED_S, Script, scripted_server

from slotwise.v1 import inference_pb2 as pb
from slotwise_cli import bench_chat

FEW = [
    "--turns",
    "3",
    "--system-tokens",
    "20",
    "--prompt-tokens",
    "4",
    "--new-tokens",
    "3",
    "--repeats",
    "2",
]


@dataclass
class CachingScript(Script):
    """Finds the longest common prefix with anything it was sent since the last flush.

    `forget`: after how many requests an entry is lost. `drift`: answers depend on what was found.
    Messages are told apart by their characters.
    """

    forget: int | None = None
    drift: bool = False
    kept: list[tuple[int, list[int]]] = field(default_factory=list)
    count: int = 0
    flushes: int = 0
    copied: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Generate(self, request, context):  # noqa: N802
        self._note(request, context)
        prompt = self._prompt(request)
        with self.lock:
            self.count += 1
            cached = self._find(prompt)
            self.copied += cached
        yield self._response(request, accepted=pb.Accepted(prompt_tokens=len(prompt)))
        ids = [(len(prompt) + i + cached * self.drift) % 256 for i in range(request.max_new_tokens)]
        with self.lock:
            self.kept.append((self.count, prompt + ids[:-1]))
        text = "".join(chr(97 + i % 26) for i in ids)
        yield self._response(request, delta=pb.Delta(token_ids=ids, text=text))
        if self.blocked and request.max_new_tokens > 100:
            context.add_callback(self.ended.set)
            self.ended.wait(BLOCKED_S)
            return
        usage = pb.Usage(prompt_tokens=len(prompt), cached_tokens=cached)
        yield self._response(request, finished=pb.Finished(usage=usage))

    def FlushCache(self, request, context):  # noqa: N802
        self.flushes += 1
        self.kept.clear()
        return pb.FlushCacheResponse()

    def GetLoad(self, request, context):  # noqa: N802
        cache = pb.PrefixCacheCounters(num_copied_tokens=self.copied)
        return pb.GetLoadResponse(prefix_cache=cache)

    def _prompt(self, request):
        if request.WhichOneof("input") == "token_ids":
            return list(request.token_ids.ids)
        return [ord(char) for m in request.chat.messages for char in f"<{m.role}>{m.content}"]

    def _find(self, prompt):
        oldest = self.count - (self.forget or self.count)
        lengths = [common(kept, prompt) for number, kept in self.kept if number >= oldest]
        return min(max(lengths, default=0), len(prompt) - 1)


def common(left, right):
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


@pytest.fixture
def caching():
    with scripted_server(CachingScript()) as server:
        yield server


def run(slotwise, server, *words):
    done = slotwise("bench", "chat", *FEW, *words, "--json", "--server", server.address)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("words", [[], ["--at-once"]])
def test_conversations_find_what_one_alone_finds(slotwise, caching, words):
    result = run(slotwise, caching, "--conversations", "4", *words)
    part = result["conversations"]
    assert part["hit_rates_equal"]
    assert part["answers_equal"]
    assert part["shortfalls"] == []
    alone = part["alone"]["turns"]
    # The prompt of turn t holds 20 + t * 4 + (t - 1) * 3 ids; all but the last of an answer and
    # the new ones of the user were kept.
    assert [turn["prompt_tokens"] for turn in alone] == [24, 31, 38]
    assert [turn["cached_tokens"] for turn in alone] == [0, 26, 33]
    together = part["together"]["turns"]
    assert [turn["cached_tokens"] for turn in together][1:] == [26, 33]
    assert part["together"]["later_hit_rate"] == part["alone"]["later_hit_rate"]
    assert part["alone"]["hit_rate"] == pytest.approx(59 / 93)
    if not words:
        assert together[0]["cached_tokens"] == pytest.approx(20 * 3 / 4, abs=0.5)
    # One alone and all together, in each round.
    assert caching.script.flushes == 4
    assert {"cpu", "num_cores", "version", "prefix_reuse", "num_slots"} <= result.keys()


def test_every_round_has_other_tokens_and_all_turns_send_what_came_before(slotwise, caching):
    run(slotwise, caching, "--conversations", "1")
    sent = [r for r in caching.script.requests if r.DESCRIPTOR.name == "GenerateRequest"]
    prompts = [list(r.token_ids.ids) for r in sent[1:]]  # the first is warm-up
    first, other = prompts[:6], prompts[6:]
    assert first[:3] == first[3:]
    assert first[0] != other[0]
    for before, after in itertools.pairwise(first[:3]):
        answer = [(len(before) + i) % 256 for i in range(3)]
        assert after[: len(before) + 3] == before + answer
    assert all(r.ignore_eos and r.sampling.HasField("temperature") for r in sent)


def test_a_cache_that_loses_conversations_is_found_out(slotwise, caching):
    caching.script.forget = 2
    result = run(slotwise, caching, "--conversations", "4")["conversations"]
    assert not result["hit_rates_equal"]
    worst = result["shortfalls"][0]
    assert (worst["turn"], worst["cached_tokens"], worst["alone_cached_tokens"]) == (2, 20, 26)
    shown = slotwise("bench", "chat", *FEW, "--server", caching.address)
    assert "hit rates NOT equal: conversation 1, turn 2 found 20 tokens, alone 26" in shown.out
    assert "more turns" in shown.out


def test_answers_that_depend_on_the_cache_are_found_out(slotwise, caching):
    caching.script.drift = True
    words = ["--conversations", "0", "--repeat-prompt", "30"]
    assert not run(slotwise, caching, *words)["repeat_prompt"]["answers_equal"]
    caching.script.drift = False
    assert run(slotwise, caching, *words)["repeat_prompt"]["answers_equal"]


def test_messages_are_sent_with_the_answers_before(slotwise, caching):
    result = run(slotwise, caching, "--conversations", "2", "--messages")["conversations"]
    assert result["hit_rates_equal"]
    assert result["answers_equal"]
    sent = [r for r in caching.script.requests if r.DESCRIPTOR.name == "GenerateRequest"][1:]
    chats = [r.chat for r in sent]
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m.role for m in chats[2].messages] == roles
    assert len(chats[2].messages[0].content.split()) == 20
    # Each of the two alone, then both, in two rounds.
    assert caching.script.flushes == 6
    assert not any(r.ignore_eos for r in sent)


def test_a_prompt_again_and_continued(slotwise, caching):
    words = ["--conversations", "0", "--repeat-prompt", "30", "--extra-tokens", "5"]
    part = run(slotwise, caching, *words)["repeat_prompt"]
    cached = [part[name]["cached_tokens"] for name in ("cold", "warm", "continued")]
    assert cached == [0, 29, 30]
    assert [part[name]["prompt_tokens"] for name in ("cold", "warm", "continued")] == [30, 30, 35]
    cold, warm = part["cold"]["ttft_ms"], part["warm"]["ttft_ms"]
    assert 0 < part["cold_over_warm"]["min"] <= cold["max"] / warm["min"]


def test_a_prefix_of_a_busy_slot(slotwise, caching):
    caching.script.blocked = True
    words = ["--conversations", "0", "--busy-copy", "30", "--extra-tokens", "5"]
    part = run(slotwise, caching, *words, "--repeats", "1")["busy_copy"]
    assert part["copied"]["cached_tokens"] == 30
    assert part["copied_tokens"] == 30
    assert part["cold"]["prompt_tokens"] == 30
    # The busy one was dropped at the end.
    assert caching.script.ended.wait(60)


def test_a_slot_that_is_not_busy_any_more_is_an_error(slotwise, caching):
    words = ["--conversations", "0", "--busy-copy", "30", "--server", caching.address]
    done = slotwise("bench", "chat", *words)
    assert done.code == 1
    assert "all 1024 tokens were generated before the copy" in done.err


def test_tables_of_all_parts_and_a_file(slotwise, caching, tmp_path):
    caching.script.blocked = True
    words = ["--repeat-prompt", "30", "--busy-copy", "30", "--repeats", "1"]
    file = tmp_path / "chat.json"
    words += ["--json-file", str(file), "--server", caching.address]
    done = slotwise("bench", "chat", *FEW, *words)
    assert done.code == 0, done.err
    assert "hit rates equal: every turn found at least what it finds alone" in done.out
    assert "cold over warm" in done.out
    assert "cold over copied" in done.out
    assert json.loads(file.read_text())["busy_copy"]["tokens"] == 30


def test_a_server_of_our_own_gets_the_room_that_is_needed(slotwise, caching, monkeypatch, tmp_path):
    started = []

    @contextlib.contextmanager
    def running(folder, flags, report):
        started.append(dict(zip(flags[::2], flags[1::2], strict=True)))
        yield caching.address

    monkeypatch.setattr(bench_chat, "running_server", running)
    caching.script.blocked = True
    own = ["bench", "chat", *FEW, "--repeats", "1", "--json", "--model", str(tmp_path)]
    assert slotwise(*own, "--conversations", "5").code == 0
    assert started[-1] == {"--num-slots": "5", "--max-seq-len": str(max(20 + 3 * 7, 66))}
    assert slotwise(*own, "--busy-copy", "30", "--max-running", "2", "--num-slots", "9").code == 0
    length = str(30 + 1024 + 2)
    wanted = {"--num-slots": "9", "--max-running": "2", "--max-seq-len": length}
    assert started[-1] == wanted
    assert slotwise(*own, "--messages").code == 0
    assert "--max-seq-len" not in started[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--conversations", "0"], "nothing to measure"),
        (["--server", "127.0.0.1:1", "--num-slots", "9"], "--num-slots is for a server of our own"),
        (["--server", "127.0.0.1:1", "--model", "demo"], "--model is for a server of our own"),
        (["--turns", "0"], "--turns"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(slotwise, words, message):
    done = slotwise("bench", "chat", *words)
    assert done.code == 2
    assert message in done.err
