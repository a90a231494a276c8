"""The frozen target: any causal language model of transformers, read through hooks.

The only file that knows what a Hugging Face model looks like inside. It finds the decoder layers,
the embedding and the head by what they are, not by their names, and proves on a short probe that
its reading is right (`Target.check`): head(last) equals the model's own logits, every tap fires
once, every layer writes the cache. A family with recurrent state (linear attention, Mamba) cannot
take back drafted tokens and is refused.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.conf.errors import ConfigError
from outrider.models import target_check as probe
from outrider.models.batch_kv_cache import SlotCache
from outrider.models.drafter import Shape, Trace
from outrider.models.fast_llama import Lean, suits
from outrider.models.kv_cache import RowCache
from outrider.models.lora import adapted
from outrider.models.small_matmul import linear

PAIRS = 2**26  # of tokens in one mask: 256 MB in float32
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv")


class Seen(NamedTuple):
    """What one forward of the target left behind, rows in the order of the input."""

    taps: Float[Tensor, "B T KH"]
    last: Float[Tensor, "B T H"]


class Target:
    """A frozen model with taps, a head and a cache that can take tokens back."""

    def __init__(
        self,
        model: Any,
        taps: Sequence[int] = (),
        name: str = "target",
        fuse: bool = True,
        home: torch.device | None = None,
    ) -> None:
        """
        Args:
            model: an `AutoModelForCausalLM`; put into eval mode and frozen.
            taps: decoder layers whose output is kept.
            name: shown in messages.
            fuse: nobody will change its weights, so that they may be laid out for speed.
            home: where its ends are and what it says is handed over, if that is not where it
                lies: the device of the drafter.

        Raises:
            ConfigError: the family cannot be used, or a tap does not exist.
        """
        self.model = model.eval().requires_grad_(False)
        self.config: Any = self.model.config
        self.text: Any = self.config.get_text_config(decoder=True)
        self.name = name
        self._refuse_recurrent()
        self.body: nn.Module = self.model.base_model
        self.layers = decoder_layers(model, name)
        # its layers have shapes and no weights: it can look up and judge, not read
        self.hollow = any(p.is_meta for p in self.layers[0].parameters())
        self.lean = Lean(model, self.layers, fuse) if suits(model, self.layers) else None
        self._home = home
        self.embedding: Any = whole(model.get_input_embeddings(), home)
        self.head: Any = whole(model.get_output_embeddings(), home)
        # neither packed, shared nor wrapped
        self._plain = type(self.head) is nn.Linear and type(self.head.weight.data) is Tensor
        self._head_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.set_taps(taps)

    # ---- facts ----

    @property
    def device(self) -> torch.device:
        """Where the drafter finds its ends, and its traces."""
        out: torch.device = self._home or self.embedding.weight.device
        return out

    @property
    def elsewhere(self) -> bool:
        """Whether it lies in shares or on devices of its own: nothing for one rank alone."""
        return self._home is not None

    @property
    def lies(self) -> torch.device:
        """Where its first layers are."""
        if self._home is None:
            return self.device
        out: torch.device = next(self.layers[0].parameters()).device
        return out

    @property
    def dtype(self) -> torch.dtype:
        out: torch.dtype = self.embedding.weight.dtype
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
        out: Tensor = self.head.weight
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
        out: Tensor = self.embedding(ids)
        return out

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """The head, with the scaling or soft-capping that some families put behind it."""
        last = last.to(self.head_weight.dtype)
        if self._plain:
            return self.shape_logits(linear(last, self.head.weight, self.head.bias))
        out: Tensor = self.head(last)
        return self.shape_logits(out)

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]:
        """The head, computed for some tokens only."""
        weight, bias = self._rows_of_head(ids)
        return self.shape_logits(linear(last.to(weight.dtype), weight, bias))

    def _rows_of_head(self, ids: Int[Tensor, " Vd"]) -> tuple[Tensor, Tensor | None]:
        """Kept for the next call, which as a rule asks for the same: a copy costs a draft step."""
        known = self._head_rows
        if known is None or known[0] is not ids:
            bias = getattr(self.head, "bias", None)
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
        if self.hollow:
            why = "Only its embedding and its head were read."
            fix = (
                "Leave target.place at replicated; with traces of few tokens, drafter.init=random."
            )
            raise ConfigError("target.place", "ends", why, fix)
        if self._home is not None:
            ids, positions, seen = (x.to(self.lies) for x in (ids, positions, seen))
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
        return [tap.to(self.device) for tap in caught], out.last_hidden_state.to(self.device)

    def trace(
        self,
        ids: Int[Tensor, "B T"],
        answer: Bool[Tensor, "B T"],
        document: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
    ) -> Trace:
        """Training: packed rows, no document sees another, no [B,T,V] logits."""
        seen = self._read(ids, positions, document)
        following = torch.zeros_like(ids)
        following[:, :-1] = ids[:, 1:]
        return Trace(ids, following, answer, document, positions, seen.taps, seen.last)

    def _read(self, ids: Tensor, positions: Tensor, document: Tensor) -> Seen:
        """Whole; or, where masks would be large, piece by piece over a cache."""
        batch, length = ids.shape
        if batch * length**2 <= PAIRS:
            return self.forward(ids, positions, packed(document))
        cache, size = self.new_cache(length), max(1, PAIRS // (batch * length))
        pieces = []
        for start in range(0, length, size):
            new = slice(start, min(start + size, length))
            mask = packed(document, new)
            pieces.append(self.forward(ids[:, new], positions[:, new], mask, cache))
        return Seen(*(torch.cat(part, dim=1) for part in zip(*pieces, strict=True)))

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
        """Compare this reading of the model with the model's own words (probe.py).

        Raises:
            RunError: the logits, the taps or the cache are not what this class believes.
        """
        probe.check(self)


def _seen(caught: list[Tensor], last: Tensor) -> Seen:
    return Seen(torch.cat(caught, dim=-1) if caught else last[..., :0], last)


def whole(module: Any, home: torch.device | None) -> Any:
    """An embedding or a head, all of it, at `home`: itself where it is so, else a copy."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in own.items()}
    if home is None or all(full[name] is p and p.device == home for name, p in own.items()):
        return module
    out = copy.copy(module)  # without what was hung on it to bring its shares together
    out._forward_hooks, out._forward_pre_hooks = OrderedDict(), OrderedDict()
    vars(out).pop("forward", None)
    there = {name: p.detach().to(home) for name, p in full.items()}
    frozen = {name: nn.Parameter(p, requires_grad=False) for name, p in there.items()}
    out._parameters = {**module._parameters, **frozen}
    return out


def decoder_layers(model: Any, name: str = "target") -> nn.ModuleList:
    """The ModuleList with one entry per decoder layer: the outermost of that length.

    Raises:
        ConfigError: there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    found = [m for m in lists if len(m) == count]
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


def packed(document: Int[Tensor, "B T"], new: slice = slice(None)) -> Bool[Tensor, "B N S"]:
    """Causal within each document; padding sees itself, so that no row of the softmax is empty.

    Args:
        new: which rows ask; they see no column behind the last of them.
    """
    start, stop, _ = new.indices(document.shape[1])
    causal = torch.ones(stop - start, stop, dtype=torch.bool, device=document.device).tril(start)
    same = document[:, start:stop, None] == document[:, None, :stop]
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
