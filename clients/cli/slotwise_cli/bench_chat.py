"""`slotwise bench chat`: what the prefix cache is worth to conversations, turn by turn."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from slotwise_client import AsyncClient, Client, ModelInfo, ServerInfo

from .bench_files import JsonFileOption, ModelOption, check_files, write_json_file
from .machine import machine_of
from .measure import Spread
from .measure_chat import (
    ROOM,
    ChatBench,
    Copied,
    Repeated,
    Reply,
    Round,
    Talk,
    same_answers,
    shortfalls,
)
from .output import CliError, Output, Report
from .serve import (
    DeviceOption,
    DtypeOption,
    JsonFlag,
    ThreadsOption,
    TpOption,
    model_folder,
    server_flags,
)
from .server_process import running_server


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, `repeats` times with other tokens each; 0 leaves a part out."""

    talk: Talk
    conversations: int
    at_once: bool
    repeat_prompt: int
    busy_copy: int
    extra_tokens: int
    repeats: int

    def needed_flags(self) -> list[str]:
        """Room for all this in a server of our own; messages get what the model allows."""
        longest = [self.talk.max_seq_len if self.conversations else 1]
        longest += [self.repeat_prompt + self.extra_tokens + 2]
        longest += [self.busy_copy + max(self.extra_tokens, ROOM) + 2 if self.busy_copy else 1]
        as_messages = self.conversations and self.talk.as_messages
        return [] if as_messages else server_flags(max_seq_len=max(longest))


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds."""

    rounds: tuple[tuple[int, Round], ...]
    repeated: tuple[Repeated, ...]
    copied: tuple[Copied, ...]


def chat(
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    threads: ThreadsOption = None,
    num_slots: Annotated[int | None, typer.Option(help="[As many as conversations.]")] = None,
    max_running: Annotated[int | None, typer.Option(help="Requests at once \\[num-slots].")] = None,
    conversations: Annotated[int, typer.Option(min=0, help="0 leaves them out.")] = 8,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    system_tokens: Annotated[int, typer.Option(min=0, help="That all of them begin with.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="New ones of the user, a turn.")] = 32,
    new_tokens: Annotated[int, typer.Option("--output-tokens", "--new-tokens", min=1)] = 16,
    messages: Annotated[
        bool, typer.Option("--messages", help="As chat messages (counts are words), not as ids.")
    ] = False,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="All of a turn together, not one after another.")
    ] = False,
    repeat_prompt: Annotated[
        int, typer.Option(min=0, help="Also: a prompt of so many tokens cold, warm, continued.")
    ] = 0,
    busy_copy: Annotated[
        int, typer.Option(min=0, help="Also: a prefix of so many tokens from a busy slot.")
    ] = 0,
    extra_tokens: Annotated[int, typer.Option(min=1, help="That continue these two.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median is shown.")] = 3,
    server: Annotated[
        str | None, typer.Option(help="Measure this running server, flushing its prefix cache.")
    ] = None,
    json_file: JsonFileOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure conversations over turns: tokens found in the cache, TTFT; beside one alone."""
    check_files(json_file, None)
    output = Output(as_json)
    talk = Talk(turns, system_tokens, prompt_tokens, new_tokens, messages)
    parts = repeat_prompt, busy_copy, extra_tokens, repeats
    plan = Plan(talk, conversations, at_once, *parts)
    if not conversations and not repeat_prompt and not busy_copy:
        raise CliError("nothing to measure: --conversations is 0", exit_code=2)
    chosen = server_flags(device=device, dtype=dtype, tp=tp, threads=threads)
    chosen += server_flags(num_slots=num_slots, max_running=max_running)
    refused = ["--model"] if model else chosen
    if server is not None and refused:
        raise CliError(f"{refused[0]} is for a server of our own, not for --server", exit_code=2)
    with output.progress() as report:
        if server is not None:
            result = _measure_server(server, plan, report)
        else:
            folder = model_folder(model or "demo", report)
            if num_slots is None:
                chosen += server_flags(num_slots=max(conversations, 2))
            with running_server(folder, chosen + plan.needed_flags(), report) as address:
                result = _measure_server(address, plan, report)
    write_json_file(json_file, result)
    if as_json:
        output.json(result)
    else:
        _show(result, output)


