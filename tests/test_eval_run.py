"""The measurement end to end: a random target, an untrained drafter, a folder as runs leave it."""

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.conf.schema import Config, to_yaml
from outrider.data.conversations import Message, Prompt
from outrider.data.pack import Rows
from outrider.data.tokenise import prompt_ids
from outrider.data.training_data import TrainingData
from outrider.eval.measure import measure
from outrider.eval.report import Report
from outrider.eval.run import evaluate, quick_report
from outrider.launch.compare import compare
from outrider.models import drafters
from outrider.models.decode import verifier
from outrider.models.decode.engine import Engine
from outrider.models.decode.gumbel_coupling import GumbelNoise
from outrider.models.decode.request import Output
from outrider.models.decode.round_outcome import RoundOutcome
from outrider.models.decode.tree import Tree
from outrider.models.formats import native
from outrider.models.load import LoadedTarget, load_target, stop_ids
from outrider.models.target import Target
from outrider.models.vocab import DraftVocab
from outrider.train.settings import load_run, parse
from tests.families import small_model

VOCAB, BUDGET = 24, 9
SPECIALS = ("<pad>", "<bos>", "<eos>", "<user>", "<bot>")
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}"
    "{{ m.content + ' <eos> ' }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SUITE = (
    {"id": "one", "category": "short", "turns": ["w5 w6 w7"]},
    {"id": "talk", "category": "talk", "turns": ["w8 w9", "w10", "w11 w12 w13"]},
    {"id": "two", "category": "short", "turns": ["w14 w15"]},
)
FIELDS = {
    "tau", "accept_at", "cond_at", "tokens", "rounds", "speedup", "tokens_per_second", "exact",
    "baseline_tokens_per_second", "ms", "policy", "temperature", "dtype", "threads", "prompts",
    "mismatches", "categories", "theory", "fingerprints", "versions", "seed",
}  # fmt: skip


