"""What the outputs of calls must be, compiled beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import InvalidArgumentError
from .generate_call import ConstraintSpec
from .grammar import GrammarCompiler
from .json_file import ModelFilesError
from .request import Request

# A compilation may take a second: what others need threads for goes on meanwhile.
_MAX_AT_ONCE = 2
# Why no token can come first, by whether the output is complete before it.
_NOTHING = {
    True: "only an empty output is possible, and nothing may end it; unset ignore_eos and "
    "min_new_tokens, or loosen it",
    False: "no token of this model can begin such an output; loosen it",
}


@dataclass(frozen=True, slots=True)
class Constraints:
    """Of one model. `refusal`: why there is no compiler, then every constraint is refused."""

    compiler: GrammarCompiler | None
    refusal: str = ""
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_AT_ONCE))

    @classmethod
    def load(cls, tokenizer_path: Path, vocab_size: int) -> Constraints:
        """Reads the tokenizer; blocks for up to some seconds."""
        try:
            return cls(GrammarCompiler(tokenizer_path, vocab_size))
        except ModelFilesError as error:
            return cls(None, str(error))

    async def constrain(
        self, spec: ConstraintSpec, requests: Sequence[Request], *, at_text_start: bool
    ) -> None:
        """Gives each answer to a call its constraint and the mask of its first token.

        at_text_start: the outputs do not go on from a text. InvalidArgumentError with the library's
        words when it does not compile; UnavailableError when too many others take too long.
        """
        if self.compiler is None:
            raise InvalidArgumentError(
                spec.kind, f"constraints cannot be had with this model: {self.refusal}"
            )
        async with self._turn:
            await asyncio.to_thread(_constrain, self.compiler, spec, requests, at_text_start)


def _constrain(
    compiler: GrammarCompiler, spec: ConstraintSpec, requests: Sequence[Request], at_start: bool
) -> None:
    for request in requests:
        request.constraint = compiler.compile(
            spec, request.end_token_ids, request.min_new_tokens, at_text_start=at_start
        )
    assert requests[0].constraint is not None
    first_mask = requests[0].constraint.advance(())
    if first_mask.allowed is None:
        raise InvalidArgumentError(spec.kind, _NOTHING[first_mask.is_complete])
    for request in requests:
        request.first_mask = first_mask