def _measure_server(address: str, plan: Plan, report: Report) -> dict[str, Any]:
    with Client(address) as client:
        model, server = client.model_info(timeout=60), client.server_info(timeout=60)
    if plan.busy_copy and server.max_running < 2:
        message = f"--busy-copy needs two requests at once; {address} runs {server.max_running}"
        raise CliError(message)
    if plan.conversations and plan.talk.as_messages and not model.has_chat_template:
        raise CliError(f"--messages: {model.name} has no chat template")
    measured = asyncio.run(_measure(address, model, plan, report))
    return _summary(model, server, plan, measured)


async def _measure(address: str, model: ModelInfo, plan: Plan, report: Report) -> Measured:
    """Rounds of all parts in turn, so that slow drift of the machine meets all alike."""
    rounds: list[tuple[int, Round]] = []
    repeated: list[Repeated] = []
    copied: list[Copied] = []
    async with AsyncClient(address, reconnect=False) as client:
        bench = ChatBench(client, model, report)
        first = plan.talk.system_tokens + plan.talk.turn_tokens if plan.conversations else 0
        for tokens in {first, plan.repeat_prompt, plan.busy_copy} - {0}:
            await bench.warm_up(tokens)
        for seed in range(1000, 1000 * (plan.repeats + 1), 1000):
            if plan.conversations:
                one = await bench.round(plan.talk, plan.conversations, plan.at_once, seed)
                rounds.append((seed, one))
            if plan.repeat_prompt:
                repeated.append(await bench.repeat(plan.repeat_prompt, plan.extra_tokens, seed))
            if plan.busy_copy:
                copied.append(await bench.copy(plan.busy_copy, plan.extra_tokens, seed + 500))
    return Measured(tuple(rounds), tuple(repeated), tuple(copied))


def _summary(model: ModelInfo, server: ServerInfo, plan: Plan, got: Measured) -> dict[str, Any]:
    worker = server.workers[0]
    result: dict[str, Any] = {
        "version": server.version,
        **machine_of(worker.device),
        "model": model.name,
        "device": worker.device,
        "weight_dtype": worker.weight_dtype,
        "kv_dtype": worker.kv_dtype,
        "tp": len(server.workers),
        "num_threads": worker.num_threads,
        "num_slots": server.num_slots,
        "max_running": server.max_running,
        "max_seq_len": server.max_seq_len,
        "prefix_reuse": server.prefix_reuse,
        "repeats": plan.repeats,
    }
    if got.rounds:
        result["conversations"] = _conversations(plan, got.rounds)
    if got.repeated:
        result["repeat_prompt"] = _repeat(plan, got.repeated)
    if got.copied:
        result["busy_copy"] = _copy(plan, got.copied)
    return result


def _conversations(plan: Plan, rounds: Sequence[tuple[int, Round]]) -> dict[str, Any]:
    missing = shortfalls(rounds)
    return {
        "conversations": plan.conversations,
        "at_once": plan.at_once,
        **asdict(plan.talk),
        "alone": _side([one.alone for _, one in rounds]),
        "together": _side([one.together for _, one in rounds]),
        "hit_rates_equal": not missing,
        "shortfalls": [asdict(one) for one in missing],
        "answers_equal": all(same_answers(one) for _, one in rounds),
    }


def _side(rounds: Sequence[Sequence[Sequence[Reply]]]) -> dict[str, Any]:
    """Of replies by round, conversation and turn; times are medians over the conversations."""
    turns = []
    for turn in range(len(rounds[0][0])):
        by_round = [[replies[turn] for replies in one] for one in rounds]
        flat = [reply for one in by_round for reply in one]
        ttfts = [statistics.median(reply.ttft_ms for reply in one) for one in by_round]
        turns.append({"turn": turn + 1, **_tokens(flat), "ttft_ms": asdict(Spread.of(ttfts))})
    every = [replies for one in rounds for replies in one]
    result: dict[str, Any] = {"hit_rate": _hit_rate(every), "later_hit_rate": None, "turns": turns}
    if len(turns) > 1:
        result["later_hit_rate"] = _hit_rate([replies[1:] for replies in every])
    return result


def _hit_rate(conversations: Sequence[Sequence[Reply]]) -> float:
    rate: float = _tokens([reply for one in conversations for reply in one])["hit_rate"]
    return rate


def _tokens(replies: Sequence[Reply]) -> dict[str, Any]:
    """Of one prompt on the average; the rate is of all together."""
    prompt = sum(reply.prompt_tokens for reply in replies)
    cached = sum(reply.cached_tokens for reply in replies)
    return {
        "prompt_tokens": prompt / len(replies),
        "cached_tokens": cached / len(replies),
        "hit_rate": cached / prompt,
    }


