"""What a server's prefix cache finds: of conversations, of a repeated prompt, of a busy slot."""

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from slotwise_client import Accepted, AsyncClient, Chat, Delta, Finished, Message, ModelInfo, Prompt

from .measure import Work
from .output import CliError, Report

# Tokens that a busy slot may generate while the request that copies from it is read.
ROOM: Final = 1024
TIMEOUT_S: Final = 600.0
WORDS: Final = ("we", "ask", "how", "many", "red", "boats", "cross", "the", "river", "at", "night")


@dataclass(frozen=True, slots=True)
class Talk:
    """Shape of every conversation, in tokens of ids or in words of messages.

    All begin with the same `system_tokens`; each turn adds `turn_tokens`, and an answer of
    `new_tokens`, of messages as long as the model likes up to that.
    """

    turns: int
    system_tokens: int
    turn_tokens: int
    new_tokens: int
    as_messages: bool

    @property
    def max_seq_len(self) -> int:
        """Of a whole conversation of ids."""
        return self.system_tokens + self.turns * (self.turn_tokens + self.new_tokens)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer as the client saw it."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    text: str
    reasoning: str


class Conversation(Protocol):
    """Says what to send next, and takes in what came back."""

    def prompt(self, turn: int) -> Prompt:
        """The conversation so far with the new question."""

    def hear(self, reply: Reply) -> None:
        """Add an answer."""


class IdConversation:
    """As token ids: an answer is sent back as it came, so that all of it can be found."""

    def __init__(self, system: Sequence[int], questions: Sequence[Sequence[int]]) -> None:
        self._ids = list(system)
        self._questions = questions

    def prompt(self, turn: int) -> Prompt:
        """All ids so far."""
        self._ids += self._questions[turn]
        return tuple(self._ids)

    def hear(self, reply: Reply) -> None:
        """Its ids."""
        self._ids += reply.token_ids


class MessageConversation:
    """As chat messages, as an application sends them: without the reasoning of former answers."""

    def __init__(self, system: str, questions: Sequence[str]) -> None:
        self._messages = [Message("system", system)] if system else []
        self._questions = questions

    def prompt(self, turn: int) -> Prompt:
        """All messages so far."""
        self._messages.append(Message("user", self._questions[turn]))
        return Chat(tuple(self._messages))

    def hear(self, reply: Reply) -> None:
        """Its text; of the reasoning the template decides."""
        reasoning = reply.reasoning or None
        self._messages.append(Message("assistant", reply.text, reasoning_content=reasoning))


