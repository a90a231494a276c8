"""The HTTP API: its paths, limits and streams, as a Starlette application."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.conf.command_settings import LOCAL_HOSTS, ServeConfig
from outrider.conf.errors import ConfigError
from outrider.eval.requests import GenerationSettings, Prompt
from outrider.eval.serve.errors import ApiError
from outrider.eval.serve.metrics import Metrics
from outrider.eval.serve.parameters import (
    Parameters,
    parse_json,
    parse_parameters,
    read_messages,
    read_prompts,
)
from outrider.eval.serve.responses import CHAT, FINISH, TEXT, Kind, Responses, usage_of
from outrider.eval.serve.worker import FAILED, Job, Update, Worker

BODY_SECONDS = 30.0  # in which the body of a request must arrive
SEND_SECONDS = 30.0  # after its last token in which a client must have read an answer
DISCONNECTED = 499  # the status in metrics of a request whose client has gone
OPEN = ("/health",)  # paths that need no key
Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class Service:
    """What the application serves: a worker, and how the settings of a request are made."""

    worker: Worker
    options: ServeConfig
    metrics: Metrics
    model: str
    settings: Callable[[Parameters, int], GenerationSettings]  # and the seed
    key: str | None = None  # that clients must send
    created: int = field(default_factory=lambda: int(time.time()))


class Answers:
    """The answers of one request: their updates, in the order of arrival.

    Leaving the context cancels what has not ended.
    """

    def __init__(self, service: Service, prompts: Sequence[Prompt], asked: Parameters) -> None:
        self.service, self.queue = service, asyncio.Queue[tuple[int, Update]]()
        loop = asyncio.get_running_loop()
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        self.count = len(prompts) * (asked.n or 1)
        if self.count > service.options.max_choices:
            why = f"n: {self.count} answers are too many; at most {service.options.max_choices}."
            raise ApiError(400, why, "n")

        def deliver(number: int) -> Callable[[Update], None]:
            def put(update: Update) -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self.queue.put_nowait, (number, update))

            return put

        deadline = time.monotonic() + service.options.timeout
        self.jobs = list[Job]()
        for number in range(self.count):
            prompt, nth = divmod(number, asked.n or 1)
            setting = service.settings(asked, seed + nth)
            job = Job(prompts[prompt], setting, asked.most_tokens, deadline, deliver(number))
            self.jobs.append(job)
        self.per_prompt = asked.n or 1

    async def __aenter__(self) -> "Answers":
        self.service.worker.submit(self.jobs)
        return self

    async def __aexit__(self, *_: object) -> None:
        for job in self.jobs:
            job.cancelled = True

    async def updates(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield (number, piece) until all answers have ended.

        Raises:
            ApiError: of the first answer that fails.
        """
        left = self.count
        while left:
            number, update = await self.queue.get()
            if isinstance(update, ApiError):
                raise update
            left -= bool(update.result.stop_reason)
            yield number, update

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(job.prompt_tokens for job in self.jobs[:: self.per_prompt])
        return usage_of(prompt_tokens, [job.result for job in self.jobs if job.result])


class EventStream(StreamingResponse):
    """A stream of server-sent events, with a limit of time for clients that do not read."""

    def __init__(self, first: str, events: AsyncGenerator[str, None], seconds: float) -> None:
        self.events, self.seconds = events, seconds
        headers = {"cache-control": "no-cache"}
        super().__init__(self._all(first), media_type="text/event-stream", headers=headers)

    async def _all(self, first: str) -> AsyncIterator[str]:
        yield first
        async for one in self.events:
            yield one

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with anyio.move_on_after(self.seconds):
                await super().__call__(scope, receive, send)
        finally:
            await self.events.aclose()  # which cancels the answers


def application(service: Service) -> Starlette:
    """Return the application."""
    api = Api(service)
    routes = [
        api.route("/v1/chat/completions", api.chat, "POST"),
        api.route("/v1/completions", api.complete, "POST"),
        api.route("/v1/models", api.models),
        api.route("/v1/models/{name:path}", api.one_model),
        api.route("/health", api.health),
        api.route("/metrics", api.show_metrics),
    ]
    handlers = {HTTPException: api.refuse_path, Exception: api.fail}
    return Starlette(routes=routes, exception_handlers=handlers)


