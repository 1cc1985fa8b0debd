from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading

import pytest
from clients.scripted_server import WORDS, bad_field, queue_full

from slotwise_client import Message

TEXT = "".join(WORDS)
TIMEOUT_S = 30


def test_text_is_streamed_to_stdout_and_nothing_else(slotwise, served):
    done = slotwise("generate", "Once", "--server", served.address)
    assert (done.code, done.out, done.err) == (0, TEXT + "\n", "")
    assert served.script.requests[0].text == "Once"


def test_json_is_one_object(slotwise, served):
    done = slotwise("generate", "--chat", "q", "--json", "--server", served.address)
    answer = json.loads(done.out)
    assert done.code == 0
    assert answer["text"] == TEXT
    assert answer["token_ids"] == [100, 101, 102, 103, 104]
    assert answer["finish_reason"] == "stop"
    assert answer["matched_stop"] == 2
    assert answer["seed"] == 2**63 + 5
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 5}
    assert answer["timings"]["time_to_first_token_ns"] == 21_000_000


def test_every_option_reaches_the_request(slotwise, served):
    words = "--chat q --system s --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.25 --seed 9"
    words += " --max-new-tokens 4 --stop END --stop STOP --ignore-eos --request-id mine"
    done = slotwise("generate", *words.split(), "--timeout", "20", "--server", served.address)
    assert done.code == 0
    sent = served.script.requests[0]
    assert [(m.role, m.content) for m in sent.chat.messages] == [("system", "s"), ("user", "q")]
    assert sent.sampling.HasField("temperature")
    assert (sent.sampling.top_p, sent.sampling.top_k, sent.sampling.min_p) == (0.5, 3, 0.25)
    assert (sent.sampling.seed, sent.max_new_tokens) == (9, 4)
    assert list(sent.stop) == ["END", "STOP"]
    assert sent.ignore_eos
    assert sent.request_id == "mine"


def test_what_is_not_given_stays_unset(slotwise, served):
    slotwise("generate", "x", "--server", served.address)
    sent = served.script.requests[0]
    assert not sent.HasField("sampling")
    assert not sent.HasField("max_new_tokens")
    assert not sent.HasField("request_id")


def test_a_prompt_from_stdin_is_taken_whole(slotwise, served, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("  two\nlines\n"))
    slotwise("generate", "-", "--server", served.address)
    assert served.script.requests[0].text == "  two\nlines\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["generate", "x", "--chat", "y"], 2, "not both"),
        (["generate", "\udcff"], 4, "text: '\\udcff' is not possible"),
        (["generate", "--chat", "\udcff"], 4, "chat.messages.content: "),
        (["generate", "x", "--system", "y"], 2, "--system belongs to --chat"),
        (["generate", "x", "--server", "127.0.0.1:1"], 3, "127.0.0.1:1"),
        (["chat", "--server", "127.0.0.1:1"], 3, "127.0.0.1:1"),
    ],
)
def test_errors_are_one_line(slotwise, words, code, message):
    done = slotwise(*words)
    assert done.code == code
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: ")
    assert message in done.err


def test_a_full_disk_is_one_line(served):
    command = [sys.executable, "-m", "slotwise_cli", "generate", "x", "--server", served.address]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_the_version_is_told(slotwise):
    assert re.fullmatch(r"slotwise \d+\.\d+\.\d+\n", slotwise("--version").out)


def test_a_refused_request_has_its_own_status_and_no_output(slotwise, served):
    served.script.error = bad_field("sampling.top_p", "7 is outside [0, 1]")
    done = slotwise("generate", "x", "--json", "--server", served.address)
    assert (done.code, done.out) == (4, "")
    assert done.err == "error: sampling.top_p: 7 is outside [0, 1]\n"


def test_a_full_queue_is_a_failure(slotwise, served):
    served.script.error = queue_full(1, 0)
    done = slotwise("generate", "x", "--server", served.address)
    assert done.code == 1
    assert "the queue is full" in done.err


def test_a_wrong_word_is_wrong_usage(slotwise):
    assert slotwise("generate", "x", "--no-such-option").code == 2
    assert slotwise("no-such-command").code == 2


def test_a_conversation_keeps_its_history(slotwise, served, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n/reset\nthird\n/exit\nno\n"))
    done = slotwise("chat", "--system", "s", "--json", "--server", served.address)
    chats = [r.chat.messages for r in served.script.requests if r.DESCRIPTOR.name.startswith("Gen")]
    turns = [[Message(m.role, m.content) for m in chat] for chat in chats]
    system, answer = Message("system", "s"), Message("assistant", TEXT)
    first, second, third = (Message("user", text) for text in ("first", "second", "third"))
    assert turns == [
        [system, first],
        [system, first, answer, second],
        [system, third],
    ]
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == [TEXT] * 3
    assert done.code == 0


def test_a_refused_question_is_taken_back(slotwise, served, monkeypatch):
    class Questions(io.StringIO):
        def readline(self, *args):
            line = super().readline(*args)
            served.script.error = bad_field("chat", "too long") if line == "bad\n" else None
            return line

    monkeypatch.setattr(sys, "stdin", Questions("bad\ngood\n"))
    done = slotwise("chat", "--server", served.address)
    assert done.code == 0
    assert "error: chat: too long" in done.err
    assert [m.content for m in served.script.requests[-1].chat.messages] == ["good"]


def test_ctrl_c_stops_the_answer_and_not_the_program(served):
    served.script.blocked = True
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "slotwise_cli", "chat", "--server", served.address]
    program = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    terminal = Terminal(master)
    try:
        os.write(master, b"question\n")
        terminal.wait_for(WORDS[0])
        program.send_signal(signal.SIGINT)
        assert served.script.ended.wait(TIMEOUT_S), "the answer goes on"
        served.script.blocked = False
        os.write(master, b"again\n/exit\n")
        assert program.wait(TIMEOUT_S) == 0
    finally:
        program.kill()
        program.wait()
        terminal.close()
    last = served.script.requests[-1].chat.messages
    assert [m.content for m in last] == ["question", WORDS[0], "again"]
    assert TEXT in terminal.shown


class Terminal:
    """The screen side of a pseudo-terminal."""

    def __init__(self, master: int) -> None:
        self.shown = ""
        self._master = master
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: text in self.shown, TIMEOUT_S), self.shown

    def close(self) -> None:
        self._reader.join(TIMEOUT_S)
        os.close(self._master)

    def _read(self) -> None:
        try:
            while piece := os.read(self._master, 4096):
                with self._changed:
                    self.shown += piece.decode()
                    self._changed.notify_all()
        except OSError:
            return  # how Linux tells that the other side is closed
