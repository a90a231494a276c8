"""The server's answers: those of `Decoder`, whole and in pieces, whatever else is decoded.

The target is a random model over bytes (tests/test_decoder.py): most tokens are a part of a
character, so that pieces end within characters.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider.conf.command_settings import ServeConfig
from outrider.conf.console import Console
from outrider.data.conversations import Message
from outrider.eval.decoder import Decoder
from outrider.eval.serve.command import listen, serve
from outrider.eval.serve.parameters import Parameters
from outrider.eval.serve.server import KEY, Server
from outrider.models.decode.from_config import parse_policy_at_temperature
from outrider.models.decode.policy import Chain
from outrider.models.decode.rules.rule_table import DRAWN
from outrider.train.settings import load_published
from tests import tiny
from tests.serving import TOKENS, metrics, post, serving, stream
from tests.test_decoder import oracle, target
from tests.test_tokenise import PLAIN, byte_tokenizer

MESSAGES = [Message(role="user", content="why?")]
PROMPT = "Once upon a time"
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, **PENALTIES}
HEATS = pytest.mark.parametrize("how", [{}, SAMPLED], ids=["greedy", "sampled"])


def decoder() -> Decoder:
    return Decoder(target(), byte_tokenizer(PLAIN), oracle(lambda length: length % 3 > 0))


def expected(prompt: Any, tokens: int = TOKENS, **how: Any) -> Any:
    policy = Chain(3, DRAWN) if how.get("temperature") else Chain(3)
    return decoder().generate(prompt, tokens, policy=policy, **how)


@pytest.fixture(name="server", scope="module")
def server_of_bytes() -> Iterator[Server]:
    with serving(decoder()) as server:
        yield server


@HEATS
def test_an_answer_is_that_of_the_decoder(server: Server, how: dict[str, Any]) -> None:
    for seed in (3, 4):
        chat = post(server, "chat/completions", messages=MESSAGES, seed=seed, **how).json()
        text = post(server, "completions", prompt=PROMPT, seed=seed, max_tokens=9, **how).json()
        whole, part = expected(MESSAGES, seed=seed, **how), expected(PROMPT, 9, seed=seed, **how)
        assert chat["choices"][0]["message"]["content"] == whole.text
        assert (text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == (
            part.text, "length",
        )  # fmt: skip
        assert chat["usage"]["accepted_tokens"] == sum(whole.accepted) > 0
        assert chat["usage"]["tau"] == pytest.approx(whole.tau, abs=1e-4)
        assert (text["usage"]["prompt_tokens"], text["usage"]["completion_tokens"]) == (16, 9)


@HEATS
def test_pieces_concatenate_to_the_answer(server: Server, how: dict[str, Any]) -> None:
    answer = expected(MESSAGES, 60, seed=1, **how)
    assert any(ord(character) > 127 for character in answer.text)
    events = stream(server, "chat/completions", messages=MESSAGES, max_tokens=60, seed=1, **how)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == answer.text
    assert len(events) > 5
    finish = "length" if answer.stop_reason == "budget" else "stop"
    assert [event["choices"][0]["finish_reason"] for event in events[-2:]] == [None, finish]
    texts = stream(server, "completions", prompt=PROMPT, seed=1, **how)
    assert "".join(e["choices"][0]["text"] for e in texts) == expected(PROMPT, seed=1, **how).text


def test_costs_are_measured_before_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For batches of the server's size, with a sentence before and one after."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    console, options = Console(file=StringIO(), width=200), ServeConfig(port=0, batch=3)
    shallow, (_, decode) = tiny.drafter("medusa", target()), parse_policy_at_temperature("auto@0")
    served = Decoder(target(), byte_tokenizer(PLAIN), shallow.eval())
    with closing(listen(options)) as listener, warnings.catch_warnings():
        warnings.simplefilter("error")  # `outrider serve` has printed that drafts are shallow
        server = Server(served, decode, options, listener, console, TOKENS)
        server.prepare()
        warnings.simplefilter("ignore")
        for heat in (0.0, 1.0):
            setting = server.service.settings(Parameters(temperature=heat), 0)
            served.engine(setting).start([], 3)
    assert isinstance(console.file, StringIO)
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("measuring the costs of rounds")
    assert second.startswith("costs of rounds measured in")


def test_the_command_measures_costs_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(Server, "run", lambda server: server.console.print("running"))
    words = ["drafter=suffix", "target=tiny", "decode=auto", f"run.dir={tmp_path}"]
    console = Console(file=StringIO(), width=200)
    assert serve(load_published(words, report=False), ServeConfig(port=0, batch=1), console) == 0
    assert isinstance(console.file, StringIO)
    printed = ["measuring the costs of rounds", "costs of rounds measured", " at http", "running"]
    places = [console.file.getvalue().index(text) for text in printed]
    assert places == sorted(places)


def test_a_stop_string_across_pieces_is_never_sent(server: Server) -> None:
    answer = expected(PROMPT, 60).text
    starts = (i for i in range(8, len(answer) - 6) if answer.index(answer[i : i + 6]) == i)
    at = next(starts)
    stop = answer[at : at + 6]
    asked = {"prompt": PROMPT, "max_tokens": 60, "stop": ["never in it", stop]}
    whole = post(server, "completions", **asked).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (answer[:at], "stop")
    events = stream(server, "completions", **asked)
    assert "".join(event["choices"][0]["text"] for event in events) == answer[:at]


def test_a_seed_gives_one_answer_whatever_else_is_decoded(server: Server) -> None:
    """Sixteen requests at once, of three sampling settings, lengths and seeds."""
    hot = {**SAMPLED, "temperature": 1.5}
    asked: list[dict[str, Any]] = [
        {"prompt": PROMPT[: 3 + i], "max_tokens": 5 + 3 * i, "seed": i, **how}
        for i, how in enumerate([{}, SAMPLED, hot, SAMPLED] * 4)
    ]
    with ThreadPoolExecutor(16) as threads:
        got = [*threads.map(lambda body: post(server, "completions", **body).json(), asked)]
    for body, answer in zip(asked, got, strict=True):
        how = {k: v for k, v in body.items() if k not in ("prompt", "max_tokens")}
        text = expected(body["prompt"], body["max_tokens"], **how).text
        assert answer["choices"][0]["text"] == text


def test_several_answers_have_following_seeds(server: Server) -> None:
    how = {"temperature": 1.0, "max_tokens": 8}
    got = post(server, "completions", prompt=[PROMPT, "Twice"], n=2, seed=5, **how).json()
    texts = [choice["text"] for choice in got["choices"]]
    assert texts == [
        expected(prompt, 8, temperature=1.0, seed=seed).text
        for prompt in (PROMPT, "Twice")
        for seed in (5, 6)
    ]
    assert got["usage"]["prompt_tokens"] == len(PROMPT) + len("Twice")
    events = stream(server, "chat/completions", messages=MESSAGES, n=2, seed=5, **how)
    for number in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == number]
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == expected(MESSAGES, 8, temperature=1.0, seed=5 + number).text


def test_without_a_seed_sampled_answers_differ(server: Server) -> None:
    asked = {"prompt": PROMPT, "temperature": 1.0}
    texts = {post(server, "completions", **asked).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_parts_of_text_and_developer_messages(server: Server) -> None:
    parts = [{"type": "text", "text": "wh"}, {"type": "text", "text": "y?"}]
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    got = post(server, "chat/completions", messages=asked).json()
    assert got["choices"][0]["message"]["content"] == expected(same).text


def test_token_ids_are_a_prompt(server: Server) -> None:
    ids = decoder().ids(PROMPT)
    got = post(server, "completions", prompt=ids).json()
    assert got["choices"][0]["text"] == expected(PROMPT).text


# ---- OpenAI's own client -------------------------------------------------------------------------


def test_openais_client(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "bytes"
    messages: Any = MESSAGES
    how: Any = {"model": model.id, "max_tokens": TOKENS, "temperature": 0}
    chat = client.chat.completions.create(messages=messages, **how)
    answer = expected(MESSAGES)
    assert chat.choices[0].message.content == answer.text
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.accepted_prediction_tokens == sum(answer.accepted)
    extra = chat.usage.model_extra or {}
    assert extra["tau"] == pytest.approx(answer.tau, abs=1e-4)
    text = client.completions.create(prompt=PROMPT, **how)
    assert text.choices[0].text == expected(PROMPT).text
    chunks = [*client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **how
    )]  # fmt: skip
    got = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (got, chunks[-1].usage) == (answer.text, chat.usage)


def test_openais_client_gets_errors_of_its_own_classes(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    messages: Any = MESSAGES
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'") as unknown:
        client.chat.completions.create(model="gpt-4", messages=messages)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="logprobs: This server does not support it"):
        client.chat.completions.create(model="bytes", messages=messages, logprobs=True)
    with pytest.raises(openai.BadRequestError, match="512 positions") as long:
        client.completions.create(model="bytes", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"


def test_a_key_is_required_where_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "s3cret-\N{LATIN SMALL LETTER E WITH ACUTE}")
    with serving(decoder()) as server:
        server.service.key = "s3cret"
        client = openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="Send the server's key"):
            client.models.list()
        assert openai.OpenAI(base_url=server.url, api_key="s3cret").models.list().data
        assert metrics(server)['outrider_requests_total{path="/v1/models",status="401"}'] == 1


def test_metrics_count_requests_and_tokens() -> None:
    with serving(decoder()) as server:
        for tokens in (3, 5):
            post(server, "completions", prompt=PROMPT, max_tokens=tokens)
        stream(server, "chat/completions", messages=MESSAGES, max_tokens=4)
        post(server, "completions", prompt=PROMPT, max_tokens=0)
        found = metrics(server)
    path = 'outrider_requests_total{path="/v1/completions",status="%d"}'
    assert (found[path % 200], found[path % 400]) == (2, 1)
    assert found['outrider_answers_total{ended="budget"}'] == 3
    assert found["outrider_answer_tokens_total"] == 3 + 5 + 4
    assert found["outrider_prompt_tokens_total"] == 16 * 2 + len(decoder().ids(MESSAGES))
    assert found["outrider_answers_running"] == found["outrider_answers_waiting"] == 0
