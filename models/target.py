"""The frozen target: any causal language model of transformers, read through hooks.

The only file that knows what a Hugging Face model looks like inside. It finds the decoder layers,
the embedding and the head by what they are, not by their names, and proves on a short probe that
its reading is right (`Target.check`): head(last) equals the model's own logits, every tap fires
once, every layer writes the cache. A family with recurrent state (linear attention, Mamba) cannot
take back drafted tokens and is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.models.adapters import adapted
from outrider.models.base import Shape, Trace
from outrider.models.cache import RowCache
from outrider.models.lean import Lean, suits
from outrider.models.slots import SlotCache
from outrider.train.errors import ConfigError, RunError

PROBE = 8  # tokens of the probe in `check`
WRONG = (TypeError, ValueError, IndexError, AttributeError, RuntimeError)  # a model misread
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv")


class Seen(NamedTuple):
    """What one forward of the target left behind, rows in the order of the input."""

    taps: Float[Tensor, "B T KH"]
    last: Float[Tensor, "B T H"]


class Target:
    """A frozen model with taps, a head and a cache that can take tokens back."""

    def __init__(
        self, model: Any, taps: Sequence[int] = (), name: str = "target", fuse: bool = True
    ) -> None:
        """
        Args:
            model: an `AutoModelForCausalLM`; put into eval mode and frozen.
            taps: decoder layers whose output is kept.
            name: shown in messages.
            fuse: nobody will change its weights, so that they may be laid out for speed.

        Raises:
            ConfigError: the family cannot be used, or a tap does not exist.
        """
        self.model = model.eval().requires_grad_(False)
        self.config: Any = self.model.config
        self.text: Any = self.config.get_text_config(decoder=True)
        self.name = name
        self._refuse_recurrent()
        self.body: nn.Module = self.model.base_model
        self.layers = _decoder_layers(self.body, self.text.num_hidden_layers, name)
        self.lean = Lean(model, self.layers, fuse) if suits(model, self.layers) else None
        self._head_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.set_taps(taps)

    # ---- facts ----

    @property
    def device(self) -> torch.device:
        out: torch.device = next(self.model.parameters()).device
        return out

    @property
    def dtype(self) -> torch.dtype:
        out: torch.dtype = next(self.model.parameters()).dtype
        return out

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def vocab(self) -> int:
        return int(self.head_weight.shape[0])

    @property
    def head_weight(self) -> Float[Tensor, "V H"]:
        out: Tensor = self.model.get_output_embeddings().weight
        return out

    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def shape(self) -> Shape:
        """What a drafter must know."""
        cfg, hidden = self.text, int(self.text.hidden_size)
        heads = int(cfg.num_attention_heads)
        act = str(getattr(cfg, "hidden_act", None) or getattr(cfg, "hidden_activation", "silu"))
        return Shape(
            hidden=hidden,
            intermediate=int(getattr(cfg, "intermediate_size", None) or 4 * hidden),
            layers=self.depth,
            heads=heads,
            kv_heads=int(getattr(cfg, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(cfg, "head_dim", None) or hidden // heads),
            vocab=self.vocab,
            eps=float(getattr(cfg, "rms_norm_eps", None) or 1e-5),
            rope_theta=_rope_theta(cfg),
            activation="gelu" if act.startswith("gelu") else "silu",
            max_positions=int(getattr(cfg, "max_position_embeddings", None) or 2048),
        )

    def set_taps(self, taps: Sequence[int]) -> None:
        for i, tap in enumerate(taps):
            if not 0 <= tap < self.depth:
                last = self.depth - 1
                raise ConfigError(
                    f"drafter.taps[{i}]",
                    tap,
                    f"{self.name} has decoder layers 0..{last}, and a tap reads a layer's output.",
                    "Choose layers in that range, or drop drafter.taps for low, middle and high.",
                )
        self.taps = tuple(taps)

    # ---- looking up ----

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        out: Tensor = self.model.get_input_embeddings()(ids)
        return out

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """The head, with the scaling or soft-capping that some families put behind it."""
        out: Tensor = self.model.get_output_embeddings()(last.to(self.head_weight.dtype))
        return self.shape_logits(out)

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]:
        """The head, computed for some tokens only."""
        weight, bias = self._rows_of_head(ids)
        return self.shape_logits(nn.functional.linear(last.to(weight.dtype), weight, bias))

    def _rows_of_head(self, ids: Int[Tensor, " Vd"]) -> tuple[Tensor, Tensor | None]:
        """Kept for the next call, which as a rule asks for the same: a copy costs a draft step."""
        known = self._head_rows
        if known is None or known[0] is not ids:
            bias = getattr(self.model.get_output_embeddings(), "bias", None)
            known = (ids, self.head_weight[ids], None if bias is None else bias[ids])
            self._head_rows = known
        return known[1], known[2]

    def shape_logits(self, logits: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows X"]:
        """What the family does to its logits behind the head."""
        for name in ("logits_scaling", "logit_scale"):
            if (scale := getattr(self.text, name, None)) is not None:
                logits = logits / scale if name == "logits_scaling" else logits * scale
        cap = getattr(self.text, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # ---- running ----

    def new_cache(self, capacity: int) -> RowCache:
        """A cache for one prompt; `capacity` counts tokens, tree nodes included."""
        return RowCache(capacity)

    def new_slots(self, slots: int, capacity: int) -> SlotCache:
        """A cache for prompts that come and go; every slot has `capacity` rows."""
        return SlotCache(slots, capacity, self.depth, self.device)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        seen: Bool[Tensor, "B T S"],
        cache: RowCache | SlotCache | None = None,
        grad: bool = False,
    ) -> Seen:
        """Run new tokens; with a cache they are appended to it.

        Args:
            ids: new tokens, any order that `seen` explains (a prompt, or a tree).
            positions: rotary (or learned) position of each.
            seen: which of the S = cached + new tokens each new token attends to, itself included.
            cache: holds S - T rows; holds S afterwards. None: nothing is kept.
            grad: let autograd follow, for what a drafter has put into the target.
        """
        with torch.set_grad_enabled(grad):
            return self._forward(ids, positions, seen, cache)

    def _forward(
        self, ids: Tensor, positions: Tensor, seen: Tensor, cache: RowCache | SlotCache | None
    ) -> Seen:
        if cache is None:
            return _seen(*self._by_its_modules(ids, positions, seen, None))
        cache.reserve(ids.shape[1])
        if self.lean is None or torch.is_grad_enabled() or adapted(self.layers):
            out = self._by_its_modules(ids, positions, seen, cache)
        else:
            masks = self._masks(seen, positions, cache)
            out = self.lean(ids, positions, masks, cache, self.taps)
        cache.commit(positions)
        return _seen(*out)

    def _by_its_modules(
        self, ids: Tensor, positions: Tensor, seen: Tensor, cache: RowCache | SlotCache | None
    ) -> tuple[list[Tensor], Tensor]:
        """The outputs of the tapped layers and the last one, as transformers computes them."""
        with self._watch() as caught:
            out = self.body(
                input_ids=ids,
                attention_mask=self._masks(seen, positions, cache),
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return caught, out.last_hidden_state

    def trace(
        self,
        ids: Int[Tensor, "B T"],
        answer: Bool[Tensor, "B T"],
        document: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
    ) -> Trace:
        """Training: packed rows, no document sees another, no [B,T,V] logits."""
        seen = self.forward(ids, positions, packed(document))
        following = torch.zeros_like(ids)
        following[:, :-1] = ids[:, 1:]
        return Trace(ids, following, answer, document, positions, seen.taps, seen.last)

    @contextmanager
    def _watch(self) -> Iterator[list[Tensor]]:
        """Collect the outputs of the tapped layers, in the order of `taps`."""
        caught: dict[int, Tensor] = {}
        ordered: list[Tensor] = []

        def keep(tap: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                caught[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.layers[tap].register_forward_hook(keep(tap)) for tap in self.taps]
        try:
            yield ordered
            ordered.extend(caught[tap] for tap in self.taps)
        finally:
            for hook in hooks:
                hook.remove()

    def _masks(
        self,
        seen: Bool[Tensor, "B T S"],
        positions: Int[Tensor, "B T"],
        cache: RowCache | SlotCache | None,
    ) -> Any:
        """Additive 4-D masks: one, or one per kind of layer where the family mixes windows."""
        kinds = set(getattr(self.text, "layer_types", None) or ())
        window = getattr(self.text, "sliding_window", None)
        if kinds and "sliding_attention" not in kinds:
            window = None
        if not getattr(self.text, "use_sliding_window", True):
            window = None
        full = self._additive(seen)
        if window is None:
            return full
        at = positions if cache is None else cache.columns(positions)
        near = self._additive(seen & (positions[:, :, None] - at[:, None, :] < window))
        if len(kinds) > 1:
            return {"full_attention": full, "sliding_attention": near}
        return near

    def _additive(self, seen: Bool[Tensor, "B T S"]) -> Float[Tensor, "B 1 T S"]:
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[:, None]

    # ---- proving ----

    def _refuse_recurrent(self) -> None:
        kinds = {str(kind) for kind in getattr(self.text, "layer_types", None) or ()}
        kinds |= {str(getattr(self.text, "model_type", ""))}
        bad = sorted(k for k in kinds if any(word in k for word in RECURRENT))
        if bad or getattr(self.model, "_is_stateful", False):
            raise ConfigError(
                "target",
                self.name,
                f"It keeps a recurrent state ({', '.join(bad) or 'stateful model'}), and a state "
                "cannot take back the drafted tokens that are rejected.",
                "Use a target whose layers are all attention layers.",
            )

    def check(self) -> None:
        """Compare this reading of the model with the model's own words on a short probe.

        The probe is a prefix in the cache and a small tree behind it: the root, two guesses, and
        one below the first. Each node must say what the model says of its path alone.

        Raises:
            RunError: the logits, the taps or the cache are not what this class believes.
        """
        before = self.taps
        try:
            self.set_taps(range(self.depth))
            self._probe_both()
        except WRONG as error:
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"{self.name} cannot be read as a target: {error}", "Its family is not supported."
            ) from error
        finally:
            self.set_taps(before)

    def _probe_both(self) -> None:
        """Its modules count; a lean forward that says something else is set aside."""
        try:
            self._probe()
        except WRONG:
            if self.lean is None:
                raise
            self.lean = None
            self._probe()

    @torch.no_grad()
    def _probe(self) -> None:
        prefix = torch.arange(1, PROBE + 1, device=self.device) % self.vocab
        tree = (prefix[-1:] + torch.arange(1, 5, device=self.device)) % self.vocab
        paths = ([0], [0, 1], [0, 2], [0, 1, 3])
        cache = self.new_cache(PROBE + len(tree))
        causal = torch.ones(1, PROBE, PROBE, dtype=torch.bool, device=self.device).tril()
        places = torch.arange(PROBE, device=self.device)[None]
        self.forward(prefix[None], places, causal, cache)
        if cache.layers_written != self.depth:
            raise RunError(
                f"{self.name}: {cache.layers_written} of {self.depth} layers wrote the cache.",
                "Its layers keep something else than keys and values; it cannot be a target here.",
            )
        seen = torch.zeros(1, len(tree), PROBE + len(tree), dtype=torch.bool, device=self.device)
        seen[..., :PROBE] = True
        for path in paths:
            seen[0, path[-1], [PROBE + node for node in path]] = True
        depths = torch.tensor([len(path) - 1 for path in paths], device=self.device)
        said = self.forward(tree[None], depths[None] + PROBE, seen, cache)
        if said.taps.shape[-1] != self.depth * said.last.shape[-1]:
            raise RunError(
                f"{self.name}: its decoder layers do not hand on one state each.",
                "It cannot be a target here.",
            )
        logits = self.logits(said.last[0]).float()
        for path in paths:
            ids = torch.cat([prefix, tree[path]])[None]
            own = self.model(input_ids=ids, use_cache=False).logits[0, -1].float()
            self._same(logits[path[-1]], own)

    def _same(self, ours: Float[Tensor, " V"], own: Float[Tensor, " V"]) -> None:
        gap = (ours - own).abs().max().item()
        limit = (1e-3 if self.dtype == torch.float32 else 0.1) * max(1.0, own.abs().max().item())
        if not gap <= limit:
            raise RunError(
                f"{self.name}: read as a tree, its logits differ from its own by {gap:.3g}.",
                "This family does something that Outrider does not know; it cannot be a target.",
            )


def _seen(caught: list[Tensor], last: Tensor) -> Seen:
    return Seen(torch.cat(caught, dim=-1) if caught else last[..., :0], last)


def _decoder_layers(body: nn.Module, count: int, name: str) -> nn.ModuleList:
    """The ModuleList with one entry per decoder layer: the outermost of that length."""
    found = [m for m in body.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise ConfigError(
            "target", name, f"No list of {count} decoder layers was found in it.",
            "Use a decoder-only model of transformers.",
        )  # fmt: skip
    return found[0]


def _rope_theta(config: Any) -> float:
    """Base of the rotary embedding; 10000 for families that have none."""
    fields = getattr(config, "rope_parameters", None) or {}
    if isinstance(fields, dict) and "full_attention" in fields:
        fields = fields["full_attention"]
    value = fields.get("rope_theta") if isinstance(fields, dict) else None
    return float(value or getattr(config, "rope_theta", None) or 10000.0)


def packed(document: Int[Tensor, "B T"]) -> Bool[Tensor, "B T T"]:
    """Causal within each document; padding sees itself, so that no row of the softmax is empty."""
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    same = document[:, :, None] == document[:, None, :]
    return causal & same


def usual_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high: the outputs of layers 1, n//2-1, n-4 (inputs of 2, n//2, n-3)."""
    return (1, layers // 2 - 1, layers - 4)


def default_taps(layers: int) -> tuple[int, ...]:
    """The usual taps where the target is deep enough for three distinct ones.

    A target too shallow for three distinct ones gives those that exist: n = 2 -> (0, 1).
    """
    wanted = usual_taps(layers)
    if len(set(wanted)) == 3 and min(wanted) >= 0 and list(wanted) == sorted(wanted):
        return wanted
    return tuple(sorted({0, (layers - 1) // 2, max(layers - 2, min(1, layers - 1))}))
