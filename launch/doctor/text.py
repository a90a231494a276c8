"""Checks of the training text: supervised tokens, sources, amount, overlap with the suite."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from outrider.conf.schema import Config
from outrider.data.contamination import MAX_LISTED, SHOWN, OverlapError, OverlapFilter
from outrider.data.conversations import RULES, Prompt
from outrider.data.suite import eval_source, load_suite
from outrider.data.tokenise import Document, highlight_answers
from outrider.data.training_data import TrainingData
from outrider.eval.contamination_check import training_questions
from outrider.launch.doctor.finding import Finding, State
from outrider.models.load import LoadedTarget, stop_ids

SAMPLE = 2000  # documents whose last answer tokens are checked
PREVIEW = 200  # characters of a document in the JSON
MANY_PASSES = 20  # passes over the data from which more data helps more
FEW_TOKENS = 1000  # held-out answer tokens below which an acceptance length is mostly noise
LOST = 0.1  # share of truncated or dropped conversations from which it is a note
ENDED = 0.9  # expected share of answers that end with a stop token
IN_SUITE = "in the suite"
DROPPED = ("bad row", IN_SUITE, "unknown shape", "no turns", "too long", "answers cut off")


def mask(loaded: LoadedTarget, data: TrainingData) -> Finding:
    """Check the share of supervised tokens, and that answers end with a stop token."""
    tokens = sum(int((part.document >= 0).sum()) for part in (data.train, data.held))
    count = int(data.counts.sum() + data.held_counts.sum())
    share = count / max(1, tokens)
    facts: dict[str, Any] = {"tokens": tokens, "supervised": count, "share": share}
    if not count:
        fix = "Check data.supervise, data.max_length, and the answers in the chat template."
        return Finding("mask", "wrong", "no token is supervised", facts, fix)
    marked = [document for document in data.documents[:SAMPLE] if document.answer.any()]
    ended, whole = _stop_token_share(loaded, marked)
    facts |= {**_preview(loaded, marked[0]), "ended": ended}
    message = (
        f"{share:.1%} of {tokens:,} tokens are supervised; "
        f"{ended:.0%} of {whole:,} answers end with a stop token"
    )
    fix = ""
    if share == 1:
        message = f"all tokens are supervised; {message}"
        fix = "The data has no prompts, or the template marks all of the text as answers."
    elif whole and ended < ENDED:
        fix = "The drafter does not learn to stop: check how the template ends a turn."
    return Finding("mask", "note" if fix else "ok", message, facts, fix)


def _preview(loaded: LoadedTarget, document: Document) -> dict[str, str]:
    ids = document.ids[document.answer].tolist()
    return {
        "first_supervised": loaded.tokenizer.decode(ids[:1]),
        "last_supervised": loaded.tokenizer.decode(ids[-1:]),
        "preview": highlight_answers(loaded.tokenizer, document, brackets=True).plain[:PREVIEW],
    }


def _stop_token_share(loaded: LoadedTarget, documents: Sequence[Document]) -> tuple[float, int]:
    """Share of the last answers that end with a stop token, and number of those not truncated."""
    stops = set(stop_ids(loaded.tokenizer, loaded.target))
    whole = [document for document in documents if not document.cut]
    last = [int(document.ids[document.answer][-1]) for document in whole]
    return sum(i in stops for i in last) / max(1, len(last)), len(last)


def sources(documents: Sequence[Document]) -> Finding:
    """Check the supervised share of each source."""
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
    unsupervised = [name for name, f in facts.items() if f["share"] == 0]
    fix = (
        f"Nothing is learned from {', '.join(unsupervised)}: remove it, or fix it."
        if unsupervised
        else ""
    )
    state: State = "note" if unsupervised else "ok"
    return Finding("sources", state, "\n".join(lines), {"sources": facts}, fix)


def conversations(data: TrainingData) -> Finding:
    """Check how many conversations were truncated, repaired and dropped."""
    cases = {**data.about.get("cases", {})}
    for case, count in data.about.get("given_cases", {}).items():
        cases[case] = cases.get(case, 0) + count
    facts = {"conversations": len(data.documents), "cases": cases}
    lines = [f"{len(data.documents):,} conversations"]
    lines += [f"{n:,} {case}: {RULES[case]}" for case, n in cases.items() if case != "used"]
    lost = sum(cases.get(case, 0) for case in DROPPED)
    cut = max(cases.get("cut", 0), sum(document.cut > 0 for document in data.documents))
    seen = max(1, len(data.documents) + lost)
    facts |= {"cut": cut, "left_out": lost}
    fix = "Raise data.max_length to truncate less." if cut > lost else "See the counts above."
    state: State = "ok" if max(cut, lost) / seen < LOST else "note"
    return Finding("conversations", state, "\n".join(lines), facts, fix)


def rows(config: Config, data: TrainingData) -> Finding:
    """Check the passes over the data, and the number of held-out tokens."""
    train, held = data.train, int(data.held_counts.sum())
    each = config.train.batch_tokens // config.data.max_length
    steps = config.train.max_steps
    passes = steps * each / len(train) if steps else None
    facts = {
        "rows": len(train), "length": train.length, "fill": train.fill, "step_rows": each,
        "passes": passes, "held_rows": len(data.held), "held_answer_tokens": held,
    }  # fmt: skip
    repeated = "" if passes is None else f", {passes:.1f} passes"
    message = (
        f"{len(train):,} rows of {train.length} tokens, {train.fill:.1%} filled, {each} a step"
        f"{repeated}; held out {held:,} answer tokens in {len(data.held)} rows"
    )
    fix = ""
    if passes is not None and passes > MANY_PASSES:
        fix = f"More than {MANY_PASSES} passes over the data: more data helps more than more steps."
    elif held < FEW_TOKENS:
        fix = "Too few held-out tokens to compare drafters: raise data.holdout."
    return Finding("rows", "note" if fix else "ok", message, facts, fix)


def overlap(config: Config, data: TrainingData, refused: OverlapError | None) -> Finding:
    """Check for questions in the training text that nearly equal a prompt of the suite.

    Args:
        refused: the error of data.overlap=refuse.
    """
    suite, policy = load_suite(config, None), config.data.overlap
    cases = (data.about.get(name, {}) for name in ("cases", "given_cases"))
    met = refused.count if refused else sum(these.get(IN_SUITE, 0) for these in cases)
    facts = {
        "suite": eval_source(config).location,
        "prompts": len(suite),
        "wish": policy,
        "met": met,
    }
    if refused:
        return Finding("overlap", "wrong", refused.message, facts, refused.fix)
    if policy == "keep":
        return _kept_overlap(config, suite, facts)
    if met:
        message = f"{met} conversations contain a near copy of a prompt of the suite: dropped"
        return Finding("overlap", "note", message, facts, "This is data.overlap=drop.")
    message = f"no conversation contains a near copy of the suite's {len(suite)} prompts"
    return Finding("overlap", "ok", message, facts)


def _kept_overlap(config: Config, suite: Sequence[Prompt], facts: dict[str, Any]) -> Finding:
    """With data.overlap=keep the overlap has not been searched yet."""
    overlap_filter = OverlapFilter(suite, "drop")
    for question in islice(training_questions(config), config.data.max_samples):
        overlap_filter.overlaps(question)
    hits = overlap_filter.hits
    facts |= {"met": len(hits), "names": [name for name, _, _ in hits]}
    if not hits:
        message = f"no conversation contains a near copy of the suite's {len(suite)} prompts"
        return Finding("overlap", "ok", message, facts)
    lines = [f"{len(hits)} conversations contain a near copy of a prompt of the suite"]
    lines += [f"{name} ({near:.0%}): {text[:SHOWN]!r}" for name, near, text in hits[:MAX_LISTED]]
    fix = "They are trained on (data.overlap=keep): metrics on these prompts are biased."
    return Finding("overlap", "note", "\n".join(lines), facts, fix)
