"""Targets with recurrent layers: packed rows, states of a cache, and rows that are dropped.

tests/test_hybrid_decoding.py decodes with them.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf

from outrider.conf.errors import ConfigError, RunError
from outrider.launch.bench.tiny_families import SMALL
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.recurrent_states import Call, RecurrentStates
from outrider.models.target import recurrent, target_check
from outrider.models.target.target import Target
from tests.families import FAMILIES, HYBRIDS, small_model

PREFIX, COUNT = 19, 5  # longer than windows and chunks of the kernels
BY_ROWS = {"zamba", "jamba", "mamba", "falcon_mamba"}  # Mamba-1
assert_close = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)


@pytest.fixture(params=HYBRIDS, scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    return Target(small_model(request.param), taps=(0, 2), name=request.param)


def causal(count: int, past: int = 0) -> torch.Tensor:
    return torch.ones(1, count, past + count, dtype=torch.bool).tril(past)


def text(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 61, (count,), generator=generator).tolist()


@torch.no_grad()
def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """The model's own logits of one sequence, without cache and mask."""
    out: torch.Tensor = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return out[0]


@torch.no_grad()
def append(target: Target, cache: KVCache, *texts: list[int]) -> torch.Tensor:
    """Logits of texts of one length that continue the selected slots."""
    starts, count = cache.active_lengths, len(texts[0])
    positions = torch.stack([torch.arange(count) + start for start in starts])
    visible = torch.arange(max(starts) + count) <= positions[..., None]
    return target.logits(target.forward(torch.tensor(texts), positions, visible, cache).last)


def filled(target: Target, prompt: list[int], slots: int = 1) -> KVCache:
    cache = target.new_cache(64, slots)
    assert isinstance(cache, KVCache)
    cache.undo_rows = COUNT
    append(target, cache, *[prompt] * slots)
    return cache


# ---- reading -------------------------------------------------------------------------------------


def test_target_agrees_with_the_model(target: Target) -> None:
    target_check.check_target(target)


def test_features_of_a_packed_row_are_those_of_its_documents_alone(target: Target) -> None:
    lengths, rows = (9, 14), ((0, 9, 12), (14, 9))
    documents = [[(n, size) for n, size in enumerate(row) if size] for row in rows]
    ids = torch.tensor([text(26), text(26, 2)])
    number, positions = torch.full((2, 26), -1), torch.zeros(2, 26, dtype=torch.long)
    spans = []
    for row, parts in enumerate(documents):
        start = 0
        for n, size in parts:
            number[row, start : start + size] = n
            positions[row, start : start + size] = torch.arange(size)
            spans.append((row, start, size))
            start += size
    assert set(lengths) <= {size for _, _, size in spans}, "two documents have one length"
    trace = target.trace(ids, number >= 0, number, positions)
    for row, start, size in spans:
        part = ids[row : row + 1, start : start + size]
        alone = target.forward(part, torch.arange(size)[None], causal(size))
        for ours, theirs in ((trace.last, alone.last), (trace.taps, alone.taps)):
            own = ours[row, start : start + size]
            torch.testing.assert_close(own, theirs[0], atol=1e-5, rtol=1e-5)


def test_rows_that_share_a_state_are_detected(target: Target) -> None:
    """Negative control: a document mask alone lets a state pass from one document to the next."""
    ids = torch.tensor([text(20)])
    number = torch.tensor([[0] * 12 + [1] * 8])
    positions = torch.tensor([[*range(12), *range(8)]])
    alone = target.read_packed(ids, positions, number).last
    mixed = target._read_rows(ids, positions, number, False).last
    assert (alone - mixed)[:, 12:].abs().max() > 1e-3


def test_taps_are_outputs_of_their_layers(target: Target) -> None:
    ids = torch.tensor([text(PREFIX)])
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    first = int(target._attends)  # Mamba's do not begin with the embedded tokens
    seen = target.forward(ids, torch.arange(PREFIX)[None], causal(PREFIX))
    tapped = torch.cat([states[first], states[first + 2]], -1)
    assert_close(seen.taps, tapped)


