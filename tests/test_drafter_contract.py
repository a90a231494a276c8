"""The contract of all drafters, tested for every file in `models/drafters/`.

A new file in `models/drafters/` is tested here without a change to this one. What is
particular to one drafter is in the test of its own name. Drafters that draft through the target
need its cache to decode: test_target_drafting.py compares their steps with their unroll.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from outrider.models import drafters
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.drafting.drafter import Drafter, State
from outrider.models.drafting.target_drafting import TargetDrafter
from outrider.models.formats import native
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.objective import Objective
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law

CLOSE = 1e-4
CONF = Path(__file__).parents[1] / "conf" / "drafter"
NAMES = drafters.trained_names()

each_drafter = pytest.mark.parametrize("name", NAMES)
# tests of `absorb` and `step` without a forward of the target
standalone = pytest.mark.parametrize("drafter", tiny.STANDALONE, indirect=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest, target: Target) -> Drafter:
    return tiny.drafter(request.param, target).eval()


@pytest.fixture
def trace(drafter: Drafter, target: Target) -> Trace:
    target.set_taps(drafter.taps)
    return tiny.packed_trace(target)


@torch.no_grad()
def unrolled(drafter: Drafter, trace: Trace) -> dict[int, Tensor]:
    """Logits [B, T, Vd] of every depth from 1 on; NaN in rows without a guess."""
    return {
        guess.depth: drafter.heads_by_depth(
            [tiny.spread(guess, trace).flatten(0, 1)], [guess.depth]
        ).unflatten(0, trace.ids.shape)
        for guess in drafter.unroll(trace)
        if guess.depth
    }


@torch.no_grad()
def walked(drafter: Drafter, state: State, tokens: list[int]) -> dict[int, Tensor]:
    """Logits [Vd] of every depth when these tokens are drafted, the newest true one first."""
    found, only = {}, torch.zeros(1, dtype=torch.long)
    for depth, token in enumerate(tokens, start=1):
        logits, state = drafter.step(state, depth, torch.tensor([token]), only)
        found[depth] = logits[0]
    return found


def absorbed(
    drafter: Drafter, trace: Trace, row: int, start: int, stop: int, piece: int = 99
) -> State:
    state = None
    with torch.no_grad():
        for first in range(start, stop, piece):
            part = tiny.verified_rows(trace, row, first, min(first + piece, stop))
            state = drafter.absorb(state, part)
    return state


def supervised(trace: Trace, depths: list[int]) -> list[tuple[int, int, int, int]]:
    """(row of the batch, start of its document, t, depth) of every guess that counts."""
    return [
        (row, start, t, depth)
        for row, start, stop in tiny.document_spans(trace)
        for t in range(start, stop)
        for depth in depths
        if trace.supervised_mask(depth)[row, t]
    ]


def other(trace: Trace, row: int, first: int, stop: int, vocab: int = tiny.VOCAB) -> list[int]:
    return [(token + 7) % vocab for token in trace.ids[row, first:stop].tolist()]


def same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, atol=CLOSE, rtol=CLOSE))


# ---- 1: decoding computes what training computed -------------------------------------------------


@standalone
def test_steps_repeat_the_unroll_at_every_row_and_depth(drafter: Drafter, trace: Trace) -> None:
    """Rows absorbed one at a time; every guess in the training loss is compared."""
    trained, compared = unrolled(drafter, trace), 0
    for row, start, stop in tiny.document_spans(trace):
        state = None
        for t in range(start, stop - 2):
            with torch.no_grad():
                state = drafter.absorb(state, tiny.verified_rows(trace, row, t, t + 1))
            text = trace.ids[row, t + 1 : min(stop - 1, t + 1 + len(trained))].tolist()
            for depth, logits in walked(drafter, state, text).items():
                if trace.supervised_mask(depth)[row, t]:
                    assert same(logits, trained[depth][row, t]), (row, start, t, depth)
                    compared += 1
    assert compared == len(supervised(trace, list(trained))) > 30


@standalone
@pytest.mark.parametrize("piece", [3, 5, 99])
def test_absorbing_in_chunks_of_any_size_is_equal(
    drafter: Drafter, trace: Trace, piece: int
) -> None:
    """The document of 14 rows: 3+3+3+2, 5+5+1, and 11 at once."""
    trained, t = unrolled(drafter, trace), 10
    state = absorbed(drafter, trace, 1, 0, t + 1, piece)
    found = walked(drafter, state, trace.ids[1, t + 1 : 13][: len(trained)].tolist())
    for depth, logits in found.items():
        assert same(logits, trained[depth][1, t])


@standalone
@pytest.mark.parametrize("paths", [[(4, 8), (9, 6)], [(4, 8), (9, 6), (9, 4)]])
def test_every_branch_of_a_tree_repeats_the_unroll_of_its_own_text(
    drafter: Drafter, trace: Trace, paths: list[tuple[int, ...]]
) -> None:
    """Root -> {4 -> {8}, 9 -> {6, ..}}; every level is stored in the reverse order of the other."""
    row, t = 1, 7
    state = absorbed(drafter, trace, row, 0, t + 1)
    above: list[tuple[int, ...]] = [()]
    depths = len(unrolled(drafter, trace))
    for depth in range(1, min(depths, 3) + 1):
        nodes = sorted({path[: depth - 1] for path in paths}, reverse=depth % 2 == 0)
        newest = [node[-1] if node else int(trace.ids[row, t + 1]) for node in nodes]
        parents = [above.index(node[:-1]) for node in nodes]
        with torch.no_grad():
            logits, state = drafter.step(state, depth, torch.tensor(newest), torch.tensor(parents))
        for node, found in zip(nodes, logits, strict=True):
            text = tiny.with_tokens(trace, row, t + 2, list(node))
            assert trace.supervised_mask(depth)[row, t]
            assert same(found, unrolled(drafter, text)[depth][row, t]), node
        above = nodes


@standalone
def test_a_used_state_can_be_used_again(drafter: Drafter, trace: Trace) -> None:
    state = absorbed(drafter, trace, 1, 0, 8)
    text = trace.ids[1, 8:11].tolist()
    before = walked(drafter, state, text)
    walked(drafter, state, other(trace, 1, 8, 11))
    drafter.absorb(state, tiny.verified_rows(trace, 1, 8, 12))
    after = walked(drafter, state, text)
    assert all(torch.equal(before[depth], after[depth]) for depth in before)


@standalone
def test_new_prompts_absorbed_together_equal_separate_ones(drafter: Drafter, trace: Trace) -> None:
    """As the decoder reads prompts of one length."""
    parts = [tiny.verified_rows(trace, row, 0, 6) for row in (0, 1)]
    with torch.no_grad():
        together = drafter.absorb_batch([None, None], parts)
    for row, (part, state) in enumerate(zip(parts, together, strict=True)):
        text = trace.ids[row, 6:9].tolist()
        alone = walked(drafter, absorbed(drafter, trace, row, 0, 6), text)
        assert part.ids.shape == (1, 6)
        assert all(same(found, alone[d]) for d, found in walked(drafter, state, text).items())


@standalone
def test_a_drafter_does_not_modify_its_inputs(drafter: Drafter, trace: Trace) -> None:
    """The decoder reuses positions and parents."""
    rows = tiny.verified_rows(trace, 1, 0, 8)
    given = [part for part in vars(rows).values() if isinstance(part, Tensor)]
    ids, parents = torch.tensor([4, 9]), torch.zeros(2, dtype=torch.long)
    root, only = trace.ids[1, 8:9].clone(), torch.zeros(1, dtype=torch.long)
    given += [ids, parents, root, only]
    before = [part.clone() for part in given]
    with torch.no_grad():
        state = drafter.step(drafter.absorb(None, rows), 1, root, only)[1]
        drafter.step(state, 2, ids, parents)
    assert all(map(torch.equal, given, before))


# ---- 2: causality --------------------------------------------------------------------------------


def test_a_guess_ignores_later_states_and_later_tokens(drafter: Drafter, trace: Trace) -> None:
    """At depth d, row t: states of rows > t and tokens > t + d.

    Draft tokens that run through the target have states of their own, those of rows t + 1 .. t + d.
    """
    trained, through_target = unrolled(drafter, trace), isinstance(drafter, TargetDrafter)
    for row, _, t, depth in supervised(trace, list(trained)):
        later = tiny.with_tokens(
            trace, row, t + depth + 1, other(trace, row, t + depth + 1, tiny.LENGTH)
        )
        known = t + depth * through_target
        later = tiny.with_other_states(later, row, known + 1, tiny.LENGTH)
        assert same(unrolled(drafter, later)[depth][row, t], trained[depth][row, t]), (
            row,
            t,
            depth,
        )


def test_a_guess_depends_on_every_allowed_input(drafter: Drafter, trace: Trace) -> None:
    """The control of the test above: the same disturbance, of the other half."""
    trained = unrolled(drafter, trace)
    for row, start, t, depth in supervised(trace, list(trained)):
        earlier = tiny.with_tokens(trace, row, start, other(trace, row, start, t + depth + 1))
        earlier = tiny.with_other_states(earlier, row, start, t + 1)
        assert not same(unrolled(drafter, earlier)[depth][row, t], trained[depth][row, t])


@standalone
def test_training_and_decoding_depend_on_the_newest_token_alike(
    drafter: Drafter, trace: Trace
) -> None:
    """Token t + d at depth d; a drafter that guesses all depths at once feels it in neither."""
    trained = unrolled(drafter, trace)
    for row, start, t, depth in supervised(trace, list(trained)):
        changed = tiny.with_tokens(
            trace, row, t + depth, other(trace, row, t + depth, t + depth + 1)
        )
        in_training = not same(unrolled(drafter, changed)[depth][row, t], trained[depth][row, t])
        logits = [
            walked(
                drafter,
                absorbed(drafter, text, row, start, t + 1),
                text.ids[row, t + 1 : t + 1 + depth].tolist(),
            )[depth]
            for text in (trace, changed)
        ]
        assert in_training == (not same(*logits)), (row, t, depth)


def test_packed_documents_do_not_leak_into_each_other(drafter: Drafter, trace: Trace) -> None:
    trained = unrolled(drafter, trace)
    for row, start, stop in tiny.document_spans(trace):
        changed = tiny.with_tokens(trace, row, start, other(trace, row, start, stop))
        found = unrolled(drafter, tiny.with_other_states(changed, row, start, stop))
        for r, _, t, depth in supervised(trace, list(trained)):
            if r != row or not start <= t < stop:
                assert same(found[depth][r, t], trained[depth][r, t]), (row, start, t, depth)


# ---- 3: what is trained, what is saved -----------------------------------------------------------


def test_gradients_reach_every_parameter_and_nothing_of_the_target(
    drafter: Drafter, trace: Trace, target: Target
) -> None:
    depths = list(unrolled(drafter, trace))
    loss, _ = Objective(drafter, target, weights=[1.0] * len(depths))(
        trace, torch.ones(len(depths))
    )
    loss.backward()
    silent = [
        name
        for name, p in drafter.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert not silent
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())


def test_the_checkpoint_holds_no_weights_of_the_target(drafter: Drafter, target: Target) -> None:
    """No storage in common, no equal matrix, and with a reduced vocabulary no [V, H].

    Trained copies of the target's layers are equal to them at first.
    """
    theirs = list(target.model.parameters())
    copies = type(drafter).__module__.endswith(tiny.CHANGES_TARGET)
    shared = {p.untyped_storage().data_ptr() for p in theirs}
    for name, value in drafter.state_dict().items():
        assert value.untyped_storage().data_ptr() not in shared, name
        assert value.shape != target.head_weight.shape, name
        if value.ndim > 1 and not copies:
            assert not any(torch.equal(value, p) for p in theirs if p.shape == value.shape), name


# ---- 4: greedy output is that of plain decoding --------------------------------------------------


def drafting() -> list[Policy]:
    return [Chain(3), DynamicTree(depth=3, width=3, budget=7)]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "half-trained"])
@each_drafter
def test_greedy_output_equals_plain_decoding(name: str, trained: bool, family: str) -> None:
    """Float32, token by token; the half-trained drafter is right now and then."""
    target, answers, drafter = tiny.half_trained(name, family)
    if not trained:
        drafter = tiny.drafter(name, target).eval()
    for policy in drafting():
        decoder, accepted, drafted = Engine(target, drafter, policy), 0, 0
        for prompt, answer in zip(tiny.PROMPTS, answers, strict=True):
            out = decoder.generate(prompt, tiny.ANSWER)
            assert out.ids == answer
            accepted, drafted = accepted + sum(out.accepted), drafted + sum(out.drafted)
        # all exits of the random GPT-2 agree on these prompts
        agree = family == "gpt2" and name in tiny.CHANGES_TARGET
        assert not trained or 0 < accepted < drafted + agree


# ---- 5: sampling follows the target's distribution -----------------------------------------------

SAMPLED: list[tuple[Policy, Sampling]] = [
    (Chain(2), Sampling(0.8, 1.0, 2)),
    (DynamicTree(depth=2, width=2, budget=3), Sampling(0.8, 1.0, 2)),
    (StaticTree(((0,), (1,), (0, 0)), "drawn"), Sampling(0.8, 1.0, 2)),
]
PROMPT, BUDGET = [1, 3, 4, 2], 4  # the first round can still draft two tokens


def emitted_distribution(decoder: Engine) -> Law:
    """Return the exact joint distribution of the engine's output, over all random outcomes."""

    def run(rng: RandomSource) -> Context:
        tiny.inject_random_source(decoder, rng)
        return tuple(decoder.generate(PROMPT, BUDGET).ids)

    return enumerate_law(run)


