"""Several trained drafters of one target that draft together.

Source: Miao et al. 2023, "SpecInfer", arXiv:2305.09781; weights by the Hedge algorithm, Freund and
Schapire 1997, doi:10.1006/jcss.1997.1504.

Every drafter computes a row for every node. A row of the drafter is their mixture

    q = sum over drafters s of w_s q_s

so that every policy and rule applies. `decode=merged_tree` (models/decode/tries) takes the rows one
by one instead: each drafter draws chains of its own, which are merged by path and verified by
`multi_step`; the weights share out the chains.

A verified token tells what every drafter would have gained there, not only the one that proposed
it (full information). With tokens y of the verified path, as far as its nodes were drafted,

    loss_s = 1 - q_s(y)          w_s <- w_s exp(-rate loss_s), normalised

and a small share of the weights becomes equal again, so that they follow a text that changes. The
weights of a request depend on its own text and earlier rounds alone.

Differs (docs/drafters/multi.md): drafters are weighed in decoding; there is no boosting.

Shape letters: B prompts, N nodes, S drafters, V tokens, Vs tokens of one drafter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, option
from outrider.conf.schema import UntrainedConfig
from outrider.models.drafters.parts.part import (
    TRAINED_FIX,
    Part,
    trained_part,
    trained_settings,
)
from outrider.models.drafting.drafter import BatchDrafter, Drafter, LevelIds, Sources, State
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, TargetEnds, Trace
from outrider.models.target.target import Target

MOST = 8  # drafters
SHARE = 0.01  # of the weights that becomes equal after every token
Path: TypeAlias = tuple[int, ...]  # the tokens from the newest one down to a node, itself excluded


@dataclass(frozen=True)
class Config(UntrainedConfig):
    """Settings of several drafters; conf/drafter/multi.yaml describes each."""

    name: str = "multi"
    depths: int = option(4, "", DEPTHS)
    drafters: Any = None
    rate: float = option(0.5, "", "[0, 100]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafters is not None:
            self.settings_of_each()

    def settings_of_each(self) -> list[dict[str, Any]]:
        """Return {path: FOLDER} or the settings of each drafter.

        Raises:
            ConfigError: there are fewer than two, or too many; or one is neither a folder nor
                settings.
        """
        values = [] if self.drafters is None else self.drafters
        if not isinstance(values, list | tuple) or not 2 <= len(values) <= MOST:
            why = f"Drafters that draft together are 2 to {MOST}."
            fix = f"Give a list: drafter.drafters=[runs/a,runs/b]. {TRAINED_FIX}"
            raise ConfigError("drafter.drafters", self.drafters, why, fix)
        return [trained_settings(value, part_of(i)) for i, value in enumerate(values)]


def part_of(number: int) -> Part:
    """Return the place of one of the drafters."""
    return trained_part(f"drafter.drafters[{number}]")


class Level(NamedTuple):
    """The nodes of a step of one prompt, and the logits of each drafter."""

    nodes: tuple[Path, ...]
    logits: tuple[Float[Tensor, "N Vs"], ...]


@dataclass(frozen=True)
class MultiState:
    """Decoding state of a prompt.

    Attributes:
        parts: of each drafter.
        weights: of each drafter; they sum to 1.
        levels: of the draft, or of the last draft until its outcome is known.
    """

    parts: tuple[State, ...]
    weights: tuple[float, ...]
    levels: tuple[Level, ...] = field(default=())


class Multi(BatchDrafter):
    """Several trained drafters."""

    is_trained = False
    is_composite = True

    def __init__(
        self, cfg: Config, target: TargetEnds, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        vocab.require_full()
        assert isinstance(target, Target), "drafters are built for it"
        settings = cfg.settings_of_each()
        built = [part_of(i).build(values, target)[0] for i, values in enumerate(settings)]
        for i, one in enumerate(built):
            if (change := one.describe_target_change()) is not None:
                why = f"It changes the target ({change}), for which the others were not trained."
                raise ConfigError(f"drafter.drafters[{i}]", settings[i], why, "Leave it out.")
        self.drafters: Sequence[Drafter] = nn.ModuleList(built)  # type: ignore[assignment]
        self.cfg, self.vocab = cfg, vocab
        self.taps = tuple(sorted({tap for one in built for tap in one.taps}))
        self.max_depth = min(one.max_depth for one in built)
        self.chains_only = any(one.chains_only for one in built)

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        for i, values in enumerate(cfg.settings_of_each()):
            part_of(i).check(values, shape)

    def finish(self, answer: Sequence[int]) -> None:
        for one in self.drafters:
            one.finish(answer)

    # ---- the text ----

    def absorb_batch(
        self, states: Sequence[MultiState | None], traces: Sequence[Trace]
    ) -> list[MultiState]:
        before = [self._first() if state is None else state for state in states]
        read = list[list[State]]()
        for number, one in enumerate(self.drafters):
            parts = [state.parts[number] for state in before]
            read.append(one.absorb_batch(parts, [self._seen_by(one, trace) for trace in traces]))
        weights = map(self._learned, before, traces)
        return [MultiState(*new) for new in zip(zip(*read, strict=True), weights, strict=True)]

    def _first(self) -> MultiState:
        count = len(self.drafters)
        return MultiState((None,) * count, (1 / count,) * count)

    def _seen_by(self, one: Drafter, trace: Trace) -> Trace:
        """Return the trace with the taps of one of the drafters."""
        if one.taps == self.taps:
            return trace
        if not one.taps:
            return replace(trace, taps=trace.taps[..., :0])
        taps = trace.taps.unflatten(-1, (len(self.taps), -1))
        return replace(trace, taps=taps[..., [*map(self.taps.index, one.taps)], :].flatten(-2))

    def _learned(self, state: MultiState, trace: Trace) -> tuple[float, ...]:
        """Return the weights after the outcome of the last draft."""
        weights, equal = state.weights, 1 / len(state.weights)
        path: Path = ()
        for level, token in zip(state.levels, trace.next_ids[0].tolist(), strict=False):
            if path not in level.nodes:
                break
            gains = self._gains(level, level.nodes.index(path), token)
            factors = [math.exp(-self.cfg.rate * (1 - gain)) for gain in gains]
            new = [w * factor for w, factor in zip(weights, factors, strict=True)]
            weights = tuple((1 - SHARE) * w / sum(new) + SHARE * equal for w in new)
            path = (*path, token)
        return weights

    def _gains(self, level: Level, node: int, token: int) -> list[float]:
        """Return the probability that each drafter gave a token after a node."""
        gains = list[float]()
        for one, logits in zip(self.drafters, level.logits, strict=True):
            index = int(one.vocab.to_draft(torch.tensor([token], device=logits.device)))
            row = logits[node].float()
            gain = float((row[index] - row.logsumexp(-1)).exp()) if index >= 0 else 0.0
            gains.append(gain if math.isfinite(gain) else 0.0)
        return gains

    def end_draft(self, state: MultiState, drafted: MultiState, depth: int) -> MultiState:
        return replace(state, levels=drafted.levels[:depth])

    # ---- the tree ----

    def step_batch(
        self, states: Sequence[MultiState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N V"], list[MultiState]]:
        own, after = list[Tensor](), list[list[State]]()
        for number, one in enumerate(self.drafters):
            parts = [state.parts[number] for state in states]
            logits, new = one.step_batch(parts, depth, ids, parents)
            own.append(logits)
            after.append(new)
        tokens, above = ids.tolist(), parents.tolist()
        found = list[MultiState]()
        for i, (state, new_parts) in enumerate(zip(states, zip(*after, strict=True), strict=True)):
            before = state.levels if depth > 1 else ()
            nodes: tuple[Path, ...] = ((),)
            if before:
                pairs = zip(tokens[i], above[i], strict=True)
                nodes = tuple((*before[-1].nodes[parent], token) for token, parent in pairs)
            level = Level(nodes, tuple(logits[i] for logits in own))
            found.append(MultiState(new_parts, state.weights, (*before, level)))
        rows = self.sources(found)
        log_w = rows.weights.log()[:, None, :, None]
        return (rows.logits.log_softmax(-1) + log_w).logsumexp(2), found

    def sources(self, states: Sequence[MultiState]) -> Sources:
        rows = [
            one.vocab.expand_logits(torch.stack([s.levels[-1].logits[number] for s in states]))
            for number, one in enumerate(self.drafters)
        ]
        weights = torch.tensor([state.weights for state in states], device=rows[0].device)
        return Sources(torch.stack(rows, 2), weights)
