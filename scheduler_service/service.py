"""What the API does, free of protobuf: reads prompts, validates, submits, follows to the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from .chat_template import ChatTemplate
from .engine import Engine
from .errors import (
    CorruptedError,
    DeadlineError,
    DuplicateRequestError,
    InvalidArgumentError,
    QueueFullError,
    UnavailableError,
    UnknownRequestError,
)
from .generate_call import GenerateCall
from .json_file import ModelFilesError
from .model_files import ModelInfo, read_model_info
from .prompts import PromptReader
from .request import Event, FinishedEvent, FinishReason, Request, TokenEvent
from .request_stream import RequestStream
from .text_stream import TextStream
from .tokenizer import Tokenizer
from .validation import ModelLimits, check_call, make_request, text_options

# A client's clock starts before ours: it gives up at its deadline, a little before we reach it.
DEADLINE_SLACK_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended, when not by an error."""

    event: FinishedEvent
    matched_stop: str | None


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens and text; `end` on the last one. first_token_index counts generated tokens."""

    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    end: End | None = None


class Generation:
    """A submitted request. Leaving its `async with` before the end cancels it."""

    def __init__(
        self, engine: Engine, request: Request, stream: RequestStream, text: TextStream
    ) -> None:
        self.request = request
        self.queue_position = stream.queue_position
        self._engine = engine
        self._stream = stream
        self._text = text
        self._event: FinishedEvent | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request if it still waits or runs: nobody reads it any more."""
        if self._event is not None:
            return
        deadline = self.request.deadline_ns
        late = deadline is not None and self._engine.now_ns() >= deadline - DEADLINE_SLACK_NS
        reason = FinishReason.DEADLINE if late else FinishReason.CANCELLED
        try:
            self._engine.cancel(self.request.request_id, reason)
        except UnknownRequestError:
            # It ended by itself while its last events were on their way here.
            return

    async def next(self) -> Update:
        """Waits for events and joins all that are here. After an update with `end`, no more.

        DeadlineError, UnavailableError or CorruptedError when that is how the request ended.
        """
        events: list[Event] = [await anext(self._stream), *self._stream.take_ready()]
        first = self._text.num_tokens
        ids: list[int] = []
        texts: list[str] = []
        for event in events:
            if isinstance(event, TokenEvent):
                delta = self._push(event)
                ids += delta[0]
                texts.append(delta[1])
            else:
                self._event = event
                texts.append(self._text.finish())
        end = None if self._event is None else self._end(self._event)
        return Update(first, tuple(ids), "".join(texts), end)

    def _push(self, event: TokenEvent) -> tuple[Sequence[int], str]:
        running = self._text.matched_stop is None
        delta = self._text.push(event.token_ids)
        if running and self._text.matched_stop is not None:
            self._engine.stop_request(self.request.request_id, self._text.num_tokens)
        return delta.token_ids, delta.text

    def _end(self, event: FinishedEvent) -> End:
        if self._text.matched_stop is not None:
            # Whatever ended it since: the caller's answer was complete at the stop string.
            event = replace(
                event,
                reason=FinishReason.STOP,
                num_generated_tokens=self._text.num_tokens,
                matched_token_id=None,
            )
            return End(event, self._text.matched_stop)
        match event.reason:
            case FinishReason.DEADLINE:
                raise DeadlineError(event.message or "the request's deadline passed")
            case FinishReason.ERROR if event.status == "UNAVAILABLE":
                raise UnavailableError(event.message)
            case FinishReason.ERROR:
                raise CorruptedError(event.message)
        return End(event, None)


@dataclass(frozen=True, slots=True)
class Model:
    """The front's part of a checkpoint."""

    info: ModelInfo
    tokenizer: Tokenizer
    reader: PromptReader


def load_model(folder: Path, served_name: str) -> Model:
    """Reads the small files of a checkpoint; blocks for up to a second. ModelFilesError."""
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path)
    info = read_model_info(folder, served_name, tokenizer.token_id)
    template = None
    if info.chat_template is not None:
        template = ChatTemplate(info.chat_template, info.special_tokens)
    return Model(info, tokenizer, PromptReader(tokenizer, template, info.vocab_size))


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
        )

    async def begin(self, call: GenerateCall, deadline_ns: int | None) -> Generation:
        """Validates and submits. The caller must leave the Generation's `async with`.

        InvalidArgumentError, DuplicateRequestError, QueueFullError or UnavailableError.
        """
        arrival_ns = self.engine.now_ns()
        limits = self.limits()
        check_call(call, limits)
        ids = await self.model.reader.prompt(call.prompt, limits.max_seq_len - 1)
        request = make_request(call, ids, limits, arrival_ns, deadline_ns)
        text = TextStream(
            self.model.tokenizer.detokenizer(at_text_start=call.is_chat),
            text_options(call, request),
        )
        return Generation(self.engine, request, self.engine.submit(request), text)
