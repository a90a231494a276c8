"""Commands that serve a published folder in each engine, and the draft depths they accept."""

from typing import Any, NamedTuple

from outrider.models.drafters.layerskip import LayerSkip
from outrider.models.drafting.drafter import Drafter

SELF_FEEDING = (
    "any number works, since the drafter reads its own output; it was trained to {d}, and not for "
    "deeper drafts"
)
HEADS = "{d}, exactly: the engine runs every head, and there are {d}"
BLOCK = (
    "{d}, exactly: the mask tokens of a block attend to each other, and another number changes all "
    "guesses"
)
PARALLEL = "{d} or fewer: a mask token sees earlier ones alone, and {d} were trained"
MODULES = "{d} or fewer: there are {d} modules, one for each draft token"
LANGUAGE_MODEL = "any number works: a language model has no largest depth"
NOTES = {  # (format, drafter), or a format with all others -> what to know first
    ("speculators", "eagle3"): "The first command names no target: `verifier.name_or_path` of "
    "config.json does, and must be a hub id or a folder where you serve.",
    ("sglang", "eagle3"): "Not for vLLM, which reads these layer ids as the next layers' and then "
    "accepts fewer tokens, without a message.",
    ("vllm", "medusa"): "vLLM serves Medusa up to 0.32; 0.33 has removed it.",
    "speculators": "The tools of the speculators project read this layout; no engine serves it "
    "alone.",
    "eagle": "EAGLE's own code loads the folder as `ea_model_path`.",
    "medusa": "TGI reads `medusa_lm_head.safetensors` and config.json. Medusa's own code opens "
    "only `medusa_lm_head.pt`: torch.save the same tensors under that name.",
    "native": "No engine reads this format; Outrider does.",
    (
        "transformers",
        "layerskip",
    ): "The folder is the changed target, whole. Other engines serve "
    "it as a model without a drafter.",
    "deepseek": "Engines look for MTP modules inside the target's checkpoint, and serve them where "
    "they have MTP modules with plain attention for the target's family; vLLM 0.33 has a generic "
    "class for them.",
}
NOTES["qwen3_next"] = NOTES["deepseek"]
for _name in ("dflash", "dspark", "p_eagle"):
    NOTES["speculators", _name] = NOTES["speculators", "eagle3"]
MERGE = """python -c "
from pathlib import Path
from outrider.models.formats.mtp_merge import merge_into_target
merge_into_target(Path('{repo}'), Path('{target}'), Path('MERGED'))  # local folders
\""""
DFLASH = """python -c "
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained('{target}')
target = AutoModelForCausalLM.from_pretrained('{target}')
draft = AutoModel.from_pretrained('{repo}')
ids = tokenizer('Once upon a time', return_tensors='pt').input_ids
out = target.generate(ids, assistant_model=draft, speculation_type='dflash', max_new_tokens=64)
print(tokenizer.decode(out[0]))
\""""
ASSISTED = """python -c "
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained('{target}')
target = AutoModelForCausalLM.from_pretrained('{target}')
draft = AutoModelForCausalLM.from_pretrained('{repo}')
ids = tokenizer('Once upon a time', return_tensors='pt').input_ids
out = target.generate(ids, assistant_model=draft, max_new_tokens=64)
print(tokenizer.decode(out[0]))
\""""
EARLY_EXIT = """python -c "
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained('{repo}')
model = AutoModelForCausalLM.from_pretrained('{repo}')
ids = tokenizer('Once upon a time', return_tensors='pt').input_ids
out = model.generate(ids, assistant_early_exit={layers}, max_new_tokens=64)
print(tokenizer.decode(out[0]))
\""""


class ServeCommands(NamedTuple):
    """How to serve a folder."""

    commands: list[tuple[str, str]]  # title and shell text
    legal: str  # the values that num_speculative_tokens may have
    notes: list[str]  # prerequisites and limits


