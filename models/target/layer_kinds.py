"""Kinds of a target's decoder layers, and kernels of recurrent ones that are not installed."""

from collections import Counter
from typing import Any

from torch import nn

from outrider.models.target.recurrent import kernels_of, recurrent_modules, writes_rows
from outrider.models.target.target import Target

# packages of kernels, as pip knows them
DISTRIBUTIONS = {
    "fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm",
}  # fmt: skip


def layer_kinds(target: Target) -> dict[str, int]:
    """Return how many decoder layers attend, are recurrent, do both, or only transform rows."""
    return dict(Counter(map(_kind, target.layers)))


def _kind(layer: nn.Module) -> str:
    recurrent, attends = bool(recurrent_modules(layer)), writes_rows(layer)
    if recurrent and attends:
        return "recurrent with attention"
    return "recurrent" if recurrent else "attention" if attends else "MLP"


def missing_kernels(target: Target) -> list[str]:
    """Return the packages without which recurrent layers run transformers' slow code, sorted."""
    kernels = [one for kind in {*map(type, target.recurrent)} for one in kernels_of(kind)]
    found = set[str]().union(*map(_fallback_package, kernels))
    return sorted(DISTRIBUTIONS.get(package, package) for package in found)


def _fallback_package(function: Any) -> set[str]:
    """Return the package that a function of transformers does without; empty if it has it."""
    while function is not None:
        code = getattr(function, "__code__", None)
        cells = getattr(function, "__closure__", None) or ()
        known = dict(zip(code.co_freevars, cells, strict=True)) if code else {}
        if {"package", "is_new_implementation"} <= known.keys():
            missing = not known["is_new_implementation"].cell_contents
            return {known["package"].cell_contents} if missing else set()
        function = getattr(function, "__wrapped__", None)
    return set()
