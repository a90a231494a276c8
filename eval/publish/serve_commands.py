"""How each engine is told to draft with a published folder, and how deep it may draft."""

from typing import Any, NamedTuple

from outrider.models.drafter import Drafter

SELF_FEEDING = (
    "any number works, for it feeds on its own output; it was trained to {d}, and deeper guesses "
    "were never trained"
)
HEADS = "{d}, exactly: the engine asks every head, and there are {d}"
MODULES = "{d} or fewer: there are {d} modules, and each guesses one token"
PLAIN = "any number works: a language model drafts as deep as it is asked"


class Serving(NamedTuple):
    """For the card.

    Attributes:
        commands: title and shell text.
        legal: what num_speculative_tokens may be.
        tokens: the number that the commands use.
        notes: what has to be done first, or does not work.
    """

    commands: list[tuple[str, str]]
    legal: str
    tokens: int
    notes: list[str]


def serving(word: str, drafter: Drafter, cfg: Any, repo: str, target: str, ours: str) -> Serving:
    """
    Args:
        word: the format's name.
        repo: where the folder is, as an engine names it.
        target: as an engine names it.
        ours: as Outrider names it.
    """
    depths = min(cfg.depths, drafter.reach)
    own = ("Outrider", _outrider(repo, ours, depths))
    commands, notes = _engines(word, cfg.name, repo, target, depths)
    return Serving([*commands, own], _legal(cfg).format(d=depths), depths, notes)


def _legal(cfg: Any) -> str:
    if cfg.name == "medusa":
        return HEADS
    if cfg.name == "mtp" and cfg.mode == "chained":
        return MODULES
    return PLAIN if cfg.name == "draft_lm" else SELF_FEEDING


def _engines(
    word: str, name: str, repo: str, target: str, depths: int
) -> tuple[list[tuple[str, str]], list[str]]:
    """Commands of the engines that read this format, and notes."""
    algorithm = {"eagle3": "EAGLE3", "draft_lm": "STANDALONE"}.get(name, "EAGLE")
    method = {"draft_lm": "draft_model", "hass": "eagle"}.get(name, name)
    sglang = ("SGLang", _sglang(algorithm, repo, target, depths))
    vllm = ("vLLM", _vllm(method, repo, target, depths))
    if word == "sglang":
        return [sglang], []
    if word == "vllm":
        return [vllm], []
    if word == "speculators" and name == "eagle3":
        return [("vLLM", f"vllm serve {repo}"), vllm], ["The first command names no target: "
            "the folder says whom it drafts for, and how deep."]  # fmt: skip
    if word == "transformers":
        return [("transformers", _assisted(repo, target)), vllm, sglang], []
    if word in ("deepseek", "qwen3_next"):
        return _stitched(repo, target, depths), [STITCHED]
    return [], [OWN_CODE.get(word, "No engine reads this format; Outrider does.")]


OWN_CODE = {
    "eagle": "EAGLE's own code loads the folder as `ea_model_path`.",
    "medusa": "Medusa's own code and TGI read `medusa_lm_head.safetensors` and config.json.",
    "speculators": "The tools of the speculators project read this layout; no engine serves it "
    "alone.",
}
STITCHED = (
    "Engines look for MTP modules inside the target's checkpoint, and serve them where they have "
    "MTP modules of plain attention for the target's family."
)


def _stitched(repo: str, target: str, depths: int) -> list[tuple[str, str]]:
    """Modules go into a copy of their target first."""
    stitch = (
        'python -c "\n'
        "from pathlib import Path\n"
        "from outrider.models.formats.mtp_merge import stitch\n"
        f"stitch(Path('{repo}'), Path('{target}'), Path('STITCHED'))  # folders, both\n"
        '"'
    )
    about = f'"method": "mtp", "num_speculative_tokens": {depths}'
    sglang = (
        "python -m sglang.launch_server --model-path STITCHED --speculative-algorithm EAGLE \\\n"
        f"    {_sizes(depths)}"
    )
    return [
        ("Into a copy of the target", stitch),
        ("vLLM", f"vllm serve STITCHED --speculative-config '{{{about}}}'"),
        ("SGLang", sglang),
    ]


def _sglang(algorithm: str, repo: str, target: str, depths: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {target} \\\n"
        f"    --speculative-algorithm {algorithm} --speculative-draft-model-path {repo} \\\n"
        f"    {_sizes(depths)}"
    )


def _sizes(depths: int) -> str:
    """A chain: as many steps, and the root beside them is verified too."""
    return (
        f"--speculative-num-steps {depths} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {depths + 1}"
    )


def _vllm(method: str, repo: str, target: str, depths: int) -> str:
    about = f'"method": "{method}", "model": "{repo}", "num_speculative_tokens": {depths}'
    return f"vllm serve {target} --speculative-config '{{{about}}}'"


def _assisted(repo: str, target: str) -> str:
    return (
        'python -c "\n'
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"tokenizer = AutoTokenizer.from_pretrained('{target}')\n"
        f"target = AutoModelForCausalLM.from_pretrained('{target}')\n"
        f"draft = AutoModelForCausalLM.from_pretrained('{repo}')\n"
        "ids = tokenizer('Once upon a time', return_tensors='pt').input_ids\n"
        "out = target.generate(ids, assistant_model=draft, max_new_tokens=64)\n"
        "print(tokenizer.decode(out[0]))\n"
        '"'
    )


def _outrider(repo: str, target: str, depths: int) -> str:
    return (
        f"outrider eval drafter={repo} target={target} decode.depth={depths} run.dir=runs/published"
    )
