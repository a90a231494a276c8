"""Self-generation by a server with an OpenAI-compatible API.

A request to /completions (of vLLM, SGLang, TGI, `transformers serve`) holds the exact tokens of the
prompt, so that only our chat template is used, or text that tokenises to them. The answer's exact
tokens are stored: those that the server returns (vLLM), or those of its text, if decoding them and
the server's own count confirm that they are the same. Other answers are counted and left out. The
first request also checks that the server has the same target.

Retries, backoff and Retry-After are the `openai` client's (`pip install 'outrider[endpoint]'`).
"""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from outrider.conf.errors import ConfigError, RunError
from outrider.conf.packages import require_package
from outrider.conf.quantities import format_count
from outrider.conf.schema import GenerateConfig
from outrider.data.generate import OnAnswer, PromptTokens
from outrider.data.generated_store import GeneratedAnswer
from outrider.data.rendered_text import Tokenizer
from outrider.models.target.target import Target

PROBE = 8  # tokens of the first answer that are compared with our own target
REFUSED = (400, 413, 422)  # status codes that no retry changes
SHOWN = 300  # characters of an error's body in a message
RETRY = "Finished answers are stored; give the same command again when the server responds."


class Dialect(NamedTuple):
    """What a server accepts."""

    ids: bool  # prompts as token ids
    extras: bool  # fields beyond OpenAI's own


