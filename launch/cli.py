"""The command line: `outrider VERB key=value ...`, and its twins train.py and eval.py.

Hydra's override grammar everywhere, one validation, then a call into the verb's own module,
which is imported only then. Every exit of the program is decided here and in `errors.py`:
0 success, 2 a mistake of the user (message, no traceback), 130 Ctrl-C.
"""

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from outrider.conf.errors import ConfigError, exit_on_error


class Verb(NamedTuple):
    """A command: where its work is done, and what it does."""

    place: str  # "module:function"
    line: str
    run: Callable[["Verb", list[str]], int]
    root: str = "train"  # which root of conf/ its keys come from

    def call(self, *arguments: Any) -> int:
        module, _, function = self.place.partition(":")
        return int(getattr(importlib.import_module(module), function)(*arguments))


def command(argv: Sequence[str] | None = None, program: str = "outrider") -> NoReturn:
    """`main` as a whole process: run one command, then end."""
    try:
        code: Any = main(argv, program)
    except SystemExit as stop:
        code = stop.code
    end(code)


def end(code: Any) -> NoReturn:
    """End this process; as one of several ranks, without taking the interpreter apart.

    Gloo's threads drop their last tensors when they please, and whoever asks a closing interpreter
    for its lock is aborted. DeepSpeed's parameters keep the process group, and so its threads,
    alive beyond `destroy_process_group` (pytorch/pytorch#179291, #190489).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(code, int | None):
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main(argv: Sequence[str] | None = None, program: str = "outrider") -> int:
    """Run one command.

    Args:
        argv: the words behind the program's name; None takes them from the process.
        program: the name in messages. train.py and eval.py give theirs and a verb in `argv`.

    Returns:
        The exit code of a command that ran.

    Raises:
        SystemExit: 2 for a mistake of the user, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words else "--help"
    name = f"outrider {verb}" if program == "outrider" and verb in VERBS else program
    with exit_on_error(name):
        if verb in ("-h", "--help", "help"):
            return _overview()
        if verb == "--version":
            return _say(importlib.import_module("outrider").__version__)
        if verb not in VERBS:
            raise ConfigError("verb", verb, "There is no such verb.", f"Use one of: {_names()}.")
        return _dispatch(VERBS[verb], name, words[1:])


def _dispatch(verb: Verb, name: str, words: list[str]) -> int:
    """Options first (--help, --cfg, --multirun), then the verb itself."""
    options = [word for word in words if word.startswith("-")]
    overrides = [word for word in words if not word.startswith("-")]
    if {"-h", "--help"} & set(options):
        return _help(verb, name, bool({"-m", "--multirun"} & set(options)))
    if {"-m", "--multirun"} & set(options):
        for option in set(options) - {"-m", "--multirun"}:
            raise ConfigError(
                "option", option, "There is no such option of a sweep.", "See --help."
            )
        return _multirun(verb, overrides, os.environ)
    takes_cfg = verb.run in (_configured, _eval)  # plan has a group that is no part of a run
    for option in options:
        if not (takes_cfg and option in ("-c", "--cfg")):
            raise ConfigError("option", option, "There is no such option.", "See --help.")
    if options:
        return _print_config(verb, [word for word in overrides if word != "job"])
    return verb.run(verb, overrides)


def _configured(verb: Verb, overrides: list[str]) -> int:
    """train, prepare: compose, check, go."""
    from outrider.train.settings import NEEDED, check_files

    config = _config(verb, overrides)
    check_files(config, *NEEDED)
    return verb.call(config)


def _doctor(verb: Verb, overrides: list[str]) -> int:
    """doctor: as train, with a group of its own; `json=` is short for `doctor.json=`."""
    from outrider.train.doctoring import read_doctor
    from outrider.train.settings import NEEDED, check_files

    wanted, words = read_doctor(overrides)
    config = _config(verb, words)
    check_files(config, *NEEDED)
    return verb.call(config, wanted)


def _advise(verb: Verb, overrides: list[str]) -> int:
    """advise: as doctor."""
    from outrider.train.doctoring import read_advise
    from outrider.train.settings import NEEDED, check_files

    wanted, words = read_advise(overrides)
    config = _config(verb, words)
    check_files(config, *NEEDED)
    return verb.call(config, wanted)


def _eval(verb: Verb, overrides: list[str]) -> int:
    """eval: the run folder's configuration, measured the way the overrides say."""
    from outrider.train.settings import check_files

    config = _config(verb, overrides)
    check_files(config, "eval.prompts")
    return verb.call(config)


