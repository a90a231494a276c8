"""Where rows come from: a file, a folder, the model hub, an address; all read as a stream.

A place is written as one word: a name of `presets`, a name and a copy (`mt_bench@question.jsonl`),
a file, a folder that `datasets` reads (parquet files, a clone of a hub repository, what
`save_to_disk` wrote), a hub id (`org/name`) or a https address of a file.
"""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import sha256_of
from outrider.data.dataset_registry import DATASETS, PER_ROW, SUITES, Preset
from outrider.data.readers import SUFFIXES, Patience, records

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ADDRESS = re.compile(r"https?://")
SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves behind
PLAIN = Preset("", "", "")  # rows as they are


@dataclass(frozen=True)
class Source:
    """Rows that can be read any number of times.

    Attributes:
        place: file, folder, hub id or address.
        key: the setting that named it, for messages.
        splits: the part of a data set to read: the first of these that it has.
        skip_bad: bad rows to leave out before the source is refused.
    """

    place: str
    key: str
    name: str = ""
    preset: Preset = PLAIN
    subset: str | None = None
    splits: tuple[str, ...] = ()
    revision: str | None = None
    skip_bad: int = 0

    @property
    def local(self) -> Path | None:
        """The file or folder on this machine, if it is one."""
        path = Path(self.place).expanduser()
        return path if path.exists() or (path.suffix in SUFFIXES and not self.remote) else None

    @property
    def remote(self) -> bool:
        return ADDRESS.match(self.place) is not None

    def rows(self, noted: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """One dict per row, in a shape that `sources` knows if there is a way.

        Args:
            noted: called for every bad row that is left out.

        Raises:
            ConfigError: there is nothing at the place. Raised by the call itself.
            RunError: a row cannot be read, and there are more of them than `skip_bad`.
        """
        option = "data.skip_bad" if self.key.startswith("data.") else ""
        rows = self._read(Patience(self.skip_bad, noted, option))
        return rows if self.preset is PLAIN else map(self.preset.row, rows)

    def _read(self, patience: Patience) -> Iterator[dict[str, Any]]:
        file = self._file()
        if file is None:
            return _dataset(self)
        return records(file, key=self.key, patience=patience)

    def _file(self) -> Path | None:
        """The single file that holds the rows, fetched if need be; None: `datasets` reads it."""
        here = self.local
        if here is not None:
            return here if not here.is_dir() else _inside(here, self.preset.file)
        if self.remote:
            return _fetched(self.place, self.key)
        return None if self.preset.file is None else _hub_file(self)

    def fingerprint(self) -> str:
        """Which rows these are: a hash of the bytes, or the commit on the hub."""
        file = self._file()
        if file is not None:
            known = sha256_of(file)
        else:
            known = f"{_version(self)} {self.subset} {' '.join(self.splits)}"
        return f"{self.name} {known}" if self.name else known

    @property
    def uniform(self) -> bool:
        """Whether all rows are known to be of one category."""
        return bool(self.name) and self.preset.category not in PER_ROW

    def said(self) -> str:
        """Name, place and licence, for people; "" for what is the user's own."""
        if not self.name:
            return ""
        part = f" ({self.splits[0]})" if self.splits and self.local is None else ""
        return f"{self.name}: {self.place}{part}, licence {self.preset.licence}"


def data_source(
    word: str,
    key: str = "data.path",
    *,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    skip_bad: int = 0,
) -> Source:
    """Training text: a name of `DATASETS`, or a place.

    Raises:
        ConfigError: neither a name nor a place, or a file that is said to have parts.
    """
    source = _source(word, key, DATASETS, ("train",))
    here = source.local
    for name, value in (("subset", subset), ("split", split), ("revision", revision)):
        if value is not None and (source.remote or (here is not None and here.is_file())):
            why, fix = f"{source.place} is a single file.", f"Drop data.{name}."
            raise ConfigError(f"data.{name}", value, why, fix)
    return replace(
        source,
        subset=subset or source.subset,
        splits=(split,) if split else source.splits,
        revision=revision,
        skip_bad=skip_bad,
    )


def suite_source(word: str, key: str = "eval.prompts") -> Source:
    """Prompts for measuring: a name of `SUITES`, or a place.

    Raises:
        ConfigError: neither a name nor a place.
    """
    return _source(word, key, SUITES, ("test", "validation", "train"))


def _source(word: str, key: str, names: Mapping[str, Preset], splits: tuple[str, ...]) -> Source:
    name, copied, place = word.partition("@")
    preset = names.get(name)
    if preset is None:
        return _checked(Source(word, key, splits=splits), names)
    splits = (preset.split, *splits) if preset.split else splits
    source = Source(place if copied else preset.place, key, name, preset, preset.subset, splits)
    return _checked(source, names)


def _checked(source: Source, names: Mapping[str, Preset]) -> Source:
    """Refuse a word that can be no place; nothing is fetched for that."""
    place, here = source.place, source.local
    if (here is not None and here.exists()) or source.remote:
        return source
    if here is None and HUB_ID.fullmatch(place):
        return source
    near = difflib.get_close_matches(place, names, 1)
    fix = f"Did you mean {near[0]}? " if near else f"Names: {', '.join(names)}. "
    fix += f"Paths start at the current folder, {Path.cwd()}."
    raise ConfigError(source.key, place, "There is no such file, folder or data set.", fix)


def _inside(folder: Path, file: str | None) -> Path | None:
    """A folder's one file of a preset, if this is a copy of that repository."""
    return folder / file if file is not None and (folder / file).is_file() else None


def _fetched(address: str, key: str) -> Path:
    """The file behind an address, fetched once."""
    from torch.hub import download_url_to_file

    from outrider.models.load import cache_home

    name = f"{hashlib.sha256(address.encode()).hexdigest()[:16]}-{address.rpartition('/')[2]}"
    file = cache_home() / "files" / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            download_url_to_file(address, str(file), progress=False)
        except (OSError, ValueError) as error:
            raise _unreachable(key, address, error) from None
    return file


def _hub_file(source: Source) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        found = hf_hub_download(
            source.place, str(source.preset.file), repo_type="dataset", revision=source.revision
        )
    except Exception as error:  # the hub's errors have no common class
        raise _unreachable(source.key, source.place, error) from None
    return Path(found)


def _unreachable(key: str, place: str, error: Exception) -> ConfigError:
    why = f"It could not be read: {_first_line(error)}"
    fix = "See that the name is right and the network is there, or give a copy: NAME@FILE."
    return ConfigError(key, place, why, fix)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _version(source: Source) -> str:
    """The commit of a hub repository; of a folder, a hash over its files."""
    if source.local is not None:
        digest = hashlib.sha256()
        for file in sorted(f for f in source.local.rglob("*") if f.is_file()):
            digest.update(f"{file.relative_to(source.local)} {sha256_of(file)}".encode())
        return digest.hexdigest()
    from huggingface_hub import HfApi

    try:
        return f"{source.place}@{HfApi().dataset_info(source.place, revision=source.revision).sha}"
    except Exception as error:  # the hub's errors have no common class
        raise _unreachable(source.key, source.place, error) from None


def _dataset(source: Source) -> Iterator[dict[str, Any]]:
    """What `datasets` reads, as a stream."""
    import datasets

    here = source.local
    try:
        if here is not None and any((here / name).is_file() for name in SAVED):
            found = datasets.load_from_disk(str(here))
        else:
            found = datasets.load_dataset(
                str(here or source.place), _subset(source), revision=source.revision, streaming=True
            )
    except Exception as error:  # there are a dozen kinds, and none is a bug of ours
        raise _unreachable(source.key, source.place, error) from None
    return _guarded(iter(_split(found, source)), source)


def _subset(source: Source) -> str | None:
    """The subset asked for; a copy of a preset's rows need not have subsets."""
    if source.local is None or not source.name or source.subset is None:
        return source.subset
    import datasets

    names = datasets.get_dataset_config_names(str(source.local))
    return source.subset if source.subset in names else None


def _split(found: Any, source: Source) -> Any:
    if not isinstance(found, dict):
        return found
    chosen = next((name for name in source.splits if name in found), None)
    if chosen is None and len(found) == 1 and (source.name or len(source.splits) > 1):
        chosen = next(iter(found))
    if chosen is None:
        why = f"{source.place} has no part {source.splits[0]}; it has {', '.join(found)}."
        raise ConfigError(source.key, source.place, why, "Choose one with data.split=...")
    return found[chosen]


def _guarded(rows: Iterator[dict[str, Any]], source: Source) -> Iterator[dict[str, Any]]:
    """What goes wrong in the middle of a stream, told as an error of its source."""
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # of arrow, json, the network: there is no common class
            cause = error.__cause__ or error
            message = f"{source.place} cannot be read on: {_first_line(cause)}"  # type: ignore[arg-type]
            raise RunError(message, "Fetch or write it again, or give a file of its own.") from None
        yield row
