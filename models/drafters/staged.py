"""Staged speculation: a draft model whose own drafting is speculated by an inner drafter.

Source: Spector and Re 2023, "Accelerating LLM inference with staged speculative decoding",
arXiv:2308.04623. The draft model is that of `draft_lm`; the inner drafter is any other one, built
for the draft model as its target: a look-up, a trained drafter, or `staged` again.

Decoding a draft is decoding with the draft model as the target. Where the row of a node is needed,
the inner drafter guesses a chain after the node's text, and one forward of the draft model runs the
node and the guesses. All rows are kept. When a later node is one of the guesses, its row is known:

    text a b, inner guesses c d e; one forward runs   b  c  d  e
    level 1: row of b known; the policy draws c
    level 2: row of b c known; the policy draws d
    level 3: row of b c d known; the policy draws x instead of e
    level 4: row of b c d x unknown: the next forward, with guesses after x

The token that the policy draws verifies the guess. Every row that `step` returns is the draft
model's own at exactly the node's text, whatever was guessed: a guess decides only in which forward
the row is computed. So drafts have the distribution of `draft_lm`, and verification receives the
rows that they were drawn from. Without an inner draft the forwards are those of `draft_lm`.

Differs (docs/drafters/staged.md): the inner draft is a chain; any inner drafter and any number of
stages; a draft is drawn token by token instead of by an inner verification rule.

Legend: R rows of the newest token and the branch, D width, S columns of the branch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.conf.errors import ConfigError
from outrider.conf.fields import NODES, option
from outrider.models.drafters import draft_lm
from outrider.models.drafters.draft_lm import DraftLm, DraftLmState
from outrider.models.drafters.parts import inner as inner_drafter
from outrider.models.drafting.drafter import Drafter, LevelIds, State
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape, Trace
from outrider.models.target.target import Target

Path: TypeAlias = tuple[int, ...]  # the tokens from the newest one down to a node, itself excluded


@dataclass(frozen=True)
class Config(draft_lm.Config):
    """Settings of a draft model with an inner drafter; conf/drafter/staged.yaml describes each."""

    name: str = "staged"
    inner: Any = None
    inner_width: int = option(1, "", NODES)

    def __post_init__(self) -> None:
        super().__post_init__()
        inner_drafter.check_settings(self.inner)


@dataclass(frozen=True)
class StagedState:
    """Decoding state of a prompt. The next `absorb` drops the branch, guesses included.

    Attributes:
        read: keys and values of the text, then of the branch; hidden states and taps of the newest
            token, then of the branch.
        newest: the last token of the text.
        nodes: of every row of `read.hidden` its node, in order; the newest token is ().
        inner: the inner drafter's state after the text.
        level: the nodes of the last step.
    """

    read: DraftLmState
    newest: int
    nodes: dict[Path, int]
    inner: State
    level: tuple[Path, ...] = ((),)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.read.rows.length

    @property
    def text(self) -> DraftLmState:
        """The state of the draft model after the text, without the branch."""
        read = self.read
        return DraftLmState(
            read.rows.without_branch(), read.hidden[:1], read.taps[:1], read.ancestors
        )


class Staged(DraftLm):
    """A draft model and its inner drafter.

    Attributes:
        inner: a submodule only if it has weights; None: the drafter is `draft_lm`.
    """

    cfg: Config
    inner: Drafter | None

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__(cfg, target, vocab, taps)
        self.inner = None
        if cfg.inner is not None:
            self.set_inner(cfg.inner)

    @classmethod
    def check_settings(cls, cfg: draft_lm.Config, shape: ModelShape) -> None:
        assert isinstance(cfg, Config), "of this drafter"
        draft = cls.draft_shape(cfg, shape)
        if cfg.inner is not None and draft is not None:
            inner_drafter.INNER.check(cfg.inner, draft)

    def set_inner(self, values: dict[str, Any]) -> None:
        """Build the inner drafter of these settings (models/drafters/parts/inner.py).

        Raises:
            ConfigError: they are wrong, or the draft model has recurrent layers.
        """
        if self.chains_only:
            why = "The draft model has recurrent layers, and its guesses branch."
            raise ConfigError("drafter.inner", values, why, "Use draft_lm, without an inner one.")
        inner, settings = inner_drafter.build(values, self.lm)
        self.cfg, self.inner_depths = replace(self.cfg, inner=settings), int(settings["depths"])
        if inner.is_trained:
            self.inner = inner
        else:
            self.__dict__["inner"] = inner  # no submodule: nothing of it is saved

    def finish(self, answer: Sequence[int]) -> None:
        if self.inner is not None:
            self.inner.finish(answer)

    # ---- the text ----

    def absorb_batch(
        self, states: Sequence[Any | None], traces: Sequence[Trace]
    ) -> list[Any]:  # of DraftLmState without an inner drafter, else of StagedState
        if self.inner is None:
            return super().absorb_batch(states, traces)
        texts = [None if state is None else state.text for state in states]
        before = [None if state is None else state.inner for state in states]
        newest: list[int] = torch.stack([trace.next_ids[0, -1] for trace in traces]).tolist()
        guesses = [list[int]() for _ in traces]
        if self.inner.required_features == "ids":
            inner = self.inner.absorb_batch(before, traces)
            guesses = self._guess(inner, newest)
            read = self._read_text(texts, traces, guesses)
        else:  # it first needs the draft model's states
            read = self._read_text(texts, traces, guesses)
            own = map(_with_states, traces, texts, read)
            inner = self.inner.absorb_batch(before, list(own))
        return list(map(_after_text, read, newest, guesses, inner))

    def _guess(self, states: Sequence[State], newest: Sequence[int]) -> list[list[int]]:
        """Return the inner drafter's chain after each of several texts."""
        assert self.inner is not None, "only a draft model with an inner drafter guesses"
        return inner_drafter.draft_chains(self.inner, states, newest, self.inner_depths, self.vocab)

    # ---- the tree ----

    def step_batch(
        self, states: Sequence[Any], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[Any]]:
        if self.inner is None:
            return super().step_batch(states, depth, ids, parents)
        if depth == 1:
            found = [replace(state, level=((),)) for state in states]
        else:
            levels = zip(states, ids.tolist(), parents.tolist(), strict=True)
            found = self._run_unknown([_at_level(*level) for level in levels])
        rows = [[state.nodes[node] for node in state.level] for state in found]
        hidden = [state.read.hidden[row] for state, row in zip(found, rows, strict=True)]
        return self.head(torch.stack(hidden)), found

    def _run_unknown(self, states: Sequence[StagedState]) -> list[StagedState]:
        """Run the nodes of the level without a row, and guesses after them, in one forward."""
        out = list(states)
        new = [[*dict.fromkeys(n for n in s.level if n not in s.nodes)] for s in states]
        places = [i for i, nodes in enumerate(new) if nodes]
        if not places:
            return out
        if len(states[0].level) <= self.cfg.inner_width:
            self._add_guesses([(states[i], new[i]) for i in places])
        ran = self._run_nodes([out[i] for i in places], [new[i] for i in places])
        for i, state in zip(places, ran, strict=True):
            out[i] = state
        return out

    def _add_guesses(self, new: Sequence[tuple[StagedState, list[Path]]]) -> None:
        """Add the inner drafter's chain after every new node to the lists."""
        assert self.inner is not None, "only a draft model with an inner drafter guesses"
        ends = [(state, node) for state, nodes in new for node in nodes]
        traces = [_branch_trace(state, node) for state, node in ends]
        inner = self.inner.absorb_batch([state.inner for state, _ in ends], traces)
        chains = iter(self._guess(inner, [node[-1] for _, node in ends]))
        for _, nodes in new:
            for node in tuple(nodes):
                chain = next(chains)
                nodes += [(*node, *chain[:end]) for end in range(1, len(chain) + 1)]

    def _run_nodes(
        self, states: Sequence[StagedState], new: Sequence[Sequence[Path]]
    ) -> list[StagedState]:
        """Run new nodes of every prompt; the parent of each has a row or is run with it."""
        device, counts = states[0].read.hidden.device, [*map(len, new)]
        tokens = [torch.tensor([node[-1] for node in nodes], device=device) for nodes in new]
        below = [torch.tensor([*map(len, nodes)], device=device) for nodes in new]
        at = [state.length - 1 + steps for state, steps in zip(states, below, strict=True)]
        ids, positions = (pad_sequence(part, batch_first=True) for part in (tokens, at))
        mask = _ancestors([[*state.nodes][1:] for state in states], new).to(device)
        reads = [state.read for state in states]
        ran = self._forward(reads, ids, positions, counts, [0] * len(new), mask)
        return [
            _extended(state, read, nodes)
            for state, read, nodes in zip(states, ran, new, strict=True)
        ]


