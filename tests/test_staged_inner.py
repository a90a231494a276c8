"""The inner drafter of staged speculation: its guesses, its settings and its files."""

import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.ngram import NGram
from outrider.models.drafters.parts import inner as inner_drafter
from outrider.models.drafters.staged import Config, Staged, add_inner
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.target.target import Target
from outrider.train.settings import parse
from tests import tiny
from tests.test_lookup import REPEATING
from tests.test_staged import (
    INNER,
    NGRAM,
    PROMPTS,
    THREE,
    Forwards,
    absorbed,
    answers,
    decoded,
    each_inner,
    plain_lm,
    staged,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


# ---- the recursion through the engine ------------------------------------------------------------


def rounds_of_chain(
    drafter: Staged, text: Sequence[int], count: int, patch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """Greedy tokens of a chain, and how many guesses in a row each forward made known."""
    forwards = Forwards(drafter, patch)
    state, token, tokens = absorbed(drafter, text), text[-1], list[int]()
    assert drafter.inner is not None
    starts = [1] if drafter.inner.required_features == "ids" else []  # guesses after the text
    for depth in range(1, count + 1):
        before, ids = forwards.count, torch.tensor([token])
        with torch.no_grad():
            logits, state = drafter.step(state, depth, ids, torch.zeros_like(ids))
        if forwards.count > before:
            starts.append(depth)
        token = int(drafter.vocab.to_target(logits[0].argmax()))
        tokens.append(token)
    return tokens, [b - a - 1 for a, b in pairwise(starts)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A draft model, and an EAGLE-3 drafter that was trained for it a little."""
    lm, eagle = (str(tmp_path_factory.mktemp(name)) for name in ("lm", "eagle"))
    of, _, drafter = tiny.half_trained("eagle3", "llama")
    of.model.save_pretrained(lm)
    native.save(drafter, Path(eagle), of, drafter.cfg, {})
    return lm, eagle


@pytest.mark.parametrize("kind", ["ngram", "suffix", "eagle3", "three stages"])
def test_the_engine_on_the_draft_model_accepts_the_same_guesses(
    target: Target, folders: tuple[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine(draft model, inner drafter, Chain), greedily: its tokens and accepted counts.

    A look-up guesses with the text: the newest token is the engine's first one. A drafter that
    reads states guesses after the first drafted token, which then is the engine's first one.
    """
    lm, eagle = folders
    inner = {"eagle3": {"path": eagle}, "three stages": {**THREE, "path": lm}}.get(kind)
    drafter = staged(target, inner or INNER[kind], path=lm, depths=3)
    assert drafter.inner is not None
    prompt, count = list(tiny.PROMPTS[0]), 40
    engine = Engine(drafter.lm, drafter.inner, Chain(drafter.inner_depths))
    reference = engine.generate(prompt, count)
    reads_states = kind == "eagle3"
    text = prompt if reads_states else [*prompt, reference.ids[0]]
    with monkeypatch.context() as patch:
        tokens, accepted = rounds_of_chain(drafter, text, count - 1, patch)
    assert tokens == (reference.ids[:-1] if reads_states else reference.ids[1:])
    assert len(accepted) > 2
    assert accepted == reference.accepted[: len(accepted)]
    assert sum(accepted) > 5


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "three stages"])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_good_inner_drafter_saves_forwards(
    target: Target, folders: tuple[str, str], kind: str, batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Same answers as without one; three stages save forwards of the second model as well."""
    lm, eagle = folders
    inner = {"eagle3": {"path": eagle}, "three stages": {**THREE, "path": lm}}.get(kind, NGRAM)
    counts, outputs = [], []
    for settings in (None, inner):
        drafter = staged(target, settings, path=lm)
        with monkeypatch.context() as patch:
            forwards = Forwards(drafter, patch)
            outputs.append(answers(decoded(target, drafter, Chain(6), batch)))
            counts.append(forwards.prompts)
    assert outputs[0] == outputs[1]
    assert counts[1] < counts[0] * (0.5 if kind == "three stages" else 0.95)


def test_a_perfect_inner_drafter_leaves_two_forwards_per_round(
    target: Target, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one, where it reads tokens only: the draft model guesses for itself."""
    drafter = staged(target, {"name": "draft_lm", "path": folders[0], "depths": 8}, path=folders[0])
    forwards = Forwards(drafter, monkeypatch)
    out = Engine(target, drafter, Chain(6)).generate(PROMPTS[0], 24)
    assert forwards.count == out.rounds + 1  # and that of the prompt


# ---- guesses -------------------------------------------------------------------------------------


def scripted(tokens: Sequence[int], size: int = tiny.VOCAB) -> Drafter:
    """Drafts these tokens after [1], and abstains after them."""

    def row(text: tuple[int, ...]) -> Tensor:
        out = torch.full((size,), float("-inf"))
        if len(text) <= len(tokens):
            out[tokens[len(text) - 1]] = 1.0
        return out

    return tiny.ScriptedDrafter(row, size)


@pytest.mark.parametrize(
    ("tokens", "depths", "kept"),
    [([5, 6, 7], 9, [5, 6, 7]), ([5, 6, 7], 2, [5, 6]), ([5, 60, 7], 9, [5]), ([], 9, [])],
)
def test_a_chain_ends_before_a_token_that_cannot_be_drafted(
    tokens: list[int], depths: int, kept: list[int]
) -> None:
    """At an abstention, at the depth, and before a token outside the draft vocabulary."""
    allowed = DraftVocab(torch.arange(60), tiny.VOCAB)
    states = [tiny.ScriptState((1,))]
    assert inner_drafter.draft_chains(scripted(tokens), states, [1], depths, allowed) == [kept]


def test_wide_levels_have_no_guesses(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for width in (1, 2):
        drafter = staged(target, INNER["eagle3"], inner_width=width)
        with monkeypatch.context() as patch:
            forwards = Forwards(drafter, patch)
            state = absorbed(drafter, REPEATING)
            state = drafter.step(state, 1, torch.tensor(REPEATING[-1:]), torch.zeros(1).long())[1]
            drafter.step(state, 2, torch.tensor([4, 9]), torch.zeros(2).long())
            widths.append(forwards.widths[-1])
    assert widths == [2, 2 * (1 + drafter.inner_depths)]


def test_answers_reach_the_inner_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`suffix` with learn=true drafts a repeated answer from its first token on."""
    drafter = staged(target, {"name": "suffix", "learn": True})
    forwards, counts, outs = Forwards(drafter, monkeypatch), [0], []
    for _ in range(2):
        outs.append(Engine(target, drafter, Chain(6)).generate([5, 40, 17, 23, 9], 24).ids)
        counts.append(forwards.count)
    assert outs[0] == outs[1]
    assert counts[2] - counts[1] < counts[1]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "key"),
    [
        ({"name": "ngram", "nn": 2}, "drafter.inner.nn"),
        ({"name": "ngram", "n": 0}, "drafter.inner.n"),
        ({"name": "ngram", "n": 2, "least": 3}, "drafter.inner.least"),
        ({"name": "ngram", "draft_vocab_size": 9}, "drafter.inner.draft_vocab_size"),
        ({"name": "staged", "inner": {"name": "ngram", "n": 0}}, "drafter.inner.inner.n"),
        ({"name": "no_such"}, "drafter.inner"),
        ({"name": 7}, "drafter.inner"),
        ({"name": "outrider.models.drafters.ngram"}, "drafter.inner"),
        ({"name": "draft_lm", "body": {"model_type": "x", "auto_map": {}}}, "drafter.inner.body"),
        ({}, "drafter.inner"),
        ({"n": 3}, "drafter.inner"),
        ({"path": 3}, "drafter.inner"),
        ({"path": "x", "n": 3}, "drafter.inner"),
        ({"name": "sparse_kv"}, "drafter.inner.name"),
        ({"name": "staged", "inner": {"name": "lookahead"}}, "drafter.inner.inner.name"),
        ([NGRAM], "drafter.inner"),
        ("ngram", "drafter.inner"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(inner: Any, key: str) -> None:
    config = compose(["drafter=staged"])
    config.drafter.inner = inner
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert caught.value.key == key
    assert "drafter.inner" in str(caught.value)


def test_a_model_that_is_not_found_is_named(target: Target, tmp_path: Path) -> None:
    inner = {"name": "draft_lm", "path": str(tmp_path / "nowhere/at/all")}
    with pytest.raises(ConfigError, match="There is no such folder") as caught:
        staged(target, {"name": "staged", "inner": inner})
    assert caught.value.key == "drafter.inner.inner.path"


def test_a_misspelt_key_has_the_nearest_one_as_its_fix() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean drafter\.inner\.latest\?"):
        Config(inner={"name": "ngram", "lastest": True})


def test_stages_are_bounded() -> None:
    deep = NGRAM
    for _ in range(inner_drafter.MAX_STAGES - 1):
        deep = {"name": "staged", "inner": deep}
    Config(inner=deep)
    with pytest.raises(ValueError, match="stages"):
        Config(inner={"name": "staged", "inner": deep})


def test_the_command_line_sets_an_inner_drafter() -> None:
    words = ["drafter=staged", "drafter.inner={name: ngram, n: 2}"]
    drafter = parse(compose(words)).drafter
    assert isinstance(drafter, Config)
    assert drafter.inner == {"name": "ngram", "n": 2}


def test_a_drafter_that_runs_its_target_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: NGram, *args: Any) -> Any:
        return Drafter.run_target(self, *args)

    monkeypatch.setattr(NGram, "run_target", run)
    with pytest.raises(ConfigError, match="runs its target itself") as caught:
        staged(target, NGRAM)
    assert caught.value.key == "drafter.inner.name"


# ---- files ---------------------------------------------------------------------------------------


def saved_and_loaded(drafter: Staged, of: Target, folder: Path) -> Staged:
    native.save(drafter, folder, of, drafter.cfg, {})
    torch.manual_seed(99)  # what is not in the file would be initialised otherwise
    again, cfg = native.load(folder, of)
    assert isinstance(again, Staged)
    assert cfg.inner == again.cfg.inner == drafter.cfg.inner
    return again


@each_inner
def test_a_loaded_drafter_decodes_alike(
    target: Target, inner: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers, accepted tokens and forwards: the inner drafter is the same one."""
    drafter = staged(target, inner)
    runs = []
    for one in (drafter, saved_and_loaded(drafter, target, tmp_path)):
        with monkeypatch.context() as patch:
            forwards = Forwards(one, patch)
            runs.append((answers(decoded(target, one, Chain(6), 4)), forwards.count))
    assert runs[0] == runs[1]


def test_only_an_inner_drafter_with_weights_is_saved(target: Target) -> None:
    reference = plain_lm(target).state_dict()
    assert staged(target, NGRAM).state_dict().keys() == reference.keys()
    more = staged(target, INNER["eagle3"]).state_dict().keys() - reference.keys()
    assert more
    assert all(name.startswith("inner.") for name in more)


def test_a_trained_inner_drafter_needs_its_folder_once(
    target: Target, folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, eagle = (shutil.copytree(folder, tmp_path / Path(folder).name) for folder in folders)
    drafter = staged(target, {"path": str(eagle)}, path=str(lm))
    assert drafter.cfg.inner["name"] == "eagle3"
    assert not any(p.requires_grad for n, p in drafter.named_parameters() if "inner." in n)
    for folder in (lm, eagle):
        shutil.rmtree(folder)
    again = saved_and_loaded(drafter, target, tmp_path / "staged")
    for name, value in drafter.inner.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(value, again.inner.state_dict()[name]), name  # type: ignore[union-attr]


def test_an_inner_drafter_of_another_model_is_refused(
    target: Target, folders: tuple[str, str]
) -> None:
    with pytest.raises(RunError, match="trained for"):
        staged(target, {"path": folders[1]})


@pytest.mark.parametrize("kind", ["ngram", "eagle3"])
def test_a_trained_draft_lm_can_get_an_inner_drafter(
    target: Target, folders: tuple[str, str], kind: str, tmp_path: Path
) -> None:
    lm, eagle = folders
    trained = tiny.drafter("draft_lm", target, tiny.vocab(tiny.VOCAB), path=lm).eval()
    assert isinstance(trained, DraftLm)
    drafter = add_inner(trained, target, NGRAM if kind == "ngram" else {"path": eagle})
    expected = answers(decoded(target, trained, Chain(6), 4))
    assert answers(decoded(target, drafter, Chain(6), 4)) == expected
    again = saved_and_loaded(drafter, target, tmp_path)
    assert answers(decoded(target, again, Chain(6), 4)) == expected


def test_a_drafter_without_a_draft_model_gets_no_inner_one(target: Target) -> None:
    with pytest.raises(ConfigError, match="Only a draft model") as caught:
        add_inner(tiny.drafter("kangaroo", target, tiny.vocab(tiny.VOCAB)), target, NGRAM)
    assert (caught.value.key, caught.value.value) == ("drafter", "Kangaroo")
