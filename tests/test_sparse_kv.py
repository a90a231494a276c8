"""The view of a cache against masked attention over all rows, and selections against literal ones.

The slow reference of a draft is the same forward over the whole cache, whose rows outside the view
are masked, per key head with SnapKV: `masked_logits`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.models import small_matmul
from outrider.models.cache import budget_view
from outrider.models.cache.budget_view import BudgetView
from outrider.models.cache.kv_cache import KVCache
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Request
from outrider.models.drafters.sparse_kv import SparseKV
from outrider.models.target.target import Target
from tests import tiny
from tests.families import small_model
from tests.test_target_drafting import build, each_path, state_after, target_of

STREAMING: dict[str, Any] = {"budget": 9, "sinks": 3}
SNAPKV: dict[str, Any] = {"method": "snapkv", "budget": 9, "window": 4, "pool": 3}
METHODS = {"streaming": STREAMING, "snapkv": SNAPKV}
each_method = pytest.mark.parametrize("method", METHODS)
PROMPT = [(7 * i * i + 3 * i) % 57 + 3 for i in range(24)]
CHAIN = [30, 4, 9, 12]


def drafter_of(method: str, target: Target, **changes: Any) -> SparseKV:
    drafter = build("sparse_kv", target, {**METHODS[method], **changes})
    assert isinstance(drafter, SparseKV)
    return drafter


@torch.inference_mode()
def drafted_logits(drafter: SparseKV, state: Any, chain: list[int]) -> Tensor:
    """Return the logits after each token of a chain."""
    rows = []
    for depth, token in enumerate(chain, start=1):
        one, parent = torch.tensor([token]), torch.zeros(1, dtype=torch.long)
        logits, state = drafter.step(state, depth, one, parent)
        rows.append(logits[0])
    return torch.stack(rows)


class MaskedRows(KVCache):
    """A cache whose values do not count where `visible` of a layer is False: [A, rows]."""

    visible: dict[int, Tensor]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, mask: Tensor, scale: float
    ) -> Tensor:
        """Attention written out, with a mask per key head."""
        keys, values = self.update(key, value, layer)
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        logits = query @ keys.mT * scale + mask
        hidden = ~self.visible[layer].repeat_interleave(groups, dim=0)
        logits[..., : hidden.shape[1]].masked_fill_(hidden[None, :, None], float("-inf"))
        return logits.softmax(-1) @ values


@torch.inference_mode()
def masked_logits(target: Target, visible: dict[int, Tensor], chain: list[int]) -> Tensor:
    """Return the logits of a chain after PROMPT, over a whole cache with masked rows."""
    length = len(PROMPT)
    cache = MaskedRows(1, 64, target.num_layers, target.device)
    everything = torch.ones(2, 1, dtype=torch.bool)
    cache.visible = dict.fromkeys(visible, everything[:, :0])
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    at = torch.arange(length + len(chain))[None]
    target.forward(torch.tensor([PROMPT]), at[:, :length], causal, cache)
    cache.visible = visible
    rows = []
    for i, token in enumerate(chain, start=length):
        all_columns = torch.ones(1, 1, i + 1, dtype=torch.bool)
        last = target.forward(torch.tensor([[token]]), at[:, i : i + 1], all_columns, cache).last
        rows.append(target.logits(last)[0, 0])
    return torch.stack(rows)


@torch.inference_mode()
def literal_selection(target: Target, window: int, count: int, pool: int) -> list[Tensor]:
    """Select rows [A, K] from the attention probabilities of one forward, with loops."""
    target.model.set_attn_implementation("eager")
    out = target.model(torch.tensor([PROMPT]), output_attentions=True).attentions
    chosen, before, radius = [], len(PROMPT) - window, pool // 2
    for probs in out:  # [1, heads, P, P]
        of_heads = list[Tensor]()
        groups = probs.shape[1] // target.shape().kv_heads
        for first in range(0, probs.shape[1], groups):
            scores = [0.0] * before
            for head in range(first, first + groups):
                summed = [float(probs[0, head, before:, c].sum()) for c in range(before)]
                for c in range(before):
                    near = summed[max(0, c - radius) : c + radius + 1]
                    scores[c] += sum(near) / pool
            best = sorted(range(before), key=lambda c: -scores[c])[:count]
            of_heads.append(torch.tensor(sorted(best)))
        chosen.append(torch.stack(of_heads))
    return chosen


# ---- the view ----


def test_streaming_equals_masked_attention_over_the_whole_cache() -> None:
    """Of 24 rows a draft token reads 0..2 and 18..23, and the draft before it."""
    target = tiny.target()
    drafter = drafter_of("streaming", target)
    rows = torch.arange(len(PROMPT))
    mask = ((rows < 3) | (rows >= 18)).expand(2, -1)
    visible = dict.fromkeys(range(target.num_layers), mask)
    expected = masked_logits(target, visible, CHAIN)
    found = drafted_logits(drafter, state_after(target, drafter, PROMPT), CHAIN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    visible = dict.fromkeys(range(target.num_layers), (rows >= 0).expand(2, -1))
    assert (found - masked_logits(target, visible, CHAIN)).abs().max() > 0.01  # the control


def test_snapkv_equals_masked_attention_over_the_whole_cache() -> None:
    target = tiny.target()
    drafter = drafter_of("snapkv", target)
    found = drafted_logits(drafter, state_after(target, drafter, PROMPT), CHAIN)
    visible = dict[int, Tensor]()
    for layer, chosen in enumerate(literal_selection(tiny.target(), 4, 5, 3)):
        mask = torch.zeros(2, len(PROMPT), dtype=torch.bool).scatter_(1, chosen, True)
        mask[:, -4:] = True
        visible[layer] = mask
    expected = masked_logits(target, visible, CHAIN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    swapped = {layer: mask.flip(0) for layer, mask in visible.items()}  # the other key head's rows
    assert (found - masked_logits(target, swapped, CHAIN)).abs().max() > 1e-3


@each_method
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_modules_and_the_fast_forward_draft_alike(method: str, family: str) -> None:
    logits = []
    for modules in (False, True):
        target = target_of(family, modules)
        drafter = drafter_of(method, target)
        logits.append(drafted_logits(drafter, state_after(target, drafter, PROMPT), CHAIN))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


@each_method
@each_path
def test_a_budget_of_the_whole_context_gives_the_logits_of_the_target(
    method: str, family: str, modules: bool
) -> None:
    target = target_of(family, modules)
    drafter = drafter_of(method, target, budget=len(PROMPT))
    found = drafted_logits(drafter, state_after(target, drafter, PROMPT), [30])
    length = len(PROMPT) + 1
    visible = torch.ones(1, length, length, dtype=torch.bool).tril()
    ids = torch.tensor([[*PROMPT, 30]])
    with torch.inference_mode():
        out = target.forward(ids, torch.arange(length)[None], visible)
        expected = target.logits(out.last[0, -1:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@each_method
def test_a_draft_step_reads_as_many_rows_at_every_context(method: str) -> None:
    target = tiny.target()
    reads = []
    for length in (40, 64, 100):
        drafter = drafter_of(method, target)
        drafted_logits(
            drafter, state_after(target, drafter, [3, 4, 5, 6, 7] * (length // 5)), CHAIN
        )
        reads.append(drafter.reads)
    assert reads == [9 + len(CHAIN)] * 3  # the budget and the draft


@each_method
def test_prompts_of_any_lengths_read_no_more_rows_than_the_longest_tail(method: str) -> None:
    """Lengths far apart have slices of their own, lengths close together share one."""
    target = tiny.target()
    seen = list[int]()

    class Counted(Engine):
        def _draft(self, active: Any, times: Any) -> Any:
            out = super()._draft(active, times)
            seen.append(drafter.reads)
            return out

    drafter = drafter_of(method, target)
    requests = [Request(PROMPT[:n] * 4, 6) for n in (3, 24)]
    plain = [out.ids for out in Engine(target, None, None).generate_all(requests, 1)]
    drafted = Counted(target, drafter, Chain(3)).generate_all(requests, 2)
    assert [out.ids for out in drafted] == plain
    assert max(seen) <= 9 + 6 + 12  # budget, draft and the text since; the contexts are 12 and 96


@each_method
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("lengths", [(24, 22, 20), (96, 12, 7)], ids=["one slice", "own slices"])
def test_a_draft_does_not_depend_on_the_batch(
    method: str, family: str, lengths: tuple[int, ...]
) -> None:
    """The same logits for prompts together as for each alone; 7 rows are within a budget."""
    target = Target(small_model(family))
    drafter = drafter_of(method, target)
    prompts = [(PROMPT * 4)[:length] for length in lengths]
    alone = [
        drafted_logits(drafter, state_after(target, drafter, prompt), CHAIN) for prompt in prompts
    ]
    captured = list[Any]()

    class Captured(Engine):
        def _draft(self, active: Any, times: Any) -> Any:
            captured.extend(one.state for one in active)
            return super()._draft(active, times)

    requests = [Request(prompt, 3) for prompt in prompts]
    events = Captured(target, drafter, Chain(1)).run(requests, 3)
    [*zip(range(4), events, strict=False)]  # a round of all three
    states, slices = captured[:3], set[bool]()
    whole = BudgetView.__init__

    def record(self: Any, *args: Any) -> None:
        whole(self, *args)
        slices.add(self._one_slice)

    cache = states[0].cache
    cache.lengths = list(lengths)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(BudgetView, "__init__", record)
        together = []
        for depth, token in enumerate(CHAIN, start=1):
            ids, parents = torch.full((3, 1), token), torch.zeros(3, 1, dtype=torch.long)
            logits, states = drafter.step_batch(states, depth, ids, parents)
            together.append(logits[:, 0])
    assert slices == {lengths == (24, 22, 20)}
    for one, expected in zip(torch.stack(together, dim=1), alone, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)


# ---- what is shared ----


@each_method
@pytest.mark.parametrize("budget", [len(PROMPT), 9])
def test_a_view_reads_the_rows_of_the_cache_in_place(method: str, budget: int) -> None:
    """Of what is attended to, only selected rows are outside of the cache's memory."""
    target = tiny.target()
    drafter = drafter_of(method, target, budget=budget)
    state = state_after(target, drafter, PROMPT)
    cached = memory_of(state.cache.rows(0))
    attended = list[set[int]]()

    def whole(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        attended.append(memory_of((keys, values)))
        return small_matmul.gqa_attention(q, keys, values, *rest)

    def split(q: Tensor, parts: Any, *rest: Any) -> Tensor:
        attended.append(memory_of([rows for part in parts for rows in part]))
        return small_matmul.split_attention(q, parts, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget_view, "gqa_attention", whole)
        patch.setattr(budget_view, "split_attention", split)
        drafted_logits(drafter, state, [30])
    assert len(attended) == target.num_layers
    selected = 2 * (method == "snapkv" and budget < len(PROMPT))  # keys and values
    assert all(cached <= memory and len(memory - cached) == selected for memory in attended)


def memory_of(rows: Any) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in rows}


