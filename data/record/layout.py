"""Layout of a recording: the stored rows of a trace and their columns in a file.

A drafter reads states of many rows (it attends to the context), and few rows are supervised: those
in front of an answer token. The two are stored apart:

    features     what the drafter reads: taps or last states of every row, last states of the rows
                 that guess (Medusa), or nothing
    last         the target's last states at the teacher rows; its head turns them into the
                 teacher's distribution; absent where `top` replaces them
    favourite    the target's top-1 token at the teacher rows
    top          its most probable tokens of the draft vocabulary at the teacher rows, with their
                 probabilities, the probability of the rest of the draft vocabulary, and the share
                 of the draft vocabulary in the whole one

With ids p p p a a (prompt, answer), the teacher rows are the third and the fourth: the fourth
predicts the last token, and no answer token follows the fifth.

Legend: S rows of one document (or of one packed row), A teacher rows, k tokens, X columns, Vd draft
vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.conf.errors import ConfigError
from outrider.conf.fields import option
from outrider.conf.schema import Config, DrafterSettings, RecordConfig
from outrider.data.record import entropy_coding
from outrider.data.record.quantise import decode, encode, require_finite, row_bytes
from outrider.models.argmax import first_argmax
from outrider.models.drafters import drafter_class
from outrider.models.interface import TopKTeacher
from outrider.models.target.target import Target

CHUNK = 2**24  # logits held at once

RECORDED_TOKENS = 2**16  # of a draft vocabulary: tokens have 16 bits in a recording


class RowSelection(NamedTuple):
    """Rows of one document: those with features, and the teacher rows."""

    features: Bool[Tensor, " S"]
    teacher: Bool[Tensor, " S"]


class RecordedRows(NamedTuple):
    """Decoded rows of a document; 0 (argmax: -1) where nothing is stored."""

    features: Float[Tensor, "S X"]  # X = 0 where none are stored
    last: Float[Tensor, "S H"]  # of the teacher rows; H = 0 where `top` replaces them
    argmax: Int[Tensor, " S"]  # the target's top-1 token
    top: TopKTeacher | None


def combine(parts: Sequence[RecordedRows], how: Callable[[list[Tensor]], Tensor]) -> RecordedRows:
    """Concatenate (torch.cat) or stack (torch.stack) every field."""
    features, last, argmax = (
        how([getattr(part, name) for part in parts]) for name in ("features", "last", "argmax")
    )
    tops = [part.top for part in parts if part.top is not None]
    top = TopKTeacher(*(how(list(part)) for part in zip(*tops, strict=True))) if tops else None
    return RecordedRows(features, last, argmax, top)


@dataclass(frozen=True)
class Layout:
    """The columns of a recording and how they are encoded.

    Attributes:
        reads: what the drafter reads: "taps", "last" (both of every row), "guesses" (last states
            of the rows that guess), "ids" (nothing).
        states: encoding of states, see quantise.py; "coded": features entropy coded in steps of
            `step` (entropy_coding.py), last states in int8.
    """

    reads: str
    states: Literal["same", "bf16", "int8", "coded"]
    taps: tuple[int, ...]
    hidden: int  # size of the target's states, H
    ahead: int = option(1, 'deepest guess whose row is stored, for "guesses"', "[1, 4096]")
    top: int = option(0, "tokens stored of the teacher; 0: its last state", "[0, 65536]")
    vocab: Int[Tensor, " Vd"] | None = None  # target ids of the draft vocabulary, ascending
    step: float | None = option(None, 'of "coded", in spreads of a column', "(0, inf)")
    scales: entropy_coding.ColumnScales | None = None  # with `step`, once they are fitted

    @classmethod
    def for_drafter(
        cls, config: Config, target: Target, vocab: Int[Tensor, " Vd"] | None = None
    ) -> "Layout":
        """Return the layout for this drafter and the group `record`; `vocab` is for `top` only."""
        cfg, record = config.drafter, config.record
        reads = drafter_class(cfg.name).required_features
        return cls(
            reads, record.states, target.taps, target.shape().hidden,
            ahead=cfg.depths if reads == "guesses" else 1,
            top=0 if vocab is None else record.top, vocab=vocab,
            step=record.step if record.states == "coded" else None,
        )  # fmt: skip

    @property
    def last_states(self) -> str:
        """Encoding of the last states that are stored beside the features."""
        return self.states if self.step is None else "int8"

    @property
    def width(self) -> int:
        """Columns of the features, X."""
        return {"taps": len(self.taps) * self.hidden, "ids": 0}.get(self.reads, self.hidden)

    @property
    def features_hold_teacher(self) -> bool:
        """The features include the last states of every teacher row."""
        return _holds_teacher(self.reads)

    def select_rows(
        self, answer: Bool[Tensor, " S"], document: Int[Tensor, " S"] | None = None
    ) -> RowSelection:
        """Return which rows are stored; `document` numbers each row's document, -1 for padding."""
        teacher = _rows_before_answer(answer, document, 1)
        if self.reads == "guesses":
            guessing = [_rows_before_answer(answer, document, d) for d in range(1, self.ahead + 2)]
            return RowSelection(torch.stack(guessing).any(0), teacher)
        features = torch.ones_like(answer) if document is None else document >= 0
        return RowSelection(features if self.reads != "ids" else torch.zeros_like(answer), teacher)

    def encode(
        self, target: Target, rows: RowSelection, taps: Float[Tensor, "S KH"],
        last: Float[Tensor, "S H"], with_last_states: bool,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the parts of a file that store these rows; raise NotFinite, OutOfRange.

        The target's head computes the top-1 tokens and the teacher's distribution. Last states are
        stored beside `top` if `with_last_states` is set.
        """
        out = dict[str, Tensor]()
        if self.reads != "ids":
            features = (taps if self.reads == "taps" else last)[rows.features]
            out |= _prefix("features", self._encode_features(features))
        teacher = last[rows.teacher]
        parts = [
            _teacher_chunk(target, chunk, self.vocab, self.top)
            for chunk in teacher.split(max(1, CHUNK // target.vocab_size))
        ]
        out |= {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if with_last_states or not (self.top or self.features_hold_teacher):
            out |= _prefix("last", encode(self.last_states, teacher))
        return out

    def _encode_features(self, rows: Float[Tensor, "N X"]) -> dict[str, Tensor]:
        if self.step is None or self.scales is None:
            return encode(self.states, rows)
        require_finite(rows)
        packed = entropy_coding.compress(self.scales.units(rows), self.step)
        return {"packed": packed, "bytes": torch.tensor([len(packed)]).int()}

    def decode(
        self, parts: dict[str, Tensor], rows: RowSelection, longest: int = 0
    ) -> RecordedRows:
        """Return the rows that `encode` stored, in the precision of the encoding.

        `longest` bounds the rows of entropy coded features.
        """
        features = self._decode_features(parts, rows, longest)
        last = features if self.features_hold_teacher else features.new_zeros(len(rows.teacher), 0)
        if "last.codes" in parts:
            stored = decode(self.last_states, _without_prefix("last", parts), self.hidden)
            if self.features_hold_teacher:
                last = last.clone()
                last[rows.teacher] = stored.to(last.dtype)
            else:
                last = _scatter(stored, rows.teacher)
        argmax = torch.full(rows.teacher.shape, -1)
        argmax[rows.teacher] = parts["favourite"].long()
        top = self._decode_top(parts, rows.teacher) if self.top else None
        return RecordedRows(features, last, argmax, top)

    def _decode_features(
        self, parts: dict[str, Tensor], rows: RowSelection, longest: int
    ) -> Float[Tensor, "S X"]:
        if self.reads == "ids":
            return torch.zeros(len(rows.features), 0)
        if self.step is None or self.scales is None:
            stored = decode(self.states, _without_prefix("features", parts), self.width)
        else:  # a whole document, of which the caller may need the first rows only
            packed = parts["features.packed"]
            stored = entropy_coding.decompress(packed, self.width, self.step, longest)
            stored = self.scales.restore(stored[: int(rows.features.sum())])
        return stored if bool(rows.features.all()) else _scatter(stored, rows.features)

    def _decode_top(self, parts: dict[str, Tensor], teacher: Bool[Tensor, " S"]) -> TopKTeacher:
        ids = parts["top.ids"].long() & 0xFFFF  # stored as int16, read as unsigned
        p, rest, share = (
            _scatter(parts[f"top.{name}"].float(), teacher) for name in ("p", "rest", "share")
        )
        return TopKTeacher(_scatter(ids, teacher), p, rest, share)

    def bytes_per_token(self, supervised: float, itemsize: int) -> float:
        """Return the bytes on disk per token; `supervised` is the share of teacher rows."""
        share = {"ids": 0.0, "guesses": supervised}.get(self.reads, 1.0)
        if self.step is None:
            features = row_bytes(self.states, self.width, itemsize)
        else:
            features = entropy_coding.bits_per_value(self.step) * self.width / 8
        teacher = 4.0 + (4.0 * self.top + 4.0 if self.top else 0.0)
        if not (self.top or self.features_hold_teacher):
            teacher += row_bytes(self.last_states, self.hidden, itemsize)
        return 5.0 + share * features + supervised * teacher


def check_record(record: RecordConfig, cfg: DrafterSettings, vocab: int) -> None:
    """Check the format of recorded features for a drafter and a target's vocabulary."""
    reads = drafter_class(cfg.name).required_features
    if record.states == "coded" and _holds_teacher(reads) and not record.top:
        why = f"{cfg.name} reads the states that its teacher is computed from: it would be biased."
        raise ConfigError("record.states", "coded", why, "Add record.top=32, or take int8.")
    tokens = min(cfg.draft_vocab_size or vocab, vocab)
    if record.top and tokens > RECORDED_TOKENS:
        why = f"Recorded tokens have 16 bits, and the draft vocabulary has {tokens:,} tokens."
        fix = f"Set drafter.draft_vocab_size={RECORDED_TOKENS} or less."
        raise ConfigError("record.top", record.top, why, fix)


def _holds_teacher(reads: str) -> bool:
    return reads in ("last", "guesses")


def _rows_before_answer(answer: Tensor, document: Tensor | None, distance: int) -> Tensor:
    """Return the mask of rows that are `distance` before an answer token of the same document."""
    out = torch.zeros_like(answer)
    if distance < len(answer):
        out[:-distance] = answer[distance:]
        if document is not None:
            out[:-distance] &= document[distance:] == document[:-distance]
            out &= document >= 0
    return out


def _teacher_chunk(
    target: Target, last: Float[Tensor, "N H"], vocab: Int[Tensor, " Vd"] | None, top: int
) -> dict[str, Tensor]:
    """Return top-1 tokens and, with `top`, the teacher's most probable tokens."""
    logits = target.logits(last.to(target.device))
    out = {"favourite": first_argmax(logits).int()}
    if top and vocab is not None:
        logits = logits.float()
        inside = logits[:, vocab]
        share = (inside.logsumexp(-1) - logits.logsumexp(-1)).exp()
        p, ids = inside.softmax(-1).topk(min(top, len(vocab)), dim=-1)
        rest = (1 - p.sum(-1)).clamp(min=0)
        out |= {"top.ids": ids.to(torch.int16), "top.p": p.half()}
        out |= {"top.rest": rest.half(), "top.share": share.half()}
    return {name: rows.cpu() for name, rows in out.items()}


def _scatter(stored: Tensor, mask: Bool[Tensor, " S"]) -> Tensor:
    out = stored.new_zeros(len(mask), *stored.shape[1:])
    out[mask] = stored
    return out


def _prefix(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.cpu() for part, rows in parts.items()}


def _without_prefix(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{name}."
    return {k.removeprefix(start): rows for k, rows in parts.items() if k.startswith(start)}