# vLLM and SGLang accept the first, TGI and `transformers serve` the last
DIALECTS = (Dialect(True, True), Dialect(True, False), Dialect(False, True), Dialect(False, False))
EXTRAS = {"return_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False}


class UnverifiedAnswer(Exception):
    """An answer whose tokens are not certain."""


class EndpointGenerator:
    """Answer generation by a server (an `AnswerBackend`) that serves the target."""

    def __init__(
        self, options: GenerateConfig, tokenizer: Tokenizer, stop_ids: Sequence[int], seed: int = 0,
        target: Target | None = None,
    ) -> None:  # fmt: skip
        self.options, self.url, self.seed = options, str(options.endpoint), seed
        self.tokenizer, self.target, self.stop_ids = tokenizer, target, set(stop_ids)
        self.dialect, self.model = DIALECTS[0], options.model or ""
        self.answer_tokens = 0
        self.counts: Counter[str] = Counter()  # answers by outcome
        require_package("openai", "data.generate.endpoint", self.url)
        import openai

        self.openai = openai

    def run(self, prompts: Sequence[PromptTokens], on_answer: OnAnswer) -> None:
        """Answer all prompts, `options.batch` at a time.

        Raises:
            ConfigError: the server has no such model, or several and none was named.
            RunError: it does not respond, or has another target.
        """
        if prompts:
            try:
                asyncio.run(self._run(prompts, on_answer))
            except self.openai.OpenAIError as error:
                raise self._convert(error) from None

    def summary(self) -> str:
        how = "returned" if self.counts["exact"] else "confirmed by its counts"
        lost = {k: n for k, n in self.counts.items() if k not in ("kept", "exact")}
        listed = "".join(f", {n} {reason}" for reason, n in sorted(lost.items()))
        kept = format_count(self.counts["kept"], "answer")
        return f"the server's tokens are {how}: {kept} kept{listed}"

    async def _run(self, prompts: Sequence[PromptTokens], on_answer: OnAnswer) -> None:
        key = os.environ.get("OPENAI_API_KEY") or "none"  # a local server needs no key
        async with self.openai.AsyncOpenAI(
            base_url=self.url, api_key=key, timeout=self.options.timeout,
            max_retries=self.options.retries,
        ) as client:  # fmt: skip
            await self._negotiate(client, prompts[0])
            waiting, stopped = iter(prompts), asyncio.Event()

            async def work() -> None:
                for prompt in waiting:
                    if stopped.is_set():
                        return
                    answer = await self._answer(client, prompt)
                    if not on_answer(prompt, answer):
                        stopped.set()

            tasks = [asyncio.create_task(work()) for _ in range(self.options.batch)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _negotiate(self, client: Any, prompt: PromptTokens) -> None:
        """Find the model's name and the server's dialect; check that it has our target."""
        if self.options.model is None:
            self.model = await self._only_model(client)
        mismatch = ""
        for self.dialect in DIALECTS:
            try:
                response = await self._complete(client, prompt, PROBE, 0.0)
                self._check_prompt(response, prompt)
                break
            except UnverifiedAnswer as error:
                mismatch = str(error)
            except self.openai.APIStatusError as error:
                if error.status_code not in REFUSED or self.dialect == DIALECTS[-1]:
                    raise
        else:
            message = f"{self.url} reads our prompts as other tokens: {mismatch}."
            raise RunError(message, "Serve the target with the same tokenizer.")
        with suppress(UnverifiedAnswer):  # uncertain tokens cannot be compared
            self._check_target(prompt, self._answer_ids(response))

    async def _only_model(self, client: Any) -> str:
        try:
            models = client.with_options(max_retries=2).models.list()
            names = [model.id async for model in models]
        except self.openai.APIStatusError:
            names = []
        if len(names) == 1:
            return str(names[0])
        why = f"{self.url} lists {', '.join(names) or 'no model'}."
        raise ConfigError("data.generate.model", None, why, "Name the one that is the target.")

    async def _complete(
        self, client: Any, prompt: PromptTokens, max_tokens: int, temperature: float
    ) -> Any:
        """Send one request; repeat it while the response is damaged."""
        digest = hashlib.sha256(f"{self.seed} {prompt.key} {prompt.index}".encode()).digest()
        fields: dict[str, Any] = {
            "model": self.model, "prompt": self._prompt(prompt), "max_tokens": max_tokens,
            "temperature": temperature, "seed": int.from_bytes(digest[:4], "big") >> 1,
        }  # fmt: skip
        if self.options.top_p < 1:
            fields["top_p"] = self.options.top_p
        for attempt in range(self.options.retries + 1):
            try:
                extra = EXTRAS if self.dialect.extras else None
                response = await client.completions.create(**fields, extra_body=extra)
                if response.choices and response.choices[0].text is not None:
                    return response
            except (ValueError, AttributeError, self.openai.APIResponseValidationError):
                pass  # cut off, or no json
            await asyncio.sleep(min(8.0, 0.5 * 2**attempt))
        raise RunError(f"{self.url} responds with damaged json repeatedly.", RETRY)

    def _prompt(self, prompt: PromptTokens) -> list[int] | str:
        """Return the prompt's tokens, or a text that tokenises to them."""
        if self.dialect.ids:
            return prompt.ids
        text = str(self.tokenizer.decode(prompt.ids, skip_special_tokens=False))
        start = self.tokenizer.bos_token or ""
        for candidate in (text, text.removeprefix(start)):  # the server may add the start token
            coded = self.tokenizer(candidate, add_special_tokens=not self.dialect.extras)
            if list(coded["input_ids"]) == prompt.ids:
                return candidate
        raise UnverifiedAnswer("no text gives the prompt's tokens")

    async def _answer(self, client: Any, prompt: PromptTokens) -> GeneratedAnswer | None:
        """Return one answer; None where the server refuses or the tokens are not certain."""
        limit, temperature = self.options.max_new_tokens, self.options.temperature
        try:
            response = await self._complete(client, prompt, limit, temperature)
            self._check_prompt(response, prompt)
            ids = self._answer_ids(response)
        except UnverifiedAnswer:
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
        self.answer_tokens += len(ids)
        return prompt.with_answer(ids)

    def _check_prompt(self, response: Any, prompt: PromptTokens) -> None:
        """Raise UnverifiedAnswer if the server read other tokens than the prompt's."""
        read = _extra(response.choices[0], "prompt_token_ids")
        read = read or _extra(response, "prompt_token_ids")
        count = len(read) if read else response.usage.prompt_tokens if response.usage else 0
        if (read and list(read) != prompt.ids) or count != len(prompt.ids):
            raise UnverifiedAnswer(f"{count} tokens instead of {len(prompt.ids)}")

    def _answer_ids(self, response: Any) -> list[int]:
        """Return the answer's tokens, the end token included.

        Raises UnverifiedAnswer if they were not returned, and those of the text may be others.
        """
        choice = response.choices[0]
        count = response.usage.completion_tokens if response.usage else -1
        returned = _extra(choice, "token_ids")
        ended = choice.finish_reason == "stop"
        if returned is not None:
            self.counts["exact"] += 1
            ids = list(returned)
            missing = ended and ids and ids[-1] not in self.stop_ids
            return [*ids, self._stop(choice)] if missing else ids
        ids = list(self.tokenizer(choice.text, add_special_tokens=False)["input_ids"])
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        ids += [self._stop(choice)] if ended else []
        if text != choice.text or len(ids) != count:
            raise UnverifiedAnswer(f"{count} tokens generated, {len(ids)} in the text")
        return ids

    def _stop(self, choice: Any) -> int:
        """Return the token that ended an answer: the server's stop reason, or the end token."""
        reason = _extra(choice, "stop_reason")
        if isinstance(reason, int) and reason in self.stop_ids:
            return reason
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UnverifiedAnswer("no end token is known")
        return int(end)

    @torch.no_grad()
    def _check_target(self, prompt: PromptTokens, answer: list[int]) -> None:
        """Raise RunError unless half of the server's greedy tokens are the target's."""
        if self.target is None or not answer:
            return
        ids = torch.tensor([prompt.ids + answer], device=self.target.device)
        length = ids.shape[1]
        causal = torch.ones(1, length, length, dtype=torch.bool, device=ids.device).tril()
        states = self.target.forward(ids, torch.arange(length, device=ids.device)[None], causal)
        logits = self.target.logits(states.last[0, len(prompt.ids) - 1 : -1])
        agreed = sum(a == b for a, b in zip(logits.argmax(-1).tolist(), answer, strict=True))
        if 2 * agreed < len(answer):
            message = f"{self.url} serves a different model than the target: {agreed} of its first "
            message += f"{len(answer)} greedy tokens are the target's."
            fix = "Serve the target itself, or set target to the served model."
            raise RunError(message, fix)

    def _convert(self, error: Exception) -> ConfigError | RunError:
        code = getattr(error, "status_code", None)
        body = " ".join(error.response.text.split()) if code is not None else ""  # type: ignore[attr-defined]
        message = f"{error} {body}" if body and body not in str(error) else str(error)
        why = f"{self.url}: {message[:SHOWN]}"
        if code == 404:
            return ConfigError("data.generate.model", self.model, why, "Give the name it serves.")
        if code in (401, 403):
            return RunError(why, "Set the key in the environment: OPENAI_API_KEY.")
        return RunError(why, RETRY)


def _extra(part: Any, name: str) -> Any:
    return (part.model_extra or {}).get(name)