def _repeat(plan: Plan, rounds: Sequence[Repeated]) -> dict[str, Any]:
    ratios = [one.cold.ttft_ms / one.warm.ttft_ms for one in rounds]
    return {
        "tokens": plan.repeat_prompt,
        "extra_tokens": plan.extra_tokens,
        "cold": _replies([one.cold for one in rounds]),
        "warm": _replies([one.warm for one in rounds]),
        "continued": _replies([one.continued for one in rounds]),
        "cold_over_warm": asdict(Spread.of(ratios)),
        "answers_equal": all(one.cold.token_ids == one.warm.token_ids for one in rounds),
    }


def _copy(plan: Plan, rounds: Sequence[Copied]) -> dict[str, Any]:
    return {
        "tokens": plan.busy_copy,
        "extra_tokens": plan.extra_tokens,
        "cold": _replies([one.cold for one in rounds]),
        "copied": _replies([one.copied for one in rounds]),
        "copied_tokens": min(one.copied_tokens for one in rounds),
        "cold_over_copied": asdict(
            Spread.of([one.cold.ttft_ms / one.copied.ttft_ms for one in rounds])
        ),
    }


def _replies(replies: Sequence[Reply]) -> dict[str, Any]:
    ttft = asdict(Spread.of([reply.ttft_ms for reply in replies]))
    return {**_tokens(replies), "ttft_ms": ttft}


def _show(result: dict[str, Any], output: Output) -> None:
    output.line(
        f"{result['model']}, {result['device']}, {result['weight_dtype']}, TP {result['tp']}, "
        f"{result['num_slots']} slots, {result['max_running']} run at once, prefix reuse "
        f"{result['prefix_reuse']}; TTFT in ms, median of {result['repeats']} (least to most)"
    )
    if "conversations" in result:
        _show_conversations(result["conversations"], output)
    if "repeat_prompt" in result:
        part = result["repeat_prompt"]
        names = ("cold", "warm", "continued")
        _show_replies(f"the same {part['tokens']:,} tokens", part, names, output)
        output.line(
            f"cold over warm: {_spread(part['cold_over_warm'])}; answers equal: "
            f"{_yes(part['answers_equal'])}; continued by {part['extra_tokens']} new tokens"
        )
    if "busy_copy" in result:
        part = result["busy_copy"]
        _show_replies(f"{part['tokens']:,} tokens of a busy slot", part, ("cold", "copied"), output)
        output.line(
            f"cold over copied: {_spread(part['cold_over_copied'])}; {part['copied_tokens']:,} "
            f"tokens copied in each round at least, then {part['extra_tokens']} new ones"
        )


def _show_conversations(part: dict[str, Any], output: Output) -> None:
    table = _table("turn", "prompt", "cached", "hit rate", "TTFT", "alone: cached", "hit", "TTFT")
    for mine, its in zip(part["together"]["turns"], part["alone"]["turns"], strict=True):
        table.add_row(str(mine["turn"]), *_cells(mine), *_cells(its)[1:])
    how = "at once" if part["at_once"] else "one after another"
    output.line(
        f"{part['conversations']} conversations, {how} in each turn, and one alone; "
        "tokens per prompt:"
    )
    output.table(table)
    for name, of in (("hit_rate", "of all turns"), ("later_hit_rate", "from the second turn on")):
        mine, its = part["together"][name], part["alone"][name]
        if mine is not None:
            output.line(f"hit rate {of}: {mine:.2%} together, {its:.2%} alone")
    if part["hit_rates_equal"]:
        output.line("hit rates equal: every turn found at least what it finds alone")
    for one in part["shortfalls"][:5]:
        output.line(
            f"hit rates NOT equal: conversation {one['conversation']}, turn {one['turn']} found "
            f"{one['cached_tokens']} tokens, alone {one['alone_cached_tokens']}"
        )
    if len(part["shortfalls"]) > 5:
        output.line(f"... and {len(part['shortfalls']) - 5} more turns")
    output.line(f"answers equal to those alone: {_yes(part['answers_equal'])}")


def _show_replies(title: str, part: dict[str, Any], names: Sequence[str], output: Output) -> None:
    table = _table(title, "prompt", "cached", "hit rate", "TTFT")
    for name in names:
        table.add_row(name, *_cells(part[name]))
    output.table(table)


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    tokens = [f"{row[name]:,.0f}" for name in ("prompt_tokens", "cached_tokens")]
    return [*tokens, f"{row['hit_rate']:.1%}", _spread(row["ttft_ms"])]


def _spread(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['min']:.1f} to {spread['max']:.1f})"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
