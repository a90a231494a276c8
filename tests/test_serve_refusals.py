"""What the server refuses: each with a status, OpenAI's error and no traceback."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from outrider.conf.command_settings import ServeConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.eval.serve import command
from outrider.eval.serve import server as server_module
from outrider.eval.serve.command import listen
from outrider.eval.serve.server import Server
from outrider.launch.cli import main
from tests.serving import metrics, post, serving
from tests.test_serve import MESSAGES, PROMPT, decoder

SMALL: dict[str, Any] = {
    "batch": 2,
    "queue": 1,
    "max_bytes": 20_000,
    "max_length": 300,
    "max_choices": 3,
}


@pytest.fixture(name="server", scope="module")
def small_server() -> Iterator[Server]:
    with serving(decoder(), **SMALL) as server:
        yield server


def refused(response: httpx.Response, status: int, text: str, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert text in error["message"]
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    if param is not None:
        assert error["param"] == param


def still_answers(server: Server) -> None:
    assert post(server, "completions", prompt=PROMPT, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"temperature": -1}, "must be in [0, 2]"),
        ({"temperature": 3}, "must be in [0, 2]"),
        ({"temperature": "hot"}, "expects a number"),
        ({"temperature": True}, "expects a number"),
        ({"top_p": 0}, "must be in (0, 1]"),
        ({"max_tokens": 0}, "must be in [1,"),
        ({"max_tokens": "many"}, "expects a whole number"),
        ({"max_tokens": 1e300}, "must be in [1,"),
        ({"seed": -1}, "must be in [0,"),
        ({"stop": 5}, "expects"),
        ({"stop": [5, None]}, "expects"),
        ({"stop": ""}, "would end every answer"),
        ({"stop": ["x"] * 17}, "more than 16"),
        ({"stop": {"a": 1}}, "expects"),
        ({"n": 4}, "at most 3"),
        ({"stream": "yes"}, "expects true or false"),
        ({"stream_options": {"usage": True}}, "no such key"),
        ({"banned": [100_000]}, "the target's tokens are"),
        ({"temprature": 1}, "Did you mean temperature?"),
        ({"logprobs": 0}, "does not support"),
        ({"best_of": 3}, "does not support"),
        ({"echo": True}, "does not support"),
        ({"logit_bias": {"5": 1}}, "does not support"),
        ({"response_format": {"type": "json_object"}}, "does not support"),
        ({"model": "gpt-4"}, "no model"),
        ({"model": 5.5}, "expects text"),
        ({"model": ["x"]}, "expects text"),
    ],
)
def test_a_wrong_field_is_named(server: Server, field: dict[str, Any], text: str) -> None:
    status = 404 if text == "no model" else 400
    (name,) = field
    name = "stream_options.usage" if name == "stream_options" else name
    refused(post(server, "completions", prompt=PROMPT, **field), status, text, name)
    refused(post(server, "chat/completions", messages=MESSAGES, **field), status, text, name)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (None, "at least one message"),
        ([5], "an object with role and content"),
        ([{"role": "user"}], "Give text"),
        ([{"role": "wizard", "content": "x"}], "Use one of: system, developer"),
        ([{"role": ["user"], "content": "x"}], "Use one of"),
        ([{"role": "user", "content": 5}], "Give text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "type text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "type text"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "does not support"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
        ([{"role": "user", "content": "x"}] * 5000, "413"),
        ([{"role": "user", "content": "x" * 400}], "does not fit 300 positions"),
    ],
)
def test_wrong_messages_are_refused(server: Server, messages: Any, text: str) -> None:
    status = 413 if text == "413" else 400
    text = "serve.max_bytes=20000" if text == "413" else text
    refused(post(server, "chat/completions", messages=messages), status, text)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (5, "Give text, token ids"),
        ([], "Give text, token ids"),
        ([PROMPT, 5], "Give text, token ids"),
        ([[5], []], "Give text, token ids"),
        ([True], "Give text, token ids"),
        ([-1], "token -1"),
        ([10**30], "the target's are 0 to"),
        ("", "empty"),
        ("x" * 400, "does not fit 300 positions"),
        (["x"] * 4, "at most 3"),
    ],
)
def test_wrong_prompts_are_refused(server: Server, prompt: Any, text: str) -> None:
    refused(post(server, "completions", prompt=prompt), 400, text)


def test_an_answer_longer_than_the_positions_is_refused(server: Server) -> None:
    response = post(server, "completions", prompt=PROMPT, max_tokens=290)
    refused(response, 400, "16 tokens and an answer of 290 does not fit 300 positions")
    still_answers(server)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 10_000, "nested too deeply"),
        (b'{"a":' * 3_000, "nested too deeply"),
        (b"[]", "not an object"),
        (b'"x"', "not an object"),
        (b'{"prompt": "x", "seed": NaN}', "NaN is not JSON"),
        (b'{"prompt": "x", "seed": 1e999}', "must be finite"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"{}", "prompt: This field is required"),
        (json.dumps({"prompt": "x", "a" * 9_000: 1}).encode(), "no such key"),
    ],
)
def test_bodies_that_are_no_request(server: Server, body: bytes, text: str) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}/completions", content=body, headers=headers)
    refused(response, 400, text)
    assert len(response.text) < 2_000
    still_answers(server)


def test_a_form_of_a_web_page_is_refused(server: Server) -> None:
    """A browser sends it to 127.0.0.1 from any page, and JSON it does not."""
    response = httpx.post(f"{server.url}/completions", content=b'{"prompt": "x"}')
    refused(response, 415, "Content-Type: application/json")


def test_unknown_paths_and_methods(server: Server) -> None:
    refused(httpx.get(f"{server.url}/completions"), 405, "Method Not Allowed")
    refused(httpx.get(f"{server.url}/../../etc/passwd"), 404, "Not Found")
    refused(httpx.get(f"{server.url}/models/other"), 404, "no model 'other'")


def received(raw: socket.socket, end: bytes) -> bytes:
    """Return what arrives up to its end: headers and body may arrive one after the other."""
    answer = b""
    while not answer.endswith(end) and (part := raw.recv(4096)):
        answer += part
    return answer


def test_bytes_that_are_no_http(server: Server) -> None:
    with socket.create_connection(server.listener.getsockname()) as raw:
        raw.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")
    still_answers(server)


@pytest.mark.parametrize("requests", [0, 1, 2])
def test_headers_that_do_not_end_close_the_connection(
    requests: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after earlier requests of the connection, and while more bytes arrive."""
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.5)
    with socket.create_connection(server.listener.getsockname(), timeout=10) as raw:
        for _ in range(requests):
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert received(raw, b"}").startswith(b"HTTP/1.1 200")
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            send_until(time.monotonic() + 8, raw, b"A: b\r\n", 0.1)
    still_answers(server)


