"""The table of ranks: by hand, against loops over rows, and against the rule that it is about."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.eval import rank_tables as module
from outrider.eval.rank_tables import Ranks, rank_table, sibling_acceptance
from outrider.eval.theory import coupled_acceptance
from outrider.models import drafters
from outrider.models.decode import from_config
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree_shapes import contiguous
from outrider.models.drafter import Drafter
from outrider.models.interface import Trace
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.teacher import TargetHead
from tests import tiny
from tests.enumeration import Context, Law, distance, enumerate_law
from tests.tiny import FixedDrafter


@dataclass(frozen=True)
class Mirror:
    """A target whose last states are its logits."""

    vocab_size: int = 4

    def logits(self, last: Tensor) -> Tensor:
        return last

    def logits_of(self, last: Tensor, ids: Tensor) -> Tensor:
        return last[..., ids]


def one_row(last: Tensor, answer: list[int]) -> Trace:
    ids = torch.zeros(1, len(last), dtype=torch.long)
    mask = ids.bool()
    mask[0, answer] = True
    return Trace(ids, ids, mask, ids, ids, last[None, :, :0], last[None])


def favours(*order: int, size: int = 4) -> Tensor:
    """Logits that rank the tokens in this order, one nat apart."""
    logits = -10.0 - torch.arange(size)
    logits[list(order)] = -torch.arange(len(order), dtype=torch.float32)
    return logits


def disturbed(target: Target, trace: Trace, size: int = tiny.DRAFTED) -> FixedDrafter:
    """Right now and then: its states are the target's own, disturbed more at every depth."""
    generator, states = torch.Generator().manual_seed(6), []
    for depth in (1, 2, 3):
        noise = torch.randn(trace.last.shape, generator=generator)
        states.append(trace.last.roll(-depth, 1) + noise * 0.3 * depth)
    return FixedDrafter(states, tiny.vocab(size), target)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


@pytest.fixture(scope="module")
def trace(target: Target) -> Trace:
    return tiny.packed_trace(target)


# ---- by hand -------------------------------------------------------------------------------------


def test_a_table_by_hand() -> None:
    """x_2..x_5 is the answer, so the roots are x_2, x_3, x_4, at rows 1, 2, 3.

    Depth 1: rows 1, 2, 3 guess x_3, x_4, x_5, and the target's rows 2, 3, 4 judge them.
    Depth 2: rows 1, 2 guess x_4, x_5, judged by rows 3, 4. Elsewhere nobody is asked.
    """
    last = torch.stack([favours(3, 2, 1, 0)] * 2 + [favours(t) for t in (0, 1, 2)] + [favours(3)])
    lie = favours(3, 2, 1, 0)
    first = torch.stack([lie, favours(0, 1), favours(0, 1), favours(0, 1, 2, 3), lie, lie])
    second = torch.stack([lie, favours(0, 1), favours(2, 0), lie, lie, lie])
    drafter = FixedDrafter([first[None], second[None]], DraftVocab.identity(4))
    found = rank_table(drafter, Mirror(), [one_row(last, [2, 3, 4, 5])], 2, 3, 0.0)
    assert found.rows.tolist() == [3, 2]
    torch.testing.assert_close(
        found.table, torch.tensor([[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]]).double() / 3
    )


def test_a_round_begins_behind_the_prompt() -> None:
    """One answer token, the first: the prefill says it, and no round is left to be judged."""
    drafter = FixedDrafter([torch.zeros(1, 6, 4)], DraftVocab.identity(4))
    with pytest.raises(ValueError, match=r"rows per depth \[0\]: the answers are too short"):
        rank_table(drafter, Mirror(), [one_row(torch.zeros(6, 4), [3])], 1, 2, 0.0)


