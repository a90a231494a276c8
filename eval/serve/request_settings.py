"""Generation settings of a request: its own parameters, and those of conf/decode for the rest."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from outrider.conf.decode_settings import DecodeConfig
from outrider.eval.auto_policy import policy_beside
from outrider.eval.requests import GenerationSettings
from outrider.eval.serve.parameters import Parameters
from outrider.models.decode.costs.measurement import Announce, say_nothing
from outrider.models.decode.from_config import Tables, check_decode, rule_of, sampling_of
from outrider.models.decode.sampling_params import Sampling

KNOWN = 64  # settings whose policy is kept


class RequestSettings:
    """The settings of requests; policy and rule follow from the sampling as for `outrider eval`."""

    def __init__(
        self,
        decode: DecodeConfig,
        tables: Tables | None,
        vocab: int,
        drafter: Path | None = None,
        announce: Announce = say_nothing,
    ) -> None:
        """
        Args:
            drafter: its folder, if it has one.
            announce: called with a sentence before costs are measured.
        """
        self.announce = announce
        self.decode, self.tables, self.vocab, self.drafter = decode, tables, vocab, drafter
        self._of = lru_cache(maxsize=KNOWN)(self._decoding)

    def __call__(self, asked: Parameters, seed: int) -> GenerationSettings:
        """Return the settings of an answer.

        Raises:
            ConfigError, ValueError: a parameter is invalid for the target or the draft.
        """
        given = {name: getattr(asked, name) for name in Sampling._fields}
        values = {name: value for name, value in given.items() if value is not None}
        setting = self._of(replace(self.decode, **values))
        return replace(setting, stop=asked.stop_strings, seed=seed)

    def _decoding(self, decode: DecodeConfig) -> GenerationSettings:
        check_decode(decode)
        sampling = sampling_of(decode, self.vocab)
        policy = policy_beside(decode, self.drafter, self.tables, self.announce)
        rule = rule_of(decode, policy)
        return GenerationSettings(**sampling._asdict(), policy=policy, rule=rule)