def serve_commands(
    form: str, drafter: Drafter, cfg: Any, repo: str, target: str, own_target: str
) -> ServeCommands:
    """Return the commands of Outrider and of the engines that read this format.

    Args:
        repo, target: the folder and the target, as an engine names them.
        own_target: the target, as Outrider names it.
    """
    depths = min(cfg.depths, drafter.max_depth)
    own = (
        f"outrider eval drafter={repo} target={own_target} decode.depth={depths} "
        "run.dir=runs/published"
    )
    commands = _engine_commands(form, cfg.name, repo, target, depths)
    if isinstance(drafter, LayerSkip) and form == "transformers":
        exit_early = EARLY_EXIT.format(repo=repo, layers=drafter.exit_layer)
        commands = [("transformers", exit_early)]
    commands = [*commands, ("Outrider", own)]
    note = NOTES.get((form, cfg.name)) or NOTES.get(form)
    return ServeCommands(commands, _legal(cfg).format(d=depths), [note] if note else [])


def _legal(cfg: Any) -> str:
    if cfg.name == "medusa":
        return HEADS
    if hasattr(cfg, "block_size"):
        return BLOCK
    if cfg.name == "p_eagle":
        return PARALLEL
    if cfg.name == "mtp" and cfg.mode == "chained":
        return MODULES
    return LANGUAGE_MODEL if cfg.name in ("draft_lm", "layerskip") else SELF_FEEDING


def _engine_commands(
    form: str, name: str, repo: str, target: str, depths: int
) -> list[tuple[str, str]]:
    algorithms = {"eagle3": "EAGLE3", "draft_lm": "STANDALONE", "dflash": "DFLASH"}
    algorithm = algorithms.get(name, "EAGLE")
    method = {"draft_lm": "draft_model", "hass": "eagle"}.get(name, name)
    sglang = ("SGLang", _sglang(target, depths, algorithm, repo))
    vllm = ("vLLM", _vllm(target, depths, method, repo))
    if name == "p_eagle":
        parallel = _vllm(target, depths, "eagle3", repo, ', "parallel_drafting": true')
        own = [("vLLM", f"vllm serve {repo}")] if form == "speculators" else []
        return [*own, ("vLLM", parallel)] if form in ("vllm", "speculators") else []
    if name == "dspark":
        served = {"deepspec": [("SGLang", _sglang(target, depths, "DSPARK", repo))]}
        served |= {"vllm": [vllm], "speculators": [("vLLM", f"vllm serve {repo}"), vllm]}
        return served.get(form, [])
    if name == "dflash":
        hf = [("transformers", DFLASH.format(repo=repo, target=target))]
        served = {"transformers": hf, "zlab": [sglang, vllm], "vllm": [vllm]}
        served["speculators"] = [("vLLM", f"vllm serve {repo}"), vllm]
        return served.get(form, [])
    if form in ("sglang", "vllm"):
        return [sglang if form == "sglang" else vllm]
    if form == "speculators" and name == "eagle3":
        return [("vLLM", f"vllm serve {repo}"), vllm]
    if form == "transformers":
        return [("transformers", ASSISTED.format(repo=repo, target=target)), vllm, sglang]
    if form in ("deepseek", "qwen3_next"):
        return [
            ("Into a copy of the target", MERGE.format(repo=repo, target=target)),
            ("vLLM", _vllm("MERGED", depths, "mtp")),
            ("SGLang", _sglang("MERGED", depths, "EAGLE")),
        ]
    return []


def _vllm(target: str, depths: int, method: str, repo: str = "", more: str = "") -> str:
    model = f'"model": "{repo}", ' if repo else ""
    settings = f'"method": "{method}", {model}"num_speculative_tokens": {depths}{more}'
    return f"vllm serve {target} --speculative-config '{{{settings}}}'"


def _sglang(target: str, depths: int, algorithm: str, repo: str = "") -> str:
    """Draft a chain; the root is verified beside its `depths` draft tokens."""
    model = f"--speculative-draft-model-path {repo} " if repo else ""
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {algorithm} {model}\\\n"
        f"    --speculative-num-steps {depths} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {depths + 1}"
    )
