"""Between the messages of slotwise.v1 and our own types, both ways."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from slotwise.v1 import inference_pb2 as pb

from .engine_types import EngineInfo, Load
from .errors import InvalidArgumentError
from .generate_call import ChatInput, ChatMessage, GenerateCall, IdsInput, Input, TextInput
from .model_files import ModelInfo
from .request import FinishReason
from .service import End, Generation, Rejections, Update
from .slots import SlotView
from .validation import MAX_STOPS

REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
# Far above any context. What is more would keep the event loop busy, and others waiting.
MAX_MESSAGES = 1 << 14
MAX_IDS = 1 << 22
MAX_KWARGS_CHARS = 1 << 20
SLOT_STATES = {
    "free": pb.SLOT_STATE_FREE,
    "prefill": pb.SLOT_STATE_PREFILL,
    "decode": pb.SLOT_STATE_DECODE,
}


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
        if descriptor.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if isinstance(value, Message):
            refuse_unknown_fields(value, _join(path, descriptor.name))
        else:
            for index, item in enumerate(value):
                refuse_unknown_fields(item, _join(path, f"{descriptor.name}[{index}]"))


def generate_call(request: pb.GenerateRequest) -> GenerateCall:
    """InvalidArgumentError for unknown fields, and for an input that is missing."""
    _at_most(MAX_STOPS, len(request.stop), "stop", "stop strings")
    _at_most(MAX_IDS, len(request.token_ids.ids), "token_ids.ids", "ids")
    check_size(request.chat)
    refuse_unknown_fields(request)
    sampling = request.sampling
    return GenerateCall(
        prompt=_input(request),
        request_id=request.request_id if request.HasField("request_id") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_new_tokens=request.max_new_tokens if request.HasField("max_new_tokens") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop_in_output=request.include_stop_in_output,
        omit_text=request.omit_text,
    )


def check_size(chat: pb.Chat) -> None:
    """InvalidArgumentError for more than can be handled without making others wait."""
    _at_most(MAX_MESSAGES, len(chat.messages), "chat.messages", "messages")
    size = len(chat.template_kwargs_json)
    _at_most(MAX_KWARGS_CHARS, size, "chat.template_kwargs_json", "characters")


def token_ids(request: pb.DetokenizeRequest) -> tuple[int, ...]:
    """InvalidArgumentError for too many."""
    _at_most(MAX_IDS, len(request.token_ids), "token_ids", "ids")
    # A slice is a list, made at once; a walk over the field takes twice as long.
    return tuple(request.token_ids[:])


def chat_input(chat: pb.Chat) -> ChatInput:
    return ChatInput(
        messages=tuple(
            ChatMessage(m.role, m.content if m.HasField("content") else None) for m in chat.messages
        ),
        add_generation_prompt=not chat.omit_generation_prompt,
        template_kwargs_json=chat.template_kwargs_json,
    )


def accepted(generation: Generation) -> pb.Accepted:
    return pb.Accepted(
        prompt_tokens=len(generation.request.prompt_token_ids),
        seed=generation.request.sampling.seed,
        queue_position=generation.queue_position,
    )


def delta(update: Update) -> pb.Delta:
    return pb.Delta(
        first_token_index=update.first_token_index, token_ids=update.token_ids, text=update.text
    )


def finished(end: End) -> pb.Finished:
    event = end.event
    message = pb.Finished(
        finish_reason=REASONS[event.reason],
        usage=pb.Usage(
            prompt_tokens=event.num_prompt_tokens, completion_tokens=event.num_generated_tokens
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


def model_info(info: ModelInfo, engine: EngineInfo) -> pb.GetModelInfoResponse:
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
        ),
        fingerprint=engine.geometry.fingerprint,
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


def load(view: Load, rejected: Rejections) -> pb.GetLoadResponse:
    counters = view.counters
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
        ),
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        engine_silence_ns=view.engine_silence_ns,
        num_steps=counters.num_steps,
        prefill_step_ns=counters.prefill_step_ns,
        decode_step_ns=counters.decode_step_ns,
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
            return IdsInput(tuple(request.token_ids.ids[:]))
        case "chat":
            return chat_input(request.chat)
    raise InvalidArgumentError("input", "is missing; set one of text, token_ids and chat")


def _at_most(limit: int, count: int, field: str, what: str) -> None:
    if count > limit:
        raise InvalidArgumentError(field, f"{count} {what}; at most {limit} are accepted")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
