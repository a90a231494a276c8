"""A small language model as the drafter, distilled from the target.

Source: Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023 (arXiv:2302.01318) draft with
one; DistillSpec (arXiv:2310.08461) trains it on the target's distributions over given text, text of
the target (`data=self`) or text of the draft model (`on_policy`).

It reads tokens only, no target states. Row t has read x_0..x_{t+1}, so its depth-1 guess is the
model's state after x_{t+1}, and its guess of depth d the state after x_{t+d}. One pass over the
text, shifted to the left, gives every depth (h_i: state after x_i, predicts x_{i+1}):

    row t        0   1   2   3   4
    pass         h0  h1  h2  h3  h4
    depth 1      h1  h2  h3  h4  .
    depth 2      h2  h3  h4  .   .

Differs (docs/drafters/draft_lm.md): only depth 1 is trained, since all depths are one function; the
vocabulary may be reduced; on-policy text replaces one answer per document, within its length.

Legend: L rows of a prompt, W new columns, M columns or nodes that a mask describes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.conf.errors import ConfigError
from outrider.conf.fields import DEPTHS, PROBABILITY, TOKENS, WIDTH, option
from outrider.conf.schema import DrafterConfig, LaunchConfig, TargetConfig
from outrider.models.cache.attention_masks import document_mask, extend_ancestor_mask
from outrider.models.cache.state_cache import PromptRows, StateCache
from outrider.models.drafting.causal_lm import (
    LmHead,
    as_target,
    build_lm,
    config_to_dict,
    lm_config,
    load_lm,
    read_lm_config,
    refuse_code_keys,
    require_vocab,
    resolve_width,
    small_llama_config,
)
from outrider.models.drafting.drafter import BatchDrafter, LevelIds
from outrider.models.drafting.on_policy import first_answers, replace_answers, sample_answers
from outrider.models.drafting.self_feeding import gather_parents
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Batch, Guess, ModelShape, Trace, shifted_guesses
from outrider.models.target import target_check
from outrider.models.target.model_shape import config_shape
from outrider.models.target.target import Target


@dataclass(frozen=True)
class Config(DrafterConfig):
    """Settings of a draft model; conf/drafter/draft_lm.yaml describes each."""

    name: str = "draft_lm"
    depth_weights: str = "first"
    path: str | None = None
    layers: int = option(2, "", DEPTHS)
    hidden: int | None = option(None, "", WIDTH)
    heads: int | None = option(None, "", WIDTH)
    body: Any = None
    on_policy: float = option(0.0, "", PROBABILITY)
    write_temperature: float = option(1.0, "", "(0, inf)")
    write_tokens: int = option(64, "", TOKENS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None and self.hidden % (2 * (self.heads or 1)):
            raise ValueError(f"hidden = {self.hidden}: rotary pairs need a multiple of 2 * heads")
        if self.body is not None:
            refuse_code_keys(self.body)
            if not isinstance(self.body, dict) or not isinstance(self.body.get("model_type"), str):
                raise ValueError(f"body = {self.body}: needs a model_type")

    def check_run(self, launch: LaunchConfig, target: TargetConfig) -> None:
        """Refuse ZeRO-3: it gathers weights on all ranks at once; their answers differ in length.

        Raises:
            ConfigError: launch=zero3 with `on_policy`.
        """
        if launch.name == "zero3" and self.on_policy > 0:
            why = "With drafter.on_policy its ranks would deadlock."
            raise ConfigError("launch", launch.name, why, "Use launch=zero2 or launch=ddp.")


@dataclass(frozen=True)
class DraftLmState:
    """Decoding state: keys and values of the text read so far, then of the branch."""

    rows: PromptRows
    hidden: Float[Tensor, "R D"]  # final states of the R newest tokens
    taps: Float[Tensor, "R KD"]  # and outputs of the tapped layers, if there are any
    ancestors: Bool[Tensor, "N M"]  # the nodes of the branch that each newest token descends from


class DraftLm(BatchDrafter):
    """A causal language model of transformers and its head; `Target` runs it, masks included."""

    required_features = "ids"

    def __init__(
        self, cfg: Config, target: Target, vocab: DraftVocab, taps: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.vocab, self.taps, self.depths = vocab, taps, cfg.depths
        self._checkpoints = False
        self.pretrained_path = cfg.path if cfg.body is None else None
        if self.pretrained_path is None:
            body = cfg.body or small_llama_config(target, cfg.layers, cfg.hidden, cfg.heads)
            self.lm = as_target(build_lm(body), "drafter.body", target)
        else:
            self.lm = as_target(load_lm(self.pretrained_path), "drafter.path", target)
            target_check.check_target(self.lm)
        self.cfg = replace(cfg, body=config_to_dict(self.lm.config))
        self.body = self.lm.base_model.requires_grad_(True)
        self.lm_head = LmHead(self.lm).requires_grad_(True)
        self.train()

    @classmethod
    def check_settings(cls, cfg: Config, shape: ModelShape) -> None:
        cls.draft_shape(cfg, shape)

    @classmethod
    def draft_shape(cls, cfg: Config, shape: ModelShape) -> ModelShape | None:
        """Return the shape of the draft model for a target's; None if its configuration has none.

        Raises:
            ConfigError: it has other tokens than the target.
        """
        if cfg.body is None and cfg.path is None:
            hidden, heads = resolve_width(shape, cfg.hidden, cfg.heads)
            return shape._replace(
                hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
                layers=cfg.layers,
            )  # fmt: skip
        if cfg.body is not None:
            key, name, config = "drafter.body", cfg.body["model_type"], lm_config(cfg.body)
        else:
            key, name = "drafter.path", str(cfg.path)
            config = read_lm_config(name)
        own = config_shape(config)
        if own is not None:
            require_vocab(key, name, own.vocab, shape.vocab)
        return own

    def initialise(self, target: Target, traces: Iterable[Trace]) -> str:
        path = self.pretrained_path
        return "random weights" if path is None else f"the weights of {path}"

    def head(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows Vd"]:
        out: Tensor = self.lm_head(hidden, self.vocab)
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftLm":
        """Convert the weights but keep rotary frequencies in float32, which positions need."""
        frequencies = [
            (module, name, value)
            for module in self.body.modules()
            for name, value in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, value in frequencies:
            setattr(module, name, value.to(getattr(module, name).device))
        return self

    # ---- training ----

    def unroll(self, trace: Trace) -> Iterator[Guess]:
        if self.gradient_checkpointing and not self._checkpoints:  # newer transformers rename it
            new = getattr(self.lm.model, "activation_checkpointing_enable", None)
            (new or self.lm.model.gradient_checkpointing_enable)({"use_reentrant": False})
            self._checkpoints = True
        mask = document_mask(trace.document)
        last = self.lm.forward(trace.ids, trace.positions, mask, grad=torch.is_grad_enabled()).last
        rows = torch.arange(trace.ids.numel(), device=last.device)
        yield from shifted_guesses(rows, last.flatten(0, 1), self.depths)

    # ---- decoding ----

    def absorb_batch(
        self, states: Sequence[DraftLmState | None], traces: Sequence[Trace]
    ) -> list[DraftLmState]:
        new = self._read_text(states, traces, [()] * len(traces))
        return [replace(state, hidden=state.hidden[-1:], taps=state.taps[-1:]) for state in new]

    def _read_text(
        self,
        states: Sequence[DraftLmState | None],
        traces: Sequence[Trace],
        guesses: Sequence[Sequence[int]],
    ) -> list[DraftLmState]:
        """Extend prompts with a state in one forward, and start new prompts in another.

        Args:
            guesses: tokens that may follow each text, read after it.
        """
        out = dict[int, DraftLmState]()
        for new in (False, True):
            group = [i for i, state in enumerate(states) if (state is None) == new]
            old, text = [states[i] for i in group], [traces[i] for i in group]
            extended = self._append_tokens(old, text, [guesses[i] for i in group])
            out |= zip(group, extended, strict=True)
        return [out[i] for i in range(len(states))]

    def _append_tokens(
        self,
        states: Sequence[DraftLmState | None],
        traces: Sequence[Trace],
        guesses: Sequence[Sequence[int]],
    ) -> list[DraftLmState]:
        """Return the states after decided tokens and guesses; prompts may differ in length."""
        if not states:
            return []
        texts = [t.next_ids[0] for t in traces]
        if states[0] is None:  # all prompts are new: x_0 is the next token of no row
            texts = [torch.cat([t.ids[0, :1], t.next_ids[0]]) for t in traces]
        verified = [*map(len, texts)]
        ids = [
            torch.cat([text, text.new_tensor(guess)]) if guess else text
            for text, guess in zip(texts, guesses, strict=True)
        ]
        counts, device = [*map(len, ids)], ids[0].device
        starts = [0 if state is None else state.rows.length for state in states]
        at = [torch.arange(n, device=device) + s for n, s in zip(counts, starts, strict=True)]
        width = max(counts)
        causal = torch.ones(1, width, width, dtype=torch.bool, device=device).tril()
        tokens, positions = (pad_sequence(part, batch_first=True) for part in (ids, at))
        return self._forward(states, tokens, positions, counts, verified, causal)

    def step_batch(
        self, states: Sequence[DraftLmState], depth: int, ids: LevelIds, parents: LevelIds
    ) -> tuple[Float[Tensor, "B N Vd"], list[DraftLmState]]:
        if depth == 1:
            return self.head(torch.stack([state.hidden for state in states])), list(states)
        newest = torch.tensor([state.rows.length - 1 for state in states], device=ids.device)
        at = (newest[:, None] + depth - 1).expand_as(ids)
        old = gather_parents([state.ancestors for state in states], parents)
        ancestors, counts = extend_ancestor_mask(old), [ids.shape[1]] * len(ids)
        new = self._forward(states, ids, at, counts, [0] * len(ids), ancestors)
        new = [replace(s, ancestors=own) for s, own in zip(new, ancestors.unbind(), strict=True)]
        return self.head(torch.stack([state.hidden for state in new])), new

    def _forward(
        self,
        states: Sequence[DraftLmState | None],
        ids: Int[Tensor, "B W"],
        positions: Int[Tensor, "B W"],
        counts: Sequence[int],
        verified: Sequence[int],
        mask: Bool[Tensor, "_ W M"],
    ) -> list[DraftLmState]:
        """Run new tokens after every prompt; `StateCache` has the layout of the columns.

        Args:
            positions: those after the last position of the model are set to it.
            counts: how many of the W tokens belong to each prompt; the rest is padding.
            verified: how many of these, from the first on, belong to the text.
            mask: which of the last M columns a new token attends to; it attends to all others
                that are not padding.
        """
        start = PromptRows((), ids.new_zeros(0))
        cache = StateCache([s.rows if s else start for s in states], counts, verified)
        mask = F.pad(mask, (cache.length + ids.shape[1] - mask.shape[2], 0), value=True)
        if any(cache.padding):
            columns = torch.arange(mask.shape[2], device=mask.device)
            mask = mask & (columns >= columns.new_tensor(cache.padding)[:, None])[:, None]
        positions = positions.clamp(max=self.lm.shape().max_positions - 1)
        new = self.lm.forward(ids, positions, mask.expand(len(ids), -1, -1), cache)
        none = mask[0, :1, :0]
        return [
            DraftLmState(cache.prompt(i), new.last[i, :count], new.taps[i, :count], none)
            for i, count in enumerate(counts)
        ]

    def forward_count(self, depths: int) -> int:
        return 1

    def activation_count(self, depths: int) -> float:
        shape = self.lm.shape()
        heads = (shape.heads + shape.kv_heads) * shape.head_dim
        layer = 3.4 * (shape.hidden + heads) + 4.0 * shape.intermediate
        return shape.layers * layer + (2 + depths) * shape.hidden

    # ---- on-policy text ----

    def on_policy_batch(self, batch: Batch) -> Batch | None:
        """Replace first answers by samples at temperature `write_temperature`."""
        spans = first_answers(batch) if self.cfg.on_policy else []
        if not spans or float(torch.rand(())) >= self.cfg.on_policy:
            return None
        training = self.training
        self.eval()  # no dropout
        answers = sample_answers(self.lm, self._draw, batch, spans, self.cfg.write_tokens)
        self.train(training)
        return replace_answers(batch, spans, answers)

    def _draw(self, hidden: Float[Tensor, "N D"]) -> Int[Tensor, "N 1"]:
        probs = (self.head(hidden).float() / self.cfg.write_temperature).softmax(-1)
        return self.vocab.to_target(torch.multinomial(probs, 1))
