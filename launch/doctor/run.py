"""`outrider doctor`: all checks before a run, and the short ones that every run begins with.

    outrider doctor drafter=eagle3 target=tiny json=doctor.json

Exit code 0 says that training may start, 1 that something is wrong; a mistake in the settings
themselves is 2, as everywhere. Text that the target has yet to write is judged by a short sample
of it. `at_start` is what `train` shows of it: nothing that is measured, nothing that the lines
before have said, and only where something is to be said.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import write_json
from outrider.data.contamination import Overlap
from outrider.data.prepare import Material, material
from outrider.data.record.writer import Recorder
from outrider.data.self_generated import is_written, questions_for
from outrider.data.tokenise import show_samples
from outrider.data.traces import Recorded
from outrider.launch import cost_estimate as plan
from outrider.launch.doctor import costs, ranks, target, template, text, vocabulary
from outrider.launch.doctor import trial_steps as measured
from outrider.launch.doctor.finding import Finding, Group, as_json, refuse, show, table, verdict
from outrider.models import drafters, load
from outrider.models.load import Loaded
from outrider.train import distributed as start
from outrider.train.doctoring import DoctorConfig
from outrider.train.settings import Config
from outrider.train.trainer import Run

SAMPLE = 16  # answers that the target is let write


def doctor(config: Config, wanted: DoctorConfig) -> int:
    """The verb."""
    start.use_cores()
    main = start.rank() == 0
    console = Console(quiet=not main, width=None if sys.stdout.isatty() else 100)
    groups = examine(config, wanted, console)
    show(console, groups)
    console.print(verdict(groups), style="bold")
    facts = as_json(groups)
    if wanted.json and main:
        write_json(Path(wanted.json).expanduser(), facts)
        console.print(f"written: {wanted.json}", highlight=False)
    start.leave()
    return 0 if facts["may_start"] else 1


def examine(config: Config, wanted: DoctorConfig, console: Console) -> list[Group]:
    """Every group of checks; those that cannot be made any more are left out."""
    here = Group("launcher", [ranks.launcher(config), ranks.libraries(config), ranks.threads()])
    here.findings.append(ranks.precision(config))
    groups = [here]
    if any(one.state == "wrong" for one in here.findings):
        return groups
    if config.target.place in ("sharded", "tensor"):
        start.join(config.launch)
    try:
        loaded = load.load(config.target, start.device())
    except (ConfigError, RunError) as error:
        return [*groups, Group("target", [failed("probe", error)])]
    of_target, of_text = Group("target", [target.read_rightly(loaded)]), Group("text", [])
    groups.extend([of_target, of_text])
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    loaded.target.set_taps(taps)
    traced = config.data.traces is not None
    recorded = config.data.mode == "recorded" and not traced
    if recorded:  # nothing is recorded to be looked at
        config = replace(config, data=replace(config.data, mode="auto"))
    sampled = config.data.generate is not None and not traced and not is_written(config, loaded)
    if sampled:
        console.print(f"the target's own text is judged by a sample of {SAMPLE} answers")
        config = few_answers(config)
    try:
        made, refused = _material(config, loaded, taps)
    except (ConfigError, RunError) as error:
        of_text.findings.append(failed("text", error))
        return groups
    show_samples(console, loaded.tokenizer, made.documents)
    run = Run(config, loaded, made, begin=False)
    of_text.findings.extend([
        text.mask(loaded, made), text.sources(made.documents), text.kept(made),
        text.rows(config, made), text.overlap(config, made, refused),
        vocabulary.coverage(made, config.drafter.draft_vocab_size),
    ])  # fmt: skip
    groups.insert(2, _template(config, loaded, made, wanted))
    of_target.findings.extend([target.drafter(run), target.taps(run)])
    if (found := target.recorded(run)) is not None:
        of_target.findings.append(found)
    groups.append(_costs(run, loaded, wanted, sampled, recorded))
    run.roll.close()
    return groups


def failed(name: str, error: ConfigError | RunError) -> Finding:
    """An error that would end a run, as a finding."""
    if isinstance(error, ConfigError):
        return Finding(name, "wrong", f"{error.key}={error.value}: {error.why}", {}, error.fix)
    return Finding(name, "wrong", error.message, {}, error.fix)


def few_answers(config: Config) -> Config:
    """The same run on a sample of its text, which takes seconds to write."""
    wish = config.data.generate
    assert wish is not None, "only data=self has one"
    few = replace(wish, samples=SAMPLE, minutes=None, max_new_tokens=min(64, wish.max_new_tokens))
    return replace(config, data=replace(config.data, generate=few))


def _material(
    config: Config, loaded: Loaded, taps: tuple[int, ...]
) -> tuple[Material, Overlap | None]:
    """The text; with the overlap left out where that alone stops the run."""
    quiet = Console(quiet=True)  # its facts are among the findings
    try:
        return material(config, loaded, taps, quiet, start.rank()), None
    except Overlap as error:
        dropped = replace(config, data=replace(config.data, overlap="drop"))
        return material(dropped, loaded, taps, quiet, start.rank()), error


def _template(config: Config, loaded: Loaded, made: Material, wanted: DoctorConfig) -> Group:
    talks = template.sample(config, loaded, made.documents, wanted.conversations)
    tokenizer = loaded.tokenizer
    return Group("template", [
        template.prefix(tokenizer, talks, config.data.max_length),
        template.thinking(tokenizer, config.target, talks), template.date(tokenizer),
    ])  # fmt: skip


def _costs(run: Run, loaded: Loaded, wanted: DoctorConfig, sampled: bool, recorded: bool) -> Group:
    cost = plan.estimate(run)
    fits = measured.largest_batch(run, cost) if wanted.measure else costs.memory(run, cost)
    found, tight = [fits], run.reduce(torch.tensor(float(fits.state == "wrong"))) > 0
    if wanted.measure and not tight:  # the ranks step together, or none does
        found.append(measured.pace(run, wanted.steps, cost))
    else:
        found.append(costs.time(run, cost))
    traces = Recorder(run.config, loaded, run.material, Console(quiet=True)) if recorded else None
    found.append(costs.disk(
        run, cost, _to_write(run, loaded) if sampled else 0.0, traces.bytes() if traces else 0.0
    ))  # fmt: skip
    return Group("costs", [*found, costs.rate(run), costs.folder(run.config)])


def _to_write(run: Run, loaded: Loaded) -> float:
    noted = run.material.noted
    if not isinstance(noted, Recorded):
        return 0.0
    config, quiet = run.config, Console(quiet=True)
    tokens = sum(len(document.ids) for document in run.material.documents)
    answers = len(questions_for(config, loaded, None, quiet, start.rank()))
    return costs.still_to_write(config, noted.store, answers, tokens)


def check(config: Config, loaded: Loaded, made: Material) -> None:
    """What can be refused before first weights are sought.

    Raises:
        RunError: the text teaches nothing, or the drafter cannot say it.
    """
    size = config.drafter.draft_vocab_size
    refuse([text.mask(loaded, made), vocabulary.coverage(made, size, brief=True)])


def at_start(console: Console, run: Run, loaded: Loaded) -> None:
    """The short form, of the main rank, in less than a second.

    Raises:
        RunError: something is wrong that `check` could not know.
    """
    cost, made, config = plan.estimate(run), run.material, run.config
    always = [
        target.drafter(run),
        vocabulary.coverage(made, config.drafter.draft_vocab_size, brief=True),
        costs.memory(run, cost), costs.disk(run, cost), costs.time(run, cost),
    ]  # fmt: skip
    unusual = [text.mask(loaded, made), text.rows(config, made), costs.rate(run)]
    findings = always + [one for one in unusual if one.state != "ok"]
    console.print(table(f"{config.drafter.name} for {run.target.name}", findings))
    refuse(findings)
