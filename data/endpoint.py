"""The target writes its own training text on a server that speaks the OpenAI protocol.

vLLM, SGLang, TGI and `transformers serve` answer many prompts at once, faster than one process
does. What they are asked is the prompt's exact tokens, through /completions, so that no chat
template but ours is ever used; a server that takes text only is given text that tokenises to them.
What is kept is the exact tokens of the answer: those that the server returns (vLLM), or the text's,
where both decoding them and the server's own count show that nothing was lost. Anything else is
counted and left out. The first question is also the proof that the server has the same target.

Retries, backoff and Retry-After are the `openai` client's (`pip install 'outrider[endpoint]'`).
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.data.answer_spans import Tokenizer
from outrider.data.generate import Done, Question, Settings
from outrider.data.traces import Written
from outrider.models.target import Target

PROBED = 8  # tokens of the first answer that are held against our own target
REFUSED = (400, 413, 422)  # the server will not have this request, however often
SHOWN = 300  # characters of what the server says of an error
AGAIN = "What was answered is kept; give the same command again when the server is well."


@dataclass(frozen=True)
class Link:
    """Where the server is and how patient we are; see `data.generate` in the configuration."""

    url: str
    model: str | None = None
    timeout: float = 600.0
    retries: int = 8


class Dialect(NamedTuple):
    """What a server understands."""

    ids: bool  # prompts as token ids
    extras: bool  # fields beyond OpenAI's own


# vLLM and SGLang speak the first, TGI and `transformers serve` the last
DIALECTS = (Dialect(True, True), Dialect(True, False), Dialect(False, True), Dialect(False, False))
EXTRAS = {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False}


class Unproved(Exception):
    """An answer whose tokens are not certain."""


class Served:
    """Answers questions by a server; `run` is that of `generate.Writer`."""

    def __init__(
        self,
        link: Link,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        settings: Settings,
        target: Target | None = None,
    ) -> None:
        """
        Args:
            target: what the server is to have; None leaves that unproved.

        Raises:
            ConfigError: the client is not installed.
        """
        self.link, self.tokenizer, self.settings, self.target = link, tokenizer, settings, target
        self.stop_ids = set(stop_ids)
        self.dialect, self.model = DIALECTS[0], link.model or ""
        self.wrote = 0
        self.counts: Counter[str] = Counter()
        try:
            import openai
        except ImportError:
            why = "A server is asked by the package openai, which is not installed."
            fix = "pip install 'outrider[endpoint]'"
            raise ConfigError("data.generate.endpoint", link.url, why, fix) from None
        self.openai = openai

    def run(self, questions: Sequence[Question], done: Done) -> None:
        """Answer all questions, `settings.batch` at a time.

        Args:
            done: called with each finished answer, or None; returning False stops the writing.

        Raises:
            ConfigError: the server has no such model, or several and none was named.
            RunError: it does not answer, or has another target than we.
        """
        if questions:
            try:
                asyncio.run(self._run(questions, done))
            except self.openai.OpenAIError as error:
                raise self._told(error) from None

    def said(self) -> str:
        """What became of the answers, for people."""
        how = "returned" if self.counts["exact"] else "proved by its counts"
        lost = {k: n for k, n in self.counts.items() if k not in ("kept", "exact")}
        listed = "".join(f", {n} {reason}" for reason, n in sorted(lost.items()))
        return f"the server's tokens are {how}: {self.counts['kept']} answers kept{listed}"

    async def _run(self, questions: Sequence[Question], done: Done) -> None:
        key = os.environ.get("OPENAI_API_KEY") or "none"  # most servers of one's own want no key
        async with self.openai.AsyncOpenAI(
            base_url=self.link.url, api_key=key, timeout=self.link.timeout,
            max_retries=self.link.retries,
        ) as client:  # fmt: skip
            await self._meet(client, questions[0])
            waiting, over = iter(questions), asyncio.Event()

            async def work() -> None:
                for question in waiting:
                    if over.is_set():
                        return
                    answer = await self._answer(client, question)
                    if not done(question, answer):
                        over.set()

            tasks = [asyncio.create_task(work()) for _ in range(self.settings.batch)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _meet(self, client: Any, question: Question) -> None:
        """Learn the model's name and the server's dialect, and see that it has our target."""
        if self.link.model is None:
            self.model = self._only(await self._listed(client))
        read = ""
        for self.dialect in DIALECTS:
            try:
                answer = await self._ask(client, question, PROBED, 0.0)
                self._check_prompt(answer, question)
                break
            except Unproved as error:
                read = str(error)
            except self.openai.APIStatusError as error:
                if error.status_code not in REFUSED or self.dialect == DIALECTS[-1]:
                    raise
        else:
            message = f"{self.link.url} reads our prompts as other tokens: {read}."
            raise RunError(message, "See that it serves the target, with the same tokenizer.")
        with suppress(Unproved):  # a text that is not certain proves nothing
            self._same_target(question, self._ids(answer, question))

    async def _listed(self, client: Any) -> list[str]:
        """The models that the server says it has; none if it says nothing."""
        try:
            return [model.id async for model in client.with_options(max_retries=2).models.list()]
        except self.openai.APIStatusError:
            return []

    def _only(self, names: list[str]) -> str:
        if len(names) == 1:
            return names[0]
        why = f"{self.link.url} lists {', '.join(names) or 'no model'}."
        raise ConfigError("data.generate.model", None, why, "Name the one that is the target.")

    async def _ask(self, client: Any, question: Question, room: int, temperature: float) -> Any:
        """One request; an answer that is damaged on its way is asked for again."""
        seed = hashlib.sha256(f"{self.settings.seed} {question.key} {question.place}".encode())
        wish: dict[str, Any] = {
            "model": self.model, "prompt": self._prompt(question), "max_tokens": room,
            "temperature": temperature, "seed": int.from_bytes(seed.digest()[:4], "big") >> 1,
        }  # fmt: skip
        if self.settings.top_p < 1:
            wish["top_p"] = self.settings.top_p
        for attempt in range(self.link.retries + 1):
            try:
                answer = await client.completions.create(
                    **wish, extra_body=EXTRAS if self.dialect.extras else None
                )
                if answer.choices and answer.choices[0].text is not None:
                    return answer
            except (ValueError, AttributeError, self.openai.APIResponseValidationError):
                pass  # cut off, or no json at all
            await asyncio.sleep(min(8.0, 0.5 * 2**attempt))
        raise RunError(f"{self.link.url} answers with damaged json again and again.", AGAIN)

    def _prompt(self, question: Question) -> list[int] | str:
        """The prompt as this server takes it.

        Raises:
            Unproved: there is no text that the server would read as these tokens.
        """
        if self.dialect.ids:
            return question.ids
        text = str(self.tokenizer.decode(question.ids, skip_special_tokens=False))
        first = self.tokenizer.bos_token or ""
        for said in (text, text.removeprefix(first)):  # the server may put it there itself
            ids = self.tokenizer(said, add_special_tokens=not self.dialect.extras)["input_ids"]
            if list(ids) == question.ids:
                return said
        raise Unproved("no text gives the prompt's tokens")

    async def _answer(self, client: Any, question: Question) -> Written | None:
        room, heat = self.settings.max_new_tokens, self.settings.temperature
        try:
            answer = await self._ask(client, question, room, heat)
            self._check_prompt(answer, question)
            ids = self._ids(answer, question)
        except Unproved:
            self.counts["left out: tokens not certain"] += 1
            return None
        except self.openai.APIStatusError as error:
            if error.status_code not in REFUSED:
                raise
            self.counts["refused by the server"] += 1
            return None
        if not ids:
            self.counts["left out: empty"] += 1
            return None
        self.counts["kept"] += 1
        self.wrote += len(ids)
        return Written(question.place, question.key, question.ids + ids, len(question.ids))

    def _check_prompt(self, answer: Any, question: Question) -> None:
        """
        Raises:
            Unproved: the server read other tokens than ours.
        """
        read = _extra(answer.choices[0], "prompt_token_ids") or _extra(answer, "prompt_token_ids")
        count = len(read) if read else answer.usage.prompt_tokens if answer.usage else 0
        if (read and list(read) != question.ids) or count != len(question.ids):
            raise Unproved(f"{count} tokens, {len(question.ids)} of ours")

    def _ids(self, answer: Any, question: Question) -> list[int]:
        """The answer's tokens, the one that ends it included.

        Raises:
            Unproved: they were not returned, and the text's are not surely the same.
        """
        choice = answer.choices[0]
        count = answer.usage.completion_tokens if answer.usage else -1
        given = _extra(choice, "token_ids")
        ended = choice.finish_reason == "stop"
        if given is not None:
            self.counts["exact"] += 1
            ids = list(given)
            missing = ended and ids and ids[-1] not in self.stop_ids
            return [*ids, self._stop(choice)] if missing else ids
        ids = list(self.tokenizer(choice.text, add_special_tokens=False)["input_ids"])
        same = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        ids += [self._stop(choice)] if ended else []
        if same != choice.text or len(ids) != count:
            raise Unproved(f"{count} tokens written, {len(ids)} in the text")
        return ids

    def _stop(self, choice: Any) -> int:
        """The token that ended an answer: what the server says, or the usual one."""
        said = _extra(choice, "stop_reason")
        if isinstance(said, int) and said in self.stop_ids:
            return said
        usual = self.tokenizer.eos_token_id
        if usual is None:
            raise Unproved("no token is known to end an answer")
        return int(usual)

    @torch.no_grad()
    def _same_target(self, question: Question, written: list[int]) -> None:
        """The server's greedy tokens are ours, give or take what rounding does.

        Raises:
            RunError: fewer than half of them are.
        """
        if self.target is None or not written:
            return
        ids = torch.tensor([question.ids + written], device=self.target.device)
        length = ids.shape[1]
        causal = torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril()
        seen = self.target.forward(ids, torch.arange(length, device=ids.device)[None], causal)
        ours = self.target.logits(seen.last[0, len(question.ids) - 1 : -1]).argmax(-1).tolist()
        agreed = sum(a == b for a, b in zip(ours, written, strict=True))
        if 2 * agreed < len(written):
            raise RunError(
                f"{self.link.url} has another model than the target: of its first {len(written)} "
                f"greedy tokens the target would write {agreed}.",
                "Serve the target itself, or give the served model as target.",
            )

    def _told(self, error: Exception) -> ConfigError | RunError:
        """An error of the client, as one of ours."""
        code = getattr(error, "status_code", None)
        body = " ".join(error.response.text.split()) if code is not None else ""  # type: ignore[attr-defined]
        told = f"{error} {body}" if body and body not in str(error) else str(error)
        why = f"{self.link.url}: {told[:SHOWN]}"
        if code == 404:
            return ConfigError("data.generate.model", self.model, why, "Give the name it serves.")
        if code in (401, 403):
            return RunError(why, "The key is taken from the environment: OPENAI_API_KEY.")
        return RunError(why, AGAIN)


def _extra(part: Any, name: str) -> Any:
    """A field that OpenAI's own protocol does not have."""
    return (part.model_extra or {}).get(name)
