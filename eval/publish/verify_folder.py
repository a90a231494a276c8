"""Check a published drafter: `python verify.py [FOLDER] [--target TARGET]`.

The files are compared with golden.json (sha256 of every file) and outrider.json (name, shape and
dtype of every tensor); this needs only Python. With Outrider installed and a target given, the
drafter is also loaded, and its logits for a short text are compared with those in golden/.

This file is published as `verify.py`, so it imports Outrider only inside `check_logits`.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

OLD_OUTPUTS, HASHES, SIDECAR = "golden.safetensors", "golden.json", "outrider.json"
LARGEST_JSON = 1 << 26  # bytes
DAMAGED = AttributeError, LookupError, RecursionError, TypeError, ValueError


class Unreadable(Exception):
    """A file that cannot be read, or lacks what it should hold."""


def main(words: list[str] | None = None) -> int:
    """Print what was checked, what was not, and every problem; return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check a published drafter.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--target", help="the target: a folder, hub id, tiny or smollm2")
    args = parser.parse_args(words)
    problems, checked = check_files(args.folder)
    skipped = "the files differ" if problems else ""
    if not problems:
        problems, logits, skipped = check_logits(args.folder, args.target)
        checked += logits
    lines = [f"checked: {line}" for line in checked]
    lines += [f"golden logits not checked: {skipped}"] * bool(skipped)
    lines += [f"WRONG: {problem}" for problem in problems]
    for line in lines:  # names in the files may hold control characters
        print("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in line))
    print("FAILED" if problems else "OK")
    return int(bool(problems))


# ---- files ---------------------------------------------------------------------------------------


def check_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the problems of the files, and what was checked."""
    problems: list[str] = []
    checked: list[str] = []
    for check in (check_hashes, check_tensors):
        try:
            differences, summary = check(folder)
        except (OSError, Unreadable) as error:
            differences, summary = [str(error)], ""
        problems += differences
        checked += [] if differences else [summary]
    return problems, checked


def check_hashes(folder: Path) -> tuple[list[str], str]:
    """Compare the sha256 of every file with golden.json."""
    hashes = read_object(folder / HASHES, "sha256")
    problems = []
    for name, sha256 in hashes.items():
        if not (folder / name).is_file():
            problems.append(f"{name}: the file is missing")
        elif file_hash(folder / name) != sha256:
            problems.append(f"{name}: the sha256 differs from the published file's")
    return problems, f"sha256 of {len(hashes)} files"


def check_tensors(folder: Path) -> tuple[list[str], str]:
    """Compare the tensors of the weight files with outrider.json."""
    expected, stored = read_object(folder / SIDECAR, "tensors"), stored_tensors(folder)
    problems = [f"{name}: the tensor is missing" for name in sorted(expected.keys() - stored)]
    problems += [f"{name}: an unknown tensor" for name in sorted(stored.keys() - expected)]
    for name in sorted(expected.keys() & stored):
        if stored[name] != expected[name]:
            problems.append(f"{name}: {stored[name]}, expected {expected[name]}")
    return problems, f"name, shape and dtype of {len(stored)} tensors"


def stored_tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Return shape and dtype of every tensor in the weight files, from their headers."""
    stored: dict[str, dict[str, Any]] = {}
    files = [f for f in sorted(folder.glob("*.safetensors")) if f.name != OLD_OUTPUTS]
    if not files:
        raise Unreadable(f"{folder} holds no weights (*.safetensors)")
    for file in files:
        try:
            header = read_header(file)
            for name, entry in header.items():
                if name in stored:
                    raise ValueError(f"{name} is stored in another file too")
                stored[name] = {"dtype": entry["dtype"], "shape": entry["shape"]}
        except (*DAMAGED, OSError) as error:
            raise Unreadable(f"{file.name}: damaged, or not safetensors ({error})") from None
    return stored


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a safetensors file: name -> dtype, shape and data_offsets.

    The file is the header's length in 8 bytes, the header as JSON, and the tensors' bytes.
    """
    size = file.stat().st_size
    with _regular(file).open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(size - 8, LARGEST_JSON):
            raise ValueError("no header")
        header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{size} bytes, expected {8 + length + end}")
    return header


def _regular(file: Path) -> Path:
    """Return a file that is safe to read: not a FIFO or device, and json that fits in memory."""
    if not file.is_file() or (file.suffix == ".json" and file.stat().st_size > LARGEST_JSON):
        raise OSError(f"not a regular file, or json of more than {LARGEST_JSON} bytes")
    return file


def read_object(file: Path, field: str) -> dict[str, Any]:
    """Return an object that is a field of a json file."""
    try:
        content = json.loads(_regular(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{file.name}: cannot be read ({error})") from None
    value = content.get(field) if isinstance(content, dict) else None
    if not isinstance(value, dict) or not value:
        raise Unreadable(f"{file.name}: the field {field} is missing")
    return value


def file_hash(file: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# ---- logits --------------------------------------------------------------------------------------


def check_logits(folder: Path, target: str | None) -> tuple[list[str], list[str], str]:
    """Recompute the reference outputs with Outrider.

    Returns:
        Problems, what was checked, and why nothing could be checked ("" where it was).
    """
    if not target:
        return [], [], "no --target is given"
    try:
        from outrider.conf.errors import ConfigError, RunError
        from outrider.eval.publish.reference_outputs import compare_with_target
    except ImportError as error:
        return [], [], f"outrider is not installed ({error})"
    try:
        return [], [compare_with_target(folder, target)], ""
    except (ConfigError, RunError) as error:
        return [f"{error}"], [], ""


if __name__ == "__main__":
    sys.exit(main())
