"""Answers of /v1/completions, as chunks and whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from slotwise_client import Accepted, Delta, Finished, PromptLogprobs, TokenLogprobs

from .answer import (
    DONE,
    Envelope,
    Stream,
    Usage,
    Whole,
    finish_reason,
    usage_chunk,
    whole_json,
)
from .job import Job
from .logprobs import CompletionLogprobs, PromptRows, TextOffsets, token_text
from .written import dumped, encoded

# What stands in a text for bytes that are no character.
REPLACEMENT: Final = "\ufffd"


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it goes before its answers: its text, and that of its first token."""

    text: str
    first_token: str

    def first_bytes(self, rows: Sequence[TokenLogprobs]) -> bytes:
        """Of the first token, which `rows` follow: it may be no whole characters."""
        token = self.first_token.encode()
        text, rest = self.text.encode(), b"".join(row.token.text for row in rows)
        if REPLACEMENT in self.first_token and rest:
            for length in range(1, len(token) + 1):
                if text.startswith(rest, length):
                    return text[:length]
        return token


class _Choices:
    """Numbers and texts that chunks and whole answers need alike."""

    def __init__(self, job: Job, echoes: Sequence[Echo]) -> None:
        self.looks = job.looks
        self.num_best = job.options.get("logprobs", 0)
        self.n = job.num_choices
        self.echoes = echoes
        self.told_stops = job.told_stops
        total = self.n * len(job.prompts)
        self.offsets = [TextOffsets() for _ in range(total)]
        self.usage = Usage()

    def number(self, prompt: int, index: int) -> int:
        """Of a choice, as OpenAI counts: all of the first prompt come first."""
        return prompt * self.n + index

    def add_prompt(
        self,
        lists: CompletionLogprobs,
        prompt: int,
        index: int,
        rows: Sequence[TokenLogprobs],
        *,
        is_first: bool,
    ) -> None:
        """Logprobs of an echoed prompt, or of a part of it."""
        offsets = self.offsets[self.number(prompt, index)]
        if is_first:
            echo = self.echoes[prompt]
            first = echo.first_bytes(rows)
            lists.add_first(token_text(first))
            # The one that begins all texts is not part of them.
            if echo.text.encode().startswith(first):
                offsets.next(first)
        lists.add(rows, self.num_best, offsets)

    def lists(self, prompt: int, delta: Delta) -> CompletionLogprobs:
        """Logprobs of a delta."""
        lists = CompletionLogprobs()
        number = self.number(prompt, delta.index)
        lists.add(delta.logprobs, self.num_best, self.offsets[number])
        return lists

    def ending(self, finished: Finished) -> tuple[str, str | int | None]:
        """Reason and told stop; ApiError."""
        self.usage.add(finished, is_prompt_only=self.looks.is_prompt_only)
        reason = finish_reason(finished, has_calls=False)
        if self.looks.is_prompt_only:
            return "length", None
        stop = finished.matched_stop
        return reason, stop if stop in self.told_stops else None


class CompletionStream(Stream):
    """Chunks. What stays the same around a piece of text is written once."""

    def __init__(self, job: Job, envelope: Envelope, echoes: Sequence[Echo]) -> None:
        self._choices = choices = _Choices(job, echoes)
        self._looks = job.looks
        self._envelope = envelope
        start = f"data: {envelope.head()}"
        numbers = range(choices.n * len(job.prompts))
        self._heads = [f'{start}{{"index":{number},"text":' for number in numbers]
        self._end = ',"usage":null}\n\n' if job.looks.include_usage else "}\n\n"
        self._tail = f',"logprobs":null,"finish_reason":null}}]{self._end}'
        self._is_plain = not (job.looks.logprobs or job.looks.token_ids)
        # Of prompts whose first token was told.
        self._begun: set[int] = set()

    def begin(self, prompt: int, accepted: Accepted) -> bytes:
        if not self._looks.echo or self._looks.logprobs:
            return b""
        text = encoded(self._choices.echoes[prompt].text)
        return "".join(f"{head}{text}{self._tail}" for head in self._heads_of(prompt)).encode()

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> bytes:
        """The first part comes with the whole prompt's text."""
        if not (self._looks.echo and self._looks.logprobs):
            return b""
        is_first = prompt not in self._begun
        self._begun.add(prompt)
        return b"".join(
            self._prompt_chunk(prompt, index, part.logprobs, is_first=is_first)
            for index in range(self._choices.n)
        )

    def delta(self, prompt: int, delta: Delta) -> bytes:
        if self._looks.is_prompt_only:
            return b""
        if self._is_plain:
            if not delta.text:
                return b""
            head = self._heads[self._choices.number(prompt, delta.index)]
            return f"{head}{encoded(delta.text)}{self._tail}".encode()
        return self._missing_prompt(prompt) + self._other_delta(prompt, delta)

    def finish(self, prompt: int, finished: Finished) -> bytes:
        reason, stop = self._choices.ending(finished)
        head = self._heads[self._choices.number(prompt, finished.index)]
        last = (
            f'{head}"","logprobs":null,"finish_reason":"{reason}",'
            f'"stop_reason":{dumped(stop)}}}]{self._end}'
        )
        return self._missing_prompt(prompt) + last.encode()

    def end(self) -> bytes:
        usage = b""
        if self._looks.include_usage:
            usage = usage_chunk(self._envelope, self._choices.usage)
        return usage + DONE

    def _heads_of(self, prompt: int) -> Sequence[str]:
        first = self._choices.number(prompt, 0)
        return self._heads[first : first + self._choices.n]

    def _missing_prompt(self, prompt: int) -> bytes:
        """A prompt of one token has no logprobs to come with."""
        if self._looks.echo and self._looks.logprobs and prompt not in self._begun:
            return self.prompt_logprobs(prompt, PromptLogprobs("", 1, ()))
        return b""

    def _prompt_chunk(
        self, prompt: int, index: int, rows: Sequence[TokenLogprobs], *, is_first: bool
    ) -> bytes:
        lists = CompletionLogprobs()
        self._choices.add_prompt(lists, prompt, index, rows, is_first=is_first)
        text = self._choices.echoes[prompt].text if is_first else ""
        head = self._heads[self._choices.number(prompt, index)]
        return (
            f'{head}{encoded(text)},"logprobs":{lists.json()},"finish_reason":null}}]{self._end}'
        ).encode()

    def _other_delta(self, prompt: int, delta: Delta) -> bytes:
        logprobs, ids = "null", ""
        if self._looks.logprobs:
            logprobs = self._choices.lists(prompt, delta).json()
        if self._looks.token_ids:
            ids = f',"token_ids":{dumped(delta.token_ids)}'
        head = self._heads[self._choices.number(prompt, delta.index)]
        return (
            f'{head}{encoded(delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":null{ids}}}]{self._end}'
        ).encode()


