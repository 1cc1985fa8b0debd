"""Between the messages of slotwise.v1 and our own types, both ways."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from slotwise.v1 import inference_pb2 as pb

from .answers import End, ReadFrom, Update
from .calls import Call, Generation
from .chat_output import NOTHING, OutputPiece
from .engine_types import EngineInfo, EngineState, Load
from .errors import InvalidArgumentError
from .generate_call import (
    ChatInput,
    ChatMessage,
    ConstraintSpec,
    GenerateCall,
    IdsInput,
    Input,
    TextInput,
    Tool,
    ToolCall,
)
from .latencies import Latencies
from .logprobs import TokenLogprob, TokenLogprobs
from .model_files import ModelInfo
from .record import CallRecord, JournalState, Setup
from .request import FinishReason
from .service import InferenceService
from .slots import SlotView
from .validation import MAX_BIASES, MAX_CHOICES, MAX_STOP_IDS, MAX_STOPS

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
# Far above any context. What is more would keep the event loop busy, and others waiting.
MAX_MESSAGES = 1 << 14
MAX_IDS = 1 << 22
MAX_KWARGS_CHARS = 1 << 20
MAX_TOOLS = 1024
JOURNAL_STATES = {
    JournalState.OFF: pb.JOURNAL_STATE_OFF,
    JournalState.ON: pb.JOURNAL_STATE_ON,
    JournalState.FAILING: pb.JOURNAL_STATE_FAILING,
}
SERVER_STATES = {
    EngineState.STARTING: pb.SERVER_STATE_STARTING,
    EngineState.READY: pb.SERVER_STATE_READY,
    EngineState.RECOVERING: pb.SERVER_STATE_RECOVERING,
    EngineState.DOWN: pb.SERVER_STATE_DOWN,
    EngineState.DRAINING: pb.SERVER_STATE_DRAINING,
    # Nobody is told more than that it ends.
    EngineState.STOPPED: pb.SERVER_STATE_DRAINING,
}
SLOT_STATES = {
    "free": pb.SLOT_STATE_FREE,
    "prefill": pb.SLOT_STATE_PREFILL,
    "decode": pb.SLOT_STATE_DECODE,
}


def parsed(kind: type[Message], data: bytes) -> Message:
    """The message that the bytes are. InvalidArgumentError when they are none of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise InvalidArgumentError(
            kind.DESCRIPTOR.name, f"the bytes sent cannot be read: {error}"
        ) from error


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """InvalidArgumentError when a newer client set a field that this server does not know."""
    unknown = UnknownFieldSet(message)
    if len(unknown) > 0:
        name = message.DESCRIPTOR.name
        raise InvalidArgumentError(
            path or name,
            f"this server does not know field number {unknown[0].field_number} of {name}; "
            "leave it out",
        )
    for descriptor, value in message.ListFields():
        if descriptor.type != FieldDescriptor.TYPE_MESSAGE or _is_map(descriptor):
            continue
        if isinstance(value, Message):
            refuse_unknown_fields(value, _join(path, descriptor.name))
        else:
            for index, item in enumerate(value):
                refuse_unknown_fields(item, _join(path, f"{descriptor.name}[{index}]"))


def _is_map(descriptor: FieldDescriptor) -> bool:
    """Of numbers, as all maps of the API: no message is in it."""
    kind = descriptor.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def generate_call(request: pb.GenerateRequest) -> GenerateCall:
    """InvalidArgumentError for unknown fields, and for an input that is missing."""
    _at_most(MAX_STOPS, len(request.stop), "stop", "stop strings")
    _at_most(MAX_STOP_IDS, len(request.stop_token_ids), "stop_token_ids", "ids")
    _at_most(MAX_IDS, len(request.token_ids.ids), "token_ids.ids", "ids")
    _at_most(MAX_CHOICES, len(request.choice.texts), "choice.texts", "texts")
    biases = request.sampling.logit_bias
    _at_most(MAX_BIASES, len(biases), "sampling.logit_bias", "entries")
    check_size(request.chat)
    refuse_unknown_fields(request)
    sampling = request.sampling
    return GenerateCall(
        prompt=_input(request),
        request_id=_or_none(request, "request_id"),
        temperature=_or_none(sampling, "temperature"),
        top_p=_or_none(sampling, "top_p"),
        top_k=_or_none(sampling, "top_k"),
        min_p=_or_none(sampling, "min_p"),
        seed=_or_none(sampling, "seed"),
        max_new_tokens=_or_none(request, "max_new_tokens"),
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_in_output=request.include_stop_in_output,
        omit_text=request.omit_text,
        frequency_penalty=_or_none(sampling, "frequency_penalty"),
        presence_penalty=_or_none(sampling, "presence_penalty"),
        repetition_penalty=_or_none(sampling, "repetition_penalty"),
        logit_bias=tuple(sorted(biases.items())),
        min_new_tokens=_or_none(request, "min_new_tokens"),
        logprobs=_or_none(request, "logprobs"),
        prompt_logprobs=_or_none(request, "prompt_logprobs"),
        constraint=_constraint(request),
        n=_or_none(request, "n"),
        cache_salt=_or_none(request, "cache_salt"),
        parse_output=request.parse_output,
        attach_window_s=request.attach_window_ms / 1e3,
    )


