"""Sources of rows: a file, a folder, a hub repository or an address, read as a stream.

A source is given as one word: a name of `dataset_registry`, a name with a copy
(`mt_bench@question.jsonl`), a file, a folder that `datasets` reads (parquet files, a clone of a hub
repository, the output of `save_to_disk`), a hub id (`org/name`) or the https address of a file.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.files import sha256_of
from outrider.conf.hub import use_cache_if_unreachable
from outrider.conf.plugins import OWN_PART
from outrider.conf.schema import DataConfig
from outrider.conf.shown_text import mask_address, mask_credentials
from outrider.data.columns import rename_columns
from outrider.data.dataset_registry import CATEGORY_COLUMNS, DATASETS, SUITES, DatasetSpec
from outrider.data.readers import READERS, BadRowPolicy, read_records

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ADDRESS = re.compile(r"https?://")
SAVED = ("state.json", "dataset_dict.json")  # files of `save_to_disk`
UNNAMED = DatasetSpec("", "", "")  # rows stay as they are


@dataclass(frozen=True)
class Source:
    """Rows that can be read any number of times."""

    location: str  # file, folder, hub id or address
    option: str  # configuration key of the source, for messages
    name: str = ""  # in the registry; "" for the user's own data
    spec: DatasetSpec = UNNAMED
    subset: str | None = None
    splits: tuple[str, ...] = ()  # the first of these that the data set has is read
    revision: str | None = None
    skip_bad: int = 0  # bad rows that may be skipped
    columns: Mapping[str, str] = field(default_factory=dict)  # known field -> column

    @property
    def local_path(self) -> Path | None:
        """Return the file or folder on this machine, if it is one."""
        path = Path(self.location).expanduser()
        return path if path.exists() or (path.suffix in READERS and not self.remote) else None

    @property
    def remote(self) -> bool:
        return ADDRESS.match(self.location) is not None

    def rows(self, on_skip: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
        """Return one dict per row; those of named data sets in a shape of `conversations`.

        Raises:
            ConfigError: nothing is at the location. Raised by the call itself.
            RunError: more rows than `skip_bad` cannot be read.
        """
        option = "data.skip_bad" if self.option.startswith("data.") else ""
        if (file := self._file()) is None:
            rows = _dataset(self)
        else:
            policy = BadRowPolicy(self.skip_bad, on_skip, option)
            rows = read_records(file, key=self.option, policy=policy)
        if self.columns:
            rows = rename_columns(rows, self.columns)
        return rows if self.spec is UNNAMED else map(self.spec.normalise, rows)

    def _file(self) -> Path | None:
        """Return the single file with the rows, downloaded if needed; None: `datasets` reads."""
        local, name = self.local_path, self.spec.file
        if local is None and self.remote:
            return _download(self.location, self.option)
        if local is None:
            return None if name is None else _hub_file(self)
        if not local.is_dir():
            return local
        return local / name if name is not None and (local / name).is_file() else None

    def fingerprint(self) -> str:
        """Return what identifies these rows: a hash of the bytes, or the commit on the hub."""
        if (file := self._file()) is not None:
            version = sha256_of(file)
        else:
            version = f"{_version(self)} {self.subset} {' '.join(self.splits)}"
        if self.columns:
            version = f"{version} {json.dumps(dict(self.columns), sort_keys=True)}"
        return f"{self.name} {version}" if self.name else version

    @property
    def single_category(self) -> bool:
        """Return whether all rows are known to be of one category."""
        return bool(self.name) and self.spec.category not in CATEGORY_COLUMNS

    def describe(self) -> str:
        """Return name, location and licence as a message; "" for the user's own data."""
        if not self.name:
            return ""
        part = f" ({self.splits[0]})" if self.splits and self.local_path is None else ""
        place = mask_credentials(self.location)
        return f"{self.name}: {place}{part}, licence {self.spec.licence}"


def data_source(
    word: str, option: str = "data.path", *, subset: str | None = None, split: str | None = None,
    revision: str | None = None, skip_bad: int = 0,
) -> Source:  # fmt: skip
    """Return a source of training text: a name of `DATASETS`, or a location.

    Raises ConfigError if it is neither, or if a single file is to have a subset, split or revision.
    """
    source = _source(word, option, DATASETS, ("train",))
    local = source.local_path
    for name, value in (("subset", subset), ("split", split), ("revision", revision)):
        if value is not None and (source.remote or (local is not None and local.is_file())):
            why, fix = f"{source.location} is a single file.", f"Drop data.{name}."
            raise ConfigError(f"data.{name}", value, why, fix)
    splits = (split,) if split else source.splits
    subset = subset or source.subset
    return replace(source, subset=subset, splits=splits, revision=revision, skip_bad=skip_bad)


def require_path(data: DataConfig) -> None:
    """Raise ConfigError for a configuration without `data.path` that needs one."""
    if data.path is None and data.name == "jsonl":
        fix = "Add data.path=<file or name>, or use data=self; in Python: train(config, rows=...)."
        raise ConfigError("data.path", None, "data=jsonl needs a file.", fix)
    if data.path is None and data.columns:
        why = "They are those of data.path, which is not set."
        raise ConfigError("data.columns", data.columns, why, "Set data.path, or leave them out.")


