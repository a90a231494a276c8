"""Our decoder beside transformers' own assisted generation: one pair of models, two libraries.

One draft model drafts on both sides: here as a `draft_lm` chain, there as `assistant_model` with
gamma tokens a round, a constant schedule and no stop by confidence. Both decode greedily in float32
on one copy of the target's weights, so all systems owe the same tokens, prompt by prompt:

    outrider               chains of gamma guesses      transformers assisted   the same draft model
    outrider plain         the same engine, no draft    transformers plain      its dynamic cache
                                                        transformers lookup     guesses of the text

Time is that of a whole call, from prompt to tokens. The systems take turns on every prompt, each
first in its turn, and the median of the repeats counts.

Forwards of the target are counted by a hook on its body, the same for all; other hooks time what
all systems have in common, the models themselves (bodies and heads). What is left of a call to
`transformers assisted` is all that another decoder can save with the same forwards:

    most = seconds of the call / seconds of it in the models

The two libraries start differently: transformers drafts behind the prompt before the target has
read it. With gamma = 2, every guess right, `|` ends a forward:

    outrider               prompt -> x1 | x1 d d -> x2 x3 x4 | x4 d d -> x5 x6 x7 |
    transformers assisted  prompt d d -> x1 x2 x3 | x3 d d -> x4 x5 x6 | x6 -> x7 |

Given the prompt and x1 it must need exactly our rounds, and `Sides.same_rounds` asks that.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from outrider.eval.report import Mismatch
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Stops
from outrider.models.drafter import Drafter
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.target import Target

OURS, PLAIN = "outrider", "outrider plain"
ASSISTED, THEIR_PLAIN = "transformers assisted", "transformers plain"
LOOKUP = "transformers lookup"


# ---- two libraries, one pair of models -----------------------------------------------------------


class Answer(NamedTuple):
    """What a system said, and what it cost."""

    ids: list[int]
    forwards: int  # of the target, the prompt's included
    seconds: float
    inside: float  # seconds of it in the models; 0 on a GPU, where watching them would slow them


System = Callable[[list[int], int], list[int]]  # prompt, budget -> new tokens
Asked = list[tuple[str, list[int]]]  # name and ids of each prompt


class Sides:
    """Both sides, ready; as a context it counts the target's forwards."""

    def __init__(
        self, target: Target, drafter: Drafter, assistant: Any, stops: Sequence[int],
        gamma: int, lookup: int = 10,
    ) -> None:  # fmt: skip
        """
        Args:
            target: its own settings of generation are set aside, and so are the assistant's.
            drafter: the draft model on our side.
            assistant: the same model as transformers has it.
            stops: tokens that end an answer.
            lookup: tokens that transformers' prompt lookup guesses at most.
        """
        self.target, self.assistant = target, assistant
        ends = Stops(stops)
        self.engine = Engine(target, drafter, Chain(gamma), stops=ends, timed=False)
        self.plain = Engine(target, None, None, stops=ends, timed=False)
        self.gauge = Engine(target, None, None, keep_gaps=True)
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
            ASSISTED: lambda ids, budget: self._theirs(ids, budget, assistant_model=assistant),
            LOOKUP: lambda ids, budget: self._theirs(ids, budget, prompt_lookup_num_tokens=lookup),
            THEIR_PLAIN: self._theirs,
        }
        self.drafter, self.forwards, self.inside, self._since = drafter, 0, 0.0, 0.0

    def __enter__(self) -> "Sides":
        bodies = [self.target.body, *_lean(self.target)]
        self._hooks = [body.register_forward_pre_hook(self._count) for body in bodies]
        for part in self.parts() if self.target.device.type == "cpu" else ():
            self._hooks.append(part.register_forward_pre_hook(self._begin))
            self._hooks.append(part.register_forward_hook(self._end))
        return self

    def parts(self) -> list[torch.nn.Module]:
        """Bodies and heads of the models, on both sides."""
        models = (self.target.model, self.assistant)
        found = [part for lm in models for part in (lm.base_model, lm.get_output_embeddings())]
        if isinstance(self.drafter, DraftLm):
            found += [self.drafter.lm.body, self.drafter.lm_head, *_lean(self.drafter.lm)]
        return [*found, *_lean(self.target)]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def _begin(self, *_: object) -> None:
        self._since = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.inside += time.perf_counter() - self._since

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    @torch.no_grad()
    def _theirs(self, ids: list[int], budget: int, **how: Any) -> list[int]:
        prompt = torch.tensor([ids], device=self.target.device)
        how |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": budget}
        new: list[int] = self.target.model.generate(prompt, **how)[0, len(ids) :].tolist()
        return new

    def answer(self, name: str, ids: list[int], budget: int) -> Answer:
        """One whole call."""
        before, inside, began = self.forwards, self.inside, self._now()
        said = self.systems[name](ids, budget)
        return Answer(said, self.forwards - before, self._now() - began, self.inside - inside)

    def same_rounds(self, ids: list[int], budget: int) -> bool:
        """Whether transformers, given our first token too, needs as many forwards as we rounds."""
        ours = self.answer(OURS, ids, budget)
        if ours.forwards == 1:
            return True  # the prompt's forward said it all
        theirs = self.answer(ASSISTED, [*ids, ours.ids[0]], budget - 1)
        return theirs.forwards == ours.forwards - 1

    def mismatches(self, case: "Case") -> list[Mismatch]:
        """Where answers leave transformers' plain one, and how sure the target is there."""
        plain, found = case.said(THEIR_PLAIN), list[Mismatch]()
        for name in case.answers:
            said = case.said(name)
            if said != plain:
                at = _parting(said, plain)
                gap = self.gauge.generate([*case.prompt, *plain[:at]], 1).gaps[0]
                tokens = [answer[at] if at < len(answer) else None for answer in (said, plain)]
                found.append(Mismatch(f"{case.id}: {name}", at, tokens[0], tokens[1], gap))
        return found


def _lean(lm: Target) -> list[torch.nn.Module]:
    return [] if lm.lean is None else [lm.lean]


def _parting(one: list[int], other: list[int]) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


# ---- prompt by prompt ----------------------------------------------------------------------------


@dataclass
class Case:
    """One prompt, answered by every system several times."""

    id: str
    prompt: list[int]
    answers: dict[str, list[Answer]]
    same_rounds: bool

    def said(self, name: str) -> list[int]:
        return self.answers[name][0].ids

    def seconds(self, name: str) -> float:
        return statistics.median(run.seconds for run in self.answers[name])

    def inside(self, name: str) -> float:
        return statistics.median(run.inside for run in self.answers[name])

    def fields(self) -> dict[str, Any]:
        """For the file."""
        seconds = {name: [run.seconds for run in runs] for name, runs in self.answers.items()}
        return {
            "id": self.id, "prompt_tokens": len(self.prompt), "same_rounds": self.same_rounds,
            "output_ids": self.said(THEIR_PLAIN), "seconds": seconds,
            "forwards": {name: runs[0].forwards for name, runs in self.answers.items()},
        }  # fmt: skip


def compare(sides: Sides, name: str, ids: list[int], budget: int, repeats: int) -> Case:
    """All systems on one prompt, by turns; the question about the rounds warms it up."""
    names = list(sides.systems)
    answers: dict[str, list[Answer]] = {system: [] for system in names}
    same = sides.same_rounds(ids, budget)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for system in names[turn:] + names[:turn]:
            answers[system].append(sides.answer(system, ids, budget))
    return Case(name, ids, answers, same)
