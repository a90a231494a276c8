"""A folder of weights in json and safetensors, read with suspicion.

Reading opens headers alone and counts: what an index promises must lie in its files, and what lies
there must be promised. Whoever takes the weights has to account for every key. A pickle is never
read, under whatever name it comes; `outrider.json` beside the weights says in Outrider's words what
an outside format leaves open (`STAMP`).
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.conf.errors import Damaged, RunError
from outrider.conf.files import read_json, sha256_of

STAMP = "outrider.json"
STEMS = ("model", "medusa_lm_head")  # of weight files, the first one found counts
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # zip, pickle
FIX = "Fetch the folder again from where it is whole."
CONVERT = (
    "Convert it where you trust it: torch.load(FILE, weights_only=True), then "
    "safetensors.torch.save_file(weights, 'model.safetensors'), and give that folder."
)
Shapes = dict[str, tuple[int, ...]]


class Folder:
    """config.json and the headers of the weight files.

    Attributes:
        files: key -> name of the file that holds it.
        shapes: key -> shape.
    """

    def __init__(self, path: Path, fix: str = FIX) -> None:
        """
        Raises:
            RunError: something is missing, cut off, contradictory, or a pickle.
        """
        self.path, self.fix = path, fix
        self.config: dict[str, Any] = read_json(path / "config.json", fix)
        stem = next((s for s in STEMS if self._weights(s)), None)
        if stem is None:
            raise self._without_weights()
        index = path / f"{stem}.safetensors.index.json"
        self.shapes: Shapes = {}
        self.files: dict[str, str] = {}
        if index.exists():
            self._read_index(index)
        else:
            self._read_header(f"{stem}.safetensors")

    def _weights(self, stem: str) -> bool:
        ends = (".safetensors", ".safetensors.index.json")
        return any((self.path / f"{stem}{end}").exists() for end in ends)

    def _without_weights(self) -> RunError:
        found = sorted(f.name for f in self.path.iterdir() if f.suffix in PICKLES)
        if found:
            why = "a pickle, which can run any code when it is read"
            return RunError(f"{self.path / found[0]} is {why}; it is not opened.", CONVERT)
        wanted = "neither model.safetensors nor its index"
        return RunError(f"{self.path} holds {wanted}, so no weights can be read.", self.fix)

    def _read_index(self, index: Path) -> None:
        said = read_json(index, self.fix)
        where, about = said.get("weight_map"), said.get("metadata") or {}
        total = about.get("total_size", 0) if isinstance(about, dict) else None
        why = "does not say which file beside it holds which weight."
        if not isinstance(where, dict) or not isinstance(total, int | float):
            raise RunError(f"{index} {why}", self.fix)
        if any(Path(str(name)).name != name for name in where.values()):
            raise RunError(f"{index} {why}", self.fix)
        for name in sorted(set(where.values())):
            self._read_header(name)
        if self.files != where:
            wrong = {k for k in self.files | where if self.files.get(k) != where.get(k)}
            what = f"{sorted(wrong)[0]} and {len(wrong) - 1} more" if wrong else ""
            raise Damaged(f"{index} and its files disagree about {what}.", self.fix)
        size = sum(payload(self.path / name) for name in set(where.values()))
        if size < total:
            promised = f"{total:,} bytes of weights"
            raise Damaged(f"{index} promises {promised}, and its files hold {size:,}.", self.fix)

    def _read_header(self, name: str) -> None:
        file = self.path / name
        try:
            with file.open("rb") as stream:
                start = stream.read(9)  # of safetensors: a length of 8 bytes, then an object
            if start.startswith(MAGIC) and start[8:] != b"{":
                why = "a pickle in disguise, which can run any code when it is read"
                raise RunError(f"{file} is {why}; it is not opened.", CONVERT)
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    self.shapes[key] = tuple(opened.get_slice(key).get_shape())
                    self.files[key] = name
        except (OSError, SafetensorError) as error:
            why = f"cannot be read: {error}; it is damaged or truncated."
            raise Damaged(f"{file} {why}", self.fix) from None

    # ---- config.json ----

    def part(self, name: str, needed: bool = True) -> dict[str, Any]:
        """An object inside config.json; {} where it may be absent."""
        found = self.config.get(name)
        if found is None and not needed:
            return {}
        if not isinstance(found, dict):
            raise self.wrong(f"config.json has no object {name}.")
        return found

    def count(self, name: str, usual: int, config: Mapping[str, Any] | None = None) -> int:
        """A whole number of config.json, or of a part of it."""
        found = (self.config if config is None else config).get(name)
        found = usual if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.wrong(
                f"config.json says {name}: {found}, and it must be a number from 1 on."
            )
        return found

    def numbers(self, name: str, found: Any) -> tuple[int, ...] | None:
        """A list of numbers, or none."""
        if found is None:
            return None
        if not isinstance(found, list) or not all(type(n) is int for n in found):
            raise self.wrong(f"config.json says {name}: {found}, and it must be a list of numbers.")
        return tuple(found)

    # ---- keys ----

    def account(
        self, where: Mapping[str, str], needed: Iterable[str], optional: Iterable[str] = ()
    ) -> None:
        """Every key must be known, and every known one be there.

        Args:
            where: bare key -> key in the file, of all that should be accounted for.

        Raises:
            RunError: names one of each kind, and what a stray key was probably meant to be.
        """
        needed = set(needed)
        missing = sorted(needed - where.keys())
        unknown = sorted(where.keys() - needed - set(optional))
        if not missing and not unknown:
            return
        said = []
        if missing:
            said.append(f"lacks {_some(missing)}")
        if unknown:
            meant = difflib.get_close_matches(unknown[0], missing, 1)
            guess = f" (is it {meant[0]}?)" if meant else ""
            stray = _some([where[key] for key in unknown])
            said.append(f"holds {stray}, which this format does not know{guess}")
        raise RunError(f"{self.path} {' and '.join(said)}.", self.fix)

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """These weights, as they are stored, in memory of their own: where a file has them they
        need not lie as sums are fastest, and sums would be rounded in another order.
        """
        out: dict[str, Tensor] = {}
        wanted = set(keys)
        for name in sorted({self.files[key] for key in wanted}):
            try:
                with safe_open(self.path / name, framework="pt") as opened:
                    here = [key for key in wanted if self.files[key] == name]
                    out.update({key: opened.get_tensor(key).clone() for key in sorted(here)})
            except (OSError, SafetensorError) as error:
                why = f"cannot be read: {error}"
                raise Damaged(f"{self.path / name} {why}", self.fix) from None
        return out

    def verify(self, hashes: Mapping[str, str]) -> None:
        """The files hold the very bytes that were written."""
        for name, sha256 in hashes.items():
            if not (self.path / name).exists() or sha256_of(self.path / name) != sha256:
                why = "its bytes are not the ones that were written."
                raise Damaged(f"{self.path / name} is damaged: {why}", self.fix)

    def wrong(self, why: str, fix: str | None = None) -> RunError:
        return RunError(f"{self.path}: {why}", fix or self.fix)


def _some(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"


def payload(file: Path) -> int:
    """Bytes of the weights in a safetensors file: behind a length of 8 bytes and the header."""
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return file.stat().st_size - 8 - header


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal once both are of the coarser type."""
    theirs = theirs.to(ours.device)
    if ours.shape != theirs.shape:
        return False
    return torch.equal(ours.to(theirs.dtype), theirs) or torch.equal(ours, theirs.to(ours.dtype))
