"""The server under load, its signals, and the examples of docs/server.md."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import psutil
import pytest

from outrider.data.conversations import Message
from outrider.eval.decoder import Decoder
from outrider.eval.serve.server import Server
from outrider.models.decode.policy import Chain
from tests.runs import free_port
from tests.serving import metrics, post, serving

PAGE = Path(__file__).parent.parent / "docs" / "server.md"
CLIENTS, EACH = 64, 6
QUESTIONS = ["When should I visit Amberton?", "What is the capital of Ketherby?", "Say hello."]
BROKEN: list[tuple[bytes, int]] = [
    (b"{", 400), (b"[" * 5000, 400), (b"{}", 400), (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}', 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "gpt-4"}', 404),
    (b'{"messages": "' + b"x" * 2_000_000 + b'"}', 413),
]  # fmt: skip


@pytest.fixture(name="tiny", scope="module")
def tiny_decoder() -> Decoder:
    return Decoder.from_pretrained("tiny", "suffix")


def body(chance: Random, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": chance.choice(QUESTIONS)}]
    how = chance.choice([{}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}])
    return {"messages": messages, "max_tokens": chance.randint(1, 40), "seed": 1, **how, **more}


async def client(server: Server, number: int, found: Counter[str]) -> None:
    """Send requests of all kinds: whole, streamed, abandoned at several places, and broken."""
    chance, url = Random(number), f"{server.url}/chat/completions"
    async with httpx.AsyncClient(timeout=120) as http:
        for _ in range(EACH):
            kind = chance.choice(["whole", "stream", "leave", "leave early", "broken"])
            try:
                found[await one_request(http, url, kind, chance)] += 1
            except httpx.ReadTimeout:
                assert kind == "leave early"
                found["left early"] += 1


async def one_request(http: httpx.AsyncClient, url: str, kind: str, chance: Random) -> str:
    if kind == "broken":
        content, status = chance.choice(BROKEN)
        headers = {"content-type": "application/json"}
        response = await http.post(url, content=content, headers=headers)
        assert response.status_code == status, response.text
        return f"broken {status}"
    if kind == "whole":
        response = await http.post(url, json=body(chance))
        assert response.status_code in (200, 429), response.text
        return f"whole {response.status_code}"
    if kind == "leave early":
        timeout = httpx.Timeout(120, read=0.01)
        response = await http.post(url, json=body(chance), timeout=timeout)
        return f"whole {response.status_code}"
    async with http.stream("POST", url, json=body(chance, stream=True)) as response:
        assert response.status_code in (200, 429)
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            if kind == "leave" and response.status_code == 200 and chance.random() < 0.3:
                return "left a stream"
    assert response.status_code == 429 or last == "data: [DONE]", last
    return f"stream {response.status_code}"


async def load(server: Server) -> Counter[str]:
    found = Counter[str]()
    await asyncio.wait_for(
        asyncio.gather(*(client(server, number, found) for number in range(CLIENTS))), 400
    )
    return found


def idle(server: Server) -> dict[str, float]:
    """Return the metrics when no answer is running or waiting."""
    for _ in range(200):
        found = metrics(server)
        if not found["outrider_answers_running"] + found["outrider_answers_waiting"]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not idle after ten seconds: {found}")


@pytest.mark.slow
def test_a_load_of_64_clients_leaves_the_server_as_it_was(tiny: Decoder) -> None:
    """Disconnects and malformed requests: nothing wedges, nothing leaks, metrics add up."""
    process = psutil.Process()
    with serving(tiny, queue=24) as server:
        asyncio.run(load(server))  # allocates what a load needs
        before, files, threads = idle(server), process.num_fds(), threading.active_count()
        start = time.monotonic()
        found = asyncio.run(load(server))
        seconds, after = time.monotonic() - start, idle(server)
        time.sleep(0.5)  # the clients' connections close
        answer = post(
            server, "chat/completions", messages=[{"role": "user", "content": QUESTIONS[0]}]
        )
        assert (
            answer.json()["choices"][0]["message"]["content"] == "The best time to visit is spring."
        )
        counts = {name: after[name] - before.get(name, 0) for name in after}
        print(f"{found} {seconds=} {before=} {counts=}")  # pytest -s: the figures of docs/server.md
        assert found.total() == CLIENTS * EACH
        requests = {name: n for name, n in counts.items() if "requests_total" in name}
        assert sum(requests.values()) == CLIENTS * EACH
        for status in (400, 404, 413):
            path = f'outrider_requests_total{{path="/v1/chat/completions",status="{status}"}}'
            assert counts[path] == found[f"broken {status}"]
        answers = sum(n for name, n in counts.items() if "answers_total" in name)
        refused = counts.get('outrider_requests_total{path="/v1/chat/completions",status="429"}', 0)
        broken = sum(found[f"broken {status}"] for status in (400, 404, 413))
        assert answers == CLIENTS * EACH - broken - refused
        assert process.num_fds() <= files + 2
        assert threading.active_count() <= threads
        grown = after["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
        assert grown < 50_000_000


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_slot(tiny: Decoder) -> None:
    """One slot: the next request is answered only when the abandoned ones have ended."""
    asked, timeout = {"prompt": "Once", "max_tokens": 1000}, httpx.Timeout(60, read=0.001)
    with serving(tiny, batch=1, queue=8) as server:
        url = f"{server.url}/completions"
        for stream in (True, False, True, False):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json={**asked, "stream": stream}, timeout=timeout)
        assert httpx.post(url, json={**asked, "max_tokens": 2}, timeout=60).status_code == 200
        assert idle(server)['outrider_answers_total{ended="cancelled"}'] >= 1


# ---- the command ---------------------------------------------------------------------------------


@contextmanager
def command(*words: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `outrider serve` until it listens; yield the process and its address."""
    port = free_port()
    code = "import sys; from outrider.launch.cli import command; command(sys.argv[1:])"
    argv = [sys.executable, "-c", code, "serve", "target=tiny", "drafter=suffix", f"port={port}"]
    process = subprocess.Popen(
        [*argv, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "COLUMNS": "80", **env},
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(100):
            try:
                httpx.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, process.stdout and process.stdout.read()
                time.sleep(0.2)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_with_exit_code_0(number: signal.Signals) -> None:
    """A running answer may end before; the output has no traceback."""
    with command() as (process, url):
        asked = {"prompt": "Once", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            last = [line for line in lines if line][-1]
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert last == "data: [DONE]"
    assert "not for production" in " ".join(output.split())
    assert output.rstrip().endswith("stopped")
    assert "Traceback" not in output


@pytest.mark.slow
def test_the_examples_of_the_page_run_word_for_word(capsys: pytest.CaptureFixture[str]) -> None:
    """The commands with curl, and the script with OpenAI's client."""
    page = PAGE.read_text(encoding="utf-8")
    curls = re.findall(r"^curl (?:.|\n)*?(?<!\\)$", page, re.MULTILINE)
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with command() as (_, url):
        for curl in curls:
            words = shlex.split(curl.replace("\\\n", " ").replace("http://127.0.0.1:8000", url))
            done = subprocess.run([*words, "-s"], capture_output=True, text=True, check=True)
            assert "error" not in done.stdout
            assert "data: [DONE]" in done.stdout or json.loads(done.stdout)
        exec(script.replace("http://127.0.0.1:8000", url), {"openai": openai})
    assert "The best time to visit is spring." in capsys.readouterr().out
    assert len(curls) == 3


@pytest.mark.slow
def test_answers_of_the_embedded_target_are_the_decoders(tiny: Decoder) -> None:
    asked = {"temperature": 0.9, "seed": 7, "max_tokens": 30}
    messages = [Message(role="user", content=QUESTIONS[0])]
    with serving(tiny) as server:
        got = post(server, "chat/completions", messages=messages, **asked).json()
    policy = Chain(3, "drawn")
    own = tiny.generate(messages, 30, temperature=0.9, seed=7, policy=policy)
    assert got["choices"][0]["message"]["content"] == own.text