def take_kept(request: pb.GenerateRequest) -> bytes:
    """What a record keeps of a request that was read. A prompt in ids or text is taken out of it:
    its ids are kept elsewhere, and a copy of long ones takes time."""
    match request.WhichOneof("input"):
        case "text":
            request.text = ""
        case "token_ids":
            del request.token_ids.ids[:]
    return request.SerializeToString()


def recorded_call(record: CallRecord) -> GenerateCall:
    """What a call asked for, but for a prompt in ids or text."""
    return generate_call(pb.GenerateRequest.FromString(record.request))


def places(request: pb.AttachRequest) -> list[ReadFrom]:
    """Where to go on in each answer that the request names."""
    of_prompt = request.next_prompt_token_index
    others = [ReadFrom(index) for index in request.other_next_token_indices]
    return [ReadFrom(request.next_token_index, of_prompt), *others]


def setup(found: Setup) -> pb.Setup:
    return pb.Setup(**asdict(found))


def request_record(call: Call) -> pb.RequestRecord:
    record = call.record
    answers = []
    for answer in call.logs():
        assert answer.end is not None
        answers.append(
            pb.RecordedAnswer(
                token_ids=answer.token_ids[: answer.end.num_generated_tokens],
                finish_reason=REASONS.get(answer.end.reason, pb.FINISH_REASON_UNSPECIFIED),
            )
        )
    return pb.RequestRecord(
        request_id=record.call_id,
        request=pb.GenerateRequest.FromString(record.request),
        prompt_token_ids=record.prompt_token_ids,
        seed=record.seed,
        setup=setup(record.setup),
        answers=answers,
        accepted_unix_ns=record.accepted_unix_ns,
    )


def _or_none(message: Message, field: str) -> Any:
    """The field's value, None where it is unset."""
    return getattr(message, field) if message.HasField(field) else None


def _constraint(request: pb.GenerateRequest) -> ConstraintSpec | None:
    kind = request.WhichOneof("constraint")
    match kind:
        case None:
            return None
        case "choice":
            return ConstraintSpec(kind, choices=tuple(request.choice.texts))
        case "json_object":
            return ConstraintSpec(kind)
    return ConstraintSpec(kind, getattr(request, kind))


def check_size(chat: pb.Chat) -> None:
    """InvalidArgumentError for more than can be handled without making others wait."""
    _at_most(MAX_MESSAGES, len(chat.messages), "chat.messages", "messages")
    size = len(chat.template_kwargs_json)
    _at_most(MAX_KWARGS_CHARS, size, "chat.template_kwargs_json", "characters")
    _at_most(MAX_TOOLS, len(chat.tools), "chat.tools", "tools")
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    _at_most(MAX_MESSAGES, num_calls, "chat.messages", "tool calls")


def token_ids(request: pb.DetokenizeRequest) -> array[int]:
    """InvalidArgumentError for too many."""
    _at_most(MAX_IDS, len(request.token_ids), "token_ids", "ids")
    return _ids(request.token_ids)


def chat_input(chat: pb.Chat) -> ChatInput:
    return ChatInput(
        messages=tuple(_chat_message(message) for message in chat.messages),
        add_generation_prompt=not chat.omit_generation_prompt,
        template_kwargs_json=chat.template_kwargs_json,
        tools=tuple(
            Tool(tool.name, _or_none(tool, "description"), tool.parameters_json)
            for tool in chat.tools
        ),
    )


def _chat_message(message: pb.ChatMessage) -> ChatMessage:
    return ChatMessage(
        role=message.role,
        content=_or_none(message, "content"),
        tool_calls=tuple(
            ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls
        ),
        tool_call_id=_or_none(message, "tool_call_id"),
        name=_or_none(message, "name"),
        reasoning_content=_or_none(message, "reasoning_content"),
    )


def accepted(generation: Generation, *, is_journaled: bool) -> pb.Accepted:
    return pb.Accepted(
        prompt_tokens=len(generation.request.prompt_token_ids),
        seed=generation.request.sampling.seed,
        queue_position=generation.queue_position,
        is_journaled=is_journaled,
        num_choices=generation.num_answers,
    )


def delta(update: Update) -> pb.Delta:
    piece = OutputPiece(update.text, update.reasoning, update.tool_calls)
    message = _delta(update.index, update.first_token_index, piece)
    message.token_ids.extend(update.token_ids)
    _add_logprobs(message.logprobs, update.logprobs)
    return message


