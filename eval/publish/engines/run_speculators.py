"""Compare the forward of the speculators library with the reference outputs of an EAGLE-3 folder.

The library trains and does not decode: it is given the text and the target's states, and its logits
of every depth must be those in golden/.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig


@torch.no_grad()
def main(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["drafter"])
    golden = load_file(folder / "golden" / "outputs.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layers = config["eagle_aux_hidden_state_layer_ids"]
    taps = torch.cat([golden[f"tap.{layer - 1}"] for layer in layers], dim=-1)
    place, out = with_verifier(folder, config, request), []
    settings = SpeculatorModelConfig.from_pretrained(place)
    settings.transformer_layer_config._attn_implementation = "eager"  # flex attention needs blocks
    model = SpeculatorModel.from_pretrained(place, config=settings).float().eval()
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: out.append(logits[0]))
    ids = golden["ids"][None, 1:]  # row t reads the state of token t and token t + 1
    model(taps[None, :-1], ids, torch.zeros_like(ids), ttt_steps=len(golden["logits"]))
    columns = golden["tokens"]
    if model.d2t is not None:  # target ids of the draft vocabulary, ascending
        columns = torch.searchsorted(model.d2t + torch.arange(len(model.d2t)), columns)
    ours = torch.stack([logits[golden["rows"]][:, columns] for logits in out])
    largest = golden["logits"].abs().max().clamp(min=1)
    difference = float((ours - golden["logits"]).abs().max() / largest)
    return {
        "engine": f"speculators {version('speculators')}",
        "depths": len(out), "difference": difference,
    }  # fmt: skip


def with_verifier(folder: Path, config: dict[str, Any], request: dict[str, Any]) -> str:
    """Return a folder in the current one that names the target's folder as its verifier."""
    here = Path("drafter")
    here.mkdir()
    config["speculators_config"]["verifier"]["name_or_path"] = request["target"]
    (here / "config.json").write_text(json.dumps(config))
    for file in folder.glob("model*"):
        (here / file.name).symlink_to(file)
    return str(here)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
