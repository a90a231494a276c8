"""What a checkpoint will bring, from text alone: the rounds that decoding this text would take.

Given the text that the target wrote, whether a drafted token is accepted is a coin of its own at
every row and depth: greedy, whether the drafter's favourite is the target's; sampling, a coin of
chance min(1, q(x) / p(x)), for that is P(x was drafted and accepted | x was emitted). A round that
begins at row t and accepts k tokens ends at row t + k + 1. So the rounds walk down the text as a
Markov chain, and its expected number of steps is a sum over rows, without decoding anything.

    tau = tokens emitted by the rounds / rounds

It is exact for a chain as deep as the unroll, on text written by the target at the temperature in
question (`tests/test_acceptance_forecast.py` proves it by enumeration). A mean of acceptances over rows is
not: rounds begin more often where the text is hard.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.models.drafter import Trace


class Answer(NamedTuple):
    """An answer without its first token, which the prefill emits: `rows` rounds at most."""

    batch: int
    first: int  # the row of the first round
    rows: int


def answers(trace: Trace) -> list[Answer]:
    """The answers of a batch, each a run of answer tokens of one document.

    Answer x_3 x_4 x_5 of one document -> Answer(batch=0, first=2, rows=2): after x_3, two are left.
    """
    found, marked = [], (trace.answer & (trace.document >= 0)).tolist()
    for b, (answer, document) in enumerate(zip(marked, trace.document.tolist(), strict=True)):
        start = None
        for t in range(len(answer) + 1):
            inside = t < len(answer) and answer[t]
            if start is not None and not (inside and document[t] == document[start]):
                opens = start == 0 or document[start - 1] != document[start]
                first = start + opens  # nobody reads anything in front of a document's first token
                found.append(Answer(b, first - 1, t - 1 - first))
                start = None
            if inside and start is None:
                start = t
    return [answer for answer in found if answer.rows > 0]


def rounds(chances: Float[Tensor, "D B T"], trace: Trace) -> tuple[float, float]:
    """Tokens that the rounds emit, and how many rounds are expected.

    Args:
        chances: of acceptance at depth d, row t, given that the shallower ones were accepted.
    """
    found = answers(trace)
    if not found:
        return 0.0, 0.0
    depths, longest = len(chances), max(answer.rows for answer in found)
    lanes = torch.zeros(longest, depths, len(found), dtype=torch.float64)
    for lane, (batch, first, count) in enumerate(found):
        lanes[:count, :, lane] = chances[:, batch, first : first + count].T.double().cpu()
    rows = torch.tensor([answer.rows for answer in found])
    visits = torch.zeros(longest + depths + 1, len(found), dtype=torch.float64)
    visits[0] = 1.0
    total = 0.0
    for i in range(longest):
        alive = visits[i] * (i < rows)
        total += float(alive.sum())
        for depth in range(depths):
            accepted = alive * lanes[i, depth]
            visits[i + depth + 1] += alive - accepted  # the target's own token took its place
            alive = accepted
        visits[i + depths + 1] += alive  # all accepted, and one token more
    return float(rows.sum()), total
