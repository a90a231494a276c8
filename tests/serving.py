"""A server of the API in threads of the test's process, and requests to it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from outrider.conf.command_settings import ServeConfig
from outrider.conf.decode_settings import DecodeConfig
from outrider.eval.decoder import Decoder
from outrider.eval.serve.command import listen
from outrider.eval.serve.server import Server
from tests.runs import QUIET

TOKENS = 24  # of an answer without max_tokens


@contextmanager
def serving(
    decoder: Decoder, decode: DecodeConfig | None = None, **options: Any
) -> Iterator[Server]:
    """Serve at a free port of 127.0.0.1 until the context ends."""
    settings = ServeConfig(port=0, **{"grace": 1.0, **options})
    listener = listen(settings)
    server = Server(decoder, decode or DecodeConfig(), settings, listener, QUIET, TOKENS)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.worker.stop(0)
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    headers = {"content-type": "application/json"}
    content = json.dumps(body)  # also of text that UTF-8 does not have
    return httpx.post(f"{server.url}/{path}", content=content, headers=headers, timeout=60)


def stream(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, without the last one, [DONE]."""
    response = post(server, path, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def metrics(server: Server) -> dict[str, float]:
    lines = server.metrics.text().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}
