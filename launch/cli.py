"""The command line: `outrider VERB key=value ...`; train.py and eval.py are two of its verbs.

Every verb uses Hydra's override grammar. A verb's module is imported when the verb runs. Exit
codes: 0 success, 2 an error that the user can fix (a message, no traceback), 130 Ctrl-C.
"""

import atexit
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

import outrider
from outrider.conf.errors import ConfigError, exit_on_error
from outrider.conf.garbage import begin_command
from outrider.conf.plugins import load_plugins, named_plugins
from outrider.conf.shown_text import escape_library_output, for_terminal
from outrider.launch.verbs import BENCHES, DECODING, VERBS, Verb

Config = Any  # conf.schema.Config, whose import help does not wait for
MODELS = ("drafter", "target")  # words of verbs that need no run, besides those of their root
# group of a verb -> the verb; its own keys are taken before the others are checked
OWNERS = {verb.group: name for name, verb in VERBS.items() if verb.group} | {"sweep": "train -m"}


def command(argv: Sequence[str] | None = None, program: str = "outrider") -> NoReturn:
    """Run `main` and end the process.

    A character that the locale lacks is printed escaped; a byte that is no text reaches `chat`.
    """
    outputs = ((sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"))
    for stream, errors in ((sys.stdin, "surrogateescape"), *outputs):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    escape_library_output()
    begin_command()
    try:
        code: Any = main(argv, program)
    except SystemExit as stop:
        code = stop.code
    _end_process(code)


def _end_process(code: Any) -> NoReturn:
    """End the process; as one of several ranks, without tearing the interpreter down.

    Gloo's threads may still release tensors when the interpreter closes, and taking its lock then
    aborts the process. DeepSpeed's parameters keep the process group, and with it these threads,
    alive beyond `destroy_process_group` (pytorch/pytorch#179291, #190489).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or not isinstance(code, int | None):
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main(argv: Sequence[str] | None = None, program: str = "outrider") -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after the program's name; None: those of the process.
        program: the name in messages. train.py and eval.py pass theirs and a verb in `argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if program == "outrider" and name in VERBS:
        benchmark = [word for word in words[1:2] if name == "bench" and word in BENCHES]
        program = " ".join(["outrider", name, *benchmark])
    with exit_on_error(program):
        if name in ("-h", "--help", "help"):
            from outrider.launch.help import overview

            return overview()
        if name == "--version":
            return _print(outrider.__version__)
        if name not in VERBS:
            fix = f"Use one of: {', '.join(VERBS)}."
            raise ConfigError("verb", name, "There is no such verb.", fix)
        return _dispatch(name, words[1:], program)


def _dispatch(name: str, words: list[str], program: str) -> int:
    """Import plugins, handle --help, --config, --multirun, --cfg, --explain, and call the verb."""
    verb = VERBS[name]
    load_plugins(named_plugins(words))  # of the command line, not of the file of --config
    if not verb.root:
        words = [word for word in words if not named_plugins([word])]
    words = _read_config(words)
    options = {word for word in words if word.startswith("-")}
    overrides = [word for word in words if not word.startswith("-")]
    multirun = bool(options & {"-m", "--multirun"})
    if options & {"-h", "--help"}:
        return _help(name, overrides, program, multirun)
    cfg = {"-c", "--cfg"} if verb.takes == "config" and not verb.group and not multirun else set()
    explain = {"--explain"} if verb.explains else set()
    for option in options - {"-m", "--multirun"} - cfg - explain:
        raise ConfigError("option", option, "There is no such option.", "See --help.")
    if multirun:
        return _multirun(name, overrides)
    if options & cfg:
        from outrider.conf.schema import to_yaml

        config = command_config(name, [word for word in overrides if word != "job"])
        return _print(to_yaml(config).rstrip())
    if name == "bench":
        return int(_benchmark(overrides).load()(overrides[1:]))
    arguments = _arguments(name, overrides)  # first: importing a verb takes seconds
    more = {"explain": True} if options & explain else {}
    return int(verb.load()(*arguments, **more))


def _read_config(words: list[str]) -> list[str]:
    """Replace `--config FILE` by the overrides of the file; those of the command line win."""
    words = [part for word in words for part in _split_option(word)]
    if "--config" not in words:
        return words
    from outrider.conf.compose import read_overrides

    at = words.index("--config")
    if at + 1 == len(words):
        raise ConfigError("--config", "", "It needs a file.", "Write --config FILE.yaml.")
    return read_overrides(words[at + 1]) + words[:at] + words[at + 2 :]


def _split_option(word: str) -> list[str]:
    return ["--config", word[9:]] if word.startswith("--config=") else [word]


def _benchmark(words: list[str]) -> Verb:
    name = words[0] if words else ""
    if name not in BENCHES:
        fix = f"Use one of: {', '.join(BENCHES)}."
        raise ConfigError("bench", name, "There is no such benchmark.", fix)
    return BENCHES[name]


def _arguments(name: str, words: list[str]) -> tuple[Any, ...]:
    """Return the arguments of a verb's function, validated."""
    from pathlib import Path

    from outrider.conf.command_settings import VERB_GROUPS, read_report
    from outrider.conf.compose import compose, verb_group

    verb = VERBS[name]
    if verb.takes == "report":
        folder, settings, rest = read_report(words)
        return Path(folder), settings, rest
    if verb.takes == "words":
        if name == "compare" and all(word.startswith("to=") for word in words):
            why, fix = "compare needs run folders.", "outrider compare runs/a runs/b"
            raise ConfigError("RUN", "", why, fix)
        if verb.group:  # the verb reads them itself, but only after its import
            from outrider.train.settings import read_groups

            _, rest = verb_group(VERB_GROUPS[verb.group], verb.group, words)
            read_groups(compose(rest))
        return (words,)
    from outrider.train.settings import check_files, check_places

    own = []
    if verb.group:
        short = tuple(f"{key}=" for key in verb.shorthand)
        words = [f"{verb.group}.{word}" if word.startswith(short) else word for word in words]
        words = [word.replace("engine.python=", "engine_python=", 1) for word in words]
        settings, words = verb_group(VERB_GROUPS[verb.group], verb.group, words)
        own.append(settings)
    config = command_config(name, words)
    check_files(config, *verb.files)
    check_places(config, trains=verb.root == "train")
    return config, *own


def command_config(name: str, overrides: list[str]) -> Config:
    """Compose and validate the configuration of a verb; of a run folder with root eval."""
    from outrider.conf.compose import compose
    from outrider.conf.schema import UntrainedConfig
    from outrider.train import settings

    _refuse_unused(name, [word for word in overrides if not word.startswith("eval.drafter=")])
    trains = VERBS[name].root != "eval"
    if trains:
        config = settings.parse(compose(overrides, VERBS[name].root), searched=name == "train")
    else:
        config = _drafter_config(name, overrides)
    if name in DECODING:
        return config
    fix = "Use outrider eval, chat or serve."
    if config.eval.drafter is not None:
        why = f"{name} uses the drafter of a run."
        raise ConfigError("eval.drafter", config.eval.drafter, why, fix)
    if not trains and isinstance(config.drafter, UntrainedConfig):
        why = f"{name} needs a drafter with weights, and the run's has none."
        raise ConfigError("drafter", config.drafter.name, why, fix)
    return config


def _refuse_unused(name: str, overrides: list[str]) -> None:
    """Refuse a key that the verb would ignore; a mistyped one with a key that it uses."""
    from outrider.conf.command_settings import VERB_GROUPS
    from outrider.conf.compose import known_keys
    from outrider.conf.fields import leaf_fields, unknown_key

    verb = VERBS[name]
    known = (*known_keys(verb.root), *(MODELS if verb.root == "eval" else ()))
    for word in overrides:
        key, _, value = word.lstrip("+~").partition("=")
        if owner := OWNERS.get(key.partition(".")[0]):
            why = f"{name} does not use this key."
            raise ConfigError(key, value, why, f"It belongs to outrider {owner}: leave it out.")
        is_own = verb.group and "." not in key and key not in known
        if verb.uses_key(key) and not is_own:
            continue
        if key not in known and not value.startswith("{"):
            used = filter(verb.uses_key, known)
            own = leaf_fields(VERB_GROUPS[verb.group], verb.group) if verb.group else ()
            raise unknown_key(key, value, [*verb.shorthand, *(key for key, *_ in own), *used])
        fix = f"Leave it out: outrider {name} --help all lists its keys."
        if value.startswith("{"):
            fix = f"Write each key that it uses: {key}.<key>=..."
        raise ConfigError(key, value, f"{name} does not use this key.", fix)


def _drafter_config(name: str, overrides: list[str]) -> Config:
    """Return the configuration of a run's drafter, a published one, or one without weights."""
    from outrider.conf.compose import compose
    from outrider.train import settings

    chosen = [word[8:] for word in overrides if word.startswith("drafter=")][-1:]
    untrained = bool(chosen) and settings.is_untrained(chosen[0])
    if untrained and name not in DECODING:
        why = f"It has no weights, and {name} uses the drafter of a run."
        raise ConfigError("drafter", chosen[0], why, "Use outrider eval, chat or serve.")
    words = overrides
    if chosen and not untrained:
        settings.check_published(chosen[0])
        words = [f"eval.{word}" if word.startswith("drafter=") else word for word in words]
    if untrained or any(word.startswith("eval.drafter=") for word in words):
        return settings.load_published(words, report=name == "eval")
    folder = compose(overrides, "eval").run.dir
    if not folder:
        fix = "Add run.dir=runs/<name>."
        if name in DECODING:
            fix = f"{fix} Without a run: drafter=<folder, hub id or name> target=<model>."
        raise ConfigError("run.dir", "", f"{name} needs a finished run.", fix)
    return settings.load_run(str(folder), overrides)


def _help(name: str, words: list[str], program: str, multirun: bool) -> int:
    from outrider.launch import help as pages

    verb = VERBS[name]
    if name in pages.USAGE:
        explain = f"\n\n{pages.EXPLAIN}" if verb.explains else ""
        own, meaning = pages.USAGE[name]
        usage = f"{meaning}{explain}\n\nexamples{pages.EXAMPLES[name]}"
        return _print(f"{program} {own}: {verb.line}\n\n{usage}")
    if name == "bench" and words:
        return pages.benchmark(f"outrider bench {words[0]}", _benchmark(words))
    if name == "bench":
        lines = "\n".join(f"  {name:<14}{bench.line}" for name, bench in BENCHES.items())
        return _print(f"{program} BENCH [key=value ...]: {verb.line}\n\n{lines}")
    own = "sweep" if multirun else verb.group
    return pages.reference(program, verb, own, everything="all" in words)


def _multirun(name: str, overrides: list[str]) -> int:
    launched = {"TORCHELASTIC_RUN_ID", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or launched & os.environ.keys():
        why = "Under a launcher every rank would run every job of the sweep."
        raise ConfigError("--multirun", True, why, "Use outrider train -m ..., without it.")
    if name != "train":
        why = "Only training runs can be swept."
        raise ConfigError("--multirun", True, why, "Use outrider train -m ...")
    from outrider.launch.sweep import sweep

    return sweep(overrides)


def _print(text: str) -> int:
    print(for_terminal(text))
    return 0


if __name__ == "__main__":
    command()
