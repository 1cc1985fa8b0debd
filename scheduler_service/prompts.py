"""Any input to prompt token ids, off the event loop when it is big."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from .chat_template import ChatTemplate, TypedText, control_pattern
from .errors import InvalidArgumentError
from .generate_call import ChatInput, ChatMessage, IdsInput, Input, TextInput
from .tokenizer import Tokenizer

T = TypeVar("T")

# Up to here the work takes about a millisecond, less than a thread's round trip is worth.
INLINE_CHARS = 4096
# Rendering a message costs about as much as this many characters.
MESSAGE_CHARS = 64
# Tokenizing takes about 100 bytes of memory a character: big texts are read one at a time.
BIG_CHARS = 1 << 18
MAX_CHARS = 1 << 23
SERVER_VARIABLES = ("messages", "add_generation_prompt")


class PromptReader:
    """Tokenizes texts and renders chats as the checkpoint's makers do."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._controls = control_pattern(tokenizer.control_texts)
        self._special = control_pattern(tokenizer.special_texts)
        self._one_big = asyncio.Semaphore(1)

    async def prompt(self, source: Input, max_tokens: int) -> Sequence[int]:
        """Prompt ids, at least one and at most max_tokens, all in the vocabulary.

        InvalidArgumentError names the field, the value and the limit.
        """
        found: Sequence[int]
        match source:
            case IdsInput(found):
                field = "token_ids.ids"
                self.check_ids(found, field)
            case TextInput(text, parse):
                self._refuse_huge(text, max_tokens, "text")
                found, field = await self.tokenize(text, parse), "text"
            case ChatInput():
                _, found = await self.render_chat(source, max_tokens)
                field = "chat"
        if not found:
            raise InvalidArgumentError(field, "is empty; a prompt has at least one token")
        if len(found) > max_tokens:
            raise InvalidArgumentError(
                field,
                f"the prompt has {len(found)} tokens; the context of {max_tokens + 1} leaves room "
                f"for {max_tokens} and one generated token",
            )
        return found

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

    async def render_chat(
        self, chat: ChatInput, max_tokens: int | None = None
    ) -> tuple[str, list[int]]:
        """The prompt text of a chat, and its ids: markup as control ids, typed text as plain ones.

        max_tokens: lets a text far beyond it be refused before the work.
        """
        if not chat.messages:
            raise InvalidArgumentError("chat.messages", "is empty; at least one message is needed")
        if self._template is None:
            raise InvalidArgumentError(
                "chat", "this checkpoint has no chat template; send text or token_ids"
            )
        variables = _variables(chat.template_kwargs_json)
        content = "".join(message.content or "" for message in chat.messages)
        if max_tokens is not None:
            self._refuse_huge(content, max_tokens, "chat.messages")
        typed = len(content) + sum(len(message.role) for message in chat.messages)
        _check_chars(typed, "chat.messages")
        size = typed + MESSAGE_CHARS * len(chat.messages) + len(chat.template_kwargs_json)
        try:
            text, ids = await self._in_thread_if_big(size, lambda: self._render(chat, variables))
        except RecursionError:
            raise InvalidArgumentError("chat.template_kwargs_json", "is nested too deep") from None
        self.check_ids(ids, "chat")
        return text, ids

    async def decode(self, token_ids: tuple[int, ...], keep_control_tokens: bool) -> str:
        self.check_ids(token_ids, "token_ids")
        return await self._in_thread_if_big(
            len(token_ids),
            lambda: self._tokenizer.decode(token_ids, keep_control_tokens=keep_control_tokens),
        )

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """InvalidArgumentError for the first id outside the vocabulary."""
        if ids and max(ids) >= self._vocab_size:
            place = next(i for i, token_id in enumerate(ids) if token_id >= self._vocab_size)
            raise InvalidArgumentError(
                f"{field}[{place}]",
                f"token id {ids[place]} is outside the vocabulary, below {self._vocab_size}",
            )

    def _render(self, chat: ChatInput, variables: dict[str, Any]) -> tuple[str, list[int]]:
        assert self._template is not None
        strings = [self._template.source, *_strings(variables)]
        strings += [text for m in chat.messages for text in (m.role, m.content or "")]
        typed = TypedText(strings)
        rendered = self._template.render(
            [self._hidden(message, typed) for message in chat.messages],
            add_generation_prompt=chat.add_generation_prompt,
            variables=_mapped(variables, lambda text: self._hide(text, typed, self._controls)),
        )
        _check_chars(len(rendered), "chat")
        pieces = typed.pieces(rendered)
        ids: list[int] = []
        for text, is_typed in pieces:
            ids += self._tokenizer.encode(text, parse_control_tokens=not is_typed)
        return "".join(text for text, _ in pieces), ids

    def _hidden(self, message: ChatMessage, typed: TypedText) -> dict[str, str]:
        # An assistant's turn may hold markup it made itself, such as <think>, which templates read.
        controls = self._special if message.role == "assistant" else self._controls
        return {
            "role": self._hide(message.role, typed, self._controls),
            "content": self._hide(message.content or "", typed, controls),
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


def _variables(text: str) -> dict[str, Any]:
    """The object in template_kwargs_json; InvalidArgumentError when it is none."""
    field = "chat.template_kwargs_json"
    if not text:
        return {}
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
        # Escapes can spell half of a surrogate pair, which is no text.
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(field, f"not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidArgumentError(field, f"holds a {type(values).__name__}; an object is needed")
    for name in SERVER_VARIABLES:
        if name in values:
            raise InvalidArgumentError(field, f"{name} is set by the server; leave it out")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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
