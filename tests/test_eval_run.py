"""End-to-end evaluation: random target, untrained drafter, a run folder on disk."""

import dataclasses
import io
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.conf.compose import compose
from outrider.conf.console import Console
from outrider.conf.decode_settings import DecodeConfig
from outrider.conf.errors import RunError
from outrider.conf.json_shapes import read_rows
from outrider.conf.schema import Config, to_yaml
from outrider.data.conversations import Message, Prompt
from outrider.data.pack import Rows
from outrider.data.tokenise import prompt_ids
from outrider.data.training_data import TrainingData
from outrider.eval.measure import measure
from outrider.eval.metrics import Record, predicted_speedups, summarise
from outrider.eval.report import Report, load, save
from outrider.eval.run import evaluate, quick_report
from outrider.launch.compare import compare
from outrider.models import drafters
from outrider.models.decode import verifier
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import greedy_warning
from outrider.models.decode.request import Output
from outrider.models.decode.rules.gumbel_coupling import GumbelNoise
from outrider.models.decode.rules.round_outcome import RoundOutcome
from outrider.models.decode.tree import Tree
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.formats.fingerprints import fingerprints
from outrider.models.target.load import LoadedTarget, load_target, stop_ids
from outrider.models.target.target import Target
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
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a prompt file and a finished run, on disk."""
    workspace = tmp_path_factory.mktemp("measured")
    model: Any = small_model("llama", vocab_size=VOCAB, num_hidden_layers=2)
    model.save_pretrained(workspace / "target")
    tokenizer().save_pretrained(workspace / "target")
    (workspace / "suite.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUITE))
    words = ["target=hf", f"target.path={workspace / 'target'}", "target.dtype=float32"]
    config = parse(compose([*words, f"run.dir={workspace / 'run'}"], "train"))
    (workspace / "run").mkdir()
    (workspace / "run" / "config.yaml").write_text(to_yaml(config))
    target = load_target(config.target).target
    torch.manual_seed(0)
    drafter = drafters.build(config.drafter, target, DraftVocab.identity(VOCAB))
    native.save(drafter, workspace / "run" / "drafter", target, config.drafter, {})
    return workspace


@pytest.fixture(scope="module")
def loaded(workspace: Path) -> LoadedTarget:
    return load_target(configured(workspace).target)


@cache
def composed(run_dir: Path, policy: str) -> Config:
    suite = run_dir.parent / "suite.jsonl"
    words = [f"eval.prompts={suite}", f"eval.max_new_tokens={BUDGET}", "eval.warmup=1"]
    return load_run(run_dir, [f"run.dir={run_dir}", f"decode={policy}", *words])


def configured(
    workspace: Path, policy: str = "chain", folder: str = "run", **changes: Any
) -> Config:
    """Return the configuration of `outrider eval`; `changes` are keys of run, eval and decode."""
    config = composed(workspace / folder, policy)
    groups = {}
    for name in ("run", "eval", "decode"):
        group = getattr(config, name)
        own = {k: v for k, v in changes.items() if hasattr(group, k)}
        groups[name] = dataclasses.replace(group, **own)
    return dataclasses.replace(config, **groups)


def measured(
    workspace: Path, loaded: LoadedTarget, policy: str = "chain", **changes: Any
) -> Report:
    config = configured(workspace, policy, **changes)
    drafter, _ = native.load(workspace / "run" / "drafter", loaded.target)
    return measure(loaded.target, loaded.tokenizer, drafter, config, Console(quiet=True))


def test_costs_are_kept_with_the_run_of_another_drafter(
    workspace: Path, loaded: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    folder, costs = workspace / "run" / "drafter", workspace / "run" / "costs.json"
    costs.unlink(missing_ok=True)
    changes: dict[str, Any] = {"dir": str(tmp_path / "report"), "drafter": str(folder)}
    measured(workspace, loaded, "auto", limit=1, **changes)
    assert costs.is_file()


def reports(workspace: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = workspace / "run" / "eval"
    lines = (folder / f"{name}.outputs.jsonl").read_text().splitlines()
    return json.loads((folder / f"{name}.json").read_text()), [json.loads(line) for line in lines]


def untimed(report: Report) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in report.outputs]


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
@pytest.mark.parametrize("baseline", [True, False])
def test_every_number_of_a_report_follows_from_its_outputs(
    workspace: Path, loaded: LoadedTarget, tmp_path: Path, policy: str, baseline: bool
) -> None:
    result = measured(workspace, loaded, policy, repeats=2, baseline=baseline, seed=5)
    save(result, tmp_path, "eval")
    written, rows = load(tmp_path, "eval"), read_rows(tmp_path / "eval.outputs.jsonl", "", {})
    records, depth = [Record.from_output(row) for row in rows], len(result.summary.accept_at)
    assert summarise(records, depth, seed=5) == written.summary == result.summary
    for name, part in written.categories.items():
        assert summarise([r for r in records if r.category == name], depth, seed=5) == part
    assert predicted_speedups(written.summary, depth, policy == "chain") == written.theory


def test_room_of_a_round_is_the_rest_of_the_budget(workspace: Path, loaded: LoadedTarget) -> None:
    """The last token of the budget is the target's own."""
    for row in measured(workspace, loaded, depth=3).outputs:
        written = 1
        for accepted, drafted, room in zip(
            row["accepted"], row["drafted"], row["room"], strict=True
        ):
            assert room == BUDGET - written - 1
            assert drafted == min(3, room)
            written += accepted + 1


