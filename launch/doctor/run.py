"""`outrider doctor`: all checks before a run, and the quick checks at the start of `train`.

    outrider doctor drafter=eagle3 target=tiny json=doctor.json

Exit code 0: training can start; 1: a finding is wrong; 2: a configuration error. Text that the
target has not generated yet is checked on a short sample.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from outrider.conf.command_settings import DoctorConfig
from outrider.conf.console import Console
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.conf.schema import Config
from outrider.conf.shown_text import mask_values
from outrider.data.contamination import OverlapError
from outrider.data.corpus import load_training_data, recording_config
from outrider.data.record.writer import Recorder
from outrider.data.reporter import Reporter
from outrider.data.self_generated import answers_exist, load_prompts
from outrider.data.target_fit import load_fitting_target
from outrider.data.tokenise import show_samples
from outrider.data.training_data import TrainingData
from outrider.launch import cost_estimate
from outrider.launch.doctor import costs, environment, finding, target, template, text, trial_steps
from outrider.launch.doctor.finding import Finding, FindingGroup
from outrider.launch.doctor.tokenizer import check_chat_template, check_tokenizer
from outrider.models import drafters
from outrider.models.adapt import adapt
from outrider.models.target import process
from outrider.models.target.load import LoadedTarget
from outrider.train.trainer import Trainer

SAMPLE = 16  # answers that the target generates


def doctor(config: Config, options: DoctorConfig) -> int:
    process.set_threads()
    main = process.rank() == 0
    console = Console(quiet=not main, width=None if sys.stdout.isatty() else 100)
    groups = run_checks(config, options, console)
    finding.print_findings(console, groups)
    console.print(finding.verdict(groups), style="bold")
    result = finding.to_json(groups)
    if options.json and main:
        write_json(Path(options.json).expanduser(), mask_values(result))
        console.print(f"written: {options.json}")
    process.destroy_group()
    return 0 if result["may_start"] else 1


def run_checks(config: Config, options: DoctorConfig, console: Console) -> list[FindingGroup]:
    """Return every group of findings; checks that an earlier failure prevents are left out."""
    findings = [
        environment.check_launcher(config), environment.check_libraries(config),
        environment.check_threads(), environment.check_precision(config),
    ]  # fmt: skip
    if warning := config.drafter.warning():
        findings.append(Finding("settings", "note", warning, {}, ""))
    groups = [FindingGroup("launcher", findings)]
    if any(finding.with_state(groups, "wrong")):
        return groups
    if config.target.place in ("sharded", "tensor"):
        process.init_group(config.launch)
    try:
        loaded = load_fitting_target(
            config, begins=True, trains=True, measures=config.train.quick_eval
        )
    except (ConfigError, RunError) as error:
        return [*groups, FindingGroup("target", [_error_finding("probe", error)])]
    return [*groups, *_check_run(config, options, console, loaded)]


def _check_run(
    config: Config, options: DoctorConfig, console: Console, loaded: LoadedTarget
) -> list[FindingGroup]:
    """The groups target, template, text and costs."""
    config = adapt(config, Reporter(console).note, loaded.target.shape())
    target_findings = [
        target.check_target(loaded), target.check_family(loaded),
        check_tokenizer(loaded.tokenizer),
    ]  # fmt: skip
    taps = drafters.resolve_taps(config.drafter, loaded.target.num_layers)
    loaded.target.set_taps(taps)
    generate = config.data.generate
    sampled = generate is not None and config.data.traces is None
    sampled = sampled and not answers_exist(config, loaded)
    if generate and sampled:  # a sample takes seconds
        console.print(f"self-generated text is checked on a sample of {SAMPLE} answers")
        tokens = min(64, generate.max_new_tokens)
        sample = replace(generate, samples=SAMPLE, minutes=None, max_new_tokens=tokens)
        config = replace(config, data=replace(config.data, generate=sample))
    try:
        data, overlap = _load_text(config, loaded, taps)
    except (ConfigError, RunError) as error:
        groups = [FindingGroup("target", target_findings)]
        if config.data.name != "self" and config.data.traces is None:
            with suppress(ConfigError, RunError):  # the text cannot be read at all
                count = options.conversations
                found = template.check_template(config, loaded, [], count)
                groups.append(FindingGroup("template", found))
        return [*groups, FindingGroup("text", [_error_finding("text", error)])]
    show_samples(Reporter(console), loaded.tokenizer, data.documents)
    run = Trainer(config, loaded, data, begin=False)
    target_findings += [target.check_drafter(run), target.check_formats(run)]
    target_findings += [target.check_taps(run)]
    text_findings = [
        text.check_mask(loaded, data), text.check_sources(data.documents),
        text.check_conversations(data), text.check_rows(config, data),
        text.check_overlap(config, data, overlap),
        text.check_vocabulary(data, config.drafter.draft_vocab_size),
    ]  # fmt: skip
    count = options.conversations
    groups = [
        FindingGroup("target", [*target_findings, *target.check_recording(run)]),
        FindingGroup("template", template.check_template(config, loaded, data.documents, count)),
        FindingGroup("text", text_findings),
        FindingGroup("costs", _check_costs(run, loaded, options, sampled)),
    ]
    run.close()
    return groups


def _error_finding(name: str, error: ConfigError | RunError) -> Finding:
    """Return an error that would end a run as a finding."""
    if isinstance(error, ConfigError):
        return Finding(name, "wrong", f"{error.key}={error.value}: {error.why}", {}, error.fix)
    return Finding(name, "wrong", error.message, {}, error.fix)


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
    return Recorder(settings, loaded, data, Reporter.silent()) if settings else None


def _check_costs(
    run: Trainer, loaded: LoadedTarget, options: DoctorConfig, sampled: bool
) -> list[Finding]:
    cost = cost_estimate.estimate(run)
    check_memory = trial_steps.check_largest_batch if options.measure else costs.check_memory
    memory, time = check_memory(run, cost), None
    too_large = run.reduce(torch.tensor(float(memory.state == "wrong"))) > 0
    if options.measure and not too_large:  # all ranks take part in a step
        time = trial_steps.check_step_time(run, options.steps, cost)
    return [
        memory, time or costs.check_time(run, cost),
        costs.check_disk(run, cost, *_bytes_to_write(run, loaded, sampled)),
        costs.check_learning_rate(run), costs.check_run_folder(run.config),
    ]  # fmt: skip


def _bytes_to_write(run: Trainer, loaded: LoadedTarget, sampled: bool) -> tuple[float, float]:
    """Return the bytes of text and of a recording yet to write; `sampled`: not all text exists."""
    config, documents = run.config, run.data.documents
    tokens = total = float(sum(len(document.ids) for document in documents))
    if sampled and config.data.generate:  # every answer as long as allowed
        longest = tokens / len(documents) + config.data.generate.max_new_tokens
        prompts = load_prompts(config, loaded, None, Reporter.silent())
        total = len(prompts) * min(config.data.max_length, longest)
    recorder = None if run.data.recorded else _recorder(config, loaded, run.data)
    recording = recorder.size() * total / tokens if recorder else 0.0
    return costs.TEXT_BYTES * total * sampled, recording


def require_trainable(config: Config, loaded: LoadedTarget, data: TrainingData) -> None:
    """Raise a RunError if the text cannot train the drafter; called before its initialisation.

    Raises:
        RunError: no token is supervised, or the draft vocabulary covers too few.
    """
    vocabulary = text.check_vocabulary(data, config.drafter.draft_vocab_size, brief=True)
    finding.require_none_wrong([text.check_mask(loaded, data), vocabulary])


def print_start_summary(console: Console, run: Trainer, *, loaded: LoadedTarget) -> None:
    """Print the quick checks on the main rank, in less than a second and without measurements.

    Raises:
        RunError: a finding is wrong.
    """
    cost, data, config = cost_estimate.estimate(run), run.data, run.config
    findings = [
        target.check_drafter(run), target.check_formats(run),
        text.check_vocabulary(data, config.drafter.draft_vocab_size, brief=True),
        costs.check_memory(run, cost), costs.check_disk(run, cost),
    ]  # fmt: skip
    if not run.progress.step:  # a continued run has printed its estimate
        findings.append(costs.check_time(run, cost))
    unusual = (
        text.check_mask(loaded, data), text.check_rows(config, data),
        check_tokenizer(loaded.tokenizer), check_chat_template(loaded.tokenizer),
        costs.check_learning_rate(run),
    )  # fmt: skip
    findings += [one for one in unusual if one.state != "ok"]
    title = f"{config.drafter.name} for {run.target.name}"
    finding.print_findings(console, [FindingGroup(title, findings)])
    finding.require_none_wrong(findings)
