"""How much of the answers a draft vocabulary of each size can propose."""

from outrider.data.prepare import Material
from outrider.launch.doctor.finding import Finding, State

LADDER = (1024, 2048, 4096, 8192, 16384, 32768)
SMALL = (16, 8, 4, 2)  # parts of a vocabulary that is itself below the ladder's middle
ENOUGH = 0.9  # share of held-out answer tokens
WORTHLESS = 0.5  # below it more answers are out of reach than within
BAR = 24  # characters


def curve(made: Material, chosen: int | None) -> list[tuple[int, float]]:
    """(size, share of held-out answer tokens among the most frequent ones of the training part).

    Args:
        chosen: `drafter.draft_vocab_size`, which is one of the sizes.
    """
    whole = len(made.counts)
    ladder = LADDER if whole > 4 * LADDER[0] else [whole // part for part in SMALL]
    sizes = {size for size in ladder if 0 < size < whole} | {min(chosen or whole, whole), whole}
    return [(size, made.vocab(size).coverage(made.held_counts)) for size in sorted(sizes)]


def coverage(made: Material, chosen: int | None, brief: bool = False) -> Finding:
    """The curve, with the size of this run marked.

    Args:
        brief: that size alone.
    """
    whole = len(made.counts)
    size = min(chosen or whole, whole)
    points = [(size, made.vocab(size).coverage(made.held_counts))] if brief else curve(made, chosen)
    share = dict(points)[size]
    facts = {"size": size, "of": whole, "share": share, "curve": [list(point) for point in points]}
    said = f"{size:,} of {whole:,} tokens propose {share:.2%} of the held-out answer tokens"
    if not brief:
        said = "\n".join([said, *(_line(n, part, n == size) for n, part in points)])
    if share >= ENOUGH:
        return Finding("vocabulary", "ok", said, facts)
    state: State = "wrong" if share < WORTHLESS else "note"
    fix = f"It misses {1 - share:.1%} of the answer tokens: raise drafter.draft_vocab_size."
    return Finding("vocabulary", state, said, facts, fix)


def _line(size: int, share: float, chosen: bool) -> str:
    bar = "#" * round(BAR * share)
    return f"{size:>9,}  {bar:<{BAR}}  {share:7.2%}{'  <- this run' if chosen else ''}"
