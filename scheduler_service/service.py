"""What the API does, free of protobuf: reads prompts, validates, submits, follows to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .answers import Answer, Update
from .chat_output import OutputFormat, find_format
from .chat_template import ChatTemplate
from .constraints import Constraints
from .engine import Engine
from .errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
    UnknownRequestError,
)
from .generate_call import ChatInput, GenerateCall
from .json_file import ModelFilesError
from .model_files import ModelInfo, read_model_info
from .prompts import Prompt, PromptReader
from .request import (
    Event,
    FinishReason,
    PromptLogprobsEvent,
    Request,
)
from .request_stream import RequestStream
from .text_stream import TextStream
from .tokenizer import Tokenizer
from .validation import ModelLimits, check_call, check_fits, make_requests, text_options

# Tokens of a prompt whose logprobs are told at once: with 20 alternatives, some milliseconds' work.
PROMPT_PART = 128
# A client's clock starts before ours: it gives up at its deadline, a little before we reach it.
DEADLINE_SLACK_NS = 100_000_000


class Generation:
    """The submitted answers to a call. Leaving its `async with` before the end cancels them."""

    def __init__(self, engine: Engine, answers: Sequence[Answer], stream: RequestStream) -> None:
        self.request = answers[0].request
        self.queue_position = stream.queue_position
        self._engine = engine
        self._stream = stream
        self._answers = {answer.request.request_id: answer for answer in answers}
        # Events that were read and not yet told.
        self._events: list[Event] = []

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def has_ended(self) -> bool:
        """Every answer has had its last update."""
        return all(answer.has_ended for answer in self._answers.values())

    def close(self) -> None:
        """Ends what still waits or runs: nobody reads it any more."""
        if self.has_ended:
            return
        deadline = self.request.deadline_ns
        late = deadline is not None and self._engine.now_ns() >= deadline - DEADLINE_SLACK_NS
        reason = FinishReason.DEADLINE if late else FinishReason.CANCELLED
        try:
            self._engine.cancel(self.request.call_id, reason)
        except UnknownRequestError:
            # It ended by itself while its last events were on their way here.
            return

    async def next(self) -> list[Update]:
        """Waits for events and joins all that are here, by answer. Logprobs of a prompt come alone,
        a bounded number at a time, and others get their turn between.

        Errors as of Answer.update; nothing may be asked after one, nor when all have ended.
        """
        if not self._events:
            read = (await anext(self._stream), *self._stream.take_ready())
            self._events = [part for event in read for part in _parts(event)]
        places = (i for i, one in enumerate(self._events) if isinstance(one, PromptLogprobsEvent))
        count = next(places, len(self._events))
        if count == 0:
            await asyncio.sleep(0)
            count = 1
        events, self._events = self._events[:count], self._events[count:]
        by_answer: dict[str, list[Event]] = {}
        for event in events:
            by_answer.setdefault(event.request_id, []).append(event)
        return [self._answers[name].update(events) for name, events in by_answer.items()]


def _parts(event: Event) -> list[Event]:
    """The event, cut where it is long."""
    if not isinstance(event, PromptLogprobsEvent):
        return [event]
    return [
        PromptLogprobsEvent(
            event.request_id,
            event.first_index + begin,
            event.logprobs[begin : begin + PROMPT_PART],
        )
        for begin in range(0, len(event.logprobs), PROMPT_PART)
    ]


@dataclass(frozen=True, slots=True)
class Model:
    """The front's part of a checkpoint."""

    info: ModelInfo
    tokenizer: Tokenizer
    reader: PromptReader
    constraints: Constraints
    # What parse_output tells apart; None: nothing is known of the model's format.
    output_format: OutputFormat | None = None

    @property
    def output_format_name(self) -> str:
        return self.output_format.name if self.output_format else ""


def load_model(folder: Path, served_name: str) -> Model:
    """Reads the small files of a checkpoint; blocks for some seconds. ModelFilesError."""
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path)
    info = read_model_info(folder, served_name, tokenizer.token_id)
    constraints = Constraints.load(tokenizer_path, info.vocab_size)
    if info.chat_template is None:
        reader = PromptReader(tokenizer, None, info.vocab_size)
        return Model(info, tokenizer, reader, constraints)
    template = ChatTemplate(info.chat_template, info.special_tokens)
    reader = PromptReader(tokenizer, template, info.vocab_size)
    output_format = find_format(info.chat_template, tokenizer)
    return Model(info, tokenizer, reader, constraints, output_format)


@dataclass(slots=True)
class Rejections:
    """Requests refused before queueing, by reason."""

    invalid: int = 0
    full: int = 0
    unavailable: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the refusal that the block raises, if it does."""
        try:
            yield
        except (InvalidArgumentError, DuplicateRequestError):
            self.invalid += 1
            raise
        except QueueFullError:
            self.full += 1
            raise
        except UnavailableError:
            self.unavailable += 1
            raise


class InferenceService:
    """Joins a model's front and an engine."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self.model = model
        self.engine = engine
        self.rejections = Rejections()

    def check_workers(self) -> None:
        """ModelFilesError when the workers serve another checkpoint than this folder."""
        theirs = self.engine.info().geometry.vocab_size
        own = self.model.info.vocab_size
        if theirs != own:
            raise ModelFilesError(
                f"the workers' model has a vocabulary of {theirs}, and config.json of "
                f"{self.model.info.name} says {own}; serve the same folder on both sides"
            )

    def limits(self) -> ModelLimits:
        """UnavailableError until the workers have reported their geometry."""
        geometry = self.engine.info().geometry
        info = self.model.info
        return ModelLimits(
            vocab_size=info.vocab_size,
            max_seq_len=geometry.max_seq_len,
            end_token_ids=frozenset(info.end_token_ids),
            default_sampling=info.default_sampling,
            output_format=self.model.output_format_name,
        )

    async def begin(
        self, call: GenerateCall, deadline_ns: int | None, *, is_whole: bool = False
    ) -> Generation:
        """Validates and submits. The caller must leave the Generation's `async with`.

        is_whole: all that comes must fit one message.

        InvalidArgumentError, DuplicateRequestError, QueueFullError or UnavailableError.
        """
        arrival_ns = self.engine.now_ns()
        limits = self.limits()
        check_call(call, limits)
        prompt = await self.model.reader.prompt(call.prompt, limits.max_seq_len - 1)
        requests = make_requests(call, prompt.token_ids, limits, arrival_ns, deadline_ns)
        if is_whole:
            check_fits(requests)
        if call.constraint is not None:
            await self.model.constraints.constrain(
                call.constraint, requests, at_text_start=call.is_chat
            )
        answers = [self._answer(call, request, prompt) for request in requests]
        return Generation(self.engine, answers, self.engine.submit(requests))

    def _answer(self, call: GenerateCall, request: Request, prompt: Prompt) -> Answer:
        parser = None
        if call.parse_output and self.model.output_format and isinstance(call.prompt, ChatInput):
            tools = call.prompt.tools
            # A constraint is on the output from its first token on: no reasoning comes before.
            opens_reasoning = prompt.opens_reasoning and call.constraint is None
            parser = self.model.output_format.parser(opens_reasoning, tools)
        tokenizer = self.model.tokenizer
        text = TextStream(
            tokenizer.detokenizer(at_text_start=call.is_chat), text_options(call, request)
        )
        return Answer(self.engine, request, text, tokenizer.tokens, parser)
