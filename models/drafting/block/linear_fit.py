"""First weights of block drafters: a linear fit of the target's states.

The linear fit (`init=linear`) needs no step of training. Every head of a layer reads one row, a
fixed number of positions (its lag) before the slot, and adds a linear function of it to the slot:

    unshifted, heads with lags 1, 2, 3, ..; a is the anchor, c_t the context state of row t = a - 1

    slot   lag 1   lag 2   lag 3   lag 4
    1      x_a     c_t     c_t-1   c_t-2        its state approximates the target's at row t + 1
    2      MASK    x_a     c_t     c_t-1        at row t + 2
    3      MASK    MASK    x_a     c_t          at row t + 3

Context states are the directions of the taps that predict the target's next states best, placed
where embeddings of tokens are smallest, so that one value projection reads both. The output
projection of a layer is the ridge regression of what the layers before leave of the states. MLPs
start at zero, and so does what the head of a subclass adds.

Legend: K depths, N anchors, S slots, R rows of the context or of all slots, H hidden size, T*H
concatenated taps, F outputs of all heads, Q slots that are drafted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.drafting import closed_form_init
from outrider.models.drafting.block.attention import BlockPlan
from outrider.models.drafting.layers import DecoderLayer
from outrider.models.interface import Trace
from outrider.models.target.target import Target

if TYPE_CHECKING:
    from outrider.models.drafting.block.backbone import BlockDrafter

PEAK_SCORE = 40.0  # attention score of the row at a head's lag
MIN_ROTATION = 0.2  # radians per row: faster rotary pairs distinguish neighbours
ANCHORS = 4096  # whose slots fit the output projections, at most


@dataclass
class _Slots:
    """The blocks behind the anchors of a batch, on their way through the layers.

    Attributes:
        states: residual stream of the slots.
        teacher: the target's states at the drafted slots, divided by their deviations.
    """

    context: Float[Tensor, "R H"]
    context_positions: Int[Tensor, " R"]
    states: Float[Tensor, "NS H"]
    positions: Int[Tensor, " NS"]
    plans: list[BlockPlan]
    teacher: Float[Tensor, "N K H"]


def fit(drafter: "BlockDrafter", target: Target, traces: Iterable[Trace]) -> str:
    """Install the linear fit, and return a description.

    Args:
        traces: at least one; read until there are enough rows.
    """
    traces = iter(traces)
    first = next(traces)
    moments, samples, anchors = closed_form_init.RegressionMoments(), list[Trace](), 0
    for trace in chain([first], traces):
        rows = _full_rows(drafter, trace)
        if not len(rows):
            continue
        if anchors < ANCHORS:
            samples.append(trace)
            anchors += len(rows)
        ahead = torch.stack(_states_ahead(drafter, trace, rows)).mean(0)
        moments.add(drafter.scaled_taps(trace)[rows].float(), ahead)
        if moments.count >= closed_form_init.ROWS_PER_FEATURE * len(moments.xx):
            break
    if not samples:
        return "random weights, taps scaled to unit size: no answer as long as a block to fit to"
    directions = _fit_context(drafter, moments, samples[0])
    deviation = _deviation(drafter, samples)
    blocks = [_blocks_of(drafter, trace, deviation) for trace in samples]
    for i, layer in enumerate(drafter.decoder_layers):
        _fit_layer(drafter, layer, i, directions, blocks)
    drafter.norm.weight.copy_(deviation)
    _fit_logit_scale(drafter, target, samples[0], blocks[0])
    return f"linear fit to {moments.count:,} states of {target.name}"


def _full_rows(drafter: "BlockDrafter", trace: Trace) -> Int[Tensor, " N"]:
    """Return the rows that are supervised at every depth."""
    depths = range(1, drafter.cfg.depths + 1)
    mask = torch.stack([trace.supervised_mask(depth) for depth in depths]).all(0)
    return torch.nonzero(mask.flatten()).flatten()


def _states_ahead(
    drafter: "BlockDrafter", trace: Trace, rows: Int[Tensor, " N"]
) -> list[Float[Tensor, "N H"]]:
    last = trace.last.flatten(0, 1)
    return [last[rows + depth].float() for depth in range(1, drafter.cfg.depths + 1)]


def _fit_context(
    drafter: "BlockDrafter", moments: closed_form_init.RegressionMoments, trace: Trace
) -> Float[Tensor, "H H"]:
    """Set `fc` to the best predictors of the states ahead, and return the directions they take.

    Returns:
        Orthonormal rows: those of the context states first, by how much they predict; those in
        which embeddings are largest last.
    """
    weight = moments.ridge()
    size, predictors = torch.linalg.eigh((weight @ moments.covariance @ weight.mT).double())
    embedded = drafter.decoder_layers[0].input_layernorm(drafter.target.embed(trace.ids.flatten()))
    _, directions = torch.linalg.eigh((embedded.mT @ embedded).double())
    count = _values(drafter) * len(drafter.decoder_layers) * drafter.shape.kv_heads
    best = predictors[:, -count:].flip(1) / size[-count:].flip(0).clamp(min=1e-9).sqrt()
    drafter.fc.weight.copy_(directions[:, :count] @ best.mT @ weight.double())
    rows: Tensor = directions.mT.float()
    return rows


def _values(drafter: "BlockDrafter") -> int:
    """Count the directions of the context that a key head reads: each of every layer other ones."""
    shape, layers = drafter.shape, len(drafter.decoder_layers)
    return min(shape.head_dim // 2, max(1, shape.hidden // 2 // (layers * shape.kv_heads)))


def _deviation(drafter: "BlockDrafter", samples: list[Trace]) -> Float[Tensor, " H"]:
    """Return the standard deviation of the states that are predicted."""
    states = [
        torch.cat(_states_ahead(drafter, trace, _full_rows(drafter, trace))) for trace in samples
    ]
    return torch.cat(states).std(0).clamp(min=1e-6)


def _blocks_of(drafter: "BlockDrafter", trace: Trace, deviation: Float[Tensor, " H"]) -> _Slots:
    anchors = _full_rows(drafter, trace)
    plans, positions = drafter.plan(trace, anchors)
    states = drafter.embed_block(trace.next_ids.flatten()[anchors]).flatten(0, 1)
    teacher = torch.stack(_states_ahead(drafter, trace, anchors), dim=1) / deviation
    context = drafter.context(trace), trace.positions.flatten()
    return _Slots(*context, states, positions, plans, teacher)


def _fit_layer(
    drafter: "BlockDrafter",
    layer: DecoderLayer,
    index: int,
    directions: Float[Tensor, "H H"],
    blocks: list[_Slots],
) -> None:
    """Set a layer's heads, fit its output projection, and advance the blocks through it."""
    slots = torch.cat([layer.input_layernorm(block.states) for block in blocks])
    contexts = torch.cat([block.context for block in blocks])
    _read_lags(drafter, layer, slots, contexts)
    _read_directions(drafter, layer, index, directions)
    layer.mlp.down_proj.weight.zero_()
    moments = closed_form_init.RegressionMoments()
    attended = [
        drafter.attend(layer, *_inputs(layer, index, block)).flatten(-2) for block in blocks
    ]
    size = drafter.cfg.block_size
    for block, x in zip(blocks, attended, strict=True):
        x, states = (drafter.drafted(part.unflatten(0, (-1, size))) for part in (x, block.states))
        moments.add(x.flatten(0, 1).float(), (block.teacher - states).flatten(0, 1).float())
    layer.self_attn.o_proj.weight.copy_(moments.ridge() * moments.output_std[:, None])
    for block, x in zip(blocks, attended, strict=True):
        block.states = block.states + layer.self_attn.o_proj(x)


