"""Rank tables: worked examples, loops over rows, and the verification rule."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.eval import rank_tables as module
from outrider.eval.rank_tables import Ranks, rank_table, sibling_acceptance
from outrider.models import drafters
from outrider.models.decode import from_config
from outrider.models.decode.sampling import RandomSource
from outrider.models.decode.tree_shapes import contiguous
from outrider.models.drafting.drafter import Drafter
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import Trace
from outrider.models.target.target import Target
from outrider.train.settings import parse
from outrider.train.teacher import TargetHead
from tests import tiny
from tests.enumeration import Context, Law, coupled_acceptance, distance, enumerate_law
from tests.tiny import FixedDrafter


@dataclass(frozen=True)
class LogitsTarget:
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


def ranked(*order: int, size: int = 4) -> Tensor:
    """Logits that rank the tokens in this order, one nat apart."""
    logits = -10.0 - torch.arange(size)
    logits[list(order)] = -torch.arange(len(order), dtype=torch.float32)
    return logits


def noisy_drafter(target: Target, trace: Trace, size: int = tiny.DRAFTED) -> FixedDrafter:
    """Sometimes correct: the target's own states with noise that grows with depth."""
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


def test_rank_table_worked_example() -> None:
    """x_2..x_5 is the answer, so the roots are x_2, x_3, x_4, at rows 1, 2, 3.

    Depth 1: rows 1, 2, 3 guess x_3, x_4, x_5, verified by the target's rows 2, 3, 4.
    Depth 2: rows 1, 2 guess x_4, x_5, verified by rows 3, 4. Other rows are unused.
    """
    last = torch.stack([ranked(3, 2, 1, 0)] * 2 + [ranked(t) for t in (0, 1, 2)] + [ranked(3)])
    unused = ranked(3, 2, 1, 0)
    first = torch.stack([unused, ranked(0, 1), ranked(0, 1), ranked(0, 1, 2, 3), unused, unused])
    second = torch.stack([unused, ranked(0, 1), ranked(2, 0), unused, unused, unused])
    drafter = FixedDrafter([first[None], second[None]], DraftVocab.identity(4))
    result = rank_table(drafter, LogitsTarget(), [one_row(last, [2, 3, 4, 5])], 2, 3, 0.0)
    assert result.rows.tolist() == [3, 2]
    torch.testing.assert_close(
        result.table, torch.tensor([[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]]).double() / 3
    )
    # the first of two tokens one nat apart has 0.73; that of four has 0.64
    assert result.bins[0].nonzero().tolist() == [[6, 0], [7, 0], [7, 1]]
    assert result.bins[:, 6:8].tolist() == [[[1, 0], [2, 1]], [[0, 0], [2, 1]]]


def test_one_token_answer_raises() -> None:
    """The prefill emits the only answer token, so there is no round."""
    drafter = FixedDrafter([torch.zeros(1, 6, 4)], DraftVocab.identity(4))
    with pytest.raises(ValueError, match=r"rows per depth \[0\]: the answers are too short"):
        rank_table(drafter, LogitsTarget(), [one_row(torch.zeros(6, 4), [3])], 1, 2, 0.0)


def test_tokens_outside_the_draft_vocabulary_reduce_acceptance() -> None:
    """The target has 0 or 1 with probability 1/2 each; the draft vocabulary is 1, 2 and 3."""
    last = torch.stack([torch.tensor([5.0, 5.0, -60.0, -60.0])] * 5)
    states = torch.stack([torch.tensor([1.0, 2.0, 0.0])] * 5)  # of tokens 1, 2, 3: token 2 is first
    drafter = FixedDrafter([states[None]], DraftVocab(torch.tensor([1, 2, 3]), 4))
    answered = one_row(last, [1, 2, 3, 4])
    best = rank_table(drafter, LogitsTarget(), [answered], 1, 3, 1.0)
    torch.testing.assert_close(best.table, torch.tensor([[0.0, 0.5, 0.0]]).double())
    drawn = rank_table(drafter, LogitsTarget(), [answered] * 400, 1, 3, 1.0, "drawn")
    assert drawn.table.sum() == pytest.approx(0.5, abs=1e-12)  # all three are drawn
    q = torch.tensor([1.0, 2, 0]).softmax(0)
    assert drawn.table[0, 0] == pytest.approx(float(q[0]))
    coupled = rank_table(drafter, LogitsTarget(), [answered] * 4000, 1, 3, 1.0, "coupled").table
    p = torch.tensor([0.5, 0.5, 0.0, 0.0])
    expected_rate = float(coupled_acceptance(p, torch.cat([torch.zeros(1), q])))
    assert coupled[0, 0] == pytest.approx(expected_rate, abs=0.02)
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


