"""Self-generation by a server: only exact tokens are stored, each answer once, also after errors.

One server is real (`transformers serve` with the embedded target), the other a fake with errors.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.schema import GenerateConfig
from outrider.data.conversations import Message
from outrider.data.corpus import load_training_data
from outrider.data.endpoint import EndpointGenerator
from outrider.data.generate import PromptTokens, SelfGenerator, generate_missing
from outrider.data.generated_store import GeneratedAnswer, GeneratedStore
from outrider.data.reporter import Reporter
from outrider.data.tokenise import conversation_key, prompt_ids
from outrider.models.target.load import TINY, LoadedTarget, load_target, stop_ids
from outrider.train.settings import parse
from tests.runs import free_port

pytest.importorskip("openai")
ANSWER = " It is best in spring."
DOWN = b'{"error": {"message": "down"}}'


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose(["target=tiny"])).target)


def prompts(loaded: LoadedTarget, count: int) -> list[PromptTokens]:
    texts = [f"Write a story about {i} boats and a kite." for i in range(count)]
    turns = [[Message(role="user", content=text)] for text in texts]
    return [
        PromptTokens(i, conversation_key(turn), prompt_ids(loaded.tokenizer, turn))
        for i, turn in enumerate(turns)
    ]


Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


class Fake:
    """A server that returns ANSWER, in vLLM's dialect or a plain one, except for its failures.

    Attributes:
        failures: replaces the n-th completion (from 0).
        requests: bodies of the completions.
    """

    def __init__(self, loaded: LoadedTarget, *, vllm: bool, count_off: int = 0) -> None:
        self.loaded, self.vllm, self.count_off = loaded, vllm, count_off
        self.models = ["tiny"]
        self.failures: dict[int, Callable[[], Reply | None]] = {}
        self.requests: list[dict[str, Any]] = []
        self.lock = Lock()

    def completion(self, body: dict[str, Any]) -> Reply | None:
        with self.lock:
            number = len(self.requests)
            self.requests.append(body)
        if number in self.failures:
            return self.failures[number]()
        if body["model"] not in self.models:
            return 404, {}, b'{"error": {"message": "no such model"}}'
        if not self.vllm and not isinstance(body["prompt"], str):
            return 400, {}, b'{"detail": "prompt must be a string"}'
        if not self.vllm and "return_token_ids" in body:
            return 422, {}, b'{"detail": "Unexpected fields"}'
        return 200, {}, json.dumps(self.answer(body)).encode()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        tokenizer, prompt = self.loaded.tokenizer, body["prompt"]
        prompt_tokens = prompt if self.vllm else tokenizer(prompt)["input_ids"]
        ids = self.tokens()
        choice = {"index": 0, "text": ANSWER, "finish_reason": "stop", "logprobs": None}
        if self.vllm:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt_tokens, "stop_reason": None}
        usage = {
            "prompt_tokens": len(prompt_tokens),
            "completion_tokens": len(ids) + self.count_off,
        }
        return {
            "id": "x", "object": "text_completion", "created": 0, "model": body["model"],
            "choices": [choice], "usage": usage | {"total_tokens": 0},
        }  # fmt: skip

    def tokens(self) -> list[int]:
        """Return the answer's tokens; vLLM's differ from those of its text, as a model's may."""
        tokenizer = self.loaded.tokenizer
        if not self.vllm:
            ids = tokenizer(ANSWER)["input_ids"]
        else:
            ids = [i for letter in ANSWER for i in tokenizer(letter)["input_ids"]]
        return [*ids, tokenizer.eos_token_id]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fake], str]]:
    """Start a fake server; delays between the client's attempts are short."""
    from openai import _base_client

    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[ThreadingHTTPServer] = []

    def start(fake: Fake) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
        servers.append(server)
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def _handler(fake: Fake) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            listed = [{"id": name, "object": "model"} for name in fake.models]
            self.send((200, {}, json.dumps({"object": "list", "data": listed}).encode()))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if reply := fake.completion(json.loads(body)):
                self.send(reply)
            else:
                self.close_connection = True  # closes the connection without a response

        def send(self, reply: Reply) -> None:
            status, headers, body = reply
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

    return Handler


def run_generator(
    loaded: LoadedTarget, url: str, count: int = 6, *, target: bool = False, **options: Any
) -> tuple[dict[int, list[int]], EndpointGenerator]:
    """Return the tokens of the answers by index, and the generator."""
    chosen = {"batch": 3, "max_new_tokens": 40, "temperature": 1.0, **options}
    model = loaded.target if target else None
    stops = stop_ids(loaded.tokenizer, loaded.target)
    generator = EndpointGenerator(
        GenerateConfig(endpoint=url, **chosen), loaded.tokenizer, stops, target=model
    )
    answers, ended = dict[int, list[int]](), set[int]()

    def on_answer(prompt: PromptTokens, answer: GeneratedAnswer | None) -> bool:
        assert prompt.index not in ended
        ended.add(prompt.index)
        if answer is not None:
            answers[answer.index] = answer.ids[answer.prompt_length :]
        return True

    generator.run(prompts(loaded, count), on_answer)
    assert ended == set(range(count))
    return answers, generator


