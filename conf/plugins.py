"""Plugins: modules of the user that register drafters, losses and other parts by name.

    outrider train run.plugins=[mine.py] drafter.loss=[focal]

`load_plugins` imports a module or file that the command line or Python names. A configuration that
is read from a folder is data: it records its plugins, and `require_loaded` refuses it until the
user names them. Nothing else imports code by a name of a configuration.
"""

import importlib
import importlib.util
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from outrider.conf.errors import ConfigError

T = TypeVar("T")
KEY = "run.plugins"
OWN, PYTHON = "Outrider", "Python"  # who registered a part, besides plugins
WORD = re.compile(r"\+{0,2}run\.plugins=")
FILE, MODULE = re.compile(r"[\w.~/+-]+\.py"), re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NAME = "[a-z][a-z0-9_]*"  # of a part
OWN_PART = f"A part of your own: {KEY}=[MODULE or FILE.py], which registers it."

LOADED: dict[str, str] = {}  # plugin -> as it was named
_REGISTRIES: list["Registry[Any]"] = []
_importing: list[str] = []  # the plugin, as it was named


class Registry(UserDict[str, T]):
    """The parts of one kind, by name. A name is registered once: `LOSSES["focal"] = TermSpec(..)`.

    Only Python outside of plugins may register its own names again: a cell that runs twice.

    Attributes:
        owner: who registered each part: OWN, PYTHON or a plugin, as it was named.
    """

    def __init__(
        self, kind: str, form: Any, parts: Mapping[str, T], *, pattern: str = NAME,
        taken: Iterable[str] = (), on_add: Callable[[str, T], object] = lambda name, part: None,
        on_remove: Callable[[str], object] = lambda name: None,
    ) -> None:  # fmt: skip
        """
        Args:
            kind: of the parts, for messages.
            form: class of the parts.
            parts: Outrider's own.
            pattern: of names.
            taken: names of Outrider's own parts that are not in `parts`.
            on_add, on_remove: called with every part that is added, and the name of one removed.
        """
        self.kind, self.form, self.pattern = kind, form, pattern
        self.on_add, self.on_remove = on_add, on_remove
        self.owner = dict.fromkeys((*parts, *taken), OWN)
        super().__init__()
        self.data.update(parts)
        _REGISTRIES.append(self)

    def __setitem__(self, name: str, part: T) -> None:
        owner = _importing[-1] if _importing else PYTHON
        before, key = self.owner.get(name), KEY if _importing else self.kind
        value, why, fix = owner if _importing else name, "", ""
        if not (isinstance(name, str) and re.fullmatch(self.pattern, name)):
            why, fix = f"{name!r} cannot be the name of a {self.kind}.", f"Names: {self.pattern}"
        elif not isinstance(part, self.form):
            why = f"The {self.kind} {name} is of type {type(part).__name__}."
            fix = f"Register a {self.form.__name__}: see docs/extending.md."
        elif before is not None and not before == owner == PYTHON:
            why = f"The {self.kind} {name} is registered already, by {before}."
            fix = "Choose another name."
        if why:
            raise ConfigError(key, value, why, fix)
        self.on_add(name, part)
        self.owner[name] = owner
        super().__setitem__(name, part)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.owner[name]
        self.on_remove(name)

    def plugin_of(self, name: str) -> str | None:
        """Return the plugin that registered a part, without its folder; None if none did."""
        owner = self.owner.get(name, OWN)
        return None if owner in (OWN, PYTHON) else _without_folder(owner)


def named_plugins(words: Sequence[str]) -> list[str]:
    """Return the plugins that overrides name, as in ["run.plugins=[mine.py]"].

    Raises:
        ConfigError: a value is not a list of names.
    """
    plugins = list[str]()
    for word in filter(WORD.match, words):
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import OverrideParseException

        try:
            (override,) = OverridesParser.create().parse_overrides([word])
            value = None if override.is_sweep_override() else override.value()
        except OverrideParseException:
            value = None
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            why = "This is not a list of modules or files."
            raise ConfigError(KEY, word.partition("=")[2], why, f"Like {KEY}=[mine.py].")
        plugins += value
    return plugins


