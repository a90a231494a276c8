"""The frozen target: any causal language model of transformers, read through hooks.

The only file that depends on the inside of a Hugging Face model. It locates the decoder layers, the
embedding and the head by type, not by name; models/target_check.py verifies the result on every
load. Families with a recurrent state (linear attention, Mamba) are refused, because such a state
cannot take back rejected draft tokens.
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
from outrider.models.attention_masks import additive_mask, document_mask, sliding_window
from outrider.models.batch_kv_cache import BatchKVCache
from outrider.models.fast_llama import FastLlama, supports
from outrider.models.interface import Batch, ModelShape, Trace
from outrider.models.kv_cache import KVCache
from outrider.models.lora import has_adapters
from outrider.models.small_matmul import linear

MASK_ELEMENTS = 2**26  # of one attention mask: 256 MB in float32
RECURRENT = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv")


class TargetStates(NamedTuple):
    """Hidden states of one forward, rows in the order of the input.

    Attributes:
        taps: outputs of the tapped decoder layers, concatenated.
        last: output of the final norm.
    """

    taps: Float[Tensor, "B T KH"]
    last: Float[Tensor, "B T H"]


class Target:
    """A frozen model with taps, a head, and a cache from which tokens can be removed."""

    def __init__(
        self,
        model: Any,
        taps: Sequence[int] = (),
        name: str = "target",
        fuse: bool = True,
        output_device: torch.device | None = None,
    ) -> None:
        """
        Args:
            model: an `AutoModelForCausalLM`; put into eval mode and frozen.
            taps: indices of the decoder layers whose outputs are returned.
            name: used in messages.
            fuse: lay out weights for speed; only for a model whose weights never change.
            output_device: device of the drafter, if the decoder layers are elsewhere. Embedding
                and head are copied to it, and states are returned on it.

        Raises:
            ConfigError: the family is not supported, or a tap does not exist.
        """
        self.model = model.eval().requires_grad_(False)
        self.config: Any = self.model.config
        self.text_config: Any = self.config.get_text_config(decoder=True)
        self.name = name
        self._refuse_recurrent()
        self.base_model: nn.Module = self.model.base_model
        self.layers = decoder_layers(model, name)
        # the layers have shapes but no weights: only embedding and head can be used
        self.ends_only = any(p.is_meta for p in self.layers[0].parameters())
        self.fast_forward = (
            FastLlama(model, self.layers, fuse) if supports(model, self.layers) else None
        )
        self._output_device = output_device
        self.embedding: Any = gather_module(model.get_input_embeddings(), output_device)
        self.head: Any = gather_module(model.get_output_embeddings(), output_device)
        # neither quantised, sharded nor wrapped
        self._plain_head = type(self.head) is nn.Linear and type(self.head.weight.data) is Tensor
        self._head_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.set_taps(taps)

    # ---- properties ----

    @property
    def device(self) -> torch.device:
        """Device of the embedding, the head and all returned states."""
        out: torch.device = self._output_device or self.embedding.weight.device
        return out

    @property
    def is_remote(self) -> bool:
        """Whether the layers are sharded over ranks or on devices of their own."""
        return self._output_device is not None

    @property
    def layer_device(self) -> torch.device:
        """Device of the first decoder layer."""
        if self._output_device is None:
            return self.device
        out: torch.device = next(self.layers[0].parameters()).device
        return out

    @property
    def dtype(self) -> torch.dtype:
        out: torch.dtype = self.embedding.weight.dtype
        return out

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def vocab_size(self) -> int:
        return int(self.head_weight.shape[0])

    @property
    def head_weight(self) -> Float[Tensor, "V H"]:
        out: Tensor = self.head.weight
        return out

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def shape(self) -> ModelShape:
        """Return the sizes that a drafter is built to match."""
        cfg, hidden = self.text_config, int(self.text_config.hidden_size)
        heads = int(cfg.num_attention_heads)
        act = str(getattr(cfg, "hidden_act", None) or getattr(cfg, "hidden_activation", "silu"))
        return ModelShape(
            hidden=hidden,
            intermediate=int(getattr(cfg, "intermediate_size", None) or 4 * hidden),
            layers=self.num_layers,
            heads=heads,
            kv_heads=int(getattr(cfg, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(cfg, "head_dim", None) or hidden // heads),
            vocab=self.vocab_size,
            eps=float(getattr(cfg, "rms_norm_eps", None) or 1e-5),
            rope_theta=_rope_theta(cfg),
            activation="gelu" if act.startswith("gelu") else "silu",
            max_positions=int(getattr(cfg, "max_position_embeddings", None) or 2048),
        )

    def set_taps(self, taps: Sequence[int]) -> None:
        for i, tap in enumerate(taps):
            if not 0 <= tap < self.num_layers:
                last = self.num_layers - 1
                raise ConfigError(
                    f"drafter.taps[{i}]",
                    tap,
                    f"{self.name} has decoder layers 0..{last}, and a tap reads a layer's output.",
                    "Choose layers in that range, or drop drafter.taps for low, middle and high.",
                )
        self.taps = tuple(taps)

    # ---- embedding and head ----

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        out: Tensor = self.embedding(ids)
        return out

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Apply the head, with the logit scaling or soft-capping of the family."""
        last = last.to(self.head_weight.dtype)
        if self._plain_head:
            return self.scale_logits(linear(last, self.head.weight, self.head.bias))
        out: Tensor = self.head(last)
        return self.scale_logits(out)

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]:
        """Apply the head for these token ids only."""
        weight, bias = self._select_head_rows(ids)
        return self.scale_logits(linear(last.to(weight.dtype), weight, bias))

    def _select_head_rows(self, ids: Int[Tensor, " Vd"]) -> tuple[Tensor, Tensor | None]:
        """Cached for the next call with the same tensor: a copy costs as much as a draft step."""
        cached = self._head_rows
        if cached is None or cached[0] is not ids:
            bias = getattr(self.head, "bias", None)
            cached = (ids, self.head_weight[ids], None if bias is None else bias[ids])
            self._head_rows = cached
        return cached[1], cached[2]

    def scale_logits(self, logits: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows X"]:
        """Apply the family's logit scaling and soft-capping."""
        for name in ("logits_scaling", "logit_scale"):
            if (scale := getattr(self.text_config, name, None)) is not None:
                logits = logits / scale if name == "logits_scaling" else logits * scale
        cap = getattr(self.text_config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # ---- forward ----

    def new_cache(self, capacity: int) -> KVCache:
        """Return a cache for one prompt; `capacity` counts tokens, tree nodes included."""
        return KVCache(capacity)

    def new_batch_cache(self, slots: int, capacity: int) -> BatchKVCache:
        """Return a cache with `capacity` rows in each slot; a slot holds one prompt at a time."""
        return BatchKVCache(slots, capacity, self.num_layers, self.device)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T S"],
        cache: KVCache | BatchKVCache | None = None,
        grad: bool = False,
    ) -> TargetStates:
        """Run the decoder layers on new tokens; a cache gets them appended.

        Args:
            ids: new tokens, such as a prompt or a tree, in any order that `mask` describes.
            positions: rotary (or learned) position of each.
            mask: True where a new token attends to one of the S = cached + new tokens, itself
                included.
            cache: holds S - T rows before the call and S after it.
            grad: record gradients, for adapters that a drafter has put into the target.
        """
        with torch.set_grad_enabled(grad):
            return self._forward(ids, positions, mask, cache)

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: KVCache | BatchKVCache | None
    ) -> TargetStates:
        if self.ends_only:
            why = "Only its embedding and its head were loaded."
            fix = (
                "Leave target.place at replicated; with traces of few tokens, drafter.init=random."
            )
            raise ConfigError("target.place", "ends", why, fix)
        if self._output_device is not None:
            ids, positions, mask = (x.to(self.layer_device) for x in (ids, positions, mask))
        if cache is None:
            return _concat_taps(*self._reference_forward(ids, positions, mask, None))
        cache.reserve(ids.shape[1])
        if self.fast_forward is None or torch.is_grad_enabled() or has_adapters(self.layers):
            out = self._reference_forward(ids, positions, mask, cache)
        else:
            masks = self._additive_masks(mask, positions, cache)
            out = self.fast_forward(ids, positions, masks, cache, self.taps)
        cache.commit(positions)
        return _concat_taps(*out)

    def _reference_forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: KVCache | BatchKVCache | None
    ) -> tuple[list[Tensor], Tensor]:
        """Return the tapped layers' outputs and the last state, as transformers computes them."""
        with self._capture_taps() as taps:
            out = self.base_model(
                input_ids=ids,
                attention_mask=self._additive_masks(mask, positions, cache),
                position_ids=positions,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return [tap.to(self.device) for tap in taps], out.last_hidden_state.to(self.device)

    def trace(
        self,
        ids: Int[Tensor, "B T"],
        answer: Bool[Tensor, "B T"],
        document: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
    ) -> Trace:
        """Run packed rows for training. Documents do not attend to each other; no logits are made.

        The arguments are the columns of `Batch`.
        """
        states = self._read_rows(ids, positions, document)
        return Trace.from_batch(Batch(ids, answer, document, positions), states.taps, states.last)

    def _read_rows(self, ids: Tensor, positions: Tensor, document: Tensor) -> TargetStates:
        """Run packed rows in one forward or, where the mask would be too large, in chunks."""
        batch, length = ids.shape
        if batch * length**2 <= MASK_ELEMENTS:
            return self.forward(ids, positions, document_mask(document))
        cache, size = self.new_cache(length), max(1, MASK_ELEMENTS // (batch * length))
        chunks = []
        for start in range(0, length, size):
            new = slice(start, min(start + size, length))
            mask = document_mask(document, new)
            chunks.append(self.forward(ids[:, new], positions[:, new], mask, cache))
        return TargetStates(*(torch.cat(part, dim=1) for part in zip(*chunks, strict=True)))

    @contextmanager
    def _capture_taps(self) -> Iterator[list[Tensor]]:
        """Collect the outputs of the tapped layers, in the order of `taps`, on exit."""
        outputs: dict[int, Tensor] = {}
        ordered: list[Tensor] = []

        def save_output(tap: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                outputs[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.layers[tap].register_forward_hook(save_output(tap)) for tap in self.taps]
        try:
            yield ordered
            ordered.extend(outputs[tap] for tap in self.taps)
        finally:
            for hook in hooks:
                hook.remove()

    def _additive_masks(
        self,
        mask: Bool[Tensor, "B T S"],
        positions: Int[Tensor, "B T"],
        cache: KVCache | BatchKVCache | None,
    ) -> Any:
        """Return an additive 4-D mask; a dict by layer type where the family mixes windows."""
        window, full = sliding_window(self.text_config), additive_mask(mask, self.dtype)
        if window is None:
            return full
        columns = positions if cache is None else cache.column_positions(positions)
        near = mask & (positions[:, :, None] - columns[:, None, :] < window)
        sliding = additive_mask(near, self.dtype)
        if len(set(getattr(self.text_config, "layer_types", None) or ())) > 1:
            return {"full_attention": full, "sliding_attention": sliding}
        return sliding

    def _refuse_recurrent(self) -> None:
        kinds = {str(kind) for kind in getattr(self.text_config, "layer_types", None) or ()}
        kinds |= {str(getattr(self.text_config, "model_type", ""))}
        bad = sorted(k for k in kinds if any(word in k for word in RECURRENT))
        if bad or getattr(self.model, "_is_stateful", False):
            raise ConfigError(
                "target",
                self.name,
                f"It keeps a recurrent state ({', '.join(bad) or 'stateful model'}), and a state "
                "cannot take back the drafted tokens that are rejected.",
                "Use a target whose layers are all attention layers.",
            )


def _concat_taps(taps: list[Tensor], last: Tensor) -> TargetStates:
    return TargetStates(torch.cat(taps, dim=-1) if taps else last[..., :0], last)


def gather_module(module: Any, device: torch.device | None) -> Any:
    """Return an embedding or a head with unsharded weights on `device`; a copy only if needed."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in own.items()}
    if device is None or all(full[name] is p and p.device == device for name, p in own.items()):
        return module
    out = copy.copy(module)  # without the hooks that gather its shards
    out._forward_hooks, out._forward_pre_hooks = OrderedDict(), OrderedDict()
    vars(out).pop("forward", None)
    frozen = {
        name: nn.Parameter(p.detach().to(device), requires_grad=False) for name, p in full.items()
    }
    out._parameters = {**module._parameters, **frozen}
    return out


def decoder_layers(model: Any, name: str = "target") -> nn.ModuleList:
    """Return the outermost ModuleList with one entry per decoder layer.

    Raises:
        ConfigError: there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    matches = [m for m in lists if len(m) == count]
    if not matches:
        raise ConfigError(
            "target", name, f"No list of {count} decoder layers was found in it.",
            "Use a decoder-only model of transformers.",
        )  # fmt: skip
    return matches[0]


def _rope_theta(config: Any) -> float:
    """Return the base of the rotary embedding; 10000 for families that have none."""
    fields = getattr(config, "rope_parameters", None) or {}
    if isinstance(fields, dict) and "full_attention" in fields:
        fields = fields["full_attention"]
    value = fields.get("rope_theta") if isinstance(fields, dict) else None
    return float(value or getattr(config, "rope_theta", None) or 10000.0)
