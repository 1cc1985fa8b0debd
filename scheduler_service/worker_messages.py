"""The step protocol's messages, to and from plain data."""

from __future__ import annotations

from collections.abc import Sequence

from slotwise.worker.v1 import worker_pb2 as pb

from .engine_types import (
    EngineConfig,
    Geometry,
    LoadProgress,
    SelfTestReport,
    WorkerConfigured,
    WorkerReport,
)
from .prefix_index import PrefixReuse
from .request import TokenLogprobs
from .step import (
    LogitAdjustment,
    PrefillChunk,
    Row,
    RowResult,
    SlotSetup,
    StepCommand,
    StepResult,
)

_PREFIX_REUSE = {
    pb.PREFIX_REUSE_NONE: PrefixReuse.NONE,
    pb.PREFIX_REUSE_PREFILL: PrefixReuse.PREFILL,
    pb.PREFIX_REUSE_ALL: PrefixReuse.ALL,
}

Response = LoadProgress | WorkerConfigured | StepResult


def configure_message(
    config: EngineConfig, epoch: int, rank: int, rendezvous_address: str
) -> pb.RunRequest:
    """The first message of a stream."""
    return pb.RunRequest(
        configure=pb.Configure(
            epoch=epoch,
            rank=rank,
            world_size=config.world_size,
            rendezvous_address=rendezvous_address,
            num_slots=config.num_slots,
            max_seq_len=config.max_seq_len,
            weight_dtype=config.weight_dtype,
            kv_dtype=config.kv_dtype,
            max_step_tokens=config.max_step_tokens,
            max_running=config.running_bound,
        )
    )


def step_message(command: StepCommand) -> pb.RunRequest:
    """The same for every rank."""
    message = pb.RunRequest()
    step = message.step
    step.epoch = command.epoch
    step.step_id = command.step_id
    step.num_steps = command.num_steps
    for row in command.rows:
        _fill(step.rows.add(slot=row.slot, generation=row.generation), row)
    return message


def _fill(message: pb.Row, row: Row) -> None:
    if row.allowed_tokens:
        message.allowed_tokens = row.allowed_tokens
    if not isinstance(row, PrefillChunk):
        message.decode.SetInParent()
        return
    chunk = message.prefill
    chunk.start = row.start
    chunk.token_ids.extend(row.token_ids)
    chunk.sample = row.sample
    if row.setup is not None:
        _fill_setup(chunk.setup, row.setup)
    if row.prefix is not None:
        chunk.prefix.source_slot = row.prefix.source_slot
        chunk.prefix.source_generation = row.prefix.source_generation
        chunk.prefix.length = row.prefix.length
    if row.next_token_id is not None:
        chunk.next_token_id = row.next_token_id


def _fill_setup(message: pb.SlotSetup, setup: SlotSetup) -> None:
    message.MergeFrom(
        pb.SlotSetup(
            temperature=setup.temperature,
            top_p=setup.top_p,
            top_k=setup.top_k,
            min_p=setup.min_p,
            seed=setup.seed,
            end_token_ids=setup.end_token_ids,
            max_len=setup.max_len,
            num_logprobs=setup.num_logprobs,
            num_prompt_logprobs=setup.num_prompt_logprobs,
            decode_row=setup.decode_row,
            masked=setup.masked,
        )
    )
    if setup.adjustment is not None:
        message.adjustment.CopyFrom(_adjustment(setup.adjustment))


def _adjustment(adjustment: LogitAdjustment) -> pb.LogitAdjustment:
    return pb.LogitAdjustment(
        frequency_penalty=adjustment.frequency_penalty,
        presence_penalty=adjustment.presence_penalty,
        repetition_penalty=adjustment.repetition_penalty,
        prompt_token_ids=adjustment.prompt_token_ids,
        generated_token_ids=adjustment.generated_token_ids,
        bias_token_ids=[token_id for token_id, _ in adjustment.biases],
        biases=[bias for _, bias in adjustment.biases],
        min_len=adjustment.min_len,
    )


def read_response(message: pb.RunResponse, rank: int, address: str) -> Response:
    """What `rank` says. ValueError for a message of no known kind."""
    kind = message.WhichOneof("message")
    if kind == "step_result":
        return _result(message.step_result)
    if kind == "load_progress":
        progress = message.load_progress
        return LoadProgress(rank, progress.stage, progress.done_bytes, progress.total_bytes)
    if kind == "configured":
        return _configured(message.configured, address)
    raise ValueError("a message of no known kind; scheduler and worker are of different versions")


def _result(result: pb.StepResult) -> StepResult:
    # A slice is a list, made at once; a walk over the field takes three times as long.
    rows = [
        RowResult(
            row.slot,
            row.generation,
            tuple(row.token_ids[:]),
            row.corrupted,
            _logprobs(row.logprobs[:]),
            _logprobs(row.prompt_logprobs[:]),
        )
        for row in result.rows
    ]
    return StepResult(result.epoch, result.step_id, result.digest, tuple(rows), result.duration_ns)


def _logprobs(messages: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            one.logprob, one.rank, tuple(one.best_token_ids[:]), tuple(one.best_logprobs[:])
        )
        for one in messages
    )


def _configured(configured: pb.Configured, address: str) -> WorkerConfigured:
    geometry = Geometry(
        num_slots=configured.num_slots,
        max_seq_len=configured.max_seq_len,
        num_layers=configured.num_layers,
        vocab_size=configured.vocab_size,
        fingerprint=configured.fingerprint,
        weight_dtype=configured.weight_dtype,
        kv_dtype=configured.kv_dtype,
        max_step_tokens=configured.max_step_tokens,
        max_mixed_step_tokens=configured.max_mixed_step_tokens,
        run_ahead_window_ns=configured.run_ahead_window_ns,
        max_running=configured.max_running,
        max_logprobs_steps=configured.max_logprobs_steps,
        prefix_reuse=_PREFIX_REUSE.get(configured.prefix_reuse, PrefixReuse.NONE),
        device_name=configured.device_name,
        build=configured.build,
    )
    report = WorkerReport(
        rank=configured.rank,
        address=address,
        device=configured.device,
        num_threads=configured.num_threads,
        predicted_memory_bytes=configured.predicted_memory_bytes,
        measured_memory_bytes=configured.measured_memory_bytes,
        device_memory_bytes=configured.device_memory_bytes,
        self_tests=tuple(
            SelfTestReport(test.name, test.passed, test.detail) for test in configured.self_tests
        ),
    )
    return WorkerConfigured(configured.epoch, geometry, report)
