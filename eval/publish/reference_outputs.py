"""Reference outputs of a published drafter: `golden/outputs.safetensors` and `golden.json`.

Engines read every safetensors file beside config.json as weights, so the outputs have a folder.
`outputs.safetensors` holds a short text, the target's outputs on it that the drafter reads (tapped
layers, last states, embeddings), and the drafter's logits at every depth after some of its rows,
for some tokens, with the rows of the head for those tokens. `golden.json` holds what the drafter
was made for, and the sha256 of every file.

Legend: T tokens of the text, R rows drafted from, D depths, S tokens that are compared, Vd draft
vocabulary.
"""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.conf import files, tensor_files
from outrider.conf.errors import RunError
from outrider.conf.quantities import format_count
from outrider.eval.decoder import Decoder
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.formats.native import target_fingerprint
from outrider.models.interface import Trace
from outrider.models.target.target import Target

ROWS = 3
LONGEST = 12  # tokens of the text, besides one for each depth
SPREAD = 64  # compared tokens, evenly over the draft vocabulary, besides the most likely
MOST_LIKELY = 2
TOLERANCE = 1e-3  # of the largest value: another machine rounds sums in another order
FINISH = ("logits_scaling", "logit_scale", "final_logit_softcapping")  # after a target's head
UNHASHED = ("README.md", "verify.py")  # the user may edit the first; the second does the check
TENSORS, FACTS = "golden/outputs.safetensors", "golden.json"
OLD_TENSORS = "golden.safetensors"  # of versions up to 0.1.0
FIX = "Fetch the folder again."
VERIFY = Path(__file__).with_name("verify_folder.py")


