"""Decoding of targets with recurrent layers: transformers' own tokens, in every family."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError
from outrider.data.target_fit import load_fitting_target
from outrider.models import drafters
from outrider.models.cache.recurrent_states import RecurrentStates
from outrider.models.decode import engine as engine_module
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import DialogueCache, Request
from outrider.models.decode.sampling_params import Sampling
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafting.causal_lm import config_to_dict
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests import tiny
from tests.families import HYBRIDS, small_model
from tests.test_auto_exact import times
from tests.test_engine import p_value
from tests.tiny import TOKENS, ScriptedDrafter, random_logits

SIZES = (70, 3, 25, 3)  # lengths of prompts: one is longer than the chunks of all kernels (64)
BUDGET = 14
CHAIN = Chain(4)
FAMILIES = pytest.mark.parametrize("family", HYBRIDS)
# linear attention, a convolution, Mamba-1 (row by row), Mamba-2 beside attention in every layer
KINDS = pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "falcon_h1"])
RUNNING = [name for name in drafters.names() if drafters.drafter_class(name).runs_target()]


@cache
def target(family: str) -> Target:
    return Target(small_model(family), name=family)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 61, (size,), generator=generator).tolist() for size in SIZES]


@cache
def answers(family: str) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of transformers' `generate`, with its cache."""
    return tuple(tuple(generate(target(family), prompt)) for prompt in prompts())


def generate(of: Target, prompt: list[int], count: int = BUDGET) -> list[int]:
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = of.model.generate(torch.tensor([prompt]), max_new_tokens=count, **settings)
    new: list[int] = ids[0, len(prompt) :].tolist()
    return new


def half_right(family: str) -> ScriptedDrafter:
    """A drafter that is right about two tokens of three, at other places of every prompt."""
    noise, known = random_logits(tiny.VOCAB, scale=3.0), {}
    for prompt, answer in zip(prompts(), answers(family), strict=True):
        text = (*prompt, *answer)
        known.update({text[:i]: text[i] for i in range(len(prompt), len(text))})

    def row(text: tuple[int, ...]) -> Tensor:
        logits = noise(text).clone()
        if text in known:
            logits[known[text]] = 20.0 if len(text) % 3 else -20.0
        return logits

    return ScriptedDrafter(row, tiny.VOCAB)


def requests() -> list[Request]:
    return [Request(prompt, BUDGET) for prompt in prompts()]


def decode(family: str, batch: int = 1) -> list[Any]:
    return Engine(target(family), half_right(family), CHAIN).generate_all(requests(), batch)


# ---- equality ------------------------------------------------------------------------------------


@FAMILIES
def test_greedy_answers_are_those_of_transformers(family: str) -> None:
    """Prompts of a batch accept different counts, and slots are moved as prompts end."""
    outs = decode(family, batch=3)
    assert [tuple(out.ids) for out in outs] == list(answers(family))
    counts = {count for out in outs for count in out.accepted}
    assert {0, 2} <= counts or {1, 2} <= counts


@KINDS
def test_plain_decoding_is_that_of_transformers(family: str) -> None:
    outs = Engine(target(family), None, None).generate_all(requests(), 2)
    assert [tuple(out.ids) for out in outs] == list(answers(family))


@KINDS
def test_an_answer_does_not_depend_on_its_batch(family: str) -> None:
    for alone, beside in zip(decode(family), decode(family, 4), strict=True):
        assert (alone.ids, alone.accepted) == (beside.ids, beside.accepted)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "mamba2"])
