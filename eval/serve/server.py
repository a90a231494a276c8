"""The server's two threads: the main one decodes, the other runs uvicorn's event loop."""

import os
import signal
import socket
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from rich.text import Text
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.conf.command_settings import ServeConfig
from outrider.conf.console import Console
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import RunError
from outrider.eval.chat import progress_text
from outrider.eval.decoder import Decoder
from outrider.eval.serve.api import Service, application
from outrider.eval.serve.metrics import Metrics
from outrider.eval.serve.parameters import Parameters
from outrider.eval.serve.request_settings import RequestSettings
from outrider.eval.serve.worker import Job, Worker
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.from_config import Tables

KEY = "OUTRIDER_API_KEY"
IDLE_SECONDS = 15.0  # of a connection without a request
DISCARD_SECONDS = 3.0  # of the rest of a body that was refused
CONNECTIONS = 512  # beyond what may run and wait
CLOSE_SECONDS = 5.0  # for open connections after the last answer


class Server:
    """A worker, the application, and the thread that runs it."""

    def __init__(
        self,
        decoder: Decoder,
        decode: DecodeConfig,
        options: ServeConfig,
        listener: socket.socket,
        console: Console,
        default_tokens: int,
        tables: Tables | None = None,
    ) -> None:
        """
        Args:
            decode: sampling and draft of requests that do not set them.
            listener: listens already; it is closed at the end of `run`.
            default_tokens: longest answer of a request that sets none.
            tables: measured acceptance, for static trees and the first estimates of "auto".
        """
        self.options, self.listener, self.console = options, listener, console
        self.metrics = Metrics(self._gauges)
        self.worker = Worker(
            decoder, options, default_tokens, self.metrics, self._print_answer, self._print_bug
        )
        self.announce = partial(console.print, style="dim", soft_wrap=True)
        vocab = decoder.target.vocab_size
        settings = RequestSettings(decode, tables, vocab, decoder.folder, self.announce)
        name, key = options.model or decoder.target.name, os.environ.get(KEY) or None
        self.service = Service(self.worker, options, self.metrics, name, settings, key)

    @property
    def url(self) -> str:
        host, port = self.listener.getsockname()[:2]
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def prepare(self) -> None:
        """Measure the costs of decode=auto now, not within the first answer."""
        setting = self.service.settings(Parameters(), 0)
        if not isinstance(setting.policy, Auto):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the start prints them
            self.worker.decoder.engine(setting).start([], self.options.batch)
        for note in setting.policy.notes:
            self.announce(note)

    def run(self) -> None:
        """Answer until `stop`.

        Raises:
            RunError: the HTTP server ended by itself.
        """
        http, failures = _http_server(self.service), list[BaseException]()

        def run_http() -> None:
            try:
                http.run(sockets=[self.listener])
            except BaseException as error:
                failures.append(error)
            finally:
                self.worker.stop(0)

        thread = threading.Thread(target=run_http, name="outrider-http", daemon=True)
        thread.start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the start prints them
                self.worker.run()
        finally:
            http.should_exit = True
            thread.join(self.options.grace + 2 * CLOSE_SECONDS)
        if failures:
            raise RunError(f"The HTTP server ended: {failures[0]!r}.", "Start it again.")

    def stop(self) -> None:
        """Refuse new requests, and end after the running ones or `serve.grace`; twice: now."""
        now = self.worker.stop_at is not None
        self.worker.stop(0.0 if now else self.options.grace)

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.stop()

        names = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(name, handle) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, before, strict=True):
                signal.signal(name, handler)

    def _print_answer(self, job: Job, why: str) -> None:
        numbers = progress_text(job.result, plain=False) if job.result else "no token"
        self.console.print(Text(f"prompt of {job.prompt_tokens}: {numbers}; {why}", "dim"))

    def _print_bug(self, error: Exception) -> None:
        is_bug = not isinstance(error, RunError)
        text = "".join(traceback.format_exception(error)) if is_bug else str(error)
        self.console.print(Text(text, "red"))

    def _gauges(self) -> dict[str, float]:
        running, waiting = self.worker.load()
        return {"outrider_answers_running": running, "outrider_answers_waiting": waiting}


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits of time for what it waits for or discards.

    After the refusal of a long request the rest of its body is discarded for a while: a connection
    that is closed at once may lose the response.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.waiting = self.loop.call_later(IDLE_SECONDS, self._close_if_waiting, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        ended = self.cycle  # requests that have arrived already may begin another one
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self.loop.call_later(DISCARD_SECONDS, self._close_if_sending, self.cycle)
        # uvicorn's own limit ends with the first byte of the next request
        self.waiting.cancel()
        self.waiting = self.loop.call_later(IDLE_SECONDS, self._close_if_waiting, ended)

    def _close_if_sending(self, cycle: Any) -> None:
        if cycle is self.cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def _close_if_waiting(self, cycle: Any) -> None:
        """Close a connection whose next request has not begun: its headers are incomplete."""
        if cycle is self.cycle:
            self.transport.abort()


def _http_server(service: Service) -> uvicorn.Server:
    options = service.options
    return uvicorn.Server(
        uvicorn.Config(
            application(service), http=Protocol, ws="none", loop="asyncio", lifespan="off",
            log_config=None, log_level="error", access_log=False, server_header=False,
            timeout_keep_alive=int(IDLE_SECONDS),
            limit_concurrency=options.batch + options.queue + CONNECTIONS,
            timeout_graceful_shutdown=int(options.grace + CLOSE_SECONDS),
        )
    )  # fmt: skip
