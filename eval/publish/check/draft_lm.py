"""A draft model, as the language model's folder it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.eval.publish.check.core import Family, Wrong, account


class DraftLm(Family):
    """A language model of its own: transformers builds it, no state of the target is read."""

    def prepare(self) -> None:
        self.model = (self.own() if self.native else self.loaded()).eval()

    def loaded(self) -> Any:
        """The folder as any program loads it; no weight filled in, none left out."""
        from transformers import AutoModelForCausalLM

        model, said = AutoModelForCausalLM.from_pretrained(
            self.folder, use_safetensors=True, local_files_only=True, dtype=torch.float32,
            output_loading_info=True,
        )  # fmt: skip
        for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if said[name]:
                what = name.partition("_")[0]
                raise Wrong(f"{sorted(map(str, said[name]))[0]} is {what} in the weights")
        return model

    def own(self) -> Any:
        """Outrider's own folder: the model's settings and its body's weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**self.recipe["body"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        own = {k.removeprefix("body."): v for k, v in self.w.items() if k.startswith("body.")}
        body = model.base_model
        account(own, {k: tuple(v.shape) for k, v in body.state_dict().items()}, set())
        body.load_state_dict(own)
        if "lm_head.weight" in self.w:
            model.get_output_embeddings().weight.data = self.w["lm_head.weight"]
        return model

    def logits(self) -> Tensor:
        said = self.model(input_ids=self.g["ids"][None]).logits[0][:, self.g["tokens"]]
        depths = range(1, self.depths + 1)
        return torch.stack([said[[row + depth for row in self.rows]] for depth in depths])

    def agree_ends(self) -> None:
        """It has ends of its own."""

    def suspects(self) -> list[tuple[str, Callable[[], None]]]:
        return []
