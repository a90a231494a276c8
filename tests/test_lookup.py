"""Drafters without weights: their drafts, the rounds in which they draft nothing, exactness."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.conf.errors import ConfigError
from outrider.conf.searched import SearchedConfig
from outrider.eval.decoder import Decoder
from outrider.eval.report import exceeds_rounding
from outrider.launch.cli import main
from outrider.models import drafters
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import Request
from outrider.models.decode.rules.rule_table import COUPLED, DRAWN, INDEPENDENT, bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafters import ngram
from outrider.models.drafters.ngram import NGramIndex
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.lookup import LookupDrafter, TextIndex, UntrainedDrafter
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from tests import tiny
from tests.enumeration import distance
from tests.families import FAMILIES, small_model
from tests.test_drafter_contract import emitted_distribution, plain_distribution

UNTRAINED = [name for name in drafters.names() if not drafters.drafter_class(name).is_trained]
SEARCHED = [
    name for name in UNTRAINED if issubclass(drafters.drafter_module(name).Config, SearchedConfig)
]
# those that need no settings
COMPLETE = [name for name in UNTRAINED if name in drafters.complete_names()]
each_untrained = pytest.mark.parametrize("name", UNTRAINED)
# those whose drafts need no forward of the target; test_target_drafting.py has the others
NAMES = [name for name in UNTRAINED if issubclass(drafters.drafter_class(name), UntrainedDrafter)]
each_drafter = pytest.mark.parametrize("name", NAMES)
COPYING = [name for name in NAMES if issubclass(drafters.drafter_class(name), LookupDrafter)]
each_copying_drafter = pytest.mark.parametrize("name", COPYING)
TREE = ((0,), (1,), (0, 0))
POLICIES: list[Policy] = [
    Chain(5),
    Chain(3, confidence=0.5),
    DynamicTree(4, 3, 8),
    StaticTree(TREE),
]
REPEATING = [5, 9, 5, 9, 7, 5, 9, 5, 9, 7, 5, 9]


def build(name: str, vocab: int = tiny.VOCAB) -> Drafter:
    of = tiny.target(vocab_size=vocab)
    return tiny.drafter(name, of, tiny.vocab(vocab, vocab), draft_vocab_size=None)


def trace_of(ids: list[int], newest: int) -> Trace:
    row = torch.tensor([ids])
    no_states = torch.zeros(1, len(ids), 0)
    at = torch.arange(len(ids))[None]
    zeros = torch.zeros_like(row)
    next_ids = torch.tensor([[*ids[1:], newest]])
    return Trace(row, next_ids, zeros.bool(), zeros, at, no_states, no_states)


def drafted(drafter: Drafter, text: list[int], depth: int = 4) -> list[int]:
    """Return the most probable chain after a text."""
    state, out = drafter.absorb(None, trace_of(text[:-1], text[-1])), list[int]()
    token = text[-1]
    for level in range(1, depth + 1):
        one = torch.tensor([token])
        logits, state = drafter.step(state, level, one, torch.zeros(1, dtype=torch.long))
        if bool(logits.amax().isneginf()):
            break
        token = int(logits[0].argmax())
        out.append(token)
    return out


@each_copying_drafter
def test_a_repetition_is_continued_and_a_new_text_is_not(name: str) -> None:
    assert drafted(build(name), REPEATING)[:2] == [5, 9]
    assert drafted(build(name), [3, 4, 8, 6]) == []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 3), st.booleans(),
    st.lists(st.integers(0, 2), max_size=5),
)  # fmt: skip
def test_ngrams_are_found_as_by_a_scan(
    text: list[int], n: int, latest: bool, removed: list[int]
) -> None:
    index = NGramIndex(range(1, n + 1), latest)
    for token in text + removed:
        index.append(token)
    for _ in removed:
        index.remove_last()
    found = None
    for size in range(min(n, len(text)), 0, -1):
        ends = [i for i in range(size, len(text)) if text[i - size : i] == text[-size:]]
        if ends:
            found = ends[-1] if latest else ends[0]
            break
    assert index.find() == found


@each_copying_drafter
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1))))
def test_states_of_a_prompt_can_be_used_in_any_order(
    name: str, steps: list[tuple[int, list[int]]]
) -> None:
    """Each continues one of the last six; its drafts equal those of a new index."""
    drafter, texts = build(name), [[1, 0]]
    states: list[Any] = [drafter.absorb(None, trace_of([1], 0))]
    for back, added in steps:
        at = max(0, len(states) - 1 - back)
        text = texts[at] + added
        states.append(drafter.absorb(states[at], trace_of(text[-len(added) - 1 : -1], text[-1])))
        texts.append(text)
    newest = torch.zeros(1, dtype=torch.long)
    for state, text in zip(states, texts, strict=True):
        logits, _ = drafter.step(state, 1, newest, newest)
        whole = drafter.absorb(None, trace_of(text[:-1], text[-1]))
        assert torch.equal(logits, drafter.step(whole, 1, newest, newest)[0])


@each_copying_drafter
def test_a_branch_of_a_long_text_adds_its_own_tokens_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build(name)
    state = drafter.absorb(None, trace_of(REPEATING * 50, REPEATING[0]))
    added, append = list[int](), type(state.index).append

    def counted(index: TextIndex, token: int) -> None:
        added.append(token)
        append(index, token)

    monkeypatch.setattr(type(state.index), "append", counted)
    for token in (1, 2, 3):
        drafter.absorb(state, trace_of([REPEATING[0], 5], token))
    assert added == [5, 1, 5, 2, 5, 3]


@each_copying_drafter
@pytest.mark.parametrize("piece", [1, 3, 11])
def test_absorbing_in_pieces_of_any_size_is_equal(name: str, piece: int) -> None:
    drafter, state = build(name), None
    rows = REPEATING[:-1]
    for first in range(0, len(rows), piece):
        part = rows[first : first + piece]
        state = drafter.absorb(state, trace_of(part, REPEATING[first + len(part)]))
    newest, only = torch.tensor(REPEATING[-1:]), torch.zeros(1, dtype=torch.long)
    logits, _ = drafter.step(state, 1, newest, only)
    whole, _ = drafter.step(drafter.absorb(None, trace_of(rows, REPEATING[-1])), 1, newest, only)
    assert torch.equal(logits, whole)


@each_copying_drafter
def test_a_used_state_can_be_used_again(name: str) -> None:
    drafter = build(name)
    state = drafter.absorb(None, trace_of(REPEATING[:-1], REPEATING[-1]))
    newest, only = torch.tensor(REPEATING[-1:]), torch.zeros(1, dtype=torch.long)
    before, _ = drafter.step(state, 1, newest, only)
    for token in (1, 2):  # two continuations of one state
        later = drafter.absorb(state, trace_of([REPEATING[-1], 5], token))
        drafter.step(later, 1, torch.tensor([token]), only)
        assert torch.equal(drafter.step(state, 1, newest, only)[0], before)


@each_copying_drafter
def test_an_unknown_token_of_a_tree_has_no_children(name: str) -> None:
    drafter = build(name)
    state = drafter.absorb(None, trace_of(REPEATING[:-1], REPEATING[-1]))
    _, state = drafter.step(
        state, 1, torch.tensor(REPEATING[-1:]), torch.zeros(1, dtype=torch.long)
    )
    logits, state = drafter.step(state, 2, torch.tensor([60, 5]), torch.zeros(2, dtype=torch.long))
    assert bool(logits[0].isneginf().all())
    assert int(logits[1].argmax()) == 9
    logits, _ = drafter.step(state, 3, torch.tensor([5, 9]), torch.tensor([0, 1]))
    assert bool(logits[0].isneginf().all())
    assert not bool(logits[1].isneginf().all())


@each_drafter
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_equals_plain_decoding(name: str, family: str) -> None:
    """Every policy, alone and in a batch; some tokens are accepted, some rejected."""
    target = Target(small_model(family))
    size = target.vocab_size
    drafter = tiny.drafter(name, target, tiny.vocab(size, size), draft_vocab_size=None)
    prompts = [REPEATING, REPEATING[:5], [11], REPEATING[2:] * 2]
    requests = [Request(prompt, 16, seed) for seed, prompt in enumerate(prompts)]
    tiny.require_plain_output(target, drafter, POLICIES, requests)


SAMPLED: list[tuple[str, Policy, str | None]] = [
    ("drawn chain", Chain(2, DRAWN), None),
    ("best chain", Chain(2, "best"), None),
    ("dynamic tree", DynamicTree(2, 2, 3), None),
    ("drawn tree", StaticTree(TREE, DRAWN), None),
    ("independent tree", StaticTree(TREE, INDEPENDENT), None),
    ("coupled chain", Chain(2, COUPLED), "coupled"),
]


@each_copying_drafter
@pytest.mark.parametrize("case", SAMPLED[:5], ids=[name for name, *_ in SAMPLED[:5]])
def test_sampling_has_exactly_the_distribution_of_plain_sampling(
    name: str, case: tuple[str, Policy, str | None]
) -> None:
    """Four tokens jointly over five; the prompt repeats itself, so that something is drafted."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=5, **sizes, **heads)
    drafter = tiny.drafter(name, target, tiny.vocab(5, 5), draft_vocab_size=None)
    sampling = Sampling(0.8, 1.0, 2)
    rule = None if case[2] is None else bind_rule(case[2], COUPLED)
    decoder = Engine(target, drafter, case[1], sampling=sampling, rule=rule)
    found, expected = emitted_distribution(decoder), plain_distribution(target, sampling)
    assert distance(found, expected) < 1e-5