def tokenizer() -> Any:
    """One token per word; w5 is token 5."""
    words = {word: i for i, word in enumerate(SPECIALS)}
    words |= {f"w{i}": i for i in range(len(SPECIALS), VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a prompt file and a finished run, on disk."""
    place = tmp_path_factory.mktemp("measured")
    model: Any = small_model("llama", vocab_size=VOCAB, num_hidden_layers=2)
    model.save_pretrained(place / "target")
    tokenizer().save_pretrained(place / "target")
    (place / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUITE))
    words = ["target=hf", f"target.path={place / 'target'}", "target.dtype=float32"]
    config = parse(compose([*words, f"run.dir={place / 'run'}"], "train"))
    (place / "run").mkdir()
    (place / "run" / "config.yaml").write_text(to_yaml(config))
    target = load_target(config.target).target
    torch.manual_seed(0)
    drafter = drafters.build(config.drafter, target, DraftVocab.identity(VOCAB))
    native.save(drafter, place / "run" / "drafter", target, config.drafter, {})
    return place


@pytest.fixture(scope="module")
def loaded(place: Path) -> LoadedTarget:
    return load_target(configured(place).target)


@cache
def composed(run_dir: Path, policy: str) -> Config:
    suite = run_dir.parent / "suite.jsonl"
    words = [f"eval.prompts={suite}", f"eval.max_new_tokens={BUDGET}", "eval.warmup=1"]
    return load_run(run_dir, [f"run.dir={run_dir}", f"decode={policy}", *words])


def configured(place: Path, policy: str = "chain", folder: str = "run", **changes: Any) -> Config:
    """What `outrider eval` would compose; `changes` are keys of run, eval and decode."""
    config = composed(place / folder, policy)
    groups = {}
    for name in ("run", "eval", "decode"):
        group = getattr(config, name)
        own = {k: v for k, v in changes.items() if hasattr(group, k)}
        groups[name] = dataclasses.replace(group, **own)
    return dataclasses.replace(config, **groups)


def measured(place: Path, loaded: LoadedTarget, policy: str = "chain", **changes: Any) -> Report:
    config = configured(place, policy, **changes)
    drafter, _ = native.load(place / "run" / "drafter", loaded.target)
    return measure(loaded.target, loaded.tokenizer, drafter, config, Console(quiet=True))


def reports(place: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = place / "run" / "eval"
    lines = (folder / f"{name}.outputs.jsonl").read_text().splitlines()
    return json.loads((folder / f"{name}.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.parametrize("shape", [("chain", 3), ("dynamic_tree", 4)])
def test_evaluate_writes_a_whole_and_consistent_report(
    place: Path, capsys: pytest.CaptureFixture[str], shape: tuple[str, int]
) -> None:
    policy, depth = shape
    assert evaluate(configured(place, policy, depth=depth, out=policy)) == 0
    report, outputs = reports(place, policy)
    assert set(report) >= FIELDS
    assert (report["policy"], report["dtype"], report["temperature"]) == (policy, "float32", 0.0)
    assert report["prompts"] == len(outputs) == 5  # 1 + 3 turns + 1
    assert report["exact"] is True
    assert report["mismatches"] == []
    assert report["tokens"] == sum(len(row["output_ids"]) for row in outputs)
    assert report["rounds"] == sum(len(row["accepted"]) for row in outputs)
    assert report["tau"] == pytest.approx((report["tokens"] - 5) / report["rounds"])
    assert len(report["accept_at"]) == len(report["cond_at"]) == depth
    assert {name: part["prompts"] for name, part in report["categories"].items()} == {
        "short": 2,
        "talk": 3,
    }
    parts = sum(report["ms"][part] for part in ("draft", "target", "verify", "commit", "other"))
    assert parts == pytest.approx(report["ms"]["round"])
    assert report["theory"]["from_times"] == pytest.approx(report["speedup"])
    for row in outputs:
        assert len(row["origins"]) == len(row["output_ids"])
        assert len(row["rejected"]) == len(row["accepted"])
        assert row["origins"].count("accepted") == sum(row["accepted"])
        wrong = [guess for guess in row["rejected"] if guess is not None]
        said = zip(row["output_ids"], row["origins"], strict=True)
        right = [token for token, origin in said if origin == "correction"]
        assert len(wrong) == (len(right) if policy == "chain" else 0)
        assert all(guess != token for guess, token in zip(wrong, right, strict=False))
    printed = " ".join(capsys.readouterr().out.split())
    assert "all 5 answers equal plain decoding" in printed
    assert f"{report['tau']:.2f}" in printed


def test_an_answer_is_its_accepted_tokens_one_more_per_round_and_the_prefills(
    place: Path, loaded: LoadedTarget
) -> None:
    """A tree that holds the whole vocabulary is always right: two tokens a round.

    Except that an end token which was drafted is the last: no bonus follows it.
    """
    whole = measured(place, loaded, "dynamic_tree", depth=1, width=VOCAB, nodes=VOCAB)
    outputs = whole.outputs
    assert whole.summary.accept_at == [1.0]
    for row in outputs:
        emitted = sum(row["accepted"]) + len(row["accepted"]) + 1
        ended = row["output_ids"][-1] == 2
        assert emitted - len(row["output_ids"]) in ((0, 1) if ended else (0,))
        assert row["output_ids"] == row["baseline_ids"]
        assert len(row["output_ids"]) == BUDGET or ended
        assert 2 not in row["output_ids"][:-1]


def test_later_turns_read_the_plain_answers(place: Path, loaded: LoadedTarget) -> None:
    rows = {row["id"]: row for row in measured(place, loaded).outputs}
    assert list(rows) == ["one", "talk", "talk/2", "talk/3", "two"]
    said: list[Message] = []
    for name, question in zip(("talk", "talk/2", "talk/3"), SUITE[1]["turns"], strict=True):
        said.append(Message(role="user", content=question))
        assert rows[name]["prompt"] == question
        assert rows[name]["prompt_ids"] == prompt_ids(loaded.tokenizer, said)
        answer = loaded.tokenizer.decode(rows[name]["baseline_ids"], skip_special_tokens=True)
        said.append(Message(role="assistant", content=answer))


def test_the_engines_alternate_in_going_first(
    place: Path, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = Engine.generate

    def noted(self: Engine, prompt: Sequence[int], budget: int) -> Output:
        order.append("plain" if self.drafter is None else "fast")
        return real(self, prompt, budget)

    monkeypatch.setattr(Engine, "generate", noted)
    measured(place, loaded, limit=1, repeats=2)
    assert order == ["plain", "fast", *("plain", "fast"), *("fast", "plain")]  # warm-up first
    order.clear()
    measured(place, loaded, limit=2, warmup=0)
    assert order == ["plain", "fast", "fast", "plain", "plain", "fast", "fast", "plain"]


def test_warm_up_is_not_counted(place: Path, loaded: LoadedTarget) -> None:
    cold = measured(place, loaded, warmup=0, limit=1)
    warm = measured(place, loaded, warmup=3, limit=1)
    assert warm.outputs == cold.outputs
    assert warm.summary.rounds == cold.summary.rounds


def test_without_a_baseline_only_speculation_runs(place: Path, loaded: LoadedTarget) -> None:
    both = measured(place, loaded, limit=1)
    alone = measured(place, loaded, baseline=False, limit=1)
    assert alone.exact is None
    assert alone.summary.speedup is None
    assert alone.theory is None
    assert {row["baseline_ids"] for row in alone.outputs} == {None}
    assert [r["output_ids"] for r in alone.outputs] == [r["output_ids"] for r in both.outputs]


def test_a_sampled_answer_depends_on_the_seed_and_its_place_alone(
    place: Path, loaded: LoadedTarget
) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "depth": 1}
    first, again = (measured(place, loaded, seed=3, repeats=n, **how) for n in (1, 2))
    other = measured(place, loaded, seed=4, limit=1, **how)
    few = measured(place, loaded, seed=3, limit=1, **how)
    assert first.exact is None
    assert first.outputs == again.outputs
    assert first.outputs[:1] == few.outputs
    assert few.outputs != other.outputs


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
def test_coupled_answers_are_compared_with_plain_ones(
    place: Path, loaded: LoadedTarget, policy: str
) -> None:
    report = measured(place, loaded, policy, temperature=0.7, verify="coupled", repeats=2)
    assert report.exact is True
    assert "equal plain decoding" in report.exactness()
    assert report.setting["draft"] == report.setting["verify"] == "coupled"
    assert [row["output_ids"] for row in report.outputs] == [
        row["baseline_ids"] for row in report.outputs
    ]


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_a_decoder_that_is_not_lossless_is_caught(
    place: Path, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, heat: float
) -> None:
    """Take every drafted token: the report names each answer, and the first place that is wrong."""

    def credulous(tree: Tree, choice: torch.Tensor, _lead: torch.Tensor) -> list[RoundOutcome]:
        chains = zip(tree.ids.tolist(), choice.tolist(), tree.max_depths().tolist(), strict=True)
        return [RoundOutcome.from_chain(ids, deep, deep, said[deep]) for ids, said, deep in chains]

    monkeypatch.setattr(verifier, "greedy_outcomes", credulous)
    report = measured(place, loaded, temperature=heat, verify="coupled" if heat else "auto")
    wrong = {m.id: m for m in report.mismatches}
    differing = [row for row in report.outputs if row["output_ids"] != row["baseline_ids"]]
    assert report.exact is False
    assert report.exceeds_rounding
    assert [row["id"] for row in differing] == list(wrong)
    for row in differing:
        found = wrong[row["id"]]
        ours, plain = row["output_ids"], row["baseline_ids"]
        assert ours[: found.position] == plain[: found.position]
        assert (found.token, found.baseline_token) == (ours[found.position], plain[found.position])
        at, place_of = found.position, report.outputs.index(row)
        noise = heat * seeded_noise(place_of, at) if heat else torch.zeros(VOCAB)
        gap = lead(loaded, row["prompt_ids"] + plain[:at], noise)
        assert found.gap == pytest.approx(gap, abs=1e-4)


def seeded_noise(prompt: int, at: int) -> torch.Tensor:
    """What is taken off the log-probabilities of an answer's token, run.seed being 0."""
    return GumbelNoise(Random(prompt).getrandbits(64), VOCAB, torch.device("cpu")).rows(at, 1)[0]


def lead(loaded: LoadedTarget, ids: list[int], noise: torch.Tensor) -> float:
    """The target's lead of its first over its second choice, by the model itself."""
    with torch.no_grad():
        logits = loaded.target.model(torch.tensor([ids])).logits[0, -1]
    top = (logits - noise).topk(2).values
    return float(top[0] - top[1])


def test_low_precision_is_reported_as_such(place: Path) -> None:
    model = small_model("llama", vocab_size=VOCAB, num_hidden_layers=2).to(torch.bfloat16)
    target = Target(model)
    config = configured(place)
    torch.manual_seed(0)
    drafter = drafters.build(config.drafter, target, DraftVocab.identity(VOCAB))
    drafter = drafter.to(torch.bfloat16).eval()
    report = measure(target, tokenizer(), drafter, config, Console(quiet=True))
    assert report.setting["dtype"] == "bfloat16"
    differing = [r["id"] for r in report.outputs if r["output_ids"] != r["baseline_ids"]]
    assert [mismatch.id for mismatch in report.mismatches] == differing
    assert report.exact is (not differing)


def test_prompts_that_the_target_cannot_hold_are_named(place: Path, loaded: LoadedTarget) -> None:
    """The target reads 128 tokens, the answer included."""
    suite = [
        Prompt("fits", "all", ["w5"]),
        Prompt("long", "all", [" ".join(["w6"] * 130)]),
        Prompt("grows", "all", ["w7", " ".join(["w8"] * 130), "w9"]),
    ]
    drafter, _ = native.load(place / "run" / "drafter", loaded.target)
    console = Console(quiet=True)
    config = configured(place)
    report = measure(loaded.target, loaded.tokenizer, drafter, config, console, suite)
    assert [row["id"] for row in report.outputs] == ["fits", "grows"]
    assert report.setting["left_out"] == ["long", "grows/2"]
    with pytest.raises(RunError, match="No prompt fits"):
        measure(loaded.target, loaded.tokenizer, drafter, config, console, suite[1:2])


def test_the_targets_taps_are_left_as_found(place: Path, loaded: LoadedTarget) -> None:
    drafter, _ = native.load(place / "run" / "drafter", loaded.target)
    loaded.target.set_taps((1,))
    config = configured(place, limit=1)
    measure(loaded.target, loaded.tokenizer, drafter, config, Console(quiet=True))
    assert loaded.target.taps == (1,)


def held_text(loaded: LoadedTarget) -> TrainingData:
    """Two packed rows of made-up text, as training would have held them back."""
    ids = torch.arange(48).view(2, 24) % VOCAB
    places = torch.arange(24).expand(2, 24).clone()
    rows = Rows(ids.int(), torch.ones(2, 24).bool(), torch.zeros(2, 24).int(), places.int())
    counts = torch.ones(VOCAB).long()
    return TrainingData(rows, rows, counts, counts, [], {})


def test_training_ends_with_a_report_over_the_whole_suite_thinned(
    place: Path, loaded: LoadedTarget
) -> None:
    """Two of six prompts are the first of each of two categories."""
    config = configured(place, limit=2, out="quick")
    suite = [{"id": str(i), "category": "aaabbb"[i], "turns": [f"w{5 + i}"]} for i in range(6)]
    (place / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in suite))
    wide = dataclasses.replace(config.eval, prompts=str(place / "many.jsonl"))
    quick_report(
        dataclasses.replace(config, eval=wide), loaded, held_text(loaded), Console(quiet=True)
    )
    report, outputs = reports(place, "quick")
    assert [row["id"] for row in outputs] == ["0", "3"]
    assert report["prompts"] == 2


def test_stop_tokens_come_from_the_tokenizer_and_the_model(loaded: LoadedTarget) -> None:
    settings = loaded.target.model.generation_config
    before = settings.eos_token_id
    try:
        for written, stops in ((7, [2, 7]), ([2, 8, 9], [2, 8, 9]), (None, [2])):
            settings.eos_token_id = written
            assert stop_ids(loaded.tokenizer, loaded.target) == stops
    finally:
        settings.eos_token_id = before


def test_a_run_without_a_drafter_is_refused(place: Path) -> None:
    (place / "empty").mkdir(exist_ok=True)
    (place / "empty" / "config.yaml").write_text((place / "run" / "config.yaml").read_text())
    with pytest.raises(RunError, match=r"empty has no drafter/"):
        evaluate(configured(place, folder="empty"))


def test_compare_reads_what_evaluate_wrote(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, depth in (("flat", 1), ("deep", 2)):
        evaluate(configured(place, out=name, depth=depth, limit=1))
    capsys.readouterr()
    assert compare([str(place / "run")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flat" in text
    assert "deep" in text
    assert "policy" in text.partition("not the same conditions:")[2]


# ---- the forecast --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_measure_of_training_foresees_tau_on_the_decoded_text(
    place: Path, loaded: LoadedTarget, temperature: float
) -> None:
    """Greedy in float32 to the round; sampled within what coins do in so few rounds."""
    report = measured(place, loaded, depth=2, nodes=2, temperature=temperature)
    assert report.summary.tau is not None
    assert report.forecast == pytest.approx(
        report.summary.tau, abs=1e-9 if not temperature else 0.3
    )


@pytest.mark.parametrize(
    "changes", [{"policy": "dynamic_tree", "depth": 2}, {"temperature": 0.7}, {"top_k": 3}]
)
def test_where_no_forecast_holds_none_is_given(
    place: Path, loaded: LoadedTarget, changes: dict[str, Any]
) -> None:
    assert measured(place, loaded, **changes).forecast is None
