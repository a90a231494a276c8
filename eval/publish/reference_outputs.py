"""What a published drafter says of a short text: the numbers that `verify.py` compares with.

`golden.safetensors` holds the text, what the target says of it where the drafter reads (tapped
layers, last states, embeddings), and the drafter's logits at every depth behind some of its rows,
for some tokens; of a borrowed head the rows of those tokens. `golden.json` says what all this is
about, and the hash of every file. Together they are a few megabytes for a large target.

Legend: T tokens of the text, R rows guessed from, D depths, S tokens that are compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import sha256_of, write, write_json, write_tensors
from outrider.eval.publish.bundle import verifier
from outrider.models.drafter import Drafter, Trace
from outrider.models.formats.native import target_fingerprint
from outrider.models.target import Target

ROWS = 3
LONGEST = 12  # tokens of the text beside one for each depth
SPREAD = 64  # compared tokens, evenly over the draft vocabulary, beside the favourites
FAVOURITES = 2
FINISH = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # behind a target's head
UNHASHED = ("README.md", "verify.py")  # of which people may change the first, and run the other


@torch.no_grad()
def golden(drafter: Drafter, target: Target, ids: Sequence[int], depths: int) -> dict[str, Tensor]:
    """The numbers.

    Args:
        ids: a text in the target's language; its end is taken.

    Raises:
        RunError: it is too short for so many depths.
    """
    text = torch.tensor(list(ids)[-(depths + LONGEST) :], device=target.device)
    if len(text) < depths + ROWS + 1:
        message = f"A text of {len(text)} tokens is too short to compare {depths} depths."
        raise RunError(message, "Use a larger publish.new_tokens.")
    last = len(text) - 2 - depths
    rows = sorted({1, last // 2, last})
    target.set_taps(drafter.taps)
    trace = _read(target, text)
    said = torch.stack([_guesses(drafter, trace, row, depths) for row in rows], dim=1)
    kept = drafter.vocab.kept.to(said.device)
    columns = _compared(said)
    out = {"ids": text, "rows": torch.tensor(rows), "tokens": kept[columns]}
    out |= {"logits": said[:, :, columns], "embedded": target.embed(text), "last": trace.last[0]}
    width = trace.last.shape[-1]
    for i, tap in enumerate(drafter.taps):
        out[f"tap.{tap}"] = trace.taps[0, :, i * width : (i + 1) * width]
    out["head"] = target.head_weight[kept[columns]]
    if (bias := getattr(target.head, "bias", None)) is not None:
        out["head_bias"] = bias[kept[columns]]
    return {k: v.float() if v.is_floating_point() else v for k, v in out.items()}


def _read(target: Target, text: Int[Tensor, " T"]) -> Trace:
    at = torch.arange(len(text), device=text.device)[None]
    nobody = torch.zeros_like(text)[None]
    return target.trace(text[None], nobody.bool(), nobody, at)


def _guesses(drafter: Drafter, trace: Trace, row: int, depths: int) -> Float[Tensor, "D Vd"]:
    """As decoding hears them: rows 0..row are absorbed, the text's own tokens were drafted."""
    held = {k: v[:, : row + 1] for k, v in vars(trace).items() if v is not None}
    state, out = drafter.absorb(None, Trace(**held)), []
    nobody = torch.zeros(1, dtype=torch.long, device=trace.ids.device)
    for depth in range(1, depths + 1):
        ids = trace.ids[0, row + depth : row + depth + 1]
        logits, state = drafter.step(state, depth, ids, nobody)
        out.append(logits[0])
    return torch.stack(out)


def _compared(said: Float[Tensor, "D R Vd"]) -> Int[Tensor, " S"]:
    """Draft ids: the favourites, and some of all the others."""
    size = said.shape[-1]
    best = said.topk(min(FAVOURITES, size)).indices.flatten()
    spread = torch.linspace(0, size - 1, min(SPREAD, size), device=said.device).round().long()
    out: Tensor = torch.cat([best, spread]).unique()
    return out


def write_golden(
    folder: Path,
    numbers: dict[str, Tensor],
    drafter: Drafter,
    target: Target,
    about: dict[str, Any],
) -> None:
    """Both files and `verify.py`, beside the drafter that lies there.

    Args:
        about: what golden.json says beside the target, the taps and the hashes; `drafter` and
            `format` are needed.
    """
    write_tensors(folder / "golden.safetensors", numbers, {"format": "pt"})
    write(folder / "verify.py", verifier(about["drafter"]).encode())
    files = sorted(f for f in folder.iterdir() if f.name not in UNHASHED)
    said = {
        **about,
        "taps": list(drafter.taps),
        **_of_target(target, numbers["ids"].to(target.device)),
        "sha256": {file.name: sha256_of(file) for file in files},
    }
    write_json(folder / "golden.json", said)


def _of_target(target: Target, ids: Int[Tensor, " T"]) -> dict[str, Any]:
    """What the checker has to know of it."""
    shape, finish = target.shape(), {k: getattr(target.text, k, None) for k in FINISH}
    return {
        "plain_embedding": torch.equal(target.embedding.weight[ids], target.embed(ids)),
        "target": {
            "name": target.name,
            "fingerprint": target_fingerprint(target),
            "vocab": shape.vocab,
            "hidden": shape.hidden,
            "layers": shape.layers,
            "logits": {k: v for k, v in finish.items() if v is not None},
        },
    }