def test_what_is_drafted_without_the_target_is_not_counted() -> None:
    """The target says 0 or 1 with even chances; the drafter knows 1, 2 and 3 only."""
    last = torch.stack([torch.tensor([5.0, 5.0, -60.0, -60.0])] * 5)
    states = torch.stack([torch.tensor([1.0, 2.0, 0.0])] * 5)  # of tokens 1, 2, 3: favours 2
    drafter = FixedDrafter([states[None]], DraftVocab(torch.tensor([1, 2, 3]), 4))
    told = one_row(last, [1, 2, 3, 4])
    best = rank_table(drafter, Mirror(), [told], 1, 3, 1.0)
    torch.testing.assert_close(best.table, torch.tensor([[0.0, 0.5, 0.0]]).double())
    drawn = rank_table(drafter, Mirror(), [told] * 400, 1, 3, 1.0, "drawn")
    assert drawn.table.sum() == pytest.approx(0.5, abs=1e-12)  # all three are drawn in the end
    q = torch.tensor([1.0, 2, 0]).softmax(0)
    assert drawn.table[0, 0] == pytest.approx(float(q[0]))
    coupled = rank_table(drafter, Mirror(), [told] * 4000, 1, 3, 1.0, "coupled").table
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    met = float(coupled_acceptance(p, torch.cat([torch.zeros(1), q])))
    assert coupled[0, 0] == pytest.approx(met, abs=0.02)
    assert coupled.sum() == pytest.approx(0.5, abs=0.02)


# ---- against loops over rows ---------------------------------------------------------------------


def begins(trace: Trace) -> Iterator[tuple[int, int, int]]:
    """(b, t, d) where x_{t+1}..x_{t+1+d} are answer tokens of one document, token by token."""
    for b, start, stop in tiny.document_spans(trace):
        for t in range(start, stop):
            for d in (1, 2, 3):
                wanted = range(t + 1, t + d + 2)
                if all(i < stop and bool(trace.answer[b, i]) for i in wanted):
                    yield b, t, d


