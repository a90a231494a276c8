"""The training text: what is supervised, from which source, how much of it there is."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from outrider.data.contamination import NAMED, SHOWN, Guard, Overlap
from outrider.data.conversations import RULES, Prompt
from outrider.data.prepare import Material
from outrider.data.suite import suite_of, suite_place
from outrider.data.tokenise import Document, coloured
from outrider.eval.contamination_check import questions
from outrider.launch.doctor.finding import Finding, State
from outrider.models.load import Loaded, stop_ids
from outrider.train.settings import Config

LOOKED_AT = 2000  # documents, for how their answers end
SAID = 200  # characters of a document in the json
OFTEN = 20  # passes over the data from which more data would do more good
FEW = 1000  # held-out answer tokens below which an acceptance length is mostly noise
LOST = 0.1  # share of conversations that are cut or left out, from which it is worth a word
ENDED = 0.9  # share of answers that should end with a token that ends an answer
MET = "in the suite"
DROPPED = ("bad row", MET, "unknown shape", "no turns", "too long", "answers cut off")


def mask(loaded: Loaded, made: Material) -> Finding:
    """Which tokens are supervised, and whether the end of an answer is among them."""
    tokens = sum(int((part.document >= 0).sum()) for part in (made.train, made.held))
    count = int(made.counts.sum() + made.held_counts.sum())
    share = count / max(1, tokens)
    facts: dict[str, Any] = {"tokens": tokens, "supervised": count, "share": share}
    if not count:
        fix = "See data.supervise, data.max_length, and the template's answers."
        return Finding("mask", "wrong", "no token is supervised", facts, fix)
    marked = [document for document in made.documents[:LOOKED_AT] if document.answer.any()]
    ended, whole = _ended(loaded, marked)
    facts |= {**_preview(loaded, marked[0]), "ended": ended}
    said = (
        f"{share:.1%} of {tokens:,} tokens; {ended:.0%} of {whole:,} answers end with a stop token"
    )
    if share == 1:
        fix = "The data have no prompts, or the template marks all of the text as answers."
        return Finding("mask", "note", f"all of the text is supervised; {said}", facts, fix)
    if whole and ended < ENDED:
        fix = "The drafter will not learn to stop: see how the template ends a turn."
        return Finding("mask", "note", said, facts, fix)
    return Finding("mask", "ok", said, facts)


def _preview(loaded: Loaded, document: Document) -> dict[str, str]:
    ids = document.ids[document.answer].tolist()
    return {
        "first_supervised": loaded.tokenizer.decode(ids[:1]),
        "last_supervised": loaded.tokenizer.decode(ids[-1:]),
        "preview": coloured(loaded.tokenizer, document, brackets=True).plain[:SAID],
    }


def _ended(loaded: Loaded, documents: Sequence[Document]) -> tuple[float, int]:
    """Share of the last answers that end with a stop token, of those that were not cut."""
    stops = set(stop_ids(loaded.tokenizer, loaded.target))
    whole = [document for document in documents if not document.cut]
    last = [int(document.ids[document.answer][-1]) for document in whole]
    return sum(i in stops for i in last) / max(1, len(last)), len(last)


def sources(documents: Sequence[Document]) -> Finding:
    """Supervised share by source."""
    count: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for document in documents:
        row = count[document.source]
        row[0] += 1
        row[1] += len(document.ids)
        row[2] += int(document.answer.sum())
    facts = {
        name: {"conversations": n, "tokens": tokens, "share": marked / max(1, tokens)}
        for name, (n, tokens, marked) in count.items()
    }
    lines = [
        f"{name}: {f['share']:.1%} of {f['tokens']:,} tokens, {f['conversations']:,} conversations"
        for name, f in facts.items()
    ]
    bare = [name for name, f in facts.items() if f["share"] == 0]
    fix = f"Nothing is learned from {', '.join(bare)}: leave it out, or mend it." if bare else ""
    state: State = "note" if bare else "ok"
    return Finding("sources", state, "\n".join(lines), {"sources": facts}, fix)


def kept(made: Material) -> Finding:
    """What was cut, mended and left out on the way."""
    cases = {**made.about.get("cases", {})}
    for case, count in made.about.get("given_cases", {}).items():
        cases[case] = cases.get(case, 0) + count
    facts = {"conversations": len(made.documents), "cases": cases}
    lines = [f"{len(made.documents):,} conversations"]
    lines += [f"{n:,} {case}: {RULES[case]}" for case, n in cases.items() if case != "used"]
    lost = sum(cases.get(case, 0) for case in DROPPED)
    cut = max(cases.get("cut", 0), sum(document.cut > 0 for document in made.documents))
    seen = max(1, len(made.documents) + lost)
    facts |= {"cut": cut, "left_out": lost}
    if max(cut, lost) / seen < LOST:
        return Finding("conversations", "ok", "\n".join(lines), facts)
    fix = "Longer rows (data.max_length) cut less." if cut > lost else "See the counts."
    return Finding("conversations", "note", "\n".join(lines), facts, fix)


def rows(config: Config, made: Material) -> Finding:
    """How often the text is seen, and whether enough is held out to judge by."""
    train, held = made.train, int(made.held_counts.sum())
    each = config.train.batch_tokens // config.data.max_length
    steps = config.train.max_steps
    passes = steps * each / len(train) if steps else None
    facts = {
        "rows": len(train), "length": train.length, "fill": train.fill, "step_rows": each,
        "passes": passes, "held_rows": len(made.held), "held_answer_tokens": held,
    }  # fmt: skip
    seen = "" if passes is None else f", each seen {passes:.1f} times"
    said = (
        f"{len(train):,} rows of {train.length} tokens, {train.fill:.1%} filled, {each} a step"
        f"{seen}; held out {held:,} answer tokens in {len(made.held)} rows"
    )
    if passes is not None and passes > OFTEN:
        fix = f"Every row will be seen more than {OFTEN} times: more data would do more good."
        return Finding("rows", "note", said, facts, fix)
    if held < FEW:
        fix = "So few held-out tokens tell drafters apart badly: raise data.holdout."
        return Finding("rows", "note", said, facts, fix)
    return Finding("rows", "ok", said, facts)


def overlap(config: Config, made: Material, refused: Overlap | None) -> Finding:
    """Questions of the training text that are prompts of the suite, nearly.

    Args:
        refused: what reading the text ended with, where overlaps are refused.
    """
    suite, wish = suite_of(config, None), config.data.overlap
    cases = (made.about.get(name, {}) for name in ("cases", "given_cases"))
    met = refused.met if refused else sum(these.get(MET, 0) for these in cases)
    facts = {"suite": suite_place(config).place, "prompts": len(suite), "wish": wish, "met": met}
    if refused:
        return Finding("overlap", "wrong", refused.message, facts, refused.fix)
    if wish == "keep":
        return _kept_overlap(config, suite, facts)
    if met:
        said = f"{met} conversations ask a prompt of the suite, nearly: left out"
        return Finding("overlap", "note", said, facts, "That is data.overlap=drop.")
    said = f"no conversation asks one of the suite's {len(suite)} prompts, nearly"
    return Finding("overlap", "ok", said, facts)


def _kept_overlap(config: Config, suite: Sequence[Prompt], facts: dict[str, Any]) -> Finding:
    """With data.overlap=keep nobody has looked yet."""
    guard = Guard(suite, "drop")
    for asked in islice(questions(config), config.data.max_samples):
        guard.meets(asked)
    facts |= {"met": len(guard.hits), "names": [name for name, _, _ in guard.hits]}
    if not guard.hits:
        said = f"no conversation asks one of the suite's {len(suite)} prompts, nearly"
        return Finding("overlap", "ok", said, facts)
    lines = [f"{len(guard.hits)} conversations ask a prompt of the suite, nearly"]
    lines += [f"{name} ({near:.0%}): {text[:SHOWN]!r}" for name, near, text in guard.hits[:NAMED]]
    fix = "They are trained on (data.overlap=keep): what is measured on them is no proof."
    return Finding("overlap", "note", "\n".join(lines), facts, fix)