def test_returned_tokens_are_stored_unchanged(
    loaded: LoadedTarget, serve: Callable[[Fake], str]
) -> None:
    fake = Fake(loaded, vllm=True)
    answers, generator = run_generator(loaded, serve(fake), top_p=0.9, temperature=0.7)
    assert answers == {index: fake.tokens() for index in range(6)}
    assert fake.tokens() != [*loaded.tokenizer(ANSWER)["input_ids"], 1]  # the text has other tokens
    assert "returned" in generator.summary()
    requests = fake.requests[1:]
    assert sorted(a["prompt"] for a in requests) == sorted(q.ids for q in prompts(loaded, 6))
    assert {(a["model"], a["temperature"], a["top_p"]) for a in requests} == {("tiny", 0.7, 0.9)}
    assert len({a["seed"] for a in requests}) == 6


def test_text_is_stored_when_its_tokens_are_verified(
    loaded: LoadedTarget, serve: Callable[[Fake], str]
) -> None:
    fake = Fake(loaded, vllm=False)
    answers, generator = run_generator(loaded, serve(fake))
    assert answers == {index: fake.tokens() for index in range(6)}
    assert "confirmed by its counts: 6 answers kept" in generator.summary()
    assert all(isinstance(body["prompt"], str) for body in fake.requests[3:])


def test_text_with_uncertain_tokens_is_dropped_and_counted(
    loaded: LoadedTarget, serve: Callable[[Fake], str]
) -> None:
    """The server generated one token more than the text has: another tokenisation of it."""
    fake = Fake(loaded, vllm=False, count_off=1)
    answers, generator = run_generator(loaded, serve(fake))
    assert answers == {}
    assert generator.counts == {"left out: tokens not certain": 6}


def _delay() -> None:
    time.sleep(0.6)


@pytest.mark.parametrize(
    "failure",
    [
        lambda: (429, {"Retry-After": "0.05"}, b"{}"),
        lambda: (500, {}, b"out of memory"),
        lambda: (503, {}, b""),
        lambda: (200, {}, b'{"id": "x", "choices": [{"te'),
        lambda: (200, {}, b'{"id": "x", "choices": []}'),
        lambda: (200, {"Content-Length": "999"}, b'{"id": "x", "choices": [{"te'),
        lambda: None,
        _delay,
    ],
    ids=["429", "500", "503", "cut json", "no choice", "cut body", "hangs up", "late"],
)
def test_transient_failures_lose_no_answer(
    loaded: LoadedTarget, serve: Callable[[Fake], str], failure: Callable[[], Reply | None]
) -> None:
    fake = Fake(loaded, vllm=True)
    fake.failures = {0: failure, 3: failure}
    answers, _ = run_generator(loaded, serve(fake), timeout=0.4)
    assert answers == {index: fake.tokens() for index in range(6)}
    assert len(fake.requests) == 1 + 6 + 2


def test_retry_after_is_respected(loaded: LoadedTarget, serve: Callable[[Fake], str]) -> None:
    fake = Fake(loaded, vllm=True)
    fake.failures[0] = lambda: (429, {"Retry-After": "0.7"}, b"{}")
    started = time.monotonic()
    run_generator(loaded, serve(fake), 1)
    assert time.monotonic() - started > 0.7


def test_a_prompt_that_the_server_refuses_is_counted(
    loaded: LoadedTarget, serve: Callable[[Fake], str]
) -> None:
    fake = Fake(loaded, vllm=True)
    fake.failures[3] = lambda: (400, {}, b'{"error": {"message": "too long"}}')
    answers, generator = run_generator(loaded, serve(fake))
    assert len(answers) == 5
    assert generator.counts["refused by the server"] == 1


def test_a_permanent_failure_raises_and_stored_answers_remain(
    loaded: LoadedTarget, serve: Callable[[Fake], str], tmp_path: Path
) -> None:
    fake = Fake(loaded, vllm=True)
    fake.failures = dict.fromkeys(range(5, 50), lambda: (500, {}, DOWN))
    questions, about = prompts(loaded, 6), {"a": 1}
    options = GenerateConfig(batch=1, max_new_tokens=40, endpoint=serve(fake), retries=2)

    def resume() -> None:
        generator = EndpointGenerator(options, loaded.tokenizer, [1])
        generate_missing(generator, questions, GeneratedStore(tmp_path, about))

    with pytest.raises(RunError, match=r"down(.|\n)*Finished answers are stored"):
        resume()
    assert [a.index for a in GeneratedStore(tmp_path, about).answers()] == [0, 1, 2, 3]
    fake.failures = {}
    resume()
    assert [a.index for a in GeneratedStore(tmp_path, about).answers()] == list(range(6))