# ---- size, time and number -----------------------------------------------------------------------


def head(length: str) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        length,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def send_until(end: float, raw: socket.socket, chunk: bytes, pause: float = 0.0) -> None:
    while time.monotonic() < end:
        raw.sendall(chunk)
        time.sleep(pause)


def test_a_hundred_megabytes_are_refused_before_they_are_sent(server: Server) -> None:
    with socket.create_connection(server.listener.getsockname(), timeout=10) as raw:
        raw.sendall(head("Content-Length: 100000000"))
        answer = received(raw, b"}}")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"serve.max_bytes=20000" in answer
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    with pytest.raises(openai.APIStatusError, match=r"serve\.max_bytes=20000"):
        client.completions.create(model="bytes", prompt="x" * 100_000_000)
    still_answers(server)


def test_a_body_without_a_length_is_refused_while_it_is_read(server: Server) -> None:
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    before = metrics(server)["process_resident_memory_bytes"]
    with socket.create_connection(server.listener.getsockname(), timeout=10) as raw:
        raw.sendall(head("Transfer-Encoding: chunked") + 10 * chunk)
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            send_until(time.monotonic() + 30, raw, chunk)  # a body without an end
    assert metrics(server)["process_resident_memory_bytes"] - before < 20_000_000
    still_answers(server)