def load_plugins(plugins: Sequence[str]) -> None:
    """Import modules and files that the user names; those that are imported already stay.

    Args:
        plugins: names of modules on Python's path ("my_package.losses"), or .py files.

    Raises:
        ConfigError: there is none of this name, it fails on import, or registers a name twice.
    """
    for named in plugins:
        plugin = _plugin(named)
        place = str(_file(named)) if FILE.fullmatch(named) else named
        known = LOADED.get(plugin)
        if known is not None and known != place:
            why = f"A plugin of this name is loaded already: {known}."
            raise ConfigError(KEY, named, why, "Rename one of the two files.")
        if known is None:
            _import(named, place)
            LOADED[plugin] = place


def require_loaded(plugins: Sequence[str]) -> None:
    """Raise a `ConfigError` unless all plugins that a configuration records are imported."""
    missing = [named for named in plugins if _plugin(named) not in {*LOADED, *sys.modules}]
    if missing:
        why = "The recorded configuration uses parts of these plugins."
        raise ConfigError(KEY, list(plugins), why, advice(missing[:16]))


def advice(plugins: Sequence[str]) -> str:
    """Return how to use a folder that records plugins."""
    return (
        f"Code that a folder names is not run. If you trust it, add {KEY}=[{','.join(plugins)}]; "
        "in Python, load_plugins of outrider.api."
    )


def merge_plugins(recorded: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return all plugins, once each: those of a run folder, and those that a command adds."""
    known = {_plugin(named) for named in recorded}
    return [*recorded, *(named for named in given if _plugin(named) not in known)]


def is_plugin(named: object) -> bool:
    """Return whether this can be the name of a plugin."""
    return isinstance(named, str) and bool(FILE.fullmatch(named) or MODULE.fullmatch(named))


def _plugin(named: Any) -> str:
    """Return the name by which a plugin is known: of a file without folder and suffix."""
    if is_plugin(named):
        return Path(named).stem if FILE.fullmatch(named) else named
    why = "This is neither the name of a module nor a .py file."
    fix = "Like [my_package.losses] or [mine.py]; paths have letters, digits and . ~ / + - _ only."
    raise ConfigError(KEY, named, why, fix)


def _without_folder(named: str) -> str:
    return Path(named).name if FILE.fullmatch(named) else named


def _file(named: str) -> Path:
    file = Path(named).expanduser().absolute().resolve()
    if not file.is_file():
        fix = f"Paths start at the current folder, {Path.cwd()}."
        raise ConfigError(KEY, named, "There is no such file.", fix)
    return file


def _import(named: str, place: str) -> None:
    """Import a plugin; what a failed one has registered is removed."""
    _importing.append(named)
    try:
        _import_file(Path(place)) if FILE.fullmatch(named) else importlib.import_module(named)
    except BaseException as error:
        for registry in _REGISTRIES:
            for name in [name for name, owner in registry.owner.items() if owner == named]:
                del registry[name]
        if isinstance(error, ConfigError | KeyboardInterrupt):
            raise
        raise _explain(named, error) from error
    finally:
        _importing.pop()


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module of its own name; a module that is this file stays as it is."""
    for module in list(sys.modules.values()):
        if (known := getattr(module, "__file__", None)) and Path(known).resolve() == file:
            return module
    name = f"outrider_plugin_{file.stem}"  # may not hide another module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _explain(named: str, error: BaseException) -> ConfigError:
    """Return what is wrong with a plugin that cannot be imported."""
    absent = error.name if isinstance(error, ModuleNotFoundError) else None
    if absent is not None and f"{named}.".startswith(f"{absent}."):
        why, file = "There is no module of this name.", f"{named.replace('.', '/')}.py"
        fix = "Install it, add its folder to PYTHONPATH, or name a file: [FILE.py]."
        return ConfigError(KEY, named, why, f"Write [{file}]." if Path(file).is_file() else fix)
    place, trace = "", error.__traceback__
    while trace is not None:  # the innermost line of the plugin
        if trace.tb_frame.f_globals.get("__name__") in (named, f"outrider_plugin_{_plugin(named)}"):
            place = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        place = f", line {error.lineno}"
    first = (str(error).strip() or "no message").splitlines()[0]
    why = f"It fails on import{place}: {type(error).__name__}: {first}"
    fix = "Correct it; OUTRIDER_DEBUG=1 shows the traceback."
    if absent is not None:
        fix = f"Install {absent}, or add its folder to PYTHONPATH."
    return ConfigError(KEY, named, why, fix)