def rank_table_by_loops(
    drafter: Drafter, target: Target, trace: Trace, ranks: int, temperature: float
) -> tuple[list[list[float]], list[int], Tensor]:
    """Row by row: the target's row t + d verifies the k-th token of row t at depth d."""
    guesses = {
        guess.depth: tiny.spread(guess, trace) for guess in drafter.unroll(trace) if guess.depth
    }
    table, rows = [[0.0] * ranks for _ in range(3)], [0, 0, 0]
    bins = torch.zeros(3, 10, 2, dtype=torch.float64)
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
        row, first = logits[None].log_softmax(-1), table[d - 1][0] - float(bins[d - 1, :, 1].sum())
        confidence = float(drafter.log_confidence(row, d, guesses[d][b, t][None]).exp())
        bins[d - 1, min(9, int(confidence * 10))] += torch.tensor([1.0, first])
    return [[x / n for x in row] for row, n in zip(table, rows, strict=True)], rows, bins


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("name", drafters.trained_names())
def test_rank_table_equals_loops_over_rows(name: str, temperature: float) -> None:
    """Every drafter, with a draft vocabulary with gaps, on packed documents.

    Answers of L tokens in a row (L = 3 3 | 3 1 | 3 || 3 8 | 3 4) have L - d rows at depth d.
    """
    model = tiny.target()
    drafter = tiny.drafter(name, model).eval()
    model.set_taps(drafter.taps)
    answered = tiny.packed_trace(model)
    result = rank_table(drafter, model, [answered], 3, 36, temperature)
    with torch.no_grad():
        table, rows, bins = rank_table_by_loops(drafter, model, answered, 36, temperature)
    assert result.rows.tolist() == rows == [22, 14, 6]
    torch.testing.assert_close(result.table, torch.tensor(table).double(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(result.bins, bins, atol=1e-6, rtol=1e-5)
    assert (result.table.sum(-1) > 0).all()
    assert (result.table.sum(-1) < 1).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rank_table_weights_traces_by_rows(
    target: Target, trace: Trace, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and batches have no effect except their numbers of rows."""
    parts = [tiny.slice_trace(trace, slice(i, i + 1)) for i in (0, 1)]
    whole = noisy_drafter(target, trace)
    each = [FixedDrafter([s[i : i + 1] for s in whole.states], whole.vocab, target) for i in (0, 1)]
    result = rank_table(whole, target, [trace], 2, 5, temperature)
    monkeypatch.setattr(module, "max_logits", lambda device: 3 * target.vocab_size)
    again = rank_table(whole, target, [trace, trace], 2, 5, temperature)
    alone = [
        rank_table(g, target, [p], 2, 5, temperature) for g, p in zip(each, parts, strict=True)
    ]
    torch.testing.assert_close(again.table, result.table)
    assert again.rows.tolist() == (2 * result.rows).tolist()
    torch.testing.assert_close(again.bins, 2 * result.bins)
    torch.testing.assert_close(alone[0].bins + alone[1].bins, result.bins)
    rows = alone[0].rows + alone[1].rows
    mean = sum(one.table * one.rows[:, None] for one in alone) / rows[:, None]
    assert rows.tolist() == result.rows.tolist()
    torch.testing.assert_close(mean, result.table)
    assert not torch.allclose(alone[0].table, result.table, atol=1e-3)


@pytest.mark.parametrize("draft", ["best", "drawn", "coupled"])
def test_rows_outside_rounds_are_ignored(
    target: Target, trace: Trace, draft: module.DraftKind
) -> None:
    """Neither draft rows that do not count nor target rows that verify none have an effect."""
    drafter = noisy_drafter(target, trace)
    before = rank_table(drafter, target, [trace], 3, 5, 1.0, draft)
    drafted_rows, teacher_rows = (
        [torch.zeros_like(trace.answer) for _ in range(3)],
        torch.zeros_like(trace.answer),
    )
    for b, t, d in begins(trace):
        drafted_rows[d - 1][b, t] = teacher_rows[b, t + d] = True
    for state, used in zip(drafter.states, drafted_rows, strict=True):
        state[~used] = torch.nan
    last = torch.where(teacher_rows[..., None], trace.last, torch.nan)
    answered = Trace(**{**vars(trace), "last": last})
    after = rank_table(drafter, target, [answered], 3, 5, 1.0, draft)
    torch.testing.assert_close(after.table, before.table)
    torch.testing.assert_close(after.bins, before.bins)


@torch.no_grad()
def test_overlaps_are_counted_by_the_confidence_in_their_row(target: Target, trace: Trace) -> None:
    flat = noisy_drafter(target, trace)
    drafter = FixedDrafter([20 * states for states in flat.states], flat.vocab, target)
    ids, expected = drafter.vocab.target_ids, torch.zeros(3, 10, 2, dtype=torch.float64)
    for b, t, d in begins(trace):
        q = drafter.heads_by_depth([drafter.states[d - 1][b, t][None]], [d])[0].double().softmax(-1)
        p = target.logits(trace.last[b, t + d]).double().softmax(-1)[ids]
        overlap = sum(min(float(x), float(y)) for x, y in zip(p, q, strict=True))
        expected[d - 1, min(9, int(q.max() * 10))] += torch.tensor([1.0, overlap])
    result = rank_table(drafter, target, [trace], 3, 5, 1.0, "drawn")
    assert (expected[..., 0] > 0).sum() > 5
    torch.testing.assert_close(result.bins, expected, atol=1e-6, rtol=1e-5)


# ---- siblings drawn without replacement ----------------------------------------------------------

ROWS = {  # the target's row, the drafter's
    "alike": ([0.4, 0.3, 0.2, 0.1], [0.25, 0.35, 0.1, 0.3]),
    "apart": ([0.05, 0.1, 0.15, 0.7], [0.6, 0.25, 0.1, 0.05]),
    "blind": ([0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.2, 0.0]),  # never drafts the last token
    "poor": ([0.6, 0.0, 0.3, 0.1], [0.5, 0.5, 0.0, 0.0]),  # has two tokens to draft
}


def sibling_rule(
    p: Tensor, q: Tensor, ranks: int, rng: RandomSource, renormalise: bool = True
) -> Context:
    """Draw all siblings, then verify them in order; return (accepted rank or -1, token)."""
    siblings: list[tuple[int, Tensor]] = []
    for _ in range(ranks):
        if q.sum() > 0:
            token = int(rng.draw(q[None, None]))
            siblings.append((token, q))
            q = torch.where(torch.arange(len(q)) == token, 0.0, q)
            q = q / q.sum().clamp(min=1e-300) if renormalise else q
    rest = p
    for rank, (token, row) in enumerate(siblings):
        probability = (rest[token] / row[token]).clamp(max=1.0)
        if bool(rng.flip(probability.view(1, 1))):
            return rank, token
        rest = (rest - row).clamp(min=0)
        rest = rest / rest.sum()
    return -1, int(rng.draw(rest[None, None]))


def law_of_ranks(p: Tensor, q: Tensor, ranks: int, renormalise: bool = True) -> Tensor:
    """Exact distribution of the accepted rank, by enumeration."""
    law = enumerate_law(lambda rng: sibling_rule(p, q, ranks, rng, renormalise))
    shares = [
        sum(probability for (rank, _), probability in law.items() if rank == k)
        for k in range(ranks)
    ]
    return torch.tensor(shares, dtype=torch.float64)


def rows_of(name: str) -> tuple[Tensor, Tensor]:
    p, q = ROWS[name]
    return torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_sibling_rule_is_lossless(name: str) -> None:
    """Emitted tokens have the target's distribution; without renormalising they have not."""
    p, q = rows_of(name)
    plain: Law = {(token,): probability for token, probability in enumerate(p.tolist())}
    for renormalise in (True, False):
        law = enumerate_law(lambda rng: sibling_rule(p, q, 3, rng, renormalise)[1:])  # noqa: B023
        gap = distance(law, plain)
        assert gap < 1e-12 if renormalise else gap > 0.01


@pytest.mark.parametrize("name", ROWS)
def test_sibling_acceptance_equals_enumeration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all draws of rejected tokens is the distribution of the accepted rank."""
    p, q = rows_of(name)

    def run(rng: RandomSource) -> tuple[float, ...]:
        monkeypatch.setattr(module, "draw", lambda rows, _: rng.draw(rows[None])[0])
        return tuple(sibling_acceptance(p[None], q[None], 4, torch.Generator())[0].tolist())

    law = enumerate_law(run)  # type: ignore[arg-type]
    result = sum(
        probability * torch.tensor(row, dtype=torch.float64) for row, probability in law.items()
    )
    assert isinstance(result, Tensor)
    exact, wrong = law_of_ranks(p, q, 4), law_of_ranks(p, q, 4, renormalise=False)
    assert (result - exact).abs().max() < 1e-12
    assert (result - wrong).abs().max() > 0.01
    assert exact[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("name", ROWS)
def test_sibling_acceptance_is_unbiased(name: str) -> None:
    """With a generator instead of enumeration: within four standard errors."""
    p, q = rows_of(name)
    result = sibling_acceptance(p.repeat(4000, 1), q.repeat(4000, 1), 4, seeded(1))
    error = result.std(0) / 4000**0.5
    exact = law_of_ranks(p, q, 4)
    assert ((result.mean(0) - exact).abs() <= 4 * error + 1e-12).all()


def test_sibling_acceptance_worked_example() -> None:
    """After a rejection only the other token remains, which is accepted."""
    p, q = torch.tensor([[0.3, 0.7]]).double(), torch.tensor([[0.8, 0.2]]).double()
    result = sibling_acceptance(p, q, 2, seeded(0))
    torch.testing.assert_close(result, torch.tensor([[0.5, 0.5]]).double())


def test_perfect_drafter_accepts_the_first_sibling() -> None:
    p = torch.tensor([[0.3, 0.7, 0.0], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    result = sibling_acceptance(p, p.clone(), 3, seeded(0))
    torch.testing.assert_close(result, torch.tensor([[1.0, 0.0, 0.0]] * 3).double())


def test_reduced_vocabulary_equals_zero_draft_probability() -> None:
    """Rows without the last token give the same result, draw by draw."""
    p = torch.tensor([0.1, 0.1, 0.35, 0.25, 0.2]).double().repeat(50, 1)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]).double().repeat(50, 1)
    whole = sibling_acceptance(p, q, 3, seeded(4))
    part = sibling_acceptance(p[:, :4], q[:, :4], 3, seeded(4))
    torch.testing.assert_close(part, whole)
    assert whole.std(0)[1:].max() > 0.01  # draws differ


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def monte_carlo_table(
    drafter: FixedDrafter, target: Target, trace: Trace, rounds: int, temperature: float
) -> Ranks:
    """At every row, draw siblings by exponential race, accept or reject, and count ranks."""
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
            probability = (rest.gather(1, token) / q.gather(1, token))[:, 0]
            accepted = alive & (torch.rand(rounds, dtype=torch.float64) < probability)
            table[d - 1, k] += accepted.sum()
            alive &= ~accepted
            rest = (rest - q).clamp(min=0)
            rest, q = rest / rest.sum(-1, keepdim=True), q.scatter(1, token, 0.0)
            q = q / q.sum(-1, keepdim=True)
        rows[d - 1] += rounds
    return Ranks(table / rows[:, None], rows, torch.zeros(3, 10, 2))


def test_drawn_table_equals_monte_carlo(target: Target, trace: Trace) -> None:
    """Within four standard errors of Monte Carlo; the table of top-k tokens is not."""
    drafter, temperature, rounds = noisy_drafter(target, trace), 0.5, 1500
    result = rank_table(drafter, target, [trace] * 300, 3, 4, temperature, "drawn", seed=3)
    with torch.no_grad():
        counted = monte_carlo_table(drafter, target, trace, rounds, temperature)
    each = result.table * (1 - result.table)
    error = (each / counted.rows[:, None] + each / result.rows[:, None]).sqrt()
    gap = (result.table - counted.table).abs()
    assert (gap <= 4 * error).all()
    best = rank_table(drafter, target, [trace], 3, 4, temperature)
    assert ((best.table - counted.table).abs() > 8 * error).sum() > 6


def test_drawn_table_is_deterministic_for_a_seed(target: Target, trace: Trace) -> None:
    drafter = noisy_drafter(target, trace)
    tables = [
        rank_table(drafter, target, [trace], 3, 4, 1.0, "drawn", seed=seed).table
        for seed in (1, 1, 2)
    ]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    torch.testing.assert_close(tables[0][:, 0], tables[2][:, 0])  # the first is exact


# ---- invalid arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depths", "ranks", "temperature", "draft", "words"),
    [
        (4, 3, 0.0, "best", "the drafter unrolls 3"),
        (3, 3, -1.0, "best", "temperature"),
    ],
)
def test_invalid_measurements_raise(
    target: Target,
    trace: Trace,
    depths: int,
    ranks: int,
    temperature: float,
    draft: module.DraftKind,
    words: str,
) -> None:
    drafter = noisy_drafter(target, trace)
    with pytest.raises(ValueError, match=words):
        rank_table(drafter, target, [trace], depths, ranks, temperature, draft)


def test_fake_target_is_a_target_head() -> None:
    assert isinstance(LogitsTarget(), TargetHead)


# ---- with a run ----------------------------------------------------------------------------------


def test_tables_of_a_run_are_written_and_read(tmp_path: Path) -> None:
    assert module.read_tables(tmp_path) is None
    model = tiny.target()
    drafter = tiny.drafter("eagle3", model).eval()
    model.set_taps(drafter.taps)
    answered = tiny.packed_trace(model)
    module.measure_tables(tmp_path, drafter, model, [answered])
    result = module.read_tables(tmp_path)
    assert result is not None
    assert set(result) == {"best@0", "best@1", "drawn@1", "coupled@1"}
    again = rank_table(drafter, model, [answered], tiny.DEPTHS, 10, 1.0, "best").table
    assert torch.equal(result["best@1"].ranks, again)
    assert result.pop("coupled@1").bins is None  # it is judged by rows with noise
    for table in result.values():
        assert table.bins is not None
        rows, accepted = table.bins.sum(1).unbind(-1)
        torch.testing.assert_close(accepted / rows, table.ranks[:, 0])
    content = json.loads((tmp_path / module.FILE).read_text())
    old = {name: part for name, part in content.items() if "confidence" not in name}
    del old["coupled@1"]  # a file of an older version
    (tmp_path / module.FILE).write_text(json.dumps(old))
    before = module.read_tables(tmp_path)
    assert before is not None
    assert set(before) == {"best@0", "best@1", "drawn@1"}
    assert all(table.bins is None for table in before.values())
    for wrong, why in (
        ([[[1.0, 2.0]] * 10] * tiny.DEPTHS, "more is accepted than there are rows"),
        ([[[1.0, 1.0]] * 9] * tiny.DEPTHS, "is not 3 x 10 x 2 numbers"),
        ([[[1.0]]], r"\[0\]\[0\] is \[1.0\], not a list of this length"),
    ):
        bad = json.dumps(content | {"best@0 by confidence": wrong})
        (tmp_path / module.FILE).write_text(bad)
        with pytest.raises(RunError, match=why):
            module.read_tables(tmp_path)
    (tmp_path / module.FILE).write_text('{"format": "another"}')
    with pytest.raises(RunError, match="format is 'another'"):
        module.read_tables(tmp_path)


def test_an_evaluation_begins_with_the_tables_beside_its_drafter(tmp_path: Path) -> None:
    def write(folder: Path, rate: float) -> None:
        folder.mkdir()
        tables = {key: [[rate]] for key in module.TABLES}
        (folder / module.FILE).write_text(json.dumps({"format": module.FORMAT, **tables}))

    write(tmp_path / "run", 0.25)
    words = [f"run.dir={tmp_path / 'run'}"]
    other = [*words, f"eval.drafter={tmp_path / 'other'}"]
    found = [module.tables_for(parse(compose(each))) for each in (words, other)]
    write(tmp_path / "other", 0.75)
    found.append(module.tables_for(parse(compose(other))))
    assert [one and float(one["best@0"].ranks) for one in found] == [0.25, None, 0.75]


def test_best_tree_depends_on_the_kind_of_siblings() -> None:
    """Drawn siblings have contiguous ranks; top-k siblings may have any."""
    table = torch.tensor([[0.5, 0.05, 0.2], [0.5, 0.05, 0.2]], dtype=torch.float64)
    assert from_config.best_tree("best@1", table, 3) == ((0,), (2,), (0, 0))
    assert contiguous(from_config.best_tree("drawn@1", table, 4))
