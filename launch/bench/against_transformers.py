"""Outrider's decoder and transformers' assisted generation with one pair of models.

One draft model drafts on both sides: as a `draft_lm` chain, and as `assistant_model` with gamma
tokens a round, a constant schedule and no stop by confidence. Both decode greedily in float32 on
one copy of the target's weights, so all systems must output the same tokens, prompt by prompt:

    outrider               chains of gamma tokens       transformers assisted   the same draft model
    outrider plain         the same engine, no draft    transformers plain      its dynamic cache
                                                        transformers lookup     n-grams of the text

Time is that of a whole call, from prompt to tokens: the median of the repeats, whose order rotates.
Hooks count the target's forwards and time the models (bodies and heads), which all systems have in
common. The rest of a call to `transformers assisted` is what another decoder can save at most:

    upper limit = seconds of the call / seconds of it in the models

Transformers drafts behind the prompt before the target has read it. With gamma = 2, every draft
token accepted, `|` after a forward:

    outrider               prompt -> x1 | x1 d d -> x2 x3 x4 | x4 d d -> x5 x6 x7 |
    transformers assisted  prompt d d -> x1 x2 x3 | x3 d d -> x4 x5 x6 | x6 -> x7 |

Given the prompt and x1, transformers must need exactly Outrider's rounds (`same_rounds`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from outrider.eval.measure import first_difference
from outrider.eval.report import Mismatch
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Stops
from outrider.models.decode.round_times import Stopwatch
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafting.drafter import Drafter
from outrider.models.target.target import Target

OURS, PLAIN = "outrider", "outrider plain"
ASSISTED, THEIR_PLAIN = "transformers assisted", "transformers plain"
LOOKUP = "transformers lookup"


class Answer(NamedTuple):
    """The output of a system, and its cost."""

    ids: list[int]
    forwards: int  # of the target, the prompt's included
    seconds: float
    model_seconds: float  # of `seconds`; 0 on a GPU, where the hooks would slow the models


System = Callable[[list[int], int], list[int]]  # prompt, budget -> new tokens
TokenizedPrompts = list[tuple[str, list[int]]]  # name and ids of each prompt


class Decoders:
    """All systems over one pair of models; a context manager that counts the target's forwards."""

    def __init__(
        self, target: Target, drafter: Drafter, assistant: Any, stops: Sequence[int],
        gamma: int, lookup: int = 10,
    ) -> None:  # fmt: skip
        """
        Args:
            target: its generation config is replaced, as is the assistant's.
            drafter, assistant: the draft model in Outrider and in transformers.
            stops: tokens that end an answer.
            lookup: maximum draft tokens of transformers' prompt lookup.
        """
        self.target, self.drafter, self.assistant = target, drafter, assistant
        end_tokens = Stops(stops)
        self.engine = Engine(target, drafter, Chain(gamma), stops=end_tokens, timed=False)
        self.plain = Engine(target, None, None, stops=end_tokens, timed=False)
        self.gap_engine = Engine(target, None, None, keep_gaps=True)
        target.model.generation_config = GenerationConfig(
            do_sample=False, eos_token_id=list(stops) or None, pad_token_id=next(iter(stops), 0)
        )
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=gamma, num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )  # fmt: skip
        self.systems: dict[str, System] = {
            OURS: lambda ids, budget: self.engine.generate(ids, budget).ids,
            PLAIN: lambda ids, budget: self.plain.generate(ids, budget).ids,
            ASSISTED: partial(self._transformers, assistant_model=assistant),
            LOOKUP: partial(self._transformers, prompt_lookup_num_tokens=lookup),
            THEIR_PLAIN: self._transformers,
        }
        self.forwards, self.model_seconds, self._start = 0, 0.0, 0.0

    def __enter__(self) -> "Decoders":
        bodies = [self.target.base_model, *_fast_forward(self.target)]
        self._hooks = [body.register_forward_pre_hook(self._count) for body in bodies]
        for part in self.model_parts() if self.target.device.type == "cpu" else ():
            self._hooks.append(part.register_forward_pre_hook(self._begin))
            self._hooks.append(part.register_forward_hook(self._end))
        return self

    def model_parts(self) -> list[torch.nn.Module]:
        """Return the bodies and heads of the models, on both decoders."""
        models = (self.target.model, self.assistant)
        parts = [part for lm in models for part in (lm.base_model, lm.get_output_embeddings())]
        if isinstance(self.drafter, DraftLm):
            lm = self.drafter.lm
            parts += [lm.base_model, self.drafter.lm_head, *_fast_forward(lm)]
        return [*parts, *_fast_forward(self.target)]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def _begin(self, *_: object) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.model_seconds += time.perf_counter() - self._start

    @torch.no_grad()
    def _transformers(self, ids: list[int], budget: int, **kwargs: Any) -> list[int]:
        prompt = torch.tensor([ids], device=self.target.device)
        kwargs |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": budget}
        new: list[int] = self.target.model.generate(prompt, **kwargs)[0, len(ids) :].tolist()
        return new

    def answer(self, name: str, ids: list[int], budget: int) -> Answer:
        forwards, model_seconds = self.forwards, self.model_seconds
        watch = Stopwatch(self.target.device)
        output = self.systems[name](ids, budget)
        seconds, model_seconds = watch.lap(), self.model_seconds - model_seconds
        return Answer(output, self.forwards - forwards, seconds, model_seconds)

    def same_rounds(self, ids: list[int], budget: int) -> bool:
        """Return whether transformers, given the first token too, needs as many rounds."""
        ours = self.answer(OURS, ids, budget)
        if ours.forwards == 1:
            return True  # the prompt's forward gave the only token
        theirs = self.answer(ASSISTED, [*ids, ours.ids[0]], budget - 1)
        return theirs.forwards == ours.forwards - 1

    def mismatches(self, case: "Case") -> list[Mismatch]:
        """Return the first difference of each answer from `transformers plain`, with its margin."""
        plain, mismatches = case.ids(THEIR_PLAIN), list[Mismatch]()
        for name in case.answers:
            output = case.ids(name)
            if output != plain:
                at, tokens = first_difference(output, plain)
                gap = self.gap_engine.generate([*case.prompt, *plain[:at]], 1).gaps[0]
                mismatches.append(Mismatch(f"{case.id}: {name}", at, *tokens, gap))
        return mismatches