def test_a_report_and_its_run_hash_the_same_template_alike(
    workspace: Path, loaded: LoadedTarget
) -> None:
    hashes = measured(workspace, loaded, limit=1).setting["fingerprints"]
    assert hashes["template"] == fingerprints(loaded)["template"]
    assert hashes["target"] == fingerprints(loaded)["target"]


@pytest.mark.parametrize("shape", [("chain", 3), ("dynamic_tree", 4)])
def test_evaluate_writes_a_consistent_report(
    workspace: Path, capsys: pytest.CaptureFixture[str], shape: tuple[str, int]
) -> None:
    policy, depth = shape
    assert evaluate(configured(workspace, policy, depth=depth, out=policy)) == 0
    report, outputs = reports(workspace, policy)
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
        pairs = zip(row["output_ids"], row["origins"], strict=True)
        right = [token for token, origin in pairs if origin == "correction"]
        assert len(wrong) == (len(right) if policy == "chain" else 0)
        assert all(guess != token for guess, token in zip(wrong, right, strict=False))
    printed = " ".join(capsys.readouterr().out.split())
    assert "all 5 answers equal plain decoding" in printed
    assert f"{report['tau']:.2f}" in printed


def test_token_counts_of_an_answer(workspace: Path, loaded: LoadedTarget) -> None:
    """A tree with the whole vocabulary accepts one token per round and emits two.

    A drafted end token is the last: no bonus follows it.
    """
    whole = measured(workspace, loaded, "dynamic_tree", depth=1, width=VOCAB, nodes=VOCAB)
    outputs = whole.outputs
    assert whole.summary.accept_at == [1.0]
    for row in outputs:
        emitted = sum(row["accepted"]) + len(row["accepted"]) + 1
        ended = row["output_ids"][-1] == 2
        assert emitted - len(row["output_ids"]) in ((0, 1) if ended else (0,))
        assert row["output_ids"] == row["baseline_ids"]
        assert len(row["output_ids"]) == BUDGET or ended
        assert 2 not in row["output_ids"][:-1]