def plain_distribution(target: Target, sampling: Sampling) -> Law:
    """Return the distribution of plain sampling, by the chain rule."""
    distribution: Law = {(): 1.0}
    with torch.no_grad():
        for _ in range(BUDGET):
            ids = torch.tensor([[*PROMPT, *tokens] for tokens in distribution])
            rows = sampling.probs(target.model(input_ids=ids, use_cache=False).logits[:, -1])
            distribution = {
                (*tokens, token): q * p
                for (tokens, q), row in zip(distribution.items(), rows.tolist(), strict=True)
                for token, p in enumerate(row)
                if p > 0
            }
    return distribution


def five_token_pair(name: str) -> tuple[Target, Drafter]:
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target(vocab_size=5, **size, **heads)
    return target, tiny.drafter(name, target, tiny.vocab(4, 5), exit_layer=1).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "sampling"), SAMPLED, ids=["chain", "tree", "drawn tree"])
@each_drafter
def test_sampling_has_exactly_the_distribution_of_plain_sampling(
    name: str, policy: Policy, sampling: Sampling
) -> None:
    """Four tokens jointly, V = 5, four of them draftable; exact up to float32 rounding."""
    target, drafter = five_token_pair(name)
    decoder = Engine(target, drafter, policy, sampling=sampling)
    assert distance(emitted_distribution(decoder), plain_distribution(target, sampling)) < 1e-5


