"""Checks of the training text: supervised tokens, sources, amount, overlap, draft vocabulary."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from outrider.conf.quantities import format_count
from outrider.conf.schema import Config
from outrider.data.contamination import MAX_LISTED, SHOWN, OverlapError, OverlapFilter
from outrider.data.conversations import RULES, Prompt
from outrider.data.suite import eval_source, load_suite
from outrider.data.tokenise import Document, highlight_answers
from outrider.data.training_data import TrainingData
from outrider.eval.contamination_check import training_questions
from outrider.launch.doctor.finding import Finding, State
from outrider.models.target.load import LoadedTarget, stop_ids

SAMPLE = 2000  # documents whose last answer tokens are checked
PREVIEW = 200  # characters of a document in the JSON
MANY_PASSES = 20  # passes over the data from which more data helps more
FEW_TOKENS = 1000  # held-out answer tokens below which an acceptance length is mostly noise
LOST = 0.1  # share of truncated or dropped conversations from which it is a note
ENDED = 0.9  # expected share of answers that end with a stop token
IN_SUITE = "in the suite"
COPY = "with a near copy of a prompt of the suite"
DROPPED = ("bad row", IN_SUITE, "unknown shape", "no turns", "too long", "answers cut off")

LADDER = (1024, 2048, 4096, 8192, 16384, 32768)  # sizes of a draft vocabulary
SMALL = (16, 8, 4, 2)  # divisors of a vocabulary too small for LADDER
ENOUGH = 0.9  # share of held-out answer tokens that the draft vocabulary covers
USELESS = 0.5  # below it most answer tokens cannot be drafted
BAR = 24  # characters


def check_mask(loaded: LoadedTarget, data: TrainingData) -> Finding:
    """Check the share of supervised tokens, and that answers end with a stop token."""
    tokens = sum(int((part.document >= 0).sum()) for part in (data.train, data.held))
    count = int(data.counts.sum() + data.held_counts.sum())
    share = count / max(1, tokens)
    facts: dict[str, Any] = {"tokens": tokens, "supervised": count, "share": share}
    if not count:
        fix = "Check data.supervise, data.max_length, and the answers in the chat template."
        return Finding("mask", "wrong", "no token is supervised", facts, fix)
    marked = [document for document in data.documents[:SAMPLE] if document.answer.any()]
    stops = set(stop_ids(loaded.tokenizer, loaded.target))
    last = [int(document.ids[document.answer][-1]) for document in marked if not document.cut]
    ended = sum(i in stops for i in last) / max(1, len(last))
    facts |= {**_preview(loaded, marked[0]), "ended": ended}
    message = (
        f"{share:.1%} of {tokens:,} tokens are supervised; "
        f"answers that end with a stop token: {ended:.0%} of {len(last):,}"
    )
    fix = ""
    if share == 1:
        message = f"all tokens are supervised; {message}"
        fix = "The data has no prompts, or the template marks all of the text as answers."
    elif last and ended < ENDED:
        fix = "The drafter does not learn to stop: check how the template ends a turn."
    return Finding("mask", "note" if fix else "ok", message, facts, fix)


def _preview(loaded: LoadedTarget, document: Document) -> dict[str, str]:
    ids = document.ids[document.answer].tolist()
    return {
        "first_supervised": loaded.tokenizer.decode(ids[:1]),
        "last_supervised": loaded.tokenizer.decode(ids[-1:]),
        "preview": highlight_answers(loaded.tokenizer, document, brackets=True).plain[:PREVIEW],
    }


def check_sources(documents: Sequence[Document]) -> Finding:
    """Check the supervised share of each source."""
    by_source = defaultdict[str, list[Document]](list)
    for document in documents:
        by_source[document.source].append(document)
    facts, lines = {}, []
    for name, own in by_source.items():
        tokens = sum(len(document.ids) for document in own)
        share = sum(int(document.answer.sum()) for document in own) / max(1, tokens)
        facts[name] = {"conversations": len(own), "tokens": tokens, "share": share}
        count = format_count(len(own), "conversation")
        lines.append(f"{name}: {share:.1%} of {tokens:,} tokens, {count}")
    unsupervised = ", ".join(name for name, one in facts.items() if one["share"] == 0)
    fix = f"Nothing is learned from {unsupervised}: remove it, or fix it."
    state: State = "note" if unsupervised else "ok"
    return Finding("sources", state, "\n".join(lines), {"sources": facts}, fix)


def check_conversations(data: TrainingData) -> Finding:
    """Check how many conversations were truncated, repaired and dropped."""
    cases = Counter[str](data.about.get("cases", {}))
    cases.update(data.about.get("given_cases", {}))
    cases = Counter({case: n for case, n in cases.items() if case in RULES})  # of this version
    lines = [format_count(len(data.documents), "conversation")]
    lines += [f"{n:,} {case}: {RULES[case]}" for case, n in cases.items() if case != "used"]
    lost = sum(cases[case] for case in DROPPED)
    cut = max(cases["cut"], sum(document.cut > 0 for document in data.documents))
    facts = {"conversations": len(data.documents), "cases": dict(cases), "cut": cut,
             "left_out": lost}  # fmt: skip
    fix = "Raise data.max_length to truncate less." if cut > lost else "See the counts above."
    few = max(cut, lost) / max(1, len(data.documents) + lost) < LOST
    return Finding("conversations", "ok" if few else "note", "\n".join(lines), facts, fix)


def check_rows(config: Config, data: TrainingData) -> Finding:
    """Check the passes over the data, and the number of held-out tokens."""
    train, held, steps = data.train, int(data.held_counts.sum()), config.train.max_steps
    each = config.train.batch_tokens // config.data.max_length
    passes = steps * each / len(train) if steps else None
    facts = {
        "rows": len(train), "length": train.length, "fill": train.fill, "step_rows": each,
        "passes": passes, "held_rows": len(data.held), "held_answer_tokens": held,
    }  # fmt: skip
    repeated = "" if passes is None else f", {passes:.1f} passes"
    message = (
        f"{format_count(len(train), 'row')} of {train.length} tokens, {train.fill:.1%} filled, "
        f"{each} a step{repeated}; held out {held:,} answer tokens in "
        f"{format_count(len(data.held), 'row')}"
    )
    fix = ""
    if passes is not None and passes > MANY_PASSES:
        fix = f"More than {MANY_PASSES} passes over the data: more data helps more than more steps."
    elif held < FEW_TOKENS:
        fix = "Too few held-out tokens to compare drafters: raise data.holdout."
    return Finding("rows", "note" if fix else "ok", message, facts, fix)


def check_overlap(config: Config, data: TrainingData, refused: OverlapError | None) -> Finding:
    """Check for questions that nearly equal a prompt of the suite; `refused` is refuse's error."""
    suite, policy = load_suite(config, None), config.data.overlap
    cases = (data.about.get(name, {}) for name in ("cases", "given_cases"))
    met = refused.count if refused else sum(these.get(IN_SUITE, 0) for these in cases)
    facts: dict[str, Any] = {"suite": eval_source(config).location, "prompts": len(suite),
                             "wish": policy, "met": met}  # fmt: skip
    if refused:
        return Finding("overlap", "wrong", refused.message, facts, refused.fix)
    message = f"{format_count(met, 'conversation')} {COPY}: dropped"
    fix = "They were dropped, because data.overlap=drop."
    if policy == "keep":
        hits = _search_overlap(config, suite)
        met = len(hits)
        facts |= {"met": met, "names": [name for name, _, _ in hits]}
        lines = [f"{format_count(met, 'conversation')} {COPY}"]
        lines += [f"{name} ({near:.0%}): {text[:SHOWN]!r}" for name, near, text in hits]
        message = "\n".join(lines[: MAX_LISTED + 1])
        fix = "They are trained on (data.overlap=keep): metrics on these prompts are biased."
    if not met:
        message = f"no conversation {COPY} ({format_count(len(suite), 'prompt')})"
    return Finding("overlap", "note" if met else "ok", message, facts, fix)


