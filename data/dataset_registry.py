"""The data sets and prompt suites of the field by name: where they lie, under which licence.

`data.path=ultrachat` and `eval.prompts=mt_bench` read them from the model hub, row by row;
`ultrachat@FOLDER` and `mt_bench@question.jsonl` take the same rows from a copy. The licences are
those that the pages of the data sets state; what a model wrote may be bound by that model's own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent / "tiny" / "prompts.jsonl"
GENERAL = Path(__file__).parent / "prompts" / "eval.jsonl"
PER_ROW = ("category", "subject")  # columns


@dataclass(frozen=True)
class Preset:
    """A data set that has a name here.

    Attributes:
        place: hub id, address or file.
        file: of a hub repository that holds files of several kinds; null: all of its split.
        ask: how a row becomes a question where its shape is none of the known ones; a row that
            lacks these columns (a copy in another shape) is read as it is.
        turns: the column that holds the questions of a dialogue as a list.
        id: the column that names a row.
        category: of all rows, or the column that has each row's own.
    """

    place: str
    licence: str
    about: str
    split: str | None = None
    subset: str | None = None
    file: str | None = None
    ask: str | None = None
    turns: str | None = None
    id: str | None = None
    category: str = "all"

    def row(self, record: dict[str, Any]) -> dict[str, Any]:
        """A record in a shape of `sources`, with its id and category."""
        named = {"id": record.get(self.id)} if self.id in record else {}
        own = record.get(self.category, self.category)
        named["category"] = record.get("category", own)
        if self.turns in record and isinstance(record[self.turns], list):
            return {"turns": record[self.turns], **named}
        if self.ask is not None and "turns" not in record:
            try:
                return {"prompt": self.ask.format_map(record), **named}
            except KeyError:
                pass
        return {**record, **named}


DATASETS = {
    "sharegpt": Preset(
        "Aeala/ShareGPT_Vicuna_unfiltered", "Apache-2.0, text by users and ChatGPT",
        "what people asked ChatGPT, 68k-120k dialogues: EAGLE's and HASS's text",
        file="ShareGPT_V4.3_unfiltered_cleaned_split.json",
    ),
    "ultrachat": Preset(
        "HuggingFaceH4/ultrachat_200k", "MIT", "200k dialogues of two ChatGPTs, filtered",
        split="train_sft",
    ),
    "perfectblend": Preset(
        "mlabonne/open-perfectblend", "Apache-2.0", "1.4M: chat, mathematics, code, instructions",
        split="train",
    ),
    "magpie": Preset(
        "Magpie-Align/Magpie-Pro-300K-Filtered", "Llama 3 Community License",
        "300k prompts and answers that Llama-3-70B-Instruct wrote", split="train",
    ),
    "gsm8k": Preset(
        "openai/gsm8k", "MIT", "7,473 word problems of the training part",
        split="train", subset="main",
    ),
    "code": Preset(
        "ise-uiuc/Magicoder-Evol-Instruct-110K", "Apache-2.0", "110k programming tasks",
        split="train",
    ),
}  # fmt: skip
SUITES = {
    "outrider": Preset(
        str(GENERAL), "Apache-2.0", "ours: 80 prompts in 8 categories", category="category"
    ),
    "tiny": Preset(str(TINY), "Apache-2.0", "ours, for target=tiny", category="category"),
    "mt_bench": Preset(
        "HuggingFaceH4/mt_bench_prompts", "Apache-2.0", "80 dialogues of two turns",
        split="train", turns="prompt", id="prompt_id", category="category",
    ),
    "humaneval": Preset(
        "openai/openai_humaneval", "MIT", "164 functions to complete", split="test",
        ask="Complete this Python function.\n\n```python\n{prompt}```", id="task_id",
        category="humaneval",
    ),
    "gsm8k": Preset(
        "openai/gsm8k", "MIT", "1,319 word problems", split="test", subset="main",
        ask="{question}", category="gsm8k",
    ),
    "alpaca": Preset(
        "tatsu-lab/alpaca_eval", "CC-BY-NC-4.0", "805 instructions of AlpacaEval",
        file="alpaca_eval.json", ask="{instruction}", category="alpaca",
    ),
    "cnn_dm": Preset(
        "abisee/cnn_dailymail", "Apache-2.0", "11,490 articles to summarise", split="test",
        subset="3.0.0", ask="Summarize: {article}", id="id", category="cnn_dm",
    ),
    "nq": Preset(
        "google-research-datasets/nq_open", "CC-BY-SA-3.0", "3,610 questions to a search engine",
        split="validation", ask="{question}?", category="nq",
    ),
    "spec_bench": Preset(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        "Apache-2.0, parts under their own", "480 prompts of six tasks", category="category",
    ),
    "math_500": Preset(
        "HuggingFaceH4/MATH-500", "MIT", "500 competition problems", split="test",
        ask="{problem}", id="unique_id", category="subject",
    ),
}  # fmt: skip
