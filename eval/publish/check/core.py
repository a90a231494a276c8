"""Checks the published drafter it lies beside: `python verify.py [FOLDER]`.

It needs torch and safetensors, for a draft model transformers, and nothing of what wrote the
folder. It asks whether the files are the ones that were written (golden.json has their hashes),
whether every weight has a name and a shape that config.json asks for, and whether the network that
the files describe, written out below once more, says the logits that the drafter said before it was
published. What the target says of a short text lies in golden.safetensors, so no target is needed.

A guess at depth d, row t, is about token x_{t+1+d}: the drafter has read what the target says of
x_0..x_t, and the tokens x_{t+1}..x_{t+d}.

Legend: T tokens of the text, R rows guessed from, D depths, S tokens whose logits are compared, H
hidden size, N rows of a pass. `w` are weights in the names used here, `g` golden.safetensors.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = "golden.safetensors"
TOLERANCE = 1e-3  # of the largest logit: sums are rounded otherwise on another machine
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
UNFIT = (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)
Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class Wrong(Exception):
    """The folder does not hold the drafter that was published."""


def main(family: "type[Family]", folder: Path) -> int:
    """Print OK, or all that differs; returns the exit code."""
    problems, said = check(family, folder)
    for problem in problems:
        print(f"WRONG: {problem}")
    print("" if problems else f"OK: {said}", end="" if problems else "\n")
    return int(bool(problems))


@torch.no_grad()
def check(family: "type[Family]", folder: Path) -> tuple[list[str], str]:
    """What differs, the cause first; and what was found where nothing does."""
    try:
        golden = read_json(folder / "golden.json")
        if gone := sorted({"sha256", "format", "drafter", "taps", "target"} - golden.keys()):
            raise Wrong(f"golden.json lacks {gone[0]}")
        said, problems = "", changed(folder, golden)
        try:
            said = compared(family, folder, golden)
        except Wrong as wrong:
            problems.insert(0, str(wrong))
        except UNFIT as error:
            problems.insert(0, f"config.json is not understood: {type(error).__name__} {error}")
        return problems, said
    except Wrong as wrong:
        return [str(wrong)], ""


def compared(family: "type[Family]", folder: Path, golden: dict[str, Any]) -> str:
    """The network of the files against the logits of the drafter; says how near they are."""
    ours = family(folder, golden)
    if ours.wanted is not None:
        account(ours.w, ours.wanted, ours.optional)
    ours.agree_ends()
    off = distance(ours.logits(), ours.g["logits"])
    if off > TOLERANCE:
        raise Wrong(f"its guesses are not the drafter's (off by {off:.2g}): {ours.cause()}")
    what = f"{golden['drafter']} for {golden['target']['name']}, format {golden['format']}"
    return f"{what}: {ours.depths} depths from {len(ours.rows)} rows, off by {off:.1g} at most"


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, in units of the largest logit; a NaN is as far as can be."""
    off = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))
    return math.inf if math.isnan(off) else off


def agree(why: str, ours: Tensor, theirs: Tensor) -> None:
    if distance(ours, theirs) > TOLERANCE:
        raise Wrong(why)


# ---- files ---------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise Wrong(f"{file.name} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise Wrong(f"{file.name} does not hold a json object")
    return found


def changed(folder: Path, golden: dict[str, Any]) -> list[str]:
    """Files whose bytes are not the ones that were written."""
    out = []
    for name, sha256 in golden["sha256"].items():
        if not (folder / name).is_file():
            out.append(f"{name} is missing")
        elif digest(folder / name) != sha256:
            out.append(f"{name} is not the file that was published (its sha256 differs)")
    return out


