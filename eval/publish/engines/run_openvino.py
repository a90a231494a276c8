"""Decode with OpenVINO GenAI on the CPU, after optimum-intel has converted target and drafter."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

EXACT = {  # by default the cache is 8-bit, and computation bfloat16 where the CPU has it
    "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}  # fmt: skip


def main(request: dict[str, Any]) -> dict[str, Any]:
    target, drafter = (converted(request[name], name) for name in ("target", "drafter"))
    draft_model = genai.draft_model(drafter, "CPU", **EXACT)
    pipe = genai.LLMPipeline(target, "CPU", draft_model=draft_model, **EXACT)
    config = genai.GenerationConfig(
        do_sample=False, max_new_tokens=request["new_tokens"], apply_chat_template=False,
        num_assistant_tokens=request["depth"], stop_token_ids=set(request["stop_ids"]),
    )  # fmt: skip
    answers = [decode(pipe, ids, config) for ids in request["prompts"]]
    return {"engine": f"OpenVINO GenAI {genai.__version__}", "answers": answers}


def decode(pipe: Any, ids: list[int], config: Any) -> dict[str, Any]:
    """Return the tokens of an answer, and how many every step added; the first step adds one."""
    steps: list[int] = []

    class Steps(genai.StreamerBase):
        def write(self, tokens: Any) -> Any:
            steps.append(len(tokens) if isinstance(tokens, list) else 1)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    prompt = np.array([ids], dtype=np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
    return {"ids": list(pipe.generate(inputs, config, Steps()).tokens[0]), "steps": steps}


def converted(folder: str, name: str) -> str:
    """Return a folder of the model in OpenVINO's format, in the current folder."""
    program = str(Path(sys.executable).with_name("optimum-cli"))
    words = ["export", "openvino", "-m", folder, "--task", "text-generation-with-past"]
    words += ["--trust-remote-code", "--weight-format", "fp32", f"openvino-{name}"]
    subprocess.run([program, *words], check=True)
    config, model = (Path(folder) / "config.json"), Path(f"openvino-{name}/openvino_model.xml")
    if aux := json.loads(config.read_text()).get("eagle_config"):
        taps = " ".join(map(str, aux["eagle_aux_hidden_state_layer_ids"]))
        mode = '<eagle3_mode value="True" />'  # the layers would be chosen by the target's depth
        stated = f'{mode}<hidden_layers_list value="{taps}" />'
        model.write_text(model.read_text().replace(mode, stated))
    return str(model.parent)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