class Api:
    """The handlers of all paths."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def route(self, path: str, handler: Handler, method: str = "GET") -> Route:
        """Return a route that checks the key, counts, and answers errors in OpenAI's shape."""

        async def handle(request: Request) -> Response:
            start, status = time.monotonic(), DISCONNECTED
            try:
                self._check_host(request)
                self._check_key(request)
                response = await handler(request)
                status = response.status_code
            except ClientDisconnect:
                response = Response(status_code=400)  # the client has left
            except (ApiError, ConfigError) as error:
                response = error_response(ApiError.of(error))
                status = response.status_code
            except Exception as error:
                self.service.worker.on_bug(error)
                response = error_response(ApiError(500, FAILED))
                status = 500
            finally:
                seconds, metrics = time.monotonic() - start, self.service.metrics
                metrics.add("outrider_requests_total", path=path, status=str(status))
                metrics.add("outrider_response_seconds_total", seconds, path=path)
            return response

        return Route(path, handle, methods=[method])

    async def refuse_path(self, request: Request, error: Exception) -> Response:
        """Answer an unknown path or method."""
        assert isinstance(error, HTTPException), "the handler of that class"
        message = f"{request.method} {request.url.path}: {error.detail}."
        self.service.metrics.add("outrider_requests_total", path="", status=str(error.status_code))
        return error_response(ApiError(error.status_code, message), error.headers)

    async def fail(self, request: Request, error: Exception) -> Response:
        """Answer an error outside of the handlers; uvicorn prints it."""
        return error_response(ApiError(500, FAILED))

    # ---- paths ----

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, CHAT, lambda value: [read_messages(value)])

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, TEXT, read_prompts)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        stopping = self.service.worker.stop_at is not None
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def show_metrics(self, request: Request) -> Response:
        text = self.service.metrics.text()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    # ---- answers ----

    async def _answer(
        self, request: Request, kind: Kind, read: Callable[[Any], list[Prompt]]
    ) -> Response:
        values = parse_json(await self._body(request))
        asked = parse_parameters(values, kind.prompt)
        self._check_model(asked.model)
        prompts = read(values[kind.prompt])
        answers = Answers(self.service, prompts, asked)
        responses = Responses(kind, self.service.model, asked.with_usage)
        if asked.stream:
            return await self._stream(request, answers, responses)
        return await self._whole(request, answers, responses)

    async def _whole(self, request: Request, answers: Answers, responses: Responses) -> Response:
        async with answers:
            await _unless_disconnected(request, _last_pieces(answers))
        results = [job.result for job in answers.jobs if job.result]
        return JSONResponse(responses.whole(results, answers.usage()))

    async def _stream(self, request: Request, answers: Answers, responses: Responses) -> Response:
        """Return a stream; errors before the first piece have a status of their own."""
        events = _events(answers, responses)
        first = await _unless_disconnected(request, anext(events))
        return EventStream(first, events, self.service.options.timeout + SEND_SECONDS)

    # ---- checks ----

    def _check_host(self, request: Request) -> None:
        """Refuse a name that is not this machine's: a web page may have bound its own to it."""
        local = self.service.options.host in LOCAL_HOSTS
        if local and request.url.hostname not in LOCAL_HOSTS:
            raise ApiError(403, "This server answers at 127.0.0.1, ::1 and localhost alone.")

    def _check_key(self, request: Request) -> None:
        if self.service.key is None or request.url.path in OPEN:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self.service.key.encode())
        if scheme.lower() != "bearer" or not same:
            why = "Send the server's key: Authorization: Bearer KEY (OUTRIDER_API_KEY)."
            raise ApiError(401, why, code="invalid_api_key")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.service.model:
            why = f"There is no model {name!r:.100}; this server has {self.service.model!r}."
            raise ApiError(404, why, "model", "model_not_found")

    def _model(self) -> dict[str, Any]:
        about = {"created": self.service.created, "owned_by": "outrider"}
        return {"id": self.service.model, "object": "model", **about}

    async def _body(self, request: Request) -> bytes:
        """Read the body; refuse a long one before it is read, and a form of a web page."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Send Content-Type: application/json.")
        most, body = self.service.options.max_bytes, bytearray()
        too_long = ApiError(413, f"The request is longer than serve.max_bytes={most}.")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_long
        with anyio.move_on_after(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_long
            return bytes(body)
        raise ApiError(408, f"The request did not arrive within {BODY_SECONDS:.0f} seconds.")


async def _last_pieces(answers: Answers) -> None:
    async for _ in answers.updates():
        pass


async def _unless_disconnected(request: Request, result: Awaitable[Any]) -> Any:
    """Await a result; cancel it and raise ClientDisconnect if the client disconnects first."""

    async def disconnect() -> None:  # the body has been read
        while (await request.receive())["type"] != "http.disconnect":
            pass

    wait, gone = asyncio.ensure_future(result), asyncio.create_task(disconnect())
    try:
        await asyncio.wait((wait, gone), return_when=asyncio.FIRST_COMPLETED)
        if wait.done():
            return wait.result()
        raise ClientDisconnect
    finally:
        for task in (wait, gone):
            task.cancel()
        await asyncio.gather(wait, gone, return_exceptions=True)


async def _events(answers: Answers, responses: Responses) -> AsyncGenerator[str, None]:
    """Yield the events of a stream; an error after the first one is an event."""
    started = set[int]()
    async with answers:
        try:
            async for number, piece in answers.updates():
                if responses.kind is CHAT and number not in started:
                    yield event(responses.first_chunk(number))
                started.add(number)
                if piece.text:
                    yield event(responses.chunk(number, piece.text))
                if piece.result.stop_reason:
                    yield event(responses.chunk(number, "", FINISH[piece.result.stop_reason]))
        except ApiError as error:
            if not started:
                raise
            yield event(error.body())
            return
    if responses.with_usage:
        yield event(responses.usage_chunk(answers.usage()))
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


def error_response(error: ApiError, headers: Any = None) -> JSONResponse:
    """Return the response, with the headers that tell clients whether to try again."""
    more = dict(headers or {})
    if error.status == 429:
        more["retry-after"] = "1"
    if error.code == "timeout":
        more["x-should-retry"] = "false"  # OpenAI's client would repeat it
    return JSONResponse(error.body(), error.status, headers=more)