def suite_source(word: str, option: str = "eval.prompts") -> Source:
    """Return a source of prompts for evaluation; ConfigError if `word` is no name or location."""
    return _source(word, option, SUITES, ("test", "validation", "train"))


def _source(
    word: str, option: str, specs: Mapping[str, DatasetSpec], splits: tuple[str, ...]
) -> Source:
    name, copied, copy = word.partition("@")
    spec = specs.get(name)
    if spec is None:
        return _check_location(Source(word, option, splits=splits), specs)
    splits = (spec.split, *splits) if spec.split else splits
    location = copy if copied else spec.location
    return _check_location(Source(location, option, name, spec, spec.subset, splits), specs)


def _check_location(source: Source, specs: Mapping[str, DatasetSpec]) -> Source:
    """Raise ConfigError for what can be no location; nothing is downloaded."""
    location, local = source.location, source.local_path
    if (local is not None and local.exists()) or source.remote:
        return source
    if local is None and HUB_ID.fullmatch(location):
        return source
    near = difflib.get_close_matches(location, specs, 1)
    fix = f"Did you mean {near[0]}? " if near else f"Names: {', '.join(specs)}. "
    fix += f"Paths start at the current folder, {Path.cwd()}. {OWN_PART}"
    raise ConfigError(source.option, location, "There is no such file, folder or data set.", fix)


def _download(address: str, option: str) -> Path:
    from torch.hub import download_url_to_file

    from outrider.conf.paths import cache_home

    masked = mask_credentials(address)  # a saved run, which has only this, finds the same file
    name = f"{hashlib.sha256(masked.encode()).hexdigest()[:16]}-{masked.rpartition('/')[2]}"
    file = cache_home() / "files" / name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with _reaching(option, address):
            download_url_to_file(address, str(file), progress=False)
    return file


def _hub_file(source: Source) -> Path:
    from huggingface_hub import hf_hub_download

    use_cache_if_unreachable()
    name = str(source.spec.file)
    with _reaching(source.option, source.location):
        return Path(
            hf_hub_download(source.location, name, repo_type="dataset", revision=source.revision)
        )


@contextmanager
def _reaching(option: str, location: str) -> Iterator[None]:
    """Raise ConfigError for an error of the hub, `datasets` or torch: they have no common class."""
    try:
        yield
    except Exception as error:
        why = f"It could not be read: {mask_address(location, _first_line(error))}"
        fix = "Check the name and the network, or give a copy: NAME@FILE."
        raise ConfigError(option, location, why, fix) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _version(source: Source) -> str:
    """Return the commit of a hub repository, or a hash over the files of a folder."""
    if source.local_path is not None:
        digest = hashlib.sha256()
        for file in sorted(f for f in source.local_path.rglob("*") if f.is_file()):
            digest.update(f"{file.relative_to(source.local_path)} {sha256_of(file)}".encode())
        return digest.hexdigest()
    from huggingface_hub import HfApi

    use_cache_if_unreachable()
    with _reaching(source.option, source.location):
        info = HfApi().dataset_info(source.location, revision=source.revision)
    return f"{source.location}@{info.sha}"


def _dataset(source: Source) -> Iterator[dict[str, Any]]:
    local = source.local_path
    if local is None:
        use_cache_if_unreachable()
    import datasets

    for file in local.rglob("*") if local is not None else ():
        if file.exists() and not (file.is_file() or file.is_dir()):
            why, fix = f"{file.name} is not a regular file.", "Remove it, or give one file."
            raise ConfigError(source.option, source.location, why, fix)
    with _reaching(source.option, source.location):
        if local is not None and any((local / name).is_file() for name in SAVED):
            data = datasets.load_from_disk(str(local))
        else:
            data = datasets.load_dataset(
                str(local or source.location), _subset(source),
                revision=source.revision, streaming=True,
            )  # fmt: skip
    return _with_run_errors(iter(_split(data, source)), source)


def _subset(source: Source) -> str | None:
    """Return the subset to load; a copy of a named data set need not have subsets."""
    if source.local_path is None or not source.name or source.subset is None:
        return source.subset
    import datasets

    names = datasets.get_dataset_config_names(str(source.local_path))
    return source.subset if source.subset in names else None


def _split(data: Any, source: Source) -> Any:
    if not isinstance(data, dict):
        return data
    split = next((name for name in source.splits if name in data), None)
    if split is None and len(data) == 1 and (source.name or len(source.splits) > 1):
        split = next(iter(data))
    if split is None:
        why = f"{source.location} has no split {source.splits[0]}; it has {', '.join(data)}."
        raise ConfigError(source.option, source.location, why, "Choose one with data.split=...")
    return data[split]


def _with_run_errors(rows: Iterator[dict[str, Any]], source: Source) -> Iterator[dict[str, Any]]:
    """Yield the rows; raise RunError for any error of the stream."""
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # of arrow, json, the network: there is no common class
            why = _first_line(error.__cause__ or error)
            fix = "Download or write it again, or give its file."
            location = mask_credentials(source.location)
            why = mask_address(source.location, why)
            raise RunError(f"{location} cannot be read on: {why}", fix) from None
        yield row
