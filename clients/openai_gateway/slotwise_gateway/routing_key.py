"""By which a load balancer before the replicas finds the one that has a prompt's beginning."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

from slotwise_client import Chat, Prompt

# Of each of a chat's first messages: they tell conversations apart, however long one of them is.
MESSAGE_CHARS: Final = 4096
MAX_MESSAGES: Final = 16
# Of a prompt without messages, which may grow at its end.
PROMPT_CHARS: Final = 512
PROMPT_IDS: Final = 128


def routing_key(prompt: Prompt, cache_key: str | None, cache_salt: str | None) -> str:
    """Of `cache_key`, the caller's word for it, else of how the prompt begins.

    A chat begins with all up to its first question: so a conversation stays where it is, and its
    next turn finds the last one in the cache. The work is bounded.
    """
    parts = ("key", cache_key) if cache_key else ("salt", cache_salt or "", *_beginning(prompt))
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "big") + data)
    return digest.hexdigest()[:32]


def _beginning(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, Chat):
        for message in prompt.messages[:MAX_MESSAGES]:
            yield message.role
            yield (message.content or "")[:MESSAGE_CHARS]
            if message.role == "user":
                return
    elif isinstance(prompt, str):
        yield prompt[:PROMPT_CHARS]
    else:
        yield " ".join(map(str, prompt[:PROMPT_IDS]))