@each_untrained
def test_a_reduced_vocabulary_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        tiny.drafter(name, tiny.target(), tiny.vocab(), draft_vocab_size=None)


# ---- commands ----


@pytest.mark.parametrize("name", COMPLETE)
def test_eval_needs_no_run(name: str, tmp_path: Path) -> None:
    words = [f"drafter={name}", "target=tiny", f"run.dir={tmp_path}", "drafter.depths=4"]
    few = ["eval.limit=2", "eval.max_new_tokens=24", "eval.warmup=0"]
    assert main(["eval", *words, *few]) == 0
    report = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert report["exact"] is True
    assert report["drafter"] == name
    assert report["depth"] == 4  # as deep as the drafter


TRIPLES = [11, 12, 13] * 4  # in bfloat16 the answer depends on the processor


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The answer of the embedded target without a drafter."""
    return Decoder.from_pretrained("tiny", dtype="float32").generate(TRIPLES, 24).output_ids


@pytest.mark.parametrize("name", COMPLETE)
def test_a_decoder_takes_its_name(name: str, plain: list[int]) -> None:
    decoder = Decoder.from_pretrained("tiny", drafter=name, dtype="float32")
    assert decoder.generate(TRIPLES, 24).output_ids == plain


def test_bfloat16_answers_leave_plain_ones_at_near_ties_only(tmp_path: Path) -> None:
    """Rows of one forward and of several round differently; none needs to differ."""
    words = ["drafter=lookahead", "target=tiny", "target.dtype=bfloat16", f"run.dir={tmp_path}"]
    assert main(["eval", *words, "eval.limit=8", "eval.max_new_tokens=32", "eval.warmup=0"]) == 0
    report = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert report["exact"] is (not report["mismatches"])
    assert not exceeds_rounding("bfloat16", [m["gap"] for m in report["mismatches"]])


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        (name, verb)
        for name in UNTRAINED
        for verb in ("train", "doctor", "memory", "prepare", "record")
        if verb != "train" or name not in SEARCHED
    ],
)
def test_training_commands_say_that_there_is_nothing_to_train(
    name: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, f"drafter={name}", "target=tiny"])
    error = capsys.readouterr().err
    assert "there is nothing to train" in error
    assert f"outrider eval drafter={name}" in error


@each_drafter
@pytest.mark.parametrize("verb", ["publish", "plan", "ranks"])
def test_commands_of_a_run_refuse_a_drafter_without_weights(
    name: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, f"drafter={name}", "target=tiny", "run.dir=x"])
    error = capsys.readouterr().err
    assert f"drafter = '{name}'\n  It has no weights, and {verb} uses" in error


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("eagle3", "outrider train drafter=eagle3 target=... run.dir=runs/eagle3\n"),
        ("kangaroo", "outrider train drafter=kangaroo target=... run.dir=runs/kangaroo\n"),
        ("Medusa", "run.dir=runs/<name>"),
        ("sufix", "sparse_kv, suffix."),
    ],
)
@pytest.mark.parametrize("verb", ["eval", "chat"])
def test_the_name_of_a_drafter_with_weights_is_no_hub_id(
    name: str, fix: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, f"drafter={name}", "target=tiny", "run.dir=x"])
    error = capsys.readouterr().err
    assert f"drafter = '{name}'" in error
    assert fix in error


def test_a_decoder_refuses_the_name_of_a_drafter_with_weights() -> None:
    with pytest.raises(ConfigError, match=r"drafter=layerskip .*\n.*Decoder\.from_run"):
        Decoder.from_pretrained("tiny", drafter="layerskip")


def test_a_decoder_takes_settings_of_a_drafter_without_weights() -> None:
    decoder = Decoder.from_pretrained("tiny", drafter="ngram", settings={"n": 2, "depths": 3})
    assert decoder.drafter is not None
    assert decoder.drafter.cfg == ngram.Config(n=2, depths=3)


@pytest.mark.parametrize(
    ("drafter", "settings", "key"),
    [
        ("ngram", {"n": 0}, "drafter.n "),
        ("ngram", {"nn": 2}, "drafter.nn "),
        (None, {"n": 2}, "settings "),
        ("someone/drafter", {"n": 2}, "settings "),
    ],
)
def test_a_decoder_refuses_wrong_settings(
    drafter: str | None, settings: dict[str, int], key: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{key}"):
        Decoder.from_pretrained("tiny", drafter=drafter, settings=settings)


def test_a_misspelt_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("drafter.nn=2", "drafter.n=0", "drafter.least=0", "drafter.draft_vocab_size=9"):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", "drafter=ngram", word, "target=tiny", "run.dir=x"])
        assert word.partition("=")[0] in capsys.readouterr().err


def test_learned_answers_are_drafted_again() -> None:
    """With learn=true the second request continues the first one's answer from its first token."""
    target = tiny.target()
    drafter = tiny.drafter(
        "suffix", target, tiny.vocab(tiny.VOCAB), draft_vocab_size=None, learn=True
    )
    decoder = Engine(target, drafter, Chain(8))
    first, second = (decoder.generate([5, 40, 17, 23, 9], 24) for _ in range(2))
    assert first.ids == second.ids
    assert sum(second.accepted) > sum(first.accepted)
    assert second.rounds < first.rounds
