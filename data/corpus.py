"""Training data from the configuration: text, packed rows, and the source of their traces.

The text comes from files (`data=tiny`, `data=jsonl`), from the target itself (`data=self`) or from
a recording (`data.traces`). Training questions that overlap with the evaluation suite are refused
or left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.quantities import format_count
from outrider.conf.schema import Config, DataConfig
from outrider.data.contamination import OverlapFilter
from outrider.data.conversations import RULES, Prompt, RuleCounts, read_conversations
from outrider.data.lost_turns import LOSSES
from outrider.data.pack import split_holdout
from outrider.data.record.cache import TraceCache
from outrider.data.record.folder import RecordingFolder
from outrider.data.record.reader import RecordedTraces, open_recording, require_features_for
from outrider.data.record.writer import write_recording
from outrider.data.reporter import Reporter
from outrider.data.self_generated import (
    answers_exist,
    conversation_source,
    generate_answers,
    load_prompts,
)
from outrider.data.sources import Source, data_source
from outrider.data.suite import load_suite
from outrider.data.tokenise import Document, conversation_key, render_all, show_samples
from outrider.data.trace_source import TraceSources
from outrider.data.training_data import TrainingData, pack_documents
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target.load import LoadedTarget, stop_ids


class Text(NamedTuple):
    """Documents and their origin, for the manifest."""

    documents: list[Document]
    about: dict[str, Any]


def load_training_data(
    config: Config, loaded: LoadedTarget, taps: Sequence[int], reporter: Reporter, *,
    record: bool = True,
) -> TrainingData:  # fmt: skip
    """Return the data of a run; generate and record (unless record=False) what is missing on disk.

    Raises RunError if a file is damaged, or no text is left to train or to evaluate on.
    """
    if config.data.traces is not None:
        folder = RecordingFolder(Path(config.data.traces).expanduser())
        folder.require_match(fingerprints(loaded))
        data = _from_recording(config, folder, loaded, taps, reporter)
        show_samples(reporter, loaded.tokenizer, data.documents)
    else:
        data = _load_or_record(config, loaded, taps, reporter, record)
    reporter.print(_summary(data))
    return data


def _load_or_record(
    config: Config, loaded: LoadedTarget, taps: Sequence[int], reporter: Reporter, record: bool
) -> TrainingData:
    """Return text with the traces that `data.mode` asks for, recorded if need be."""
    data = load_text(config, loaded, taps, reporter)
    recording = recording_config(config) if record else None
    if recording is not None:
        folder = write_recording(recording, loaded, data, reporter)
        return _from_recording(recording, folder, loaded, taps, reporter)
    if config.data.mode == "hybrid":
        cache = TraceCache.from_config(config, loaded.target, fingerprints(loaded))
        cache.touch_rows(data.train)
        cache.touch_rows(data.held)
        data.recorded = TraceSources(cache, cache)
    return data


def recording_config(config: Config) -> Config | None:
    """Return the settings that this run's text is recorded with; None: it is not recorded.

    With `data.mode=auto`, self-generated text is recorded without loss (`data.generate.record`), so
    that training from the recording is training online.
    """
    data, generate = config.data, config.data.generate
    if data.mode == "recorded":
        return config
    self_generated = generate is not None and generate.endpoint is None and data.given is None
    if data.mode != "auto" or generate is None or not (self_generated and generate.record):
        return None
    return replace(config, record=replace(config.record, states="same", top=0, share="1/1"))


def load_text(
    config: Config, loaded: LoadedTarget, taps: Sequence[int], reporter: Reporter
) -> TrainingData:
    """Return the packed text of a run, without recorded traces."""
    data = config.data
    longest = loaded.target.shape().max_positions
    if data.max_length > longest:
        why = f"{loaded.target.name} has {longest} positions."
        raise ConfigError("data.max_length", data.max_length, why, f"Use at most {longest}.")
    overlap = _overlap_filter(config)
    if data.name == "self":
        text = _self_generated(config, loaded, overlap, reporter)
    else:
        source = conversation_source(data)
        text = _tokenise(source, data.max_samples, data, loaded, overlap, reporter)
    show_samples(reporter, loaded.tokenizer, text.documents)
    loaded.target.set_taps(taps)  # generation has set other ones
    return pack_documents(text.documents, data, loaded.target.vocab_size, text.about)


# ---- recorded text ----


def _from_recording(
    config: Config, folder: RecordingFolder, loaded: LoadedTarget, taps: Sequence[int],
    reporter: Reporter,
) -> TrainingData:  # fmt: skip
    """Return recorded text and traces; ConfigError if data.holdout differs from the recording's."""
    loaded.target.set_taps(taps)
    require_features_for(folder, config)
    documents, recording, left_out = open_recording(
        folder, taps, config.record.damaged, loaded.target.shape()
    )
    if left_out:
        reporter.note(f"damaged files are left out: {left_out}")
    documents, recording = _select(documents, recording, config, reporter)
    layout, top = folder.manifest["layout"], folder.layout.top
    about = {**folder.manifest["source"], "traces": str(folder.path), "layout": layout}
    cases = Counter(about.get("cases", {})) + Counter(about.pop("given_cases", {}))
    if unused := sum(folder.shard_documents) - len(documents):
        cases["not selected"] += unused
        reporter.note(f"not used: {format_count(unused, 'recorded conversation')}")
    about["cases"] = dict(cases | {"used": len(documents)})
    data = pack_documents(documents, config.data, loaded.target.vocab_size, about)
    position = {id(document): i for i, document in enumerate(documents)}
    sides = split_holdout(documents, config.data.holdout)
    train, held = ([position[id(document)] for document in side] for side in sides)
    if top and not all(recording.locations[i].has_last_states for i in held):
        holdout = folder.manifest.get("holdout")
        why = f"Last states were recorded for the conversations of data.holdout={holdout}."
        raise ConfigError("data.holdout", config.data.holdout, why, f"Use {holdout}.")
    data.recorded = TraceSources(
        recording.select(train, with_last_states=not top), recording.select(held)
    )
    data.recorded_vocab = folder.layout.vocab
    return data


