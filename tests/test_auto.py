"""decode=auto in all that decodes: settings, eval, chat, the Decoder, batches, and its law."""

import json
from collections import Counter, deque
from io import StringIO
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from outrider.conf.console import Console
from outrider.conf.errors import ConfigError
from outrider.eval.auto_policy import policy_beside
from outrider.eval.chat import chat
from outrider.eval.decoder import Decoder
from outrider.eval.page.answers import choice_figure
from outrider.eval.page.speed import automatic_parts
from outrider.eval.report import load
from outrider.eval.report_auto import auto_lines, choice_shares, shares_of
from outrider.eval.serve.parameters import Parameters
from outrider.eval.serve.request_settings import RequestSettings
from outrider.launch import cli
from outrider.models.decode import tree_shapes
from outrider.models.decode.acceptance import Acceptance, RequestAcceptance
from outrider.models.decode.auto.chain_growth import ChainGrowth
from outrider.models.decode.auto.choice import BUDGETS, ChainCosts, tree_shapes_of
from outrider.models.decode.auto.controller import AMORTISED, Situation
from outrider.models.decode.auto.policy import Auto
from outrider.models.decode.costs.live_costs import LiveCosts
from outrider.models.decode.costs.round_costs import DraftShape
from outrider.models.decode.engine import Engine
from outrider.models.decode.from_config import parse_policy_at_temperature, policy_of, rule_of
from outrider.models.decode.request import ActiveRequest, Request
from outrider.models.decode.round_times import Stopwatch
from outrider.models.decode.rules.rule_table import BEST, COUPLED, DRAWN
from outrider.train.settings import load_published
from tests.test_auto_exact import Toy, policy, times
from tests.test_golden import BATCH, LENGTH, WARM, draft_logits, embedded, fit
from tests.test_terminal_chat import user_input
from tests.tiny import ScriptedDrafter

COPY = "Repeat: one two three four one two three four one two three four"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "verify", "draft", "rule"),
    [("0", "auto", BEST, "match"), ("1", "auto", DRAWN, "ratio"), ("1", "block", DRAWN, "block"),
     ("1", "coupled", COUPLED, "coupled")],
)  # fmt: skip
def test_drafts_and_rule_follow_from_the_temperature(
    temperature: str, verify: str, draft: str, rule: str
) -> None:
    words = [f"decode.temperature={temperature}", f"decode.verify={verify}", "run.dir=x"]
    config = load_published(["drafter=suffix", "target=tiny", "decode=auto", *words])
    policy = policy_of(config.decode)
    assert isinstance(policy, Auto)
    assert (policy.draft, policy.eps) == (draft, 0.03)
    assert rule_of(config.decode, policy).name == rule


@pytest.mark.parametrize(
    ("word", "key"),
    [("decode.draft=best", "decode.draft"), ("decode.verify=traversal", "decode.verify"),
     ("decode.verify=lossy_lenience", "decode.verify"), ("decode.auto.eps=-1", "decode.auto.eps"),
     ("decode.auto.eps=much", "decode.auto.eps"), ("decode.auto.c0=3", "decode.auto.c0"),
     ("decode.gain=0.1", "decode.gain"), ("decode.nodes=4", "decode.nodes"),
     ("decode.draft=coupled decode.verify=ratio", "decode.verify")],
)  # fmt: skip
def test_contradictory_settings_are_refused(word: str, key: str) -> None:
    words = [
        "drafter=suffix",
        "target=tiny",
        "decode=auto",
        "decode.temperature=1",
        "decode.depth=8",
        *word.split(),
    ]
    with pytest.raises(ConfigError) as caught:
        load_published([*words, "run.dir=x"])
    assert caught.value.key == key


def test_the_grid_takes_auto() -> None:
    name, decode = parse_policy_at_temperature("auto@1")
    assert (name, decode.kind, decode.depth) == ("auto-t1", "auto", 8)