def test_later_turns_use_the_plain_answers_as_history(
    workspace: Path, loaded: LoadedTarget
) -> None:
    rows = {row["id"]: row for row in measured(workspace, loaded).outputs}
    assert list(rows) == ["one", "talk", "talk/2", "talk/3", "two"]
    history: list[Message] = []
    for name, question in zip(("talk", "talk/2", "talk/3"), SUITE[1]["turns"], strict=True):
        history.append(Message(role="user", content=question))
        assert rows[name]["prompt"] == question
        assert rows[name]["prompt_ids"] == prompt_ids(loaded.tokenizer, history)
        answer = loaded.tokenizer.decode(rows[name]["baseline_ids"], skip_special_tokens=True)
        history.append(Message(role="assistant", content=answer))


def test_engines_alternate_in_order(
    workspace: Path, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = Engine.generate

    def recorded(self: Engine, prompt: Sequence[int], budget: int) -> Output:
        order.append("plain" if self.drafter is None else "fast")
        return real(self, prompt, budget)

    monkeypatch.setattr(Engine, "generate", recorded)
    measured(workspace, loaded, limit=1, repeats=2)
    assert order == ["plain", "fast", *("plain", "fast"), *("fast", "plain")]  # warm-up first
    order.clear()
    measured(workspace, loaded, limit=2, warmup=0)
    assert order == ["plain", "fast", "fast", "plain", "plain", "fast", "fast", "plain"]


def test_warm_up_is_not_recorded(workspace: Path, loaded: LoadedTarget) -> None:
    cold = measured(workspace, loaded, warmup=0, limit=1)
    warm = measured(workspace, loaded, warmup=3, limit=1)
    assert untimed(warm) == untimed(cold)
    assert warm.summary.rounds == cold.summary.rounds


def test_no_plain_decoding_without_baseline(workspace: Path, loaded: LoadedTarget) -> None:
    both = measured(workspace, loaded, limit=1)
    alone = measured(workspace, loaded, baseline=False, limit=1)
    assert alone.exact is None
    assert alone.summary.speedup is None
    assert alone.theory is None
    assert {row["baseline_ids"] for row in alone.outputs} == {None}
    assert [r["output_ids"] for r in alone.outputs] == [r["output_ids"] for r in both.outputs]


def test_sampled_answer_depends_on_seed_and_prompt_index_only(
    workspace: Path, loaded: LoadedTarget
) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "depth": 1}
    first, again = (measured(workspace, loaded, seed=3, repeats=n, **how) for n in (1, 2))
    other = measured(workspace, loaded, seed=4, limit=1, **how)
    few = measured(workspace, loaded, seed=3, limit=1, **how)
    assert first.exact is None
    assert untimed(first) == untimed(again)
    assert untimed(first)[:1] == untimed(few) != untimed(other)


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree"])
def test_coupled_answers_are_compared_with_plain_ones(
    workspace: Path, loaded: LoadedTarget, policy: str
) -> None:
    report = measured(workspace, loaded, policy, temperature=0.7, verify="coupled", repeats=2)
    assert report.exact is True
    assert "equal plain decoding" in report.exactness()
    assert report.setting["draft"] == report.setting["verify"] == "coupled"
    assert [row["output_ids"] for row in report.outputs] == [
        row["baseline_ids"] for row in report.outputs
    ]


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_mismatches_of_a_lossy_decoder_are_reported(
    workspace: Path, loaded: LoadedTarget, monkeypatch: pytest.MonkeyPatch, heat: float
) -> None:
    """Accept every drafted token: the report has each answer and its first difference."""

    def accept_all(tree: Tree, choice: torch.Tensor, _lead: torch.Tensor) -> list[RoundOutcome]:
        chains = zip(tree.ids.tolist(), choice.tolist(), tree.max_depths().tolist(), strict=True)
        return [RoundOutcome.from_chain(ids, n, n, choices[n]) for ids, choices, n in chains]

    monkeypatch.setattr(verifier, "greedy_outcomes", accept_all)
    report = measured(workspace, loaded, temperature=heat, verify="coupled" if heat else "auto")
    wrong = {m.id: m for m in report.mismatches}
    differing = [row for row in report.outputs if row["output_ids"] != row["baseline_ids"]]
    assert report.exact is False
    assert report.exceeds_rounding
    assert [row["id"] for row in differing] == list(wrong)
    for row in differing:
        mismatch = wrong[row["id"]]
        ours, plain = row["output_ids"], row["baseline_ids"]
        assert ours[: mismatch.position] == plain[: mismatch.position]
        assert (mismatch.token, mismatch.baseline_token) == (
            ours[mismatch.position],
            plain[mismatch.position],
        )
        at, index = mismatch.position, report.outputs.index(row)
        noise = heat * seeded_noise(index, at) if heat else torch.zeros(VOCAB)
        gap = logit_gap(loaded, row["prompt_ids"] + plain[:at], noise)
        assert mismatch.gap == pytest.approx(gap, abs=1e-4)


