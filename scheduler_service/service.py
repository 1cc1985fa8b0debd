"""What the API does, free of protobuf: reads prompts, validates, submits, follows to the end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .answers import FROM_START, Answer, ReadFrom
from .auth import Caller
from .calls import Call, Calls, Generation
from .chat_output import OutputFormat, find_format
from .chat_template import ChatTemplate
from .constraints import Constraints
from .engine import Engine
from .errors import (
    DuplicateRequestError,
    ExpiredRequestError,
    InvalidArgumentError,
    NotEndedError,
    QueueFullError,
    SetupDiffersError,
    SlotwiseError,
    UnavailableError,
)
from .generate_call import ChatInput, GenerateCall
from .journal import Journal, RecordedCall
from .json_file import ModelFilesError
from .logs import about
from .model_files import ModelInfo, front_hash, read_model_info
from .prompts import PromptReader
from .record import CallRecord, JournalState, Setup
from .request import NO_CLIENT_LIMITS, ClientLimits, FinishReason, Request, failed_event
from .request_stream import RequestStream
from .text_stream import TextStream
from .tokenizer import Tokenizer
from .trace import TraceStart
from .validation import ModelLimits, check_call, check_fits, make_requests, text_options

log = logging.getLogger(__name__)

# Between a client's name and its cache_salt; no name holds it.
_CLIENT_MARK = "\x1f"


@dataclass(frozen=True, slots=True)
class Model:
    """The front's part of a checkpoint."""

    info: ModelInfo
    tokenizer: Tokenizer
    reader: PromptReader
    constraints: Constraints
    # Hash of the files that the lines above were read from.
    front: str
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
    front = front_hash(folder)
    if info.chat_template is None:
        reader = PromptReader(tokenizer, None, info.vocab_size)
        return Model(info, tokenizer, reader, constraints, front)
    template = ChatTemplate(info.chat_template, info.special_tokens)
    reader = PromptReader(tokenizer, template, info.vocab_size)
    output_format = find_format(info.chat_template, tokenizer)
    return Model(info, tokenizer, reader, constraints, front, output_format)


@dataclass(slots=True)
class Rejections:
    """Requests refused before queueing, by reason."""

    invalid: int = 0
    full: int = 0
    unavailable: int = 0

    @contextlib.contextmanager
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


@dataclass(frozen=True, slots=True)
class Survival:
    """How long what is kept. `journal`: None keeps nothing beyond the process."""

    journal: Journal | None = None
    # Of ended calls, for Attach.
    retention_s: float = 300.0
    max_kept_bytes: int = 256 << 20
    # The most that a call may go on without a reader, and what it gets after a restart.
    max_window_s: float = 300.0
    restart_window_s: float = 60.0
    # How long a client may read nothing of what is sent to it.
    slow_reader_s: float = 60.0

    @property
    def journal_state(self) -> JournalState:
        return JournalState.OFF if self.journal is None else self.journal.state


@dataclass(frozen=True, slots=True)
class Accepting:
    """What comes with a call besides what it asks for."""

    caller: Caller
    # The GenerateRequest, as it came; a prompt in ids or text left out.
    request: bytes
    # On the engine's clock.
    deadline_ns: int | None = None
    # Begins the call's trace; None: nothing is traced.
    start_trace: TraceStart | None = None


