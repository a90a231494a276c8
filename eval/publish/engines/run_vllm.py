"""Decode with vLLM, one request at a time; the first step of an answer adds its first token."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip

import vllm


def main(request: dict[str, Any]) -> dict[str, Any]:
    prompts, new_tokens, depth = request["prompts"], request["new_tokens"], request["depth"]
    drafter = {} if request["method"] == "mtp" else {"model": request["drafter"]}
    method = request["method"]
    if method == "p_eagle":  # all depths in one pass of EAGLE-3's layers
        drafter, method = {**drafter, "parallel_drafting": True}, "eagle3"
    llm = vllm.LLM(
        request["target"], dtype="float32", enforce_eager=True, enable_prefix_caching=False,
        seed=0, async_scheduling=False, max_num_seqs=4,
        max_model_len=max(map(len, prompts)) + new_tokens + depth + 1,
        speculative_config={
            **drafter, "method": method, "num_speculative_tokens": depth,
        },
    )  # fmt: skip
    params = vllm.SamplingParams(
        temperature=0, max_tokens=new_tokens, stop_token_ids=request["stop_ids"]
    )
    answers = []
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        ids, steps = list[int](), list[int]()
        while llm.llm_engine.has_unfinished_requests():
            for out in llm.llm_engine.step():
                new_ids = list(out.outputs[0].token_ids)
                steps += [len(new_ids) - len(ids)] * (len(new_ids) > len(ids))
                ids = new_ids
        answers.append({"ids": ids, "steps": steps})
    return {"engine": f"vLLM {vllm.__version__}", "answers": answers}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
