"""Check of the draft vocabulary: the share of answer tokens that each size covers."""

from outrider.data.training_data import TrainingData
from outrider.launch.doctor.finding import Finding, State

LADDER = (1024, 2048, 4096, 8192, 16384, 32768)
SMALL = (16, 8, 4, 2)  # divisors of a vocabulary too small for LADDER
ENOUGH = 0.9  # share of held-out answer tokens
USELESS = 0.5  # below it most answer tokens cannot be drafted
BAR = 24  # characters


def curve(data: TrainingData, chosen: int | None) -> list[tuple[int, float]]:
    """Return (size, share of held-out answer tokens covered by the most frequent training tokens).

    Args:
        chosen: `drafter.draft_vocab_size`, one of the sizes.
    """
    whole = len(data.counts)
    ladder = LADDER if whole > 4 * LADDER[0] else [whole // part for part in SMALL]
    sizes = {size for size in ladder if 0 < size < whole} | {min(chosen or whole, whole), whole}
    return [(size, data.vocab(size).coverage(data.held_counts)) for size in sorted(sizes)]


def coverage(data: TrainingData, chosen: int | None, brief: bool = False) -> Finding:
    """Check the coverage of this run's size, and show the curve.

    Args:
        brief: leave the curve out.
    """
    whole = len(data.counts)
    size = min(chosen or whole, whole)
    points = [(size, data.vocab(size).coverage(data.held_counts))] if brief else curve(data, chosen)
    share = dict(points)[size]
    facts = {"size": size, "of": whole, "share": share, "curve": [list(point) for point in points]}
    message = f"{size:,} of {whole:,} tokens cover {share:.2%} of the held-out answer tokens"
    if not brief:
        message = "\n".join([message, *(_line(n, part, n == size) for n, part in points)])
    if share >= ENOUGH:
        return Finding("vocabulary", "ok", message, facts)
    state: State = "wrong" if share < USELESS else "note"
    fix = f"{1 - share:.1%} of the answer tokens cannot be drafted: raise drafter.draft_vocab_size."
    return Finding("vocabulary", state, message, facts, fix)


def _line(size: int, share: float, chosen: bool) -> str:
    bar = "#" * round(BAR * share)
    return f"{size:>9,}  {bar:<{BAR}}  {share:7.2%}{'  <- this run' if chosen else ''}"
