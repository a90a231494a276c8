"""`outrider publish`: export a run's drafter, compare it, write its card, upload it.

A folder gets its name only after every requested format has been exported, decoded with and
checked by its own `verify.py`. The upload comes last.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from outrider.conf.commands import PublishConfig
from outrider.conf.files import write
from outrider.conf.schema import Config
from outrider.eval.hub import file_tree, upload
from outrider.eval.open_drafter import find_drafter
from outrider.eval.publish.card import (
    CardSubject,
    base_model,
    read_newest_plan,
    read_reports,
    write_card,
)
from outrider.eval.publish.reference_outputs import reference_outputs, write_reference
from outrider.eval.publish.round_trip import RoundTrip, first_prompts
from outrider.models import formats, process
from outrider.models.decode.request import Stops
from outrider.models.drafter import Drafter
from outrider.models.formats import native
from outrider.models.formats.atomic_folder import atomic_folder
from outrider.models.formats.external import Format, require_exportable
from outrider.models.formats.sidecar import sidecar_content, write_sidecar
from outrider.models.load import LoadedTarget, load_target, stop_ids
from outrider.models.target import Target

GOLDEN = "outrider-golden-1"  # the layout of golden.json


def publish(config: Config, settings: PublishConfig) -> int:
    """Run the command and return its exit code.

    Raises:
        ConfigError: the format cannot hold the drafter.
        RunError: the run, its target or its prompts cannot be used, the exported drafter differs
            from the run's, or the hub refuses.
    """
    process.set_threads()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if settings.format != "all":
        formats.find(settings.format, config.drafter.name)  # before a model is loaded
    loaded = load_target(replace(config.target, dtype="float32"), process.device())
    rename_target(loaded.target, base_model(config, settings))
    export = prepare_export(config, settings, loaded)
    places = export.places(console)
    with ExitStack() as open_folders:
        for form, place in places:
            partial = open_folders.enter_context(atomic_folder(place))
            comparison = export.build(form, partial)
            console.print(f"{form.names[0]}: {comparison}", highlight=False, soft_wrap=True)
    for form, place in places:
        console.print(file_tree(place, str(place)), highlight=False)
        repo = export.repo(form)
        if repo is not None and not settings.dry_run:
            upload(place, repo, settings.private, console)
        elif repo is not None:
            console.print(f"dry run: not uploaded to {repo}", highlight=False)
    return 0


def rename_target(target: Target, name: str | None) -> None:
    """Name the target by its hub id or the last part of its path; no local path is published."""
    target.name = name or Path(target.name).name
    target.config.name_or_path = target.name


def prepare_export(config: Config, settings: PublishConfig, loaded: LoadedTarget) -> "Export":
    """Load the run's drafter and decode its prompts.

    Raises:
        ConfigError: the requested format cannot hold the drafter.
        RunError: the run has no drafter, or no prompt that fits.
    """
    drafter, cfg = native.FORMATS[0].read(find_drafter(config), loaded.target)
    if settings.format != "all":
        form = formats.find(settings.format, cfg.name)
        require_exportable(form, drafter, loaded.target, cfg)
    drafter.to(loaded.target.device).eval().requires_grad_(False)
    drafter.patch_target(loaded.target)
    drafter.to(torch.float32)
    prompts = first_prompts(config, loaded, settings.prompts, settings.new_tokens)
    depth = min(cfg.depths, drafter.max_depth)
    stops = Stops(stop_ids(loaded.tokenizer, loaded.target))
    trip = RoundTrip(loaded.target, drafter, prompts, settings.new_tokens, depth, stops)
    return Export(config, settings, loaded, drafter, cfg, trip)


@dataclass
class Export:
    """A run's drafter and what its folders are made from."""

    config: Config
    settings: PublishConfig
    loaded: LoadedTarget
    drafter: Drafter
    cfg: Any
    trip: RoundTrip

    def places(self, console: Console) -> list[tuple[Format, Path]]:
        """Return the requested formats and the folder of each; print why others are left out."""
        name, target = self.cfg.name, self.loaded.target
        if self.settings.format != "all":
            return [self._place(formats.find(self.settings.format, name))]
        places = []
        for word, reason in formats.export_refusals(self.drafter, name, target).items():
            if reason:
                message = f"{word}: left out, {reason}"
                console.print(message, style="yellow", highlight=False, soft_wrap=True)
            else:
                places.append(self._place(formats.find(word, name)))
        return places

    def _place(self, form: Format) -> tuple[Format, Path]:
        word = form.names[0]
        if self.settings.out is None:
            return form, Path(self.config.run.dir) / "published" / word
        out = Path(self.settings.out).expanduser()
        return form, out / word if self.settings.format == "all" else out

    def repo(self, form: Format) -> str | None:
        """Return the hub repository of a format."""
        name = self.settings.repo
        if name is None or self.settings.format != "all":
            return name
        return f"{name}-{form.names[0]}"

    def build(self, form: Format, folder: Path) -> str:
        """Write and check a whole folder; return what was compared.

        Raises:
            ConfigError: the format cannot hold the drafter.
            RunError: the exported drafter differs from the run's.
        """
        comparison = export_folder(form, self.cfg, self.trip, folder, self.loaded.tokenizer.decode)
        run = Path(self.config.run.dir)
        reports, other = read_reports(run, self.drafter)
        subject = CardSubject(
            self.config, self.settings, self.drafter, self.cfg, self.loaded.target, form.names[0],
            reports, other, read_newest_plan(run), comparison,
        )  # fmt: skip
        write(folder / "README.md", write_card(subject, self.repo(form)).encode())
        return comparison


def export_folder(
    form: Format, cfg: Any, trip: RoundTrip, folder: Path, decode: Callable[[list[int]], str]
) -> str:
    """Write drafter, reference outputs and verify.py, and compare them; all but the card.

    Raises:
        ConfigError, RunError: as `Export.build`.
    """
    drafter, target, word = trip.drafter, trip.target, form.names[0]
    form.write(drafter, target, cfg, folder)
    if word == "native":  # its config.json holds the settings, so it is written without a sidecar
        write_sidecar(folder, sidecar_content(word, None, drafter, target, cfg))
    outputs = reference_outputs(drafter, target, trip.longest_text(), trip.depth)
    text = decode(outputs["ids"].tolist())
    about = {"kind": GOLDEN, "drafter": cfg.name, "format": word, "text": text}
    write_reference(folder, outputs, drafter, target, about)
    return trip.compare_with_export(folder)
