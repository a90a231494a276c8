"""The target's own answers to held-out prompts, as text to measure acceptance on.

Decoding verifies text that the target writes. Others may have written the conversations of a file,
and acceptance on those then predicts little about decoding. Before training the target therefore
answers some held-out prompts, greedily and without a drafter. Every held-out evaluation measures
acceptance on these answers, too, and they choose the best drafter. They are stored in
the run folder, in `own_text/`, by a hash of all that they depend on: a continued run reads them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console

from outrider.conf.quantities import format_count
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.pack import pack, split_holdout
from outrider.data.tokenise import Document
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Request, Stops
from outrider.models.decode.sampling_params import Sampling
from outrider.models.formats.native import target_fingerprint
from outrider.models.target.load import LoadedTarget, stop_ids
from outrider.train.manifest import read_manifest
from outrider.train.trainer import Trainer

TOKENS = 128  # per answer at most
LEAST = 32  # tokens that must fit after a prompt
FAR = 1.5  # ratio of accepted draft tokens from which the file's text is not like the target's
NOISE = 0.1  # difference of acceptance lengths that says nothing


def add(run: Trainer, loaded: LoadedTarget, console: Console) -> None:
    """Let the main rank's target answer `train.own_prompts` held-out prompts.

    Sets `run.own_text`, the same on all ranks, and notes it in the manifest's `data`. Nothing is
    done if the text of the run is the target's own already, or if no rank holds the whole target.
    """
    about, target, length = run.data.about, run.target, run.config.data.max_length
    generated = about.get("source") == "self" and "given" not in about
    if generated or target.is_remote or target.ends_only or not (prompts := _prompts(run)):
        return
    answers = torch.zeros(len(prompts), 1 + TOKENS, dtype=torch.float64)  # length, then tokens
    if run.main:
        for row, ids in zip(answers, _stored_or_new(run, loaded, prompts, console), strict=True):
            row[: 1 + len(ids)] = torch.tensor([len(ids), *ids])
    rows = run.reduce(answers).long().tolist()  # the other ranks add zeros
    lengths = [row[0] for row in rows]
    pairs = zip(prompts, lengths, rows, strict=True)
    run.own_text = pack([_document(ids, row[1 : 1 + size]) for ids, size, row in pairs], length)
    tokens = sum(lengths)
    about["own_text"] = {"prompts": len(prompts), "tokens": tokens}
    answered = format_count(len(prompts), "held-out prompt")
    console.print(
        f"the target answered {answered} ({tokens:,} tokens): acceptance on its own answers "
        "chooses the best drafter",
    )  # fmt: skip


def _prompts(run: Trainer) -> list[list[int]]:
    """Return the tokens before the first answer of held-out conversations, spread over all."""
    count, length = run.config.train.own_prompts, run.config.data.max_length
    held = split_holdout(run.data.documents, run.config.data.holdout)[1]
    prompts = [document.ids[: document.answer.argmax()].tolist() for document in held]
    fitting = [ids for ids in prompts if 1 <= len(ids) <= length - LEAST]
    return fitting[:: max(1, len(fitting) // max(1, count))][:count]


def _stored_or_new(
    run: Trainer, loaded: LoadedTarget, prompts: list[list[int]], console: Console
) -> list[list[int]]:
    """Return the answers, generated unless the run folder has them; RunError if it is damaged."""
    target, length = loaded.target, run.config.data.max_length
    about = {
        "target": target_fingerprint(target), "dtype": str(target.dtype),
        "quantise": run.config.target.quantise, "stops": stop_ids(loaded.tokenizer, target),
        "prompts": prompts, "max_length": length, "max_new_tokens": TOKENS,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    store = GeneratedStore(run.folder / "own_text" / digest[:16], {"sha256": digest})
    if not store.shards:
        with console.status("the target answers held-out prompts"):
            answers = _answer(loaded, prompts, length)
        pairs = enumerate(zip(prompts, answers, strict=True))
        store.add([GeneratedAnswer(i, "", ids + new, len(ids)) for i, (ids, new) in pairs])
    return [answer.ids[answer.prompt_length :] for answer in store.answers()]


def _answer(loaded: LoadedTarget, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Return greedy answers, cut to rows of `length` tokens with their prompts."""
    target, taps = loaded.target, loaded.target.taps
    stops = Stops(stop_ids(loaded.tokenizer, target))
    engine = Engine(target, None, None, sampling=Sampling(0.0), stops=stops, timed=False)
    requests = [Request(ids, min(TOKENS, length - len(ids))) for ids in prompts]
    outputs = engine.generate_all(requests, len(requests))
    target.set_taps(taps)
    return [list(output.ids) for output in outputs]


def _document(prompt: list[int], answer: list[int]) -> Document:
    return Document.of(prompt + answer, [False] * len(prompt) + [True] * len(answer), "")


def is_measured(folder: Path) -> bool:
    """Return whether a run began with such answers: runs of earlier versions did not."""
    data = (read_manifest(folder) or {}).get("data")
    return isinstance(data, dict) and "own_text" in data


def is_far(held: Mapping[str, float], own: Mapping[str, float]) -> bool:
    """Return whether far more draft tokens are accepted on held-out text than on own answers."""
    accepted, own_accepted = held["accept_length"] - 1, own["accept_length"] - 1
    return accepted > max(FAR * own_accepted, NOISE + own_accepted)


def advice(name: str, path: str | None) -> str:
    """Return what to type where `is_far`.

    Args:
        name, path: of the run's data.
    """
    prompts = f" data.path={path}" if path else ""
    fix = f"Train on its answers to these prompts: data=self{prompts} run.dir=runs/own"
    if name == "self":
        fix = "Train on its answers alone, without data.given, in another run.dir."
    return (
        "The conversations are not the target's own text: decoding will accept about as many draft "
        f"tokens as on its own answers. {fix}"
    )
