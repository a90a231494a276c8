"""Decode with transformers: a draft model or DFlash as assistant, or the target's MTP modules."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf


class Steps(hf.generation.streamers.BaseStreamer):
    """The number of tokens of every step; the first entry is the prompt's length."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.steps.append(value.numel())

    def end(self) -> None:
        pass


def main(request: dict[str, Any]) -> dict[str, Any]:
    load, device = hf.AutoModelForCausalLM.from_pretrained, request["device"]
    model = load(request["target"], dtype=torch.float32).to(device)
    if request["method"] == "mtp":
        use: dict[str, Any] = {"use_mtp": True}
        layers, config = model.config.num_hidden_layers, model.config
        config.num_mtp_layers = config.num_nextn_predict_layers
        names = [rf"model\.layers\.{layers + k}\." for k in range(config.num_mtp_layers)]
        model._keys_to_ignore_on_load_unexpected = names  # where transformers looks for modules
    elif request["method"] == "dflash":
        draft = hf.AutoModel.from_pretrained(request["drafter"], dtype=torch.float32).to(device)
        if draft.config.block_size != request["depth"] + 1:
            raise ValueError(f"the block drafts {draft.config.block_size - 1}, always")
        use = {"assistant_model": draft, "speculation_type": "dflash"}
    else:
        draft = load(request["drafter"], dtype=torch.float32).to(device)
        draft.generation_config.num_assistant_tokens = request["depth"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        use = {"assistant_model": draft}
    answers = [decode(model, torch.tensor([ids]), request, use) for ids in request["prompts"]]
    return {"engine": f"transformers {hf.__version__}", "answers": answers}


def decode(model: Any, prompt: Any, request: dict[str, Any], use: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of an answer, and how many every step added; the first step adds one."""
    stop, budget, steps = request["stop_ids"], request["new_tokens"], Steps()
    ids, size, first = prompt.to(model.device), prompt.shape[1], []
    greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": stop, "pad_token_id": 0}

    def generate(count: int, **more: Any) -> Any:
        mask = torch.ones_like(ids)  # by default, tokens of the padding's id are not attended to
        return model.generate(ids, attention_mask=mask, max_new_tokens=count, **greedy, **more)

    if request["method"] == "assistant":  # it would draft before the target's first token
        ids, first, budget = generate(1), [1], budget - 1
    if budget and not (first and int(ids[0, -1]) in stop):
        ids = generate(budget, streamer=steps, **use)
    return {"ids": ids[0, size:].tolist(), "steps": first + steps.steps[1:]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