@pytest.mark.slow
@each_drafter
def test_a_bonus_from_unwarped_logits_has_another_distribution(name: str) -> None:
    """The control of the test above."""
    target, drafter = five_token_pair(name)
    policy, sampling = SAMPLED[0]
    wrong = tiny.RawBonus(target, drafter, policy, sampling=sampling)
    assert distance(emitted_distribution(wrong), plain_distribution(target, sampling)) > 0.01


# ---- 6, 7, 8 -------------------------------------------------------------------------------------


@each_drafter
def test_a_loaded_drafter_has_equal_logits(name: str, target: Target, tmp_path: Path) -> None:
    drafter = tiny.drafter(name, target).eval()
    trace = tiny.packed_trace(target)
    native.save(drafter, tmp_path, target, tiny.config(name), {})
    torch.manual_seed(99)  # what is not in the file would be initialised otherwise
    again, _ = native.load(tmp_path, target)
    before, after = unrolled(drafter, trace), unrolled(again, trace)
    for depth, logits in before.items():
        rows = trace.supervised_mask(depth)
        assert torch.equal(logits[rows], after[depth][rows])


# settings of new runs that differ from those of an earlier file that does not name them
OTHER_DEFAULTS = {"eagle3": {"feedback": "normed", "taps": "spread"}}


