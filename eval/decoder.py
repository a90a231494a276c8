"""The decoder for a script: a target, a drafter, and text in and out.

    decoder = Decoder.from_run("runs/eagle3-tiny")
    answer = decoder.generate([{"role": "user", "content": "When should I visit Amberton?"}])
    print(answer.text, answer.tau)

    for piece in decoder.stream("Once upon a time", max_new_tokens=64):
        print(piece.text, end="")

What comes out has the law of plain decoding, whatever the drafter; greedily, in float32, it is the
same text. The policy is a name of conf/decode/ ("chain", "dynamic_tree", ...), a policy object, or
"plain" for no speculation.
"""

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.conf.compose import choices
from outrider.conf.errors import ConfigError, RunError
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.eval.hub import fetch
from outrider.eval.rank_tables import read_tables
from outrider.eval.requests import Prompt, Setting, budget_of, check_policy, ids_of, known
from outrider.models import formats
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import Tables, policy_of, shortfall
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import Memory, Output, Request, Stops
from outrider.models.decode.rules import COUPLED, Fitted, Judge, judge
from outrider.models.drafter import Drafter
from outrider.models.load import load, stop_ids
from outrider.models.target import Target
from outrider.train import distributed as start
from outrider.train.decoding import DecodeConfig, check, shaped
from outrider.train.settings import Config, TargetConfig, load_run

PLAIN = "plain"


@dataclass(frozen=True)
class Result:
    """An answer.

    Attributes:
        output_ids: new tokens, an end token included.
        text: of them, up to a stop string, without special tokens and the end token.
        accepted: drafted tokens accepted in every round.
        origins: who proposed each token: first, accepted, correction or bonus.
        tau: tokens per forward of the target behind the prompt's; None without a round.
        seconds: of the rounds; the prompt's own time is `prefill_seconds`.
        ended: "budget", "end token" or "stop string"; "" where no token was asked for.
        lossy: the rule was one that changes what the target says; None: nobody knows, for it was no
            rule of Outrider's.
    """

    output_ids: list[int]
    text: str
    accepted: list[int]
    origins: list[str]
    tau: float | None
    seconds: float
    prefill_seconds: float
    ended: str
    lossy: bool | None = False

    @property
    def tokens_per_second(self) -> float | None:
        """Of the rounds."""
        new = len(self.output_ids) - 1
        return new / self.seconds if new > 0 and self.seconds > 0 else None


@dataclass(frozen=True)
class Piece:
    """What a round has brought.

    Attributes:
        text: new text. Characters whose tokens are not all there yet wait for the next piece, and
            so does what may become a stop string.
        ids, origins: new tokens, and who proposed each.
        result: the whole answer so far.
    """

    text: str
    ids: list[int]
    origins: list[str]
    result: Result