def literally(
    drafter: Drafter, target: Target, trace: Trace, ranks: int, temperature: float
) -> tuple[list[list[float]], list[int]]:
    """Row by row: the k-th favourite of row t at depth d is judged by the target's row t + d."""
    guesses = {guess.depth: guess.hidden for guess in drafter.unroll(trace) if guess.depth}
    table, rows = [[0.0] * ranks for _ in range(3)], [0, 0, 0]
    for b, t, d in begins(trace):
        logits = drafter.heads_by_depth([guesses[d][b, t][None]], [d])[0]
        order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
        teacher = target.logits(trace.last[b, t + d]).double()
        for k, token in enumerate(drafter.vocab.target_ids[order[:ranks]].tolist()):
            if temperature:
                table[d - 1][k] += float((teacher / temperature).softmax(-1)[token])
            else:
                table[d - 1][k] += float(int(teacher.argmax()) == token)
        rows[d - 1] += 1
    return [[x / n for x in row] for row, n in zip(table, rows, strict=True)], rows


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("name", drafters.names())
def test_the_table_equals_loops_over_rows(name: str, temperature: float) -> None:
    """Every drafter as it is built, over a draft vocabulary with gaps, in packed documents.

    Answers of L tokens in a row (L = 3 3 | 3 1 | 3 || 3 8 | 3 4) have L - d rows at depth d.
    """
    of = tiny.target()
    drafter = tiny.drafter(name, of).eval()
    of.set_taps(drafter.taps)
    told = tiny.packed_trace(of)
    found = rank_table(drafter, of, [told], 3, 36, temperature)
    with torch.no_grad():
        table, rows = literally(drafter, of, told, 36, temperature)
    assert found.rows.tolist() == rows == [22, 14, 6]
    torch.testing.assert_close(found.table, torch.tensor(table).double(), atol=1e-6, rtol=1e-5)
    assert (found.table.sum(-1) > 0).all()
    assert (found.table.sum(-1) < 1).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_text_counts_row_by_row(
    target: Target, trace: Trace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither chunks nor batches matter, only how many rows they hold."""
    parts = [tiny.slice_trace(trace, slice(i, i + 1)) for i in (0, 1)]
    whole = disturbed(target, trace)
    each = [FixedDrafter([s[i : i + 1] for s in whole.states], whole.vocab, target) for i in (0, 1)]
    found = rank_table(whole, target, [trace], 2, 5, temperature)
    monkeypatch.setattr(module, "max_logits", lambda device: 3 * target.vocab_size)
    again = rank_table(whole, target, [trace, trace], 2, 5, temperature)
    alone = [
        rank_table(g, target, [p], 2, 5, temperature) for g, p in zip(each, parts, strict=True)
    ]
    torch.testing.assert_close(again.table, found.table)
    assert again.rows.tolist() == (2 * found.rows).tolist()
    rows = alone[0].rows + alone[1].rows
    mean = sum(one.table * one.rows[:, None] for one in alone) / rows[:, None]
    assert rows.tolist() == found.rows.tolist()
    torch.testing.assert_close(mean, found.table)
    assert not torch.allclose(alone[0].table, found.table, atol=1e-3)


@pytest.mark.parametrize("draft", ["best", "drawn", "coupled"])
def test_what_no_round_meets_does_not_matter(
    target: Target, trace: Trace, draft: module.DraftKind
) -> None:
    """Neither guesses at rows that do not count, nor the target's rows that judge none."""
    drafter = disturbed(target, trace)
    before = rank_table(drafter, target, [trace], 3, 5, 1.0, draft)
    asked, judges = (
        [torch.zeros_like(trace.answer) for _ in range(3)],
        torch.zeros_like(trace.answer),
    )
    for b, t, d in begins(trace):
        asked[d - 1][b, t] = judges[b, t + d] = True
    for state, used in zip(drafter.states, asked, strict=True):
        state[~used] = torch.nan
    last = torch.where(judges[..., None], trace.last, torch.nan)
    told = Trace(**{**vars(trace), "last": last})
    after = rank_table(drafter, target, [told], 3, 5, 1.0, draft)
    torch.testing.assert_close(after.table, before.table)


# ---- siblings drawn without replacement ----------------------------------------------------------

ROWS = {  # the target's row, the drafter's
    "alike": ([0.4, 0.3, 0.2, 0.1], [0.25, 0.35, 0.1, 0.3]),
    "apart": ([0.05, 0.1, 0.15, 0.7], [0.6, 0.25, 0.1, 0.05]),
    "blind": ([0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.2, 0.0]),  # never drafts the last token
    "poor": ([0.6, 0.0, 0.3, 0.1], [0.5, 0.5, 0.0, 0.0]),  # has two tokens to draft
}


def rule(
    p: Tensor, q: Tensor, ranks: int, coins: RandomSource, renormalise: bool = True
) -> Context:
    """Draw all siblings, then verify them in order: (accepted rank or -1, token emitted)."""
    siblings: list[tuple[int, Tensor]] = []
    for _ in range(ranks):
        if q.sum() > 0:
            token = int(coins.draw(q[None, None]))
            siblings.append((token, q))
            q = torch.where(torch.arange(len(q)) == token, 0.0, q)
            q = q / q.sum().clamp(min=1e-300) if renormalise else q
    rest = p
    for rank, (token, row) in enumerate(siblings):
        chance = (rest[token] / row[token]).clamp(max=1.0)
        if bool(coins.flip(chance.view(1, 1))):
            return rank, token
        rest = (rest - row).clamp(min=0)
        rest = rest / rest.sum()
    return -1, int(coins.draw(rest[None, None]))


def law_of_ranks(p: Tensor, q: Tensor, ranks: int, renormalise: bool = True) -> Tensor:
    """Exactly, over every drawing and every coin."""
    law = enumerate_law(lambda coins: rule(p, q, ranks, coins, renormalise))
    shares = [sum(chance for (rank, _), chance in law.items() if rank == k) for k in range(ranks)]
    return torch.tensor(shares, dtype=torch.float64)


def rows_of(name: str) -> tuple[Tensor, Tensor]:
    p, q = ROWS[name]
    return torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_the_rule_is_the_lossless_one(name: str) -> None:
    """What it emits has the target's law; without renormalising it would not."""
    p, q = rows_of(name)
    plain: Law = {(token,): chance for token, chance in enumerate(p.tolist())}
    for renormalise in (True, False):
        law = enumerate_law(lambda coins: rule(p, q, 3, coins, renormalise)[1:])  # noqa: B023
        gap = distance(law, plain)
        assert gap < 1e-12 if renormalise else gap > 0.01


@pytest.mark.parametrize("name", ROWS)
def test_chances_of_siblings_are_those_of_the_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: the mean over every drawing of rejected tokens is the law of the accepted rank."""
    p, q = rows_of(name)

    def run(coins: RandomSource) -> tuple[float, ...]:
        monkeypatch.setattr(module, "draw", lambda rows, _: coins.draw(rows[None])[0])
        return tuple(sibling_acceptance(p[None], q[None], 4, torch.Generator())[0].tolist())

    law = enumerate_law(run)  # type: ignore[arg-type]
    found = sum(chance * torch.tensor(said, dtype=torch.float64) for said, chance in law.items())
    assert isinstance(found, Tensor)
    exact, wrong = law_of_ranks(p, q, 4), law_of_ranks(p, q, 4, renormalise=False)
    assert (found - exact).abs().max() < 1e-12
    assert (found - wrong).abs().max() > 0.01
    assert exact[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_drawn_chances_are_right_on_average(name: str) -> None:
    """With a generator instead of every drawing: within four standard errors."""
    p, q = rows_of(name)
    found = sibling_acceptance(p.repeat(4000, 1), q.repeat(4000, 1), 4, seeded(1))
    error = found.std(0) / 4000**0.5
    exact = law_of_ranks(p, q, 4)
    assert ((found.mean(0) - exact).abs() <= 4 * error + 1e-12).all()


def test_two_tokens_by_hand() -> None:
    """Rejected is what q has too much of; then only the other token is left, and is right."""
    p, q = torch.tensor([[0.3, 0.7]]).double(), torch.tensor([[0.8, 0.2]]).double()
    found = sibling_acceptance(p, q, 2, seeded(0))
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5]]).double())


def test_a_perfect_drafter_needs_no_second_sibling() -> None:
    p = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    found = sibling_acceptance(p, p.clone(), 3, seeded(0))
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0, 0.0]] * 3).double())


def test_a_reduced_vocabulary_counts_as_tokens_without_draft() -> None:
    """The rows without the last token give what whole rows give, drawing by drawing."""
    p = torch.tensor([0.1, 0.1, 0.35, 0.25, 0.2]).double().repeat(50, 1)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).double().repeat(50, 1)
    whole = sibling_acceptance(p, q, 3, seeded(4))
    part = sibling_acceptance(p[:, :4], q[:, :4], 3, seeded(4))
    torch.testing.assert_close(part, whole)
    assert whole.std(0)[1:].max() > 0.01  # the drawings do differ


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def played(
    drafter: FixedDrafter, target: Target, trace: Trace, rounds: int, temperature: float
) -> Ranks:
    """Monte Carlo: at every row, draw siblings in one race and toss the coins; count ranks."""
    torch.manual_seed(8)
    table, rows = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    for b, t, d in begins(trace):
        logits = drafter.head(drafter.states[d - 1][b, t]).double()
        q = drafter.vocab.expand((logits / temperature).softmax(-1)[None])[0].repeat(rounds, 1)
        rest = (target.logits(trace.last[b, t + d]).double() / temperature).softmax(-1)
        rest, alive = rest.repeat(rounds, 1), torch.ones(rounds, dtype=torch.bool)
        race = (torch.rand(q.shape, dtype=torch.float64).log() / q).topk(4).indices
        for k in range(4):
            token = race[:, k : k + 1]
            chance = (rest.gather(1, token) / q.gather(1, token))[:, 0]
            taken = alive & (torch.rand(rounds, dtype=torch.float64) < chance)
            table[d - 1, k] += taken.sum()
            alive &= ~taken
            rest = (rest - q).clamp(min=0)
            rest, q = rest / rest.sum(-1, keepdim=True), q.scatter(1, token, 0.0)
            q = q / q.sum(-1, keepdim=True)
        rows[d - 1] += rounds
    return Ranks(table / rows[:, None], rows)


def test_the_drawn_table_is_what_decoding_would_count(target: Target, trace: Trace) -> None:
    """Within four standard errors of playing it; the favourites' table is far outside."""
    drafter, temperature, rounds = disturbed(target, trace), 0.5, 1500
    found = rank_table(drafter, target, [trace] * 300, 3, 4, temperature, "drawn", seed=3)
    with torch.no_grad():
        counted = played(drafter, target, trace, rounds, temperature)
    each = found.table * (1 - found.table)
    error = (each / counted.rows[:, None] + each / found.rows[:, None]).sqrt()
    gap = (found.table - counted.table).abs()
    assert (gap <= 4 * error).all()
    best = rank_table(drafter, target, [trace], 3, 4, temperature)
    assert ((best.table - counted.table).abs() > 8 * error).sum() > 6


def test_a_seed_fixes_what_is_drawn(target: Target, trace: Trace) -> None:
    drafter = disturbed(target, trace)
    tables = [
        rank_table(drafter, target, [trace], 3, 4, 1.0, "drawn", seed=seed).table
        for seed in (1, 1, 2)
    ]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    torch.testing.assert_close(tables[0][:, 0], tables[2][:, 0])  # the first is exact


# ---- what cannot be measured ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depths", "ranks", "temperature", "draft", "words"),
    [
        (4, 3, 0.0, "best", "the drafter unrolls 3"),
        (3, 3, -1.0, "best", "temperature"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    target: Target,
    trace: Trace,
    depths: int,
    ranks: int,
    temperature: float,
    draft: module.DraftKind,
    words: str,
) -> None:
    drafter = disturbed(target, trace)
    with pytest.raises(ValueError, match=words):
        rank_table(drafter, target, [trace], depths, ranks, temperature, draft)


def test_a_mirror_is_a_teacher() -> None:
    assert isinstance(Mirror(), TargetHead)


# ---- with a run ----------------------------------------------------------------------------------


def test_a_run_keeps_its_tables(tmp_path: Path) -> None:
    assert module.read_tables(tmp_path) is None
    of = tiny.target()
    drafter = tiny.drafter("eagle3", of).eval()
    of.set_taps(drafter.taps)
    told = tiny.packed_trace(of)
    module.measure_tables(tmp_path, drafter, of, [told])
    found = module.read_tables(tmp_path)
    assert found is not None
    assert set(found) == {"best@0", "best@1", "drawn@1", "coupled@1"}
    again = rank_table(drafter, of, [told], tiny.DEPTHS, 10, 1.0, "best").table
    assert torch.equal(found["best@1"], again)
    old = json.loads((tmp_path / module.FILE).read_text())
    del old["coupled@1"]  # as runs were left before there was such a table
    (tmp_path / module.FILE).write_text(json.dumps(old))
    assert set(module.read_tables(tmp_path) or ()) == {"best@0", "best@1", "drawn@1"}
    (tmp_path / module.FILE).write_text('{"format": "another"}')
    with pytest.raises(RunError, match="holds no table"):
        module.read_tables(tmp_path)


def test_the_best_tree_suits_how_siblings_come_about() -> None:
    """Drawn siblings come in their order; of favourites any ranks may be taken."""
    table = torch.tensor([[0.5, 0.05, 0.2], [0.5, 0.05, 0.2]], dtype=torch.float64)
    assert from_config.best_tree("best@1", table, 3) == ((0,), (2,), (0, 0))
    assert contiguous(from_config.best_tree("drawn@1", table, 4))