def digest(file: Path) -> str:
    """Its sha256."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def read_weights(file: Path) -> Weights:
    """A safetensors file, and no other, in float32."""
    try:
        with file.open("rb") as stream:
            start = stream.read(9)
        if start.startswith(PICKLES) and start[8:] != b"{":
            raise Wrong(f"{file.name} is a pickle in disguise; it is not opened")
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise Wrong(f"{file.name} is truncated or damaged: {error}") from None
    return {k: v.float() if v.is_floating_point() else v for k, v in found.items()}


def drafter_files(folder: Path) -> Weights:
    """All weights of the folder, those of golden.safetensors left aside."""
    files = [f for f in sorted(folder.glob("*.safetensors")) if f.name != GOLDEN]
    if not files:
        raise Wrong("there is no file of weights")
    out: Weights = {}
    for file in files:
        out.update(read_weights(file))
    return out


def account(w: Weights, wanted: Shapes, optional: set[str]) -> None:
    """Every weight is known, every known one is there and of the right shape."""
    missing, stray = sorted(wanted.keys() - w.keys()), sorted(w.keys() - wanted.keys() - optional)
    said = [f"{key} is missing" for key in missing]
    for key in stray:
        meant = get_close_matches(key, missing, 1)
        said.append(f"{key} is unknown" + (f" (a renamed {meant[0]}?)" if meant else ""))
    for key in sorted(wanted.keys() & w.keys()):
        if tuple(w[key].shape) != wanted[key]:
            asked = f"config.json asks for {list(wanted[key])}"
            said.append(f"{key} is {list(w[key].shape)} and {asked}")
    if said:
        more = f", and {len(said) - 4} more" if len(said) > 4 else ""
        raise Wrong("; ".join(said[:4]) + more)


# ---- a drafter -----------------------------------------------------------------------------------


class Family:
    """A drafter: the weights it needs, and what it guesses.

    Attributes:
        form: of the files.
        recipe: the drafter's settings; outrider.json has them where the format has no place.
        wanted: names and shapes of its weights; None: it accounts for them itself.
        joints: matrices that read [embedding; state].
        own_head: it does not borrow the target's.
        deeper: why its first guesses may agree, and the others differ.
    """

    wanted: Shapes | None = None
    joints: tuple[str, ...] = ()
    own_head = False
    deeper = ""

    def __init__(self, folder: Path, golden: dict[str, Any]) -> None:
        self.folder, self.golden, self.form = folder, golden, str(golden["format"])
        self.native = self.form == "native"
        self.config, self.g = read_json(folder / "config.json"), read_weights(folder / GOLDEN)
        stamp = self.config if self.native else read_json(folder / "outrider.json")
        self.recipe: dict[str, Any] = stamp["drafter"]
        self.depths, self.rows = len(self.g["logits"]), self.g["rows"].tolist()
        found = drafter_files(folder)
        self.w = {self.called(key.removeprefix("vocab.")): v for key, v in found.items()}
        if len(self.w) != len(found):
            raise Wrong("two weights have one and the same meaning")
        self.optional = {"d2t", "t2d"} if self.native else set[str]()
        self.prepare()

    def called(self, key: str) -> str:
        """What a weight of the files is called here."""
        return key

    def prepare(self) -> None:
        """Read the settings; say `wanted`."""

    @property
    def body(self) -> dict[str, Any]:
        """The part of config.json that describes the layers."""
        config = self.config
        return dict(config.get("transformer_layer_config") or config.get("model") or config)

    def vocabulary(self) -> int:
        """Tokens that the target knows."""
        return int(self.config["target"]["vocab"] if self.native else self.body["vocab_size"])

    def logits(self) -> Tensor:
        """[D, R, S]"""
        raise NotImplementedError

    # ---- ends of the target ----

    def borrowed(self, state: Tensor) -> Tensor:
        """The target's head, of the tokens that are compared."""
        said = state @ self.g["head"].T
        if "head_bias" in self.g:
            said = said + self.g["head_bias"]
        return finished(said, self.golden["target"].get("logits") or {})

    def kept(self) -> Tensor | None:
        """Ids of the draft vocabulary; None: every token."""
        if "token_map" in self.w:
            return self.w["token_map"]
        d2t = self.w.get("d2t")
        return None if d2t is None else d2t + torch.arange(len(d2t))

    def columns(self, count: int) -> Tensor:
        """Where the compared tokens lie among the rows of a head of its own."""
        kept, tokens = self.kept(), self.g["tokens"]
        if kept is None:
            return tokens
        if len(kept) != count:
            raise Wrong(f"the draft vocabulary has {len(kept)} tokens and the head {count} rows")
        place = (kept[None] == tokens[:, None]).long()
        if not bool(place.any(-1).all()):
            lost = int(tokens[~place.any(-1)][0])
            raise Wrong(f"d2t or token_map does not name token {lost}: its ids were changed")
        return place.argmax(-1)

    def agree_ends(self) -> None:
        """Copies of the target's ends are the target's; both maps name the same tokens."""
        for key, value in self.w.items():
            if key.endswith("embed_tokens.weight") and self.golden["plain_embedding"]:
                agree(
                    f"{key} is not the target's embedding", value[self.g["ids"]], self.g["embedded"]
                )
            if re.fullmatch(r"(stages\.\d+\.)?lm_head\.weight", key) and not self.own_head:
                at = self.columns(len(value)) if "token_map" in self.w else self.g["tokens"]
                agree(f"{key} is not the target's head", value[at], self.g["head"])
        kept, marks = self.kept(), self.w.get("t2d")
        named = None if marks is None else torch.nonzero(marks).flatten()
        if kept is not None and named is not None and not torch.equal(named, kept):
            raise Wrong("d2t and t2d do not name the same tokens")

    # ---- why it guesses otherwise ----

    def cause(self) -> str:
        """What makes the guesses agree once it is undone; or at which depth they part."""
        for why, undo in self.suspects():
            kept = dict(self.w)
            undo()
            again = distance(self.logits(), self.g["logits"])
            self.w = kept
            if again <= TOLERANCE:
                return why
        pairs = zip(self.logits(), self.g["logits"], strict=True)
        off = [d for d, pair in enumerate(pairs, start=1) if distance(*pair) > TOLERANCE]
        which = ", ".join(map(str, off))
        if off[0] > 1:
            return f"its guesses of depths {which} differ{self.deeper}"
        return "a weight or a setting that it depends on was changed"

    def suspects(self) -> list[tuple[str, Callable[[], None]]]:
        return [("the halves of what its layer reads are swapped", self.swap)]

    def swap(self) -> None:
        for key in self.joints:
            self.w[key] = torch.cat(self.w[key].chunk(2, dim=1)[::-1], dim=1)


def finished(logits: Tensor, settings: dict[str, float]) -> Tensor:
    """What the target's family does behind its head."""
    logits = logits / settings.get("logits_scaling", 1.0) * settings.get("logit_scale", 1.0)
    cap = settings.get("final_logit_softcapping")
    return logits if cap is None else torch.tanh(logits / cap) * cap