def add_inner(
    drafter: Drafter, target: Target, inner: dict[str, Any], inner_width: int = 1
) -> Staged:
    """Return a trained draft model with an inner drafter; weights and vocabulary are copied.

    Raises:
        ConfigError: it is another drafter, or the settings of the inner one are wrong.
    """
    if not isinstance(drafter, DraftLm):
        why, fix = "Only a draft model has an inner drafter.", "Use a draft_lm, or staged."
        raise ConfigError("drafter", type(drafter).__name__, why, fix)
    own = {field.name: getattr(drafter.cfg, field.name) for field in fields(draft_lm.Config)}
    cfg = Config(**{**own, "name": "staged", "inner_width": inner_width})
    out = Staged(cfg, target, DraftVocab(drafter.vocab.target_ids.cpu(), target.vocab_size), ())
    weights = {n: v for n, v in drafter.state_dict().items() if not n.startswith("inner.")}
    out.to(drafter.lm.device, drafter.lm.dtype).load_state_dict(weights)
    out.set_inner(inner)
    return out.eval().requires_grad_(False)


def _after_text(read: DraftLmState, newest: int, guess: Sequence[int], inner: State) -> StagedState:
    """Return the state after a text and a guess that the draft model has read."""
    rows = slice(-len(guess) - 1, None)
    read = replace(read, hidden=read.hidden[rows], taps=read.taps[rows])
    nodes = {tuple(guess[:row]): row for row in range(len(guess) + 1)}
    return StagedState(read, newest, nodes, inner)


