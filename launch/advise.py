"""`outrider advise`: what more training text would bring, from pilot runs on a little of it.

    outrider advise drafter=eagle3 target=tiny advise.shares=[0.01,0.02,0.04]

A pilot is a run of the configured drafter on a part of the training conversations, measured on the
same held-out text as all others, with the draft vocabulary that its own text gives. All pilots take
the same number of steps, not the same number of passes: the question is what text brings at a
price that is already decided, and with equal passes the smallest pilot would take a handful of
steps, most of them warm-up, so that the law would be one of training time. A pilot that has little
text passes over it often and is judged by its best held-out evaluation, as a run is.

What is foreseen therefore holds for runs of `advise.steps`; longer ones get more out of much text
than out of little. Finished pilots are kept in `<run.dir>/advise` and found again.
"""

import io
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.conf.errors import ConfigError
from outrider.conf.files import claimed, read_json, write, write_json
from outrider.data.pack import pack, split
from outrider.data.prepare import Material, material
from outrider.data.tokenise import Document
from outrider.launch.scaling_law import FAR, Foreseen, Point, bends, foresee, laws
from outrider.models import drafters, load
from outrider.models.load import Loaded
from outrider.train import distributed as start
from outrider.train.checkpoint import FIX
from outrider.train.doctoring import AdviseConfig
from outrider.train.settings import Config, WandbConfig

FORMAT = "outrider-advice-1"
LOOKS = 6  # held-out evaluations of a pilot
LITTLE = 0.02  # tokens per round that a doubling should bring to be worth the trouble


@dataclass(frozen=True)
class Pilot:
    """A part of the training text, and what a run on it has reached.

    Attributes:
        tokens: of its conversations.
        accept_length: held out, at its best step; nan before it has run.
    """

    share: float
    repeat: int
    conversations: int
    tokens: int
    accept_length: float = float("nan")
    best_step: int = -1


def advise(config: Config, wanted: AdviseConfig) -> int:
    """The verb: pilots, a law, a picture.

    Raises:
        ConfigError: a share is less than one step's rows.
    """
    start.check(config.launch)
    start.use_cores()
    if config.target.place in ("sharded", "tensor"):
        start.join(config.launch)
    main, console = start.rank() == 0, Console(quiet=start.rank() > 0)
    loaded = load.load(config.target, start.device())
    taps = drafters.taps_of(config.drafter, loaded.target.depth)
    made = material(config, loaded, taps, console, start.rank())
    train, held = split(made.documents, config.data.holdout)
    parts = choose(train, config, wanted)
    folder = Path(config.run.dir) / "advise"
    pilots = []
    with claimed(folder) if main else nullcontext():
        for pilot, documents in parts:
            console.print(_label(pilot), highlight=False)
            part = made.part([*documents, *held], config.data)
            done = run_pilot(config, wanted, loaded, part, pilot)
            if done is None:
                return 130
            pilots.append(done)
        whole = sum(len(document.ids) for document in train)
        if main:
            tell(console, folder, config, wanted, pilots, whole)
    start.leave()
    return 0


def _label(pilot: Pilot) -> str:
    text = f"{pilot.conversations:,} conversations, {pilot.tokens:,} tokens"
    return f"pilot on {pilot.share:.3%}: {text}"


def choose(
    train: Sequence[Document], config: Config, wanted: AdviseConfig
) -> list[tuple[Pilot, list[Document]]]:
    """The pilots' conversations; in one repeat each is a part of the next larger.

    Raises:
        ConfigError: a share is less than one step's rows.
    """
    whole = sum(len(document.ids) for document in train)
    needed = config.train.batch_tokens // config.data.max_length
    found = []
    for repeat in range(wanted.repeats):
        order = random.Random(config.run.seed + repeat).sample(list(train), len(train))
        for share in sorted(set(wanted.shares)):
            part = first_of(order, share * whole)
            there = len(pack(part, config.data.max_length))
            if there < needed:
                least = share * needed / max(1, there)
                raise ConfigError(
                    "advise.shares", share,
                    f"That is {len(part)} conversations in {there} rows; a step takes {needed}.",
                    f"Use shares from about {least:.2g} on, more text, or less train.batch_tokens.",
                )  # fmt: skip
            tokens = sum(len(document.ids) for document in part)
            found.append((Pilot(share, repeat, len(part), tokens), part))
    return found


def first_of(order: Sequence[Document], tokens: int | float) -> list[Document]:
    """The first documents that have so many tokens together; at least one."""
    part, count = list[Document](), 0
    for document in order:
        if part and count >= tokens:
            break
        part.append(document)
        count += len(document.ids)
    return part


