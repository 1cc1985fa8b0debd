"""Any input to prompt token ids, off the event loop when it is big."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .chat_output import END_THINK, THINK
from .chat_template import MAX_NS, ChatTemplate, TemplateTimeError, TypedText, control_pattern
from .chat_values import chat_values, check_chat, num_json_chars
from .errors import InvalidArgumentError
from .generate_call import ChatInput, IdsInput, Input, TextInput
from .tokenizer import Tokenizer

T = TypeVar("T")

# Up to here the work takes about a millisecond, less than a thread's round trip is worth.
INLINE_CHARS = 4096
# Rendering a message costs about as much as this many characters.
MESSAGE_CHARS = 64
# Tokenizing takes about 100 bytes of memory a character: big texts are read one at a time.
BIG_CHARS = 1 << 18
MAX_CHARS = 1 << 23
# Of a rendering's time, before it must wait until it is the only one that takes longer: on the
# event loop, and in a thread.
FIRST_INLINE_NS = 10_000_000
FIRST_THREAD_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """opens_reasoning: a chat's markup ends with <think>; the answer goes on from inside it."""

    token_ids: Sequence[int]
    opens_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class _Chat:
    text: str
    token_ids: list[int]
    opens_reasoning: bool


class PromptReader:
    """Tokenizes texts and renders chats as the checkpoint's makers do."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        # What stands for reasoning is markup too where the tokenizer has no token for it.
        think = {THINK, END_THINK} if template and END_THINK in template.source else set[str]()
        self._controls = control_pattern(tokenizer.control_texts | think)
        self._special = control_pattern(tokenizer.special_texts)
        self._one_big = asyncio.Semaphore(1)

    async def prompt(self, source: Input, max_tokens: int) -> Prompt:
        """A prompt's ids, at least one and at most max_tokens, all in the vocabulary.

        InvalidArgumentError names the field, the value and the limit.
        """
        found: Sequence[int]
        opens_reasoning = False
        match source:
            case IdsInput(found):
                field = "token_ids.ids"
                self.check_ids(found, field)
            case TextInput(text, parse):
                self._refuse_huge(text, max_tokens, "text")
                found, field = await self.tokenize(text, parse), "text"
            case ChatInput():
                chat = await self._read_chat(source, max_tokens)
                found, field, opens_reasoning = chat.token_ids, "chat", chat.opens_reasoning
        if not found:
            raise InvalidArgumentError(field, "is empty; a prompt has at least one token")
        if len(found) > max_tokens:
            raise InvalidArgumentError(
                field,
                f"the prompt has {len(found)} tokens; the context of {max_tokens + 1} leaves room "
                f"for {max_tokens} and one generated token",
            )
        return Prompt(found, opens_reasoning)

    async def tokenize(self, text: str, parse_control_tokens: bool) -> list[int]:
        """Ids of a raw text, with the checkpoint's frame around it."""
        _check_chars(len(text), "text")
        ids = await self._in_thread_if_big(
            len(text),
            lambda: self._tokenizer.encode(
                text, parse_control_tokens=parse_control_tokens, add_special_tokens=True
            ),
        )
        self.check_ids(ids, "text")
        return ids

    async def render_chat(self, chat: ChatInput) -> tuple[str, list[int]]:
        """A chat as prompt text, and its ids: markup as control ids, typed text as plain ones."""
        read = await self._read_chat(chat)
        return read.text, read.token_ids

    async def _read_chat(self, chat: ChatInput, max_tokens: int | None = None) -> _Chat:
        """max_tokens: lets a text far beyond it be refused before the work."""
        if not chat.messages:
            raise InvalidArgumentError("chat.messages", "is empty; at least one message is needed")
        if self._template is None:
            raise InvalidArgumentError(
                "chat", "this checkpoint has no chat template; send text or token_ids"
            )
        check_chat(chat)
        content = "".join(message.content or "" for message in chat.messages)
        if max_tokens is not None:
            self._refuse_huge(content, max_tokens, "chat.messages")
        typed = len(content) + _num_other_chars(chat)
        _check_chars(typed, "chat.messages")
        num_parts = len(chat.messages) + len(chat.tools)
        num_parts += sum(len(message.tool_calls) for message in chat.messages)
        size = typed + MESSAGE_CHARS * num_parts + num_json_chars(chat)
        first_ns = FIRST_INLINE_NS if size <= INLINE_CHARS else FIRST_THREAD_NS
        first_ns = first_ns if size <= BIG_CHARS else MAX_NS
        try:
            found = await self._in_thread_if_big(size, lambda: self._render(chat, first_ns))
        except TemplateTimeError:
            if first_ns == MAX_NS:
                raise
            async with self._one_big:
                found = await asyncio.to_thread(self._render, chat, MAX_NS)
        self.check_ids(found.token_ids, "chat")
        return found

    async def decode(self, token_ids: Sequence[int], keep_control_tokens: bool) -> str:
        self.check_ids(token_ids, "token_ids")
        return await self._in_thread_if_big(
            len(token_ids),
            lambda: self._tokenizer.decode(token_ids, keep_control_tokens=keep_control_tokens),
        )

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """InvalidArgumentError for the first id outside the vocabulary."""
        is_outside = np.asarray(ids, dtype=np.uintc) >= self._vocab_size
        if is_outside.any():
            place = int(is_outside.argmax())
            raise InvalidArgumentError(
                f"{field}[{place}]",
                f"token id {ids[place]} is outside the vocabulary, below {self._vocab_size}",
            )

    def _render(self, chat: ChatInput, max_ns: int) -> _Chat:
        assert self._template is not None
        values = chat_values(chat, self._template.knows_no_content, self._template.mentions)
        typed = TypedText(_strings([self._template.source, values.messages, values.variables]))
        rendered = self._template.render(
            [self._hidden(message, typed) for message in values.messages],
            add_generation_prompt=chat.add_generation_prompt,
            variables=_mapped(
                values.variables, lambda text: self._hide(text, typed, self._controls)
            ),
            max_ns=max_ns,
        )
        _check_chars(len(rendered), "chat")
        # Typed text is still hidden here, and cannot open reasoning.
        opens_reasoning = rendered.rstrip().endswith(THINK)
        pieces = typed.pieces(rendered)
        ids: list[int] = []
        for text, is_typed in pieces:
            ids += self._tokenizer.encode(text, parse_control_tokens=not is_typed)
        return _Chat("".join(text for text, _ in pieces), ids, opens_reasoning)

    def _hidden(self, message: dict[str, Any], typed: TypedText) -> dict[str, Any]:
        # An assistant's turn may hold markup it made itself, such as <think>, which templates read.
        own = self._special if message["role"] == "assistant" else self._controls
        return {
            key: self._hide(value, typed, own)
            if key == "content" and value is not None
            else _mapped(value, lambda text: self._hide(text, typed, self._controls))
            for key, value in message.items()
        }

    def _hide(self, text: str, typed: TypedText, controls: re.Pattern[str] | None) -> str:
        if controls is None:
            return text
        # Where the tokenizer looks for markup after normalizing, so must we.
        normal = self._tokenizer.normalize(text)
        if normal != text and controls.findall(normal) != controls.findall(text):
            text = normal
        return typed.hide(text, controls)

    async def _in_thread_if_big(self, size: int, work: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return work()
        if size <= BIG_CHARS:
            return await asyncio.to_thread(work)
        async with self._one_big:
            return await asyncio.to_thread(work)

    def _refuse_huge(self, text: str, max_tokens: int, field: str) -> None:
        if self._tokenizer.surely_exceeds(text, max_tokens):
            raise InvalidArgumentError(
                field,
                f"{len(text)} characters make more tokens than the {max_tokens} a prompt may have",
            )


def _check_chars(count: int, field: str) -> None:
    if count > MAX_CHARS:
        raise InvalidArgumentError(field, f"{count} characters; at most {MAX_CHARS} are accepted")


def _num_other_chars(chat: ChatInput) -> int:
    """Of what is typed besides content and JSON."""
    messages = sum(
        sum(map(len, (m.role, m.tool_call_id or "", m.name or "", m.reasoning_content or "")))
        + sum(len(call.id) + len(call.name) for call in m.tool_calls)
        for m in chat.messages
    )
    return messages + sum(len(tool.name) + len(tool.description or "") for tool in chat.tools)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string inside changed, keys too: templates may write them out."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    return value


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in _strings(part)]
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