def _at_level(state: StagedState, tokens: Sequence[int], parents: Sequence[int]) -> StagedState:
    """Set the level of a state to the children of the last one that these tokens are."""
    pairs = zip(tokens, parents, strict=True)
    return replace(state, level=tuple((*state.level[above], token) for token, above in pairs))


def _extended(state: StagedState, ran: DraftLmState, new: Sequence[Path]) -> StagedState:
    """Add the rows of new nodes to a state."""
    hidden = torch.cat([state.read.hidden, ran.hidden])
    taps = torch.cat([state.read.taps, ran.taps])
    nodes = {node: row for row, node in enumerate([*state.nodes, *new])}
    return replace(state, read=replace(ran, hidden=hidden, taps=taps), nodes=nodes)


def _ancestors(
    old: Sequence[Sequence[Path]], new: Sequence[Sequence[Path]]
) -> Bool[Tensor, "B W S"]:
    """Return what every new node attends to, among the newest columns of all prompts.

    The last columns are of the W new nodes, padded behind; before them are the old nodes, with
    columns of the text before those of prompts that have fewer.
    """
    width, above = max(map(len, new)), max(map(len, old))
    masks = list[Tensor]()
    for known, nodes in zip(old, new, strict=True):
        columns = [*known, *nodes]
        rows = [[node[: len(other)] == other for other in columns] for node in nodes]
        mask = torch.tensor(rows).view(len(nodes), len(columns))
        mask = F.pad(mask, (0, width - len(nodes), 0, width - len(nodes)))
        masks.append(F.pad(mask, (above - len(known), 0), value=True))
    return torch.stack(masks)


def _with_states(trace: Trace, before: DraftLmState | None, read: DraftLmState) -> Trace:
    """Return the trace of a text with the draft model's states in place of the target's.

    The draft model has read one token more, the newest, whose state belongs to the next trace; of
    the first row here it has the state already, unless the prompt is new.
    """
    taps, last = read.taps, read.hidden
    if before is not None:
        taps, last = torch.cat([before.taps, taps]), torch.cat([before.hidden, last])
    return replace(trace, taps=taps[None, :-1], last=last[None, :-1])


def _branch_trace(state: StagedState, node: Path) -> Trace:
    """Return the rows from the newest token to a node's parent, as the inner drafter reads them."""
    read, device = state.read, state.read.hidden.device
    ids = torch.tensor([[state.newest, *node]], device=device)
    rows = torch.tensor([state.nodes[node[:depth]] for depth in range(len(node))], device=device)
    positions = state.length - 1 + torch.arange(len(node), device=device)[None]
    taps, last = (part[rows][None] for part in (read.taps, read.hidden))
    document = torch.zeros_like(positions)
    return Trace(ids[:, :-1], ids[:, 1:], document.bool(), document, positions, taps, last)
