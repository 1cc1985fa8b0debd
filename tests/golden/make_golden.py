"""`make golden`: the golden tokens again, from the oracle. Review the difference; edit nothing.

Keeps the prompts of smollm2-greedy.json and asks Hugging Face transformers, in float32 on the CPU,
for the greedy continuation of each, its logprobs, and what the sampling of a case makes of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

from slotwise_cli.demo_model import ensure_demo_model

FILE = Path(__file__).with_name("smollm2-greedy.json")
NUM_BEST = 5
# Place of a prompt among the cases, and how it is sampled: greedily, after these.
ADJUSTED: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"repetition_penalty": 1.3}),
    (7, {"repetition_penalty": 0.9, "logit_bias": {"260": -5.0, "28": 2.5}}),
    (2, {"frequency_penalty": 0.8, "presence_penalty": 0.6}),
    (8, {"frequency_penalty": -0.2, "repetition_penalty": 1.1, "logit_bias": {"30": 3.0}}),
)


def main() -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    folder = ensure_demo_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    golden["made_with"] = (
        f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, "
        "CPU, float32, greedy"
    )
    golden["cases"] = [answer(model, tokenizer, case) for case in golden["cases"]]
    golden["adjusted_cases"] = [
        answer(model, tokenizer, {**golden["cases"][place], "sampling": sampling})
        for place, sampling in ADJUSTED
    ]
    FILE.write_text(dump(golden), encoding="utf-8")
    print(f"wrote {len(golden['cases'])} cases to {FILE}")


def answer(model: Any, tokenizer: Any, case: dict) -> dict:
    """The case with its prompt's ids and its continuation, as long as it was before."""
    made = {key: case[key] for key in ("kind", "prompt", "sampling") if key in case}
    text = case["prompt"]
    if case["kind"] == "chat":
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        made["rendered"] = text
    made["prompt_token_ids"] = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([made["prompt_token_ids"]])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=len(case["token_ids"]),
            logits_processor=processors(case.get("sampling", {}), ids.shape[1]),
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
    made["token_ids"] = out.sequences[0, ids.shape[1] :].tolist()
    made["top1_gap"] = [gap(scores[0]) for scores in out.scores]
    made["logprobs"] = [
        logprobs(logits[0], token_id)
        for logits, token_id in zip(out.logits, made["token_ids"], strict=True)
    ]
    made["text"] = tokenizer.decode(made["token_ids"], skip_special_tokens=True)
    return made


class CountPenalty(transformers.LogitsProcessor):
    """Frequency and presence penalty, which transformers has not: of generated tokens only."""

    def __init__(self, frequency: float, presence: float, num_prompt: int) -> None:
        self.frequency, self.presence, self.num_prompt = frequency, presence, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """[1, T], [1, V]."""
        scores = scores.clone()
        for token_id in input_ids[0, self.num_prompt :].tolist():
            scores[0, token_id] -= self.frequency
        for token_id in set(input_ids[0, self.num_prompt :].tolist()):
            scores[0, token_id] -= self.presence
        return scores


def processors(sampling: dict, num_prompt: int) -> transformers.LogitsProcessorList:
    """In the order of the service: repetition, counts, bias."""
    found = transformers.LogitsProcessorList()
    if "repetition_penalty" in sampling:
        penalty = sampling["repetition_penalty"]
        found.append(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    counts = [sampling.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")]
    found.append(CountPenalty(counts[0], counts[1], num_prompt))
    if "logit_bias" in sampling:
        biases = {(int(token_id),): bias for token_id, bias in sampling["logit_bias"].items()}
        found.append(transformers.SequenceBiasLogitsProcessor(biases))
    return found


def logprobs(logits: torch.Tensor, token_id: int) -> dict:
    """Of a token, and of the best ones, from [V] logits of the model."""
    values = logits.double().log_softmax(-1)
    best = values.topk(NUM_BEST)
    return {
        "token": round(values[token_id].item(), 5),
        "best_ids": best.indices.tolist(),
        "best": [round(value, 5) for value in best.values.tolist()],
    }


def gap(logits: torch.Tensor) -> float:
    """Distance of the two greatest of [V] logits."""
    first, second = logits.topk(2).values.tolist()
    return round(first - second, 5)


def dump(golden: dict) -> str:
    """A list of numbers on one line."""
    text = json.dumps(golden, ensure_ascii=False, indent=1)
    return re.sub(r"\[[-\d.,\s]+\]", lambda found: " ".join(found[0].split()), text) + "\n"


if __name__ == "__main__":
    main()
