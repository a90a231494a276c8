"""All pairs of drafter and format, and functions that compare drafters."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.models import drafters, formats
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.formats.external import Format
from outrider.models.target.target import Target
from tests import tiny

EAGLE3: list[dict[str, Any]] = [
    {},
    {"layers": 3, "head_dim": 12},
    {"fc_norm": "each", "feedback": "normed"},
    {"fc_norm": "joint", "feedback": "normed"},
    {"taps": (0, 2)},
]
NORMED: dict[str, Any] = {"residual": "normed", "init": "random"}
QK: dict[str, Any] = {"qk_norm": True}
TAPS: dict[str, Any] = {"taps": (0, 2), "layers": 1}
WINDOW: dict[str, Any] = {"window": 5}
ANCHORED: dict[str, Any] = {"window": 5, "window_from": "anchor"}
CAUSAL: dict[str, Any] = {"causal": True}
DFLASH: dict[str, list[dict[str, Any]]] = {
    "zlab": [{}, TAPS, WINDOW, {"layers": 3, "window": 5, "window_layers": (0, 2)}],
    "vllm": [{}, CAUSAL, WINDOW | CAUSAL],
    "transformers": [{}, TAPS, WINDOW],
    "speculators": [{}, ANCHORED, ANCHORED | CAUSAL, {"shifted": True}],
}
DSPARK: dict[str, list[dict[str, Any]]] = {
    "deepspec": [{}, {"markov_head": "gated", "confidence_head": "slot"}, {"markov_head": "rnn"}],
    "vllm": [{"markov_rank": 8, "confidence_head": "markov"}],
    "speculators": [{"markov_head": "rnn", "confidence_head": "markov"}, {"shifted": False}],
}


class Case(NamedTuple):
    """A drafter's configuration and the format it is written in."""

    name: str
    word: str
    changes: dict[str, Any]
    whole: bool  # whether the draft vocabulary is full

    def drafter(self, target: Target) -> Drafter:
        return randomise(tiny.drafter(self.name, target, vocab(self.whole), **self.changes))

    @property
    def format(self) -> Format:
        return formats.find(self.word, self.name)

    def __str__(self) -> str:
        changes = ",".join(f"{k}={v}" for k, v in self.changes.items())
        return f"{self.name}-{self.word}-{changes}{'-whole' * self.whole}"


def vocab(whole: bool) -> Any:
    return tiny.vocab(tiny.VOCAB if whole else tiny.DRAFTED)


def _cases() -> list[Case]:
    cases = [Case("eagle3", w, c, False) for w in ("sglang", "vllm", "speculators") for c in EAGLE3]
    cases += [Case("eagle3", w, {}, True) for w in ("sglang", "vllm", "speculators")]
    cases += [Case("eagle3", w, NORMED, False) for w in ("vllm", "speculators")]
    cases += [Case("eagle3", "speculators", {**QK, "taps": (1,), "window": 64}, False)]
    for name in ("eagle", "hass"):
        cases += [Case(name, word, {"bias": False}, True) for word in ("eagle", "sglang", "vllm")]
        cases += [Case(name, word, {"bias": True}, True) for word in ("eagle", "sglang")]
    cases += [Case("medusa", "medusa", {"own_heads": own}, True) for own in (True, False)]
    for own in (True, False):
        changes = {"own_heads": own, "res_layers": 2}
        cases += [Case("medusa", "vllm", changes, whole) for whole in (True, False)]
    cases += [Case("mtp", "deepseek", {}, True)]
    state_first = {"mode": "recurrent", "order": "state_first"}
    for word, norms in (("deepseek", {}), ("qwen3_next", {}), ("speculators", QK)):
        cases += [Case("mtp", word, {**state_first, **norms}, True)]
        cases += [Case("mtp", word, {"depths": 1, "feed": "raw", **norms}, True)]
    cases += [Case("mtp", "qwen3_next", {"depths": 1}, True)]
    cases += [Case(name, "transformers", {}, True) for name in ("draft_lm", "layerskip")]
    for word in ("zlab", "vllm", "transformers", "speculators"):
        cases += [Case("dflash", word, changes, True) for changes in DFLASH[word]]
    cases += [Case("dflash", word, {}, False) for word in ("vllm", "speculators")]
    for word in ("deepspec", "vllm", "speculators"):
        cases += [Case("dspark", word, changes, True) for changes in DSPARK[word]]
    cases += [Case("dspark", word, {}, False) for word in ("vllm", "speculators")]
    for word in ("vllm", "speculators"):
        cases += [Case("p_eagle", word, changes, False) for changes in EAGLE3[:2]]
    cases += [Case("p_eagle", "vllm", {"fc_norm": "each"}, True)]
    return cases + [Case(name, "native", {}, False) for name in drafters.trained_names()]


CASES = _cases()


def randomise(drafter: Drafter) -> Drafter:
    """Change every weight from its initial value; norms stay where subtracting 1 is exact."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in drafter.named_parameters():
            if value.ndim == 1 and "norm" in name:
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
            elif not value.any():
                value.copy_(0.3 * torch.randn(value.shape, generator=generator))
    return drafter.eval()


@torch.no_grad()
def logits(drafter: Drafter, target: Target) -> list[Tensor]:
    """Return the logits of every depth on `tiny`'s packed rows, then of two decoding steps."""
    target.set_taps(drafter.taps)
    trace, out = tiny.packed_trace(target), []
    for guess in drafter.unroll(trace):
        states = guess.states(trace.supervised_rows(guess.depth))
        rows = drafter.heads_by_depth([states], [guess.depth])
        out.append(rows)
    if isinstance(drafter, TargetDrafter):  # decodes with the target's cache only
        return out
    state = drafter.absorb(None, tiny.verified_rows(trace, 1, 0, 6))
    for depth, token in ((1, 3), (2, 7)):
        if depth <= min(drafter.max_depth, len(out)):
            rows, state = drafter.step(state, depth, torch.tensor([token]), torch.tensor([0]))
            out.append(rows)
    return out


def assert_equal_weights(one: Drafter, other: Drafter) -> None:
    """Compare every tensor bit for bit."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.dtype == theirs[key].dtype, key
        assert torch.equal(value, theirs[key]), key


def weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def stored_names(folder: Path) -> set[str]:
    """Return the names of the tensors that outrider.json lists."""
    return set(json.loads((folder / "outrider.json").read_text())["tensors"])


def rewrite_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the weights of a folder with one weight file, and remove outrider.json."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    (folder / "outrider.json").unlink(missing_ok=True)


def publish_as(
    drafter: Drafter, target: Target, path: Path, word: str = "sglang", **changes: object
) -> Path:
    """Write a folder as on a hub: without outrider.json, some config fields changed or removed."""
    name = str(vars(drafter)["cfg"].name)
    formats.find(word, name).write(drafter, target, None, path)
    (path / "outrider.json").unlink()
    return edit_config(path, **changes)


def edit_config(path: Path, **changes: object) -> Path:
    """Change fields of config.json; None removes them."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    removed = {k for k, v in changes.items() if v is None}
    rest = {k: v for k, v in config.items() if k not in removed}
    (path / "config.json").write_text(json.dumps(rest))
    return path


def rename_keys(path: Path, name: Callable[[str], str]) -> Path:
    def change(tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors[name(key)] = tensors.pop(key)

    rewrite_weights(path, change)
    return path
