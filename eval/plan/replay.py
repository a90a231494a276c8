"""Acceptance of static trees, replayed on a finished text.

At every position where a round could begin, the text's next tokens have ranks among the drafter's
tokens, most probable first: the rank path 0 0 2 is the top-1 token twice, and then the third. A
tree accepts the longest prefix of the rank path that it has nodes for; the target adds one token,
and the next round begins after it.

    rank paths          0 0 2    0 2 .    2 . .    . 0 0    0 0 .      .: beyond the ranks
    chain of two        2 accepted                 0        2          tau = (3 + 1 + 3) / 3

The mean over all positions differs from tau: where drafts are good, rounds are long, so more
rounds begin where drafts are bad. Above temperature 0 the replay holds for the rule `match`: the
text was drawn from the target, and a draft token is accepted if it is the token drawn.
"""

from collections.abc import Iterator, Sequence

import torch

from outrider.eval.rank_tables import guesses_to_depth
from outrider.models.decode.tree_shapes import Paths
from outrider.models.drafting.drafter import Drafter
from outrider.models.interface import Trace
from outrider.train.teacher import max_logits

RankPath = tuple[int | None, ...]  # rank per depth, None beyond the ranks; ends with the answer


@torch.no_grad()
def rank_paths(drafter: Drafter, trace: Trace, depths: int, ranks: int) -> list[RankPath]:
    """Return the rank paths of an answer, in the order of its tokens.

    Args:
        drafter: in eval mode.
        trace: of one document, with the drafter's taps; the answer is the target's own.
    """
    begins = trace.supervised_mask(0)[0].nonzero().flatten()  # rows before the answer's tokens
    last = len(begins) - 1
    rank_rows = torch.full((last + 1, depths), ranks)
    for guess in guesses_to_depth(drafter, trace, depths):
        positions = torch.arange(max(0, last + 1 - guess.depth))
        for chunk in positions.split(max(1, max_logits(begins.device) // len(drafter.vocab))):
            rows = begins[chunk]
            logits = drafter.heads_by_depth([guess.states(rows)], [guess.depth])
            ranked = drafter.vocab.to_target(logits.topk(ranks).indices)
            same = ranked == trace.next_ids[0, rows + guess.depth, None]
            rank = torch.where(same.any(1), same.int().argmax(1), ranks)
            rank_rows[chunk, guess.depth - 1] = rank.cpu()
    return [
        tuple(rank if rank < ranks else None for rank in path[: last - row])
        for row, path in enumerate(rank_rows.tolist())
    ]


def tau(answers: Sequence[Sequence[RankPath]], paths: Paths) -> float:
    """Return tokens per round of this tree; 1 is plain decoding.

    The last round of an answer is cut short by its end and counts only if it is the only one.
    """
    rounds = (complete_rounds(list(accepted_per_round(answer, paths))) for answer in answers)
    accepted = [count for answer in rounds for count in answer]
    return 1 + sum(accepted) / max(1, len(accepted))


def accepted_per_round(answer: Sequence[RankPath], paths: Paths) -> Iterator[int]:
    """Yield the number of accepted draft tokens of every round of one answer."""
    nodes, position = set(paths), 0
    while position < len(answer) - 1:
        ranks, accepted = answer[position], 0
        while accepted < len(ranks) and ranks[: accepted + 1] in nodes:
            accepted += 1
        yield accepted
        position += accepted + 1


def complete_rounds(accepted: Sequence[int]) -> Sequence[int]:
    """Return the rounds without the last one, which the end of the answer cuts short."""
    return accepted[:-1] if len(accepted) > 1 else accepted