def _tail_delta(update: Update) -> pb.Delta:
    assert update.end is not None
    return _delta(update.index, update.end.event.num_generated_tokens, update.tail)


def _delta(index: int, first_token_index: int, piece: OutputPiece) -> pb.Delta:
    return pb.Delta(
        index=index,
        first_token_index=first_token_index,
        text=piece.text,
        reasoning_text=piece.reasoning,
        tool_calls=[
            pb.ToolCallDelta(
                index=call.index, id=call.id, name=call.name, arguments_json=call.arguments_json
            )
            for call in piece.tool_calls
        ],
    )


def responses(update: Update) -> Iterator[pb.GenerateResponse]:
    """The messages of a stream that an update makes."""
    if update.prompt_logprobs:
        part = pb.PromptLogprobs(first_token_index=update.first_prompt_index)
        _add_logprobs(part.logprobs, update.prompt_logprobs)
        yield pb.GenerateResponse(prompt_logprobs=part)
    if not update.is_empty:
        yield pb.GenerateResponse(delta=delta(update))
    if update.tail != NOTHING:
        yield pb.GenerateResponse(delta=_tail_delta(update))
    if update.end is not None:
        yield pb.GenerateResponse(finished=finished(update.index, update.end))


class WholeAnswers:
    """The answers to a call as they grow; their texts are joined once, at the end."""

    def __init__(self, generation: Generation, first: pb.Accepted) -> None:
        self._response = pb.CompleteResponse(accepted=first, request_id=generation.request.call_id)
        self._texts = [_Texts() for _ in range(generation.num_answers)]
        for index in range(generation.num_answers):
            self._response.choices.add(index=index)

    def add(self, update: Update) -> None:
        _add_logprobs(self._response.prompt_logprobs, update.prompt_logprobs)
        choice, texts = self._response.choices[update.index], self._texts[update.index]
        choice.token_ids.extend(update.token_ids)
        _add_logprobs(choice.logprobs, update.logprobs)
        texts.text += (update.text, update.tail.text)
        texts.reasoning += (update.reasoning, update.tail.reasoning)
        for call in update.tool_calls + update.tail.tool_calls:
            if call.index == len(texts.arguments):
                choice.tool_calls.add(id=call.id, name=call.name)
                texts.arguments.append([])
            texts.arguments[call.index].append(call.arguments_json)
        if update.end is not None:
            choice.finished.CopyFrom(finished(update.index, update.end))

    def response(self) -> pb.CompleteResponse:
        """Once every answer has ended."""
        for choice, texts in zip(self._response.choices, self._texts, strict=True):
            choice.text = "".join(texts.text)
            choice.reasoning_text = "".join(texts.reasoning)
            for call, pieces in zip(choice.tool_calls, texts.arguments, strict=True):
                call.arguments_json = "".join(pieces)
        return self._response