def _select(
    documents: list[Document], recording: RecordedTraces, config: Config, reporter: Reporter
) -> tuple[list[Document], RecordedTraces]:
    """Return `data.max_samples` of the recorded documents, cut to the rows of this run."""
    data, suite = config.data, recording.folder.manifest.get("suite")
    documents = documents[: data.max_samples]
    longer = sum(len(document.ids) > data.max_length for document in documents)
    if longer:
        reporter.note(f"cut to data.max_length: {format_count(longer, 'recorded conversation')}")
    if suite != config.eval.prompts:
        compared = suite or "null"
        reporter.note(f"the recorded text was compared with eval.prompts={compared}, not these")
    documents, numbers = _fit_rows(documents, data)
    return documents, recording.select(numbers)


# ---- self-generated text ----


def _self_generated(
    config: Config, loaded: LoadedTarget, overlap: OverlapFilter, reporter: Reporter
) -> Text:
    """Return the target's answers, mixed with conversations of `data.given` if it is set."""
    generate = config.data.generate
    assert generate is not None, "data=self has its settings"
    if loaded.target.is_remote and not generate.endpoint and not answers_exist(config, loaded):
        why = f"With target.place={config.target.place} no single rank can generate text."
        fix = "Run `outrider prepare` with the same settings and target.place=replicated first."
        raise RunError(why, fix)
    limit = generate.samples
    prompts = load_prompts(config, loaded, limit, reporter)
    contaminated = _contaminated_prompts(prompts, overlap)
    store = generate_answers(config, loaded, prompts, reporter)
    answers = [
        answer for answer in sorted(store.answers(), key=lambda answer: answer.index)
        if (limit is None or answer.index < limit) and answer.key not in contaminated
    ]  # fmt: skip
    selected = answers[: config.data.max_samples]
    documents, _ = _fit_rows(
        [replace(answer.to_document(), source="self") for answer in selected], config.data
    )
    cases = +Counter({
        "used": len(documents), "short": len(selected) - len(documents),
        "not selected": len(answers) - len(selected), "in the suite": len(contaminated),
    })  # fmt: skip
    if len(cases) > 1:
        reporter.print(RuleCounts(cases))
    about: dict[str, Any] = {"source": "self", "store": store.about, "cases": dict(cases)}
    if config.data.given is None:
        return Text(documents, about)
    given = _read_given(len(selected), config.data, loaded, overlap, reporter)
    about |= {"given": given.about["sha256"], "given_cases": given.about["cases"]}
    return Text(documents + given.documents, about)