def seeded_noise(prompt: int, at: int) -> torch.Tensor:
    """The noise subtracted from the log-probabilities of an answer's token at run.seed=0."""
    return GumbelNoise(Random(prompt).getrandbits(64), VOCAB, torch.device("cpu")).rows(at, 1)[0]


def logit_gap(loaded: LoadedTarget, ids: list[int], noise: torch.Tensor) -> float:
    """The difference of the two largest logits, computed by the model itself."""
    with torch.no_grad():
        logits = loaded.target.model(torch.tensor([ids])).logits[0, -1]
    top = (logits - noise).topk(2).values
    return float(top[0] - top[1])


def test_bfloat16_is_reported(workspace: Path) -> None:
    model = small_model("llama", vocab_size=VOCAB, num_hidden_layers=2).to(torch.bfloat16)
    target = Target(model)
    config = configured(workspace)
    torch.manual_seed(0)
    drafter = drafters.build(config.drafter, target, DraftVocab.identity(VOCAB))
    drafter = drafter.to(torch.bfloat16).eval()
    report = measure(target, tokenizer(), drafter, config, Console(quiet=True))
    assert report.setting["dtype"] == "bfloat16"
    differing = [r["id"] for r in report.outputs if r["output_ids"] != r["baseline_ids"]]
    assert [mismatch.id for mismatch in report.mismatches] == differing
    assert report.exact is (not differing)


def test_prompts_that_exceed_the_context_are_listed(workspace: Path, loaded: LoadedTarget) -> None:
    """The target reads 128 tokens, the answer included."""
    suite = [
        Prompt("fits", "all", ["w5"]),
        Prompt("long", "all", [" ".join(["w6"] * 130)]),
        Prompt("grows", "all", ["w7", " ".join(["w8"] * 130), "w9"]),
    ]
    drafter, _ = native.load(workspace / "run" / "drafter", loaded.target)
    console = Console(quiet=True)
    config = configured(workspace)
    report = measure(loaded.target, loaded.tokenizer, drafter, config, console, suite)
    assert [row["id"] for row in report.outputs] == ["fits", "grows"]
    assert report.setting["left_out"] == ["long", "grows/2"]
    with pytest.raises(RunError, match="No prompt fits"):
        measure(loaded.target, loaded.tokenizer, drafter, config, console, suite[1:2])


def test_taps_of_the_target_are_restored(workspace: Path, loaded: LoadedTarget) -> None:
    drafter, _ = native.load(workspace / "run" / "drafter", loaded.target)
    loaded.target.set_taps((1,))
    config = configured(workspace, limit=1)
    measure(loaded.target, loaded.tokenizer, drafter, config, Console(quiet=True))
    assert loaded.target.taps == (1,)


def held_out_data(loaded: LoadedTarget) -> TrainingData:
    """Two packed rows of synthetic held-out text."""
    ids = torch.arange(48).view(2, 24) % VOCAB
    places = torch.arange(24).expand(2, 24).clone()
    rows = Rows(ids.int(), torch.ones(2, 24).bool(), torch.zeros(2, 24).int(), places.int())
    counts = torch.ones(VOCAB).long()
    return TrainingData(rows, rows, counts, counts, [], {})