class Decoder:
    """A target with a drafter, ready to answer.

    Attributes:
        changed: what the drafter has done to the target, as Medusa-2 does; None: nothing.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafter: Drafter | None,
        policy: str | Policy = "chain",
        tables: Tables | None = None,
    ) -> None:
        """
        Args:
            drafter: None can only decode plainly.
            policy: used where a call names none.
            tables: chances of the drafter's ranks, for static trees (eval/rank_tables.py).
        """
        self._check(policy)
        self.target, self.tokenizer = target, tokenizer
        self.drafter, self.policy, self.tables = drafter, policy, tables
        self.changed: str | None = None

    @classmethod
    def from_run(cls, path: str | Path, policy: str | Policy = "chain") -> "Decoder":
        """The target and the drafter of a finished run.

        Raises:
            RunError, ConfigError: the folder holds no finished run, or its target is not found.
        """
        return cls.from_config(load_run(path, []), policy)

    @classmethod
    def from_config(cls, config: Config, policy: str | Policy = "chain") -> "Decoder":
        """`from_run`, with the changes that `load_run` was given (another target.dtype, say)."""
        folder = Path(config.run.dir)
        if not (folder / "drafter").is_dir():
            message = f"{folder} holds no drafter/: its training has not finished."
            raise RunError(message, "Finish it (train.resume=auto continues), or give another run.")
        return cls._loaded(config.target, folder / "drafter", policy, read_tables(folder))

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        dtype: str = "auto",
        policy: str | Policy = "chain",
    ) -> "Decoder":
        """Any causal language model, with a drafter of any format that Outrider reads.

        Args:
            target: "tiny", "smollm2", or a folder or hub id.
            drafter: the folder that holds its config.json, or its hub id; None decodes plainly.
            dtype: of the target: auto, float32, bfloat16 or float16.

        Raises:
            RunError: the drafter is nowhere to be had, or was made for another target.
        """
        own = str(target) in ("tiny", "smollm2")
        names = {"name": str(target)} if own else {"name": "hf", "path": str(target)}
        settings = TargetConfig(**names, dtype=dtype)  # type: ignore[arg-type]
        if drafter is None:
            return cls._loaded(settings, None, policy, None)
        folder = fetch(str(drafter))
        if not (folder / "config.json").is_file() and (folder / "drafter").is_dir():
            message = f"{folder} is a run, not a drafter."
            raise RunError(message, f"Give {folder / 'drafter'}, or use Decoder.from_run.")
        tables = read_tables(folder) or read_tables(folder.parent)  # of a run's own drafter/
        return cls._loaded(settings, folder, policy, tables)

    @classmethod
    def _loaded(
        cls,
        settings: TargetConfig,
        folder: Path | None,
        policy: str | Policy,
        tables: Tables | None,
    ) -> "Decoder":
        start.use_cores()
        target, tokenizer, _ = load(settings, start.device())
        if folder is None:
            return cls(target, tokenizer, None, PLAIN, tables)
        drafter, _ = formats.load(folder, target)
        decoder = cls(target, tokenizer, drafter, policy, tables)
        decoder.changed = drafter.change(target)
        return decoder

    # ---- answers ----

    def generate(self, prompt: Prompt, max_new_tokens: int = 256, **how: Any) -> Result:
        """One answer.

        Args:
            prompt: token ids; text, tokenised as it is; or messages, for the chat template
                (plain strings are of user and assistant in turn).
            max_new_tokens: at most so many.
            **how: temperature, top_p, top_k, min_p, repetition_penalty, banned (token ids), seed,
                stop (strings), policy, rule (above temperature 0: a name of decoder.md's table, or
                one of `rules.judge`; None: the usual lossless one).

        Raises:
            RunError: the prompt is none, empty, too long for the target, or not of its tokens.
            ConfigError: there is no such policy, or the checkpoint cannot be drafted with so.
            ValueError, TypeError: a setting out of range, or unknown.
        """
        return list(self.stream(prompt, max_new_tokens, **how))[-1].result

    def generate_batch(
        self, prompts: Sequence[Prompt], max_new_tokens: int = 256, *, batch: int = 8, **how: Any
    ) -> list[Result]:
        """Answers to several prompts, `batch` of them decoded together at a time.

        The n-th answer is that of `generate` with the seed raised by n.
        """
        setting, budget = Setting(**known(how)), budget_of(max_new_tokens)
        if isinstance(prompts, str):
            raise RunError("Several prompts are wanted, and this is one text.", "Give a list.")
        requests = [
            Request(self.ids(prompt), budget, setting.seed + n) for n, prompt in enumerate(prompts)
        ]
        engine = self._engine(setting)
        return [self._result(out, setting) for out in engine.generate_all(requests, batch)]

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 256, **how: Any
    ) -> Generator[Piece, None, None]:
        """`generate`, piece by piece: one per round, as it comes."""
        setting = Setting(**known(how))
        request = Request(self.ids(prompt), budget_of(max_new_tokens), setting.seed)
        return self._stream(request, setting)

    def chat(self, **how: Any) -> "Chat":
        """A dialogue whose turns go on where the last one ended, caches and all.

        Args:
            **how: as for `generate`, for every turn.
        """
        return Chat(self, Setting(**known(how)))

    def ids(self, prompt: Prompt) -> list[int]:
        """A prompt as tokens."""
        return ids_of(self.tokenizer, prompt)

    # ---- inside ----

    def _stream(
        self, request: Request, setting: Setting, memories: "Memories | None" = None
    ) -> Generator[Piece, None, None]:
        engine, shown = self._engine(setting), ""
        memory = None if memories is None else memories[engine.drafter is not None]
        for event in engine.run([request], 1, memory=memory):
            result = self._result(event.out, setting)
            text = result.text if event.out.ended else _settled(result.text, setting.strings)
            fresh = text[len(shown) :] if text.startswith(shown) else ""
            shown = shown + fresh
            count = len(event.tokens)
            yield Piece(fresh, event.tokens, result.origins[len(result.origins) - count :], result)

    def _engine(self, setting: Setting) -> Engine:
        sampling = setting.sampling.check(self.target.vocab)
        policy = self._policy(setting)
        stops = Stops(stop_ids(self.tokenizer, self.target), setting.strings, self.text)
        drafter = self.drafter if policy is not None else None
        rule = _rule(setting, policy)
        return Engine(
            self.target, drafter, policy, sampling=sampling, stops=stops, rule=rule, timed=False
        )

    def _policy(self, setting: Setting) -> Policy | None:
        chosen = self.policy if setting.policy is None else setting.policy
        if chosen == PLAIN:
            return None
        self._check(chosen)
        if self.drafter is None:
            raise RunError("There is no drafter to speculate with.", 'Use policy="plain".')
        if isinstance(chosen, str):
            decode = _named(chosen, setting.sampling.temperature, _coupled(setting.rule))
            chosen = policy_of(decode, self.tables)
        if short := shortfall(chosen, self.drafter):
            warnings.warn(short, stacklevel=6)
        return chosen

    @staticmethod
    def _check(policy: str | Policy) -> None:
        check_policy(policy)
        if isinstance(policy, str) and policy not in (PLAIN, *choices("decode")):
            names = ", ".join((PLAIN, *choices("decode")))
            raise ConfigError("policy", policy, "There is no such policy.", f"Use one of: {names}.")

    def text(self, ids: list[int]) -> str:
        """Tokens as text, without special ones."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _result(self, out: Output, setting: Setting) -> Result:
        text = self.text(out.ids[:-1] if out.ended == "end token" else out.ids)
        ends = [at for stop in setting.strings if (at := text.find(stop)) >= 0]
        return Result(
            list(out.ids),
            text[: min(ends)] if ends else text,
            list(out.accepted),
            list(out.origins),
            out.tau,
            out.clock.rounds,
            out.clock.prefill,
            out.ended,
            setting.lossy if (setting.policy or self.policy) != PLAIN else False,
        )


