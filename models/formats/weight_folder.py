"""A folder of weights in JSON and safetensors, validated when it is opened.

Opening reads headers only: index and files must agree about every tensor. Pickles are never read,
whatever their file name. `outrider.json` (`SIDECAR`) is in the same folder.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.files import read_json, sha256_of
from outrider.models.target import hf_folder
from outrider.models.target.hf_folder import read_weight_map, summarise, weights_size

SIDECAR = "outrider.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")  # the first that exists is used
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip, pickle
FIX = "Fetch the folder again."  # for missing, short and damaged files only
CORRECT = "Correct config.json in that folder."
NAMES = "Rename or convert its tensors (docs/formats.md has the names), or use another drafter."
DAMAGE = (  # what Python raises for a value of another type or size
    TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, MemoryError,
    SafetensorError,
)  # fmt: skip
CONVERT = (
    "Convert it if you trust it: torch.load(FILE, weights_only=True), then "
    "safetensors.torch.save_file(weights, 'model.safetensors'), and use that folder."
)


class WeightFolder:
    """config.json and the headers of the weight files.

    Opening raises RunError if a file is missing, truncated, contradictory, or a pickle; `fix` is
    the advice of that error. Other errors say what to correct, unless the caller gives a `fix`.
    """

    def __init__(self, path: Path, fix: str = FIX) -> None:
        self.path, self.fix = path, fix
        self.correct, self.names = (CORRECT, NAMES) if fix == FIX else (fix, fix)
        self.config: dict[str, Any] = read_json(path / "config.json", fix)
        self.shapes: dict[str, tuple[int, ...]] = {}  # key -> shape
        self.dtypes: dict[str, str] = {}  # key -> dtype as in the header, such as "BF16"
        self.files: dict[str, str] = {}  # key -> name of its file
        self.architectures: list[str] = self.config.get("architectures") or []
        if not isinstance(self.architectures, list):
            raise self.error(f"config.json has architectures: {self.architectures}, not a list.")
        self._read_headers()

    def _read_headers(self) -> None:
        for name in WEIGHTS:
            if (index := self.path / f"{name}.index.json").exists():
                return self._read_index(index)
            if (self.path / name).exists():
                return self._read_header(name)
        if pickles := sorted(f.name for f in self.path.iterdir() if f.suffix in PICKLES):
            raise self._pickle(self.path / pickles[0], "a pickle")
        raise RunError(f"{self.path} holds neither {WEIGHTS[0]} nor its index.", self.fix)

    def _pickle(self, file: Path, what: str) -> RunError:
        why = f"{what}, which can run any code when it is read"
        return RunError(f"{file} is {why}; it is not opened.", CONVERT)

    def _read_index(self, index: Path) -> None:
        expected = read_weight_map(index, self.fix)
        about: Any = read_json(index, self.fix).get("metadata") or {}
        total: Any = about.get("total_size", 0) if isinstance(about, dict) else None
        if not isinstance(total, int | float):
            raise RunError(f"{index} has no number metadata.total_size.", self.fix)
        names = sorted(set(expected.values()))
        for name in names:
            self._read_header(name)
        if wrong := sorted({key for key, _ in self.files.items() ^ expected.items()}):
            why = f"{index} and its files disagree about {summarise(wrong, 1)}."
            raise CorruptFile(why, self.fix)
        size = sum(weights_size(self.path / name) for name in names)
        if size < total:
            why = f"has total_size {total:,} bytes, and its files hold {size:,}."
            raise CorruptFile(f"{index} {why}", self.fix)

    def _read_header(self, name: str) -> None:
        file = self.path / name
        if file.exists() and not file.is_file():
            raise RunError(f"{file} is not a regular file.", self.fix)
        try:
            with file.open("rb") as stream:
                start = stream.read(9)  # of safetensors: a length of 8 bytes, then an object
            if start.startswith(MAGIC) and start[8:] != b"{":
                raise self._pickle(file, "a pickle with the extension of safetensors")
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    tensor = opened.get_slice(key)
                    self.shapes[key] = tuple(tensor.get_shape())
                    self.dtypes[key] = tensor.get_dtype()
                    self.files[key] = name
        except (OSError, SafetensorError) as error:
            why = f"cannot be read: {error}; it is damaged or truncated."
            raise CorruptFile(f"{file} {why}", self.fix) from None

    # ---- config.json ----

    def config_object(self, name: str, required: bool = True) -> dict[str, Any]:
        """Return an object inside config.json; {} for a missing one that is not required."""
        value = self.config.get(name)
        if value is None and not required:
            return {}
        if not isinstance(value, dict):
            raise self.error(f"config.json has no object {name}.")
        return value

    def positive_int(self, name: str, default: int, config: Mapping[str, Any] | None = None) -> int:
        """Return an integer >= 1 of config.json, or of a part of it."""
        value = (self.config if config is None else config).get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.error(f"config.json has {name}: {value}, which must be an integer >= 1.")
        return value

    def int_list(self, name: str, value: Any) -> tuple[int, ...] | None:
        """Return a list of integers as a tuple; None for None."""
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise self.error(f"{name} is {value}, and must be a list of integers.")
        return tuple(value)

    # ---- weights ----

    def check_keys(
        self, keys: Mapping[str, str], required: Iterable[str], optional: Iterable[str] = ()
    ) -> None:
        """Raise RunError for missing or unknown names; suggest the most similar missing name.

        Args:
            keys: name in the format -> key in the file.
        """
        missing = sorted(set(required) - keys.keys())
        unknown = sorted(keys.keys() - set(required) - set(optional))
        parts = []
        if missing:
            parts.append(f"lacks {summarise(missing, 1)}")
        if unknown:
            similar = difflib.get_close_matches(unknown[0], missing, 1)
            hint = f" (is it {similar[0]}?)" if similar else ""
            stray = summarise([keys[name] for name in unknown], 1)
            parts.append(f"holds {stray}, which this format does not define{hint}")
        if parts:
            raise RunError(f"{self.path} {' and '.join(parts)}.", self.names)

    def require_shape(self, key: str, shape: Iterable[int]) -> None:
        """Refuse a tensor of another shape than the drafter's."""
        if self.shapes[key] != tuple(shape):
            why = f"{key} is {list(self.shapes[key])}, and config.json and target require"
            fix = "Correct config.json, or use the target that it was trained for."
            raise self.error(f"{why} {list(shape)}.", fix)

    def tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of the stored tensors, not views of the file's memory.

        Memory of the file need not be aligned, and sums over it could be rounded in another order.
        """
        out, wanted = dict[str, Tensor](), set(keys)
        for name in sorted({self.files[key] for key in wanted}):
            try:
                with safe_open(self.path / name, framework="pt") as opened:
                    here = [key for key in wanted if self.files[key] == name]
                    out.update({key: opened.get_tensor(key).clone() for key in sorted(here)})
            except (OSError, SafetensorError) as error:
                why = f"{self.path / name} cannot be read: {error}"
                raise CorruptFile(why, self.fix) from None
        return out

    def check_hashes(self, hashes: Mapping[str, str]) -> None:
        """Compare the sha256 of weight files."""
        if unknown := sorted(hashes.keys() - set(self.files.values())):
            why = f"{SIDECAR} has the sha256 of {unknown[0]}, which holds no weights."
            raise self.error(why, self.fix)
        for name, sha256 in hashes.items():
            if not (self.path / name).exists() or sha256_of(self.path / name) != sha256:
                why = "its bytes are not the ones that were written."
                raise CorruptFile(f"{self.path / name} is damaged: {why}", self.fix)

    def error(self, why: str, fix: str | None = None) -> RunError:
        """Return an error that names the folder; by default config.json must be corrected."""
        return RunError(f"{self.path}: {why}", fix or self.correct)


@contextmanager
def damaged_means_error(folder: Path, fix: str = FIX, kind: str = "a drafter") -> Iterator[None]:
    """Turn what Python raises for values of other types or sizes into a RunError."""
    try:
        yield
    except (ConfigError, RunError):
        raise
    except DAMAGE as error:
        what = hf_folder.first_line(error)
        why = f"{folder} cannot be read as {kind}: {type(error).__name__}: {what}"
        raise RunError(why, fix) from error


def equal_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal in the coarser of their dtypes."""
    other = other.to(one.device)
    if one.shape != other.shape:
        return False
    return torch.equal(one.to(other.dtype), other) or torch.equal(one, other.to(one.dtype))