def test_costs_lie_beside_a_run(tmp_path: Path) -> None:
    """Those of another folder of a drafter are in the cache."""
    _, decode = parse_policy_at_temperature("auto@0")
    (folder := tmp_path / "drafter").mkdir()
    other = policy_beside(decode, folder)
    (tmp_path / "config.yaml").touch()
    own = policy_beside(decode, folder)
    assert isinstance(other, Auto)
    assert isinstance(own, Auto)
    assert (other.file, own.file) == (None, tmp_path / "costs.json")


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_chain_grows_as_the_best_further_plan_says(least: int) -> None:
    """By the definition: the most that levels below add, over all of them, less what they cost."""
    random, decisions = Random(0), set[tuple[bool, bool]]()
    for _ in range(400):
        requests = [RequestAcceptance(Acceptance()) for _ in range(random.choice((1, 3)))]
        for one in requests:
            for _ in range(random.randrange(30)):
                one.add(random.randint(1, 4), float(random.random() < random.random()))
        draft, other = ([0.0], [random.uniform(1, 4)])
        for _ in range(4):
            draft.append(draft[-1] + random.uniform(0, 1))
            other.append(other[-1] + random.uniform(0, 2))
        costs, rate = ChainCosts(draft, other), random.uniform(0, 1)
        growth = ChainGrowth(requests, costs, rate, 4, "drawn", least)
        growth.limits = [random.randint(1, 4) for _ in requests]
        growth.survival = [random.random() for _ in requests]
        depth = random.randint(1, 3)
        confidences = [random.random() for _ in requests]
        submits, pays = growth.submits(depth, confidences), growth.pays(depth)

        survival, net, below = growth.survival, 0.0, 0.0
        for level in range(depth + 1, max(growth.limits) + 1):
            alive = sum(level <= limit for limit in growth.limits)
            means = (one.mean(level, alive**-0.5) * (level <= limit)
                     for one, limit in zip(requests, growth.limits, strict=True))  # fmt: skip
            survival = [s * mean for s, mean in zip(survival, means, strict=True)]
            net += sum(survival) - rate * (costs.total(level) - costs.total(level - 1))
            below = max(below, net)
        worth = sum(growth.survival) - rate * (other[depth] - other[depth - 1]) + below
        assert submits == (worth > 0 or depth <= least)
        if submits:
            assert pays == (below > 0 or depth < least)
        decisions.add((submits, pays))
    assert {(True, True), (True, False)} <= decisions


# ---- eval, chat and the Decoder ------------------------------------------------------------------


def test_a_report_has_the_choices_and_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["drafter=suffix", "target=tiny", "decode=auto", f"run.dir={run}", "eval.limit=2",
             "eval.max_new_tokens=40"]  # fmt: skip
    assert cli.main(["eval", *words]) == 0
    text = capsys.readouterr().out
    assert "costs of rounds measured in" in text
    report = json.loads((run / "eval" / "eval.json").read_text())
    lines = [json.loads(line) for line in (run / "eval" / "eval.outputs.jsonl").open()]
    summary = report["auto"]
    assert summary["answers"] == len(lines) == 2
    plain = [line["baseline_seconds"] for line in lines]
    assert summary["baseline"] == sum(one["prefill"] + one["rounds"] for one in plain)
    assert "measured" in auto_lines(summary)
    assert "measured" not in auto_lines({**summary, "baseline": None})
    assert sum(summary["choices"].values()) == report["rounds"]
    assert " ".join(auto_lines(summary).split()) in " ".join(text.split())
    assert report["exact"]
    for line in lines:
        choices = line["auto"]["choices"]
        assert len(choices) == len(line["auto"]["gains"]) == len(line["accepted"])
        for choice, drafted in zip(choices, line["drafted"], strict=True):
            assert (choice == "plain") == (drafted == 0)
    assert cli.main(["report", f"run.dir={run}"]) == 0
    (table,) = automatic_parts({"eval": load(run / "eval", "eval")})
    (row,) = table.rows
    assert [cell.text for cell in row[:3]] == [
        "eval", shares_of(summary["choices"]), f"{summary['real']:.2f}"
    ]  # fmt: skip
    figure = choice_figure(lines[0])
    assert figure.title == f"choices of decode=auto: {lines[0]['id']}"
    assert figure.light.startswith("data:image/svg")


