"""Answer tokens with the published tokenizers and templates of five families."""

import copy
import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.conf.errors import RunError
from outrider.data.conversations import Message, RuleCounts, parse_conversation
from outrider.data.tokenise import prompt_ids, render, render_all
from outrider.models.target.chat_template import set_template_args
from tests import fetched

ENDS = {
    "llama3_1": "<|eot_id|>", "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>",
    "gemma3": "<end_of_turn>", "deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
WORDS = {  # that occur in the templates
    "llama3_1": ["<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"],
    "qwen2_5": ["<|im_end|>\n", "<|im_start|>assistant\n", "<|endoftext|>"],
    "qwen3": ["<|im_end|>\n", "<|im_start|>assistant\n", "<think>\n", "\n</think>\n\n"],
    "gemma3": ["<end_of_turn>\n", "<start_of_turn>model\n", "<bos>"],
    "deepseek_v3": ["<\uff5cAssistant\uff5c>", ENDS["deepseek_v3"], "<\uff5cUser\uff5c>"],
}  # fmt: skip

families = pytest.mark.parametrize("name", fetched.FAMILIES)


def dialogue(*contents: str, system: str | None = None) -> list[Message]:
    turns = [Message(role=("user", "assistant")[n % 2], content=c) for n, c in enumerate(contents)]
    return turns if system is None else [Message(role="system", content=system), *turns]


def supervised_text(coder: Any, messages: Sequence[Message], **more: Any) -> list[str]:
    """Return the runs of supervised tokens, decoded."""
    document = render(coder, messages, max_length=100_000, stops=stops(coder), **more)
    edges = np.flatnonzero(np.diff(document.answer, prepend=False, append=False))
    runs = [document.ids[start:stop].tolist() for start, stop in edges.reshape(-1, 2)]
    return [coder.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def stops(coder: Any) -> list[int]:
    """Return the end tokens of these families that the tokenizer has."""
    ids = [coder.convert_tokens_to_ids(end) for end in set(ENDS.values())]
    return [index for index in ids if index not in (None, coder.unk_token_id)]


def expected_answers(name: str, answers: Sequence[str]) -> list[str]:
    """Return the answers as this family's template renders them, up to the first end token."""
    if name == "qwen3":
        texts = [qwen3_answer(text, last=n == len(answers) - 1) for n, text in enumerate(answers)]
    else:
        trims = name in ("llama3_1", "gemma3")
        texts = [text.strip() if trims else text for text in answers]
    return [normalised(name, text).split(ENDS[name])[0] + ENDS[name] for text in texts]


def qwen3_answer(text: str, *, last: bool) -> str:
    """Qwen3 renders thinking in the last answer only, and there even if it is empty."""
    thought = ""
    if "</think>" in text:
        thought = text.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n")
        text = text.split("</think>")[-1].lstrip("\n")
    return f"<think>\n{thought}\n</think>\n\n{text.lstrip(chr(10))}" if last else text


def normalised(name: str, text: str) -> str:
    """Normalise a text as the tokenizer does: Qwen composes letters, Gemma's blanks are U+2581."""
    if name.startswith("qwen"):
        return unicodedata.normalize("NFC", text)
    return text.replace("\u2581", " ") if name == "gemma3" else text


@families
def test_a_single_token_answer(name: str) -> None:
    coder = fetched.tokenizer(name)
    document = render(coder, dialogue("2+2?", "4"), max_length=1000)
    prompt = prompt_ids(coder, ["2+2?"])
    assert document.ids[: len(prompt)].tolist() == prompt
    assert not document.answer[: len(prompt)].any()
    if name != "qwen3":  # which renders empty thinking before it
        assert document.answer.sum() == 2
    assert supervised_text(coder, dialogue("2+2?", "4")) == expected_answers(name, ["4"])


@families
def test_every_answer_of_several_turns_behind_a_system_turn(name: str) -> None:
    coder = fetched.tokenizer(name)
    messages = dialogue("2+2?", "It is 4.", "Why?", "So .", "So?", "Yes", system="Be brief .")
    assert supervised_text(coder, messages) == expected_answers(name, ["It is 4.", "So .", "Yes"])
    assert supervised_text(coder, messages, last_only=True) == expected_answers(name, ["Yes"])


@families
@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_the_end_of_an_answer_without_text_is_supervised(name: str, blank: str) -> None:
    coder = fetched.tokenizer(name)
    turns = ["Hi", blank, "Why?", blank]
    assert supervised_text(coder, dialogue(*turns)) == expected_answers(name, turns[1::2])


@families
def test_adjacent_turns_of_one_role_are_joined(name: str) -> None:
    turns = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d")]
    summary = RuleCounts()
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    messages = parse_conversation(record, summary)
    assert summary.counts == {"turns joined": 2}
    assert supervised_text(fetched.tokenizer(name), messages) == expected_answers(name, ["c\n\nd"])


@families
def test_adjacent_turns_of_one_role_that_were_not_joined(name: str) -> None:
    """Gemma's template refuses them; elsewhere each is an answer of its own."""
    messages = [*dialogue("a", "b", "c"), Message(role="user", content="d")]
    messages += [Message(role="assistant", content=text) for text in "ef"]
    if name == "gemma3":
        with pytest.raises(RunError, match=r"refused by the chat template: .* alternate"):
            render(fetched.tokenizer(name), messages, max_length=1000)
    else:
        ends = [ENDS[name]] * 3
        texts = supervised_text(fetched.tokenizer(name), messages)
        assert [text.split("\n")[-1] for text in texts] == [
            f"{t}{e}" for t, e in zip("bef", ends, strict=True)
        ]


@families
def test_thinking_is_supervised_as_the_template_renders_it(name: str) -> None:
    """Qwen3 renders that of the last answer; templates without thinking render all."""
    answers = ["<think>\nwell\n</think>\n\n4", "<think>\nhm\n</think>\n\n5"]
    coder, messages = fetched.tokenizer(name), dialogue("2+2?", answers[0], "2+3?", answers[1])
    assert supervised_text(coder, messages) == expected_answers(name, answers)
    each = render_all(coder, [messages], max_length=1000, supervise="each")
    texts = [coder.decode(d.ids[d.answer].tolist()) for d in each]
    assert texts == [expected_answers(name, answers[: n + 1])[-1] for n in range(2)]


def test_without_thinking_the_empty_thought_belongs_to_the_prompt() -> None:
    coder = copy.deepcopy(fetched.tokenizer("qwen3"))
    set_template_args(coder, {"enable_thinking": False})
    assert supervised_text(coder, dialogue("2+2?", "4")) == ["4<|im_end|>"]
    assert coder.decode(prompt_ids(coder, ["2+2?"])).endswith("<think>\n\n</think>\n\n")


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def conversation(draw: Any, name: str) -> tuple[list[str], str | None]:
    """Draw pairs of turns and an optional system turn, of any text and of template words."""
    own = st.sampled_from(
        [*WORDS[name], "\n", "\n\n", " \n", "  ", ".", " ?", "<think>", "\u00e9", "4"]
    )
    pieces = st.lists(own | CONTENT, max_size=4).map("".join)
    turns = draw(st.lists(st.tuples(pieces, pieces), min_size=1, max_size=3))
    return [text for pair in turns for text in pair], draw(st.none() | pieces)


@families
@given(data=st.data())
@settings(max_examples=60, print_blob=True)
def test_the_supervised_tokens_decode_to_exactly_the_answers(name: str, data: Any) -> None:
    turns, system = data.draw(conversation(name))
    check(name, turns, system)


def check(name: str, turns: list[str], system: str | None) -> None:
    coder, messages = fetched.tokenizer(name), dialogue(*turns, system=system)
    texts = supervised_text(coder, messages)
    assert texts == expected_answers(name, turns[1::2]), json.dumps(turns)
    prompt = prompt_ids(coder, messages[: -len(turns) + 1 or None])
    document = render(coder, messages, max_length=100_000)
    assert document.ids[: len(prompt)].tolist() == prompt