def test_states_that_are_not_put_back_change_the_answer(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(RecurrentStates, "keep", lambda *_: None)
    assert [tuple(out.ids) for out in decode(family)] != list(answers(family))


@KINDS
def test_a_prompt_read_in_pieces_gives_the_same_rounds(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = decode(family)
    monkeypatch.setattr(engine_module, "PREFILL_MASK", 9 * max(SIZES))
    for expected, out in zip(whole, decode(family, 2), strict=True):
        assert (out.ids, out.accepted) == (expected.ids, expected.accepted)


@KINDS
def test_turns_continue_from_the_cache(family: str) -> None:
    """After a whole answer, a part of it, another question, and another dialogue."""
    of, dialogue = target(family), DialogueCache()
    drafter = ScriptedDrafter(random_logits(tiny.VOCAB), tiny.VOCAB)
    engine, read = Engine(of, drafter, CHAIN), list[int]()
    forward = of.forward

    def counted(ids: Tensor, *rest: Any, **more: Any) -> Any:
        read.append(ids.shape[1])
        return forward(ids, *rest, **more)

    of.forward = counted  # type: ignore[method-assign]
    first = prompts()[2]
    answer = list(answers(family)[2])
    turns = [
        (first, len(first)),
        ([*first, *answer, 7, 8, 9], 4),  # the newest answer token and three more
        ([*first, *answer[:6], 11], 7),  # back to the first prompt
        ([5, 6, 7, 8], 4),
    ]
    for prompt, unread in turns:
        read.clear()
        (*_, last) = engine.run([Request(prompt, BUDGET)], 1, dialogue=dialogue)
        assert read[0] == unread
        assert last.out.ids == generate(of, prompt)
    del of.forward


@KINDS
def test_an_interrupted_round_leaves_the_dialogue_valid(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has read rows that the drafter's state does not hold."""
    drafter, dialogue, left = half_right(family), DialogueCache(), [3]
    engine, prompt, absorb = Engine(target(family), drafter, CHAIN), prompts()[2], drafter.absorb

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return absorb(*arguments)

    monkeypatch.setattr(drafter, "absorb", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run([Request(prompt, BUDGET)], 1, dialogue=dialogue))
    longer = [*prompt, *answers(family)[2], 5]
    (*_, last) = engine.run([Request(longer, 8)], 1, dialogue=dialogue)
    assert last.out.ids == generate(target(family), longer, 8)


@KINDS
def test_automatic_drafts_are_chains(family: str, tmp_path: Path) -> None:
    """Rounds with drafts and without, in batches; the measured costs include the replay."""
    drafter = tiny.drafter("eagle3", target(family)).eval()
    policy = Auto(3, budget=8, first_plain=0, eps=1.0, file=tmp_path / "costs.json")
    outs = Engine(target(family), drafter, policy).generate_all(requests(), 3)
    assert [tuple(out.ids) for out in outs] == list(answers(family))
    assert max(count for out in outs for count in out.drafted) <= 3


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "falcon_h1", "llama"])
def test_automatic_drafts_are_chains_to_the_last_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where rows cost nothing, trees pay; without recurrent layers they are drafted."""
    policy = Auto(8, budget=31, first_plain=0, eps=100.0)
    engine = Engine(target(family), half_right(family), policy)
    policy.use_costs(LiveCosts(times(row=0.0, level=0.1)))
    monkeypatch.setattr(policy, "prepare", lambda *_: None)
    outs = engine.generate_all(requests(), 3)
    assert [tuple(out.ids) for out in outs] == list(answers(family))
    kinds = {choice.split()[0] for out in outs for choice in out.choices}
    assert "chain" in kinds
    assert ("tree" in kinds) == (family == "llama")


# ---- sampling ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_samples_follow_the_law_of_plain_sampling(family: str) -> None:
    small = {"vocab_size": TOKENS, "num_hidden_layers": 3}
    drafter = ScriptedDrafter(random_logits(TOKENS, seed=3, scale=1.5), TOKENS)
    sampling = Sampling(temperature=0.8, top_k=4)
    of = Target(small_model(family, **small), name=family)
    assert p_value(Engine(of, drafter, Chain(2), sampling=sampling), 400) > 1e-3


# ---- drafters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hass", "medusa", "mtp", "draft_lm"])
@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_drafters_decode_exactly(name: str, family: str) -> None:
    of = target(family)
    drafter = tiny.drafter(name, of).eval()
    outs = Engine(of, drafter, Chain(2)).generate_all(requests()[1:4], 2)
    assert [tuple(out.ids) for out in outs] == list(answers(family)[1:4])


@pytest.mark.parametrize("name", ["eagle3", "medusa", "mtp", "draft_lm"])
def test_thirty_steps_lower_the_loss(name: str) -> None:
    of = target("bamba")
    losses = tiny.train_drafter(tiny.drafter(name, of), of, tiny.packed_trace(of), 30)
    assert losses[-1] < losses[0]


def hybrid_draft_model(family: str, of: Target, **changes: Any) -> DraftLm:
    """A draft model of a family, with its own random weights."""
    body = config_to_dict(small_model(family).config)
    drafter = tiny.drafter("draft_lm", of, tiny.vocab(tiny.VOCAB), body=body, **changes)
    assert isinstance(drafter, DraftLm)
    drafter.lm.model.load_state_dict(small_model(family).state_dict())
    return drafter.eval()


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "falcon_h1"])
def test_a_hybrid_draft_model_predicts_itself(family: str) -> None:
    """With the target's own weights every draft is accepted, for prompts of several lengths."""
    of = target(family)
    drafter = hybrid_draft_model(family, of)
    outs = Engine(of, drafter, Chain(3)).generate_all(requests()[1:4], 3)
    assert [tuple(out.ids) for out in outs] == list(answers(family)[1:4])
    assert all(out.accepted[:3] == [3, 3, 3] for out in outs)


def test_a_hybrid_draft_model_of_another_family_is_exact() -> None:
    """Rejected drafts do not stay in the states of the draft model, nor of the target."""
    of, drafter = target("bamba"), hybrid_draft_model("jamba", target("bamba"))
    outs = Engine(of, drafter, Chain(3)).generate_all(requests(), 2)
    assert [tuple(out.ids) for out in outs] == list(answers("bamba"))


@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_states_of_a_hybrid_draft_model_are_those_of_training(family: str) -> None:
    """Logits of a chain equal those of `unroll` on the same tokens, in two calls of `absorb`."""
    of = target("llama_tied")
    drafter = hybrid_draft_model(family, of)
    trace = tiny.packed_trace(of)
    row, start, stop = tiny.document_spans(trace)[1]
    assert stop >= start + 7
    guesses = [tiny.spread(guess, trace)[row] for guess in drafter.unroll(trace)]
    state = None
    for first, end in ((start, start + 2), (start + 2, start + 4)):
        state = drafter.absorb(state, tiny.verified_rows(trace, row, first, end))
        last, parents = end - 1, torch.zeros(1, dtype=torch.long)
        drafted = state
        for depth in (1, 2, 3):
            ids = trace.ids[row, last + depth : last + depth + 1]
            logits, drafted = drafter.step(drafted, depth, ids, parents)
            wanted = drafter.head(guesses[depth - 1][last])
            torch.testing.assert_close(logits[0], wanted, atol=1e-4, rtol=1e-4)


def test_trees_of_a_hybrid_draft_model_are_refused() -> None:
    of = target("llama")
    drafter = hybrid_draft_model("lfm2", of)
    with pytest.raises(ConfigError, match="draft model has recurrent layers"):
        Engine(of, drafter, DynamicTree(depth=3, width=3, budget=8))


def test_on_policy_text_of_a_hybrid_draft_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drafter.on_policy = 0\.5\n.*padd"):
        hybrid_draft_model("lfm2", target("llama"), on_policy=0.5)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a config.json: whatever reads weights fails otherwise."""
    made = tmp_path_factory.mktemp("hybrid")
    small_model("lfm2").config.save_pretrained(made)
    return made


def refusal(folder: Path, *words: str) -> ConfigError:
    place = ["target=hf", f"target.path={folder}", "data=tiny"]
    with pytest.raises(ConfigError) as refused:
        load_fitting_target(parse(compose([*place, *words]), to_train=False))
    return refused.value


TREES = ["dynamic_tree", "static_tree", "sampled_tree", "opt_tree", "best_first_tree"]


@pytest.mark.parametrize("policy", TREES)
def test_trees_are_refused_before_anything_is_loaded(folder: Path, policy: str) -> None:
    words = ["decode.temperature=1"] if policy == "sampled_tree" else []
    message = str(refusal(folder, f"decode={policy}", *words))
    expected = rf"decode = '{policy}'\n.*follows one path of a tree\.\n.*decode=chain"
    assert re.match(expected, message)


def test_trees_of_an_evaluation_are_refused_before_anything_is_loaded(folder: Path) -> None:
    message = str(refusal(folder, "eval.grid=[chain@0,dynamic_tree@0]"))
    assert "decode = 'dynamic_tree'" in message


def test_automatic_drafts_are_not_refused(folder: Path) -> None:
    """They are chains; the folder has no weights, so that loading fails later."""
    assert "safetensors" in str(refusal(folder, "decode=auto"))


def test_an_engine_refuses_trees() -> None:
    with pytest.raises(ConfigError, match=r"follows one path.*\n.*decode=chain"):
        Engine(target("lfm2"), half_right("lfm2"), DynamicTree(depth=3, width=3, budget=8))


@pytest.mark.parametrize("name", RUNNING)
def test_drafters_that_run_the_target_are_refused_by_name(folder: Path, name: str) -> None:
    assert name in str(refusal(folder, f"drafter={name}"))
    cfg = drafters.drafter_module(name).Config()
    with pytest.raises(ConfigError, match=f"drafter = '{name}'\n.*recurrent"):
        drafters.build(cfg, target("lfm2"), tiny.vocab(tiny.VOCAB))


def test_the_refused_drafters_are_known() -> None:
    assert {"layerskip", "kangaroo", "draft_verify", "sparse_kv", "lookahead"} <= {*RUNNING}


def test_a_tap_that_does_not_exist_is_refused(folder: Path) -> None:
    assert "drafter.taps[1] = 4" in str(refusal(folder, "drafter=eagle3", "drafter.taps=[0,4]"))