def test_the_chat_shows_the_shape() -> None:
    config = load_published(
        ["drafter=suffix", "target=tiny", "decode=auto", "run.dir=x", "eval.max_new_tokens=30"]
    )
    console = Console(file=StringIO(), record=True, width=200)
    lines = [COPY, "And again?", "/new", COPY, "/plain", "Why?"]
    assert chat(config, console, user_input(*lines)) == 0
    text = console.export_text()
    assert "auto, at most depth 16, temperature 0" in text
    assert text.index("measuring the costs of rounds") < text.index("costs of rounds measured in")
    assert text.count("costs of rounds measured in") == 1
    numbers = [line for line in text.splitlines() if "tokens/s" in line]
    assert len(numbers) == 4
    assert all("plain" in line or "chain" in line or "tree" in line for line in numbers)


def test_a_decoder_announces_by_what_was_set_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy is kept; a larger batch is measured later."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    announced, decoder = list[str](), Decoder.from_pretrained("tiny", "suffix", policy="auto")
    decoder.generate("a b a b", 3)
    decoder.announce = announced.append
    decoder.generate("a b a b", 3)
    assert announced == []
    decoder.generate_batch(["a b a b"] * 2, 3, batch=2)
    assert len(announced) == 1


def test_a_server_says_that_costs_are_measured() -> None:
    announced = list[str]()
    _, decode = parse_policy_at_temperature("auto@0")
    settings = RequestSettings(decode, None, 64, announce=announced.append)
    policy = settings(Parameters(), 0).policy
    assert isinstance(policy, Auto)
    policy.announce("once")
    assert announced == ["once"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_decoder_takes_auto_by_name(temperature: float) -> None:
    decoder = Decoder.from_pretrained("tiny", drafter="suffix", dtype="float32")
    how: dict[str, Any] = {"policy": "auto", "temperature": temperature}
    result = decoder.generate(COPY, 40, **how)
    assert len(result.choices) == len(result.accepted)
    assert decoder.generate(COPY, 40, policy="chain").choices == []
    assert list(decoder.stream(COPY, 8, **how))[-1].result.choices
    if not temperature:
        plain = decoder.generate_batch([COPY, "Where?", COPY], 30, batch=2, policy="plain")
        answers = decoder.generate_batch([COPY, "Where?", COPY], 30, batch=2, **how)
        assert [a.output_ids for a in answers] == [p.output_ids for p in plain]
        dialogue = decoder.chat(policy="auto")
        own = decoder.chat(policy="plain")
        for text in (COPY, "And again?"):
            assert dialogue.say(text, 20).output_ids == own.say(text, 20).output_ids


def test_coupled_answers_are_those_of_plain_decoding() -> None:
    """The text of a seed does not depend on what is drafted."""
    decoder = Decoder.from_pretrained("tiny", drafter="suffix", dtype="float32")
    how: dict[str, Any] = {"temperature": 1.0, "rule": "coupled", "seed": 3}
    plain = decoder.generate(COPY, 40, policy="plain", **how)
    assert decoder.generate(COPY, 40, policy="auto", **how).output_ids == plain.output_ids


def test_candidate_trees_are_the_best_of_their_size() -> None:
    random = Random(0)
    for _ in range(50):
        shared, width, most = Acceptance(), random.randint(1, 4), random.choice((3, 8, 33, 64))
        first = sorted((random.random() for _ in range(random.randint(1, 6))), reverse=True)
        found = tree_shapes_of(shared, first, width, most)
        table = torch.tensor([shared.sibling_row(rate)[:width] for rate in first])
        expected = []
        for nodes in (budget for budget in BUDGETS if budget <= most):
            paths = tree_shapes.best_first(table, nodes)
            if len(paths) == nodes > (depth := len(paths[-1])):
                expanded = (1, *[width] * (depth - 1))
                value = tree_shapes.expected(paths, table) - 1
                expected.append((DraftShape(depth, nodes, expanded), value))
        assert [shape for shape, _ in found] == [shape for shape, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])