def test_a_name_that_a_page_has_bound_to_this_machine_is_refused(server: Server) -> None:
    headers = {"content-type": "application/json", "host": "page.example:80"}
    body = b'{"prompt": "a"}'
    response = httpx.post(f"{server.url}/completions", content=body, headers=headers)
    refused(response, 403, "127.0.0.1")
    port = server.listener.getsockname()[1]
    response = httpx.get(f"{server.url}/models", headers={"host": f"localhost:{port}"})
    assert response.status_code == 200


def test_a_full_queue_is_429_and_then_free_again(server: Server) -> None:
    """Two answers run and one waits; OpenAI's client tries again by itself."""
    asked = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
    with httpx.Client(timeout=60) as client:
        streams = [client.stream("POST", f"{server.url}/completions", json=asked) for _ in range(3)]
        opened = [streams[0].__enter__(), streams[1].__enter__()]
        response = post(server, "completions", prompt=[PROMPT] * 3)
        refused(response, 429, "at most 3 may")
        assert response.headers["retry-after"] == "1"
        for one in opened:
            one.close()
    retrying = openai.OpenAI(base_url=server.url, api_key="none", max_retries=5)
    assert retrying.completions.create(model="bytes", prompt=PROMPT, n=3, max_tokens=2).choices
    found = metrics(server)
    assert found["outrider_answers_running"] == found["outrider_answers_waiting"] == 0


def test_a_request_that_takes_too_long_ends() -> None:
    with serving(decoder(), timeout=0.001) as server:
        response = post(server, "completions", prompt=PROMPT, max_tokens=400)
        refused(response, 503, "serve.timeout=0.001 seconds")
        assert response.headers["x-should-retry"] == "false"
        assert metrics(server)['outrider_answers_total{ended="timeout"}'] == 1


def test_a_failure_of_the_model_is_500_and_the_next_request_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs = list[Exception]()
    monkeypatch.setattr(server.worker, "on_bug", bugs.append)
    with monkeypatch.context() as patch:
        patch.setattr(server.worker.decoder.target, "logits", lambda hidden: 1 / 0)
        refused(post(server, "completions", prompt=PROMPT), 500, "its console says why")
    assert [type(bug) for bug in bugs] == [ZeroDivisionError]
    still_answers(server)


def test_a_stop_ends_running_answers_after_the_grace() -> None:
    with serving(decoder(), grace=0.2) as server:
        asked = {"prompt": PROMPT, "max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{server.url}/completions", json=asked, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.stop()
            time.sleep(0.05)
            last = [line for line in lines if line][-1]
    # a fast machine ends the answer within the grace
    assert last == "data: [DONE]" or "The server is stopping" in last


# ---- before it starts ----------------------------------------------------------------------------


def test_a_port_in_use_is_named_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "Decoder", None)
    with listen(ServeConfig(port=0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(["serve", "drafter=suffix", "target=tiny", f"port={port}"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"serve.port = {port}" in error
    assert "Address already in use" in error


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "x" * 300])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"serve\.host"):
        listen(ServeConfig(host=host, port=0))


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(RunError, match=r"needs the package uvicorn(.|\n)*outrider\[serve\]"):
        command.check_libraries()


@pytest.mark.parametrize(
    "word", ["port=70000", "serve.batch=0", "serve.timeout=0", "serve.model='a b'", "serve.que=5"]
)
def test_wrong_settings_are_named(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "drafter=suffix", "target=tiny", word])
    assert stop.value.code == 2
    assert f"config error: serve.{word.removeprefix('serve.').partition('=')[0]}" in (
        capsys.readouterr().err
    )
