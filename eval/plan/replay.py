"""What a static tree would have kept of a text that is there, round after round.

At every place where a round could begin, the ranks that the text's next tokens have among the
drafter's favourites are a way: 0 0 2 is the favourite twice, and then the third choice. A tree
keeps as much of a way as it has nodes for, the text says one token more, and the next round begins
behind it.

    the text's ways     0 0 2    0 2 .    2 . .    . 0 0    0 0 .      .: not among the ranks
    the chain of two    2 kept                     0 kept   2 kept     tau = (3 + 1 + 3) / 3

A mean over all places is not that: where guesses are good, rounds are long, so that of all rounds
more begin where they are bad. Above temperature 0 it is the same, by `match`: the text was drawn
from the target, and a guess is kept if it is what was drawn.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from outrider.eval.rank_tables import guesses_of
from outrider.models.decode.tree_shapes import Paths
from outrider.models.drafter import Drafter, Trace
from outrider.train.objective import chunk_of

Way = tuple[int | None, ...]  # rank per depth, None beyond those known; ends where the answer does


@torch.no_grad()
def ways(drafter: Drafter, traces: Iterable[Trace], depths: int, ranks: int) -> list[list[Way]]:
    """Of every answer, in the order of its tokens.

    Args:
        drafter: in eval mode.
        traces: of one document each, with the drafter's taps; the answers are the target's own.
        depths: no more than the drafter unrolls.
        ranks: no more than the drafter has tokens.
    """
    return [_of_answer(drafter, trace, depths, ranks) for trace in traces]


def _of_answer(drafter: Drafter, trace: Trace, depths: int, ranks: int) -> list[Way]:
    begins = trace.counts(0)[0].nonzero().flatten()  # rows in front of the answer's tokens
    last = len(begins) - 1
    found = torch.full((last + 1, depths), ranks)
    for guess in guesses_of(drafter, trace, depths):
        places = torch.arange(max(0, last + 1 - guess.depth))
        for some in places.split(max(1, chunk_of(begins.device) // len(drafter.vocab))):
            rows = begins[some]
            logits = drafter.heads([guess.hidden[0, rows]], [guess.depth])
            favourites = drafter.vocab.to_target(logits.topk(ranks).indices)
            same = favourites == trace.next_ids[0, rows + guess.depth, None]
            rank = torch.where(same.any(1), same.int().argmax(1), ranks)
            found[some, guess.depth - 1] = rank.cpu()
    return [
        tuple(rank if rank < ranks else None for rank in way[: last - place])
        for place, way in enumerate(found.tolist())
    ]


def tau(answers: Sequence[Sequence[Way]], paths: Paths) -> float:
    """Tokens per round of this tree; 1 is plain decoding.

    The last round of an answer, which its end cuts short, counts only where there is no other.
    """
    kept = [count for ways in answers for count in whole(list(rounds(ways, paths)))]
    return 1 + sum(kept) / max(1, len(kept))


def rounds(ways: Sequence[Way], paths: Paths) -> Iterator[int]:
    """Guesses kept in every round of one answer."""
    nodes, place = set(paths), 0
    while place < len(ways) - 1:
        way, kept = ways[place], 0
        while kept < len(way) and way[: kept + 1] in nodes:
            kept += 1
        yield kept
        place += kept + 1


def whole(kept: Sequence[int]) -> Sequence[int]:
    """Without the last round, which the end of the answer has cut."""
    return kept[:-1] if len(kept) > 1 else kept
