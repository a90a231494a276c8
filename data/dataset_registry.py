"""Public data sets and prompt suites by name: their location and licence.

`data.path=ultrachat` and `eval.prompts=mt_bench` stream them from the model hub; `ultrachat@FOLDER`
and `mt_bench@question.jsonl` read the same rows from a copy. The licences are those on the data
sets' pages; text that a model generated may also be bound by that model's licence. Their contents
are listed in docs/your_model.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.conf.plugins import Registry

TINY = Path(__file__).parent / "tiny" / "prompts.jsonl"
GENERAL = Path(__file__).parent / "prompts" / "eval.jsonl"
COPYING = Path(__file__).parent / "prompts" / "copying.jsonl"
CATEGORY_COLUMNS = ("category", "subject")


@dataclass(frozen=True)
class DatasetSpec:
    """A named data set.

    `prompt_format` makes a prompt from a row's columns where no known shape fits. A row without
    these columns (a copy in another shape) is read as it is.
    """

    location: str  # hub id, address or file
    licence: str
    split: str | None = None  # None: the usual one
    subset: str | None = None
    file: str | None = None  # the one to read in a hub repository; None: `datasets` reads it
    prompt_format: str | None = None
    turns: str | None = None  # column with the questions of a dialogue as a list
    id: str | None = None  # column with the name of a row
    category: str = "all"  # of all rows, or the column that holds it

    def normalise(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record in a shape of `conversations`, with its id and category."""
        fields = {"id": record.get(self.id)} if self.id in record else {}
        fields["category"] = record.get("category", record.get(self.category, self.category))
        if self.turns in record and isinstance(record[self.turns], list):
            return {"turns": record[self.turns], **fields}
        if self.prompt_format is not None and "turns" not in record:
            try:
                return {"prompt": self.prompt_format.format_map(record), **fields}
            except KeyError:
                pass
        return {**record, **fields}


DATASETS: Registry[DatasetSpec] = Registry("data set", DatasetSpec, {
    "sharegpt": DatasetSpec(
        "Aeala/ShareGPT_Vicuna_unfiltered", "Apache-2.0, text by users and ChatGPT",
        file="ShareGPT_V4.3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": DatasetSpec("HuggingFaceH4/ultrachat_200k", "MIT", split="train_sft"),
    "perfectblend": DatasetSpec("mlabonne/open-perfectblend", "Apache-2.0", split="train"),
    "magpie": DatasetSpec(
        "Magpie-Align/Magpie-Pro-300K-Filtered", "Llama 3 Community License", split="train"
    ),
    "gsm8k": DatasetSpec("openai/gsm8k", "MIT", split="train", subset="main"),
    "code": DatasetSpec("ise-uiuc/Magicoder-Evol-Instruct-110K", "Apache-2.0", split="train"),
})  # fmt: skip
SUITES: Registry[DatasetSpec] = Registry("prompt suite", DatasetSpec, {
    "outrider": DatasetSpec(str(GENERAL), "Apache-2.0", category="category"),
    "copying": DatasetSpec(str(COPYING), "Apache-2.0", category="category"),
    "tiny": DatasetSpec(str(TINY), "Apache-2.0", category="category"),
    "mt_bench": DatasetSpec(
        "HuggingFaceH4/mt_bench_prompts", "Apache-2.0",
        split="train", turns="prompt", id="prompt_id", category="category",
    ),
    "humaneval": DatasetSpec(
        "openai/openai_humaneval", "MIT", split="test",
        prompt_format="Complete this Python function.\n\n```python\n{prompt}```", id="task_id",
        category="humaneval",
    ),
    "gsm8k": DatasetSpec(
        "openai/gsm8k", "MIT", split="test", subset="main",
        prompt_format="{question}", category="gsm8k",
    ),
    "alpaca": DatasetSpec(
        "tatsu-lab/alpaca_eval", "CC-BY-NC-4.0", file="alpaca_eval.json",
        prompt_format="{instruction}", category="alpaca",
    ),
    "cnn_dm": DatasetSpec(
        "abisee/cnn_dailymail", "Apache-2.0", split="test",
        subset="3.0.0", prompt_format="Summarize: {article}", id="id", category="cnn_dm",
    ),
    "nq": DatasetSpec(
        "google-research-datasets/nq_open", "CC-BY-SA-3.0",
        split="validation", prompt_format="{question}?", category="nq",
    ),
    "spec_bench": DatasetSpec(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "Apache-2.0, parts under their own", category="category",
    ),
    "math_500": DatasetSpec(
        "HuggingFaceH4/MATH-500", "MIT", split="test",
        prompt_format="{problem}", id="unique_id", category="subject",
    ),
})  # fmt: skip
