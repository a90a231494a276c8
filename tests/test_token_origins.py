"""Answers with token origins: exact text, whole characters, markup."""

from typing import Any

from outrider.eval.token_origins import REJECTED, bracketed_text, coloured_html, origin_spans

WORDS = ["The", " best", " time", " is", " now", " <b>", "."]


class Words:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "an end token is a part of the answer"
        return "".join(WORDS[token] for token in token_ids)


class Bytes:
    """Tokens are bytes; an incomplete character decodes to the replacement character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def row(ids: list[int], origins: str, rejected: list[int | None]) -> dict[str, Any]:
    names = {"f": "first", "a": "accepted", "c": "correction", "b": "bonus"}
    return {"output_ids": ids, "origins": [names[o] for o in origins], "rejected": rejected}


def test_rejected_token_precedes_its_correction() -> None:
    """Two rounds: two accepted and one rejected; one accepted and a bonus."""
    parts = list(origin_spans(row([0, 1, 2, 3, 4, 6], "faacab", [5, None]), Words()))
    assert parts == [
        ("The", "first"), (" best", "accepted"), (" time", "accepted"), (" <b>", REJECTED),
        (" is", "correction"), (" now", "accepted"), (".", "bonus"),
    ]  # fmt: skip
    assert bracketed_text(parts) == "The[ best time]~ <b>~ is[ now]."
    assert "&lt;b&gt;" in coloured_html(parts)
    assert "line-through" in coloured_html(parts)


def test_correction_without_recorded_rejection() -> None:
    parts = list(origin_spans(row([0, 1, 3], "fac", [None]), Words()))
    assert bracketed_text(parts) == "The[ best] is"


def test_character_belongs_to_its_last_token() -> None:
    ids = list("a\u00e9b".encode())
    parts = list(origin_spans(row(ids, "faab", [None]), Bytes()))
    assert [text for text, _ in parts] == ["a", "", "\u00e9", "b"]
    assert bracketed_text(parts) == "a[\u00e9]b"