@dataclass(slots=True)
class _Texts:
    """Pieces of an answer's text, of its reasoning, and of the arguments of each of its calls."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)


def _add_logprobs(target: Any, logprobs: Sequence[TokenLogprobs]) -> None:
    """To a repeated field. Entries made in their place cost half."""
    for token, best in logprobs:
        added = target.add()
        _set_logprob(added.token, token)
        add = added.best.add
        for token_id, logprob, rank, text in best:
            add(token_id=token_id, logprob=logprob, rank=rank, text=text)


def _set_logprob(target: pb.TokenLogprob, token: TokenLogprob) -> None:
    target.token_id, target.logprob, target.rank, target.text = token


def finished(index: int, end: End) -> pb.Finished:
    event = end.event
    message = pb.Finished(
        index=index,
        finish_reason=REASONS[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.num_prompt_tokens,
            completion_tokens=event.num_generated_tokens,
            cached_tokens=event.num_cached_tokens,
        ),
        timings=pb.Timings(
            queue_ns=event.queue_ns,
            prefill_ns=event.prefill_ns,
            decode_ns=event.decode_ns,
            time_to_first_token_ns=event.time_to_first_token_ns,
        ),
    )
    if end.matched_stop is not None:
        message.matched_stop_string = end.matched_stop
    elif event.matched_token_id is not None:
        message.matched_token_id = event.matched_token_id
    return message


def model_info(info: ModelInfo, output_format: str, engine: EngineInfo) -> pb.GetModelInfoResponse:
    sampling = info.default_sampling
    return pb.GetModelInfoResponse(
        name=info.name,
        model_type=info.model_type,
        architectures=info.architectures,
        vocab_size=info.vocab_size,
        max_seq_len=engine.geometry.max_seq_len,
        max_prompt_tokens=engine.geometry.max_seq_len - 1,
        end_token_ids=info.end_token_ids,
        bos_token_id=info.bos_token_id,
        has_chat_template=info.chat_template is not None,
        default_sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=0,
            presence_penalty=0,
            repetition_penalty=sampling.repetition_penalty,
        ),
        fingerprint=engine.geometry.fingerprint,
        output_format=output_format,
    )


def workers(engine: EngineInfo) -> list[pb.WorkerInfo]:
    return [
        pb.WorkerInfo(
            rank=worker.rank,
            address=worker.address,
            device=worker.device,
            weight_dtype=engine.geometry.weight_dtype,
            kv_dtype=engine.geometry.kv_dtype,
            predicted_memory_bytes=worker.predicted_memory_bytes,
            measured_memory_bytes=worker.measured_memory_bytes,
            self_tests=[
                pb.SelfTest(name=test.name, passed=test.passed, detail=test.detail)
                for test in worker.self_tests
            ],
            num_threads=worker.num_threads,
        )
        for worker in engine.workers
    ]


def load(view: Load, service: InferenceService, uptime_ns: int) -> pb.GetLoadResponse:
    counters, rejected = view.counters, service.rejections
    return pb.GetLoadResponse(
        num_running=view.num_running,
        num_waiting=view.num_waiting,
        num_slots=view.num_slots,
        num_used_tokens=view.num_used_tokens,
        max_total_tokens=view.max_total_tokens,
        num_pending_prefill_tokens=view.num_pending_prefill_tokens,
        requests=pb.RequestCounters(
            accepted=counters.accepted,
            stop=counters.stop,
            length=counters.length,
            cancelled=counters.cancelled,
            deadline=counters.deadline,
            error=counters.error,
            rejected_invalid=rejected.invalid,
            rejected_full=rejected.full,
            rejected_unavailable=rejected.unavailable,
            poisoned=counters.poisoned,
            slow_reader=service.num_slow_readers,
            corrupted=counters.corrupted,
        ),
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        engine_silence_ns=view.engine_silence_ns,
        num_steps=counters.num_steps,
        prefill_step_ns=counters.prefill_step_ns,
        decode_step_ns=counters.decode_step_ns,
        max_running=view.max_running,
        prefix_cache=pb.PrefixCacheCounters(
            **asdict(counters.prefix_cache), num_cached_tokens=view.num_cached_tokens
        ),
        num_unread=service.calls.num_unread,
        num_recoveries=view.num_recoveries,
        num_resumed=service.num_resumed,
        state=SERVER_STATES[view.state],
        epoch=view.epoch,
        ranks=[
            pb.RankLoad(
                rank=one.report.rank,
                device=one.report.device,
                is_up=one.is_up,
                memory_bytes=one.report.measured_memory_bytes,
                device_memory_bytes=one.report.device_memory_bytes,
            )
            for one in view.ranks
        ],
        latencies=_latencies(counters.latencies),
        oldest_waiting_ns=view.oldest_waiting_ns,
        uptime_ns=uptime_ns,
    )


def _latencies(latencies: Latencies) -> pb.Latencies:
    histograms = {field.name: getattr(latencies, field.name) for field in fields(latencies)}
    return pb.Latencies(
        **{
            name: pb.Histogram(
                upper_bounds_s=[bound / 1e9 for bound in one.upper_bounds],
                counts=one.counts,
                sum_s=one.sum / 1e9,
            )
            for name, one in histograms.items()
        }
    )


def slot(view: SlotView) -> pb.Slot:
    return pb.Slot(
        index=view.index,
        generation=view.generation,
        state=SLOT_STATES[view.state],
        request_id=view.request_id,
        num_computed_tokens=view.num_computed_tokens,
        prompt_tokens=view.num_prompt_tokens,
        generated_tokens=view.num_generated_tokens,
        num_cached_tokens=view.num_cached_tokens,
        choice_index=view.choice_index,
    )


def _input(request: pb.GenerateRequest) -> Input:
    kind = request.WhichOneof("input")
    if request.parse_control_tokens and kind != "text":
        raise InvalidArgumentError(
            "parse_control_tokens", f"applies to text only, and the input is {kind or 'missing'}"
        )
    match kind:
        case "text":
            return TextInput(request.text, request.parse_control_tokens)
        case "token_ids":
            return IdsInput(_ids(request.token_ids.ids))
        case "chat":
            return chat_input(request.chat)
    raise InvalidArgumentError("input", "is missing; set one of text, token_ids and chat")


def _ids(field: Sequence[int]) -> array[int]:
    """Numpy takes a field's memory as it is: long prompts become no Python numbers one by one."""
    return array("I", np.array(field, dtype=np.uintc).tobytes())


def _at_most(limit: int, count: int, field: str, what: str) -> None:
    if count > limit:
        raise InvalidArgumentError(field, f"{count} {what}; at most {limit} are accepted")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
