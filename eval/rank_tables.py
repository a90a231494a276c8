"""Which of the drafter's choices the target takes: the table that static trees are chosen by.

table[d - 1, k] is the chance that the k-th child at depth d is the accepted one, given that its
parent was. It is measured on text that the target wrote itself, by teacher forcing: in such a text
every drafted token before depth d was the right one, so the condition holds at every row. Row t is
judged at depth d by the target's row t + d (the index rule), and it counts where a round could
have begun: x_{t+1}, .., x_{t+1+d} are all answer tokens of one document.

How the k-th child comes about, and when it is accepted:

    best    the drafter's k-th favourite. Accepted iff it is what the target says: at temperature
            0 its favourite, else with the target's warped probability of it.
    drawn   the k-th token drawn without replacement from the drafter's warped row. Each is
            accepted with chance min(1, r / q) if those before it were not; r is the target's row
            at first and the residual after each rejection, q the row without the tokens drawn.

    coupled the k-th favourite of a row with noise. Accepted iff it is the target's favourite with
            the same noise (decode/coupled.py); counted for noise drawn here, one row per place.

The chances of `drawn` are exact given the tokens rejected before. Those tokens are drawn here too,
but from the law that rejection leaves them, max(q - r, 0), so that no coin is tossed.

Shape letters: N rows, K ranks, besides those of `models/drafter.py`; D depths.

Source: positional acceptance, Chen et al. 2024, "Sequoia", section 3, arXiv:2402.12374; accuracies
of ranks, Cai et al. 2024, "Medusa", section 2.3.3, arXiv:2401.10774.
Differs: both per depth, and from text with known answers instead of decoding; chances instead of
counts, which need far less text.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor

from outrider.conf.errors import RunError
from outrider.conf.files import read_json, write_json
from outrider.models.decode import tree_shapes as shapes
from outrider.models.decode.gumbel_coupling import log_exponential
from outrider.models.decode.sampling import draw, warp
from outrider.models.drafter import Drafter, Guess, Trace
from outrider.models.target import Target
from outrider.train.objective import Teacher, chunk_of
from outrider.train.settings import Config

if TYPE_CHECKING:
    from outrider.data.prepare import Material

TINY = 1e-30  # keeps a row whose chance is used up from becoming 0 / 0


FILE, FORMAT = "ranks.json", "outrider-ranks-1"
RANKS = 10  # columns of the tables that go with a run
TOKENS = 8192  # of held-out text they are measured on
TREE = 8  # nodes of the trees that `outrider ranks` shows and writes, for decode.tree
Kind = Literal["best", "drawn", "coupled"]
TABLES: dict[str, tuple[float, Kind]] = {
    "best@0": (0.0, "best"),
    "best@1": (1.0, "best"),
    "drawn@1": (1.0, "drawn"),
    "coupled@1": (1.0, "coupled"),
}


class Ranks(NamedTuple):
    """The table, on the CPU in float64, and how many rows each depth is a mean of."""

    table: Float[Tensor, "D K"]
    rows: Int[Tensor, " D"]


@torch.no_grad()
def rank_table(
    drafter: Drafter,
    target: Teacher,
    traces: Iterable[Trace],
    depths: int,
    ranks: int,
    temperature: float,
    draft: Kind = "best",
    seed: int = 0,
) -> Ranks:
    """Measure the table on text that the target wrote at this temperature.

    Args:
        drafter: in eval mode.
        traces: with the drafter's taps; answers are the target's own words.
        depths: no more than the drafter unrolls.
        ranks: no more than the drafter has tokens.
        seed: of what is drawn: tokens (`draft="drawn"`) or noise (`"coupled"`).

    Raises:
        ValueError: depths or ranks out of range, temperature < 0, drawn siblings or noise at
            temperature 0, or a text without any row at some depth.
    """
    _check(drafter, depths, ranks, temperature, draft)
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(depths, ranks, dtype=torch.float64)
    counted = torch.zeros(depths, dtype=torch.long)
    for trace in traces:
        guesses = guesses_of(drafter, trace, depths)
        for guess, p, logits in pairs(drafter, target, trace, guesses, temperature):
            if draft == "best":
                favourites = drafter.vocab.to_target(logits.topk(ranks).indices)
                chances = p.gather(1, favourites)
            elif draft == "coupled":
                q = warp(logits.double(), temperature)
                chances = winners_met(p, q, drafter.vocab.kept, ranks, generator)
            else:
                q = warp(logits.double(), temperature)
                chances = sibling_chances(p[:, drafter.vocab.kept], q, ranks, generator)
            table[guess.depth - 1] += chances.sum(0).cpu()
            counted[guess.depth - 1] += len(chances)
    if not counted.all():
        raise ValueError(f"rows per depth {counted.tolist()}: the answers are too short")
    return Ranks(table / counted[:, None], counted)


def _check(drafter: Drafter, depths: int, ranks: int, temperature: float, draft: str) -> None:
    if depths < 1:
        raise ValueError(f"depths = {depths}: use at least 1")
    if not 1 <= ranks <= len(drafter.vocab):
        raise ValueError(f"ranks = {ranks}: the drafter has {len(drafter.vocab)} tokens to rank")
    if draft != "best" and temperature == 0:
        raise ValueError("temperature = 0: nothing is drawn there, use draft = 'best'")


def guesses_of(drafter: Drafter, trace: Trace, depths: int) -> list[Guess]:
    """Of depths 1, 2, ..; what a changed target says itself (depth 0) is left out."""
    found: list[Guess] = []
    for guess in drafter.unroll(trace):
        if guess.depth:
            found.append(guess)
        if len(found) == depths:
            return found
    raise ValueError(f"depths = {depths}: the drafter unrolls {len(found)}")


def pairs(
    drafter: Drafter,
    target: Teacher,
    trace: Trace,
    guesses: list[Guess],
    temperature: float,
) -> Iterator[tuple[Guess, Float[Tensor, "N V"], Float[Tensor, "N Vd"]]]:
    """The target's warped rows in float64 beside the drafter's logits, a chunk at a time.

    A chunk of target rows judges the guesses of all depths, so the target's head runs once.
    """
    last = trace.last.flatten(0, 1)
    judges = [_judges(trace, guess.depth) for guess in guesses]
    rows = torch.stack(judges).any(0).nonzero().flatten()
    for part in rows.split(max(1, chunk_of(rows.device) // target.vocab)):
        p = warp(target.logits(last[part]).double(), temperature)
        for guess, judge in zip(guesses, judges, strict=True):
            ours = judge[part]
            states = guess.hidden.flatten(0, 1)[part[ours] - guess.depth]
            if len(states):
                yield guess, p[ours], drafter.heads([states], [guess.depth])


def _judges(trace: Trace, depth: int) -> Bool[Tensor, " BT"]:
    """Which rows of the target judge a guess of this depth.

    x_2 x_3 x_4 x_5 an answer: rounds begin at rows 1 and 2 for depth 2 (their roots are x_2 and
    x_3), and rows 3 and 4 judge them.
    """
    begins = torch.stack([trace.counts(d) for d in range(depth + 1)]).all(0).flatten()
    return begins.roll(depth)  # no row counts within `depth` of the end, so none comes round


def sibling_chances(
    p: Float[Tensor, "N Vd"], q: Float[Tensor, "N Vd"], ranks: int, generator: torch.Generator
) -> Float[Tensor, "N K"]:
    """Chance that the k-th token drawn without replacement from q is the accepted one.

    The first column is exact; column k is a mean over draws of the k tokens before it. A row whose
    q has fewer tokens than ranks drafts no more, and the chance is 0 from there on.

    Args:
        p: the target's, in float64; what a row lacks of 1 lies outside the draft vocabulary, and
            stays in the residual.
        q: the drafter's, in float64; rows sum to 1.
    """
    alive = torch.ones_like(p[:, 0])  # chance that all siblings so far were rejected
    chances = []
    for _ in range(ranks):
        accept = torch.minimum(p, q).sum(-1)
        chances.append(alive * accept)
        alive = alive * (1 - accept).clamp(min=0)
        rejected = (q - p).clamp(min=0)
        rejected[rejected.sum(-1) == 0] = 1.0  # none can be: the row is done, draw any
        token = draw(rejected, generator).to(q.device)
        p = (p - q).clamp(min=0) / (1 - accept).clamp(min=TINY)[:, None]
        q = q.scatter(1, token[:, None], 0.0)
        q = q / q.sum(-1, keepdim=True).clamp(min=TINY)
    return torch.stack(chances, dim=1)


def winners_met(
    p: Float[Tensor, "N V"],
    q: Float[Tensor, "N Vd"],
    kept: Int[Tensor, " Vd"],
    ranks: int,
    generator: torch.Generator,
) -> Float[Tensor, "N K"]:
    """1 where the target's winner is the drafter's k-th, one noise for both; else 0.

    Args:
        kept: the draft vocabulary's ids in the target's.
    """
    noise = log_exponential(torch.rand(p.shape, dtype=p.dtype, generator=generator)).to(p.device)
    said = (p.log() - noise).argmax(1)
    guesses = kept[(q.log() - noise[:, kept]).topk(ranks).indices]
    return (guesses == said[:, None]).double()


# ---- with a run ----------------------------------------------------------------------------------


def record(folder: Path, drafter: Drafter, target: Teacher, traces: Sequence[Trace]) -> None:
    """Measure a run's tables and write them beside its drafter.

    Args:
        folder: of the run.
        drafter: in eval mode; measured at all depths it trained.
    """
    depths = int(drafter.cfg.depths)  # type: ignore[union-attr, arg-type]
    ranks = min(RANKS, len(drafter.vocab))
    content: dict[str, Any] = {"format": FORMAT}
    for name, (temperature, draft) in TABLES.items():
        found = rank_table(drafter, target, traces, depths, ranks, temperature, draft)
        content[name] = found.table.tolist()
        content["rows"] = found.rows.tolist()
    write_json(folder / FILE, content)


def read_tables(folder: Path) -> dict[str, Tensor] | None:
    """The tables of a run; None where they were not measured.

    Raises:
        RunError: the file is not what `record` writes.
    """
    if not (folder / FILE).is_file():
        return None
    fix = f"Delete {folder / FILE} and run: outrider ranks run.dir={folder}"
    content = read_json(folder / FILE, fix)
    tables = {}
    for name in TABLES:
        if name == "coupled@1" and name not in content:  # written before there was one
            continue
        table = torch.tensor(content.get(name, []), dtype=torch.float64)
        if content.get("format") != FORMAT or table.ndim != 2:
            raise RunError(f"{folder / FILE} holds no table {name}.", fix)
        tables[name] = table
    return tables


def ranks(config: Config) -> int:
    """The verb: measure the tables of a finished run on its held-out text, and show them."""
    from outrider.data.prepare import material
    from outrider.models.formats import native
    from outrider.models.load import load
    from outrider.train import distributed as start

    start.use_cores()
    console, folder = Console(), Path(config.run.dir)
    loaded = load(config.target, start.device())
    drafter, _ = native.load(folder / "drafter", loaded.target)
    made = material(config, loaded, drafter.taps, console, start.rank())
    record_held(folder, drafter, loaded.target, made, config.data.max_length)
    tables = read_tables(folder) or {}
    for name, table in tables.items():
        console.print(picture(name, table))
        best = best_tree(name, table, TREE)
        shapes.write(best, folder / f"tree-{name}.json")
        console.print(
            f"its best tree of {TREE} nodes, {shapes.expected(best, table):.2f} tokens a round:"
        )
        console.print(shapes.picture(best), highlight=False)
    console.print(f"written: {folder / FILE}, {folder}/tree-*.json", highlight=False)
    return 0


def best_tree(name: str, table: Float[Tensor, "D K"], nodes: int) -> shapes.Paths:
    """The shape with the most expected tokens, for favourites or for drawn siblings."""
    if name.startswith("drawn"):
        return shapes.sequoia(table, nodes, len(table))[0]
    return shapes.best_first(table, nodes)


def record_held(
    folder: Path, drafter: Drafter, target: Target, made: "Material", length: int
) -> None:
    """`record` on a run's held-out text, as the drafter wants its target."""
    changed = drafter.change(target) is not None
    target.set_taps(drafter.taps)
    rows = max(1, TOKENS // length)
    record(folder, drafter, target, list(made.held_traces(target, rows, not changed)))


def picture(name: str, table: Float[Tensor, "D K"]) -> Table:
    """A table of chances for people."""
    shown = Table(title=f"{name}: chance that the k-th choice is the accepted one")
    shown.add_column("depth")
    for rank in range(table.shape[1]):
        shown.add_column(str(rank + 1), justify="right")
    for depth, row in enumerate(table.tolist(), start=1):
        shown.add_row(str(depth), *(f"{chance:.3f}" for chance in row))
    return shown