def test_gradients_pass_through_a_packed_row() -> None:
    target = Target(small_model("bamba"), name="bamba")
    target.layers.requires_grad_(True)
    ids, number = torch.tensor([text(12)]), torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    target.read_packed(ids, positions, number, grad=True).last.sum().backward()
    assert all(p.grad is not None for p in target.recurrent[0].parameters())


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ([[0, 0, 1, 1], [2, 2, 2, -1]], [[[0, 1], [2, 3]], [[4, 5, 6]]]),
        ([[-1, -1, 5, 5]], [[[2, 3]]]),
        ([[-1, -1]], []),
        ([[3]], [[[0]]]),
    ],
)
def test_documents_are_grouped_by_length(document: list[list[int]], found: list[Any]) -> None:
    groups = recurrent.documents_by_length(torch.tensor(document))
    assert [group.tolist() for group in groups] == found


# ---- states --------------------------------------------------------------------------------------


def test_a_cache_continues_a_text_in_pieces_of_any_size(target: Target) -> None:
    if target.name == "mamba":  # rounding of its scan in float32 reaches 6e-4 on some processors
        target = Target(copy.deepcopy(target.model).double(), name=target.name)
    ids, cache = text(44), target.new_cache(64)
    assert isinstance(cache, KVCache)
    whole, start = plain_logits(target, ids), 0
    for count in (PREFIX, 1, COUNT, 1, 1, 17):
        logits = append(target, cache, ids[start : start + count])[0]
        assert_close(logits, whole[start : start + count], check_dtype=False)
        start += count


def test_rows_that_read_several_only_from_an_empty_state_run_one_by_one(target: Target) -> None:
    cache = filled(target, text(PREFIX))
    append(target, cache, text(COUNT))
    assert set(target._by_rows.values()) == {target.name in BY_ROWS}


@pytest.mark.parametrize("kept", range(COUNT + 1))
def test_dropped_rows_leave_no_trace(target: Target, kept: int) -> None:
    ids = text(PREFIX + kept + 3)
    cache = filled(target, ids[:PREFIX])
    draft = ids[PREFIX : PREFIX + kept] + text(COUNT - kept, seed=9)
    append(target, cache, draft)
    cache.keep_rows([range(kept)])
    logits = append(target, cache, ids[-3:])[0]
    assert_close(logits, plain_logits(target, ids)[-3:])


def test_slots_keep_different_counts(target: Target) -> None:
    """Two of the four slots keep the same number of rows; slots are moved afterwards."""
    prompt, draft, kept = text(PREFIX), text(COUNT, 3), (0, 2, COUNT, 2)
    cache = filled(target, prompt, slots=4)
    append(target, cache, *[draft] * 4)
    cache.keep_rows([range(count) for count in kept])
    cache.move_slot(3, 0)
    cache.select_slots(0, 3)
    after = text(3, 5)
    logits = append(target, cache, after, after, after)
    for slot, count in enumerate((2, 2, COUNT)):
        alone = plain_logits(target, prompt + draft[:count] + after)[-3:]
        assert_close(logits[slot], alone)


def test_a_state_that_is_not_put_back_is_detected(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurrentStates, "keep", lambda *_: None)
    ids = text(PREFIX + 3)
    cache = filled(target, ids[:PREFIX])
    append(target, cache, text(COUNT, 9))
    cache.keep_rows([()])
    logits = append(target, cache, ids[-3:])[0]
    assert (logits - plain_logits(target, ids)[-3:]).abs().max() > 1e-2


def test_rows_may_be_dropped_twice() -> None:
    """As after an interrupted round: four of five rows are kept, then one."""
    target, ids = Target(small_model("qwen3_next")), text(PREFIX + 3)
    cache = filled(target, ids[:PREFIX])
    append(target, cache, [ids[PREFIX], *text(COUNT - 1, 9)])
    cache.keep_rows([range(4)])
    cache.crop(0, PREFIX + 1)
    logits = append(target, cache, ids[-2:])[0]
    assert_close(logits, plain_logits(target, ids)[-2:])