class _WholeChoice:
    """What was gathered of a choice."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.lists = CompletionLogprobs()
        self.token_ids: list[int] = []
        self.reason = ""
        self.stop: str | int | None = None


class CompletionWhole(Whole):
    """One response."""

    def __init__(self, job: Job, envelope: Envelope, echoes: Sequence[Echo]) -> None:
        self._choices = choices = _Choices(job, echoes)
        self._looks = job.looks
        self._envelope = envelope
        self._num_prompts = len(job.prompts)
        self._gathered = [_WholeChoice() for _ in range(choices.n * self._num_prompts)]
        self._prompt_rows = [PromptRows() for _ in job.prompts]
        self._begun: set[int] = set()

    def begin(self, prompt: int, accepted: Accepted) -> None:
        if self._looks.echo:
            for index in range(self._choices.n):
                gathered = self._gathered[self._choices.number(prompt, index)]
                gathered.text.append(self._choices.echoes[prompt].text)

    def prompt_logprobs(self, prompt: int, part: PromptLogprobs) -> None:
        if self._looks.prompt_logprobs:
            self._prompt_rows[prompt].add(part.logprobs)
        if self._looks.echo and self._looks.logprobs:
            self._add_prompt(prompt, part.logprobs)

    def delta(self, prompt: int, delta: Delta) -> None:
        if self._looks.is_prompt_only:
            return
        self._add_missing_prompt(prompt)
        gathered = self._gathered[self._choices.number(prompt, delta.index)]
        gathered.text.append(delta.text)
        gathered.token_ids += delta.token_ids
        if self._looks.logprobs:
            offsets = self._choices.offsets[self._choices.number(prompt, delta.index)]
            gathered.lists.add(delta.logprobs, self._choices.num_best, offsets)

    def finish(self, prompt: int, finished: Finished) -> None:
        self._add_missing_prompt(prompt)
        gathered = self._gathered[self._choices.number(prompt, finished.index)]
        gathered.reason, gathered.stop = self._choices.ending(finished)

    def pieces(self) -> Iterator[str]:
        return whole_json(self._envelope, self._written(), self._choices.usage)

    def _add_prompt(self, prompt: int, rows: Sequence[TokenLogprobs]) -> None:
        """The prompt's logprobs come before those of its answers."""
        is_first = prompt not in self._begun
        self._begun.add(prompt)
        for index in range(self._choices.n):
            lists = self._gathered[self._choices.number(prompt, index)].lists
            self._choices.add_prompt(lists, prompt, index, rows, is_first=is_first)

    def _add_missing_prompt(self, prompt: int) -> None:
        """A prompt of one token has no logprobs to come with."""
        if self._looks.echo and self._looks.logprobs and prompt not in self._begun:
            self._add_prompt(prompt, ())

    def _written(self) -> Iterator[str]:
        for number, gathered in enumerate(self._gathered):
            logprobs, more = "null", ""
            if self._looks.logprobs:
                logprobs = gathered.lists.json()
            if self._looks.token_ids:
                more = f',"token_ids":{dumped(gathered.token_ids)}'
            if self._looks.prompt_logprobs:
                rows = self._prompt_rows[number // self._choices.n]
                more += f',"prompt_logprobs":{rows.json()}'
            yield (
                f'{{"index":{number},"text":{encoded("".join(gathered.text))},'
                f'"logprobs":{logprobs},"finish_reason":"{gathered.reason}",'
                f'"stop_reason":{dumped(gathered.stop)}{more}}}'
            )