def _plan(verb: Verb, overrides: list[str]) -> int:
    """plan: as eval, with a group of its own."""
    from outrider.train.planning import read_plan

    wanted = read_plan([word for word in overrides if word.startswith("plan.")])
    config = _config(verb, [word for word in overrides if not word.startswith("plan.")])
    return verb.call(config, wanted)


def _publish(verb: Verb, overrides: list[str]) -> int:
    """publish: as eval, with a group of its own; `format=` is short for `publish.format=`."""
    from outrider.train.publishing import read_publish

    words = [f"publish.{word}" if word.startswith("format=") else word for word in overrides]
    wanted = read_publish([word for word in words if word.startswith("publish.")])
    config = _config(verb, [word for word in words if not word.startswith("publish.")])
    return verb.call(config, wanted)


def _launch(verb: Verb, overrides: list[str]) -> int:
    """launch: a run, for ranks that are not here yet."""
    return verb.call(overrides)


def _memory(verb: Verb, overrides: list[str]) -> int:
    """memory: a run, for GPUs that are not here."""
    return verb.call(overrides)


def _report(verb: Verb, overrides: list[str]) -> int:
    """report: a run folder, and what its page shows."""
    from pathlib import Path

    from outrider.train.reporting import read_report

    folder, wanted, words = read_report(overrides)
    return verb.call(Path(folder), wanted, words)


def _compare(verb: Verb, words: list[str]) -> int:
    if all(word.startswith("to=") for word in words):
        raise ConfigError("RUN", "", "compare needs run folders.", "outrider compare runs/a runs/b")
    return verb.call(words)


def _bench(verb: Verb, words: list[str]) -> int:
    name = words[0] if words else ""
    if name not in BENCHES:
        fix = f"Use one of: {', '.join(BENCHES)}."
        raise ConfigError("bench", name, "There is no such benchmark.", fix)
    return BENCHES[name].call(words[1:])


def _config(verb: Verb, overrides: list[str]) -> Any:
    from outrider.conf.compose import compose
    from outrider.train.settings import load_run, parse

    if verb.root != "eval":
        return _own_drafter(verb, parse(compose(overrides, verb.root)))
    words = [f"eval.{word}" if word.startswith("drafter=") else word for word in overrides]
    if any(word.startswith("eval.drafter=") for word in words):
        from outrider.train.alone import load_alone

        return _own_drafter(verb, load_alone(words))
    folder = compose(overrides, "eval").run.dir
    if not folder:
        why, fix = "eval measures a finished run.", "Add run.dir=runs/<name>."
        raise ConfigError("run.dir", folder, why, fix)
    return load_run(str(folder), overrides)


def _own_drafter(verb: Verb, config: Any) -> Any:
    """Only eval measures a drafter that no run made."""
    if config.eval.drafter is not None and verb is not VERBS["eval"]:
        why, fix = "This verb works on the drafter of its own run.", "Only outrider eval takes it."
        raise ConfigError("eval.drafter", config.eval.drafter, why, fix)
    return config


def _print_config(verb: Verb, overrides: list[str]) -> int:
    from outrider.train.settings import to_yaml

    return _say(to_yaml(_config(verb, overrides)).rstrip())


def _help(verb: Verb, name: str, swept: bool) -> int:
    from outrider.launch.help import reference

    if verb.run is _compare:
        meant = "RUN is the run.dir of a finished run; to=FOLDER writes report.html and .md there."
        return _say(f"{name} RUN [RUN ...] [to=FOLDER]: {verb.line}\n\n{meant}")
    if verb.run is _bench:
        program = name
        lines = "\n".join(f"  {name:<12}{bench.line}" for name, bench in BENCHES.items())
        return _say(f"{program} BENCH [key=value ...]: {verb.line}\n\n{lines}")
    groups: dict[Any, str] = {
        _plan: "plan",
        _launch: "cluster",
        _memory: "memory",
        _publish: "publish",
        _doctor: "doctor",
        _advise: "advise",
    }
    own = "sweep" if swept else groups.get(verb.run)
    reference(_console(), name, verb.line, verb.root, own)
    return 0


def _overview() -> int:
    from outrider.launch.help import overview

    overview(_console(), {name: verb.line for name, verb in VERBS.items()})
    return 0