def run_pilot(
    config: Config, wanted: AdviseConfig, loaded: Loaded, made: Material, pilot: Pilot
) -> Pilot | None:
    """Train and read what it has reached; None after Ctrl-C."""
    from outrider.train.loop import fit

    name = f"share-{pilot.share:g}-{pilot.repeat}"
    folder = Path(config.run.dir) / "advise" / f"steps-{wanted.steps}" / name
    train = replace(
        config.train, max_steps=wanted.steps, max_minutes=None, quick_eval=False, resume="auto",
        eval_every=max(1, wanted.steps // LOOKS), save_every=wanted.steps, keep_last=1,
        keep_every=None, tensorboard=False, wandb=WandbConfig(),
    )  # fmt: skip
    run = replace(config.run, dir=str(folder), seed=config.run.seed + pilot.repeat)
    if fit(replace(config, run=run, train=train), loaded, made, Console(quiet=True)) is None:
        return None
    account = read_json(folder / "training.json", FIX)
    length = float(account["held_out"]["accept_length"])
    return replace(pilot, accept_length=length, best_step=int(account["best_step"]))


def tell(
    console: Console, folder: Path, config: Config, wanted: AdviseConfig,
    pilots: Sequence[Pilot], whole: int,
) -> None:  # fmt: skip
    """Table, sentences, `advise.json`, `advise.png`."""
    points: list[Point] = [(float(pilot.tokens), pilot.accept_length) for pilot in pilots]
    most = float(config.drafter.depths + 1)
    largest = max(tokens for tokens, _ in points)
    near, far = foresee(points, largest, most), foresee(points, float(whole), most)
    known = laws(points, most)
    console.print(_table(pilots))
    bent = "" if bends(points, most) else "; the pilots show no bend yet"
    said = f"{known[0].said()}, at {wanted.steps} steps{bent}"
    console.print(said, highlight=False, soft_wrap=True)
    for said in (_sentence("the largest pilot's text", near), _sentence("all of this text", far)):
        console.print(said, highlight=False, soft_wrap=True)
    console.print(judgement(far, largest), style="bold", soft_wrap=True)
    write(folder / "advise.png", _picture(points, known, far))
    fields: dict[str, Any] = {
        "format": FORMAT, "steps": wanted.steps, "tokens": whole, "law": known[0]._asdict(),
        "pilots": [asdict(pilot) for pilot in pilots],
        "largest_pilot": near._asdict(), "all_text": far._asdict(),
    }  # fmt: skip
    write_json(folder / "advise.json", fields)
    console.print(f"written: {folder}/advise.json, advise.png", highlight=False)


def _table(pilots: Sequence[Pilot]) -> Table:
    table = Table(title="pilots")
    for head in ("share", "conversations", "tokens", "best step", "held-out acceptance length"):
        table.add_column(head, justify="right")
    for p in sorted(pilots, key=lambda p: (p.share, p.repeat)):
        row = (f"{p.share:.3%}", f"{p.conversations:,}", f"{p.tokens:,}", str(p.best_step))
        table.add_row(*row, f"{p.accept_length:.3f}")
    return table


def _sentence(text: str, found: Foreseen) -> str:
    return (
        f"{text}, {found.tokens:,.0f} tokens: {found.now:.2f} ({found.now_low:.2f} to "
        f"{found.now_high:.2f}); twice as much: {found.gain:+.2f} ({found.low:+.2f} to "
        f"{found.high:+.2f})"
    )


def judgement(found: Foreseen, largest: float) -> str:
    """Whether more text is worth its price, as far as that can be said from so far away."""
    factor = found.tokens / largest
    doubt = f" It is {factor:.0f} times the largest pilot: larger shares would make this surer."
    doubt = doubt if factor > FAR else ""
    if found.high < LITTLE:
        return f"More text would bring little: less than {LITTLE} tokens per round.{doubt}"
    if found.low > LITTLE:
        return f"More text is worth having: {found.low:.2f} tokens per round at least.{doubt}"
    return f"Whether more text is worth having cannot be said from these pilots.{doubt}"


def _picture(points: Sequence[Point], known: Sequence[Any], far: Foreseen) -> bytes:
    """Pilots, the law with its doubt, and where all of the text and twice as much lie."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = np.geomspace(min(n for n, _ in points), 2 * far.tokens, 200)
    curves = np.array([[law.at(n) for n in tokens] for law in known])
    doubt = "the other law, and each pilot left out"
    axes.fill_between(tokens, curves.min(0), curves.max(0), alpha=0.2, label=doubt)
    axes.plot(tokens, curves[0], label=known[0].said())
    axes.plot(*zip(*points, strict=True), "ko", label="pilots")
    whole, twice = (far.tokens, 2 * far.tokens), (far.now, far.twice)
    axes.plot(
        whole, twice, "o", mfc="none", mec="tab:red", label="all of this text, and twice that"
    )
    axes.set_xscale("log")
    axes.set_xlabel("tokens of training text")
    axes.set_ylabel("held-out acceptance length")
    axes.legend(fontsize=8)
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
