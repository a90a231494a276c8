"""Checks of the tokenizer: characters that it loses, and a missing chat template."""

from typing import Any

from outrider.launch.doctor.finding import Finding

TEXTS = (  # Latin, Greek, Cyrillic, Chinese, Japanese, Korean, Arabic and Hebrew, Hindi, others
    "Björn, naïve, Łódź", "Γειά", "Привет, мир", "你好世界", "こんにちは", "안녕하세요",
    "مرحبا שלום", "नमस्ते", "😀 👍🏽", "a\tb\n\n  c   d", "def f(x):\n    return {'a': [1]}  # ok",
)  # fmt: skip
SHOWN = 3  # texts in the message


def check_tokenizer(tokenizer: Any) -> Finding:
    """Check that texts in several scripts, with spaces and in code, survive encoding and decoding.

    A space that decoding adds or removes at the start does not count.
    """
    changed = {}
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        if decoded.removeprefix(" ") != text:
            changed[text] = decoded
    facts = {"texts": len(TEXTS), "changed": changed}
    if not changed:
        message = f"{len(TEXTS)} texts in several scripts are equal after encoding and decoding"
        return Finding("tokenizer", "ok", message, facts)
    examples = list(changed.items())[:SHOWN]
    lines = [f"{len(changed)} of {len(TEXTS)} test texts change in encoding and decoding, such as"]
    lines += [f"{text!r} becomes {decoded!r}" for text, decoded in examples]
    fix = "Text in such characters is trained on and answered without them: use another tokenizer."
    return Finding("tokenizer", "note", "\n".join(lines), facts, fix)


def check_chat_template(tokenizer: Any) -> Finding:
    """Check that the tokenizer has a chat template."""
    if getattr(tokenizer, "chat_template", None):
        return Finding("chat", "ok", "the tokenizer has a chat template")
    message = "no chat template: turns are joined as plain text and tokenised one by one"
    fix = "An instruct model is served with one: add its chat_template to tokenizer_config.json."
    return Finding("chat", "note", message, fix=fix)
