"""Acceptance on the target's own answers, beside acceptance on the text of a file."""

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from rich.console import Console

from outrider.conf.errors import RunError
from outrider.conf.schema import Config
from outrider.data.corpus import load_training_data
from outrider.data.reporter import Reporter
from outrider.data.training_data import TrainingData
from outrider.models.drafters import resolve_taps
from outrider.models.target.load import LoadedTarget, load_target, stop_ids
from outrider.train import loop, own_text
from outrider.train.trainer import Trainer
from tests.runs import QUIET, config

WORDS = ("the", "a", "boat", "kite", "sea", "hill", "runs", "sees", "red", "blue", "under", "old")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedTarget:
    return load_target(config(tmp_path_factory.mktemp("run")).target)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations that the embedded target would never write: one word, always repeated."""
    draw, file = random.Random(0), tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [
        [
            {"role": "user", "content": f"{i} " + " ".join(draw.choices(WORDS, k=6))},
            {"role": "assistant", "content": "kite " * 40},
        ]
        for i in range(80)
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def settings(folder: Path, file: Path, *words: str) -> Config:
    return config(
        folder, "data=jsonl", f"data.path={file}", "data.max_length=128", "data.max_samples=80",
        "data.holdout=0.3", "train.own_prompts=4", *words,
    )  # fmt: skip


def data_of(settings: Config, loaded: LoadedTarget) -> TrainingData:
    taps = resolve_taps(settings.drafter, loaded.target.num_layers)
    return load_training_data(settings, loaded, taps, Reporter.silent())


def logged(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_a_run_on_foreign_text_says_so_and_chooses_by_own_text(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = settings(tmp_path, foreign, "train.max_steps=12", "train.eval_every=4", "train.lr=5e-3")
    loop.fit(cfg, loaded, data_of(cfg, loaded), Console(width=200))
    held, own = logged(tmp_path, "held"), logged(tmp_path, "own")
    assert [x["step"] for x in own] == [x["step"] for x in held] == [0, 4, 8, 12]
    assert own_text.is_far(held[-1], own[-1])
    training = json.loads((tmp_path / "training.json").read_text())
    best = max(own, key=lambda x: float(x["accept_length"]))
    assert training["best_step"] == best["step"]
    assert training["own_text"]["accept_length"] == best["accept_length"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "the target answered 4 held-out prompts" in shown
    assert f"{own[-1]['accept_length']:.2f} on the target's own answers" in shown
    advice = f"data=self data.path={foreign} run.dir="
    assert shown.count(advice) == 1, "when it is first measured"
    assert shown.index(advice) < shown.index("step 12:") or not own_text.is_far(held[-2], own[-2])


def test_own_answers_are_those_of_plain_greedy_decoding(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path
) -> None:
    cfg = settings(tmp_path, foreign)
    run = Trainer(cfg, loaded, data_of(cfg, loaded))
    own_text.add(run, loaded, QUIET)
    run.close()
    rows = run.own_text
    assert rows is not None
    assert run.data.about["own_text"] == {"prompts": 4, "tokens": int(rows.answer.sum())}
    ends = list(stop_ids(loaded.tokenizer, loaded.target))
    for number in range(4):
        mine = rows.document == number
        ids, answer = rows.ids[mine], rows.answer[mine]
        prompt = ids[~answer][None].long()
        expected = loaded.target.model.generate(
            prompt, do_sample=False, max_new_tokens=int(answer.sum()), eos_token_id=ends,
            attention_mask=torch.ones_like(prompt), pad_token_id=0,
        )  # fmt: skip
        assert expected[0].tolist() == ids.tolist()


def test_text_that_the_target_generated_is_not_answered_again(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path
) -> None:
    cfg = settings(tmp_path, foreign)
    run = Trainer(cfg, loaded, data_of(cfg, loaded))
    run.close()
    run.data.about = {**run.data.about, "source": "self"}
    own_text.add(run, loaded, QUIET)
    assert run.own_text is None
    run.data.about["given"] = "other conversations are mixed in"
    own_text.add(run, loaded, QUIET)
    assert run.own_text is not None


def test_a_run_of_an_earlier_version_continues_without_own_text(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path
) -> None:
    """Its best drafter was chosen by acceptance on the file, which is not comparable."""
    old, new = (settings(tmp_path, foreign, f"train.max_steps={steps}") for steps in (3, 6))
    data = data_of(old, loaded)
    loop.fit(old, loaded, data, QUIET)
    file = tmp_path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["data"]["own_text"]
    file.write_text(json.dumps(manifest))
    loop.fit(new, loaded, data_of(new, loaded), QUIET)
    assert [x["step"] for x in logged(tmp_path, "own")] == [0, 3]
    assert logged(tmp_path, "held")[-1]["step"] == 6


def test_a_continued_run_measures_the_same_own_text(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    with patch.object(own_text, "_answer", wraps=own_text._answer) as answer:
        for folder, *steps in ((whole, 6), (part, 3, 6)):
            for count in steps:
                words = f"train.max_steps={count}", "train.schedule=constant", "train.warmup=0"
                cfg = settings(folder, foreign, *words)
                loop.fit(cfg, loaded, data_of(cfg, loaded), QUIET)
    assert answer.call_count == 2, "once per run folder"
    assert logged(part, "own") == logged(whole, "own")


def test_stored_answers_are_those_of_the_same_prompts_and_undamaged(
    loaded: LoadedTarget, foreign: Path, tmp_path: Path
) -> None:
    cfg = settings(tmp_path, foreign)
    run = Trainer(cfg, loaded, data_of(cfg, loaded))
    run.close()
    prompts = own_text._prompts(run)
    new = own_text._stored_or_new(run, loaded, prompts, QUIET)
    with patch.object(own_text, "_answer", side_effect=AssertionError("generated again")):
        assert own_text._stored_or_new(run, loaded, prompts, QUIET) == new
        with pytest.raises(AssertionError, match="generated again"):
            own_text._stored_or_new(run, loaded, prompts[1:], QUIET)
    (shard,) = tmp_path.glob("own_text/*/shard-*")
    shard.write_bytes(shard.read_bytes()[:-4] + bytes(4))
    with pytest.raises(RunError, match="is damaged"):
        own_text._stored_or_new(run, loaded, prompts, QUIET)
