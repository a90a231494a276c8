"""Which rows of a trace are kept, and in which columns of a file.

A drafter reads some states of every row (context must be attended to), and is judged on few: the
rows in front of an answer token. So the two are stored apart:

    features     what the drafter reads: taps or last states of every row, or last states of the
                 rows that guess (Medusa), or nothing
    last         the target's last states at the rows that judge, of which its head makes the
                 teacher's distribution; left out where `top` says it
    favourite    the target's most probable token at these rows
    top          its most probable tokens of the draft vocabulary with their probabilities there,
                 what the rest of the draft vocabulary has together, and what share of the whole
                 the draft vocabulary has

With ids p p p a a (prompt, answer), the rows that judge are the third and the fourth: the fourth
is where the last token is decided, and nothing is judged behind it.

Legend: S rows of one document (or of one packed row), A of them judge, k tokens, X columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.data.record import entropy_coding as steps
from outrider.data.record.column_scales import Sizes
from outrider.data.record.quantise import NotFinite, bytes_per_row, decode, encode
from outrider.models.decode.sampling import first_argmax
from outrider.models.drafter import Top
from outrider.models.target import Target

CHUNK = 2**24  # logits held at once


class Kept(NamedTuple):
    """Rows of one document: which the features are kept of, and which judge."""

    features: Bool[Tensor, " S"]
    judges: Bool[Tensor, " S"]


class Said(NamedTuple):
    """What was read back, for every row of a document; 0 (favourite: -1) where nothing is kept.

    Attributes:
        features: see above; X = 0 where none are kept.
        last: of the rows that judge; H = 0 where `top` stands for them.
    """

    features: Float[Tensor, "S X"]
    last: Float[Tensor, "S H"]
    favourite: Int[Tensor, " S"]
    top: Top | None


def together(parts: Sequence[Said], how: Callable[[list[Tensor]], Tensor]) -> Said:
    """Field by field: rows behind each other (torch.cat) or beside each other (torch.stack)."""
    features = how([part.features for part in parts])
    last, favourite = how([part.last for part in parts]), how([part.favourite for part in parts])
    tops = [part.top for part in parts if part.top is not None]
    top = Top(*(how(list(part)) for part in zip(*tops, strict=True))) if tops else None
    return Said(features, last, favourite, top)


@dataclass(frozen=True)
class Layout:
    """How the rows of one recording lie in its files.

    Attributes:
        reads: what the drafter reads: "taps", "last" (both of every row), "guesses" (last states
            of rows that guess), "ids" (nothing).
        states: how numbers are stored, see codes.py; "coded": features in steps of `step` of
            their columns' sizes (steps.py), last states beside them in 8 bits.
        taps: tapped layers.
        hidden: size of the target's states, H.
        ahead: deepest guess whose row is kept, for "guesses".
        top: tokens kept of the teacher; 0: its last state instead.
        vocab: target ids of the draft vocabulary, ascending, with `top`.
        step: of "coded".
        sizes: of the features' columns, with `step`, once they have been found.
    """

    reads: str
    states: str
    taps: tuple[int, ...]
    hidden: int
    ahead: int = 1
    top: int = 0
    vocab: Int[Tensor, " Vd"] | None = None
    step: float | None = None
    sizes: Sizes | None = None

    @property
    def lasts(self) -> str:
        """How last states are stored beside the features."""
        return self.states if self.step is None else "int8"

    @property
    def width(self) -> int:
        """Columns of the features, X."""
        return {"taps": len(self.taps) * self.hidden, "ids": 0}.get(self.reads, self.hidden)

    @property
    def serves(self) -> bool:
        """The features are the last states of every row that judges: no need to keep them twice."""
        return self.reads in ("last", "guesses")

    def kept(self, answer: Bool[Tensor, " S"], document: Int[Tensor, " S"] | None = None) -> Kept:
        """Which rows are kept; a pure function of the text.

        Args:
            document: whose each row is, in a packed row (-1: nobody's).
        """
        judges = _in_front(answer, document, 1)
        if self.reads == "guesses":
            guessing = [_in_front(answer, document, d) for d in range(1, self.ahead + 2)]
            return Kept(torch.stack(guessing).any(0), judges)
        features = torch.ones_like(answer) if document is None else document >= 0
        return Kept(features if self.reads != "ids" else torch.zeros_like(answer), judges)

    def columns(
        self,
        target: Target,
        kept: Kept,
        taps: Float[Tensor, "S KH"],
        last: Float[Tensor, "S H"],
        whole: bool,
    ) -> dict[str, Tensor]:
        """The parts of a file that hold these rows.

        Args:
            target: whose head says the favourites, and the teacher's most probable tokens.
            whole: keep last states beside `top`.
        """
        out = dict[str, Tensor]()
        if self.reads != "ids":
            rows = (taps if self.reads == "taps" else last)[kept.features]
            out |= _named("features", self._encoded(rows))
        judges = last[kept.judges]
        out |= _judged(target, judges, self.vocab, self.top)
        if whole or not (self.top or self.serves):
            out |= _named("last", encode(self.lasts, judges))
        return out

    def _encoded(self, rows: Float[Tensor, "N X"]) -> dict[str, Tensor]:
        if self.step is None or self.sizes is None:
            return encode(self.states, rows)
        if not bool(rows.isfinite().all()):
            raise NotFinite("the target said something that is not a number")
        packed = steps.pack(self.sizes.units(rows), self.step)
        return {"packed": packed, "bytes": torch.tensor([len(packed)]).int()}

    def said(self, parts: dict[str, Tensor], kept: Kept) -> Said:
        """The inverse, as far as it goes."""
        size = len(kept.judges)
        features = self._features(parts, kept)
        last = features if self.serves else features.new_zeros(size, 0)
        if "last.codes" in parts:
            rows = decode(self.lasts, _part("last", parts), self.hidden)
            full = last.clone() if self.serves else rows.new_zeros(size, self.hidden)
            full[kept.judges] = rows.to(full.dtype)
            last = full
        favourite = torch.full((size,), -1)
        favourite[kept.judges] = parts["favourite"].long()
        return Said(features, last, favourite, self._top(parts, kept) if self.top else None)

    def _features(self, parts: dict[str, Tensor], kept: Kept) -> Float[Tensor, "S X"]:
        if self.reads == "ids":
            return torch.zeros(len(kept.features), 0)
        if self.step is None or self.sizes is None:
            rows = decode(self.states, _part("features", parts), self.width)
        else:  # the whole document, of which its beginning may be wanted
            rows = steps.unpack(parts["features.packed"], self.width, self.step)
            rows = self.sizes.restore(rows[: int(kept.features.sum())])
        if bool(kept.features.all()):
            return rows
        full = rows.new_zeros(len(kept.features), self.width)
        full[kept.features] = rows
        return full

    def _top(self, parts: dict[str, Tensor], kept: Kept) -> Top:
        def spread(rows: Tensor) -> Tensor:
            full = rows.new_zeros(len(kept.judges), *rows.shape[1:])
            full[kept.judges] = rows
            return full

        ids = parts["top.ids"].long() & 0xFFFF  # 16 bits without a sign
        numbers = (spread(parts[f"top.{name}"].float()) for name in ("p", "rest", "share"))
        return Top(spread(ids), *numbers)

    def bytes_per_token(self, supervised: float, itemsize: int) -> float:
        """What a token takes on disk, where this share of the rows judges.

        Args:
            itemsize: bytes of a number of the target's.
        """
        each = {"ids": 0.0, "guesses": supervised}.get(self.reads, 1.0)
        features = each * self._row_bytes(itemsize)
        judged = 4.0 + (4.0 * self.top + 4.0 if self.top else 0.0)
        if not (self.top or self.serves):
            judged += bytes_per_row(self.lasts, self.hidden, itemsize)
        return 5.0 + features + supervised * judged

    def _row_bytes(self, itemsize: int) -> float:
        if self.step is None:
            return bytes_per_row(self.states, self.width, itemsize)
        return steps.bits(self.step) * self.width / 8


def _in_front(answer: Tensor, document: Tensor | None, distance: int) -> Bool[Tensor, " S"]:
    """Rows so far in front of an answer token of the same document."""
    out = torch.zeros_like(answer)
    if distance < len(answer):
        out[:-distance] = answer[distance:]
        if document is not None:
            out[:-distance] &= document[distance:] == document[:-distance]
            out &= document >= 0
    return out


def _judged(
    target: Target, last: Float[Tensor, "A H"], vocab: Int[Tensor, " Vd"] | None, top: int
) -> dict[str, Tensor]:
    """Favourites, and with `top` the teacher in few tokens; chunk by chunk."""
    size = max(1, CHUNK // target.vocab)
    parts = [_judge(target, rows, vocab, top) for rows in last.split(size)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _judge(
    target: Target, last: Float[Tensor, "N H"], vocab: Int[Tensor, " Vd"] | None, top: int
) -> dict[str, Tensor]:
    logits = target.logits(last.to(target.device))
    out = {"favourite": first_argmax(logits).int()}
    if top and vocab is not None:
        logits = logits.float()
        inside = logits[:, vocab]
        share = (inside.logsumexp(-1) - logits.logsumexp(-1)).exp()
        p, ids = inside.softmax(-1).topk(min(top, len(vocab)), dim=-1)
        rest = (1 - p.sum(-1)).clamp(min=0)
        told = {"p": p.half(), "rest": rest.half(), "share": share.half()}
        out |= {"top.ids": ids.to(torch.int16), **_named("top", told)}
    return {name: rows.cpu() for name, rows in out.items()}


def _named(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{part}": rows.cpu() for part, rows in parts.items()}


def _part(name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {part: parts.get(f"{name}.{part}") for part in ("codes", "scales")}
    return {part: rows for part, rows in found.items() if rows is not None}