Memories = dict[bool, Memory]  # with a drafter, whose state belongs to the cache, and without


class Chat:
    """A dialogue: what was said, and the caches that hold it.

    Attributes:
        messages: so far; a system message may be put in front before the first turn.
    """

    def __init__(self, decoder: Decoder, setting: Setting) -> None:
        self.decoder, self.setting = decoder, setting
        self.messages: list[Message] = []
        self._memories: Memories = {True: Memory(), False: Memory()}

    def say(self, text: str, max_new_tokens: int = 256, **how: Any) -> Result:
        """The answer to the next message of the user.

        Args:
            **how: what is different in this turn.
        """
        return list(self.stream(text, max_new_tokens, **how))[-1].result

    def stream(
        self, text: str, max_new_tokens: int = 256, **how: Any
    ) -> Generator[Piece, None, None]:
        """`say`, piece by piece.

        An answer that is not heard to its end is kept as far as it came; a message without any
        answer (it does not fit the target, say) is taken back.
        """
        if not isinstance(text, str):
            raise TypeError(f"text={text!r:.80}: must be a string")
        setting = replace(self.setting, **known(how))
        asked = [*self.messages, Message(role="user", content=text)]
        ids = prompt_ids(self.decoder.tokenizer, asked)
        request = Request(ids, budget_of(max_new_tokens), setting.seed + len(asked))
        said: str | None = None
        try:
            for piece in self.decoder._stream(request, setting, self._memories):
                said = piece.result.text if piece.result.output_ids else None
                yield piece
        finally:
            if said is not None:
                self.messages.append(asked[-1])
                self.messages.append(Message(role="assistant", content=said))


def _rule(setting: Setting, policy: Policy | None) -> Judge | None:
    """The rule that was asked for, made for such guesses; greedily, and without any, none."""
    if setting.sampling.greedy or not isinstance(setting.rule, str):
        return None if isinstance(setting.rule, str) else setting.rule
    if policy is None:  # whose words only noise can change
        return judge(COUPLED, COUPLED) if _coupled(setting.rule) else None
    return judge(setting.rule, policy.draft)


def _coupled(rule: str | Judge | None) -> bool:
    return rule == COUPLED or (isinstance(rule, Fitted) and rule.coupled)


@lru_cache(maxsize=64)
def _named(policy: str, temperature: float, coupled: bool) -> DecodeConfig:
    """conf/decode/<policy>.yaml; composing it takes longer than many an answer."""
    _, decode = shaped(f"{policy}@{temperature:f}")
    decode = replace(decode, draft="coupled") if coupled else decode
    check(decode)
    return decode


def _settled(text: str, stops: Sequence[str]) -> str:
    """What will stay of an unfinished answer: neither half a character nor half a stop string."""
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    halves = (stop[:size] for stop in stops for size in range(1, len(stop)))
    held = max((len(half) for half in halves if text.endswith(half)), default=0)
    return text[: len(text) - held]
