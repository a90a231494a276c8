"""`outrider publish`: export a run's drafter, compare it, write its card, upload it.

A folder gets its name only after every requested format has been exported, decoded with and
checked by its own `verify.py`. The upload comes last.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.conf.command_settings import PublishConfig
from outrider.conf.console import Console
from outrider.conf.files import write
from outrider.conf.schema import Config
from outrider.data.target_fit import load_fitting_target
from outrider.eval.hub import file_tree, upload
from outrider.eval.open_drafter import drafter_folder
from outrider.eval.publish import engine_check
from outrider.eval.publish.card import (
    CardSubject,
    base_model,
    read_reports,
    require_readable,
    write_card,
)
from outrider.eval.publish.reference_outputs import reference_outputs, write_reference
from outrider.eval.publish.round_trip import RoundTrip, first_prompts
from outrider.models import formats
from outrider.models.decode.request import Stops
from outrider.models.formats import native
from outrider.models.formats.atomic_folder import atomic_folder
from outrider.models.formats.external import (
    Format,
    require_exportable,
    sidecar_content,
    write_sidecar,
)
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget, stop_ids

GOLDEN = "outrider-golden-1"  # the layout of golden.json


def publish(config: Config, settings: PublishConfig) -> int:
    """Run the command. Returns the exit code, 0."""
    published(config, settings)
    return 0


def published(config: Config, settings: PublishConfig) -> list[Path]:
    """Export the drafter of a run in the formats of `settings`; return their folders.

    Raises:
        ConfigError: the format cannot hold the drafter.
        RunError: the run, its target or its prompts cannot be used, the exported drafter differs
            from the run's, or the hub refuses.
    """
    process.set_threads()
    console = Console(width=None if sys.stdout.isatty() else 120)
    name = config.drafter.name  # the following is refused before a model is loaded
    engine_check.check_settings(
        settings, None if settings.format == "all" else formats.find(settings.format, name), name
    )
    require_readable(Path(config.run.dir))
    in_full = replace(config, target=replace(config.target, dtype="float32"))
    loaded = load_fitting_target(in_full)
    target = loaded.target
    target.name = base_model(config, settings) or Path(target.name).name  # no local path
    target.config.name_or_path = target.name
    export = Export(config, settings, loaded)
    places = export.places(console)
    with ExitStack() as open_folders:
        for form, place in places:
            partial = open_folders.enter_context(atomic_folder(place))
            comparison = export.build(form, partial, console.print)
            lines = [f"{form.names[0]}:", *comparison.split("; ")]
            console.print("\n  ".join(lines), soft_wrap=True)
    for form, place in places:
        console.print(file_tree(place, str(place)))
        repo = export.repo(form)
        if repo is not None and not settings.dry_run:
            upload(place, repo, settings.private, console)
        elif repo is not None:
            console.print(f"dry run: not uploaded to {repo}")
    return [place for _, place in places]


class Export:
    """A run's drafter and what its folders are made from."""

    def __init__(self, config: Config, settings: PublishConfig, loaded: LoadedTarget) -> None:
        self.config, self.settings, self.loaded = config, settings, loaded
        self.run = Path(config.run.dir)
        drafter, self.cfg = native.FORMATS[0].read(drafter_folder(self.run), loaded.target)
        self.drafter = drafter
        engine_check.check_drafter(settings, self.cfg)
        if settings.format != "all":
            form = formats.find(settings.format, self.cfg.name)
            require_exportable(form, drafter, loaded.target, self.cfg)
        drafter.to(loaded.target.device).eval().requires_grad_(False)
        drafter.patch_target(loaded.target)
        drafter.to(torch.float32)
        prompts = first_prompts(config, loaded, settings.prompts, settings.new_tokens)
        depth = min(self.cfg.depths, drafter.max_depth)
        stops = Stops(stop_ids(loaded.tokenizer, loaded.target))
        self.trip = RoundTrip(loaded.target, drafter, prompts, settings.new_tokens, depth, stops)

    def places(self, console: Console) -> list[tuple[Format, Path]]:
        """Return the requested formats and the folder of each; print why others are left out."""
        name, settings, words = self.cfg.name, self.settings, [self.settings.format]
        if settings.format == "all":
            refusals = formats.export_refusals(self.drafter, name, self.loaded.target)
            words = [word for word, reason in refusals.items() if not reason]
            for message in (f"{word}: left out, {why}" for word, why in refusals.items() if why):
                console.print(message, style="yellow", soft_wrap=True)
        forms = [formats.find(word, name) for word in words]
        out = self.run / "published" if settings.out is None else Path(settings.out).expanduser()
        alone = settings.out is not None and settings.format != "all"
        return [(form, out if alone else out / form.names[0]) for form in forms]

    def repo(self, form: Format) -> str | None:
        """Return the hub repository of a format."""
        name = self.settings.repo
        return name if name is None or self.settings.format != "all" else f"{name}-{form.names[0]}"

    def build(self, form: Format, folder: Path, note: Callable[[str], object]) -> str:
        """Write and check a whole folder; return what was compared."""
        engine = ""
        comparison = export_folder(form, self.cfg, self.trip, folder, self.loaded.tokenizer)
        if (name := self.settings.engine) and engine_check.method(name, form, self.cfg.name):
            engine = engine_check.decode_and_compare(
                self.settings, form, self.trip, folder, self.loaded, note
            )
        subject = CardSubject(
            self.config, self.settings, self.drafter, self.cfg, self.loaded.target, form.names[0],
            comparison, *read_reports(self.run, self.drafter), engine,
        )  # fmt: skip
        write(folder / "README.md", write_card(subject, self.repo(form)).encode())
        return f"{comparison}; {engine}" if engine else comparison


def export_folder(form: Format, cfg: Any, trip: RoundTrip, folder: Path, tokenizer: Any) -> str:
    """Write drafter, reference outputs and verify.py, and compare them; all but the card."""
    drafter, target, word = trip.drafter, trip.target, form.names[0]
    form.write(drafter, target, cfg, folder)
    if word == "native":  # its config.json holds the settings, so it is written without a sidecar
        write_sidecar(folder, sidecar_content(word, None, drafter, target, cfg))
    if word == "transformers":
        tokenizer.save_pretrained(folder)  # llama.cpp converts no model without one
    outputs = reference_outputs(drafter, target, trip.longest_text(), trip.depth)
    text = tokenizer.decode(outputs["ids"].tolist())
    about = {"kind": GOLDEN, "drafter": cfg.name, "format": word, "text": text}
    write_reference(folder, outputs, drafter, target, about)
    return trip.compare_with_export(folder)
