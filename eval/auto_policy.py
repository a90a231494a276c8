"""Draft policies with the cost table of a drafter."""

from pathlib import Path

from outrider.conf.decode_settings import DecodeConfig
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import FILE
from outrider.models.decode.from_config import Tables, policy_of
from outrider.models.decode.policy import Policy


def policy_beside(
    decode: DecodeConfig, drafter: Path | None, tables: Tables | None = None
) -> Policy:
    """Return the policy of `decode`; that of decode=auto keeps its cost table with the drafter.

    Args:
        drafter: its folder. costs.json is beside a run's own `drafter/`; of other folders, and
            without one, costs are kept in the user's cache.

    Raises:
        ConfigError: as `policy_of`.
    """
    policy = policy_of(decode, tables)
    run = None if drafter is None else drafter.parent
    if isinstance(policy, Auto) and run is not None and (run / "config.yaml").is_file():
        policy.file = run / FILE
    return policy
