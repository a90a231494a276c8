"""Key layouts of MTP modules, and reading of modules from a target's checkpoint folder.

The layouts, recognised by their keys; n is the target's number of decoder layers:

    DeepSeek-V3    model.layers.{n+k-1}.*; copies of the embedding and the head are skipped
    Qwen3-Next     mtp.*; a norm multiplies by 1 + weight, so 1 is added on reading
    speculators    mtp_layers.0.*; never in a target's folder (`mtp_drafter.py`)

All join [embedding; state]. A module is attention without bias and a gated MLP; other keys (latent
attention, experts, biases, scales of quantised weights) are an error, since a module read in part
would be another network. `mtp_drafter.py` writes these layouts.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.formats.weight_folder import WeightFolder, damaged_means_error

FIX = "Use drafter.init=linear with drafter.warm_start=null, which needs no such weights."
LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
ORDER = "embedding_first"  # of the fused input, in all layouts
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class ModuleLayout(NamedTuple):
    """The keys of a family's modules."""

    prefix: str  # of a key; {} is the layer's number
    pattern: str  # regular expression of a key: the layer's number, if it has one, and the part
    ends: Mapping[str, str]  # name in `MtpModule` -> part, of all but the decoder layer
    layer: str = ""  # prefix of the decoder layer's own parts
    shared: tuple[str, ...] = ()  # parts that repeat the target's embedding and head
    offset: float = 0.0  # added to the weights of norms on reading

    def parts(self) -> dict[str, str]:
        """Return name in `MtpModule` -> part, of every weight."""
        layer = {f"block.{name}": self.layer + name for name in (*LAYER, *QK_NORMS)}
        return {f"{k}.weight": f"{part}.weight" for k, part in {**self.ends, **layer}.items()}


DEEPSEEK = ModuleLayout(
    prefix="model.layers.{}.",
    pattern=r"model\.layers\.(\d+)\.(.+)",
    ends={"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
    shared=("embed_tokens.weight", "shared_head.head.weight"),
)
QWEN3_NEXT = ModuleLayout(
    prefix="mtp.",
    pattern=r"mtp\.()(.+)",
    ends={
        "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
        "norm": "norm",
    },
    layer="layers.0.",
    offset=1.0,
)  # fmt: skip
SPECULATORS = ModuleLayout(
    prefix="mtp_layers.0.",
    pattern=r"mtp_layers\.(0)\.(.+)",
    ends={
        "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
        "norm": "final_layernorm",
    },
)  # fmt: skip


class ModuleKeys(NamedTuple):
    """The keys of modules in a target's folder: key -> (number of its module, name in it)."""

    folder: WeightFolder
    layout: ModuleLayout
    keys: dict[str, tuple[int, str]]

    @property
    def qk_norm(self) -> bool:
        return any(name == f"block.{QK_NORMS[0]}.weight" for _, name in self.keys.values())


def find_modules(folder: Path, layers: int) -> ModuleKeys:
    """Find the modules in a target's folder by the names of its tensors.

    Args:
        layers: number of the target's decoder layers; DeepSeek's modules are numbered after them.

    Raises:
        RunError: there are none, or they cannot be read whole.
    """
    opened = WeightFolder(folder, FIX)
    with damaged_means_error(folder, FIX):
        _refuse_partial_rotary(opened)
        for layout in (DEEPSEEK, QWEN3_NEXT):
            if keys := dict(_keys(opened.shapes, layout, layers)):
                break
        else:
            raise RunError(f"{folder} holds no MTP modules after {layers} decoder layers.", FIX)
        found = ModuleKeys(opened, layout, keys)
        modules = defaultdict[int, set[str]](set)
        for number, name in keys.values():
            modules[number].add(name)
        _refuse_gaps(folder, modules, layout, found.qk_norm)
        return found


def read_modules(folder: Path, layers: int) -> list[dict[str, Tensor]]:
    """Return state dicts of `MtpModule` in order, of the modules that `find_modules` finds."""
    found = find_modules(folder, layers)
    opened, layout, keys = found
    with damaged_means_error(folder, FIX):
        modules = defaultdict[int, dict[str, Tensor]](dict)
        for key, value in opened.tensors(keys).items():
            number, name = keys[key]
            if value.ndim == 1 and layout.offset:
                value = value.float() + layout.offset  # 1 + w in bfloat16 would lose a small w
            modules[number][name] = value
        return [modules[number] for number in sorted(modules)]


def _keys(
    files: Iterable[str], layout: ModuleLayout, layers: int
) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield (key, (number of its module, name in `MtpModule`)) for every weight."""
    names = {part: name for name, part in layout.parts().items()}
    for key in sorted(files):
        match = re.fullmatch(layout.pattern, key)
        number = int(match[1] or layers) - layers if match else -1
        if match is None or number < 0 or match[2] in layout.shared:
            continue
        if match[2] not in names:
            why = "only attention without bias and a gated MLP are supported."
            raise RunError(f"{key} cannot be read: {why}", FIX)
        yield key, (number, names[match[2]])


def _refuse_gaps(
    folder: Path, modules: Mapping[int, Collection[str]], layout: ModuleLayout, qk_norm: bool
) -> None:
    if sorted(modules) != list(range(len(modules))):
        raise RunError(f"{folder} holds MTP modules {sorted(modules)}, with gaps.", FIX)
    optional = {f"block.{name}.weight" for name in QK_NORMS if not qk_norm}
    for number, module in modules.items():
        for name, part in layout.parts().items():
            if name not in module and name not in optional:
                raise RunError(f"{folder}: MTP module {number + 1} lacks {part}.", FIX)


def _refuse_partial_rotary(folder: WeightFolder) -> None:
    """Refuse partial rotary embeddings: the same weights would compute something else."""
    config: dict[str, Any] = folder.config.get("text_config") or folder.config
    rope = config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise folder.error(f"its rotary embedding is partial ({factor}).", FIX)
