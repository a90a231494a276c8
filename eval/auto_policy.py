"""Draft policies with the cost tables of a drafter."""

from pathlib import Path

from outrider.conf.decode_settings import DecodeConfig
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import FILE
from outrider.models.decode.costs.measurement import Announce, say_nothing
from outrider.models.decode.from_config import Tables, policy_of
from outrider.models.decode.policy import Policy


def policy_beside(
    decode: DecodeConfig,
    drafter: Path | None,
    tables: Tables | None = None,
    announce: Announce = say_nothing,
) -> Policy:
    """Return the policy of `decode`; that of decode=auto keeps its cost tables with the drafter.

    Args:
        drafter: its folder. costs.json is beside a run's own `drafter/`; of other folders, and
            without one, costs are kept in the user's cache.
        announce: called with a sentence before decode=auto measures its costs.

    Raises:
        ConfigError: as `policy_of`.
    """
    policy = policy_of(decode, tables)
    if isinstance(policy, Auto):
        policy.announce = announce
        if drafter is not None and (drafter.parent / "config.yaml").is_file():
            policy.file = drafter.parent / FILE
    return policy
