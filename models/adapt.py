"""Values of the settings that the user did not set, chosen for this target and this drafter.

    train.lr         3.5e-3 (192 / hidden size)^1.5 (train.batch_tokens / 2048)^0.5, and not more
                     than 3.5e-3
    train.optimizer  Muon with train.optimizer.rate=3 for eagle, eagle3, hass and mtp, else
                     AdamW; AdamW with ZeRO, and with a torch without Muon
    data.max_length  256 for data=tiny, else 1024, and not more than the target's positions
    decode.depth     3 for a chain, 8 for opt_tree, best_first_tree and auto, else 4, and not
                     more than the drafter can, and in a tree not more than decode.nodes;
                     drafter.depths for a drafter without weights
    drafter.*        a setting with its default, where it would contradict one that is given
                     (`automatic.adjust`)
    decode.confidence  of a chain: 0; adaptive for a drafter whose draft tokens run through most of
                     the target

The learning rate equals what a search found for the embedded target (hidden size 192), what
experiment=smollm2 uses (5e-4 for 576), and what is published for a hidden size of 4096 (EAGLE-3 and
SpecForge: 5e-5 to 1e-4 at some 16,000 tokens per step). docs/log.md has measurements.
"""

from collections.abc import Callable
from dataclasses import replace

from outrider.conf.automatic import LEARNING_RATE, MUON_DRAFTERS, automatic_depth
from outrider.conf.schema import Config
from outrider.models.decode.from_config import decodings, suit_depth
from outrider.models.interface import ModelShape

HIDDEN, BATCH_TOKENS = 192, 2048  # of the search
POWER = 1.5


def learning_rate(hidden: int, batch_tokens: int) -> float:
    """Return the peak learning rate for a hidden size and tokens per step, of two digits."""
    rate = LEARNING_RATE * (HIDDEN / hidden) ** POWER * (batch_tokens / BATCH_TOKENS) ** 0.5
    return float(f"{min(rate, LEARNING_RATE):.1e}")


def adapt(config: Config, note: Callable[[str], None], shape: ModelShape | None = None) -> Config:
    """Choose the values of `config.automatic`.

    Args:
        note: called once with what differs from the values for the embedded target, if anything.
        shape: of the target; None chooses only the settings of decoding.
    """
    notes = [f"drafter.{setting}" for setting in config.drafter.adjusted]
    if shape is not None and "train.lr" in config.automatic:
        tokens = config.train.batch_tokens
        rate = learning_rate(shape.hidden, tokens)
        if rate != config.train.lr:
            of = f"for hidden size {shape.hidden} and {tokens} tokens per step"
            notes.append(f"train.lr={rate:g} {of}")
        config = replace(config, train=replace(config.train, lr=rate))
    without_muon = config.drafter.name in MUON_DRAFTERS and config.train.optimizer.name != "muon"
    if "train.optimizer" in config.automatic and without_muon:
        notes.append("train.optimizer=adamw, as Muon needs whole matrices and torch >= 2.9")
    longest = shape.max_positions if shape is not None else config.data.max_length
    if "data.max_length" in config.automatic and longest < config.data.max_length:
        notes.append(f"data.max_length={longest}, the target's positions")
        config = replace(config, data=replace(config.data, max_length=longest))
    if "decode.depth" in config.automatic:
        config = replace(config, decode=suit_depth(config.decode, config.drafter))
    if "decode.confidence" in config.automatic and config.drafter.confidence:
        decode = replace(config.decode, confidence=config.drafter.confidence)
        config = replace(config, decode=decode)
        notes.append(f"decode.confidence={decode.confidence}")
    if "decode.depth" in config.automatic:
        used = [decode for _, decode in decodings(config)]
        if any(decode.depth < automatic_depth(decode.name, decode.nodes) for decode in used):
            depth = min(decode.depth for decode in used)
            notes.append(f"decode.depth={depth}, as deep as the drafter can")
    if notes:
        note(f"not set, so chosen: {'; '.join(notes)}")
    kept = [] if shape is not None else ["train.lr", "train.optimizer", "data.max_length"]
    kept += ["decode.depth", "decode.nodes"] if config.eval.grid else []  # chosen for each entry
    return replace(config, automatic=tuple(key for key in config.automatic if key in kept))
