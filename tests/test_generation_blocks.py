"""Answers of templates with `{% generation %}` blocks: trl's training templates, and small ones."""

from typing import Any

import pytest

from outrider.data.conversations import RuleCounts, parse_conversation
from outrider.data.rendered_text import ClosedThought
from outrider.data.tokenise import render_all
from tests.template_families import DS, FAMILIES, Family, coder, stop_ids
from tests.test_answer_property import supervised

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "v"}}}
PLAIN = [
    {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"},
]  # fmt: skip
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "r1"}, {"role": "assistant", "content": "a2"},
]  # fmt: skip
THOUGHTS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a", "reasoning_content": "t"},
]
PHI = Family("phi3_training", ("<|end|>", "<|endoftext|>"))
TWO_BLOCKS = Family(  # an answer in two blocks, with its heading in the first
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>"
    "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgeneration %}"
    "{% else %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ("<|end|>",),
)


def answers(
    family: Family, turns: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch,
    supervise: str = "all",
) -> list[list[str]]:  # fmt: skip
    """Return the runs of supervised text of each document."""
    monkeypatch.setitem(FAMILIES, name := str(hash(family)), family)
    conversation = parse_conversation({"messages": turns}, RuleCounts())
    documents = render_all(
        coder(name), [conversation], max_length=10**6, supervise=supervise, stops=stop_ids(name)
    )
    return [supervised(name, document) for document in documents]


@pytest.mark.parametrize(
    ("name", "stops", "expected"),
    [
        ("deepseekv3_training", (DS,), [f"a1{DS}", f"a2{DS}"]),  # <|Assistant|> is in the block
        ("qwen2_5_training", ("<|im_end|>",), ["a1<|im_end|>", "a2<|im_end|>"]),  # "\n" is
        (
            "gptoss_training", ("<|return|>", "<|call|>"),
            ["<|channel|>final<|message|>a1<|end|>", "<|channel|>final<|message|>a2<|return|>"],
        ),
        ("phi3_training", ("<|end|>", "<|endoftext|>"), ["a1<|end|>", "a2<|end|>"]),
        ("diffusion_gemma_training", ("<turn|>",), ["a1<turn|>", "a2<turn|>"]),
    ],
)  # fmt: skip
def test_a_block_is_trained_without_the_prompt_and_what_follows_the_stop_token(
    name: str, stops: tuple[str, ...], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answers(Family(name, stops), PLAIN, monkeypatch) == [expected]


def test_the_text_before_an_answer_to_results_is_in_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`<|tool outputs end|>` and the heading of an answer are in the blocks of DeepSeek-V3."""
    family = Family("deepseekv3_training", (DS,))
    ((call, answer),) = answers(family, CALLS, monkeypatch)
    assert call.startswith("<\uff5ctool\u2581calls\u2581begin\uff5c>")
    assert answer == f"a2{DS}"


def test_what_departs_from_the_prompt_within_a_tag_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt after results begins with "<", as the call does."""
    family = Family("qwen2_5_training", ("<|im_end|>",))
    ((call, answer),) = answers(family, CALLS, monkeypatch)
    assert call.startswith("<tool_call>\n")
    assert answer == "a2<|im_end|>"


@pytest.mark.parametrize("supervise", ["each", "last"])
@pytest.mark.parametrize(
    ("family", "end"), [(PHI, "<|end|>"), (TWO_BLOCKS, "<|end|>")], ids=["phi3", "two"]
)
def test_an_answer_of_several_blocks_is_trained_whole(
    family: Family, end: str, supervise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last block alone, which has the end of text (Phi-3) or the stop token."""
    rows = [[f"a1{end}"], [f"a2{end}"]]
    expected = rows if supervise == "each" else rows[1:]
    assert answers(family, PLAIN, monkeypatch, supervise) == expected


def test_a_thought_behind_a_prompt_that_closes_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same contradiction as without blocks: the prompt has an empty thought."""
    for name in ("qwen3_5_nothink", "qwen3_5_nothink_training"):
        with pytest.raises(ClosedThought):
            answers(Family(name, ("<|im_end|>",)), THOUGHTS, monkeypatch)