def test_quick_report_samples_all_categories(workspace: Path, loaded: LoadedTarget) -> None:
    """With a limit of two, the first prompt of each of two categories."""
    config = configured(workspace, limit=2, out="quick")
    suite = [{"id": str(i), "category": "aaabbb"[i], "turns": [f"w{5 + i}"]} for i in range(6)]
    (workspace / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in suite))
    wide = dataclasses.replace(config.eval, prompts=str(workspace / "many.jsonl"))
    stream, config = io.StringIO(), dataclasses.replace(config, eval=wide)
    console = Console(file=stream, width=200)
    decode = dataclasses.replace(config.decode, verify="ratio")
    quick_report(dataclasses.replace(config, decode=decode), loaded, held_out_data(loaded), console)
    assert "decode.verify=ratio has no effect at temperature 0" in stream.getvalue()
    assert config.drafter.depths == 4  # of the predictions, and 3 tokens are drafted
    printed = stream.getvalue()
    report, outputs = reports(workspace, "quick")
    tau, forecast = f"tau {report['tau']:.2f} at depth 3", f"{report['forecast']:.2f} predicted"
    assert f"{tau}, {forecast} by teacher forcing on this text" in printed
    assert [row["id"] for row in outputs] == ["0", "3"]
    assert report["prompts"] == 2


def test_settings_of_sampling_have_no_effect_if_every_decoding_is_greedy() -> None:
    ratio, both = DecodeConfig(verify="ratio"), DecodeConfig(verify="ratio", top_p=0.5)
    assert greedy_warning([ratio, ratio]).startswith("decode.verify=ratio has no effect")
    assert greedy_warning([both]).startswith("decode.verify=ratio, decode.top_p=0.5 have no")
    assert greedy_warning([ratio, dataclasses.replace(ratio, temperature=1.0)]) == ""
    assert greedy_warning([DecodeConfig(depth=5)]) == ""


def test_stop_tokens_come_from_the_tokenizer_and_the_model(loaded: LoadedTarget) -> None:
    settings = loaded.target.model.generation_config
    before = settings.eos_token_id
    try:
        for written, stops in ((7, [2, 7]), ([2, 8, 9], [2, 8, 9]), (None, [2])):
            settings.eos_token_id = written
            assert stop_ids(loaded.tokenizer, loaded.target) == stops
    finally:
        settings.eos_token_id = before


def test_run_without_drafter_raises(workspace: Path) -> None:
    (workspace / "empty").mkdir(exist_ok=True)
    (workspace / "empty" / "config.yaml").write_text(
        (workspace / "run" / "config.yaml").read_text()
    )
    with pytest.raises(RunError, match=r"empty has no drafter/"):
        evaluate(configured(workspace, folder="empty"))


def test_compare_reads_what_evaluate_wrote(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, depth in (("flat", 1), ("deep", 2)):
        evaluate(configured(workspace, out=name, depth=depth, limit=1))
    capsys.readouterr()
    assert compare([str(workspace / "run")], explain=True) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flat" in text
    assert "deep" in text
    assert "policy" in text.partition("not the same conditions:")[2]


# ---- the forecast --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forecast_equals_tau_on_the_decoded_text(
    workspace: Path, loaded: LoadedTarget, temperature: float
) -> None:
    """Exact for greedy float32; within sampling error above temperature 0."""
    report = measured(workspace, loaded, depth=2, nodes=2, temperature=temperature)
    assert report.summary.tau is not None
    assert report.forecast == pytest.approx(
        report.summary.tau, abs=1e-9 if not temperature else 0.3
    )


@pytest.mark.parametrize(
    "changes", [{"policy": "dynamic_tree", "depth": 2}, {"temperature": 0.7}, {"top_k": 3}]
)
def test_forecast_is_none_if_undefined(
    workspace: Path, loaded: LoadedTarget, changes: dict[str, Any]
) -> None:
    assert measured(workspace, loaded, **changes).forecast is None
