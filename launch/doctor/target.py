"""The target: is it read rightly, and does it give the drafter what that expects?"""

import torch

from outrider.launch.doctor.finding import Finding
from outrider.models.load import Loaded
from outrider.train.trainer import Run

APART = 0.05  # of the states' size, between recorded ones and those computed now


def read_rightly(loaded: Loaded) -> Finding:
    """`models/target_check.py` has compared its words with our reading of it, when it was loaded."""
    target = loaded.target
    facts = {"source": loaded.source, "parameters": target.parameters(), "layers": target.depth,
             "dtype": str(target.dtype).removeprefix("torch."), "vocab": target.vocab}  # fmt: skip
    said = (
        f"{target.name}, {target.parameters() / 1e6:.2f} M parameters in {facts['dtype']}: "
        "read as a tree it says what the model says itself"
    )
    return Finding("probe", "ok", said, facts)


@torch.no_grad()
def taps(run: Run) -> Finding:
    """One held-out row, really read: how many taps, of which shape, and are they numbers?"""
    target, made = run.target, run.material
    trace = next(made.held_traces(target, 1, recorded=False))
    hidden, wanted = target.shape().hidden, len(run.drafter.taps)
    sizes = trace.taps.float().unflatten(-1, (-1, hidden)).square().mean((0, 1, 3)).sqrt().tolist()
    facts = {"layers": list(run.drafter.taps), "taps": list(trace.taps.shape),
             "last": list(trace.last.shape), "size": sizes}  # fmt: skip
    said = (
        f"outputs of decoder layers {list(run.drafter.taps)}: taps {facts['taps']}, "
        f"last {facts['last']}; root mean squares {', '.join(f'{size:.3g}' for size in sizes)}"
    )
    if not bool(trace.taps.isfinite().all() and trace.last.isfinite().all()):
        fix = "Use a wider precision: target.dtype=float32 or bfloat16."
        return Finding("taps", "wrong", f"{said}; not all are numbers", facts, fix)
    if trace.taps.shape[-1] != wanted * hidden:
        fix = "Its family hands on states that Outrider does not know."
        return Finding("taps", "wrong", f"{said}; {wanted} taps are wanted", facts, fix)
    return Finding("taps", "ok", said, facts)


@torch.no_grad()
def recorded(run: Run) -> Finding | None:
    """Recorded features beside those that the target computes now; None without any."""
    made, target = run.material, run.target
    if made.recorded is None:
        return None
    then, now = next(made.held_traces(target, 1)), next(made.held_traces(target, 1, recorded=False))
    judges = now.counts(0)  # the rows that are recorded whatever the drafter reads
    gap = (then.last.float() - now.last.float())[judges].norm() / now.last.float()[judges].norm()
    facts = {"apart": float(gap)}
    said = f"recorded states are {float(gap):.2%} apart from those computed now"
    if gap <= APART:
        return Finding("recorded", "ok", said, facts)
    fix = "They are another target's, or another precision's: remove the folder and prepare anew."
    return Finding("recorded", "wrong", said, facts, fix)


def drafter(run: Run) -> Finding:
    """What is trained."""
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)
    facts = {"name": run.config.drafter.name, "parameters": trained}
    layers = f" on layers {list(run.drafter.taps)}" if run.drafter.taps else ""
    said = f"{trained / 1e6:.2f} M parameters{layers} ({run.started_from})"
    return Finding("drafter", "ok", said, facts)