class InferenceService:
    """Joins a model's front and an engine."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        survival: Survival | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        self.model = model
        self.engine = engine
        self.survival = survival or Survival()
        # Reading it takes a millisecond.
        self.version = importlib.metadata.version("slotwise")
        self.rejections = Rejections()
        # What a former life of the server has left goes on, if there is any.
        self.is_open = is_open
        self.num_resumed = 0
        self.num_slow_readers = 0
        self.calls = Calls(
            engine,
            self.survival.journal,
            self.survival.retention_s,
            self.survival.max_kept_bytes,
        )

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
            max_window_s=self.survival.max_window_s,
        )

    def setup(self) -> Setup:
        """What answers depend on besides their requests. UnavailableError as of `limits`."""
        info = self.engine.info()
        geometry = info.geometry
        return Setup(
            fingerprint=geometry.fingerprint,
            front=self.model.front,
            version=self.version,
            build=geometry.build,
            weight_dtype=geometry.weight_dtype,
            kv_dtype=geometry.kv_dtype,
            device_name=geometry.device_name,
            world_size=len(info.workers),
        )

    async def begin(
        self, call: GenerateCall, accepting: Accepting, *, is_whole: bool = False
    ) -> Generation:
        """Validates and submits. The caller must leave the Generation's `async with`.

        is_whole: all that comes must fit one message.

        InvalidArgumentError, DuplicateRequestError, QueueFullError or UnavailableError.
        """
        self._check_open()
        arrival_ns = self.engine.now_ns()
        limits = self.limits()
        check_call(call, limits)
        prompt = await self.model.reader.prompt(call.prompt, limits.max_seq_len - 1)
        deadline_ns = accepting.deadline_ns
        requests = make_requests(call, prompt.token_ids, limits, arrival_ns, deadline_ns)
        if is_whole:
            check_fits(requests)
        await self._constrain(call, requests)
        _mark(requests, accepting.caller.name, accepting.caller.limits)
        self.calls.check_free(requests[0].call_id, accepting.caller.name)
        record = self._record(accepting, requests, prompt.opens_reasoning)
        stream = self.engine.submit(requests)
        accepted = Call(record, tuple(requests), stream, call.attach_window_s)
        if accepting.start_trace is not None:
            accepted.trace = accepting.start_trace(requests)
        self.calls.add(accepted)
        return self._generation(accepted, call, [FROM_START] * len(requests))

    def attach(self, known: Call, call: GenerateCall, places: Sequence[ReadFrom]) -> Generation:
        """Reads a call on, from a place in each answer; `call` is what its record asks for.

        InvalidArgumentError for more places than answers; OutOfRangeError.
        """
        if len(places) > len(known.requests):
            raise InvalidArgumentError(
                "other_next_token_indices",
                f"has {len(places) - 1} entries; at most {len(known.requests) - 1} are possible, "
                f"request {known.call_id!r} has {len(known.requests)} answers",
            )
        rest = [FROM_START] * (len(known.requests) - len(places))
        places = [*places, *rest]
        for choice, place in enumerate(places):
            known.check_index(choice, place.token_index)
        known.check_prompt_index(places[0].prompt_index)
        known.stream = known.stream.reopened()
        self.engine.redirect(known.stream)
        return self._generation(known, call, places, is_attached=True)

    def find(self, call_id: str, caller: Caller, *, or_operator: bool = False) -> Call:
        """A call of the caller's own. UnknownRequestError, ExpiredRequestError,
        PermissionDeniedError."""
        self._check_open()
        known = self.calls.find(call_id)
        caller.check_owner(known.record.client, or_operator=or_operator)
        return known

    def cancel(self, call_id: str, caller: Caller) -> None:
        """UnknownRequestError when none of that id waits or runs; PermissionDeniedError."""
        with contextlib.suppress(ExpiredRequestError):
            self.find(call_id, caller, or_operator=True)
        self.engine.cancel(call_id, FinishReason.CANCELLED)

    async def replay(self, known: Call, accepting: Accepting, call: GenerateCall) -> Generation:
        """Runs an ended call again, as it was; `call` is what its record asks for.

        NotEndedError; SetupDiffersError naming what differs; errors of `begin`.
        """
        if not known.has_ended:
            raise NotEndedError(
                f"request {known.call_id!r} still runs; replay it when it has ended"
            )
        record = known.record
        self._check_setup(record)
        again = replace(
            call,
            request_id=f"replay-{secrets.token_hex(12)}",
            seed=record.seed,
            attach_window_s=0.0,
        )
        arrival_ns = self.engine.now_ns()
        requests = make_requests(
            again, record.prompt_token_ids, self.limits(), arrival_ns, accepting.deadline_ns
        )
        await self._constrain(again, requests)
        _mark(requests, accepting.caller.name, accepting.caller.limits)
        its_own = replace(
            record,
            call_id=requests[0].call_id,
            client=accepting.caller.name,
            accepted_unix_ns=time.time_ns(),
            deadline_unix_ns=None,
        )
        accepted = Call(its_own, tuple(requests), self.engine.submit(requests))
        self.calls.add(accepted)
        return self._generation(accepted, again, [FROM_START] * len(requests))

    async def resume(self, recorded: RecordedCall, call: GenerateCall) -> None:
        """Goes on with a call of a former life of the server, or keeps it if it has ended.

        `call`: what its record asks for. It waits for a reader, for a while.
        """
        record = recorded.record
        deadline_ns = self._deadline_ns(record)
        named = replace(call, request_id=record.call_id, seed=record.seed)
        requests = make_requests(
            named, record.prompt_token_ids, self.limits(), self.engine.now_ns(), deadline_ns
        )
        stream = RequestStream(record.call_id, 0, len(requests))
        _mark(requests, record.client, NO_CLIENT_LIMITS)
        for request, answer in zip(requests, recorded.answers, strict=True):
            request.generated_token_ids = list(answer.token_ids)
            request.num_prompt_logprobs_told = len(answer.prompt_logprobs)
            stream.logs[request.request_id] = answer
        window_s = max(call.attach_window_s, self.survival.restart_window_s)
        known = Call(record, tuple(requests), stream, window_s, is_resumed=True)
        if recorded.ended_unix_ns is not None:
            age_s = (time.time_ns() - recorded.ended_unix_ns) / 1e9
            known.ended_s = asyncio.get_running_loop().time() - max(0.0, age_s)
        open_ones = [one for one in requests if stream.logs[one.request_id].end is None]
        self.calls.add(known)
        if open_ones:
            self.num_resumed += 1
            await self._go_on(known, call, open_ones)

    async def _go_on(self, known: Call, call: GenerateCall, requests: list[Request]) -> None:
        try:
            self._check_setup(known.record)
            await self._constrain(call, requests)
            for request in requests:
                await _follow(request)
            self.engine.resume(requests, known.stream)
        except SlotwiseError as error:
            call_id = known.call_id
            log.warning("request %r cannot go on: %s", call_id, error, extra=about(call_id))
            now_ns = self.engine.now_ns()
            for request in requests:
                end = replace(failed_event(request, now_ns, str(error)), status="UNAVAILABLE")
                known.stream.push(end)
            return
        known.stream = known.stream.reopened()
        self.engine.redirect(known.stream)
        self.calls.leave(self._generation(known, call, [FROM_START] * len(known.requests)))

    def _deadline_ns(self, record: CallRecord) -> int | None:
        """On the engine's clock. A wall clock that was set meanwhile cannot lengthen it."""
        if record.deadline_unix_ns is None:
            return None
        left_ns = record.deadline_unix_ns - time.time_ns()
        whole_ns = record.deadline_unix_ns - record.accepted_unix_ns
        return self.engine.now_ns() + min(left_ns, whole_ns)

    def _check_open(self) -> None:
        if not self.is_open:
            raise UnavailableError("the server is starting; retry when it is ready")

    def _check_setup(self, record: CallRecord) -> None:
        difference = self.setup().difference(record.setup)
        if difference is not None:
            raise SetupDiffersError(
                f"the server is set up in another way than when request {record.call_id!r} "
                f"was accepted, so its tokens may differ: {difference}"
            )

    async def _constrain(self, call: GenerateCall, requests: Sequence[Request]) -> None:
        if call.constraint is not None:
            await self.model.constraints.constrain(
                call.constraint, requests, at_text_start=call.is_chat
            )

    def _record(
        self, accepting: Accepting, requests: Sequence[Request], opens_reasoning: bool
    ) -> CallRecord:
        first, now_ns = requests[0], time.time_ns()
        deadline_unix_ns = None
        if first.deadline_ns is not None:
            deadline_unix_ns = now_ns + first.deadline_ns - self.engine.now_ns()
        return CallRecord(
            call_id=first.call_id,
            client=accepting.caller.name,
            request=accepting.request,
            prompt_token_ids=first.prompt_token_ids,
            opens_reasoning=opens_reasoning,
            seed=first.sampling.seed,
            num_answers=len(requests),
            accepted_unix_ns=now_ns,
            deadline_unix_ns=deadline_unix_ns,
            setup=self.setup(),
        )

    def _generation(
        self,
        known: Call,
        call: GenerateCall,
        places: Sequence[ReadFrom],
        *,
        is_attached: bool = False,
    ) -> Generation:
        opens_reasoning = known.record.opens_reasoning
        answers = [
            self._answer(call, request, opens_reasoning, place)
            for request, place in zip(known.requests, places, strict=True)
        ]
        return Generation(self.engine, self.calls, known, answers, is_attached=is_attached)

    def _answer(
        self, call: GenerateCall, request: Request, opens_reasoning: bool, place: ReadFrom
    ) -> Answer:
        parser = None
        if call.parse_output and self.model.output_format and isinstance(call.prompt, ChatInput):
            tools = call.prompt.tools
            # A constraint is on the output from its first token on: no reasoning comes before.
            opens = opens_reasoning and call.constraint is None
            parser = self.model.output_format.parser(opens, tools)
        tokenizer = self.model.tokenizer
        text = TextStream(
            tokenizer.detokenizer(at_text_start=call.is_chat), text_options(call, request)
        )
        return Answer(self.engine, request, text, tokenizer.tokens, parser, place)


def _mark(requests: Sequence[Request], client: str, limits: ClientLimits) -> None:
    """Whose requests they are. How long a prompt takes would tell who else has sent it, so clients
    share no prefixes with each other."""
    for request in requests:
        request.client = client
        request.client_limits = limits
        if client:
            request.cache_salt = f"{client}{_CLIENT_MARK}{request.cache_salt}"


async def _follow(request: Request) -> None:
    """The mask behind the tokens that a constrained request has."""
    if request.constraint is not None and request.generated_token_ids:
        tokens = tuple(request.generated_token_ids)
        request.first_mask = await asyncio.to_thread(request.constraint.advance, tokens)
