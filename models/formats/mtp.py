"""MTP modules inside a target's checkpoint folder: reads them, so that training can begin there.

Two layouts, told apart by their keys; n is the target's number of decoder layers:

    DeepSeek-V3    model.layers.{n+k-1}.{enorm,hnorm,eh_proj,shared_head.norm} beside the layer's
                   own keys; copies of the shared embedding and head may lie there and are left
    Qwen3-Next     mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm}, mtp.layers.0.*; a norm
                   multiplies by 1 + weight there, so 1 is added on reading

Both join [embedding; state]. A module is ordinary attention without bias and a gated MLP; whatever
else its keys name (latent attention, experts, biases, scales of quantised weights) is an error:
a module read in part would be another one. Modules are never written here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.train.errors import RunError
from outrider.train.files import read_json

FIX = "Use drafter.init=linear with drafter.warm_start=null: a start that needs no such weights."
LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class Layout(NamedTuple):
    """How a family names a module.

    Attributes:
        pattern: of a key: the number of a layer, if it has one, and the part inside the module.
        ends: part -> name in `chain.Stage`, of all but the decoder layer.
        layer: what stands before the decoder layer's own names.
        shared: parts that repeat what the target has anyway.
        offset: what is added to the weights of norms.
    """

    pattern: str
    ends: Mapping[str, str]
    layer: str = ""
    shared: tuple[str, ...] = ()
    offset: float = 0.0

    def names(self) -> dict[str, str]:
        """Part -> name of every weight that can be read."""
        layer = {self.layer + name: f"block.{name}" for name in (*LAYER, *QK_NORMS)}
        parts = {**self.ends, **layer}
        return {f"{part}.weight": f"{name}.weight" for part, name in parts.items()}


DEEPSEEK = Layout(
    pattern=r"model\.layers\.(\d+)\.(.+)",
    ends={"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
    shared=("embed_tokens.weight", "shared_head.head.weight"),
)
QWEN3_NEXT = Layout(
    pattern=r"mtp\.()(.+)",
    ends={
        "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
        "norm": "norm",
    },
    layer="layers.0.",
    offset=1.0,
)  # fmt: skip


class Found(NamedTuple):
    """Modules in order, as state dicts of `chain.Stage`, and the settings that they imply."""

    modules: list[dict[str, Tensor]]
    order: str
    qk_norm: bool


def read(folder: Path, layers: int) -> Found:
    """
    Args:
        layers: decoder layers of the target itself; DeepSeek's modules are numbered behind them.

    Raises:
        RunError: there are no modules, or one holds what cannot be read here or lacks something.
    """
    files = _files(folder)
    _refuse_partial_rotary(folder)
    for layout in (DEEPSEEK, QWEN3_NEXT):
        if keys := dict(_keys(files, layout, layers)):
            break
    else:
        raise RunError(f"{folder} holds no MTP modules behind {layers} decoder layers.", FIX)
    modules: dict[int, dict[str, Tensor]] = {}
    for key, value in _tensors(folder, {key: files[key] for key in keys}).items():
        number, name = keys[key]
        if value.ndim == 1 and layout.offset:
            value = value.float() + layout.offset  # 1 + w in bfloat16 would lose a small w
        modules.setdefault(number, {})[name] = value
    qk_norm = any(f"block.{QK_NORMS[0]}.weight" in module for module in modules.values())
    _refuse_gaps(folder, modules, layout, qk_norm)
    return Found([modules[number] for number in sorted(modules)], "embedding_first", qk_norm)


def _keys(
    files: Mapping[str, str], layout: Layout, layers: int
) -> Iterator[tuple[str, tuple[int, str]]]:
    """Of every weight of the modules: key, number of its module, name in `chain.Stage`."""
    names = layout.names()
    for key in sorted(files):
        match = re.fullmatch(layout.pattern, key)
        number = int(match[1] or layers) - layers if match else -1
        if match is None or number < 0 or match[2] in layout.shared:
            continue
        if match[2] not in names:
            why = "an MTP module is read as plain attention and a gated MLP, and this is neither."
            raise RunError(f"{key} cannot be read: {why}", FIX)
        yield key, (number, names[match[2]])


def _refuse_gaps(
    folder: Path, modules: Mapping[int, Mapping[str, Tensor]], layout: Layout, qk_norm: bool
) -> None:
    if sorted(modules) != list(range(len(modules))):
        raise RunError(f"{folder} holds MTP modules {sorted(modules)}, with gaps between.", FIX)
    optional = {f"block.{name}.weight" for name in QK_NORMS if not qk_norm}
    for number, module in modules.items():
        for part, name in layout.names().items():
            if name not in module and name not in optional:
                raise RunError(f"{folder}: MTP module {number + 1} lacks {part}.", FIX)


def _refuse_partial_rotary(folder: Path) -> None:
    """Heads that are turned only in part: the weights would be read, and mean something else."""
    config: dict[str, Any] = read_json(folder / "config.json", FIX)
    config = config.get("text_config") or config
    rope = config.get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise RunError(f"{folder}: its heads have rotary positions in part ({factor}) only.", FIX)


# ---- files ----


def _files(folder: Path) -> dict[str, str]:
    """Key -> name of the safetensors file that holds it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        files = read_json(index, FIX).get("weight_map")
        if isinstance(files, dict) and all(Path(str(name)).name == name for name in files.values()):
            return files
        raise RunError(f"{index} does not say which file beside it holds which weight.", FIX)
    if not single.exists():
        why = "neither model.safetensors nor its index"
        raise RunError(f"{folder} holds {why}, so no MTP modules can be read.", FIX)
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{single} is damaged: {error}", FIX) from None


def _tensors(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        try:
            with safe_open(folder / name, framework="pt") as file:
                out.update({k: file.get_tensor(k) for k, at in files.items() if at == name})
        except (OSError, SafetensorError) as error:
            raise RunError(f"{folder / name} cannot be read: {error}", FIX) from None
    return out