# ---- flags about which engines disagree ----------------------------------------------------------


def read_nested(folder: WeightFolder, name: str) -> dict[str, Any]:
    """Return the fields of config.json with those of an object inside it, which must agree."""
    nested = folder.config_object(name, required=False)
    for key, value in nested.items():
        if folder.config.get(key, value) != value:
            both = f"{folder.config[key]}, and its {name} {value}"
            raise folder.error(f"config.json has {key}: {both}.", f"Correct {key} in one of them.")
    return {**folder.config, **nested}


def read_flag(
    folder: WeightFolder, config: Mapping[str, Any], sidecar: Mapping[str, Any],
    name: str, ours: str, values: Any, default: Any = None,
) -> Any:  # fmt: skip
    """Return a flag of config.json, or of the drafter in outrider.json.

    Args:
        ours: the setting of the drafter that it is.
        values: what it may be: a tuple, or a description of integers.
        default: where all readers agree about an absent one.
    """
    value = config.get(name)
    if value is None:
        value = sidecar.get("drafter", {}).get(ours)
    if value is None:
        value = default
    if value is None:
        raise missing_flag(folder, name, values if isinstance(values, str) else _choices(values))
    if isinstance(values, tuple):
        valid = value in values and type(value) is bool
    elif isinstance(value, list):
        valid = bool(value) and all(type(n) is int for n in value)
    else:
        valid = type(value) is int and value >= 0
    if not valid:
        text = values if isinstance(values, str) else _choices(values)
        raise folder.error(f"{name} is {value}; it may be {text}.")
    return tuple(value) if isinstance(value, list) else value


def _choices(values: tuple[Any, ...]) -> str:
    return " or ".join(str(value).lower() for value in values)


def missing_flag(folder: WeightFolder, name: str, values: str) -> Exception:
    why = f"config.json lacks {name} ({values}), and engines disagree about its default."
    fix = f"Write into config.json which it was trained with, or into the drafter of {SIDECAR}."
    return folder.error(why, fix)


def require_rope(folder: WeightFolder, config: Mapping[str, Any]) -> None:
    """Refuse a config without the base of the rotary embedding."""
    parameters = config.get("rope_parameters")
    nested = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    if config.get("rope_theta") is None and nested is None:
        raise missing_flag(folder, "rope_theta", "the base of the rotary embedding")
