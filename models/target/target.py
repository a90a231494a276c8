"""The frozen target: any causal language model of transformers, read through hooks.

This file, `fast_llama.py` and `query_scales.py` depend on the internals of a target's model. This
one locates the decoder, its layers, the embedding and the head by type, not by name;
`target_check.py` verifies the result on every load. Layers with a recurrent state read one
document at a time, and a cache runs them (`recurrent.py`).
"""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from outrider.conf.errors import ConfigError
from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.attention_masks import additive_masks, document_mask, hybrid_masks
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.split_cache import SplitCache
from outrider.models.interface import Batch, ModelShape, Trace
from outrider.models.small_matmul import linear
from outrider.models.target.fast_llama import FastLlama, supports
from outrider.models.target.layer_parts import WHOLE, Part, limit_layers
from outrider.models.target.lora import has_adapters
from outrider.models.target.model_shape import shape_of
from outrider.models.target.query_scales import distance_modules, scale_queries, set_distances
from outrider.models.target.recurrent import (
    documents_by_length,
    most_on_a_rank,
    recorded,
    recurrent_modules,
    refuse_index,
    refuse_unknown_states,
    writes_rows,
)

MASK_ELEMENTS = 2**26  # of one attention mask: 256 MB in float32


class TargetStates(NamedTuple):
    """Hidden states of one forward, rows in the order of the input."""

    taps: Float[Tensor, "B T KH"]  # outputs of the tapped decoder layers, concatenated
    last: Float[Tensor, "B T H"]  # output of the final norm; of a part without it, of its end


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise ConfigError for a tap that a target of so many layers does not have."""
    for i, tap in enumerate(taps):
        if not 0 <= tap < layers:
            why = f"The target has decoder layers 0..{layers - 1}; a tap reads a layer's output."
            fix = "Choose layers in that range, or drop drafter.taps for low, middle and high."
            raise ConfigError(f"drafter.taps[{i}]", tap, why, fix)


class Target:
    """A frozen causal language model with tapped layers and a head."""

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
            fuse: lay out weights for speed; only for a model whose weights never change.
            output_device: device of the drafter, if the decoder layers are elsewhere. Embedding
                and head are copied to it, and states are returned on it.
        """
        self.model = model.eval().requires_grad_(False)
        self.config: Any = self.model.config
        self.text_config: Any = self.config.get_text_config(decoder=True)
        self.name = name
        self.layers = decoder_layers(model, name)
        self.base_model: Any = find_decoder(model, self.layers)
        refuse_index(self.base_model, name)
        self.recurrent = recurrent_modules(self.base_model)
        if not self.recurrent:
            refuse_unknown_states(model, name)
        arguments = inspect.signature(self.base_model.forward).parameters
        self._cache_argument = "cache_params" if "cache_params" in arguments else "past_key_values"
        self._attends = not self.recurrent or writes_rows(self.base_model)
        self._distances = distance_modules(self.base_model)
        self._by_rows: dict[type, bool] = {}
        # the layers have shapes but no weights: only embedding and head can be used
        self.ends_only = any(p.is_meta for p in self.layers[0].parameters())
        self.fast_forward = (
            FastLlama(model, self.base_model, fuse) if supports(model, self.base_model) else None
        )
        self._output_device = output_device
        self.is_remote = output_device is not None  # sharded, or on devices of their own
        self.embedding: nn.Embedding = gather_module(model.get_input_embeddings(), output_device)
        self.head: nn.Linear = gather_module(model.get_output_embeddings(), output_device)
        self.num_layers, self.vocab_size = len(self.layers), int(self.head.weight.shape[0])
        # neither quantised, sharded nor wrapped
        self._plain_head = type(self.head) is nn.Linear and type(self.head.weight.data) is Tensor
        self._head_rows = WeakTensorKeyDictionary()  # the head's rows and bias, by token ids
        self.set_taps(taps)

    @property
    def device(self) -> torch.device:
        """Device of the embedding, the head and all returned states."""
        return self._output_device or self.embedding.weight.device

    @property
    def layer_device(self) -> torch.device:
        """Device of the first decoder layer."""
        return next(self.layers[0].parameters()).device if self.is_remote else self.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def head_weight(self) -> Float[Tensor, "V H"]:
        return self.head.weight

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def shape(self) -> ModelShape:
        return shape_of(self.text_config, self.num_layers, self.vocab_size)

    def set_taps(self, taps: Sequence[int]) -> None:
        check_taps(taps, self.num_layers)
        self.taps = tuple(taps)

    @property
    def embedding_scale(self) -> float:
        """Factor that the embedding module applies to its rows: sqrt(H) in Gemma, else 1."""
        scale: Any = getattr(self.embedding, "embed_scale", 1.0)
        scale = getattr(self.embedding, "scalar_embed_scale", scale)
        return torch.tensor(float(scale), dtype=self.dtype, device="cpu").item()

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows H"]:
        """Return the stored rows, without `embedding_scale`: what engines feed to a drafter."""
        return F.embedding(ids, self.embedding.weight)

    def logits(self, last: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows V"]:
        """Apply the head, with the logit scaling or soft-capping of the family."""
        last = last.to(self.head_weight.dtype)
        if self._plain_head:
            return self.scale_logits(linear(last, self.head.weight, self.head.bias))
        return self.scale_logits(self.head(last))

    def logits_of(
        self, last: Float[Tensor, "*rows H"], ids: Int[Tensor, " Vd"]
    ) -> Float[Tensor, "*rows Vd"]:
        """Apply the head for these token ids only, with a cache of its rows by `ids`' identity."""
        if ids not in self._head_rows:
            bias = getattr(self.head, "bias", None)
            self._head_rows[ids] = self.head_weight[ids], None if bias is None else bias[ids]
        weight, bias = self._head_rows[ids]
        return self.scale_logits(linear(last.to(weight.dtype), weight, bias))

    def scale_logits(self, logits: Float[Tensor, "*rows X"]) -> Float[Tensor, "*rows X"]:
        """Apply the family's logit scaling and soft-capping."""
        if (scale := getattr(self.text_config, "logits_scaling", None)) is not None:
            logits = logits / scale
        if (scale := getattr(self.text_config, "logit_scale", None)) is not None:
            logits = logits * scale
        cap = self.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def logit_scale(self) -> float:
        """Factor on the output of the head, before `logit_cap`: Granite's and Cohere's."""
        config = self.text_config
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        return scale / float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def logit_cap(self) -> float | None:
        """The c of c tanh(logits / c), Gemma-2's; None: logits are not capped."""
        return getattr(self.text_config, "final_logit_softcapping", None)

    def new_cache(
        self, capacity: int, slots: int = 1, splits: Sequence[int] = ()
    ) -> KVCache | SplitCache:
        """Return a cache of so many prompts.

        Args:
            capacity: counts tokens, tree nodes included.
            splits: layers that start a range with rows of its own.
        """
        if splits:
            return SplitCache(slots, capacity, self.num_layers, self.layer_device, splits)
        return KVCache(slots, capacity, self.num_layers, self.layer_device)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T S"],
        cache: AttentionCache | None = None,
        grad: bool = False,
        part: Part = WHOLE,
    ) -> TargetStates:
        """Run the decoder layers on new tokens, and append them to the cache, if there is one.

        Args:
            ids: new tokens, such as a prompt or a tree, in any order that `mask` describes.
            positions: rotary (or learned) position of each.
            mask: True where a new token attends to one of the S = cached + new tokens or itself.
            cache: holds S - T rows before the call and S after it.
            grad: record gradients, for adapters that a drafter has put into the target.
            part: of the layers; `cache` is that of their range. Taps outside it are left out.
        """
        if self.ends_only:
            raise ConfigError(
                "target.place", "ends", "Only its embedding and its head were loaded.",
                "Leave target.place at replicated; with traces of few tokens, drafter.init=random.",
            )  # fmt: skip
        if self.is_remote:
            ids, positions, mask = (x.to(self.layer_device) for x in (ids, positions, mask))
            if part.hidden is not None:
                part = part._replace(hidden=part.hidden.to(self.layer_device))
        run: Any = self.fast_forward
        if run is None or cache is None or grad or has_adapters(self.layers):
            run = self._reference_forward
        if cache is not None:
            cache.reserve(ids.shape[1])
        with torch.set_grad_enabled(grad):
            masks = self._additive_masks(mask, positions, cache)
            stop = self.num_layers if part.stop is None else part.stop
            inside = [tap for tap in self.taps if part.first <= tap < stop]
            taps, last = run(ids, positions, masks, cache, inside, part)
            if self.is_remote:
                taps, last = [tap.to(self.device) for tap in taps], last.to(self.device)
            if cache is not None:
                cache.commit(positions)
            return TargetStates(torch.cat(taps, dim=-1) if taps else last[..., :0], last)

    def final_norm(self, hidden: Float[Tensor, "B T H"]) -> Float[Tensor, "B T H"]:
        """Apply the norm before the head to states of any layer: those of an early exit."""
        no_layers = Part(self.num_layers, hidden=hidden)
        rows = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        visible = torch.eye(hidden.shape[1], dtype=torch.bool, device=hidden.device)
        grad = torch.is_grad_enabled()
        return self.forward(
            rows, rows, visible.expand(len(rows), -1, -1), None, grad, no_layers
        ).last

    def _reference_forward(
        self, ids: Tensor, positions: Tensor, masks: Any, cache: Any, taps: Sequence[int],
        part: Part,
    ) -> tuple[list[Tensor], Tensor]:  # fmt: skip
        """Compute the forward of `FastLlama` with the model's own modules."""
        outputs: dict[int, Tensor] = {}
        wanted = set(taps) if part.stop is None else {*taps, part.stop - 1}
        with ExitStack() as hooks:
            hooks.enter_context(scale_queries(self.layers, positions))
            if cache is not None:
                hooks.enter_context(recorded(self.recurrent, cache, self._by_rows))
            if cache is not None and self._distances:
                columns = cache.column_positions(positions)
                hooks.enter_context(set_distances(self._distances, positions, columns))
            if part is not WHOLE:
                hooks.enter_context(limit_layers(self.layers, part))
            for tap in wanted:
                save = partial(_save_output, outputs, tap)
                hooks.enter_context(self.layers[tap].register_forward_hook(save))
            last = self.base_model(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions,
                **{self._cache_argument: cache},
                use_cache=False,  # True lets some families refuse caches that are not their own
            ).last_hidden_state
        if part.stop is not None:
            last = outputs[part.stop - 1]
        return [outputs[tap] for tap in taps], last

    def trace(
        self,
        ids: Int[Tensor, "B T"],
        answer: Bool[Tensor, "B T"],
        document: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
    ) -> Trace:
        """Run packed rows, the columns of a `Batch`; documents do not attend to each other."""
        states = self.read_packed(ids, positions, document)
        return Trace.from_batch(Batch(ids, answer, document, positions), states.taps, states.last)

    def read_packed(
        self,
        ids: Int[Tensor, "B T"],
        positions: Int[Tensor, "B T"],
        document: Int[Tensor, "B T"],
        grad: bool = False,
    ) -> TargetStates:
        """Run packed rows; documents do not see each other, and padding has undefined states."""
        read = self._read_documents if self.recurrent else self._read_rows
        return read(ids, positions, document, grad)

    def _read_rows(
        self, ids: Tensor, positions: Tensor, document: Tensor, grad: bool
    ) -> TargetStates:
        """Run packed rows in one forward, or in chunks where the mask would be too large."""
        batch, length = ids.shape
        if grad or batch * length**2 <= MASK_ELEMENTS:
            return self.forward(ids, positions, document_mask(document), grad=grad)
        # a block per layer: layers may be on several devices
        cache = KVCache(batch, length, 1, self.layer_device)
        size, chunks = max(1, MASK_ELEMENTS // (batch * length)), []
        for start in range(0, length, size):
            new = slice(start, min(start + size, length))
            mask = document_mask(document, new)
            chunks.append(self.forward(ids[:, new], positions[:, new], mask, cache))
        return TargetStates(*(torch.cat(part, dim=1) for part in zip(*chunks, strict=True)))

    def _read_documents(
        self, ids: Tensor, positions: Tensor, document: Tensor, grad: bool
    ) -> TargetStates:
        """Run packed rows document by document, those of one length together.

        Recurrent layers do not respect masks.
        """
        groups = [*documents_by_length(document)]
        most = most_on_a_rank(self.layers, len(groups))
        read = []
        for index in groups:
            rows = (ids.flatten()[index], positions.flatten()[index], torch.zeros_like(index))
            read.append(self._read_rows(*rows, grad))
        for _ in range(most - len(groups)):
            one = ids[:1, :1]
            self._read_rows(one, torch.zeros_like(one), torch.zeros_like(one), grad)
        out = []
        for parts in zip(*read, strict=True):
            whole = parts[0].new_zeros(ids.numel(), parts[0].shape[-1])
            for index, part in zip(groups, parts, strict=True):
                whole[index] = part
            out.append(whole.view(*ids.shape, -1))
        return TargetStates(*out)

    def _additive_masks(self, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        """Return an additive 4-D mask; a dict by layer type where the family mixes several."""
        columns = positions if cache is None else cache.column_positions(positions)
        if not self._attends:
            return None
        masks = hybrid_masks if self.recurrent else additive_masks
        return masks(self.text_config, mask, positions, columns, self.dtype)


def gather_module(module: Any, device: torch.device | None) -> Any:
    """Return an embedding or a head with unsharded weights on `device`; a copy only if needed."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    full = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in own.items()}
    if device is None or all(full[name] is p and p.device == device for name, p in own.items()):
        return module
    out = copy.copy(module)  # without the hooks that gather its shards
    out._forward_hooks, out._forward_pre_hooks = OrderedDict(), OrderedDict()
    vars(out).pop("forward", None)
    full = {name: nn.Parameter(p.detach().to(device), False) for name, p in full.items()}
    out._parameters = {**module._parameters, **full}
    return out


def decoder_layers(model: Any, name: str = "target") -> nn.ModuleList:
    """Return the outermost ModuleList of the decoder with one entry per decoder layer."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    why = f"No list of {count} decoder layers was found in it."
    raise ConfigError("target", name, why, "Use a decoder-only model of transformers.")


def find_decoder(model: Any, layers: nn.ModuleList) -> Any:
    """Return the module that runs the decoder layers and the final norm, without the head.

    `get_decoder` of some classes, such as Llama-4's, returns a model with its head; then the
    decoder is the module inside it that holds the layers.
    """
    decoder = model.get_decoder()
    if decoder.get_output_embeddings() is None:
        return decoder
    return next(m for m in decoder.modules() if any(child is layers for child in m.children()))


def _save_output(
    outputs: dict[int, Tensor], tap: int, _module: nn.Module, _args: Any, output: Any
) -> None:
    """Keep the output of a layer, as a hook."""
    outputs[tap] = output[0] if isinstance(output, tuple) else output
