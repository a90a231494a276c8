"""Decoder: speculative generation for scripts.

    decoder = Decoder.from_run("runs/eagle3-tiny")
    answer = decoder.generate([{"role": "user", "content": "When should I visit Amberton?"}])
    print(answer.text, answer.tau)

    for piece in decoder.stream("Once upon a time", max_new_tokens=64):
        print(piece.text, end="")

Outputs have the distribution of plain decoding, whatever the drafter; greedily, in float32, they
are the same text. In half precision both hold up to rounding (docs/decoding.md, "Precision"). The
policy is a name of conf/decode/ ("chain", "dynamic_tree", "auto", ...), a policy object, or "plain"
for no speculation.
"""

import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import ConfigError, RunError
from outrider.conf.fields import from_dict
from outrider.conf.schema import Config, DrafterSettings, TargetConfig, UntrainedConfig
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.eval.auto_policy import policy_beside
from outrider.eval.calibration_file import attach_calibration
from outrider.eval.open_drafter import build_untrained, find_drafter, published_folder
from outrider.eval.rank_tables import tables_beside, tables_of
from outrider.eval.requests import (
    PLAIN,
    GenerationOptions,
    GenerationSettings,
    Prompt,
    check_budget,
    check_names,
    check_policy,
    tokenise_prompt,
)
from outrider.models import drafters, formats
from outrider.models.decode import from_config
from outrider.models.decode.costs.measurement import Announce, say_nothing
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Policy
from outrider.models.decode.request import DialogueCache, Event, Output, Request, Stops
from outrider.models.drafting.drafter import Drafter
from outrider.models.target import process
from outrider.models.target.load import load_target, read_shape, stop_ids
from outrider.models.target.target import Target
from outrider.train.settings import check_published, drafter_schema, is_untrained, load_run