def test_a_wrong_model_is_a_config_error(
    loaded: LoadedTarget, serve: Callable[[Fake], str]
) -> None:
    fake = Fake(loaded, vllm=True)
    url = serve(fake)
    with pytest.raises(ConfigError, match=r"data\.generate\.model = 'gpt'.*\n.*no such model"):
        run_generator(loaded, url, model="gpt")
    fake.models = []
    with pytest.raises(ConfigError, match="lists no model"):
        run_generator(loaded, url)
    fake.models = ["one", "two"]
    with pytest.raises(ConfigError, match="lists one, two"):
        run_generator(loaded, url)
    with pytest.raises(RunError, match="a different model than the target"):
        run_generator(loaded, url, model="one", target=True)
    with pytest.raises(ConfigError, match=r"data\.generate\.endpoint"):
        parse(compose(["data=self", "data.generate.endpoint=localhost:8000"]))


def test_a_server_with_another_tokenizer_raises(
    loaded: LoadedTarget, serve: Callable[[Fake], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(loaded, vllm=False)
    usual = fake.answer
    more = {"prompt_tokens": 99, "completion_tokens": 1, "total_tokens": 100}
    monkeypatch.setattr(fake, "answer", lambda body: usual(body) | {"usage": more})
    with pytest.raises(RunError, match="reads our prompts as other tokens: 99 tokens"):
        run_generator(loaded, serve(fake))


class Real:
    """`transformers serve` with the embedded target on a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        words = ["serve", str(TINY), "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--device", "cpu", "--dtype", "float32"]
        code = "from transformers.cli.transformers import main; main()"
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], env=environ,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_server_killed_in_the_middle_loses_and_repeats_no_answer(
    loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy float32 answers equal those of the built-in engine token for token."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pytest.importorskip("uvicorn")
    questions, about = prompts(loaded, 24), {"a": 1}
    stops = stop_ids(loaded.tokenizer, loaded.target)
    server = Real()
    options = GenerateConfig(
        batch=4, max_new_tokens=24, temperature=0.0, endpoint=server.url, model=str(TINY),
        timeout=60.0, retries=200,
    )  # fmt: skip
    try:
        generator = EndpointGenerator(options, loaded.tokenizer, stops, target=loaded.target)
        kills = Counter[str]()

        def tick(done: int, tokens: int, rate: float) -> None:
            if done == 9 and not kills:
                kills["server"] += 1
                server.kill()
                server.start()

        # the first client stops halfway, and a second one continues
        generate_missing(generator, questions[:16], GeneratedStore(tmp_path, about), tick=tick)
        again = EndpointGenerator(options, loaded.tokenizer, stops, target=loaded.target)
        generate_missing(again, questions, GeneratedStore(tmp_path, about))
    finally:
        server.kill()
    assert kills["server"] == 1
    stored = GeneratedStore(tmp_path, about).answers()
    lost = sum(generator.counts.values()) + sum(again.counts.values()) - len(stored)
    assert len({a.index for a in stored}) == len(stored) == 24 - lost
    assert lost <= 4  # at the token limit an end token may be confused with a merged token
    own = GeneratedStore(tmp_path / "own", about)
    generate_missing(SelfGenerator(loaded.target, stops, options), questions, own)
    expected = {answer.index: answer.ids for answer in own.answers()}
    assert all(answer.ids == expected[answer.index] for answer in stored)


@pytest.mark.slow
def test_training_text_by_a_server_needs_only_its_address(
    loaded: LoadedTarget,
    serve: Callable[[Fake], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From settings to packed rows; a server returns no features to record."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    fake = Fake(loaded, vllm=True)
    monkeypatch.setattr(
        EndpointGenerator, "_check_target", lambda *_: None
    )  # the fake is not the target
    words = [
        "target=tiny", "data=self", f"data.generate.endpoint={serve(fake)}",
        "data.generate.samples=12", "data.generate.max_new_tokens=40", "data.holdout=0.3",
    ]  # fmt: skip
    data = load_training_data(parse(compose(words)), loaded, (1,), Reporter.silent())
    assert len(data.documents) == 12
    assert data.recorded is None
    assert {tuple(d.ids[d.answer].tolist()) for d in data.documents} == {tuple(fake.tokens())}
    count = len(fake.requests)
    load_training_data(parse(compose(words)), loaded, (1,), Reporter.silent())
    assert len(fake.requests) == count
