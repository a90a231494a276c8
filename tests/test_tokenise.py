"""Answer tokens: expected results for each kind of template, then property tests."""

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.conf.console import Console
from outrider.conf.errors import RunError
from outrider.data.conversations import Message, RuleCounts
from outrider.data.reporter import Reporter
from outrider.data.tokenise import (
    Document,
    conversation_key,
    highlight_answers,
    prompt_ids,
    render,
    render_all,
    show_samples,
)
from outrider.models.target.chat_template import set_template_args

SPECIAL = ["<|pad|>", "<|start|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
WORDS = ["user", "assistant", "hi", "4", "five", "why", "so", "bye", "brief", "Q:", "A:", " ", "\n"]

OPENING = "{% for m in messages %}<|{{ m.role }}|>\n"
PROMPT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
PLAIN = OPENING + "{{ m.content }}<|end|>\n{% endfor %}" + PROMPT
MARKED = (
    OPENING + "{% if m.role == 'assistant' %}\n"
    "    {%- generation %}{{ m.content }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}" + PROMPT
)
MARKED_SHORT = MARKED.replace("<|end|>\n{% endgeneration %}", "{% endgeneration %}<|end|>\n")
THINKING = (
    (  # earlier answers lose their thinking, the last one gets an empty one: as in Qwen3
        OPENING + "{% if m.role == 'assistant' and loop.last and '</t>' not in m.content %}<t></t>"
        "{{ m.content }}{% elif m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</t>')[-1] }}{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    )
    + PROMPT
)
TEMPLATES = {"plain": PLAIN, "marked": MARKED, "marked short": MARKED_SHORT}


def wrap(inner: Tokenizer, template: str | None) -> Any:
    inner.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:5],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(template: str | None) -> Any:
    """Return a tokenizer with one token per word and per white-space character."""
    vocab = {word: index for index, word in enumerate([*WORDS, "?", "<t>", "</t>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|</?t>"), "isolated")
    inner.decoder = decoders.Fuse()
    return wrap(inner, template)


@cache
def character_tokenizer(template: str | None) -> Any:
    vocab = {letter: index for index, letter in enumerate(sorted("?<>/:tQA ab1\n\u00e9\U0001f600"))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return wrap(inner, template)


@cache
def byte_tokenizer(template: str | None, *, trim: bool = False) -> Any:
    """One token per byte, as in GPT-2; a character may take several."""
    vocab = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    inner.decoder = decoders.ByteLevel()
    return wrap(inner, template)


def trimmed_byte_tokenizer(template: str | None) -> Any:
    return byte_tokenizer(template, trim=True)


def dialogue(*contents: str, system: str | None = None) -> list[Message]:
    turns = [
        Message(role=("user", "assistant")[n % 2], content=text) for n, text in enumerate(contents)
    ]
    return turns if system is None else [Message(role="system", content=system), *turns]


def marked_text(tokenizer: Any, messages: Sequence[Message], **more: Any) -> str:
    """Return the tokens of the rendered document, answers in brackets."""
    document = render(tokenizer, messages, max_length=1000, **more)
    tokens = [text.replace("\n", "\\n") for text in map(tokenizer.decode, document.ids.tolist())]
    flags = document.answer
    return " ".join(f"[{t}]" if a else t for t, a in zip(tokens, flags, strict=True))


HI = r"<|user|> \n hi <|end|> \n"
WHY = r"<|user|> \n why <|end|> \n"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_single_token_answer_is_supervised_with_its_end(template: str) -> None:
    assert marked_text(word_tokenizer(template), dialogue("hi", "4")) == (
        HI + r" <|assistant|> \n [4] [<|end|>] \n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_answer_of_several_turns_is_supervised(template: str) -> None:
    assert marked_text(word_tokenizer(template), dialogue("hi", "4 five", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [ ] [five] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [so] [<|end|>] \\n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_system_turn_is_read_and_not_supervised(template: str) -> None:
    assert marked_text(word_tokenizer(template), dialogue("hi", "4", system="brief")) == (
        rf"<|system|> \n brief <|end|> \n {HI} <|assistant|> \n [4] [<|end|>] \n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_turns_without_separator(template: str) -> None:
    tokenizer = word_tokenizer(template.replace("\n", ""))
    assert marked_text(tokenizer, dialogue("hi", "4", "why", "so")) == (
        "<|user|> hi <|end|> <|assistant|> [4] [<|end|>]"
        " <|user|> why <|end|> <|assistant|> [so] [<|end|>]"
    )


def test_an_answer_whose_last_character_has_no_token_ends_there() -> None:
    """The newline inside the block is dropped by this tokenizer; the next question is no answer."""
    tokenizer = word_tokenizer(MARKED)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert marked_text(tokenizer, dialogue("hi", "4", "why", "so")) == (
        "<|user|> hi <|end|> <|assistant|> [4] [<|end|>]"
        " <|user|> why <|end|> <|assistant|> [so] [<|end|>]"
    )


def test_answers_of_generation_blocks_equal_those_of_transformers() -> None:
    """Where every character has a token, the mask of transformers is an independent reference."""
    tokenizer = word_tokenizer(MARKED.replace("<|end|>\n{% endg", "<|end|>{% endg"))
    messages = dialogue("hi", "4 five", "why", "so", "bye", "\nso\n", system="brief")
    reference = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    document = render(tokenizer, messages, max_length=1000)
    assert document.ids.tolist() == reference["input_ids"]
    assert document.answer.tolist() == [flag == 1 for flag in reference["assistant_masks"]]


def test_a_template_that_rewrites_earlier_turns() -> None:
    """Thinking is removed from earlier answers and shown in the last one."""
    messages = dialogue("hi", "<t>so</t>4", "why", "<t>five</t>bye")
    assert marked_text(word_tokenizer(THINKING), messages) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [<t>] [five] [</t>] [bye] [<|end|>] \\n"
    )


def test_template_text_after_the_generation_prompt_is_supervised() -> None:
    """The empty thinking comes after the generation prompt, so it belongs to the answer."""
    assert marked_text(word_tokenizer(THINKING), dialogue("hi", "4", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [<t>] [</t>] [so] [<|end|>] \\n"
    )


def test_template_arguments_reach_the_template() -> None:
    """With thinking switched off the prompt itself ends in the empty thinking."""
    off = PROMPT.replace("\\n", "\n").replace("\n{%", "\n{{ '' if think else '<t></t>' }}{%")
    tokenizer = copy.deepcopy(word_tokenizer(THINKING.replace(PROMPT, off)))
    set_template_args(tokenizer, {"think": False})
    assert marked_text(tokenizer, dialogue("hi", "4", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n <t> </t> [so] [<|end|>] \\n"
    )
    prompt = prompt_ids(tokenizer, ["why"])
    assert tokenizer.decode(prompt).endswith("<|assistant|>\n<t></t>")


def test_a_generation_prompt_that_is_no_prefix_of_the_rendered_answer() -> None:
    """The prompt opens a thought, as DeepSeek-R1's does; the rendered answer has none."""
    tokenizer = word_tokenizer(PLAIN.replace("<|assistant|>\n{%", "<|assistant|>\n<t>{%"))
    assert marked_text(tokenizer, dialogue("hi", "4")) == HI + r" <|assistant|> \n [4] [<|end|>] \n"


def test_an_end_token_that_differs_after_the_last_answer() -> None:
    """Harmony ends the last answer with another token; text before the answer stays supervised."""
    body = "{% if m.role == 'assistant' %}<t></t>{% endif %}{{ m.content }}"
    end = "{{ '<|pad|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
    assert marked_text(
        word_tokenizer(OPENING + body + end + "{% endfor %}" + PROMPT), dialogue(*"4444")
    ) == (
        r"<|user|> \n 4 <|end|> <|assistant|> \n [<t>] [</t>] [4] [<|end|>]"
        r" <|user|> \n 4 <|end|> <|assistant|> \n [<t>] [</t>] [4] [<|pad|>]"
    )


def merging_tokenizer(template: str) -> Any:
    """Letters and one merge: two newlines are one token."""
    vocab = {letter: n for n, letter in enumerate(["\n", "\n\n", *"hi4<t/>"])}
    return wrap(Tokenizer(models.BPE(vocab, [("\n", "\n")])), template)


def test_a_token_across_the_start_of_an_answer_is_split() -> None:
    r"""The prompt ends in \n; an answer that starts with \n would merge with it into one token."""
    assert marked_text(merging_tokenizer(PLAIN), dialogue("hi", "\n4", "\nhi", "\n\n")) == (
        r"<|user|> \n h i <|end|> \n <|assistant|> \n [\n] [4] [<|end|>] \n"
        r" <|user|> \n\n h i <|end|> \n <|assistant|> \n [\n\n] [<|end|>] \n"
    )


def test_a_token_across_the_start_of_a_rewritten_answer_is_split() -> None:
    """Token prefixes and the mark both fail here; text prefixes do not."""
    thought = "[<] [t] [>] [<] [/] [t] [>]"
    assert marked_text(merging_tokenizer(THINKING), dialogue("hi", "\n<t></t>4")) == (
        rf"<|user|> \n h i <|end|> \n <|assistant|> \n [\n] {thought} [4] [<|end|>] \n"
    )


def test_a_blank_with_trimmed_offsets_is_not_part_of_the_answer() -> None:
    """GPT-2's tokenizer returns the offsets (5, 5) for a single blank, not (4, 5)."""
    tokenizer = byte_tokenizer(THINKING.replace("|>\n", "|> "), trim=True)
    assert marked_text(tokenizer, dialogue("4", "<t>h</t>5", "6", "7")).startswith(
        "<|user|>   4 <|end|>   <|assistant|>   [5] [<|end|>]   <|user|>"
    )


def test_without_an_end_token_the_answer_is_its_text() -> None:
    template = "{% for m in messages %}{{ 'Q:' if m.role == 'user' else 'A:' }} {{ m.content }}\n"
    tokenizer = word_tokenizer(template + "{% endfor %}{% if add_generation_prompt %}A:{% endif %}")
    assert marked_text(tokenizer, dialogue("hi", "4", "why", "so")) == (
        r"Q:   hi \n A: [ ] [4] \n Q:   why \n A: [ ] [so] \n"
    )


def test_without_a_template_the_text_is_joined_by_newlines() -> None:
    """The end token closes the last answer; the first is closed by the next question's newline."""
    assert marked_text(
        word_tokenizer(None), dialogue("hi", "4", "why", "so bye", system="brief")
    ) == (r"brief \n hi \n [4] \n why \n [so] [ ] [bye] [<|end|>]")


def test_without_a_template_the_start_token_comes_first_if_the_tokenizer_adds_one() -> None:
    tokenizer = word_tokenizer(None)
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[start]
    )
    assert marked_text(tokenizer, dialogue("hi", "4")) == r"<|start|> hi \n [4] [<|end|>]"
    assert tokenizer.decode(prompt_ids(tokenizer, ["hi"])) == "<|start|>hi\n"


CONTENT = st.text("ab1 \n\u00e9\U0001f600", min_size=1, max_size=6).filter(
    lambda text: text.strip()
)
TURNS = st.lists(CONTENT, min_size=2, max_size=8).map(lambda turns: turns[: len(turns) // 2 * 2])


@pytest.mark.parametrize("tokenizer", [character_tokenizer, byte_tokenizer, trimmed_byte_tokenizer])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(turns=TURNS, system=st.none() | CONTENT)
@settings(max_examples=20)
def test_the_supervised_text_is_exactly_the_answers(
    tokenizer: Any, template: str, turns: list[str], system: str | None
) -> None:
    coder, messages = tokenizer(template), dialogue(*turns, system=system)
    document = render(coder, messages, max_length=10_000)
    supervised = document.ids[document.answer].tolist()
    assert coder.decode(supervised) == "".join(f"{answer}<|end|>" for answer in turns[1::2])
    text = coder.apply_chat_template(messages, tokenize=False)
    assert document.ids.tolist() == coder(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer", [character_tokenizer, byte_tokenizer, trimmed_byte_tokenizer])
@given(turns=TURNS, thought=CONTENT)
@settings(max_examples=20)
def test_the_supervised_text_is_what_a_rewriting_template_leaves_of_the_answers(
    tokenizer: Any, turns: list[str], thought: str
) -> None:
    coder = tokenizer(THINKING)
    thinking = [text if n % 2 == 0 else f"<t>{thought}</t>{text}" for n, text in enumerate(turns)]
    document = render(coder, dialogue(*thinking), max_length=10_000)
    supervised = document.ids[document.answer].tolist()
    earlier, last = turns[1:-1:2], thinking[-1]
    assert coder.decode(supervised) == "".join(f"{answer}<|end|>" for answer in [*earlier, last])


@pytest.mark.parametrize("template", [*TEMPLATES.values(), None])
@given(turns=TURNS, system=st.none() | CONTENT)
@settings(max_examples=20)
def test_training_and_decoding_have_equal_prompt_tokens(
    template: str | None, turns: list[str], system: str | None
) -> None:
    coder, messages = character_tokenizer(template), dialogue(*turns, system=system)
    prompt = prompt_ids(coder, messages[:-1])
    document = render(coder, messages, max_length=10_000)
    assert document.ids[: len(prompt)].tolist() == prompt
    assert not document.answer[len(prompt) - 1]
    assert document.answer[len(prompt)]
    if system is None:
        assert prompt_ids(coder, turns[:-1]) == prompt


def test_a_long_conversation_is_cut_and_counted() -> None:
    """The answer of 8 tokens starts at token 7; 9 of the 16 tokens keep two tokens of it."""
    tokenizer, summary = character_tokenizer(PLAIN), RuleCounts()
    messages = dialogue("a", "a" * 7)
    full = render(tokenizer, messages, max_length=16)
    assert (len(full.ids), full.cut) == (16, 0)
    (short,) = render_all(tokenizer, [messages], max_length=9, summary=summary)
    assert short == Document.of(full.ids[:9].tolist(), [False] * 7 + [True] * 2, full.key, 7)
    assert summary.counts == {"cut": 1}


def test_a_conversation_whose_answers_are_cut_off_is_dropped_and_counted() -> None:
    summary = RuleCounts()
    documents = render_all(
        character_tokenizer(PLAIN),
        [dialogue("a" * 9, "b"), dialogue("a", "b")],
        max_length=12,
        summary=summary,
    )
    assert [document.key for document in documents] == [conversation_key(dialogue("a", "b"))]
    assert summary.counts == {"cut": 1, "answers cut off": 1}


def test_the_key_depends_only_on_the_conversation() -> None:
    one, other = dialogue("hi", "4"), dialogue("hi", "five")
    documents = [
        render(word_tokenizer(PLAIN), one, max_length=20),
        render(character_tokenizer(None), one, max_length=2),
    ]
    assert {document.key for document in documents} == {conversation_key(one)}
    assert conversation_key(one) != conversation_key(other)
    assert conversation_key(dialogue("ab", "c")) != conversation_key(dialogue("a", "bc"))


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_a_conversation_without_answers_raises_and_is_shown(template: str | None) -> None:
    with pytest.raises(RunError, match=r"has no answer token\n    user: hi\n"):
        render(word_tokenizer(template), dialogue("hi"), max_length=20)


def test_a_conversation_that_the_template_refuses_raises_and_is_shown() -> None:
    refusing = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}" + PLAIN
    with pytest.raises(RunError, match=r"no system turns\n    system: brief\n    user: hi"):
        render(word_tokenizer(refusing), dialogue("hi", "4", system="brief"), max_length=20)


def test_an_answer_that_the_template_hides_raises() -> None:
    hiding = PLAIN.replace("messages %}", "messages[-2:] %}")
    with pytest.raises(RunError, match="answer 1 is not found"):
        render(word_tokenizer(hiding), dialogue("hi", "4", "why", "so"), max_length=20)


def test_answers_are_green_and_the_rest_is_dim() -> None:
    tokenizer = word_tokenizer(PLAIN)
    document = render(tokenizer, dialogue("hi", "4 five", "why", "so"), max_length=100)
    text = highlight_answers(tokenizer, document)
    styled = [(str(span.style), text.plain[span.start : span.end]) for span in text.spans]
    assert [part for style, part in styled if style == "green"] == ["4 five<|end|>", "so<|end|>"]
    assert (
        "".join(part for _, part in styled) == text.plain == tokenizer.decode(document.ids.tolist())
    )
    assert {style for style, _ in styled} == {"green", "dim"}


def test_samples_show_how_much_is_supervised() -> None:
    tokenizer, console = word_tokenizer(PLAIN), Console(width=80, file=StringIO(), record=True)
    document = render(tokenizer, dialogue("hi", "4"), max_length=100)
    show_samples(Reporter(console), tokenizer, [document] * 5, n=3)
    assert console.export_text().count("2 of 10 tokens are supervised") == 3


def test_supervise_last_or_each_answer() -> None:
    """The supervised tokens are the same; only the division into rows differs."""
    tokenizer, conversation = word_tokenizer(PLAIN), dialogue("hi", "4 why", "so", "five")
    every = render_all(tokenizer, [conversation], max_length=99)
    summary = RuleCounts()
    each = render_all(tokenizer, [conversation], max_length=99, supervise="each", summary=summary)
    last = render_all(tokenizer, [conversation], max_length=99, supervise="last")
    assert [len(group) for group in (every, each, last)] == [1, 2, 1]
    assert summary.counts["rows of one answer"] == 2
    assert last[0].ids.tolist() == every[0].ids.tolist()
    assert each[1] == last[0]
    assert every[0].answer[: len(each[0].ids)].tolist() == each[0].answer.tolist()
    assert every[0].answer.sum() == sum(row.answer.sum() for row in each)
    assert {row.key for row in (*every, *each, *last)} == {every[0].key}


def test_long_conversations_are_cut_or_dropped_and_reading_stops_at_the_limit() -> None:
    tokenizer = word_tokenizer(PLAIN)
    conversations = [dialogue("hi", "4"), dialogue("hi", "4 " * 50), dialogue("so", "five")]
    summary = RuleCounts()
    documents = render_all(tokenizer, conversations, max_length=30, cut=False, summary=summary)
    assert len(documents) == 2
    assert summary.counts == {"too long": 1}
    assert len(render_all(tokenizer, conversations, max_length=30)) == 3

    def endless() -> Iterator[list[Message]]:
        while True:
            yield conversations[0]

    assert len(render_all(tokenizer, endless(), max_length=30, limit=5)) == 5