@dataclass(frozen=True, slots=True)
class Round:
    """Replies by conversation and turn: each alone on a flushed server, and all together.

    Alone there may be fewer conversations: those left out are as long as the last one.
    """

    alone: tuple[tuple[Reply, ...], ...]
    together: tuple[tuple[Reply, ...], ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """A prompt on a flushed server, again, and continued by some new tokens."""

    cold: Reply
    warm: Reply
    continued: Reply


@dataclass(frozen=True, slots=True)
class Copied:
    """A prefix on a flushed server, and continued by some new tokens while its slot is busy.

    `copied_tokens`: what the server counted meanwhile.
    """

    cold: Reply
    copied: Reply
    copied_tokens: int


@dataclass(frozen=True, slots=True)
class ChatBench:
    """Measures through one client, which nothing else should share the server with."""

    client: AsyncClient
    model: ModelInfo
    report: Report

    async def warm_up(self, tokens: int) -> None:
        """A prompt of that length, not timed."""
        (prompt,) = Work(tokens, 2).prompts(self.model, 1, seed=0)
        await self._ask(prompt, 2)

    async def round(self, talk: Talk, count: int, at_once: bool, seed: int) -> Round:
        """`count` conversations, turn by turn: each turn one after another, or all `at_once`.

        Of ids the first one stands for all when alone: they are equally long.
        """
        alone = []
        for index in range(count if talk.as_messages else 1):
            self.report(f"conversation {index + 1} alone, seed {seed}", 0, 0)
            one = self._conversations(talk, count, seed)[index]
            alone += await self._converse([one], talk, at_once)
        self.report(f"{count} conversations, seed {seed}", 0, 0)
        together = await self._converse(self._conversations(talk, count, seed), talk, at_once)
        return Round(tuple(alone), tuple(together))

    async def repeat(self, tokens: int, extra: int, seed: int) -> Repeated:
        """A prompt of `tokens` twice, then with `extra` more."""
        self.report(f"{tokens} tokens cold and warm, seed {seed}", 0, 0)
        (ids,) = Work(tokens + extra, 2).prompts(self.model, 1, seed)
        await self.client.flush_cache(timeout=TIMEOUT_S)
        cold, warm = [await self._ask(ids[:tokens], 2) for _ in range(2)]
        return Repeated(cold, warm, await self._ask(ids, 2))

    async def copy(self, tokens: int, extra: int, seed: int) -> Copied:
        """A prompt of `tokens` that goes on generating while the same with `extra` more is sent."""
        self.report(f"{tokens} tokens from a busy slot, seed {seed}", 0, 0)
        (ids,) = Work(tokens + extra, 2).prompts(self.model, 1, seed)
        await self.client.flush_cache(timeout=TIMEOUT_S)
        before = (await self.client.load(timeout=TIMEOUT_S)).prefix_cache
        busy = _Reading(self.client, ids[:tokens], ROOM, ignore_eos=True, parse=False)
        task = asyncio.create_task(busy.read())
        started = asyncio.create_task(busy.started.wait())
        try:
            await asyncio.wait((task, started), return_when=asyncio.FIRST_COMPLETED)
            copied = None if task.done() else await self._ask(ids, 2)
            if task.done():
                await task  # what was wrong with it
            if task.done() or copied is None:
                message = f"--busy-copy {tokens}: all {ROOM} tokens were generated before the copy"
                raise CliError(message)
        finally:
            for one in (task, started):
                one.cancel()
            await asyncio.gather(task, started, return_exceptions=True)
        after = (await self.client.load(timeout=TIMEOUT_S)).prefix_cache
        return Copied(busy.reply(), copied, after.num_copied_tokens - before.num_copied_tokens)

    async def _converse(
        self, conversations: Sequence[Conversation], talk: Talk, at_once: bool
    ) -> list[tuple[Reply, ...]]:
        """Replies by conversation, on a server that is flushed before."""
        await self.client.flush_cache(timeout=TIMEOUT_S)
        replies: list[list[Reply]] = [[] for _ in conversations]
        for turn in range(talk.turns):
            if at_once:
                asked = (self._turn(one, turn, talk) for one in conversations)
                answers = await asyncio.gather(*asked)
            else:
                answers = [await self._turn(one, turn, talk) for one in conversations]
            for mine, answer in zip(replies, answers, strict=True):
                mine.append(answer)
        return [tuple(mine) for mine in replies]

    async def _turn(self, conversation: Conversation, turn: int, talk: Talk) -> Reply:
        prompt = conversation.prompt(turn)
        reply = await self._ask(prompt, talk.new_tokens, as_chat=talk.as_messages)
        conversation.hear(reply)
        return reply

    async def _ask(self, prompt: Prompt, new_tokens: int, as_chat: bool = False) -> Reply:
        parse = as_chat and bool(self.model.output_format)
        reading = _Reading(self.client, prompt, new_tokens, ignore_eos=not as_chat, parse=parse)
        await reading.read()
        return reading.reply()

    def _conversations(self, talk: Talk, count: int, seed: int) -> list[Conversation]:
        """The same ones for the same seed, different ones for another."""
        if talk.as_messages:
            draw = random.Random(seed)
            system = _sentence(draw, talk.system_tokens)
            return [
                MessageConversation(system, [_sentence(draw, talk.turn_tokens) for _ in turns])
                for turns in [range(talk.turns)] * count
            ]
        (ids,) = Work(talk.system_tokens, 1).prompts(self.model, 1, seed)
        questions = Work(talk.turn_tokens, 1).prompts(self.model, count * talk.turns, seed + 1)
        return [
            IdConversation(ids, questions[start : start + talk.turns])
            for start in range(0, len(questions), talk.turns)
        ]


class _Reading:
    """One greedy request, followed from the moment it is sent."""

    def __init__(
        self, client: AsyncClient, prompt: Prompt, new_tokens: int, ignore_eos: bool, parse: bool
    ) -> None:
        self.started = asyncio.Event()
        self._first = 0.0
        self._token_ids: list[int] = []
        self._text = self._reasoning = ""
        self._prompt_tokens = self._cached_tokens = 0
        self._stream = client.generate(
            prompt,
            temperature=0,
            max_new_tokens=new_tokens,
            ignore_eos=ignore_eos,
            parse_output=parse,
            timeout=TIMEOUT_S,
        )
        # The message is built; it is serialized and sent as soon as the reader waits.
        self._sent = time.perf_counter()

    async def read(self) -> None:
        """To its end; dropped when this is cancelled."""
        async with self._stream as stream:
            async for event in stream:
                match event:
                    case Accepted():
                        self._prompt_tokens = event.prompt_tokens
                    case Delta():
                        self._take(event)
                    case Finished():
                        self._cached_tokens = event.usage.cached_tokens

    def _take(self, delta: Delta) -> None:
        if delta.token_ids:
            self._first = self._first or time.perf_counter()
            self.started.set()
        self._token_ids += delta.token_ids
        self._text += delta.text
        self._reasoning += delta.reasoning_text

    def reply(self) -> Reply:
        """What came so far; cached tokens are told at the end."""
        return Reply(
            ttft_ms=(self._first - self._sent) * 1e3,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            token_ids=tuple(self._token_ids),
            text=self._text,
            reasoning=self._reasoning,
        )


def _sentence(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A turn (from 1) of a conversation (from 1) that found less than it would have alone."""

    seed: int
    conversation: int
    turn: int
    cached_tokens: int
    alone_cached_tokens: int


def shortfalls(rounds: Iterable[tuple[int, Round]]) -> list[Shortfall]:
    """All of them, of rounds by seed."""
    found = []
    for seed, one in rounds:
        for index, replies in enumerate(one.together):
            alone = one.alone[min(index, len(one.alone) - 1)]
            for turn, (mine, its) in enumerate(zip(replies, alone, strict=True)):
                if mine.cached_tokens < its.cached_tokens:
                    place = seed, index + 1, turn + 1
                    found.append(Shortfall(*place, mine.cached_tokens, its.cached_tokens))
    return found


def same_answers(one: Round) -> bool:
    """Whether company and cache left the answers as they were: of those that ran alone too."""
    return all(
        [reply.token_ids for reply in mine] == [reply.token_ids for reply in its]
        for mine, its in zip(one.together, one.alone, strict=False)
    )
