"""How long one replica takes for its work: a step's time by its rows and context, a prompt's."""

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .output import CliError

# Qwen3-8B in bfloat16 on one NVIDIA H200, prompts of 512: seconds of a step by its decode rows.
# README.md has 1 to 8, docs/scaling.md says where 64 comes from.
_STEPS_8B: Final = ((1, 1 / 246), (2, 2 / 486), (4, 4 / 955), (8, 8 / 1861), (64, 64 / 10468))


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Of one replica. The defaults are those of an 8B model on one H200."""

    name: str = "Qwen3-8B, bfloat16, one H200"
    # (rows, seconds of a decode step), rising; between two of them a straight line.
    steps: tuple[tuple[int, float], ...] = _STEPS_8B
    # Tokens of context per row with which the steps were measured.
    step_context: int = 576
    # More of a step for each further token of context: its K and V are read.
    context_token_s: float = 37e-9
    # A prompt's token by itself, and times twice the tokens before it: 8K take 0.204 s, 16K 0.506.
    prompt_token_s: float = 19e-6
    attention_pair_s: float = 0.73e-9
    # Of a request's first token beside its prompt's work: wires, wake-ups, commands under way.
    overhead_s: float = 4.4e-3
    # Prompt tokens of a step in which others decode.
    mixed_tokens: int = 2016

    def step_s(self, rows: int, context: float) -> float:
        """A decode step of `rows` requests that hold `context` tokens in all; 0 rows take none."""
        if not rows:
            return 0.0
        more = max(0.0, context - rows * self.step_context)
        return self._measured_s(rows) + more * self.context_token_s

    def prefill_s(self, start: int, end: int) -> float:
        """Computing the positions [start, end) of a prompt; a step reads all weights at least."""
        pairs = end * end - start * start
        work = self.prompt_token_s * (end - start) + self.attention_pair_s * pairs
        return max(work, self.steps[0][1]) if end > start and work else 0.0

    @property
    def mixed_s(self) -> float:
        """A full step's prompts while others decode."""
        return self.prompt_token_s * self.mixed_tokens

    def _measured_s(self, rows: int) -> float:
        if len(self.steps) == 1:
            return self.steps[0][1]
        at = bisect_left(self.steps, rows, key=lambda step: step[0])
        at = min(max(1, at), len(self.steps) - 1)
        (rows_a, step_a), (rows_b, step_b) = self.steps[at - 1], self.steps[at]
        slope = (step_b - step_a) / (rows_b - rows_a)
        # Below the first one measured, its own: a step reads all weights whatever its rows.
        return max(self.steps[0][1], step_a + (rows - rows_a) * slope)


def read_ladder(path: Path) -> ServiceTimes:
    """Steps, prompts and overhead from a file of `slotwise bench ladder --json-file`.

    Its prompts are of one length, so they say nothing of attention's part: a prompt's time is taken
    as straight. CliError when it is no such file.
    """
    try:
        result = json.loads(path.read_text())
        levels = sorted(result["levels"], key=lambda level: int(level["concurrency"]))
        steps = tuple((n, n / speed) for n, speed in map(_decode_speed, levels))
        prompt = int(result["prompt_tokens"])
        first_s = float(levels[0]["ttft_ms_p50"]) / 1e3
        context = prompt + int(result["new_tokens"]) // 2
        name = f"{result['model']}, {result['weight_dtype']}, {result['device']}"
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        raise CliError(f"{path} is no result of `slotwise bench ladder`: {error!r}") from None
    if not steps or levels[0]["concurrency"] != 1:
        raise CliError(f"{path} has no level of one request; measure it with --concurrency 1,...")
    return ServiceTimes(name, steps, context, 0.0, first_s / prompt, 0.0, 0.0)


def _decode_speed(level: dict[str, Any]) -> tuple[int, float]:
    return int(level["concurrency"]), float(level["decode_tokens_per_s"]["median"])
