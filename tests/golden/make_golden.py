"""`make golden`: the golden tokens again, from the oracle. Review the difference; edit nothing.

Keeps the prompts of smollm2-greedy.json and asks Hugging Face transformers, in float32 on the CPU,
for the greedy continuation of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from slotwise_cli.demo_model import ensure_demo_model

FILE = Path(__file__).with_name("smollm2-greedy.json")


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
    FILE.write_text(dump(golden), encoding="utf-8")
    print(f"wrote {len(golden['cases'])} cases to {FILE}")


def answer(model: Any, tokenizer: Any, case: dict) -> dict:
    """The case with its prompt's ids and its continuation, as long as it was before."""
    made = {"kind": case["kind"], "prompt": case["prompt"]}
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
            output_logits=True,
            return_dict_in_generate=True,
        )
    made["token_ids"] = out.sequences[0, ids.shape[1] :].tolist()
    made["top1_gap"] = [gap(logits[0]) for logits in out.logits]
    made["text"] = tokenizer.decode(made["token_ids"], skip_special_tokens=True)
    return made


def gap(logits: torch.Tensor) -> float:
    """Distance of the two greatest of [V] logits."""
    first, second = logits.topk(2).values.tolist()
    return round(first - second, 5)


def dump(golden: dict) -> str:
    return json.dumps(golden, ensure_ascii=False, indent=1) + "\n"


if __name__ == "__main__":
    main()
