"""Chat templates of published families with byte tokenizers, and small ones of the same kinds.

A family names what a reader of its template sees: the stop tokens of its generation settings, the
key of a thought, and whether the arguments of a call are text. Nothing here uses Outrider's probes.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import fetched

SPECIAL = re.compile("<[|\uff5c][^<>\\s{}]*?[|\uff5c]>|</?s>|\\[/?[A-Z_]+\\]|<(?:bos|eos|sop)>")
DS = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@dataclass(frozen=True)
class Family:
    """A template, and how conversations are given to it."""

    template: str  # name in trl, or the text of a small template
    stops: tuple[str, ...]
    bos: str = "<|bos|>"
    thought: str | None = None  # key of a thought
    text_arguments: bool = False
    no_content: str | None = ""  # content of a call without text
    short_ids: bool = False

    @property
    def published(self) -> bool:
        return "{" not in self.template

    def text(self) -> str:
        return fetched.template(self.template) if self.published else self.template


PUBLISHED = {
    "llama3": Family("llama3", ("<|eot_id|>", "<|end_of_text|>"), "<|begin_of_text|>"),
    "llama3_1": Family("llama3_1", ("<|eot_id|>", "<|eom_id|>"), "<|begin_of_text|>"),
    "qwen2_5": Family("qwen2_5", ("<|im_end|>", "<|endoftext|>")),
    "qwen3": Family("qwen3", ("<|im_end|>", "<|endoftext|>"), thought="reasoning_content"),
    "qwen3_2507": Family("qwen3_instruct_2507", ("<|im_end|>", "<|endoftext|>")),
    "qwen3_6": Family("qwen3_6", ("<|im_end|>",), thought="reasoning_content"),
    "deepseek_v3": Family("deepseekv3", (DS,), text_arguments=True),
    "r1_distill": Family("deepseek_r1_distill", (DS,), text_arguments=True, no_content=None),
    "gemma2": Family("gemma", ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma3": Family("gemma3", ("<end_of_turn>", "<eos>"), "<bos>"),
    "gemma4": Family("gemma4_v5", ("<turn|>", "<|tool_response>"), "<bos>", "reasoning_content"),
    "glm4_5": Family(
        "glm4moe", ("<|endoftext|>", "<|user|>", "<|observation|>"), thought="reasoning_content"
    ),
    "gpt_oss": Family("gptoss", ("<|return|>", "<|call|>"), thought="thinking"),
    "lfm2_5": Family("lfm2_2_5_v2", ("<|im_end|>",), thought="thinking"),
    "nemotron_3": Family("nemotron_3_nano", ("<|im_end|>",), thought="reasoning_content"),
    "phi3": Family("phi3", ("<|end|>", "<|endoftext|>")),
    "cohere": Family("cohere", ("<|END_OF_TURN_TOKEN|>",)),
    # with {% generation %} blocks, which begin in the prompt or go on behind the stop token
    "deepseek_v3_blocks": Family("deepseekv3_training", (DS,)),
    "gpt_oss_blocks": Family("gptoss_training", ("<|return|>", "<|call|>"), thought="thinking"),
    "phi3_blocks": Family("phi3_training", ("<|end|>", "<|endoftext|>")),
    "qwen2_5_blocks": Family("qwen2_5_training", ("<|im_end|>", "<|endoftext|>")),
}  # fmt: skip

SMALL = {
    "glm": Family(
        "[gMASK]<sop>{% for m in messages %}{{ '<|' + ('observation' if m.role =="
        " 'tool' else m.role)"
        " + '|>\\n' }}{% if m.reasoning_content and loop.last %}{{ '<think>'"
        " + m.reasoning_content +"
        " '</think>\\n' }}{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ '<call>' + c.function.name }}"
        "{% for k, v in c.function.arguments.items() %}{{ ' ' + k + '=' + v }}{% endfor %}"
        "{{ '</call>' }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ("<|user|>", "<|observation|>", "<|endoftext|>"), thought="reasoning_content",
    ),
    "harmony": Family(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}"
        "{% if loop.last and not add_generation_prompt %}{% if m.thinking %}"
        "{{ '<|channel|>analysis<|message|>' + m.thinking }}{{ '<|end|><|start|>assistant' }}"
        "{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content + '<|return|>' }}{% else %}"
        "{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}{% else %}"
        "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|return|>", "<|call|>"), thought="thinking",
    ),
    "r1": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' +"
        " m.content.split('</think>')[-1] + '<|eos|>' }}{% else %}{{ '<|user|>' + m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
        " '<|assistant|><think>\\n' }}{% endif %}",
        ("<|eos|>",),
    ),
    "mistral": Family(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content +"
        " '[/INST]' }}{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ '[TOOL_RESULTS] '"
        " + m.content +"
        " '[/TOOL_RESULTS]' }}{% elif m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
        "{% if c.id|length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "{{ c.function|tojson }}{% endfor %}{{ ']</s>' }}{% else %}{{ ' ' + m.content + '</s>' }}"
        "{% endif %}{% endfor %}",
        ("</s>",), "<s>", short_ids=True,
    ),
    "phi": Family(
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content +"
        " '<|end|>\\n' }}{% endfor %}"
        "{{ '<|assistant|>\\n' if add_generation_prompt else '<|endoftext|>' }}",
        ("<|end|>", "<|endoftext|>"),
    ),
}  # fmt: skip
FAMILIES = {**PUBLISHED, **SMALL}


@cache
def coder(name: str) -> Any:
    """Return a tokenizer of one token per byte, with the family's template and special tokens."""
    family = FAMILIES[name]
    template = family.text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = sorted({*SPECIAL.findall(template), *family.stops, family.bos})
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=family.bos, eos_token=family.stops[0],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def stop_ids(name: str) -> list[int]:
    return [coder(name).convert_tokens_to_ids(stop) for stop in FAMILIES[name].stops]