@pytest.mark.parametrize("name", drafters.names())
def test_file_yaml_and_config_agree(name: str) -> None:
    """Same name, same fields in the same order, same defaults but those of OTHER_DEFAULTS."""
    kind = drafters.drafter_module(name).Config
    yaml = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(yaml, dict)
    assert list(yaml) == [field.name for field in dataclasses.fields(kind)]
    plain = json.loads(json.dumps(dataclasses.asdict(kind())))  # tuples are lists there
    assert yaml == {**plain, **OTHER_DEFAULTS.get(name, {})}
    assert yaml["name"] == name


def test_every_yaml_has_its_drafter() -> None:
    assert {file.stem for file in CONF.glob("*.yaml")} == set(drafters.names())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in tiny.CHANGES_TARGET])
def test_thirty_steps_lower_the_loss(name: str) -> None:
    """The part above the target's entropy, the lower bound, falls by a third.

    The loss of a changed target begins at the lower bound: its drafter has a test of its own.
    """
    target, answers, _ = tiny.half_trained(name, "llama")
    pupil = tiny.drafter(name, target, tiny.vocab(tiny.VOCAB))
    trace = tiny.answered_trace(target, answers)
    losses = tiny.train_drafter(pupil, target, trace, steps=31)
    log_p = target.logits(trace.last).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    depths = list(unrolled(pupil, trace))
    floor = sum(float(entropy[:, d:-1].mean()) for d in depths) / len(depths)
    assert floor < losses[-1] < floor + (losses[0] - floor) * 2 / 3
