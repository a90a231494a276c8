"""The thread that decodes: jobs join open batches between rounds, first come, first served.

Jobs of equal sampling settings share an open batch; different batches take turns, round by round.
The oldest job that waits is the next to start, so that none waits forever. All work with the model
and the tokenizer is done here; other threads submit and cancel jobs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from outrider.conf.command_settings import ServeConfig
from outrider.conf.errors import ConfigError, RunError, panics_as_errors
from outrider.eval.decoder import Decoder, Piece, Pieces, Result
from outrider.eval.requests import GenerationSettings, Prompt
from outrider.eval.serve.errors import ApiError
from outrider.eval.serve.metrics import Metrics
from outrider.models.decode.open_batch import OpenBatch
from outrider.models.decode.request import Event, Request, check_request
from outrider.models.decode.sampling_params import Sampling

STOPPING = "The server is stopping."
FAILED = "The server failed on this request; its console says why."
Update = Piece | ApiError  # the last one is an error, or a piece whose result has a stop reason


@dataclass(eq=False)
class Job:
    """An answer to be decoded.

    Attributes:
        setting: with the policy and the rule.
        budget: maximum number of new tokens; None: the server's default, or as many as fit.
        deadline: on `time.monotonic`'s clock.
        deliver: called by the worker with every update; must not block.
        cancelled: set by other threads; the worker reads it before every round.
        prompt_tokens: set before the first piece.
        result: the answer so far.
    """

    prompt: Prompt
    setting: GenerationSettings
    budget: int | None
    deadline: float
    deliver: Callable[[Update], None]
    cancelled: bool = False
    prompt_tokens: int = 0
    result: Result | None = None


@dataclass
class Group:
    """The running jobs of one sampling setting, by their numbers in the batch."""

    batch: OpenBatch
    running: dict[int, tuple[Job, Pieces]] = field(default_factory=dict)


class Worker:
    """Decodes jobs until it is stopped; `run` is the loop of its thread."""

    def __init__(
        self,
        decoder: Decoder,
        options: ServeConfig,
        default_tokens: int,
        metrics: Metrics,
        on_end: Callable[["Job", str], None] = lambda job, why: None,
        on_bug: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """
        Args:
            default_tokens: of an answer whose job has no budget.
            on_end: called with a job that has ended, and why.
            on_bug: called with an unexpected exception, whose text clients do not see.
        """
        self.decoder, self.options, self.default_tokens = decoder, options, default_tokens
        self.metrics, self.on_end, self.on_bug = metrics, on_end, on_bug
        self.stop_at: float | None = None  # when running jobs end; None: not stopping
        self._inbox = SimpleQueue[Job | None]()  # None wakes the worker
        self._waiting, self._groups = deque[Job](), dict[Sampling, Group]()
        self._numbers = 0
        self._lock, self._open, self._closed = threading.Lock(), 0, False

    # ---- for other threads and signal handlers ----

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add jobs, all or none.

        Raises:
            ApiError: the queue is full, or the worker stops.
        """
        most = self.options.batch + self.options.queue
        with self._lock:
            if self._closed or self.stop_at is not None:
                raise ApiError(503, STOPPING, code="stopping")
            if self._open + len(jobs) > most:
                why = f"{self._open} answers are running or waiting, and at most {most} may."
                raise ApiError(429, f"{why} Try again later.", code="queue_full")
            self._open += len(jobs)
            for job in jobs:
                self._inbox.put(job)

    def stop(self, grace: float) -> None:
        """End when all jobs have ended, or after `grace` seconds; safe in a signal handler."""
        self.stop_at = time.monotonic() + grace
        self._inbox.put(None)

    def load(self) -> tuple[int, int]:
        """Return how many jobs are running, and how many are waiting."""
        running = sum(len(group.running) for group in list(self._groups.values()))
        return running, max(0, self._open - running)

    # ---- the loop ----

    def run(self) -> None:
        """Decode until `stop`."""
        try:
            while self._continue():
                self._receive()
                self._end_lost_jobs()
                self._admit()
                for sampling in list(self._groups):
                    self._advance(sampling)
        finally:
            with self._lock:
                self._closed = True
            self._receive(block=False)
            for job in self._jobs():
                self._end(job, "stopping", ApiError(503, STOPPING, code="stopping"))
            self._waiting.clear()
            self._groups.clear()

    def _continue(self) -> bool:
        if self.stop_at is None:
            return True
        return self._open > 0 and time.monotonic() < self.stop_at

    def _receive(self, block: bool = True) -> None:
        """Move new jobs to the waiting ones; wait for one if there is nothing else to do."""
        block = block and not self._waiting and not self._groups
        try:
            while True:
                job = self._inbox.get() if block else self._inbox.get_nowait()
                block = False
                if job is not None:
                    self._waiting.append(job)
        except Empty:
            pass

    def _jobs(self) -> list[Job]:
        running = [job for group in self._groups.values() for job, _ in group.running.values()]
        return [*running, *self._waiting]

    def _end_lost_jobs(self) -> None:
        """End jobs that were cancelled or have no time left; their slots are free."""
        now = time.monotonic()
        lost = {job for job in self._jobs() if job.cancelled or now > job.deadline}
        if not lost:
            return
        self._waiting = deque(job for job in self._waiting if job not in lost)
        for sampling, group in list(self._groups.items()):
            for number, (job, _) in list(group.running.items()):
                if job in lost:
                    group.batch.cancel(number)
                    del group.running[number]
            self._close_if_empty(sampling)
        limit = f"The request took longer than serve.timeout={self.options.timeout:g} seconds."
        for job in lost:
            error = None if job.cancelled else ApiError(503, limit, code="timeout")
            self._end(job, "cancelled" if job.cancelled else "timeout", error)

    def _admit(self) -> None:
        """Start waiting jobs, the oldest first, while there are free slots."""
        joining = dict[Sampling, list[tuple[Job, Request]]]()
        free = self.options.batch - sum(len(group.running) for group in self._groups.values())
        while self._waiting and free > 0:
            sampling = self._waiting[0].setting.sampling
            open_groups = self._groups.keys() | joining.keys()
            if sampling not in open_groups and len(open_groups) >= self.options.samplings:
                break
            job = self._waiting.popleft()
            if request := self._request_of(job):
                joining.setdefault(sampling, []).append((job, request))
                free -= 1
        for sampling, pairs in joining.items():
            self._join(sampling, pairs)

    def _request_of(self, job: Job) -> Request | None:
        """Return the request of a job; end the job if its prompt is invalid."""
        try:
            with panics_as_errors():
                ids = self.decoder.ids(job.prompt)
            target = self.decoder.target
            most = min(self.options.max_length, target.shape().max_positions)
            room = most - len(ids)
            if room < max(1, job.budget or 1):
                new = f" and an answer of {job.budget}" if job.budget else ""
                why = f"A prompt of {len(ids)} tokens{new} does not fit {most} positions."
                raise ApiError(400, why, code="context_length_exceeded")
            budget = job.budget or min(room, self.default_tokens)
            stops = self.decoder.stops(job.setting)
            request = Request(ids, budget, job.setting.seed, stops)
            check_request(request, target.shape().max_positions, target.vocab_size)
        except (ApiError, ConfigError, RunError) as error:
            self._end(job, "error", ApiError.of(error))
            return None
        except Exception as error:
            self.on_bug(error)
            self._end(job, "error", ApiError(500, FAILED))
            return None
        job.prompt_tokens = len(ids)
        return request

    def _join(self, sampling: Sampling, pairs: Iterable[tuple[Job, Request]]) -> None:
        def join() -> list[Event]:
            if sampling not in self._groups:
                engine = self.decoder.engine(jobs[0].setting)
                self._groups[sampling] = Group(OpenBatch(engine, self.options.batch))
            group, numbered = self._groups[sampling], list[tuple[int, Request]]()
            for job, request in pairs:
                self._numbers += 1
                group.running[self._numbers] = job, Pieces(self.decoder, job.setting)
                numbered.append((self._numbers, request))
            return group.batch.join(numbered)

        jobs = [job for job, _ in pairs]
        self._step(sampling, jobs, join)

    def _advance(self, sampling: Sampling) -> None:
        if group := self._groups.get(sampling):
            self._step(sampling, [job for job, _ in group.running.values()], group.batch.advance)

    def _step(
        self, sampling: Sampling, jobs: Sequence[Job], step: Callable[[], list[Event]]
    ) -> None:
        """Run a step of a group and deliver its pieces; if it fails, end the group's jobs."""
        try:
            with panics_as_errors():
                for event in step():
                    self._deliver(self._groups[sampling], event)
        except Exception as error:
            self.on_bug(error)
            group = self._groups.pop(sampling, None)
            running = [job for job, _ in group.running.values()] if group else []
            message = error.message if isinstance(error, RunError) else FAILED
            for job in {*running, *(jobs if group is None else ())}:
                self._end(job, "error", ApiError(500, message))
        else:
            self._close_if_empty(sampling)

    def _deliver(self, group: Group, event: Event) -> None:
        job, pieces = group.running[event.number]
        piece = pieces.next(event)
        job.result = piece.result
        if piece.result.stop_reason:
            del group.running[event.number]
            self._end(job, piece.result.stop_reason, piece)
        else:
            job.deliver(piece)

    def _close_if_empty(self, sampling: Sampling) -> None:
        """Free the cache of a group without jobs."""
        if sampling in self._groups and not self._groups[sampling].running:
            del self._groups[sampling]

    def _end(self, job: Job, why: str, update: Update | None) -> None:
        with self._lock:
            self._open -= 1
        self.metrics.add_answer(job.prompt_tokens, job.result, why)
        if update is not None:
            job.deliver(update)
        self.on_end(job, why)
