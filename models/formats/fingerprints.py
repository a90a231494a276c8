"""Fingerprints of target, tokenizer and chat template."""

import hashlib
import json
from typing import Any

from outrider.models.formats.native import target_fingerprint
from outrider.models.target.chat_template import template_hash
from outrider.models.target.load import LoadedTarget


def fingerprints(loaded: LoadedTarget) -> dict[str, str]:
    """Return hashes of target, tokenizer and template, which define recorded features."""
    return {
        "target": target_fingerprint(loaded.target),
        "tokenizer": hashlib.sha256(_rules(loaded.tokenizer).encode()).hexdigest()[:16],
        "template": template_hash(loaded.tokenizer),
    }


def _rules(tokenizer: Any) -> str:
    """Return the rules from text to ids as JSON; of a slow tokenizer only the vocabulary."""
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return json.dumps(sorted(tokenizer.get_vocab().items()))
    rules = json.loads(fast.to_str())
    changing = ("padding", "truncation")  # settings of the last call
    return json.dumps({k: v for k, v in rules.items() if k not in changing}, sort_keys=True)