def _inputs(
    layer: DecoderLayer, index: int, block: _Slots
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], BlockPlan]:
    pair = layer.self_attn.key_value(block.context, block.context_positions)
    return block.states, block.positions, pair, block.plans[index]


def _read_lags(
    drafter: "BlockDrafter",
    layer: DecoderLayer,
    slots: Float[Tensor, "NS H"],
    contexts: Float[Tensor, "R H"],
) -> None:
    """Set queries and keys so that head h reads the row at its lag.

    All keys are equal but for their rotation, and the query of a head is rotated by its lag.
    """
    attn, size = layer.self_attn, layer.self_attn.head_dim
    half = size // 2
    angles = attn.theta ** -(torch.arange(half) / half)
    fast = max(1, int((angles >= MIN_ROTATION).sum()))
    key = torch.zeros(size)
    key[:fast] = 1.0
    both = torch.cat([slots, contexts]).float()
    query_one, key_one = (closed_form_init.bias_direction(x) for x in (slots.float(), both))
    attn.k_proj.weight.copy_(torch.outer(key, key_one.cpu()).repeat(drafter.shape.kv_heads, 1))
    for head in range(attn.heads):
        lag = head + (0 if drafter.cfg.shifted else 1)
        query = torch.cat([(lag * angles).cos(), -(lag * angles).sin()])
        query[fast:half] = query[half + fast :] = 0.0
        rows = slice(head * size, (head + 1) * size)
        attn.q_proj.weight[rows] = torch.outer(query, query_one.cpu()).to(attn.q_proj.weight)
    for norm in (attn.q_norm, attn.k_norm):
        norm.get_parameter("weight").fill_((PEAK_SCORE / size**0.5) ** 0.5)


def _read_directions(
    drafter: "BlockDrafter", layer: DecoderLayer, index: int, directions: Float[Tensor, "H H"]
) -> None:
    """Let values read the context's directions of this layer, and as many of the tokens'.

    The other numbers of a value stay random projections.
    """
    shape, count = drafter.shape, _values(drafter)
    values = layer.self_attn.v_proj.weight.unflatten(0, (-1, shape.head_dim))
    for head in range(shape.kv_heads):
        start = (index * shape.kv_heads + head) * count
        values[head, :count] = directions[start : start + count]
        values[head, count : 2 * count] = directions.flip(0)[start : start + count]


def _fit_logit_scale(drafter: "BlockDrafter", target: Target, trace: Trace, block: _Slots) -> None:
    """Scale the final norm so that the logits have the best temperature."""
    rows = _full_rows(drafter, trace)[: closed_form_init.SCALE_FIT_ROWS // drafter.cfg.depths + 1]
    ahead = torch.stack(_states_ahead(drafter, trace, rows), dim=1).flatten(0, 1)
    teacher = target.logits(ahead.to(trace.last.dtype))
    slots = drafter.drafted(block.states.unflatten(0, (-1, drafter.cfg.block_size)))
    ids = drafter.vocab.target_ids.to(teacher.device)
    scale = closed_form_init.optimal_logit_scale(
        drafter.slot_logits(slots[: len(rows)].flatten(0, 1)).float(),
        teacher[:, ids].float().softmax(-1),
    )
    drafter.norm.weight.mul_(scale)