def test_a_state_holds_copies_of_selected_rows_only() -> None:
    target = tiny.target()
    drafter = drafter_of("snapkv", target)
    state = state_after(target, drafter, PROMPT)
    selection = drafter.with_selection(0, state).selection
    assert selection is not None
    stored = [part.untyped_storage().nbytes() for rows in selection.rows for part in rows]
    size = target.shape().head_dim
    assert stored == [2 * 5 * size * 4] * (
        2 * target.num_layers
    )  # A K C floats; 5 = budget - window
    whole = drafter_of("snapkv", target, budget=len(PROMPT)).with_selection(0, state).selection
    assert whole is not None
    assert whole.rows == ()


@each_method
@each_path
def test_drafting_leaves_committed_rows_bitwise(method: str, family: str, modules: bool) -> None:
    target = target_of(family, modules)
    drafter = drafter_of(method, target)
    state = state_after(target, drafter, PROMPT)
    before = [[part.clone() for part in state.cache.rows(i)] for i in range(target.num_layers)]
    drafted_logits(drafter, state, CHAIN)
    for layer, rows in enumerate(before):
        assert all(map(torch.equal, rows, state.cache.rows(layer)))
    assert state.cache.lengths == [len(PROMPT)]


# ---- settings ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 5, "sinks": 5}, "budget = 5: of 5 rows, 5 sinks leave none"),
        ({"budget": 4, "sinks": 9}, "budget = 4: of 4 rows, 9 sinks leave none"),
        ({"method": "snapkv", "budget": 9, "window": 9}, "budget = 9: of 9 rows, a window of 9"),
        ({"method": "h2o"}, "method = h2o: use streaming or snapkv"),
        ({"pool": 4}, "pool = 4"),
        ({"budget": 0}, "drafter.budget"),
    ],
)
def test_settings_that_leave_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.config("sparse_kv", draft_vocab_size=None, **changes)


def test_a_window_wider_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="context is 128 tokens") as error:
        drafter_of("snapkv", tiny.target(), window=129, budget=200)
    assert error.value.key == "drafter.window"
