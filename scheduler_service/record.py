"""What is kept of a call: to attach to it, to go on after a restart, to run it again."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, fields

from .request import Event, FinishedEvent, PromptLogprobsEvent, TokenEvent, TokenLogprobs

# Of Python's objects, roughly.
_BYTES_PER_LOGPROB = 100
_BYTES_PER_CALL = 2048


class JournalState(enum.Enum):
    """As JournalState of inference.proto."""

    OFF = "off"
    ON = "on"
    # It cannot be written; the log says why.
    FAILING = "failing"


@dataclass(frozen=True, slots=True)
class Setup:
    """As Setup of inference.proto: what the bits of an answer depend on besides its request."""

    fingerprint: str
    front: str
    version: str
    build: str
    weight_dtype: str
    kv_dtype: str
    device_name: str
    world_size: int

    def difference(self, other: Setup) -> str | None:
        """The first field that differs, with both values; None when all are equal."""
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if mine != theirs:
                return f"{one.name} is {mine!r} and was {theirs!r}"
        return None


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call as it was accepted. Times are of the Unix epoch: they outlive the process."""

    call_id: str
    # Who asked; "" where callers are not told apart.
    client: str
    # The GenerateRequest, as it came; a prompt in ids or text is left out.
    request: bytes
    # What it became. Of type code "I".
    prompt_token_ids: array[int]
    # The prompt ends inside the model's reasoning.
    opens_reasoning: bool
    # Of answer 0; those of the others follow from it.
    seed: int
    num_answers: int
    accepted_unix_ns: int
    # None: no deadline.
    deadline_unix_ns: int | None
    setup: Setup

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return _BYTES_PER_CALL + len(self.request) + 4 * len(self.prompt_token_ids)


@dataclass(slots=True)
class AnswerLog:
    """All that one answer has told, joined, and its end."""

    # Of type code "I".
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    # One for each token where they were asked for, else none.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # From the prompt's second token on.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: FinishedEvent | None = None

    def add(self, event: Event) -> None:
        """Takes the answer's next event. What a resumed request tells once more is dropped.

        ValueError when events are missing before it.
        """
        match event:
            case TokenEvent():
                num_known = _num_known(len(self.token_ids), event.first_index)
                self.token_ids.extend(event.token_ids[num_known:])
                self.logprobs.extend(event.logprobs[num_known:])
            case PromptLogprobsEvent():
                num_known = _num_known(len(self.prompt_logprobs) + 1, event.first_index)
                self.prompt_logprobs.extend(event.logprobs[num_known:])
            case FinishedEvent():
                self.end = event

    def events(self, request_id: str) -> list[Event]:
        """What was told, as few events."""
        events: list[Event] = []
        if self.prompt_logprobs:
            events.append(PromptLogprobsEvent(request_id, 1, tuple(self.prompt_logprobs)))
        if self.token_ids:
            events.append(TokenEvent(request_id, 0, tuple(self.token_ids), tuple(self.logprobs)))
        if self.end is not None:
            events.append(self.end)
        return events

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        num_logprobs = sum(
            1 + len(one.best_token_ids) for one in (*self.logprobs, *self.prompt_logprobs)
        )
        return 4 * len(self.token_ids) + _BYTES_PER_LOGPROB * num_logprobs


def _num_known(next_index: int, first_index: int) -> int:
    if first_index > next_index:
        raise ValueError(f"an event begins at {first_index}, {next_index} was next")
    return next_index - first_index
