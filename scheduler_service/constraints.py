"""What the outputs of calls must be, compiled beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from .errors import InvalidArgumentError, UnavailableError
from .generate_call import ConstraintSpec
from .grammar import Grammar, GrammarCompiler
from .grammar_trial import OutOfTimeError
from .json_file import ModelFilesError
from .request import Request

T = TypeVar("T")

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
    # A thread each, in which compilations take turns: all come here first, the slow go on there.
    _quick: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))
    _slow: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

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
        words when it does not compile; UnavailableError when nothing can be compiled now.
        """
        if self.compiler is None:
            raise InvalidArgumentError(
                spec.kind, f"constraints cannot be had with this model: {self.refusal}"
            )
        grammar = self.compiler.find(spec, at_text_start=at_text_start)
        if grammar is None:
            grammar = await self._compiled(self.compiler, spec, at_text_start)
        await _in_thread(None, partial(_constrain, grammar, spec.kind, requests))

    def stop(self) -> None:
        """Who waits for a compilation gets UnavailableError, as later ones do. Does not block."""
        if self.compiler is not None:
            self.compiler.stop()

    def close(self) -> None:
        """Ends what is being compiled, and the processes that trials run in."""
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)
        if self.compiler is not None:
            self.compiler.close()

    async def _compiled(
        self, compiler: GrammarCompiler, spec: ConstraintSpec, at_start: bool
    ) -> Grammar:
        work = partial(compiler.compile, spec, at_text_start=at_start)
        try:
            return await _in_thread(self._quick, partial(work, is_slow=False))
        except OutOfTimeError:
            return await _in_thread(self._slow, work)


async def _in_thread(threads: Executor | None, work: Callable[[], T]) -> T:
    try:
        done = asyncio.get_running_loop().run_in_executor(threads, work)
    except RuntimeError as error:
        raise UnavailableError(
            f"no constraint can be compiled now: {error}; try again later"
        ) from error
    return await done


def _constrain(grammar: Grammar, kind: str, requests: Sequence[Request]) -> None:
    for request in requests:
        request.constraint = grammar.constraint(request.end_token_ids, request.min_new_tokens)
    assert requests[0].constraint is not None
    first_mask = requests[0].constraint.advance(())
    if first_mask.allowed is None:
        raise InvalidArgumentError(kind, _NOTHING[first_mask.is_complete])
    for request in requests:
        request.first_mask = first_mask
