"""Which tokens are answers: written out by hand for each kind of template, then as a property."""

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from io import StringIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outrider.conf.errors import RunError
from outrider.data.conversations import Message, Summary
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
from outrider.models.chat_template import set_template_args

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


def words(template: str | None) -> Any:
    """One token per word and per white-space character."""
    vocab = {word: index for index, word in enumerate([*WORDS, "?", "<t>", "</t>"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|</?t>"), "isolated")
    inner.decoder = decoders.Fuse()
    return wrap(inner, template)


@cache
def letters(template: str | None) -> Any:
    vocab = {letter: index for index, letter in enumerate(sorted("?<>/:tQA ab1\n\u00e9\U0001f600"))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return wrap(inner, template)


@cache
def octets(template: str | None, *, trim: bool = False) -> Any:
    """One token per byte, as in GPT-2; a character may take several."""
    vocab = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = processors.ByteLevel(trim_offsets=trim)
    inner.decoder = decoders.ByteLevel()
    return wrap(inner, template)


def trimmed(template: str | None) -> Any:
    return octets(template, trim=True)


def dialogue(*contents: str, system: str | None = None) -> list[Message]:
    turns = [
        Message(role=("user", "assistant")[n % 2], content=text) for n, text in enumerate(contents)
    ]
    return turns if system is None else [Message(role="system", content=system), *turns]


def shown(tokenizer: Any, messages: Sequence[Message], **more: Any) -> str:
    """The document's tokens, answers in brackets."""
    document = render(tokenizer, messages, max_length=1000, **more)
    tokens = [text.replace("\n", "\\n") for text in map(tokenizer.decode, document.ids.tolist())]
    flags = document.answer
    return " ".join(f"[{t}]" if a else t for t, a in zip(tokens, flags, strict=True))


HI = r"<|user|> \n hi <|end|> \n"
WHY = r"<|user|> \n why <|end|> \n"


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_single_token_answer_is_supervised_with_its_end(template: str) -> None:
    assert shown(words(template), dialogue("hi", "4")) == (
        HI + r" <|assistant|> \n [4] [<|end|>] \n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_answer_of_several_turns_is_supervised(template: str) -> None:
    assert shown(words(template), dialogue("hi", "4 five", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [ ] [five] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [so] [<|end|>] \\n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_system_turn_is_read_and_not_supervised(template: str) -> None:
    assert shown(words(template), dialogue("hi", "4", system="brief")) == (
        rf"<|system|> \n brief <|end|> \n {HI} <|assistant|> \n [4] [<|end|>] \n"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_turns_without_anything_between_them_stay_apart(template: str) -> None:
    tokenizer = words(template.replace("\n", ""))
    assert shown(tokenizer, dialogue("hi", "4", "why", "so")) == (
        "<|user|> hi <|end|> <|assistant|> [4] [<|end|>]"
        " <|user|> why <|end|> <|assistant|> [so] [<|end|>]"
    )


def test_an_answer_whose_last_character_has_no_token_ends_there() -> None:
    """The newline inside the block is dropped by this tokenizer; the next question is no answer."""
    tokenizer = words(MARKED)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert shown(tokenizer, dialogue("hi", "4", "why", "so")) == (
        "<|user|> hi <|end|> <|assistant|> [4] [<|end|>]"
        " <|user|> why <|end|> <|assistant|> [so] [<|end|>]"
    )


def test_marked_answers_are_those_of_transformers() -> None:
    """Where every character has a token, its own mask is an independent reference."""
    tokenizer = words(MARKED.replace("<|end|>\n{% endg", "<|end|>{% endg"))
    messages = dialogue("hi", "4 five", "why", "so", "bye", "\nso\n", system="brief")
    theirs = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = render(tokenizer, messages, max_length=1000)
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.answer.tolist() == [flag == 1 for flag in theirs["assistant_masks"]]


def test_a_template_that_rewrites_history_is_followed() -> None:
    """Thinking is dropped from earlier answers; the last answer is written with it."""
    messages = dialogue("hi", "<t>so</t>4", "why", "<t>five</t>bye")
    assert shown(words(THINKING), messages) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [<t>] [five] [</t>] [bye] [<|end|>] \\n"
    )


def test_what_the_template_writes_after_the_prompt_is_the_targets_to_write() -> None:
    """The empty thinking stands behind the generation prompt, so it belongs to the answer."""
    assert shown(words(THINKING), dialogue("hi", "4", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n [<t>] [</t>] [so] [<|end|>] \\n"
    )


def test_template_arguments_reach_the_template() -> None:
    """With thinking switched off the prompt itself ends in the empty thinking."""
    off = PROMPT.replace("\\n", "\n").replace("\n{%", "\n{{ '' if think else '<t></t>' }}{%")
    tokenizer = copy.deepcopy(words(THINKING.replace(PROMPT, off)))
    set_template_args(tokenizer, {"think": False})
    assert shown(tokenizer, dialogue("hi", "4", "why", "so")) == (
        f"{HI} <|assistant|> \\n [4] [<|end|>] \\n"
        f" {WHY} <|assistant|> \\n <t> </t> [so] [<|end|>] \\n"
    )
    prompt = prompt_ids(tokenizer, ["why"])
    assert tokenizer.decode(prompt).endswith("<|assistant|>\n<t></t>")


def test_a_prompt_that_the_rendered_answer_does_not_continue_is_no_border() -> None:
    """The prompt opens a thought, as DeepSeek-R1's does; the rendered answer has none."""
    tokenizer = words(PLAIN.replace("<|assistant|>\n{%", "<|assistant|>\n<t>{%"))
    assert shown(tokenizer, dialogue("hi", "4")) == HI + r" <|assistant|> \n [4] [<|end|>] \n"


def test_an_end_that_differs_in_last_place_is_found_in_every_place() -> None:
    """Harmony ends the last answer with another token; text before the answer stays supervised."""
    body = "{% if m.role == 'assistant' %}<t></t>{% endif %}{{ m.content }}"
    end = "{{ '<|pad|>' if loop.last and m.role == 'assistant' else '<|end|>' }}"
    assert shown(words(OPENING + body + end + "{% endfor %}" + PROMPT), dialogue(*"4444")) == (
        r"<|user|> \n 4 <|end|> <|assistant|> \n [<t>] [</t>] [4] [<|end|>]"
        r" <|user|> \n 4 <|end|> <|assistant|> \n [<t>] [</t>] [4] [<|pad|>]"
    )


def merging(template: str) -> Any:
    """Letters and one merge: two newlines are one token."""
    vocab = {letter: n for n, letter in enumerate(["\n", "\n\n", *"hi4<t/>"])}
    return wrap(Tokenizer(models.BPE(vocab, [("\n", "\n")])), template)


def test_an_answer_starts_at_a_token_of_its_own() -> None:
    r"""The prompt ends in \n; an answer that starts with \n would merge with it into one token."""
    assert shown(merging(PLAIN), dialogue("hi", "\n4", "\nhi", "\n\n")) == (
        r"<|user|> \n h i <|end|> \n <|assistant|> \n [\n] [4] [<|end|>] \n"
        r" <|user|> \n\n h i <|end|> \n <|assistant|> \n [\n\n] [<|end|>] \n"
    )


def test_a_rewritten_answer_starts_at_a_token_of_its_own() -> None:
    """Token prefixes and the mark both fail here; the prefixes of the text do not."""
    thought = "[<] [t] [>] [<] [/] [t] [>]"
    assert shown(merging(THINKING), dialogue("hi", "\n<t></t>4")) == (
        rf"<|user|> \n h i <|end|> \n <|assistant|> \n [\n] {thought} [4] [<|end|>] \n"
    )


def test_a_blank_whose_offset_was_trimmed_away_stays_on_its_side() -> None:
    """GPT-2's tokenizer calls the place of a lone blank (5, 5), not (4, 5)."""
    tokenizer = octets(THINKING.replace("|>\n", "|> "), trim=True)
    assert shown(tokenizer, dialogue("4", "<t>h</t>5", "6", "7")).startswith(
        "<|user|>   4 <|end|>   <|assistant|>   [5] [<|end|>]   <|user|>"
    )


def test_without_an_end_token_the_answer_is_its_text() -> None:
    template = "{% for m in messages %}{{ 'Q:' if m.role == 'user' else 'A:' }} {{ m.content }}\n"
    tokenizer = words(template + "{% endfor %}{% if add_generation_prompt %}A:{% endif %}")
    assert shown(tokenizer, dialogue("hi", "4", "why", "so")) == (
        r"Q:   hi \n A: [ ] [4] \n Q:   why \n A: [ ] [so] \n"
    )


def test_without_a_template_the_text_is_joined_by_newlines() -> None:
    """The end token closes the last answer; the first is closed by the next question's newline."""
    assert shown(words(None), dialogue("hi", "4", "why", "so bye", system="brief")) == (
        r"brief \n hi \n [4] \n why \n [so] [ ] [bye] [<|end|>]"
    )


def test_without_a_template_the_start_token_comes_first_if_the_tokenizer_adds_one() -> None:
    tokenizer = words(None)
    start = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[start]
    )
    assert shown(tokenizer, dialogue("hi", "4")) == r"<|start|> hi \n [4] [<|end|>]"
    assert tokenizer.decode(prompt_ids(tokenizer, ["hi"])) == "<|start|>hi\n"


CONTENT = st.text("ab1 \n\u00e9\U0001f600", min_size=1, max_size=6).filter(
    lambda text: text.strip()
)
TURNS = st.lists(CONTENT, min_size=2, max_size=8).map(lambda turns: turns[: len(turns) // 2 * 2])


@pytest.mark.parametrize("tokenizer", [letters, octets, trimmed])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(turns=TURNS, system=st.none() | CONTENT)
@settings(max_examples=20, deadline=None)
def test_the_supervised_text_is_exactly_the_answers(
    tokenizer: Any, template: str, turns: list[str], system: str | None
) -> None:
    coder, messages = tokenizer(template), dialogue(*turns, system=system)
    document = render(coder, messages, max_length=10_000)
    supervised = document.ids[document.answer].tolist()
    assert coder.decode(supervised) == "".join(f"{answer}<|end|>" for answer in turns[1::2])
    whole = coder.apply_chat_template(messages, tokenize=False)
    assert document.ids.tolist() == coder(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tokenizer", [letters, octets, trimmed])
@given(turns=TURNS, thought=CONTENT)
@settings(max_examples=20, deadline=None)
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
@settings(max_examples=20, deadline=None)
def test_training_reads_the_prompt_that_decoding_reads(
    template: str | None, turns: list[str], system: str | None
) -> None:
    coder, messages = letters(template), dialogue(*turns, system=system)
    prompt = prompt_ids(coder, messages[:-1])
    document = render(coder, messages, max_length=10_000)
    assert document.ids[: len(prompt)].tolist() == prompt
    assert not document.answer[len(prompt) - 1]
    assert document.answer[len(prompt)]
    if system is None:
        assert prompt_ids(coder, turns[:-1]) == prompt


def test_a_long_conversation_keeps_its_head_and_is_counted() -> None:
    """The answer of 8 tokens starts at token 7; 9 of the 16 tokens keep two tokens of it."""
    tokenizer, summary = letters(PLAIN), Summary()
    messages = dialogue("a", "a" * 7)
    whole = render(tokenizer, messages, max_length=16)
    assert (len(whole.ids), whole.cut) == (16, 0)
    (short,) = render_all(tokenizer, [messages], max_length=9, summary=summary)
    assert short == Document.of(whole.ids[:9].tolist(), [False] * 7 + [True] * 2, whole.key, 7)
    assert summary.counts == {"cut": 1}


def test_a_conversation_whose_answers_are_cut_off_is_dropped_and_counted() -> None:
    summary = Summary()
    kept = render_all(
        letters(PLAIN),
        [dialogue("a" * 9, "b"), dialogue("a", "b")],
        max_length=12,
        summary=summary,
    )
    assert [document.key for document in kept] == [conversation_key(dialogue("a", "b"))]
    assert summary.counts == {"cut": 1, "answers cut off": 1}


def test_the_key_is_of_the_conversation_alone() -> None:
    one, other = dialogue("hi", "4"), dialogue("hi", "five")
    documents = [
        render(words(PLAIN), one, max_length=20),
        render(letters(None), one, max_length=2),
    ]
    assert {document.key for document in documents} == {conversation_key(one)}
    assert conversation_key(one) != conversation_key(other)
    assert conversation_key(dialogue("ab", "c")) != conversation_key(dialogue("a", "bc"))


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_a_conversation_without_answers_is_an_error_that_shows_it(template: str | None) -> None:
    with pytest.raises(RunError, match=r"has no answer token\n    user: hi\n"):
        render(words(template), dialogue("hi"), max_length=20)


def test_a_conversation_that_the_template_refuses_is_an_error_that_shows_it() -> None:
    refusing = "{{ raise_exception('no system turns') if messages[0].role == 'system' }}" + PLAIN
    with pytest.raises(RunError, match=r"no system turns\n    system: brief\n    user: hi"):
        render(words(refusing), dialogue("hi", "4", system="brief"), max_length=20)


def test_an_answer_that_the_template_hides_is_an_error_that_says_so() -> None:
    hiding = PLAIN.replace("messages %}", "messages[-2:] %}")
    with pytest.raises(RunError, match="answer 1 is not found"):
        render(words(hiding), dialogue("hi", "4", "why", "so"), max_length=20)


def test_answers_are_green_and_the_rest_is_dim() -> None:
    tokenizer = words(PLAIN)
    document = render(tokenizer, dialogue("hi", "4 five", "why", "so"), max_length=100)
    text = highlight_answers(tokenizer, document)
    styled = [(str(span.style), text.plain[span.start : span.end]) for span in text.spans]
    assert [part for style, part in styled if style == "green"] == ["4 five<|end|>", "so<|end|>"]
    assert (
        "".join(part for _, part in styled) == text.plain == tokenizer.decode(document.ids.tolist())
    )
    assert {style for style, _ in styled} == {"green", "dim"}


def test_samples_show_how_much_is_supervised() -> None:
    tokenizer, console = words(PLAIN), Console(width=80, file=StringIO(), record=True)
    document = render(tokenizer, dialogue("hi", "4"), max_length=100)
    show_samples(Reporter(console), tokenizer, [document] * 5, n=3)
    assert console.export_text().count("2 of 10 tokens are supervised") == 3


def test_rows_may_teach_the_last_answer_or_each_on_its_own() -> None:
    """What is supervised is the same text; who comes last decides how often it is seen."""
    tokenizer, talk = words(PLAIN), dialogue("hi", "4 why", "so", "five")
    every = render_all(tokenizer, [talk], max_length=99)
    summary = Summary()
    each = render_all(tokenizer, [talk], max_length=99, supervise="each", summary=summary)
    last = render_all(tokenizer, [talk], max_length=99, supervise="last")
    assert [len(group) for group in (every, each, last)] == [1, 2, 1]
    assert summary.counts["rows of one answer"] == 2
    assert last[0].ids.tolist() == every[0].ids.tolist()
    assert each[1] == last[0]
    assert every[0].answer[: len(each[0].ids)].tolist() == each[0].answer.tolist()
    assert every[0].answer.sum() == sum(row.answer.sum() for row in each)
    assert {row.key for row in (*every, *each, *last)} == {every[0].key}


def test_long_conversations_are_cut_or_left_out_and_the_reading_ends_with_the_limit() -> None:
    tokenizer = words(PLAIN)
    talks = [dialogue("hi", "4"), dialogue("hi", "4 " * 50), dialogue("so", "five")]
    summary = Summary()
    kept = render_all(tokenizer, talks, max_length=30, cut=False, summary=summary)
    assert len(kept) == 2
    assert summary.counts == {"too long": 1}
    assert len(render_all(tokenizer, talks, max_length=30)) == 3

    def endless() -> Iterator[list[Message]]:
        while True:
            yield talks[0]

    assert len(render_all(tokenizer, endless(), max_length=30, limit=5)) == 5
