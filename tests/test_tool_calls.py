"""Tool calls, results and thoughts: read from rows, given to templates, or counted as lost."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.data.answer_spans import ChatTemplate
from outrider.data.conversations import (
    Conversation,
    Message,
    RuleCounts,
    parse_conversation,
    read_prompts,
)
from outrider.data.rendered_text import ClosedThought
from outrider.data.sources import data_source
from outrider.data.template_forms import template_forms
from outrider.data.tokenise import conversation_key, prompt_ids, render, render_all
from outrider.models.target.chat_template import set_template_args
from tests.template_families import coder, stop_ids
from tests.test_tokenise import word_tokenizer

TOOL = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": {}}}
ROME = {"city": "Rome"}
QUESTION = {"role": "user", "content": "Rome?"}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "call_1"}
FINAL = {"role": "assistant", "content": "21 degrees."}


def call(arguments: Any = None, name: str = "weather") -> dict[str, Any]:
    arguments = ROME if arguments is None else arguments
    function = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def calling(content: str | None = "Let me check.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call()], **more}


def answers(
    name: str, turns: list[Any], supervise: str = "all", tokenizer: Any = None, **more: Any
) -> tuple[list[str], RuleCounts]:
    """Return the runs of supervised tokens as text, and the rules that were used."""
    summary, tokenizer = RuleCounts(), tokenizer or coder(name)
    conversation = parse_conversation({"messages": turns, **more}, summary)
    documents = render_all(
        tokenizer, [conversation], max_length=10**6, supervise=supervise, summary=summary,
        stops=stop_ids(name),
    )  # fmt: skip
    texts = list[str]()
    for document in documents:
        edges = np.flatnonzero(np.diff(document.answer, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2):
            texts.append(tokenizer.decode(document.ids[start:stop].tolist()))
    return texts, summary


# ---- reading ----


def test_calls_results_and_tools_of_openai_are_kept() -> None:
    turns = [QUESTION, calling(), RESULT, FINAL]
    conversation = parse_conversation({"messages": turns, "tools": json.dumps([TOOL])})
    assert conversation == turns
    assert conversation.tools == [TOOL]
    assert conversation[:2].tools == [TOOL]


def test_roles_of_sharegpt_become_calls_and_results() -> None:
    function = json.dumps({"name": "weather", "arguments": ROME})
    turns = [("human", "Rome?"), ("gpt", "Let me check."), ("function_call", function),
             ("observation", "21"), ("gpt", "21 degrees.")]  # fmt: skip
    summary = RuleCounts()
    record = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    conversation = parse_conversation({**record, "tools": [TOOL["function"]]}, summary)
    called = {"type": "function", "function": {"name": "weather", "arguments": ROME}}
    assert conversation == [
        QUESTION, {"role": "assistant", "content": "Let me check.", "tool_calls": [called]},
        {"role": "tool", "content": "21"}, FINAL,
    ]  # fmt: skip
    assert conversation.tools == [TOOL]
    assert summary.counts == {"turns joined": 1}


def test_several_results_in_a_list_are_several_turns_and_an_object_is_its_json_text() -> None:
    results = [{"tool_call_id": "a", "content": "1"}, {"tool_call_id": "b", "content": {"n": 2}}]
    turns = [QUESTION, calling(), {"role": "tool", "content": results}, FINAL]
    assert parse_conversation({"messages": turns})[2:4] == [
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": '{"n": 2}', "tool_call_id": "b"},
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_has_three_names(key: str) -> None:
    turns = [QUESTION, {**FINAL, key: "Hm."}]
    assert parse_conversation({"messages": turns})[1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    "part",
    [{"type": "thinking", "thinking": "Hm."}, {"type": "reasoning", "text": "Hm."},
     {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}],
)  # fmt: skip
def test_a_part_of_the_content_may_be_a_thought(part: dict[str, Any]) -> None:
    turns = [QUESTION, {**FINAL, "content": [part, {"type": "text", "text": "21 degrees."}]}]
    assert parse_conversation({"messages": turns})[1] == {**FINAL, "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "turn",
    [RESULT, {**FINAL, "tool_calls": [{"function": {}}]}, {**FINAL, "tool_calls": "weather"},
     {**FINAL, "tool_calls": [call("no json")]}, {**FINAL, "tool_calls": [call([1])]},
     {"role": "function_call", "content": "weather Rome"}, {**FINAL, "reasoning": {"a": 1}},
     {**FINAL, "tool_calls": [call('{"a": "\\ud83d"}')]}],
)  # fmt: skip
def test_an_unreadable_call_ends_the_conversation_before_it(turn: Any) -> None:
    summary = RuleCounts()
    turns = [QUESTION, FINAL, QUESTION, turn, FINAL]
    if turn is RESULT:
        turns = [QUESTION, FINAL, RESULT, FINAL]
    assert parse_conversation({"messages": turns}, summary) == [QUESTION, FINAL]
    assert summary.counts["unreadable call"] == 1


def test_an_answer_behind_a_call_without_result_ends_the_conversation() -> None:
    summary = RuleCounts()
    assert parse_conversation({"messages": [QUESTION, calling(), FINAL]}, summary)[1:] == [
        calling()
    ]
    assert summary.counts == {"answers in a row": 1}


def test_unreadable_tools_leave_the_row_out() -> None:
    summary = RuleCounts()
    assert not parse_conversation({"messages": [QUESTION, FINAL], "tools": "weather"}, summary)
    assert summary.counts == {"unreadable tools": 1}


def test_the_key_of_a_conversation_covers_calls_and_tools() -> None:
    plain = [QUESTION, FINAL]
    keys = {
        conversation_key(parse_conversation(record))
        for record in ({"messages": plain}, {"messages": plain, "tools": [TOOL]},
                       {"messages": [QUESTION, calling("21 degrees.")]},
                       {"messages": [QUESTION, {**FINAL, "thinking": "Hm."}]})
    }  # fmt: skip
    assert len(keys) == 4


def test_prompts_keep_the_tools(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION, calling(), RESULT, FINAL], "tools": [TOOL]}))
    (prompt,) = read_prompts(data_source(str(file)))
    text = coder("qwen3").decode(prompt_ids(coder("qwen3"), prompt.first_messages()))
    assert '"name": "weather"' in text


# ---- rendering: what each template takes ----

QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
DS_CALL = (
    "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
    '<\uff5ctool\u2581sep\uff5c>weather\n```json\n{"city": "Rome"}\n```'
    "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
)


@pytest.mark.parametrize("given", [ROME, json.dumps(ROME)], ids=["object", "text"])
@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("qwen2_5", "Let me check.", f"Let me check.\n{QWEN_CALL}<|im_end|>"),
        ("llama3_1", None, '{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>'),
        ("deepseek_v3", "Let me check.", f"Let me check.{DS_CALL}"),
        ("glm4_5", "", "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n"
         "<arg_value>Rome</arg_value>\n</tool_call><|observation|>"),
        ("gpt_oss", "", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'
         "<|call|>"),
    ],
)  # fmt: skip
def test_a_call_is_supervised_in_the_form_of_the_template(
    name: str, content: str | None, expected: str, given: Any
) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [call(given)]}
    texts, summary = answers(name, [QUESTION, turn], tools=[TOOL])
    assert texts == [expected]
    assert not summary.counts["calls not rendered"]


def test_parallel_calls_and_their_results_are_rendered() -> None:
    both = {**calling(""), "tool_calls": [call(), call({"city": "Oslo"})]}
    results = [RESULT, {**RESULT, "content": "3"}]
    texts, _ = answers("qwen2_5", [QUESTION, both, *results, FINAL], tools=[TOOL])
    oslo = QWEN_CALL.replace("Rome", "Oslo")
    assert texts == [f"{QWEN_CALL}\n{oslo}<|im_end|>", "21 degrees.<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("gemma3", calling()),  # refuses the result and ignores the call
        ("phi3", calling()),  # ignores the call: today's end token would follow "check."
        ("llama3_1", calling()),  # drops the text beside the call
        (
            "llama3_1",
            {**calling(""), "tool_calls": [call(), call({"city": "Oslo"})]},
        ),  # refuses two
        ("gpt_oss", {**calling(""), "tool_calls": [call(), call({"city": "Oslo"})]}),  # first only
        ("r1_distill", calling()),  # ignores the call beside text
    ],
)
def test_a_call_that_is_not_rendered_ends_the_conversation_before_it(
    name: str, turn: dict[str, Any]
) -> None:
    opening = [QUESTION, FINAL]
    texts, summary = answers(name, [*opening, QUESTION, turn, RESULT, FINAL], tools=[TOOL])
    assert summary.counts["calls not rendered"] == 1
    assert texts == answers(name, opening, tools=[TOOL])[0]
    assert answers(name, [QUESTION, turn, RESULT, FINAL])[1].counts["no turns"] == 1


def test_words_of_the_call_in_the_text_beside_it_do_not_hide_that_it_is_ignored() -> None:
    _, summary = answers("phi3", [QUESTION, calling("I call weather for Rome.")])
    assert summary.counts["calls not rendered"] == 1


def test_mistral_gets_ids_of_nine_characters() -> None:
    texts, summary = answers("mistral", [QUESTION, calling(""), RESULT, FINAL])
    assert not summary.counts
    assert texts == [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]</s>', " 21 degrees.</s>"
    ]  # fmt: skip


def test_without_a_template_a_call_ends_the_conversation() -> None:
    tokenizer, summary = word_tokenizer(None), RuleCounts()
    turns = [QUESTION, FINAL, QUESTION, calling()]
    documents = render_all(
        tokenizer, [parse_conversation({"messages": turns})], max_length=99, summary=summary
    )
    assert len(documents) == 1
    assert summary.counts == {"calls not rendered": 1}


# ---- thoughts ----


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\n21 degrees.<|im_end|>"),
        ("glm4_5", "\n<think>Hm.</think>\n21 degrees.<|user|>"),
        ("lfm2_5", "<think>Hm.</think>21 degrees.<|im_end|>"),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
         "<|message|>21 degrees.<|return|>"),
    ],
)  # fmt: skip
def test_a_thought_is_supervised_where_the_template_reads_it(name: str, expected: str) -> None:
    texts, summary = answers(name, [QUESTION, {**FINAL, "reasoning_content": "Hm."}])
    assert texts == [expected]
    assert not summary.counts


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "lfm2_5", "qwen3", "glm4_5", "nemotron_3"])
def test_a_thought_in_tags_is_trained_as_the_template_writes_thoughts(name: str) -> None:
    """Templates that read thoughts elsewhere render the tags of a content as text."""
    tagged = {**FINAL, "content": "<think>\nHm.\n</think>\n\n21 degrees."}
    apart = {**FINAL, "reasoning_content": "Hm."}
    assert answers(name, [QUESTION, tagged]) == answers(name, [QUESTION, apart])


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "gemma3", "r1_distill", "mistral"])
def test_a_thought_that_the_template_does_not_take_ends_the_conversation(name: str) -> None:
    thinking = {**FINAL, "reasoning_content": "Hm."}
    texts, summary = answers(name, [QUESTION, FINAL, QUESTION, thinking])
    assert summary.counts["thoughts not taken"] == 1
    assert texts == answers(name, [QUESTION, FINAL])[0]


def test_thoughts_that_are_removed_from_every_answer_are_counted() -> None:
    thinking = {**FINAL, "content": "<think>\nHm.\n</think>\n\n21 degrees."}
    texts, summary = answers("r1_distill", [QUESTION, thinking])
    assert len(texts) == 1
    assert "Hm." not in texts[0]
    assert summary.counts["thoughts removed"] == 1
    assert not answers("qwen3", [QUESTION, thinking])[1].counts["thoughts removed"]


def test_thoughts_against_the_flag_are_named_as_a_contradiction() -> None:
    tokenizer = copy.deepcopy(coder("qwen3"))
    set_template_args(tokenizer, {"enable_thinking": False})
    turns = [QUESTION, {**FINAL, "reasoning_content": "Hm."}]
    with pytest.raises(ClosedThought, match=r"target\.thinking=false closes the thought") as error:
        answers("qwen3", turns, tokenizer=tokenizer)
    assert "target.thinking=true" in error.value.fix
    assert "earlier turns" not in error.value.fix


# ---- ends of turns ----


def test_the_token_of_the_next_role_ends_an_answer_of_glm() -> None:
    texts, _ = answers("glm", [QUESTION, FINAL, QUESTION, FINAL])
    assert texts == ["21 degrees.<|user|>"] * 2
    texts, _ = answers("glm", [QUESTION, calling(""), RESULT, FINAL])
    assert texts == ["<call>weather city=Rome</call><|observation|>", "21 degrees.<|user|>"]
    texts, _ = answers("glm", [QUESTION, calling(""), QUESTION, FINAL])  # a call without a result
    assert texts == ["<call>weather city=Rome</call>", "21 degrees.<|user|>"]


def test_harmony_ends_the_last_answer_with_return_and_earlier_ones_with_nothing() -> None:
    """The target would generate <|return|>; the history has <|end|> in its place."""
    for name in ("harmony", "gpt_oss"):
        texts, summary = answers(name, [QUESTION, FINAL, QUESTION, FINAL])
        final = "<|channel|>final<|message|>21 degrees."
        assert texts == [final, f"{final}<|return|>"]
        assert summary.counts == {"rewritten": 1}
        each, summary = answers(name, [QUESTION, FINAL, QUESTION, FINAL], "each")
        assert each == [f"{final}<|return|>"] * 2
        assert not summary.counts["rewritten"]


def test_phi_ends_the_last_answer_at_its_first_stop_token() -> None:
    for name in ("phi", "phi3"):
        texts, _ = answers(name, [QUESTION, FINAL, QUESTION, FINAL])
        assert texts == ["21 degrees.<|end|>"] * 2


# ---- probes ----


def test_forms_are_found_once_per_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, count = coder("qwen3"), 0
    forms = template_forms(tokenizer)
    apply = type(tokenizer).apply_chat_template

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        return apply(self, *args, **more)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", counted)
    assert template_forms(tokenizer) is forms
    assert count == 0
    rows = [
        Conversation([Message(role="user", content="a"), Message(role="assistant", content="b")])
    ]
    render_all(tokenizer, rows * 5, max_length=99, stops=stop_ids("qwen3"))
    assert count == 15, "the whole and two prefixes of each"


def test_a_window_of_a_long_conversation_begins_with_a_question() -> None:
    """A result of a tool without its call would be refused."""
    turns = [QUESTION, calling(""), RESULT, FINAL] * 70
    chat = ChatTemplate(coder("gpt_oss"), tools=[TOOL], stops=stop_ids("gpt_oss"))
    conversation = parse_conversation({"messages": turns})
    document = render(
        coder("gpt_oss"), Conversation(conversation, [TOOL]), max_length=10**6,
        stops=stop_ids("gpt_oss"),
    )  # fmt: skip
    text = chat.text(conversation)
    assert document.ids.tolist() == chat.ids(text)
    call_id = coder("gpt_oss").convert_tokens_to_ids("<|call|>")
    assert int((document.ids[document.answer] == call_id).sum()) == 70
