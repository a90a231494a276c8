"""The supervised tokens are what the target would generate, for random conversations.

The oracle renders with transformers alone. The context of an answer is the turns before it with the
generation prompt; the answer is what the template adds to that context, up to and with the first
stop token. A document may differ only where the template does not continue its own context; such
documents are counted as rewritten.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.data.conversations import RuleCounts, parse_conversation
from outrider.data.tokenise import Document, render_all
from tests.template_families import FAMILIES, PUBLISHED, SMALL, coder, stop_ids

FAST = 12  # random conversations per family; the slow test has SLOW
SLOW = 60
WORDS = [" ", "\n", "\n\n", "  x", "\u00e9", "\U0001f600", ".", "4", "?"]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "w", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "c"}},
    }},
}  # fmt: skip


class Names:
    """Words that occur once in a conversation, so that a search finds only their own place."""

    def __init__(self) -> None:
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return f"word{self.count}w"


@st.composite
def rows(draw: Any, name: str) -> dict[str, Any]:
    """Draw a row in OpenAI's form: system turn, tools, calls, results, thoughts, any text."""
    names = Names()
    own = st.sampled_from([*WORDS, *FAMILIES[name].stops])
    pieces = st.lists(own | st.text("ab \n", max_size=4), max_size=3).map("".join)

    def text() -> str:
        return f"{draw(pieces)}{names.new()}{draw(pieces)}"

    def answer(calls: int) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": text()}
        if calls and draw(st.booleans()):
            turn["content"] = draw(st.sampled_from(["", None]))
        if draw(st.integers(0, 2)) == 0:
            turn["reasoning_content"] = names.new()
        if calls:
            turn["tool_calls"] = [call() for _ in range(calls)]
        return turn

    def call() -> dict[str, Any]:
        arguments: Any = {names.new(): names.new() for _ in range(draw(st.integers(0, 2)))}
        if draw(st.booleans()):
            arguments = json.dumps(arguments)
        function = {"name": names.new(), "arguments": arguments}
        return {"id": f"call_{names.new()}", "type": "function", "function": function}

    messages = [{"role": "system", "content": text()}] if draw(st.integers(0, 3)) == 0 else []
    with_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": text()})
        for _ in range(draw(st.integers(0, 2)) if with_tools else 0):
            turn = answer(calls=draw(st.integers(1, 2)))
            messages.append(turn)
            messages += [
                {"role": "tool", "content": names.new(), "tool_call_id": call["id"]}
                for call in turn["tool_calls"]
            ]
        messages.append(answer(calls=0))
    return {"messages": messages, **({"tools": [TOOL]} if with_tools else {})}


# ---- the oracle ----


