"""Chat templates that fail, never end or explode: a message within ten seconds."""

import mmap
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.errors import RunError
from outrider.conf.schema import TargetConfig
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids, render
from outrider.models.target import chat_template
from outrider.models.target.load import load_tokenizer

CHAT = [Message(role="user", content="Hi"), Message(role="assistant", content="Hello")]
LOOP = "{% for i in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(TargetConfig(name="tiny"))


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "MEMORY", 2**29)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}", "{{ 1 % 0 }}", "{{ messages[0].content + 1 }}", "{{ 9 ** (9 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ENDLESS,
        "{{ 'a' * 10 ** 12 }}", "{{ 'a' * 10 ** 10 }}", "{{ 'a' * 10 ** 7 }}",
        DOUBLING + "{% endfor %}{{ ns.x }}", "{{ '%0999999999d' % 1 }}", "{{ x.y.z }}",
        "{{ messages.__class__.__mro__ }}", "{% for", "{{ raise_exception('no\x1b[2J') }}",
        "{{ 'x' | center(10 ** 11) }}", "{{ " + "(" * 5000 + " }}",
    ],
)  # fmt: skip
def test_failing_template_is_a_message(tokenizer: Any, template: str) -> None:
    start = time.monotonic()
    tokenizer.chat_template = template
    with pytest.raises(RunError, match=r"chat template|no answer token"):
        render(tokenizer, CHAT, max_length=64)
    with pytest.raises(RunError, match="chat template"):
        prompt_ids(tokenizer, CHAT)
    assert time.monotonic() - start < 10


def test_template_without_text(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(RunError, match=r"no answer token|not found"):
        render(tokenizer, CHAT, max_length=64)
    with pytest.raises(RunError, match="no text"):
        prompt_ids(tokenizer, CHAT[:1])


def test_limits_are_removed(tokenizer: Any) -> None:
    import resource

    before = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_DATA)
    prompt_ids(tokenizer, CHAT[:1])
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert before == (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_DATA))


def test_reserved_addresses_and_mapped_files_of_other_threads_are_not_limited(
    tokenizer: Any, tmp_path: Path
) -> None:
    """CUDA reserves more addresses than the machine has memory; weights are mapped from files."""
    file, size = tmp_path / "weights", 2**33
    with file.open("wb") as stream:
        stream.truncate(size)
    with chat_template._limits(), file.open("rb") as stream:
        with mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as mapped:
            assert mapped[-1] == 0
        with mmap.mmap(-1, 2**40, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as reserved:
            assert len(reserved) == 2**40
        with pytest.raises(MemoryError):
            bytearray(size)
