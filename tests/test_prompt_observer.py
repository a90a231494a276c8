"""The selection of a prompt's rows: against a literal one, in pieces, and in a dialogue."""

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.models.cache.kv_cache import KVCache
from outrider.models.cache.prompt_observer import PromptObserver, observed_modules
from outrider.models.decode import engine
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.drafters.sparse_kv import SparseKV, SparseState
from outrider.models.target.target import Target
from tests import tiny
from tests.families import small_model
from tests.test_sparse_kv import PROMPT, drafter_of, literal_selection
from tests.test_target_drafting import state_after


def selected_rows(drafter: SparseKV, state: SparseState) -> list[Tensor]:
    """Return the rows whose keys were copied, [A, K] of each layer, by comparing all keys."""
    selection = drafter.with_selection(0, state).selection
    assert selection is not None
    assert isinstance(state.cache, KVCache)
    out = []
    for layer, (keys, values) in enumerate(selection.rows):
        all_keys, all_values = state.cache.rows(layer)
        same = (keys[0, :, :, None] == all_keys[0, :, None]).all(-1)  # [A, K, rows]
        assert torch.equal(same.sum(-1), torch.ones_like(same[..., 0]).long())
        out.append(same.int().argmax(-1))
        index = out[-1][None, :, :, None].expand(-1, -1, -1, values.shape[3])
        assert torch.equal(values, all_values.gather(2, index))
    return out


@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "phi3", "olmo2"])
def test_selected_rows_are_those_of_a_literal_selection(family: str, modules: bool) -> None:
    target = Target(small_model(family))
    if modules:
        target.fast_forward = None
    drafter = drafter_of("snapkv", target)
    found = selected_rows(drafter, state_after(target, drafter, PROMPT))
    expected = literal_selection(Target(small_model(family)), 4, 5, 3)
    assert all(map(torch.equal, found, expected))
    assert any(not torch.equal(rows[0], rows[-1]) for rows in found)  # heads differ


def test_layers_with_a_window_select_the_newest_rows() -> None:
    """Gemma 2: layers 0 and 2 have a window, 1 and 3 do not."""
    target = Target(small_model("gemma2"))
    drafter = drafter_of("snapkv", target)
    found = selected_rows(drafter, state_after(target, drafter, PROMPT))
    newest = torch.arange(15, 20).expand(2, -1)
    assert torch.equal(found[0], newest)
    assert torch.equal(found[2], newest)
    expected = literal_selection(Target(small_model("gemma2")), 4, 5, 3)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[3], expected[3])


@pytest.mark.parametrize("piece", [1, 3, 8, 12, 24])
def test_a_prompt_read_in_pieces_selects_the_same_rows(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the prompt is a multiple of the piece, and where pieces are below the window."""
    target = tiny.target()
    drafter = drafter_of("snapkv", target)
    expected = selected_rows(drafter, state_after(target, drafter, PROMPT))
    monkeypatch.setattr(engine, "PREFILL_MASK", piece * len(PROMPT))
    found = selected_rows(drafter, state_after(target, drafter, PROMPT))
    assert all(map(torch.equal, found, expected))


def test_a_selection_is_kept_in_a_request_and_remade_in_the_next_turn() -> None:
    target = tiny.target()
    drafter, made = drafter_of("snapkv", target), list[int]()
    select = SparseKV.with_selection

    def count(self: SparseKV, slot: int, state: SparseState) -> SparseState:
        out = select(self, slot, state)
        if state.selection is None and out.selection is not None:
            made.append(out.selection.tail)
        return out

    dialogue, text = DialogueCache(), list(PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseKV, "with_selection", count)
        for turn in ([], [8, 9], [17, 23, 9, 11, 40]):
            text = [*text, *turn]
            decoder = Engine(target, drafter, Chain(3))
            out = [e.out for e in decoder.run([Request(text, 9)], 1, dialogue=dialogue)][-1]
            plain = Engine(target, None, None).generate(text, 9)
            assert out.ids == plain.ids
            assert made[-1] == len(text) - 4
            latest = dialogue.checkpoints[-1][1]
            assert latest is not None
            assert latest.newest.tolist() == text[-4:]
            text = [*text, *out.ids]
    assert len(made) == 3


def test_attention_without_the_interface_of_transformers_is_refused() -> None:
    target = Target(small_model("gpt2"))
    drafter = drafter_of("snapkv", target)
    state = state_after(target, drafter, PROMPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptObserver, "observe", lambda *_: None)
        with pytest.raises(RunError, match=r"drafter\.method=streaming"):
            drafter.with_selection(0, state)


def test_the_attention_function_is_restored() -> None:
    target = Target(small_model("gpt2"))
    before = target.text_config._attn_implementation
    observer = PromptObserver(KVCache(1, 8, 4, target.device), 0, [])
    with observed_modules(target.text_config, observer):
        assert target.text_config._attn_implementation != before
    assert target.text_config._attn_implementation == before
