"""Checks of the target, its taps, recorded features, and the drafter."""

import torch

from outrider.launch.doctor.finding import Finding
from outrider.models.load import LoadedTarget
from outrider.train.trainer import Trainer

TOLERANCE = 0.05  # relative difference of recorded and recomputed hidden states


def target_check(loaded: LoadedTarget) -> Finding:
    """Report the comparison that `models/target_check.py` made when the target was loaded."""
    target = loaded.target
    facts = {
        "source": loaded.source, "parameters": target.parameter_count(),
        "layers": target.num_layers, "dtype": str(target.dtype).removeprefix("torch."),
        "vocab": target.vocab_size,
    }  # fmt: skip
    message = (
        f"{target.name}, {target.parameter_count() / 1e6:.2f} M parameters in {facts['dtype']}: "
        "hooked tree decoding equals the model's own forward"
    )
    return Finding("probe", "ok", message, facts)


@torch.no_grad()
def taps(run: Trainer) -> Finding:
    """Compute the taps of one held-out row and check their shape and that they are finite."""
    target, data = run.target, run.data
    trace = next(data.held_traces(target, 1, recorded=False))
    hidden, expected = target.shape().hidden, len(run.drafter.taps)
    sizes = trace.taps.float().unflatten(-1, (-1, hidden)).square().mean((0, 1, 3)).sqrt().tolist()
    facts = {"layers": list(run.drafter.taps), "taps": list(trace.taps.shape),
             "last": list(trace.last.shape), "size": sizes}  # fmt: skip
    message = (
        f"decoder layers {list(run.drafter.taps)}: taps {facts['taps']}, "
        f"last {facts['last']}; RMS of the taps {', '.join(f'{size:.3g}' for size in sizes)}"
    )
    if not bool(trace.taps.isfinite().all() and trace.last.isfinite().all()):
        fix = "Use target.dtype=float32 or bfloat16."
        return Finding("taps", "wrong", f"{message}; not all values are finite", facts, fix)
    if trace.taps.shape[-1] != expected * hidden:
        fix = "Outrider does not support the hidden states of this model family."
        return Finding("taps", "wrong", f"{message}; {expected} taps are expected", facts, fix)
    return Finding("taps", "ok", message, facts)


@torch.no_grad()
def recording(run: Trainer) -> list[Finding]:
    """Compare recorded features with recomputed ones; no finding without a recording."""
    data, target = run.data, run.target
    if data.recorded is None:
        return []
    then, now = next(data.held_traces(target, 1)), next(data.held_traces(target, 1, recorded=False))
    supervised = now.supervised_mask(0)  # these rows are recorded for every drafter
    gap = (then.last.float() - now.last.float())[supervised].norm() / now.last.float()[
        supervised
    ].norm()
    facts = {"apart": float(gap)}
    message = f"recorded hidden states differ by {float(gap):.2%} from recomputed ones"
    if gap <= TOLERANCE:
        return [Finding("recorded", "ok", message, facts)]
    fix = "They belong to another target or precision: remove the folder and run prepare again."
    return [Finding("recorded", "wrong", message, facts, fix)]


def drafter(run: Trainer) -> Finding:
    """Report the trained parameters and their initialisation."""
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)
    facts = {"name": run.config.drafter.name, "parameters": trained}
    layers = f" on layers {list(run.drafter.taps)}" if run.drafter.taps else ""
    message = f"{trained / 1e6:.2f} M parameters{layers} ({run.initialisation})"
    return Finding("drafter", "ok", message, facts)
