"""The model card of a published drafter: README.md, from the run's own files.

Its numbers come from reports of the run whose fingerprint is this drafter's. The licence is the
target's, as its card states it: a drafter may hold copies of its target's embedding or head.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.conf.command_settings import REPO, PublishConfig
from outrider.conf.files import read_bytes
from outrider.conf.packages import project_url
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config
from outrider.conf.shown_text import escape_controls, mask_home
from outrider.conf.tensor_files import fingerprint
from outrider.eval.page.write import code, markdown
from outrider.eval.plan.show import read_plan
from outrider.eval.publish.serve_commands import serve_commands
from outrider.eval.report import above_tau, describe_policy, format_number, read_fields
from outrider.models.drafting.drafter import Drafter
from outrider.models.formats.native import target_fingerprint
from outrider.models.target.load import SMOLLM2
from outrider.models.target.target import Target
from outrider.train.manifest import read_manifest, read_training

HERE = Path(__file__).parent
UNKNOWN = "unknown"  # the hub's name of an unknown licence
OWN = {"tiny": "apache-2.0", "smollm2": "apache-2.0"}  # of the named targets
LICENSE = ("license", "license_name", "license_link")
TRAINED = ("steps", "tokens", "seconds", "best_step")
VERSIONS = {"outrider", "torch", "transformers"}
PRIVATE = ("run.dir=", "hydra.", "train.wandb")  # local settings in a command


@dataclass(frozen=True)
class CardSubject:
    """What a card describes."""

    config: Config
    settings: PublishConfig
    drafter: Drafter
    cfg: Any
    target: Target
    form: str  # name of the format
    comparison: str  # what was compared before publishing
    reports: dict[str, dict[str, Any]]  # of this drafter, by name
    other: list[str]  # names of reports of another drafter
    engine: str = ""  # what an engine decoded equally, with its version


def write_card(subject: CardSubject, repo: str | None) -> str:
    """Return README.md: the hub's metadata block, then the page; `repo` is None without upload."""
    environment = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False, finalize=_escape,
    )  # fmt: skip
    environment.filters |= {
        "number": format_number, "policy": describe_policy, "above_tau": above_tau,
        "code": lambda text: Markup(code(escape_controls(str(text)))),
        "block": lambda text: Markup(escape_controls(text)),
    }  # fmt: skip
    values = template_values(subject, repo or "FOLDER")
    page = environment.get_template("card.jinja").render(**values)
    metadata = _metadata(subject, repo)
    return mask_home(escape_controls(f"---\n{metadata}\n---\n\n{page}"))


def _escape(value: Any) -> Any:
    """Escape what the template prints: text of the run's files is never Markdown or HTML."""
    if isinstance(value, Markup | int | float):
        return value
    text = escape_controls(str(value))
    return " " * text.startswith(" ") + markdown(text)


def _metadata(subject: CardSubject, repo: str | None) -> str:
    """Return the metadata block, which the yaml library quotes."""
    name = subject.cfg.name
    metadata = ModelCardData(
        **license_fields(subject.config, subject.settings),
        base_model=base_model(subject.config, subject.settings),
        datasets=list(subject.settings.datasets) or None,
        library_name="transformers" if subject.form == "transformers" else "outrider",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-model", name, subject.form, "outrider"],
        eval_results=eval_results(subject.reports) or None,
        model_name=(repo or f"{name}-{subject.target.name}").rpartition("/")[2],
    )
    return str(metadata.to_yaml())


def license_fields(config: Config, settings: PublishConfig) -> dict[str, Any]:
    """Return `license`, with name and link of a licence that the hub does not list."""
    target = config.target
    if settings.license is not None:
        return {"license": settings.license}
    if target.path is None:  # it has a name
        return {"license": OWN.get(target.name, UNKNOWN)}
    card = _target_card(target.path, target.revision)
    fields = {key: card[key] for key in LICENSE if isinstance(card.get(key), str) and card[key]}
    return fields if "license" in fields else {"license": UNKNOWN}


def _target_card(path: str, revision: str | None) -> dict[str, Any]:
    """Return metadata of the target's README.md, from its folder or the hub's cache, or {}."""
    file = Path(path).expanduser() / "README.md"
    if not file.parent.is_dir():
        cached = try_to_load_from_cache(path, "README.md", revision=revision)
        file = Path(cached) if isinstance(cached, str) else file
    if not file.is_file():
        return {}
    try:
        return dict(vars(ModelCard(read_bytes(file).decode()).data))
    except Exception:  # not a text with a block of yaml
        return {}


def base_model(config: Config, settings: PublishConfig) -> str | None:
    """Return the target's hub id; None without one."""
    if settings.base_model is not None:
        return settings.base_model
    if config.target.path is None:
        return SMOLLM2 if config.target.name == "smollm2" else None
    path = config.target.path
    return path if re.fullmatch(REPO, path) and not Path(path).expanduser().exists() else None


