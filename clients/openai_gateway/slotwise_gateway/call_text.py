"""Calls that a model writes though it was given no tools: text, as it wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from slotwise_client import Delta, Event, Finished, FinishReason

END_CALL = "}\n</tool_call>"


class CallTexts:
    """The events of one request, with calls turned back into the text that they were."""

    def __init__(self) -> None:
        # Choices in whose text a call has begun.
        self._open: set[int] = set()

    def of(self, event: Event) -> Iterator[Event]:
        """What is to be told in place of an event."""
        if isinstance(event, Delta) and (event.tool_calls or event.index in self._open):
            event = self._text(event)
        elif isinstance(event, Finished) and self._is_complete(event):
            yield Delta(event.request_id, event.index, 0, (), END_CALL)
        yield event

    def _is_complete(self, finished: Finished) -> bool:
        """A call is open, and was not cut."""
        return finished.index in self._open and finished.finish_reason is FinishReason.STOP

    def _text(self, delta: Delta) -> Delta:
        is_open = delta.index in self._open
        before, calls = delta.text, ""
        if is_open and before:
            before, is_open = f"{END_CALL}\n{before}", False
        for part in delta.tool_calls:
            if part.name:
                name = json.dumps(part.name, ensure_ascii=False)
                calls += f"{END_CALL}\n" if is_open else ""
                calls += f'<tool_call>\n{{"name": {name}, "arguments": '
                is_open = True
            calls += part.arguments_json
        self._open.discard(delta.index)
        if is_open:
            self._open.add(delta.index)
        return replace(delta, text=before + calls, tool_calls=())
