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
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "cached_tokens": 6}
    assert (answer["index"], answer["logprobs"], answer["tool_calls"]) == (0, [], [])
    assert answer["timings"]["time_to_first_token_ns"] == 21_000_000


def test_every_option_reaches_the_request(slotwise, served):
    words = "--chat q --system s --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.25 --seed 9"
    words += " --max-new-tokens 4 --stop END --stop STOP --ignore-eos --request-id mine"
    words += " --frequency-penalty 0.5 --presence-penalty -0.5 --repetition-penalty 1.5"
    words += " --logit-bias 7=-100 --logit-bias 8=0.5 --min-new-tokens 2 --logprobs 1 -n 2"
    words += " --prompt-logprobs 0 --cache-salt s --parse-output"
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
    penalties = sent.sampling.frequency_penalty, sent.sampling.presence_penalty
    assert (*penalties, sent.sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert dict(sent.sampling.logit_bias) == {7: -100, 8: 0.5}
    assert (sent.min_new_tokens, sent.logprobs, sent.n, sent.cache_salt) == (2, 1, 2, "s")
    assert sent.HasField("prompt_logprobs")
    assert sent.parse_output


TOOL = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}


def test_constraints_tools_and_template_variables_are_read(slotwise, served, tmp_path):
    def sent(*words):
        done = slotwise("generate", "--chat", "q", *words, "--server", served.address)
        assert done.code == 0, done.err
        return served.script.requests[-1]

    file = tmp_path / "text"
    file.write_text("start: /a/\n")
    assert sent("--json-schema", '{"type": "null"}').json_schema == '{"type": "null"}'
    assert sent("--json-schema", f"@{file}").json_schema == "start: /a/\n"
    assert sent("--grammar", f"@{file}").grammar == "start: /a/\n"
    assert sent("--json-object").WhichOneof("constraint") == "json_object"
    assert sent("--regex", "a+").regex == "a+"
    assert list(sent("--choice", "a", "--choice", "b").choice.texts) == ["a", "b"]
    file.write_text(json.dumps([TOOL, {"type": "function", "function": {"name": "f"}}]))
    chat = sent("--tools", f"@{file}", "--template-kwargs", '{"enable_thinking": false}').chat
    assert [(t.name, t.parameters_json) for t in chat.tools] == [
        ("find", '{"type": "object"}'),
        ("f", ""),
    ]
    assert json.loads(chat.template_kwargs_json) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--logit-bias 7", "--logit-bias '7' is not ID=BIAS"),
        ("--logit-bias 7=1 --logit-bias 7=2", "names the id 7 twice"),
        ("--grammar @/no/such/file", "--grammar @/no/such/file: "),
        ("--tools [", "--tools is not JSON"),
        ("--tools {}", "--tools is not a JSON list"),
        ('--tools [{"title":"f"}]', "--tools[0] is not an object of"),
        ('--tools [{"name":"f"},{"name":"f","parameters":[]}]', "--tools[1].parameters is not"),
        ("--template-kwargs [1]", "--template-kwargs '[1]' is not a JSON object"),
    ],
)
def test_words_that_cannot_be_read_are_wrong_usage(slotwise, served, words, message):
    done = slotwise("generate", "--chat", "q", *words.split(), "--server", served.address)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not served.script.requests


def test_two_constraints_are_refused(slotwise, served):
    words = ["--json-object", "--regex", "a"]
    done = slotwise("generate", "x", *words, "--server", served.address)
    assert done.code == 4
    assert "at most one constraint" in done.err


def test_several_answers_are_shown_one_after_another(slotwise, served):
    done = slotwise("generate", "x", "-n", "2", "--server", served.address)
    assert done.out == f"--- answer 0\n{TEXT}\n--- answer 1\n{TEXT}\n"
    words = ["-n", "2", "--prompt-logprobs", "1", "--json"]
    done = slotwise("generate", "x", *words, "--server", served.address)
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [(one["index"], one["text"]) for one in answers] == [(0, TEXT), (1, TEXT)]
    assert [len(one["prompt_logprobs"]) for one in answers] == [1, 0]
    # More than a server takes: it says so, nothing is made for them here.
    assert slotwise("generate", "x", "-n", "4000000000", "--server", served.address).code == 4


def test_logprobs_are_a_table_or_part_of_the_json(slotwise, served):
    words = ["generate", "x", "--logprobs", "2", "--prompt-logprobs", "2"]
    done = slotwise(*words, "--server", served.address)
    assert done.out.startswith(TEXT + "\n")
    assert "token of the prompt" in done.out
    rows = [line.split() for line in done.out.splitlines() if "Paris" in line]
    assert rows[-1][:5] == ["'", "Paris'", "103", "-1.5000", "2"]
    assert "'\\\\xe2\\\\x82' -0.250" in done.out
    answer = json.loads(slotwise(*words, "--json", "--server", served.address).out)
    row = answer["logprobs"][0]
    assert row["token"] == {"token_id": 100, "logprob": -1.5, "rank": 2, "text": "The"}
    assert row["best"][0]["text"] == "\\xe2\\x82"
    assert len(answer["logprobs"]) == 5


def test_reasoning_is_aside_and_calls_come_last(slotwise, served):
    words = ["generate", "--chat", "q", "--parse-output"]
    done = slotwise(*words, "--server", served.address)
    assert done.out == TEXT + "\n" + 'call call_0: find({"what": "it"})\n'
    assert done.err == "Let me see.\n\n"
    answer = json.loads(slotwise(*words, "--json", "--server", served.address).out)
    call = {"id": "call_0", "name": "find", "arguments_json": '{"what": "it"}'}
    assert (answer["reasoning_text"], answer["tool_calls"]) == ("Let me see.", [call])


def test_what_is_not_given_stays_unset(slotwise, served):
    slotwise("generate", "x", "--server", served.address)
    sent = served.script.requests[0]
    # What makes a request that is sent anew the same one.
    assert [field.name for field, _ in sent.ListFields()] == [
        "request_id",
        "text",
        "sampling",
        "attach_window_ms",
    ]
    assert [field.name for field, _ in sent.sampling.ListFields()] == ["seed"]


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
        (["generate", "x", "--tools", "[]"], 2, "--tools belongs to --chat"),
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


def test_a_conversation_with_a_known_format_keeps_reasoning_and_calls_apart(
    slotwise, served, monkeypatch
):
    served.script.output_format = "qwen3"
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    assert slotwise("chat", "--json", "--server", served.address).code == 0
    sent = served.script.requests[-1]
    assert sent.parse_output
    turn = sent.chat.messages[1]
    assert (turn.content, turn.reasoning_content) == (TEXT, "Let me see.")
    assert turn.tool_calls[0].arguments_json == '{"what": "it"}'


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
