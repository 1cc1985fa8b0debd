"""Answers put together from the events of a stream, and shown."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from slotwise_client import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Stream,
    Timings,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)

from .output import CliError, Output

# More are refused by the server.
MAX_ANSWERS: Final = 32


@dataclass(slots=True)
class Answer:
    """What a stream has said of one choice; whole once it has a `finish_reason`.

    The first choice has the logprobs of the prompt.
    """

    request_id: str = ""
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reasoning_text: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    seed: int | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    def take(self, delta: Delta) -> None:
        """Add what is new."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.reasoning_text += delta.reasoning_text
        self.logprobs += delta.logprobs
        for part in delta.tool_calls:
            self._take_call(part)

    def _take_call(self, part: ToolCallDelta) -> None:
        if part.index == len(self.tool_calls):
            self.tool_calls.append(ToolCall(part.id, part.name, part.arguments_json))
            return
        call = self.tool_calls[part.index]
        whole = call.arguments_json + part.arguments_json
        self.tool_calls[part.index] = replace(call, arguments_json=whole)

    def finish(self, event: Finished) -> None:
        """Note how it ended."""
        self.finish_reason = event.finish_reason
        self.matched_stop = event.matched_stop
        self.usage = event.usage
        self.timings = event.timings

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold: bytes become text, those of half a character \\xNN."""
        value: dict[str, Any] = _without_bytes(asdict(self))
        return value


def answers_for(n: int | None) -> list[Answer]:
    """One for each choice of a request."""
    return [Answer() for _ in range(min(max(n or 1, 1), MAX_ANSWERS))]


def follow(stream: Stream[Event], output: Output, answers: list[Answer]) -> None:
    """Read a stream to its end, into as many `answers` as the server tells of.

    The text of a single one is shown as it comes unless JSON is wanted, its reasoning on stderr.
    CliError when there are more.
    """
    for event in stream:
        match event:
            case Accepted():
                answers += answers_for(event.num_choices)[len(answers) :]
                for index, answer in enumerate(answers):
                    answer.request_id, answer.index = event.request_id, index
                answers[0].seed = event.seed
            case PromptLogprobs():
                answers[0].prompt_logprobs += event.logprobs
            case Delta():
                answer = _of(answers, event.index)
                if len(answers) == 1 and not output.as_json:
                    _show_delta(event, answer, output)
                answer.take(event)
            case Finished():
                _of(answers, event.index).finish(event)


def _of(answers: Sequence[Answer], index: int) -> Answer:
    if index >= len(answers):
        many = f"the request has more than {len(answers)} answers; say how many with -n"
        raise CliError(many, exit_code=2)
    return answers[index]


def show(answers: Sequence[Answer], output: Output) -> None:
    """What `follow` has not shown: several texts, tool calls, logprobs; or one JSON per choice."""
    if output.as_json:
        for answer in answers:
            output.json(answer.as_json())
        return
    for answer in answers:
        if len(answers) > 1:
            output.line(f"--- answer {answer.index}")
            output.text(answer.text)
        if not answer.text.endswith("\n"):
            output.text("\n")
        for call in answer.tool_calls:
            output.line(f"call {call.id}: {call.name}({call.arguments_json})")
        for rows in (answer.prompt_logprobs, answer.logprobs):
            if rows:
                output.table(_table(rows, "prompt" if rows is answer.prompt_logprobs else "answer"))


def _show_delta(delta: Delta, before: Answer, output: Output) -> None:
    if delta.reasoning_text:
        output.aside(delta.reasoning_text)
    if delta.text and before.reasoning_text and not before.text:
        output.aside("\n\n")
    output.text(delta.text)


def _table(rows: Sequence[TokenLogprobs], of: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(f"token of the {of}", no_wrap=True)
    for head in ("id", "logprob", "rank"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("likeliest", no_wrap=True)
    for row in rows:
        token = row.token
        best = "  ".join(f"{_shown(one)} {one.logprob:.3f}" for one in row.best)
        cells = [_shown(token), str(token.token_id), f"{token.logprob:.4f}", str(token.rank), best]
        # As Text, since a token may look like markup of rich.
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _shown(token: TokenLogprob) -> str:
    return repr(_text(token.text))


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _without_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_bytes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_bytes(item) for item in value]
    return _text(value) if isinstance(value, bytes) else value