def given_form(name: str, turn: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    """Return a turn in the form that a reader of the template would choose."""
    family, new = FAMILIES[name], dict(turn)
    if thought := new.pop("reasoning_content", None):
        new[family.thought or "reasoning_content"] = thought
    if "tool_calls" in new:
        new["content"] = new["content"] or family.no_content
        new["tool_calls"] = [json.loads(json.dumps(call)) for call in new["tool_calls"]]
    for call in new.get("tool_calls", ()):
        function = call["function"]
        if family.text_arguments and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"])
        if not family.text_arguments and isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
        call["id"] = ids.setdefault(
            call["id"], f"{len(ids):09d}" if family.short_ids else call["id"]
        )
    if "tool_call_id" in new:
        new["tool_call_id"] = ids[new["tool_call_id"]]
    return new


def rendered(name: str, turns: Sequence[dict[str, Any]], tools: Any, prompt: bool) -> str | None:
    """Return the text of the template, or None if it refuses."""
    ids: dict[str, str] = {}
    given = [given_form(name, turn, ids) for turn in turns]
    try:
        text = coder(name).apply_chat_template(
            given, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
    except Exception:
        return None
    return str(text)


def up_to_stop(name: str, text: str) -> str:
    """Return a text up to and with its first stop token; all of it if there is none."""
    found = re.search("|".join(map(re.escape, FAMILIES[name].stops)), text)
    return text[: found.end()] if found else text


def expected(name: str, turns: list[dict[str, Any]], tools: Any) -> tuple[str, str] | None:
    """Return context and answer for the last turn; None if the one does not continue the other."""
    context = rendered(name, turns[:-1], tools, prompt=True)
    full = rendered(name, turns, tools, prompt=False)
    if context is None or full is None or not full.startswith(context):
        return None
    answer = up_to_stop(name, full[len(context) :])
    if not answer.endswith(FAMILIES[name].stops):  # the next turn opens with it, or there is none
        bare = [{k: v for k, v in turn.items() if k != "reasoning_content"} for turn in turns]
        closed = rendered(name, bare, tools, prompt=False) or ""
        opened = rendered(name, [*bare, following(bare[-1])], tools, prompt=False) or ""
        rest = opened.removeprefix(closed)
        answer += next((stop for stop in FAMILIES[name].stops if rest.startswith(stop)), "")
    return context, answer


def following(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a turn that may follow an answer: a result of its call, or a question."""
    if "tool_calls" in turn:
        return {"role": "tool", "content": "x", "tool_call_id": turn["tool_calls"][0]["id"]}
    return {"role": "user", "content": "x"}


def whole(name: str, turns: list[dict[str, Any]], tools: Any) -> bool:
    """Return whether the template renders every piece of the last answer and of its results."""
    text = rendered(name, turns, tools, prompt=False)
    last = [n for n, turn in enumerate(turns[:-1]) if turn["role"] == "assistant"]
    new = turns[last[-1] + 1 if last else 0 :]
    pieces = {word for turn in new if turn["role"] != "user" for word in words(turn)}
    return text is not None and all(piece in text for piece in pieces)


def words(turn: dict[str, Any]) -> list[str]:
    """Return the words of an answer or a result, without ids of calls and keys of arguments."""
    values = [turn["content"] or "", turn.get("reasoning_content", "")]
    for call in turn.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        values += [call["function"]["name"], *arguments.values()]
    return re.findall(r"word\d+w", " ".join(values))


# ---- the property ----


def check(name: str, row: dict[str, Any]) -> None:
    """Compare each answer in a row of its own, and all answers of the whole, with the oracle."""
    turns, tools = row["messages"], row.get("tools")
    kept = kept_turns(name, turns, tools)
    rows_of_one, cases = documents(name, row, "each")
    answers = [n for n, turn in enumerate(turns[:kept]) if turn["role"] == "assistant"]
    if refused := rendered(name, turns[:kept], tools, prompt=False) is None:
        assert cases["refused"] or not answers, (cases, turns)
    if refused or not answers:
        assert not rows_of_one
        return
    outcomes = [expected(name, turns[: n + 1], tools) for n in answers]
    lost = cases["calls not rendered"] + cases["thoughts not taken"]
    if len(rows_of_one) < len(answers):  # an answer that does not continue its context: not found
        assert outcomes[len(rows_of_one)] is None
        outcomes = outcomes[: len(rows_of_one)]
        assert lost
        if not outcomes:
            return
    else:
        assert (kept < len(turns)) == bool(lost)
    for document, outcome in zip(rows_of_one, outcomes, strict=True):
        if outcome is None:
            assert document.rewritten
            continue
        context, answer = outcome
        ids = document.ids.tolist()
        assert supervised(name, document) == [answer]
        assert coder(name).decode(ids).startswith(context + answer)
        assert ids[: len(tokens(name, context))] == tokens(name, context)
    check_whole(name, row, kept, outcomes)


def check_whole(name: str, row: dict[str, Any], kept: int, outcomes: list[Any]) -> None:
    """Compare the answers of one document with the oracle, where its text continues the context."""
    found_documents, cases = documents(name, row, "all")
    if not found_documents:  # the first answer is not found in the whole
        assert cases["calls not rendered"]
        return
    (document,) = found_documents
    text = coder(name).decode(document.ids.tolist())
    exact = [one is not None and text.startswith("".join(one)) for one in outcomes]
    found = supervised(name, document)
    assert len(found) <= len(outcomes)
    if all(exact):
        assert found == [answer for _, answer in outcomes]
    else:
        assert cases["rewritten"], row
        assert all(answer in found for (_, answer), one in zip_exact(outcomes, exact))


def zip_exact(outcomes: list[Any], exact: list[bool]) -> list[Any]:
    return [(one, True) for one, is_exact in zip(outcomes, exact, strict=True) if is_exact]


def kept_turns(name: str, turns: list[dict[str, Any]], tools: Any) -> int:
    """Return the number of turns up to the last answer that the template renders whole."""
    kept = before = 0
    for n, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        if len(turn) > 2 or turns[n - 1]["role"] == "tool":
            if not whole(name, turns[: n + 1], tools):
                return kept
            if kept and moved(name, turns[: n + 1], tools, kept - 1):
                return before
        before, kept = kept, n + 1
    return kept


def moved(name: str, turns: list[dict[str, Any]], tools: Any, answer: int) -> bool:
    """Return whether the text of an answer stands behind that of results or answers after it."""
    text = rendered(name, turns, tools, prompt=False) or ""
    later = [word for turn in turns[answer + 1 :] if turn["role"] != "user" for word in words(turn)]
    places = [text.find(word) for word in words(turns[answer])]
    return max(places, default=-1) > min(map(text.find, later))


def documents(name: str, row: dict[str, Any], supervise: str) -> tuple[list[Document], Any]:
    summary = RuleCounts()
    conversation = parse_conversation(row, summary)
    out = render_all(
        coder(name), [conversation], max_length=10**6, supervise=supervise, summary=summary,
        stops=stop_ids(name), skip_bad=1,
    )  # fmt: skip
    return out, summary.counts


def supervised(name: str, document: Document) -> list[str]:
    edges = np.flatnonzero(np.diff(document.answer, prepend=False, append=False))
    runs = [document.ids[start:stop].tolist() for start, stop in edges.reshape(-1, 2)]
    return [coder(name).decode(run) for run in runs]


def tokens(name: str, text: str) -> list[int]:
    return list(coder(name)(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=FAST, deadline=None, derandomize=True)
def test_the_supervised_tokens_are_what_the_target_would_generate(name: str, data: Any) -> None:
    check(name, data.draw(rows(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=SLOW, deadline=None, print_blob=True)
def test_the_supervised_tokens_are_what_the_target_would_generate_more_often(
    name: str, data: Any
) -> None:
    check(name, data.draw(rows(name)))


def test_ten_published_templates_and_five_small_ones_are_compared() -> None:
    assert len(PUBLISHED) >= 10
    assert len(SMALL) == 5