def _console() -> Any:
    """A console for people; 100 columns when its output goes into a file or pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100)


def _multirun(verb: Verb, overrides: list[str], environ: Mapping[str, str]) -> int:
    """A sweep starts every run itself: in one process group each would run on every rank."""
    launched = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
    if int(environ.get("WORLD_SIZE", "1")) > 1 or any(name in environ for name in launched):
        why = "Under a launcher every rank would run every job of the sweep."
        raise ConfigError("--multirun", True, why, "Use python train.py -m ..., without it.")
    if verb is not VERBS["train"]:
        why = "Only training runs are swept."
        raise ConfigError("--multirun", True, why, "Use python train.py -m ...")
    from outrider.launch.sweep import sweep

    return sweep(overrides)


def _say(text: str) -> int:
    print(text)
    return 0


def _names() -> str:
    return ", ".join(VERBS)


VERBS = {
    "train": Verb(
        "outrider.train.loop:train",
        "train a drafter against a frozen target, then measure it",
        _configured,
    ),
    "eval": Verb(
        "outrider.eval.run:evaluate",
        "measure a trained drafter: acceptance, speedup, exactness",
        _eval,
        "eval",
    ),
    "launch": Verb(
        "outrider.launch.cluster:launch",
        "say what to type on which machine of a cluster, or why it cannot work",
        _launch,
    ),
    "memory": Verb(
        "outrider.launch.memory:memory",
        "what a run takes of every GPU, and where its target can lie so that it fits",
        _memory,
    ),
    "prepare": Verb(
        "outrider.data.prepare:prepare",
        "let the target write the text to train on (data=self), without training",
        _configured,
    ),
    "record": Verb(
        "outrider.data.record.writer:record",
        "run the target over the text once and keep what it said, to train from (data.traces)",
        _configured,
    ),
    "doctor": Verb(
        "outrider.launch.doctor.run:doctor",
        "may training start? template, mask, text, vocabulary, taps, memory, disk, time, launcher",
        _doctor,
    ),
    "advise": Verb(
        "outrider.launch.advise:advise",
        "what more training text would bring, from pilot runs on a little of it",
        _advise,
    ),
    "chat": Verb(
        "outrider.eval.chat:chat",
        "talk to the target, drafted for: who proposed each token, tau and tokens/s live",
        _eval,
        "eval",
    ),
    "plan": Verb(
        "outrider.eval.plan.command:plan",
        "foresee the speedup over depth, width, nodes, batch and context, here or on a GPU",
        _plan,
        "eval",
    ),
    "publish": Verb(
        "outrider.eval.publish.run:publish",
        "a drafter in an engine's format: exported, proved, described, uploaded",
        _publish,
        "eval",
    ),
    "ranks": Verb(
        "outrider.eval.rank_tables:ranks",
        "measure what the drafter's choices are worth on held-out text (ranks.json)",
        _eval,
        "eval",
    ),
    "report": Verb(
        "outrider.eval.page.build:report",
        "write one page on a run, a search or a folder of runs: report.html, report.md",
        _report,
        "report",
    ),
    "compare": Verb(
        "outrider.eval.compare:compare", "put finished runs side by side in one table", _compare
    ),
    "bench": Verb("", "measure this machine", _bench),
}
BENCHES = {
    "train-step": Verb(
        "outrider.launch.bench.train_step:main",
        "seconds and peak memory of one optimizer step, beside the slow reference",
        _bench,
    ),
    "lengths": Verb(
        "outrider.launch.bench.lengths:lengths",
        "memory and time of a training step as rows grow to 32k, with gradient checkpointing",
        _bench,
    ),
    "rounds": Verb(
        "outrider.launch.bench.decode:rounds",
        "where a decoding round's time goes: models, and all that is not the models",
        _bench,
    ),
    "batch": Verb(
        "outrider.launch.bench.decode:batch",
        "tokens per second with several prompts at a time, with the drafter and without",
        _bench,
    ),
    "launches": Verb(
        "outrider.launch.bench.launches:launches",
        "one recipe under every launch: 1, 2, 4 ranks, DDP and ZeRO, and how far they are apart",
        _bench,
    ),
    "soak": Verb(
        "outrider.launch.bench.soak:soak",
        "a run of several ranks, hurt again and again: what is left must be bit-equal",
        _bench,
    ),
    "storage": Verb(
        "outrider.launch.bench.storage:storage",
        "what small recordings cost a drafter: bytes per token against acceptance",
        _bench,
    ),
    "assisted": Verb(
        "outrider.launch.bench.assisted:assisted",
        "beside transformers' assisted generation: same draft model, same tokens, whose time",
        _bench,
    ),
}

if __name__ == "__main__":
    command()