@torch.no_grad()
def reference_outputs(
    drafter: Drafter, target: Target, ids: Sequence[int], depths: int
) -> dict[str, Tensor]:
    """Return the content of outputs.safetensors, computed on the end of the text `ids`.

    Raises:
        RunError: the text is too short for so many depths.
    """
    text = torch.tensor(list(ids)[-(depths + LONGEST) :], device=target.device)
    if len(text) < depths + ROWS + 1:
        message = f"A text of {len(text)} tokens is too short to compare {depths} depths."
        raise RunError(message, "Use a larger publish.new_tokens.")
    last = len(text) - 2 - depths
    return _outputs(drafter, target, text, sorted({1, last // 2, last}), depths)


def _outputs(
    drafter: Drafter,
    target: Target,
    text: Int[Tensor, " T"],
    rows: list[int],
    depths: int,
    columns: Int[Tensor, " S"] | None = None,
) -> dict[str, Tensor]:
    """Return the outputs on a text; `columns` are draft ids, None chooses them."""
    target.set_taps(drafter.taps)
    positions, zeros = torch.arange(len(text), device=text.device), torch.zeros_like(text)
    answer = torch.ones_like(zeros[None], dtype=torch.bool)
    trace = target.trace(text[None], answer, zeros[None], positions[None])
    logits = torch.stack([_draft_logits(drafter, trace, row, depths) for row in rows], dim=1)
    columns = _compared_columns(logits) if columns is None else columns.to(logits.device)
    tokens = drafter.vocab.target_ids.to(logits.device)[columns]
    out = {"ids": text, "rows": torch.tensor(rows), "tokens": tokens}
    out |= {
        "logits": logits[:, :, columns],
        "embedded": target.embedding(text),
        "last": trace.last[0],
    }
    width = trace.last.shape[-1]
    for i, tap in enumerate(drafter.taps):
        out[f"tap.{tap}"] = trace.taps[0, :, i * width : (i + 1) * width]
    out["head"] = target.head_weight[tokens]
    if (bias := getattr(target.head, "bias", None)) is not None:
        out["head_bias"] = bias[tokens]
    return {k: v.float() if v.is_floating_point() else v for k, v in out.items()}


def _draft_logits(drafter: Drafter, trace: Trace, row: int, depths: int) -> Float[Tensor, "D Vd"]:
    """Return the logits of every depth after rows 0..row; the draft tokens are the text's own.

    A drafter that needs the target's cache for `step` unrolls, which gives the same logits.
    """
    if isinstance(drafter, TargetDrafter):
        guesses = (guess for guess in drafter.unroll(trace) if guess.depth)
        at = torch.tensor([row], device=trace.ids.device)
        rows = ((guess.states(at), guess.depth) for guess in islice(guesses, depths))
        return torch.cat([drafter.heads_by_depth([state], [depth]) for state, depth in rows])
    prefix = {k: v[:, : row + 1] for k, v in vars(trace).items() if v is not None}
    state, out = drafter.absorb(None, Trace(**prefix)), []
    root = torch.zeros(1, dtype=torch.long, device=trace.ids.device)
    for depth in range(1, depths + 1):
        ids = trace.ids[0, row + depth : row + depth + 1]
        logits, state = drafter.step(state, depth, ids, root)
        out.append(logits[0])
    return torch.stack(out)


def _compared_columns(logits: Float[Tensor, "D R Vd"]) -> Int[Tensor, " S"]:
    """Return draft ids: the most likely ones, and some of all the others."""
    size = logits.shape[-1]
    best = logits.topk(min(MOST_LIKELY, size)).indices.flatten()
    spread = torch.linspace(0, size - 1, min(SPREAD, size), device=logits.device).round().long()
    out: Tensor = torch.cat([best, spread]).unique()
    return out


def write_reference(
    folder: Path,
    outputs: dict[str, Tensor],
    drafter: Drafter,
    target: Target,
    about: dict[str, Any],
) -> None:
    """Write both files and `verify.py` beside the drafter; `about` are more facts."""
    (folder / TENSORS).parent.mkdir(exist_ok=True)
    tensor_files.write_tensors(folder / TENSORS, outputs, {"format": "pt"})
    files.write(folder / "verify.py", VERIFY.read_bytes())
    hashed = sorted(f for f in folder.rglob("*") if f.is_file() and f.name not in UNHASHED)
    shape, ids = target.shape(), outputs["ids"].to(target.device)
    finish = {k: getattr(target.text_config, k, None) for k in FINISH}
    facts = {
        **about,
        "taps": list(drafter.taps),
        "plain_embedding": torch.equal(target.embedding(ids), target.embed(ids)),
        "target": {
            "name": target.name, "fingerprint": target_fingerprint(target),
            "vocab": shape.vocab, "hidden": shape.hidden, "layers": shape.layers,
            "logits": {k: v for k, v in finish.items() if v is not None},
        },
        "sha256": {str(f.relative_to(folder)): files.sha256_of(f) for f in hashed},
    }  # fmt: skip
    files.write_json(folder / FACTS, facts)


def compare_with_target(folder: Path, target: str) -> str:
    """Load target and drafter, and return what `compare_outputs` compared.

    `verify.py` of published folders calls this function: keep its name and arguments.

    Args:
        target: "tiny", "smollm2", a folder or hub id.

    Raises:
        ConfigError, RunError: the target or the drafter cannot be loaded, or an output differs.
    """
    decoder = Decoder.from_pretrained(target, folder, dtype="float32")
    assert decoder.drafter is not None, "a drafter was given"
    return compare_outputs(folder, decoder.drafter, decoder.target)


@torch.no_grad()
def compare_outputs(folder: Path, drafter: Drafter, target: Target) -> str:
    """Compare a loaded drafter's outputs with the stored ones.

    Raises:
        RunError: an output is missing or differs by more than TOLERANCE of its largest value.
    """
    facts = files.read_json(folder / FACTS, FIX)
    name = TENSORS if (folder / TENSORS).exists() else OLD_TENSORS
    file = folder / name
    expected = tensor_files.read_tensors(file, facts.get("sha256", {}).get(name), FIX)
    try:
        columns = drafter.vocab.to_draft(expected["tokens"].to(drafter.vocab.d2t.device))
        if bool((columns < 0).any()):
            raise IndexError("a compared token is not in the draft vocabulary")
        rows, depths = expected["rows"].tolist(), len(expected["logits"])
        text = expected["ids"].to(target.device)
        outputs = _outputs(drafter, target, text, rows, depths, columns)
        differences = {
            name: relative_difference(value, expected[name]) for name, value in outputs.items()
        }
    except (IndexError, KeyError, RuntimeError, TypeError) as error:
        message = f"{file} does not fit this drafter: {type(error).__name__} {error}."
        raise RunError(message, FIX) from None
    name, largest = max(differences.items(), key=lambda item: item[1])
    if not largest <= TOLERANCE:
        message = f"{file}: {name} of the drafter in the folder differs by {largest:.2g}"
        raise RunError(f"{message} of the largest value.", FIX)
    size = f"{format_count(depths, 'depth')} from {format_count(len(rows), 'row')}"
    return f"golden logits: {size}, largest difference {largest:.1g}"


def relative_difference(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference in units of the largest value (1 at least); NaN is infinite."""
    ours = ours.to(expected.device, torch.float64)
    if ours.shape != expected.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    off = (ours - expected).abs().max() / expected.double().abs().max().clamp(min=1.0)
    return float(off.nan_to_num(nan=float("inf")))