def test_shares_by_hand() -> None:
    assert choice_shares(["plain", "chain 2", "plain", "tree 8"]) == (
        "plain 50 %, chain 2 25 %, tree 8 25 %"
    )
    assert choice_shares([]) == ""
    assert shares_of({"tree 8": 1, "chain 2": 1}) == shares_of({"chain 2": 1, "tree 8": 1})


def test_few_shapes_are_named() -> None:
    counts = {"plain": 40, **{f"chain {n}": 12 - n for n in range(1, 8)}}
    text = shares_of(counts)
    assert text == "plain 42 %, chain 1 11 %, chain 2 10 %, chain 3 9 %, others 27 %"
    assert len(f"rounds: {text}") < 80


# ---- the law -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_thousand_sampled_answers_have_the_law_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Batches of 64; the shapes are what the controller chooses, and not one of them alone.

    Costs are given, and the clock hardly moves: the drafter of this test is a slow table.
    """
    reads = count()
    monkeypatch.setattr(Stopwatch, "clock", staticmethod(lambda: 1e-7 * next(reads)))
    target, prompt = embedded()
    drafter = ScriptedDrafter(draft_logits, target.vocab_size)
    drafter.handed = deque(maxlen=1)  # type: ignore[assignment]  # keep only the last
    auto = Auto(depth=3, budget=8, draft=DRAWN, eps=1.0)
    engine = Engine(target, drafter, auto, sampling=WARM)
    auto.use_costs(LiveCosts(times(row=0.0005, level=0.01)))
    monkeypatch.setattr(auto, "prepare", lambda *_: None)
    requests = [Request(prompt, LENGTH + 2, seed) for seed in range(50_000)]
    outs = engine.generate_all(requests, BATCH)
    shapes = Counter(choice for out in outs for choice in out.choices)
    assert len(shapes) > 2
    assert sum(sum(out.accepted) for out in outs) > 5_000, "too few draft tokens were accepted"
    assert fit(Counter(tuple(out.ids[:LENGTH]) for out in outs), len(outs)) > 1e-4


def test_reading_a_prompt_is_spread_over_what_answers_have_left() -> None:
    def situation(left: float) -> Situation:
        return Situation([], [200], ChainCosts([0.0], [0.0]), 64, [512], [left])

    assert situation(12).read_per_token == pytest.approx(512 / 12)
    assert situation(500).read_per_token == pytest.approx(512 / AMORTISED)
    assert situation(12).reading(3, 0.001) == pytest.approx(3 * 0.512 / 12)


def test_the_mean_length_of_answers_is_learnt() -> None:
    auto = policy(BEST, 2, 0.01, 0.05)
    engine = Toy(auto)
    for _ in range(30):
        engine.generate([1, 2], 6)
    assert auto.controller is not None
    new = ActiveRequest(0, Request([1, 2], 6), Random(0))
    assert auto.controller.tokens_left(new) == pytest.approx((AMORTISED + 29 * 6) / 30, rel=0.1)
    before = auto.controller._answers
    engine.generate_all([Request([1, 2], 6)] * 3 + [Request([1, 2], 1)], 2)
    assert auto.controller._answers == before + 3, "also of answers that end in one round"
    new.out.ids = [1] * 8
    assert auto.controller.tokens_left(new) == pytest.approx(10 / 4, rel=0.2), "a quarter at least"