def _fast_forward(lm: Target) -> list[torch.nn.Module]:
    return [] if lm.fast_forward is None else [lm.fast_forward]


@dataclass
class Case:
    """One prompt, answered by every system several times."""

    id: str
    prompt: list[int]
    answers: dict[str, list[Answer]]
    same_rounds: bool

    def ids(self, name: str) -> list[int]:
        return self.answers[name][0].ids

    def median(self, name: str, field: str) -> float:
        return float(statistics.median(getattr(run, field) for run in self.answers[name]))

    def fields(self) -> dict[str, Any]:
        seconds = {name: [run.seconds for run in runs] for name, runs in self.answers.items()}
        return {
            "id": self.id, "prompt_tokens": len(self.prompt), "same_rounds": self.same_rounds,
            "output_ids": self.ids(THEIR_PLAIN), "seconds": seconds,
            "forwards": {name: runs[0].forwards for name, runs in self.answers.items()},
        }  # fmt: skip


def compare(decoders: Decoders, name: str, ids: list[int], budget: int, repeats: int) -> Case:
    """Run all systems on one prompt, interleaved; `same_rounds` is the warm-up."""
    names = list(decoders.systems)
    answers: dict[str, list[Answer]] = {system: [] for system in names}
    same = decoders.same_rounds(ids, budget)
    for repeat in range(repeats):
        first = repeat % len(names)
        for system in names[first:] + names[:first]:
            answers[system].append(decoders.answer(system, ids, budget))
    return Case(name, ids, answers, same)
