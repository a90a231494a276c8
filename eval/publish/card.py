"""The card of a published drafter: README.md, from the run's own files.

Every number comes from a report of the run that measured this very drafter (its fingerprint says
so); what is not known is said to be unknown. The licence is the target's, as its card says, for a
drafter is of no use without its target and may hold copies of its embedding or head.
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

from outrider.conf.files import fingerprint, read_json
from outrider.eval.page.write import markdown
from outrider.eval.publish.serve_commands import Serving, serving
from outrider.eval.report import FORMAT, describe_policy, number
from outrider.models.drafter import Drafter
from outrider.models.formats.native import target_fingerprint
from outrider.models.load import SMOLLM2
from outrider.models.target import Target
from outrider.train.publishing import REPO, PublishConfig
from outrider.train.settings import Config

HERE = Path(__file__).parent
UNKNOWN = "unknown"  # a licence that the hub knows by this name
OWN = {"tiny": "apache-2.0", "smollm2": "apache-2.0"}  # of the targets that come with a name
LICENSE = ("license", "license_name", "license_link")
TRAINED = {"steps", "tokens", "seconds", "best_step"}
PRIVATE = ("run.dir=", "hydra.", "train.wandb")  # words of a command that say where, not what


@dataclass(frozen=True)
class Subject:
    """What is published.

    Attributes:
        word: the format's name.
        reports: of this drafter, by name.
        other: names of reports that measured another one.
        plan: of `outrider plan`; None where there is none.
        proof: what was compared.
    """

    config: Config
    wanted: PublishConfig
    drafter: Drafter
    cfg: Any
    target: Target
    word: str
    reports: Mapping[str, Mapping[str, Any]]
    other: list[str]
    plan: Mapping[str, Any] | None
    proof: str


def write_card(subject: Subject, repo: str | None) -> str:
    """README.md: the hub's metadata block, then the page.

    Args:
        repo: its repository, which engines take for the place; None: it lies in a folder.
    """
    room = Environment(
        loader=FileSystemLoader(HERE), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    room.filters |= {"number": number, "md": markdown, "policy": describe_policy}
    page = room.get_template("card.jinja").render(**facts(subject, repo or "FOLDER"))
    return f"---\n{metadata(subject, repo).to_yaml()}\n---\n\n{page}"


# ---- metadata ----------------------------------------------------------------------------------


def metadata(subject: Subject, repo: str | None) -> ModelCardData:
    """What the hub sorts and filters by."""
    name = subject.cfg.name
    known = {
        **licence(subject.config, subject.wanted),
        "base_model": base_model(subject.config, subject.wanted),
        "datasets": list(subject.wanted.datasets) or None,
        "library_name": "transformers" if subject.word == "transformers" else "outrider",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", name, subject.word, "outrider"],
        "eval_results": results(subject) or None,
        "model_name": (repo or f"{name}-{subject.target.name}").rpartition("/")[2],
    }
    return ModelCardData(**known)


def licence(config: Config, wanted: PublishConfig) -> dict[str, Any]:
    """`license`, and of one that the hub does not know its name and link."""
    if wanted.license is not None:
        return {"license": wanted.license}
    target = config.target
    if target.path is None:  # it has a name
        return {"license": OWN.get(target.name, UNKNOWN)}
    said = _targets_card(target.path, target.revision)
    found = {key: said[key] for key in LICENSE if said.get(key)}
    return found if "license" in found else {"license": UNKNOWN}


def _targets_card(path: str, revision: str | None) -> dict[str, Any]:
    """Metadata of the target's README.md: in its folder, or in the hub's cache; {} without one."""
    file = Path(path).expanduser() / "README.md"
    if not file.parent.is_dir():
        cached = try_to_load_from_cache(path, "README.md", revision=revision)
        file = Path(cached) if isinstance(cached, str) else file
    if not file.is_file():
        return {}
    try:
        return dict(vars(ModelCard(file.read_text(encoding="utf-8")).data))
    except ValueError:  # its block is not yaml
        return {}


def base_model(config: Config, wanted: PublishConfig) -> str | None:
    """The target's hub id, where it has one."""
    if wanted.base_model is not None:
        return wanted.base_model
    target = config.target
    if target.name == "smollm2" and target.path is None:
        return SMOLLM2
    path = target.path or ""
    hub = re.fullmatch(REPO, path) and not Path(path).expanduser().exists()
    return path if hub else None


