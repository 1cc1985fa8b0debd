"""`python -m slotwise_cli.peer_transformers`: one request at a time with Hugging Face transformers.

Reads a job as JSON from stdin ({"model", "prompts", "new_tokens", "num_threads"}), prints
{"version", "num_threads", "tokens_per_s": [...], "ttft_ms": [...]} with one figure per prompt.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


class _Clock:
    """A streamer: transformers calls `put` with the prompt, then with every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def main() -> None:
    """Run the job on stdin; the first prompt is run once more before, as warm-up."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    _generate(model, job["prompts"][0], 2)
    result: dict[str, Any] = {"version": transformers.__version__}
    result |= {"tokens_per_s": [], "ttft_ms": []}
    for prompt in job["prompts"]:
        started = time.perf_counter()
        times = _generate(model, prompt, job["new_tokens"])
        result["tokens_per_s"].append(job["new_tokens"] / (times[-1] - started))
        result["ttft_ms"].append((times[0] - started) * 1e3)
    result["num_threads"] = torch.get_num_threads()
    print(json.dumps(result))


def _generate(model: Any, prompt: list[int], new_tokens: int) -> list[float]:
    """Arrival times of exactly `new_tokens` greedy tokens."""
    ids = torch.tensor([prompt])
    clock = _Clock()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        streamer=clock,
    )
    return clock.times[1:]


if __name__ == "__main__":
    main()