def eval_results(reports: Mapping[str, Mapping[str, Any]]) -> list[EvalResult]:
    """Return tau and speedup of every lossless report: a model-index cannot mark lossy ones.

    It has no intervals either: a speedup that may be 1, or that only noise explains, is left out.
    """
    return [
        EvalResult(
            task_type="text-generation", dataset_type="prompts",
            dataset_name=format_count(report["prompts"], "prompt"), dataset_config=name,
            metric_type=metric, metric_value=round(report[metric], 3), metric_name=title,
        )
        for name, report in reports.items()
        for metric, title in (("tau", "tokens per target forward"), ("speedup", "speedup"))
        if not report.get("lossy") and report[metric] is not None
        and (metric == "tau" or _is_certain(report))
    ]  # fmt: skip


def _is_certain(report: Mapping[str, Any]) -> bool:
    """Return whether a speedup is at most tau, and has an interval that does not hold 1."""
    low, high = report["speedup_95"] or (1.0, 1.0)  # one prompt has no interval
    return bool((low > 1 or high < 1) and report["speedup"] <= (report["tau"] or 0))


def template_values(subject: CardSubject, repo: str) -> dict[str, Any]:
    """Return the variables of the template."""
    config, settings, target = subject.config, subject.settings, subject.target
    hub_id = base_model(config, settings)
    served = hub_id or "TARGET"  # no local path
    own = config.target.name if config.target.path is None else served
    plan = read_newest_plan(Path(config.run.dir))
    return {
        "repo": repo, "name": subject.cfg.name, "form": subject.form,
        "target": hub_id or target.name, "fingerprint": target_fingerprint(target),
        "license": license_fields(config, settings)["license"],
        "inherited": settings.license is None,
        "parameters": sum(p.numel() for p in subject.drafter.parameters()),
        "drafted": len(subject.drafter.vocab), "vocab": target.vocab_size,
        "taps": list(subject.drafter.taps),
        "serving": serve_commands(subject.form, subject.drafter, subject.cfg, repo, served, own),
        "reports": subject.reports, "other": subject.other,
        "plan": plan.get("recommended", []), "machine": plan.get("machine", ""),
        "warnings": plan.get("warnings", []),
        "comparison": subject.comparison,
        "engine": subject.engine,
        "changed": subject.drafter.describe_target_change(),
        "datasets": list(settings.datasets),
        **_training_values(Path(config.run.dir)),
    }  # fmt: skip


def _training_values(run: Path) -> dict[str, Any]:
    """Return what the run's files state about its training."""
    manifest, training = read_manifest(run) or {}, read_training(run) or {}
    versions, commit = manifest.get("versions", {}), manifest.get("git", {}).get("commit")
    recipe = dict(manifest.get("config", {}).get("train") or {})
    recipe.pop("wandb", None)  # a local setting
    return {
        "command": train_command(manifest),
        "data": _json_text(manifest.get("data")),
        "training": training if all(training.get(n) is not None for n in TRAINED) else {},
        "settings": _json_text(recipe),
        "drafter_settings": _json_text(manifest.get("config", {}).get("drafter")),
        "project": project_url(),
        "versions": versions,
        "commit": commit if versions.keys() >= VERSIONS else None,
    }


def train_command(manifest: Mapping[str, Any]) -> str:
    """Return the command that started the run, without local settings; "" if unknown."""
    words = manifest.get("argv", [])[1:]
    words = [escape_controls(w).replace("\n", "\\n") for w in words if not w.startswith(PRIVATE)]
    words = words[1:] if words[:1] == ["train"] else words
    return shlex.join(["outrider", "train", *words]) if manifest.get("argv") else ""


def read_reports(folder: Path, drafter: Drafter) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the reports of a run that measured this drafter, and the names of the others."""
    own, reports, other = fingerprint(drafter.state_dict()), dict[str, dict[str, Any]](), []
    for file in sorted((folder / "eval").glob("*.json")):
        report = read_fields(file)
        if report["fingerprints"]["drafter"] == own:
            reports[file.stem] = report
        else:
            other.append(file.stem)
    return reports, other


def require_readable(run: Path) -> None:
    """Read the files of a run that a card is made from; a `CorruptFile` for a damaged one."""
    for file in (run / "eval").glob("*.json"):
        read_fields(file)
    read_manifest(run)
    read_training(run)
    read_newest_plan(run)


def read_newest_plan(folder: Path) -> dict[str, Any]:
    """Return the newest plan of a run; {} without one."""
    files = sorted((folder / "plan").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return read_plan(files[-1]) if files else {}


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1) if value else ""