def results(subject: Subject) -> list[EvalResult]:
    """Tau and speedup of every report, as the hub's model-index has them: lossless ones alone, for
    there is no word beside a number there.
    """
    out = []
    for name, report in subject.reports.items():
        if report.get("lossy"):
            continue
        for metric, title in (("tau", "tokens per target forward"), ("speedup", "speedup")):
            if report[metric] is not None:
                value = round(report[metric], 3)
                out.append(
                    EvalResult(
                        task_type="text-generation", dataset_type="prompts",
                        dataset_name=f"{report['prompts']} prompts", dataset_config=name,
                        metric_type=metric, metric_value=value, metric_name=title,
                    )
                )  # fmt: skip
    return out


# ---- the page ----------------------------------------------------------------------------------


def facts(subject: Subject, repo: str) -> dict[str, Any]:
    """What the template asks for."""
    wanted, target = subject.wanted, subject.target
    return {
        "repo": repo,
        "name": subject.cfg.name,
        "word": subject.word,
        "target": base_model(subject.config, wanted) or target.name,
        "fingerprint": target_fingerprint(target),
        "license": licence(subject.config, wanted)["license"],
        "inherited": wanted.license is None,
        "parameters": sum(p.numel() for p in subject.drafter.parameters()),
        "drafted": len(subject.drafter.vocab),
        "vocab": target.vocab,
        "taps": list(subject.drafter.taps),
        "serving": _serving(subject, repo),
        "reports": subject.reports,
        "other": subject.other,
        "plan": list((subject.plan or {}).get("recommended", [])),
        "machine": (subject.plan or {}).get("machine", ""),
        "warnings": list((subject.plan or {}).get("warnings", [])),
        "proof": subject.proof,
        "changed": bool(getattr(subject.cfg, "adapter_rank", 0)),
        "datasets": list(wanted.datasets),
        **_of_training(Path(subject.config.run.dir)),
    }


def _serving(subject: Subject, repo: str) -> Serving:
    """How engines are told; no path of this machine leaves it."""
    served = base_model(subject.config, subject.wanted) or "TARGET"
    target = subject.config.target
    ours = target.name if target.path is None else served
    return serving(subject.word, subject.drafter, subject.cfg, repo, served, ours)


def _of_training(run: Path) -> dict[str, Any]:
    """What the files of a run say of it."""
    manifest, training = _json(run / "manifest.json"), _json(run / "training.json")
    recipe = dict(manifest.get("config", {}).get("train") or {})
    recipe.pop("wandb", None)  # says where, not what
    return {
        "command": command(manifest),
        "data": _json_text(manifest.get("data")),
        "training": training if training.keys() >= TRAINED else {},
        "settings": _json_text(recipe),
        "drafter_settings": _json_text(manifest.get("config", {}).get("drafter")),
        "versions": manifest.get("versions", {}),
        "commit": manifest.get("git", {}).get("commit"),
    }


def command(manifest: Mapping[str, Any]) -> str:
    """The very words the run was started with, but for its folder; "" where they are not known."""
    words = [str(word) for word in manifest.get("argv", [])[1:]]
    words = [word for word in words if not word.startswith(PRIVATE)]
    words = words[1:] if words[:1] == ["train"] else words
    return shlex.join(["outrider", "train", *words]) if manifest.get("argv") else ""


def read_reports(folder: Path, drafter: Drafter) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The reports of a run that measured this drafter, and the names of the others."""
    ours, mine, other = fingerprint(drafter.state_dict()), dict[str, dict[str, Any]](), []
    for file in sorted((folder / "eval").glob("*.json")):
        report = _json(file)
        if report.get("format") != FORMAT:
            continue
        if report.get("fingerprints", {}).get("drafter") == ours:
            mine[file.stem] = report
        else:
            other.append(file.stem)
    return mine, other


def read_plan_of(folder: Path) -> dict[str, Any] | None:
    """The newest plan of a run."""
    files = sorted((folder / "plan").glob("*.json"), key=lambda file: file.stat().st_mtime)
    return _json(files[-1]) if files else None


def _json(file: Path) -> dict[str, Any]:
    return read_json(file, "Restore it, or remove it.") if file.is_file() else {}


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1) if value else ""
