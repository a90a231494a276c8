"""Settings of the commands other than train and eval: one group of `conf/` for each."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from outrider.conf.clusters import ClusterConfig
from outrider.conf.compose import compose, to_container
from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, NODES, TOKENS, from_dict, option
from outrider.conf.sweeps import SweepConfig

COUNT = "[1, inf)"
REPO = r"[\w.-]+/[\w.-]+"
MIN_SHARES = 2  # pilot sizes that a scaling fit needs
Engine = Literal["vllm", "speculators", "openvino", "llamacpp", "transformers"]
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")  # `serve.host` of this machine alone
SERVE_NOTE = (
    "For trying a drafter from your own app, not for production: outrider publish writes a folder "
    "that vLLM, SGLang, llama.cpp and other engines serve (docs/serving.md). If the variable "
    "OUTRIDER_API_KEY is set, clients must send that key."
)
Gpu = Literal["h100", "h200", "a100", "b200", "rtx4090", "mi300x"]


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Draft shapes, workloads and the hardware of a speedup prediction."""

    depths: tuple[int, ...] = option((1, 2, 3, 4), "draft tokens along one path", DEPTHS)
    widths: tuple[int, ...] = option((1, 2, 4), "children per node; 1: a chain", NODES)
    nodes: tuple[int, ...] = option((4, 8, 16), "draft tokens per tree", NODES)
    batches: tuple[int, ...] = option((1, 4, 16), "prompts decoded together", "[1, 65536]")
    contexts: tuple[int, ...] = option((64, 256), "cached tokens before a round", TOKENS)
    prompts: int = option(8, "prompts of eval.prompts to measure acceptance on", COUNT)
    new_tokens: int = option(64, "tokens per answer", TOKENS)
    repeats: int = option(7, "measurements of each forward; their lower quartile counts", COUNT)
    check: int = option(5, "settings also decoded to check the prediction; 0: none", "[0, inf)")
    machine: Gpu | None = option(None, "predict for this GPU; null: measure this machine")
    bandwidth: float | None = option(None, "other GPU: memory bandwidth, TB/s", "(0, inf)")
    flops: float | None = option(None, "other GPU: dense TFLOP/s", "(0, inf)")
    fixed: float | None = option(
        None, "other GPU: constant time per forward, microseconds; null: 50 (assumed)", "[0, inf)"
    )
    target_params: float | None = option(None, "other target: parameters, 1e9", "(0, inf)")
    target_layers: int | None = option(None, "other target: attention layers", COUNT)
    target_width: int | None = option(None, "other target: heads x head size", COUNT)
    target_kv_width: int | None = option(None, "other target: key heads x head size", COUNT)
    drafter_params: float | None = option(None, "other drafter: parameters, 1e9", "(0, inf)")
    drafter_layers: int = option(1, "other drafter: layers of the target's shape", COUNT)
    budget: int | None = option(None, "cached tokens that the drafter reads; null: all", COUNT)
    bytes: int = option(2, "other GPU: bytes per weight and per cached value", COUNT)
    out: str = option("plan", "results: <run.dir>/plan/<out>.json and .png")


@dataclasses.dataclass(frozen=True)
class PublishConfig:
    """Formats, destination and the model card."""

    format: str = option("all", "sglang, vllm, speculators, ..., native; all: all that fit")
    out: str | None = option(None, "output folder; null: <run.dir>/published/<format>")
    repo: str | None = option(None, "OWNER/NAME on the hub; format=all appends -<format>")
    private: bool = option(True, "create the repository as private")
    dry_run: bool = option(False, "write and check the folder, list its files, upload nothing")
    prompts: int = option(3, "prompts of the run's suite, decoded before and after export", COUNT)
    new_tokens: int = option(32, "tokens per answer", TOKENS)
    engine: Engine | None = option(None, "also decode with this engine and compare; null: none")
    engine_python: str | None = option(
        None, "Python of the engine's environment; null: .engines/<engine>"
    )
    license: str | None = option(None, "license of the drafter; null: the target's")
    base_model: str | None = option(None, "hub id of the target; null: target.path, if it is one")
    datasets: tuple[str, ...] = option((), "hub ids of the training data, for the card")

    def __post_init__(self) -> None:
        examples = {"repo": "me/eagle3-qwen3-8b", "base_model": "Qwen/Qwen3-8B"}
        for name, example in examples.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(REPO, value):
                why = "A repository on the hub has an owner and a name."
                raise ConfigError(f"publish.{name}", value, why, f"Like publish.{name}={example}.")
        if self.out is not None and Path(self.out).expanduser().is_file():
            why = "A file of this name exists; publish writes a folder."
            raise ConfigError("publish.out", self.out, why, "Choose another name.")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """Contents of a report page."""

    measure: bool = option(False, "first measure the drafter's calibration (fast)")
    examples: int = option(4, "answers shown per evaluation", "[1, inf)")


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """A target and GPUs."""

    model: Literal["8b", "32b", "70b", "235b"] | None = option(
        None, "a typical target of this size; null: the run's"
    )
    gpu: Gpu = option("h100", "GPU model")
    gpus: int = option(8, "number of GPUs, one rank each", COUNT)
    room: float | None = option(None, "GB of memory per GPU; null: the vendor's number", "(0, inf)")


