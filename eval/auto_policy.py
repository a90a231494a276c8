"""Draft policies with what lies beside a drafter: its cost table and its calibration."""

from pathlib import Path

from outrider.conf.decode_settings import DecodeConfig
from outrider.eval.calibration import read_calibration
from outrider.models.decode.acceptance import Acceptance
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.cost_table import FILE
from outrider.models.decode.from_config import Tables, policy_of
from outrider.models.decode.policy import Policy


def policy_beside(
    decode: DecodeConfig, drafter: Path | None, tables: Tables | None = None
) -> Policy:
    """Return the policy of `decode`; that of decode=auto keeps its cost table with the drafter.

    Args:
        drafter: its folder. Beside a run's own `drafter/` lie costs.json and calibration.json; of
            other folders, and without one, costs are kept in the user's cache.

    Raises:
        ConfigError: as `policy_of`.
        CorruptFile: calibration.json is none.
    """
    policy = policy_of(decode, tables)
    if isinstance(policy, Auto) and drafter is not None:
        run = drafter.parent
        if (run / "config.yaml").is_file():
            policy.file = run / FILE
            policy.shared = Acceptance(read_calibration(run))
    return policy
