"""What a format is, and what all outside formats share.

A format says how a drafter's own keys are called outside (`rename`), and what its config.json and
its shapes imply (`implied`); writing and reading use the same names, so neither can know a key that
the other does not. What a file format leaves open (which layers are tapped, what is fed back, the
recipe of the training) lies beside it in `outrider.json`. Without that file it is resolved where
the format resolves it, and refused where it does not; one written by hand, with the parts
`drafter` and `taps` alone, says it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import drafters
from outrider.models.drafter import Drafter, Shape
from outrider.models.formats.atomic_folder import write_folder
from outrider.models.formats.sidecar import Implied, read_stamp, settings, stamped
from outrider.models.formats.weight_folder import STAMP, Folder, same
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab

JOINS = ["embedding", "state"]  # the order of what a layer reads, in every format there is
WRAPPERS = ("model.", "draft_model.", "module.")  # what frameworks put before every key


@runtime_checkable
class Format(Protocol):
    """One layout of files for some drafters.

    Attributes:
        words: what a user may call it; the first is its name.
        drafters: which it can hold; none: all.
        served: who loads it.
    """

    words: tuple[str, ...]
    drafters: tuple[str, ...]
    served: str

    def refuses(self, drafter: Drafter, target: Target) -> str:
        """Why this very drafter cannot be written so; "" where it can."""

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        """Write the folder, whole or not at all."""

    def knows(self, folder: Folder) -> bool:
        """Whether the folder is of this format."""

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """The drafter, weights as stored, and its `Config`."""


def demand(form: Format, drafter: Drafter, target: Target, cfg: Any) -> None:
    """
    Raises:
        ConfigError: an engine would serve another drafter than this one.
    """
    if why := form.refuses(drafter, target):
        name = getattr(drafter, "cfg", cfg).name
        fix = "Choose another format, or train the drafter without it."
        raise ConfigError("format", form.words[0], f"{name}: {why}.", fix)


class Outside:
    """A format of config.json and safetensors; a subclass fills in the names."""

    words: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    served = ""
    stem = "model"
    joins: list[str] | None = None  # the halves of what its first layer reads

    # ---- what a subclass says ----

    def refuses(self, drafter: Drafter, target: Target) -> str:
        return ""

    def knows(self, folder: Folder) -> bool:
        raise NotImplementedError

    def config(self, drafter: Drafter, target: Target) -> dict[str, Any]:
        """What config.json says."""
        raise NotImplementedError

    def rename(self, own: str, drafter: Drafter, target: Target) -> str | None:
        """What a key of the drafter is called outside; None: it is not stored."""
        raise NotImplementedError

    def given(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """The drafter's weights as they are stored, by its own keys."""
        return dict(drafter.state_dict())

    def lacks(self, own: str, folder: Folder) -> bool:
        """Whether a weight is not stored in this very folder; `taken` adds it."""
        return False

    def taken(self, own: dict[str, Tensor], drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Back from what is stored; adds what is not."""
        return own

    def shared(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Copies of the target's weights that stand in the file, by outside keys."""
        return {}

    def lent(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """Such copies as may stand in a file; they must be equal to the target's."""
        return self.shared(drafter, target)

    def implied(self, folder: Folder, target: Target, stamp: Mapping[str, Any]) -> Implied:
        """What config.json and the shapes say, and outrider.json where they leave it open."""
        raise NotImplementedError

    def keys(self, folder: Folder, target: Target) -> dict[str, str]:
        """Bare key -> key in the file, of all that belong to the drafter."""
        return bare(folder)

    # ---- writing ----

    def tensors(self, drafter: Drafter, target: Target) -> dict[str, Tensor]:
        """All that is stored, by outside keys."""
        out = dict(self.shared(drafter, target))
        for own, value in self.given(drafter, target).items():
            if (name := self.rename(own, drafter, target)) is not None:
                out[name] = value
        return out

    def write(self, drafter: Drafter, target: Target, cfg: Any, folder: Path) -> None:
        """
        Raises:
            ConfigError: an engine would serve another drafter than this one.
            RunError: the folder cannot be written.
        """
        demand(self, drafter, target, cfg)
        config, tensors = self.config(drafter, target), self.tensors(drafter, target)
        stamp = stamped(self.words[0], self.joins, drafter, target, cfg)
        write_folder(folder, config, tensors, stamp, self.stem)

    # ---- reading ----

    def read(self, folder: Path, target: Target) -> tuple[Drafter, Any]:
        """
        Raises:
            RunError: the folder is damaged, ambiguous, for another target, or holds what cannot
                be a drafter of Outrider's.
        """
        opened = Folder(folder)
        stamp = read_stamp(opened, self.words[0], self.joins, target)
        implied = self.implied(opened, target, stamp)
        cfg = settings(opened, implied, stamp)
        vocab = DraftVocab.whole(target.vocab)
        if implied.kept is not None:
            vocab = DraftVocab(implied.kept, target.vocab)
        drafter = unbuilt(cfg, target, vocab, implied.shape)
        if "taps" in stamp and tuple(stamp["taps"]) != drafter.taps:
            why = f"{STAMP} says it reads the outputs of layers {stamp['taps']}"
            raise opened.wrong(f"{why}, and config.json {list(drafter.taps)}: a tap is shifted.")
        self._fill(opened, drafter, target)
        opened.verify(stamp.get("sha256", {}))
        return drafter.eval(), cfg

    def _fill(self, folder: Folder, drafter: Drafter, target: Target) -> None:
        """Every weight of the file into its place; every key of both sides accounted for."""
        whole = drafter.state_dict()
        outer = {key: self.rename(key, drafter, target) for key in whole}
        own = {v: k for k, v in outer.items() if v is not None and not self.lacks(k, folder)}
        lent, where = self.lent(drafter, target), self.keys(folder, target)
        folder.account(where, own, lent)
        stored = folder.read(where[name] for name in own)
        for name, key in own.items():
            _refuse_other(folder, where[name], stored[where[name]], whole[key])
        for name in lent.keys() & where.keys():
            if not same(lent[name], folder.read([where[name]])[where[name]]):
                why = f"{where[name]} is not the target's: it was trained too, or the target is"
                raise folder.wrong(
                    f"{why} another one. Outrider's drafters have none of their own."
                )
        found = {key: stored[where[name]] for name, key in own.items()}
        drafter.load_state_dict(self.taken(found, drafter, target), assign=True)


def _refuse_other(folder: Folder, name: str, value: Tensor, wanted: Tensor) -> None:
    """A weight of another shape or kind than the drafter's."""
    if value.shape != wanted.shape:
        why = f"{name} is {list(value.shape)}, and config.json and target ask for"
        raise folder.wrong(f"{why} {list(wanted.shape)}.")
    if value.is_floating_point() != wanted.is_floating_point():
        kind = str(value.dtype).removeprefix("torch.")
        raise folder.wrong(f"{name} is quantised ({kind}), and is not read so.")


def bare(folder: Folder) -> dict[str, str]:
    """Keys without the names of what a drafter was wrapped in."""
    out: dict[str, str] = {}
    for key in folder.shapes:
        name = key
        while name.startswith(WRAPPERS):
            name = name.partition(".")[2]
        if name in out:
            raise folder.wrong(f"{out[name]} and {key} are the same weight twice.")
        out[name] = key
    return out


def unbuilt(cfg: Any, target: Target, vocab: DraftVocab, shape: Shape) -> Drafter:
    """A drafter whose weights are still to come."""
    with torch.device("meta"):
        return drafters.build(cfg, target, vocab, shape)