@dataclasses.dataclass(frozen=True)
class DoctorConfig:
    """Extent of the checks before training."""

    json: str | None = option(None, "JSON file for the findings; short: json=...")
    conversations: int = option(64, "conversations rendered to check the template", COUNT)
    measure: bool = option(True, "run batches and time steps; false: estimates only")
    steps: int = option(3, "timed steps, after one warm-up step", COUNT)

    def __post_init__(self) -> None:
        if self.json is not None and Path(self.json).expanduser().is_dir():
            why = "A folder of this name exists; doctor writes a file."
            raise ConfigError("doctor.json", self.json, why, "Like json=doctor.json.")


@dataclasses.dataclass(frozen=True)
class AdviseConfig:
    """Pilot runs on small parts of the training text."""

    shares: tuple[float, ...] = option((0.01, 0.02, 0.04), "shares of training tokens", "(0, 1]")
    steps: int = option(150, "optimizer steps of every pilot", COUNT)
    repeats: int = option(2, "pilots per share, with other text and another seed", COUNT)

    def __post_init__(self) -> None:
        if len(set(self.shares)) < MIN_SHARES:
            why = f"A fit of acceptance against text needs pilots of {MIN_SHARES} sizes."
            raise ConfigError("advise.shares", list(self.shares), why, "Like [0.01,0.02,0.04].")


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Address and limits of the server."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: also for other machines")
    port: int = option(8000, "port to listen at; 0: a free one", "[0, 65535]")
    model: str | None = option(None, "name of the model in the API; null: the target's")
    batch: int = option(8, "answers decoded together", "[1, 1024]")
    samplings: int = option(2, "different sampling settings decoded at a time", "[1, 64]")
    queue: int = option(64, "answers that may wait; status 429 beyond", "[0, 65536]")
    max_length: int = option(4096, "tokens of a prompt and its answer; status 400 beyond", TOKENS)
    max_choices: int = option(8, "answers of one request (n, and several prompts)", "[1, 1024]")
    max_bytes: int = option(1000000, "bytes of a request; status 413 beyond", "[1024, 268435456]")
    timeout: float = option(600.0, "seconds of a request, its wait included", "(0, 86400]")
    grace: float = option(10.0, "seconds that running answers get when it stops", "[0, 3600]")

    def __post_init__(self) -> None:
        if self.model is not None and not re.fullmatch(r"[\w./:@+-]+", self.model):
            why = "The name of a model is one word of letters, digits and . / : @ + - _"
            raise ConfigError("serve.model", self.model, why, "Like serve.model=my-draft.")


VERB_GROUPS: dict[str, Any] = {
    "plan": PlanConfig,
    "cluster": ClusterConfig,
    "memory": MemoryConfig,
    "publish": PublishConfig,
    "serve": ServeConfig,
    "sweep": SweepConfig,
    "doctor": DoctorConfig,
    "advise": AdviseConfig,
}


def read_report(overrides: Sequence[str]) -> tuple[str, ReportConfig, list[str]]:
    """Return `run.dir`, the settings of `report.*`, and the other overrides."""
    values = to_container(compose(overrides, "report"))
    folder = values["run"]["dir"]
    if not folder:
        raise ConfigError("run.dir", folder, "A report needs a run.", "Add run.dir=runs/<name>.")
    settings: ReportConfig = from_dict(ReportConfig, values["report"], "report")
    return str(folder), settings, [word for word in overrides if not word.startswith("report.")]