def _search_overlap(config: Config, suite: Sequence[Prompt]) -> list[tuple[str, float, str]]:
    """Return (prompt, similarity, text) of each overlap; data.overlap=keep has not searched it."""
    overlap_filter = OverlapFilter(suite, "drop")
    for question in islice(training_questions(config), config.data.max_samples):
        overlap_filter.overlaps(question)
    return overlap_filter.hits


def vocabulary_curve(data: TrainingData, size: int) -> list[tuple[int, float]]:
    """Return (n, share of held-out answer tokens in the n most frequent training tokens)."""
    whole = len(data.counts)
    ladder = LADDER if whole > 4 * LADDER[0] else [whole // part for part in SMALL]
    sizes = {n for n in ladder if 0 < n < whole} | {size, whole}
    return [(n, data.vocab(n).coverage(data.held_counts)) for n in sorted(sizes)]


def check_vocabulary(data: TrainingData, chosen: int | None, brief: bool = False) -> Finding:
    """Check the share of held-out answer tokens that a draft vocabulary of `chosen` tokens covers.

    Args:
        brief: leave the curve over other sizes out.
    """
    whole = len(data.counts)
    size = min(chosen or whole, whole)
    share = data.vocab(size).coverage(data.held_counts)
    points = [(size, share)] if brief else vocabulary_curve(data, size)
    facts = {"size": size, "of": whole, "share": share, "curve": [list(point) for point in points]}
    message = f"{size:,} of {whole:,} tokens cover {share:.2%} of the held-out answer tokens"
    for n, part in points if not brief else ():
        bar, here = "#" * round(BAR * part), "  <- this run" if n == size else ""
        message += f"\n{n:>9,}  {bar:<{BAR}}  {part:7.2%}{here}"
    state: State = "ok" if share >= ENOUGH else "wrong" if share < USELESS else "note"
    fix = f"{1 - share:.1%} of the answer tokens cannot be drafted: raise drafter.draft_vocab_size."
    return Finding("vocabulary", state, message, facts, fix)