@dataclass(frozen=True)
class Result:
    """An answer."""

    output_ids: list[int]  # new tokens, an end token included
    text: str  # up to a stop string, without special tokens and the end token
    accepted: list[int]  # accepted draft tokens of every round
    origins: list[str]  # per token: first (of the prompt's forward), accepted, correction, bonus
    tau: float | None  # tokens per target forward after the prompt's; None without a round
    seconds: float  # of the rounds
    prefill_seconds: float
    stop_reason: str  # "budget", "end token" or "stop string"; "" if max_new_tokens is 0
    choices: list[str] = field(default_factory=list)  # of policy="auto": per round, what it drafted
    lossy: bool | None = False  # the rule changes the target's distribution; None: custom rule

    @property
    def ended(self) -> str:
        """Old name of `stop_reason`."""
        return self.stop_reason

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the rounds; None without a round."""
        new = len(self.output_ids) - 1
        return new / self.seconds if new > 0 and self.seconds > 0 else None


@dataclass(frozen=True)
class Piece:
    """The new part of an answer after one round."""

    text: str  # incomplete characters and possible beginnings of a stop string come later
    ids: list[int]
    origins: list[str]
    result: Result  # the whole answer so far


class Decoder:
    """Speculative decoder of a target and a drafter.

    Attributes:
        announce: called with a sentence before policy="auto" measures its costs, which takes
            seconds; `decoder.announce = print` shows it.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        drafter: Drafter | None,
        policy: str | Policy = "chain",
        tables: from_config.Tables | None = None,
    ) -> None:
        """
        Args:
            drafter: None allows plain decoding only.
            tables: measured acceptance, for static trees and the first estimates of "auto".
        """
        check_policy(policy)
        self.target, self.tokenizer = target, tokenizer
        self.drafter, self.policy, self.tables = drafter, policy, tables
        self.announce: Announce = say_nothing
        self._learning = dict[DecodeConfig, Policy]()
        self.folder: Path | None = None  # of the drafter, where it has one
        self.changed: str | None = None  # how the drafter modified the target (Medusa-2)

    @classmethod
    def from_run(cls, path: str | Path, policy: str | Policy = "chain") -> "Decoder":
        """Load the target and the drafter of a finished run.

        A run that used plugins needs them: call `load_plugins` before.

        Raises:
            RunError, ConfigError: the folder has no finished run, or its target is not found.
        """
        return cls.from_config(load_run(path, []), policy)

    @classmethod
    def from_config(cls, config: Config, policy: str | Policy = "chain") -> "Decoder":
        """Load the drafter of a configuration: a run's, or the published one of `eval.drafter`."""
        untrained = config.drafter if isinstance(config.drafter, UntrainedConfig) else None
        return cls._loaded(config.target, find_drafter(config), policy, untrained)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        dtype: str = "auto",
        policy: str | Policy = "chain",
    ) -> "Decoder":
        """Load any causal language model, with a drafter of any format that Outrider reads.

        Args:
            target: "tiny", "smollm2", or a folder or hub id.
            drafter: the folder of its config.json, its hub id, or a name such as "suffix" of one
                without weights; None allows plain decoding only.
            settings: of a drafter without weights, as in conf/drafter/<name>.yaml.
            dtype: of the target: float32, bfloat16, float16, or auto: as its weights are stored,
                which is bfloat16 for "tiny" and most models. Greedy answers equal plain decoding
                token for token in float32 only (docs/decoding.md, "Precision").

        Raises:
            ConfigError: the name is that of a drafter with weights, or a setting is wrong.
            RunError: the drafter is not found, or was trained for another target.
        """
        built_in = str(target) in ("tiny", "smollm2")
        names = {"name": str(target)} if built_in else {"name": "hf", "path": str(target)}
        of_target = TargetConfig(**names, dtype=dtype)  # type: ignore[arg-type]
        if drafter is not None and is_untrained(str(drafter)):
            values = {**(settings or {}), "name": str(drafter)}
            own: UntrainedConfig = from_dict(drafter_schema(values), values, "drafter")
            return cls._loaded(of_target, None, policy, own)
        if settings:
            why = "Only a drafter without weights takes settings; others have their own."
            raise ConfigError("settings", dict(settings), why, "Leave it out.")
        if drafter is None:
            return cls._loaded(of_target, None, policy)
        check_published(str(drafter))
        return cls._loaded(of_target, published_folder(str(drafter)), policy)

    @classmethod
    def _loaded(
        cls,
        of_target: TargetConfig,
        folder: Path | None,
        policy: str | Policy,
        untrained: UntrainedConfig | None = None,
    ) -> "Decoder":
        process.set_threads()
        if untrained is not None and (shape := read_shape(of_target)):
            drafters.check(untrained, shape)
        target, tokenizer, _ = load_target(of_target, process.device())
        return cls.with_target(target, tokenizer, folder or untrained, policy)

    @classmethod
    def with_target(
        cls,
        target: Target,
        tokenizer: Any,
        drafter: Path | UntrainedConfig | None,
        policy: str | Policy = "chain",
    ) -> "Decoder":
        """Load a drafter for a target that is loaded already.

        Several decoders can share a target, unless one has a drafter that changes it (`changed`).

        Args:
            drafter: its folder; the settings of one without weights; None allows plain decoding
                only.

        Raises:
            ConfigError: its settings are wrong, or do not suit the target.
            RunError: it was trained for another target.
        """
        if drafter is None:
            return cls(target, tokenizer, None, PLAIN)
        if isinstance(drafter, UntrainedConfig):
            loaded = build_untrained(drafter, target)
            decoder = cls(target, tokenizer, loaded, policy, tables_of(None, drafter))
        else:
            loaded, _ = formats.load(drafter, target)
            attach_calibration(loaded, drafter)
            decoder = cls(target, tokenizer, loaded, policy, tables_beside(drafter))
            decoder.folder = drafter
        decoder.changed = loaded.patch_target(target)
        return decoder

    # ---- generation ----

    def generate(
        self, prompt: Prompt, max_new_tokens: int = 256, **how: Unpack[GenerationOptions]
    ) -> Result:
        """Generate one answer.

        Args:
            prompt: token ids; text, tokenised without a template; or messages, for the chat
                template (strings are of user and assistant alternating).
            **how: see `GenerationOptions`.

        Raises:
            RunError: the prompt is invalid, empty, too long for the target, or has unknown tokens.
            ConfigError: the policy is unknown, or the checkpoint does not support it.
            ValueError, TypeError: a setting is out of range or unknown.
        """
        return list(self.stream(prompt, max_new_tokens, **how))[-1].result

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 256,
        *,
        batch: int = 8,
        **how: Unpack[GenerationOptions],
    ) -> list[Result]:
        """Decode `batch` prompts together; the n-th answer is that of `generate` with seed + n.

        Sampled answers differ with policy="auto", whose choices depend on times, and with a drafter
        that learns from the other answers (suffix with `learn`); their distribution does not.
        """
        setting, budget = GenerationSettings.of(how), check_budget(max_new_tokens)
        if isinstance(prompts, str):
            raise RunError("Expected several prompts, got one text.", "Give a list.")
        requests = [
            Request(self.ids(prompt), budget, setting.seed + n) for n, prompt in enumerate(prompts)
        ]
        engine = self.engine(setting)
        return [self.result(out, setting) for out in engine.generate_all(requests, batch)]

    def stream(
        self, prompt: Prompt, max_new_tokens: int = 256, **how: Unpack[GenerationOptions]
    ) -> Generator[Piece, None, None]:
        """Generate one answer and yield a piece after every round; arguments as for `generate`."""
        setting = GenerationSettings.of(how)
        request = Request(self.ids(prompt), check_budget(max_new_tokens), setting.seed)
        return self._stream(request, setting)

    def chat(self, **how: Unpack[GenerationOptions]) -> "Chat":
        """Start a dialogue with settings as for `generate`; its turns reuse earlier caches."""
        return Chat(self, GenerationSettings.of(how))

    def ids(self, prompt: Prompt) -> list[int]:
        return tokenise_prompt(self.tokenizer, prompt)

    # ---- internals ----

    def _stream(
        self, request: Request, setting: GenerationSettings, caches: "Caches | None" = None
    ) -> Generator[Piece, None, None]:
        engine, pieces = self.engine(setting), Pieces(self, setting)
        cache = None if caches is None else caches[engine.drafter is not None]
        for event in engine.run([request], 1, dialogue=cache):
            yield pieces.next(event)

    def engine(self, setting: GenerationSettings) -> Engine:
        """Return an engine for requests with these settings."""
        sampling = setting.sampling.check(self.target.vocab_size)
        policy, stops = self._policy(setting), self.stops(setting)
        drafter = self.drafter if policy is not None else None
        rule = setting.bound_rule(policy)
        return Engine(
            self.target, drafter, policy, sampling=sampling, stops=stops, rule=rule, timed=False
        )

    def stops(self, setting: GenerationSettings) -> Stops:
        """Return what ends an answer before its budget."""
        ends = stop_ids(self.tokenizer, self.target)
        return Stops(ends, setting.stop_strings, self.text)

    def _policy(self, setting: GenerationSettings) -> Policy | None:
        policy = self.policy if setting.policy is None else setting.policy
        if policy == PLAIN:
            return None
        if self.drafter is None:
            raise RunError("There is no drafter to speculate with.", 'Use policy="plain".')
        if isinstance(policy, str):
            policy = self._policy_of(policy, setting)
        if warning := from_config.depth_warning(policy, self.drafter):
            warnings.warn(warning, stacklevel=6)
        return policy

    def _policy_of(self, name: str, setting: GenerationSettings) -> Policy:
        """Return the policy of a name; that of "auto" learns, and is kept for later answers."""
        decode = _decode_config(name, setting.sampling.temperature, setting.coupled)
        if isinstance(settings := getattr(self.drafter, "cfg", None), DrafterSettings):
            decode = from_config.suit_drafter(decode, settings)
        if decode.kind != "auto":
            return from_config.policy_of(decode, self.tables)
        if decode not in self._learning:
            self._learning[decode] = policy_beside(
                decode, self.folder, self.tables, lambda text: self.announce(text)
            )
        return self._learning[decode]

    def text(self, ids: list[int]) -> str:
        """Decode token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def result(self, out: Output, setting: GenerationSettings) -> Result:
        """Return an answer, or as much as there is of it, with its text."""
        text = self.text(out.ids[:-1] if out.stop_reason == "end token" else out.ids)
        ends = [at for stop in setting.stop_strings if (at := text.find(stop)) >= 0]
        lossy = setting.lossy if (setting.policy or self.policy) != PLAIN else False
        return Result(
            list(out.ids), text[: min(ends, default=len(text))], list(out.accepted),
            list(out.origins), out.tau, out.times.rounds, out.times.prefill, out.stop_reason,
            list(out.choices), lossy,
        )  # fmt: skip


class Pieces:
    """The pieces of one answer, whose texts concatenate to the text of the answer."""

    def __init__(self, decoder: Decoder, setting: GenerationSettings) -> None:
        self.decoder, self.setting, self.emitted = decoder, setting, ""

    def next(self, event: Event) -> Piece:
        """Return the piece of a round."""
        result = self.decoder.result(event.out, self.setting)
        text = result.text if result.stop_reason else _stable_text(result.text, self.setting)
        new = text.removeprefix(self.emitted) if text.startswith(self.emitted) else ""
        self.emitted += new
        origins = result.origins[len(result.origins) - len(event.tokens) :]
        return Piece(new, event.tokens, origins, result)


Caches = dict[bool, DialogueCache]  # by whether a drafter runs: its state is part of the cache


class Chat:
    """A dialogue of several turns that reuses its KV caches."""

    def __init__(self, decoder: Decoder, setting: GenerationSettings) -> None:
        self.decoder, self.setting = decoder, setting
        self.messages: list[Message] = []  # a system message may be inserted before the first turn
        self._caches: Caches = {True: DialogueCache(), False: DialogueCache()}

    def say(self, text: str, max_new_tokens: int = 256, **how: Unpack[GenerationOptions]) -> Result:
        """Generate the answer to the next message; `how` are settings of this turn only."""
        return list(self.stream(text, max_new_tokens, **how))[-1].result

    def stream(
        self, text: str, max_new_tokens: int = 256, **how: Unpack[GenerationOptions]
    ) -> Generator[Piece, None, None]:
        """Generate the answer piece by piece.

        If the iteration stops early, `messages` keeps the answer so far; a message without any
        answer (one that exceeds the target's context) is dropped.
        """
        if not isinstance(text, str):
            raise TypeError(f"text={text!r:.80}: must be a string")
        setting = replace(self.setting, **check_names(how))
        messages = [*self.messages, Message(role="user", content=text)]
        ids = prompt_ids(self.decoder.tokenizer, messages)
        request = Request(ids, check_budget(max_new_tokens), setting.seed + len(messages))
        answer: str | None = None
        try:
            for piece in self.decoder._stream(request, setting, self._caches):
                answer = piece.result.text if piece.result.output_ids else None
                yield piece
        finally:
            if answer is not None:
                self.messages += [messages[-1], Message(role="assistant", content=answer)]


@lru_cache(maxsize=64)
def _decode_config(policy: str, temperature: float, coupled: bool) -> DecodeConfig:
    """Return conf/decode/<policy>.yaml at a temperature; cached, since composing is slow."""
    _, decode = from_config.parse_policy_at_temperature(f"{policy}@{temperature:f}")
    decode = replace(decode, draft="coupled") if coupled else decode
    from_config.check_decode(decode)
    return decode


def _stable_text(text: str, setting: GenerationSettings) -> str:
    """Return unfinished text without an incomplete character or beginning of a stop string."""
    text, stops = text.rstrip("\N{REPLACEMENT CHARACTER}"), setting.stop_strings
    beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
    held = max((len(part) for part in beginnings if text.endswith(part)), default=0)
    return text[: len(text) - held]