def _contaminated_prompts(prompts: Sequence[Prompt], overlap: OverlapFilter) -> set[str]:
    """Return the keys of prompts that are in the suite.

    Their answers are generated but not used: the text does not depend on the suite, so that runs
    with different suites share it.
    """
    keys = {
        conversation_key(prompt.first_messages())
        for prompt in prompts if overlap.overlaps(prompt.turns[:1])
    }  # fmt: skip
    overlap.raise_if_refused()
    return keys


def _read_given(
    generated: int, data: DataConfig, loaded: LoadedTarget, overlap: OverlapFilter,
    reporter: Reporter,
) -> Text:  # fmt: skip
    """Return the conversations of `data.given` that are mixed in.

    20 generated ones and data.given_share=0.25 -> 7 given ones.
    """
    assert data.given is not None
    count = round(generated * data.given_share / (1 - data.given_share))
    source = data_source(data.given, "data.given", skip_bad=data.skip_bad)
    text = _tokenise(source, count, data, loaded, overlap, reporter)
    if len(text.documents) < count:
        reporter.note(f"{data.given} has {len(text.documents)} of {count} conversations needed")
    return text


# ---- text of files ----


def _tokenise(
    source: Source, limit: int | None, data: DataConfig, loaded: LoadedTarget,
    overlap: OverlapFilter, reporter: Reporter,
) -> Text:  # fmt: skip
    summary = RuleCounts()
    if description := source.describe():
        reporter.print(description)
    conversations = overlap.drop_overlaps(read_conversations(source, summary), summary)
    documents = render_all(
        loaded.tokenizer, conversations, max_length=data.max_length, summary=summary, limit=limit,
        supervise=data.supervise, cut=data.long == "cut", skip_bad=data.skip_bad,
        stops=stop_ids(loaded.tokenizer, loaded.target), reporter=reporter,
    )  # fmt: skip
    overlap.raise_if_refused()
    report_losses(source, documents, summary, reporter)
    with_answers = len(documents)
    documents, _ = _fit_rows(documents, data)
    summary.counts["used"] = len(documents)
    summary.add("short", with_answers - len(documents))
    reporter.print(summary)
    name = source.name or (source.local_path.name if source.local_path else source.location)
    about = {"source": data.name, "sha256": source.fingerprint(), "cases": dict(+summary.counts)}
    return Text([replace(document, source=name) for document in documents], about)


def report_losses(
    source: Source, documents: Sequence[Document], summary: RuleCounts, reporter: Reporter
) -> None:
    """Print a note for each rule by which the template loses something.

    Raises:
        RunError: no answer is left.
    """
    lost = {rule: fix for rule, fix in LOSSES.items() if summary.counts[rule]}
    counts = [f"{format_count(summary.counts[rule], 'conversation')}, {rule}" for rule in lost]
    if lost and not documents:
        why = f"{source.location} has no answer that the chat template renders whole"
        raise RunError(f"{why} ({'; '.join(counts)}).", " ".join(dict.fromkeys(lost.values())))
    for count, (rule, fix) in zip(counts, lost.items(), strict=True):
        reporter.note(f"{count}: {RULES[rule]}. {fix}")


def _overlap_filter(config: Config) -> OverlapFilter:
    """Return the filter against the evaluation suite.

    Prompts that the target generated itself are left out rather than refused: no user chose them.
    """
    mode, generate = config.data.overlap, config.data.generate
    if generate is not None and generate.self_prompted and mode == "refuse":
        mode = "drop"
    return OverlapFilter([] if mode == "keep" else load_suite(config, None), mode)


def _fit_rows(documents: Sequence[Document], data: DataConfig) -> tuple[list[Document], list[int]]:
    """Cut documents to a row; return the numbers of those with enough answer tokens as well."""
    length, shortest = data.max_length, data.shortest
    cut = [replace(d, ids=d.ids[:length], answer=d.answer[:length]) for d in documents]
    numbers = [i for i, document in enumerate(cut) if document.answer.sum() >= shortest]
    return [cut[i] for i in numbers], numbers


def _summary(data: TrainingData) -> str:
    cases = {**data.about.get("cases", {}), **data.about.get("given_cases", {})}
    documents = format_count(data.about["documents"], "conversation")
    if "rows of one answer" in cases:
        documents = format_count(data.about["documents"], "row of one answer", "rows of one answer")
    return (
        f"data: {documents}, {format_count(len(data.train), 'training row')} of "
        f"{data.train.length} tokens ({data.train.fill:.1%} filled, "
        f"{data.train.supervised:.1%} supervised), {format_count(len(data.held), 'held-out row')}"
        + (", recorded traces" if data.recorded else "")
    )
