"""`outrider publish`: export, read back, prove, describe, then give the folder its name.

Nothing appears under its name before every format that was asked for has been exported, decoded
with, and checked by its own verify.py; and nothing is uploaded before that.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.conf.errors import ConfigError
from outrider.conf.files import sha256_of, write, write_json
from outrider.eval.hub import tree, upload
from outrider.eval.open_drafter import find_drafter
from outrider.eval.publish.bundle import FAMILIES
from outrider.eval.publish.card import Subject, base_model, read_plan_of, read_reports, write_card
from outrider.eval.publish.reference_outputs import golden, write_golden
from outrider.eval.publish.round_trip import Proof, first_prompts
from outrider.models import formats
from outrider.models.decode.request import Stops
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.formats.atomic_folder import appearing
from outrider.models.formats.external import Format, demand
from outrider.models.formats.sidecar import stamped
from outrider.models.formats.weight_folder import STAMP
from outrider.models.load import Loaded, load, stop_ids
from outrider.models.target import Target
from outrider.train import distributed as start
from outrider.train.publishing import PublishConfig
from outrider.train.settings import Config

GOLDEN = "outrider-golden-1"


def publish(config: Config, wanted: PublishConfig) -> int:
    """The verb.

    Raises:
        ConfigError: the drafter cannot be written so.
        RunError: the run, its target or its prompts cannot be used, the exported drafter is not
            the run's, or the hub refuses.
    """
    start.use_cores()
    console = Console(width=None if sys.stdout.isatty() else 120)
    refuse(config.drafter.name, wanted.format)
    loaded = load(replace(config.target, dtype="float32"), start.device())
    call(loaded.target, base_model(config, wanted))
    work = prepared(config, wanted, loaded)
    with ExitStack() as open_folders:
        for form, place in work.places(console):
            partial = open_folders.enter_context(appearing(place))
            said = work.build(form, partial)
            console.print(f"{form.words[0]}: {said}", highlight=False, soft_wrap=True)
    for form, place in work.done:
        console.print(tree(place, str(place)), highlight=False)
        repo = work.repo(form)
        if repo is not None and not wanted.dry_run:
            upload(place, repo, wanted.private, console)
        elif repo is not None:
            console.print(f"dry run: not uploaded to {repo}", highlight=False)
    return 0


def refuse(drafter: str, word: str) -> None:
    """What cannot be published, before a model is loaded.

    Raises:
        ConfigError: no such format holds the drafter, or nothing checks it.
    """
    if drafter not in FAMILIES:
        fix = "Write eval/publish/check/<drafter>.py, and name it in FAMILIES of bundle.py."
        raise ConfigError("drafter.name", drafter, "It has no checker (verify.py).", fix)
    if word != "all":
        formats.find(word, drafter)


def call(target: Target, name: str | None) -> None:
    """What others call the target: its hub id, or else the last part of its place on this machine,
    which is nobody's business.
    """
    target.name = name or Path(target.name).name
    target.config.name_or_path = target.name


def prepared(config: Config, wanted: PublishConfig, loaded: Loaded) -> "Work":
    """The run's drafter at work on its own prompts.

    Raises:
        ConfigError: the one format that is wanted cannot hold it.
        RunError: the run has no drafter, or nothing it could decode.
    """
    drafter, cfg = native.FORMATS[0].read(find_drafter(config), loaded.target)
    if wanted.format != "all":
        demand(formats.find(wanted.format, cfg.name), drafter, loaded.target, cfg)
    drafter.to(loaded.target.device).eval().requires_grad_(False)
    drafter.change(loaded.target)
    drafter.to(torch.float32)
    prompts = first_prompts(config, loaded, wanted.prompts, wanted.new_tokens)
    depth = min(cfg.depths, drafter.reach)
    stops = Stops(stop_ids(loaded.tokenizer, loaded.target))
    proof = Proof(loaded.target, drafter, prompts, wanted.new_tokens, depth, stops)
    return Work(config, wanted, loaded, drafter, cfg, proof)


@dataclass
class Work:
    """A drafter on its way out."""

    config: Config
    wanted: PublishConfig
    loaded: Loaded
    drafter: Drafter
    cfg: Any
    proof: Proof

    def __post_init__(self) -> None:
        self.done: list[tuple[Format, Path]] = []

    def places(self, console: Console) -> list[tuple[Format, Path]]:
        """The formats that were asked for, and where each goes."""
        name, target = self.cfg.name, self.loaded.target
        if self.wanted.format != "all":
            self.done = [self._place(formats.find(self.wanted.format, name))]
            return self.done
        for word, why in formats.fitting(self.drafter, name, target).items():
            if why:
                said = f"{word}: left out, {why}"
                console.print(said, style="yellow", highlight=False, soft_wrap=True)
            else:
                self.done.append(self._place(formats.find(word, name)))
        return self.done

    def _place(self, form: Format) -> tuple[Format, Path]:
        word, every = form.words[0], self.wanted.format == "all"
        if self.wanted.out is None:
            return form, Path(self.config.run.dir) / "published" / word
        out = Path(self.wanted.out).expanduser()
        return form, out / word if every else out

    def repo(self, form: Format) -> str | None:
        """The repository of a format."""
        name = self.wanted.repo
        if name is None or self.wanted.format != "all":
            return name
        return f"{name}-{form.words[0]}"

    def build(self, form: Format, folder: Path) -> str:
        """Everything into a folder that nobody sees yet; says what was proved.

        Raises:
            ConfigError: an engine would serve another drafter.
            RunError: what was written is not what the run has.
        """
        said = export(form, self.cfg, self.proof, folder, self.loaded.tokenizer.decode)
        write(folder / "README.md", self._card(form, said).encode())
        return said

    def _card(self, form: Format, said: str) -> str:
        run = Path(self.config.run.dir)
        reports, other = read_reports(run, self.drafter)
        subject = Subject(
            self.config, self.wanted, self.drafter, self.cfg, self.loaded.target, form.words[0],
            reports, other, read_plan_of(run), said,
        )  # fmt: skip
        return write_card(subject, self.repo(form))


def export(
    form: Format, cfg: Any, proof: Proof, folder: Path, decode: Callable[[list[int]], str]
) -> str:
    """The drafter, its golden numbers and verify.py in a folder, proved; all but the card.

    Raises:
        ConfigError, RunError: as `Work.build`.
    """
    drafter, target, word = proof.drafter, proof.target, form.words[0]
    form.write(drafter, target, cfg, folder)
    if word == "native":  # the only one without outrider.json: its config.json has the settings
        stamp = stamped(word, None, drafter, target, cfg)
        hashes = {f.name: sha256_of(f) for f in sorted(folder.glob("*.safetensors"))}
        write_json(folder / STAMP, {**stamp, "sha256": hashes})
    numbers = golden(drafter, target, proof.text(), proof.depth)
    text = decode(numbers["ids"].tolist())
    about = {"kind": GOLDEN, "drafter": cfg.name, "format": word, "text": text}
    write_golden(folder, numbers, drafter, target, about)
    return proof.hold(folder)