def test_an_emptied_slot_starts_anew(target: Target) -> None:
    cache, ids = filled(target, text(PREFIX)), text(12, 4)
    cache.crop(0, 0)
    assert_close(append(target, cache, ids)[0], plain_logits(target, ids))


@pytest.mark.parametrize(("count", "length"), [(COUNT + 1, PREFIX + 2), (2, PREFIX - 1)])
def test_rows_that_cannot_be_dropped_are_refused(count: int, length: int) -> None:
    """A longer forward than announced, and a row of an earlier forward."""
    cache = filled(target := Target(small_model("lfm2")), text(PREFIX))
    append(target, cache, text(count))
    with pytest.raises(ValueError, match=f"cannot go back to row {length}"):
        cache.crop(0, length)


def test_only_the_recurrent_modules_run_again(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where all rows are kept, or where the state after every row is known."""
    cache, ran, calls = filled(target, text(PREFIX)), list[torch.nn.Module](), list[Call]()
    inside = {inner for module in target.recurrent for inner in module.modules()}
    run = Call.run

    def counted(call: Call) -> Any:
        calls.append(call)
        return run(call)

    monkeypatch.setattr(Call, "run", counted)
    hooks = [m.register_forward_hook(lambda m, *_: ran.append(m)) for m in target.model.modules()]
    for kept in (COUNT, 2):
        append(target, cache, text(COUNT))
        ran.clear()
        calls.clear()
        cache.keep_rows([range(kept)])
        again = kept < COUNT and target.name not in BY_ROWS
        assert len(calls) == again * len(target.recurrent)
        assert {*ran} <= inside
    for hook in hooks:
        hook.remove()


def test_a_state_on_another_device_is_refused() -> None:
    states = RecurrentStates(1)
    states.write(("conv", 0, 0), torch.zeros(1, 4, 3))
    with pytest.raises(RunError, match="on cpu, and its layer on meta"):
        states.write(("conv", 0, 0), torch.zeros(1, 4, 3, device="meta"))


# ---- families ------------------------------------------------------------------------------------


def test_attention_families_have_no_recurrent_modules() -> None:
    for family in FAMILIES:
        model = small_model(family)
        assert recurrent.recurrent_modules(model) == []
        assert not recurrent.has_recurrent_layers(model.config)


def test_the_configuration_tells_that_a_family_is_recurrent(target: Target) -> None:
    assert recurrent.has_recurrent_layers(target.text_config)


@pytest.mark.parametrize(
    "config",
    [
        hf.RwkvConfig(hidden_size=32, num_hidden_layers=2, vocab_size=61),
        hf.RecurrentGemmaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=61,
                                num_attention_heads=4, lru_width=32, intermediate_size=48),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_a_family_whose_states_are_not_in_a_cache_is_refused(config: Any) -> None:
    model = hf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"keeps recurrent states, and not in the caches"):
        Target(model, name=config.model_type)


INDEXED: list[tuple[str, dict[str, Any]]] = [
    ("Qwen4ExpTextConfig", {
        "layer_types": ["linear_attention", "indexed_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "hc_lowrank": 8,
        "shared_expert_intermediate_size": 24, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 4,
    }),
    ("DeepseekV32Config", {"first_k_dense_replace": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), INDEXED)
def test_a_family_that_keeps_an_index_is_refused(name: str, fields: dict[str, Any]) -> None:
    if not hasattr(hf, name):
        pytest.skip(f"transformers {hf.__version__} has no {name}")
    small = {**SMALL, "num_hidden_layers": 2, "head_dim": 8, **fields}
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(getattr(hf, name)(**small))
    with pytest.raises(ConfigError, match=rf"target = '{name}'\n.*by an index \(.*Indexer\)"):
        Target(model, name=name)
