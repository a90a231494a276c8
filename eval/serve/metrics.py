"""Counters of the server, in Prometheus' text format."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import psutil

from outrider.eval.decoder import Result

METRICS = {  # name: type, meaning
    "outrider_requests_total": ("counter", "HTTP requests, by path and status (499: disconnected)"),
    "outrider_response_seconds_total": ("counter", "seconds until responses began, by path"),
    "outrider_answers_total": ("counter", "answers, by what ended them"),
    "outrider_prompt_tokens_total": ("counter", "tokens of prompts"),
    "outrider_answer_tokens_total": ("counter", "tokens of answers"),
    "outrider_accepted_tokens_total": ("counter", "draft tokens that were accepted"),
    "outrider_rounds_total": ("counter", "target forwards of answers, after those of prompts"),
    "outrider_answers_running": ("gauge", "answers that are decoded"),
    "outrider_answers_waiting": ("gauge", "answers that wait for a slot"),
    "process_resident_memory_bytes": ("gauge", "resident memory"),
    "process_open_fds": ("gauge", "open files and sockets"),
    "process_threads": ("gauge", "threads"),
    "process_start_time_seconds": ("gauge", "start of the process, seconds since 1970"),
}
LABEL = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """Counters, which all threads may add to, and gauges, which are read on demand."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]] = dict) -> None:
        self.gauges, self._lock = gauges, threading.Lock()
        self._counts = defaultdict[str, defaultdict[tuple[tuple[str, str], ...], float]](
            lambda: defaultdict(float)
        )

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of `METRICS`."""
        with self._lock:
            self._counts[name][tuple(sorted(labels.items()))] += amount

    def add_answer(self, prompt_tokens: int, result: Result | None, ended: str) -> None:
        """Count an answer that has ended; `result` is None if it had no token."""
        self.add("outrider_answers_total", ended=ended)
        self.add("outrider_prompt_tokens_total", prompt_tokens)
        if result is not None:
            self.add("outrider_answer_tokens_total", len(result.output_ids))
            self.add("outrider_accepted_tokens_total", sum(result.accepted))
            self.add("outrider_rounds_total", len(result.accepted))

    def text(self) -> str:
        """Return all metrics in the text format, version 0.0.4."""
        process, lines = psutil.Process(), list[str]()
        with self._lock:
            values = {name: dict(counts) for name, counts in self._counts.items()}
        gauges = {
            "process_resident_memory_bytes": process.memory_info().rss,
            "process_open_fds": process.num_fds() if hasattr(process, "num_fds") else 0,
            "process_threads": process.num_threads(),
            "process_start_time_seconds": process.create_time(),
            **self.gauges(),
        }
        for name, (kind, meaning) in METRICS.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            empty: dict[tuple[tuple[str, str], ...], float] = {(): gauges.get(name, 0)}
            for labels, value in sorted(values.get(name, empty).items()):
                shown = ",".join(f'{key}="{text.translate(LABEL)}"' for key, text in labels)
                lines.append(f"{name}{{{shown}}} {value:.10g}" if shown else f"{name} {value:.10g}")
        return "\n".join(lines) + "\n"
