"""`outrider doctor`: all checks before a run, and the quick checks at the start of `train`.

    outrider doctor drafter=eagle3 target=tiny json=doctor.json

Exit code 0: training can start; 1: a finding is wrong; 2: a configuration error. Text that the
target has not generated yet is checked on a short sample. `print_start_summary` is the short form
that `train` prints, without measurements.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from outrider.conf.commands import DoctorConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.conf.schema import Config
from outrider.data.contamination import OverlapError
from outrider.data.corpus import load_training_data, recording_config
from outrider.data.record.writer import Recorder
from outrider.data.reporter import Reporter
from outrider.data.self_generated import answers_exist, load_prompts
from outrider.data.tokenise import show_samples
from outrider.data.training_data import TrainingData
from outrider.launch import cost_estimate
from outrider.launch.doctor import costs, ranks, target, template, text, trial_steps, vocabulary
from outrider.launch.doctor.finding import (
    Finding,
    FindingGroup,
    findings_table,
    print_findings,
    require_none_wrong,
    to_json,
    verdict,
    with_state,
)
from outrider.models import drafters, load, process
from outrider.models.load import LoadedTarget
from outrider.train.trainer import Trainer

SAMPLE = 16  # answers that the target generates


def doctor(config: Config, options: DoctorConfig) -> int:
    """Run the command."""
    process.set_threads()
    main = process.rank() == 0
    console = Console(quiet=not main, width=None if sys.stdout.isatty() else 100)
    groups = run_checks(config, options, console)
    print_findings(console, groups)
    console.print(verdict(groups), style="bold")
    result = to_json(groups)
    if options.json and main:
        write_json(Path(options.json).expanduser(), result)
        console.print(f"written: {options.json}", highlight=False)
    process.destroy_group()
    return 0 if result["may_start"] else 1


def run_checks(config: Config, options: DoctorConfig, console: Console) -> list[FindingGroup]:
    """Return every group of findings; checks that an earlier failure prevents are left out."""
    findings = [ranks.launcher(config), ranks.libraries(config), ranks.threads()]
    groups = [FindingGroup("launcher", [*findings, ranks.precision(config)])]
    if any(with_state(groups, "wrong")):
        return groups
    if config.target.place in ("sharded", "tensor"):
        process.init_group(config.launch)
    try:
        loaded = load.load_target(config.target, process.device())
    except (ConfigError, RunError) as error:
        return [*groups, FindingGroup("target", [error_finding("probe", error)])]
    return [*groups, *_check_run(config, options, console, loaded)]


def _check_run(
    config: Config, options: DoctorConfig, console: Console, loaded: LoadedTarget
) -> list[FindingGroup]:
    """The groups target, template, text and costs."""
    target_findings = [target.target_check(loaded)]
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    loaded.target.set_taps(taps)
    generated = config.data.generate is not None and config.data.traces is None
    sampled = generated and not answers_exist(config, loaded)
    if sampled:
        console.print(f"self-generated text is checked on a sample of {SAMPLE} answers")
        config = sample_config(config)
    try:
        data, overlap = _load_text(config, loaded, taps)
    except (ConfigError, RunError) as error:
        text_findings = [error_finding("text", error)]
        return [FindingGroup("target", target_findings), FindingGroup("text", text_findings)]
    show_samples(Reporter(console), loaded.tokenizer, data.documents)
    run = Trainer(config, loaded, data, begin=False)
    target_findings += [target.drafter(run), target.taps(run), *target.recording(run)]
    text_findings = [
        text.mask(loaded, data), text.sources(data.documents), text.conversations(data),
        text.rows(config, data), text.overlap(config, data, overlap),
        vocabulary.coverage(data, config.drafter.draft_vocab_size),
    ]  # fmt: skip
    groups = [
        FindingGroup("target", target_findings),
        FindingGroup("template", _check_template(config, loaded, data, options.conversations)),
        FindingGroup("text", text_findings),
        FindingGroup("costs", _check_costs(run, loaded, options, sampled)),
    ]
    run.close()
    return groups


def error_finding(name: str, error: ConfigError | RunError) -> Finding:
    """Return an error that would end a run as a finding."""
    if isinstance(error, ConfigError):
        return Finding(name, "wrong", f"{error.key}={error.value}: {error.why}", {}, error.fix)
    return Finding(name, "wrong", error.message, {}, error.fix)


def sample_config(config: Config) -> Config:
    """Return the configuration with a sample of the self-generated text, which takes seconds."""
    generate = config.data.generate
    assert generate is not None, "only data=self has it"
    tokens = min(64, generate.max_new_tokens)
    sample = replace(generate, samples=SAMPLE, minutes=None, max_new_tokens=tokens)
    return replace(config, data=replace(config.data, generate=sample))


def _load_text(
    config: Config, loaded: LoadedTarget, taps: tuple[int, ...]
) -> tuple[TrainingData, OverlapError | None]:
    """Load the text; if it overlaps the suite, without the overlap and with the error."""
    load_text = partial(load_training_data, loaded=loaded, taps=taps, reporter=Reporter.silent())
    try:
        data = load_text(config, record=False)
    except OverlapError as error:
        dropped = replace(config, data=replace(config.data, overlap="drop"))
        return load_text(dropped, record=False), error
    recorder = _recorder(config, loaded, data)
    return (load_text(config) if recorder and recorder.is_complete() else data), None


def _recorder(config: Config, loaded: LoadedTarget, data: TrainingData) -> Recorder | None:
    """The recorder of the run, None if it records no features."""
    settings = None if config.data.traces is not None else recording_config(config)
    if settings is None:
        return None
    return Recorder(settings, loaded, data, Reporter.silent())


def _check_template(
    config: Config, loaded: LoadedTarget, data: TrainingData, conversations: int
) -> list[Finding]:
    dialogues = template.sample_dialogues(config, loaded, data.documents, conversations)
    return [
        template.prefix(loaded.tokenizer, dialogues, config.data.max_length),
        template.thinking(loaded.tokenizer, config.target, dialogues),
        template.date(loaded.tokenizer),
    ]


def _check_costs(
    run: Trainer, loaded: LoadedTarget, options: DoctorConfig, sampled: bool
) -> list[Finding]:
    cost = cost_estimate.estimate(run)
    memory = trial_steps.largest_batch(run, cost) if options.measure else costs.memory(run, cost)
    too_large = run.reduce(torch.tensor(float(memory.state == "wrong"))) > 0
    if options.measure and not too_large:  # all ranks take part in a step
        time = trial_steps.step_time(run, options.steps, cost)
    else:
        time = costs.time(run, cost)
    disk = costs.disk(run, cost, *_bytes_to_write(run, loaded, sampled))
    return [memory, time, disk, costs.learning_rate(run), costs.run_folder(run.config)]


def _bytes_to_write(run: Trainer, loaded: LoadedTarget, sampled: bool) -> tuple[float, float]:
    """Return the bytes of text and of a recording that the run has yet to write.

    Args:
        sampled: the run has a sample of its text only.
    """
    config, documents = run.config, run.data.documents
    tokens = total = float(sum(len(document.ids) for document in documents))
    if sampled:
        prompts = load_prompts(config, loaded, None, Reporter.silent())
        total = costs.tokens_to_write(config, tokens / len(documents), len(prompts))
    recorder = None if run.data.recorded else _recorder(config, loaded, run.data)
    recording = recorder.size() * total / tokens if recorder else 0.0
    return costs.TEXT_BYTES * total * sampled, recording


def require_trainable(config: Config, loaded: LoadedTarget, data: TrainingData) -> None:
    """Refuse a run before the drafter is initialised.

    Raises:
        RunError: no token is supervised, or the draft vocabulary covers too few.
    """
    size = config.drafter.draft_vocab_size
    require_none_wrong([text.mask(loaded, data), vocabulary.coverage(data, size, brief=True)])


def print_start_summary(console: Console, run: Trainer, *, loaded: LoadedTarget) -> None:
    """Print the quick checks on the main rank, in less than a second.

    Raises:
        RunError: a finding is wrong.
    """
    cost, data, config = cost_estimate.estimate(run), run.data, run.config
    always = [
        target.drafter(run),
        vocabulary.coverage(data, config.drafter.draft_vocab_size, brief=True),
        costs.memory(run, cost), costs.disk(run, cost), costs.time(run, cost),
    ]  # fmt: skip
    unusual = [text.mask(loaded, data), text.rows(config, data), costs.learning_rate(run)]
    findings = always + [one for one in unusual if one.state != "ok"]
    console.print(findings_table(f"{config.drafter.name} for {run.target.name}", findings))
    require_none_wrong(findings)
