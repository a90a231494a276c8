"""The draft model that `path` of a drafter without weights names.

It is a folder or hub id of a causal language model, or a trained drafter `draft_lm`: its folder, or
that of its run.
"""

from outrider.conf.errors import ConfigError
from outrider.models import formats
from outrider.models.drafters import draft_lm
from outrider.models.drafters.draft_lm import DraftLm
from outrider.models.drafters.parts.part import folder_of
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.interface import ModelShape
from outrider.models.target.target import Target

KEY = "drafter.path"


def check(path: str, shape: ModelShape) -> None:
    """Raise ConfigError if the draft model's config.json does not suit a target of this shape."""
    if not formats.holds_drafter(folder_of(path)):
        DraftLm.check_settings(draft_lm.Config(path=path), shape)


def load(path: str, target: Target) -> DraftLm:
    """Load a draft model, frozen, with the target's device and dtype.

    Raises:
        ConfigError: it cannot be loaded, has other tokens than the target, or is no `draft_lm`.
        RunError: the folder of a drafter is damaged, or was made for another target.
    """
    folder = folder_of(path)
    if not formats.holds_drafter(folder):
        everything = DraftVocab.identity(target.vocab_size)
        lm = DraftLm(draft_lm.Config(path=path), target, everything, ())
        return lm.to(target.device, target.dtype).eval().requires_grad_(False)
    drafter, cfg = formats.load(folder, target)
    if type(drafter) is not DraftLm:
        fix = "Give a folder of a drafter draft_lm, or of a causal language model."
        raise ConfigError(KEY, path, f"It holds a drafter {cfg.name}.", fix)
    return drafter
