"""Checks of the target, its taps, recorded features, and the drafter."""

import torch

from outrider.launch.cost_estimate import trained_parameters
from outrider.launch.doctor.finding import Finding, State
from outrider.models import drafters, formats
from outrider.models.target.layer_kinds import layer_kinds, missing_kernels
from outrider.models.target.load import LoadedTarget
from outrider.train.trainer import Trainer

TOLERANCE = 0.05  # relative difference of recorded and recomputed hidden states


def check_target(loaded: LoadedTarget) -> Finding:
    """Report the comparison that `target_check.py` made when the target was loaded."""
    target = loaded.target
    count, dtype = target.parameter_count(), str(target.dtype).removeprefix("torch.")
    facts = {"source": loaded.source, "parameters": count, "layers": target.num_layers,
             "dtype": dtype, "vocab": target.vocab_size}  # fmt: skip
    message = (
        f"{target.name}, {count / 1e6:.2f} M parameters in {dtype}: "
        "hooked tree decoding equals the model's own forward"
    )
    return Finding("probe", "ok", message, facts)


def check_family(loaded: LoadedTarget) -> Finding:
    """Report the kinds of the target's layers, what is refused for them, and missing kernels."""
    target = loaded.target
    family, kinds = str(target.text_config.model_type), layer_kinds(target)
    missing = missing_kernels(target)
    facts = {"family": family, "layers": kinds, "missing": missing}
    message = f"{family}: {', '.join(f'{n} {kind}' for kind, n in kinds.items())} layers"
    if type(target.model.config) is not type(target.text_config):
        message += "; a text model inside a wrapper, of which only text is read"
    if not target.recurrent:
        return Finding("family", "ok", f"{message}; chains, trees and batches", facts)
    refused = [n for n in drafters.names() if drafters.drafter_class(n).runs_target()]
    message += (
        "; chains and batches. Documents are read one by one.\n"
        f"not trees (a state follows one path), and not the drafters {', '.join(refused)}"
    )
    if not missing:
        return Finding("family", "ok", message, facts)
    message += f"\n{' and '.join(missing)} are not installed: the slow code of transformers runs"
    fix = f"With a GPU: pip install {' '.join(missing)}"
    return Finding("family", "note", message, facts, fix)


@torch.no_grad()
def check_taps(run: Trainer) -> Finding:
    """Compute the taps of one held-out row and check their shape and that they are finite."""
    target, layers, hidden = run.target, list(run.drafter.taps), run.target.shape().hidden
    trace = next(run.data.held_traces(target, 1, recorded=False))
    sizes = trace.taps.float().unflatten(-1, (-1, hidden)).square().mean((0, 1, 3)).sqrt().tolist()
    facts = {"layers": layers, "taps": list(trace.taps.shape),
             "last": list(trace.last.shape), "size": sizes}  # fmt: skip
    message = (
        f"decoder layers {layers}: taps {facts['taps']}, "
        f"last {facts['last']}; RMS of the taps {', '.join(f'{size:.3g}' for size in sizes)}"
    )
    if not bool(trace.taps.isfinite().all() and trace.last.isfinite().all()):
        fix = "Use target.dtype=float32 or bfloat16."
        return Finding("taps", "wrong", f"{message}; not all values are finite", facts, fix)
    if trace.taps.shape[-1] != len(layers) * hidden:
        fix = "Outrider does not support the hidden states of this model family."
        return Finding("taps", "wrong", f"{message}; {len(layers)} taps are expected", facts, fix)
    return Finding("taps", "ok", message, facts)


@torch.no_grad()
def check_recording(run: Trainer) -> list[Finding]:
    """Compare recorded features with recomputed ones; no finding without a recording."""
    data, target = run.data, run.target
    if data.recorded is None:
        return []
    then, now = next(data.held_traces(target, 1)), next(data.held_traces(target, 1, recorded=False))
    supervised = now.supervised_mask(0)  # these rows are recorded for every drafter
    recorded, recomputed = then.last.float()[supervised], now.last.float()[supervised]
    gap = float((recorded - recomputed).norm() / recomputed.norm())
    message = f"recorded hidden states differ by {gap:.2%} from recomputed ones"
    fix = "They belong to another target or precision: remove the folder and run prepare again."
    state: State = "ok" if gap <= TOLERANCE else "wrong"  # nan is wrong
    return [Finding("recorded", state, message, {"apart": gap}, fix)]


def check_drafter(run: Trainer) -> Finding:
    """Report the trained parameters and their initialisation."""
    trained = trained_parameters(run)
    layers = f" on layers {list(run.drafter.taps)}" if run.drafter.taps else ""
    message = f"{trained / 1e6:.2f} M parameters{layers} ({run.initialisation})"
    facts = {"name": run.config.drafter.name, "parameters": trained}
    return Finding("drafter", "ok", message, facts)


def check_formats(run: Trainer) -> Finding:
    """Report the formats that can hold the drafter, and why the others cannot."""
    name = run.config.drafter.name
    refusals = formats.export_refusals(run.drafter, name, run.target)
    able = [
        f"{word} ({formats.find(word, name).engines})" for word, why in refusals.items() if not why
    ]
    lines = [", ".join(able), *(f"not {word}: {why}" for word, why in refusals.items() if why)]
    return Finding("formats", "ok", "\n".join(lines), {"refused": refusals})
