"""Files of earlier answers: JSON lines with the token ids of each.

    {"format": "outrider-answers-1", "embedding": "4f1c0b6a9d2e8370"}
    {"output_ids": [318, 257, 1332]}

The first line names the target: its fingerprint is of the embedding. It is optional, and other
fields are ignored, so that the outputs of an evaluation (`<out>.outputs.jsonl`) are such a file,
and files can be concatenated. Answers of another target with the same tokenizer may be of use:
without that line, only the range of the ids is checked.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from outrider.conf.errors import CorruptFile, RunError
from outrider.conf.files import read_lines, write
from outrider.conf.json_shapes import require_shape, token
from outrider.conf.tensor_files import fingerprint
from outrider.models.target.target import Target

FORMAT = "outrider-answers-1"
HEADER, ANSWER = {"format": FORMAT, "embedding": str}, {"output_ids": [token]}
FIX = "Give the outputs.jsonl of an evaluation, or a file that the drafter wrote."


def read_answers(file: str | Path, target: Target) -> list[list[int]]:
    """Return the token ids of the answers in a file, in its order.

    Raises:
        CorruptFile: missing, not a regular file, too large, a line of another shape, or a token
            that the target does not have.
        RunError: no answers, or those of another target.
    """
    path, answers = Path(file).expanduser(), list[list[int]]()
    for number, row in enumerate(read_lines(path, FIX), start=1):
        place = f"{path}: line {number}"
        if "format" in row:
            require_shape(row, HEADER, place, FIX)
            _require_target(row["embedding"], _fingerprint(target), place)
            continue
        require_shape(row, ANSWER, place, FIX)
        ids: list[int] = row["output_ids"]
        if max(ids, default=0) >= target.vocab_size:
            message = f"{place}: token {max(ids)} is none of the target's {target.vocab_size}."
            raise CorruptFile(message, "Give answers of this target.")
        answers.append(ids)
    if not answers:
        raise RunError(f"{path} has no answers.", FIX)
    return answers


def write_answers(file: str | Path, answers: Iterable[list[int]], target: Target) -> None:
    """Write a file of answers, whole or not at all."""
    header = {"format": FORMAT, "embedding": _fingerprint(target)}
    rows = [header, *({"output_ids": ids} for ids in answers)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write(Path(file).expanduser(), lines.encode())


def _require_target(written: str, own: str, place: str) -> None:
    if written != own:
        message = f"{place}: answers of another target ({written:.16}, not {own})."
        fix = "Use those of this target; if the tokenizer is the same, remove that line."
        raise RunError(message, fix)


def _fingerprint(target: Target) -> str:
    return fingerprint({"embedding": target.embedding.weight})
