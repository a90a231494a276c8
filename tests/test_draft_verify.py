"""Draft & Verify: its settings, and the search for the sublayers that a draft skips.

Speeds of the search are a function of the candidate, except for one short search of the command
line; `test_target_drafting.py` tests the drafter.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.conf.compose import compose
from outrider.conf.errors import ConfigError, CorruptFile, RunError
from outrider.conf.searched import SearchConfig, SearchedConfig, Skipped
from outrider.data.reporter import Reporter
from outrider.data.suite import load_suite
from outrider.eval import sublayer_results
from outrider.eval.decoder import Decoder
from outrider.eval.page.elements import Figure, Note, Table
from outrider.eval.page.run_files import read_run_files
from outrider.eval.page.sublayers import search_parts
from outrider.eval.requests import GenerationSettings
from outrider.eval.sublayer_search import LOG, Measure, SublayerSearch, Trial, probes, skips_all
from outrider.eval.sublayer_speed import Speed, SpeedMeasurement, Timing, search_prompts
from outrider.launch.cli import main
from outrider.launch.processes import ROOT
from outrider.models.decode.adaptive_confidence import AdaptiveConfidence
from outrider.models.decode.policy import Chain
from outrider.models.drafters.draft_verify import Config, DraftVerify
from outrider.models.target.load import LoadedTarget, load_target
from outrider.train.settings import load_run, parse, read_found
from tests import tiny

LAYERS = 6
BEST = Skipped((1, 3), (4,))  # the fastest candidate of `planted`
SETTINGS = {"format": "test", "seed": 0}


def planted(candidate: Skipped, prompts: int = 3) -> Iterator[Timing]:
    """The speedup falls by a fifth for every sublayer that differs from BEST."""
    differing = sum(len({*a} ^ {*b}) for a, b in zip(candidate, BEST, strict=True))
    for _ in range(prompts):
        yield Timing(10, 0.5 * 1.25**differing, 10, 1.0, 4, 8, 6)


def new_search(
    folder: Path, trials: int = 60, seed: int = 0, measure: Measure = planted, **changes: Any
) -> SublayerSearch:
    settings = SearchConfig(trials=trials, contexts=(8, 16), **changes)
    return SublayerSearch(folder, LAYERS, settings, seed, measure, Reporter.silent())


def run_search(folder: Path, *args: Any, **changes: Any) -> list[Trial]:
    search = new_search(folder, *args, **changes)
    search.resume(SETTINGS)
    return search.run()


# ---- candidates ----------------------------------------------------------------------------------


def test_first_candidates() -> None:
    given = Skipped((5,), ())
    first = probes(8, 0, given)
    assert first[:5] == [
        given, Skipped(), Skipped((2, 4), ()), Skipped((), (2, 4)), Skipped((2, 4), (2, 4)),
    ]  # fmt: skip
    assert len({*first}) == len(first)
    sizes = [len(one.attention) + len(one.mlp) for one in first[-8:]]
    assert sum(sizes[:4]) < sum(sizes[4:])
    assert probes(8, 1, given)[-8:] != first[-8:] == probes(8, 0, given)[-8:]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_no_first_candidate_of_a_small_target_skips_everything(layers: int) -> None:
    for seed in range(20):
        first = probes(layers, seed, Skipped())
        assert Skipped() in first
        assert not any(skips_all(one, layers) for one in first)


def test_the_search_finds_a_planted_optimum(tmp_path: Path) -> None:
    """Of 4096 candidates; none of the first ones is it."""
    trials = run_search(tmp_path, 120)
    assert BEST not in probes(LAYERS, 0, Skipped())
    best = max(trials, key=lambda trial: trial.value)
    assert best.candidate == BEST
    assert best.value == pytest.approx(2.0)
    assert not best.pruned


def test_a_seed_fixes_the_candidates(tmp_path: Path) -> None:
    runs = [run_search(tmp_path / str(i), 30, seed) for i, seed in enumerate((3, 3, 4))]
    assert len({trial.candidate for trial in runs[0]}) == 30
    assert runs[0] == runs[1]
    assert [t.candidate for t in runs[0]][-10:] != [t.candidate for t in runs[2]][-10:]


# ---- measuring -----------------------------------------------------------------------------------


def test_speed_by_hand() -> None:
    """8 + 2 tokens in 2 s, against 10 in 4 s: 5 and 2.5 per second."""
    timings = [Timing(8, 1.5, 8, 3.0, 2, 8, 6), Timing(2, 0.5, 2, 1.0, 2, 2, 0)]
    assert Speed.of(timings) == Speed(2.0, 5.0, 2.5, 0.6)


def test_plain_decoding_may_emit_another_number_of_tokens() -> None:
    """In half precision a near tie may end an answer earlier: 2 s and 1 s per token."""
    assert Speed.of([Timing(4, 4.0, 2, 4.0, 2, 4, 2)]).speedup == 2.0


def test_a_slow_candidate_is_stopped_after_a_prompt_of_each_length(tmp_path: Path) -> None:
    decoded = dict[Skipped, int]()

    def counted(candidate: Skipped) -> Iterator[Timing]:
        for timing in planted(candidate, 5):
            decoded[candidate] = decoded.get(candidate, 0) + 1
            yield timing

    trials = run_search(tmp_path, 15, measure=counted)
    best = 0.0
    for trial in trials:
        slow = trial.value < 0.85 * best
        assert trial.pruned == slow
        assert decoded[trial.candidate] == len(trial.speedups) == (2 if slow else 5)
        best = max(best, trial.value)
    assert 0 < sum(trial.pruned for trial in trials) < len(trials)


def test_a_candidate_that_skips_everything_is_not_measured(tmp_path: Path) -> None:
    search = new_search(tmp_path)
    every = tuple(range(LAYERS))
    trial = search._measured(Skipped(every, every))
    assert trial.pruned
    assert trial.value == 0


def test_the_best_are_measured_again_in_turns_and_the_median_decides(tmp_path: Path) -> None:
    """The candidate with the luckiest value in the search is not the fastest one."""
    lucky, steady = Skipped((0,), ()), Skipped((1,), ())
    later = {lucky: [1.0, 3.0, 1.1], steady: [1.5, 1.4, 0.2]}
    calls = list[Skipped]()

    def measure(candidate: Skipped) -> Iterator[Timing]:
        calls.append(candidate)
        speedup = later[candidate][calls.count(candidate) - 1]
        yield Timing(10, 1.0 / speedup, 10, 1.0, 4, 8, 6)

    search = new_search(tmp_path, measure=measure)
    for candidate, value in ((lucky, 9.0), (steady, 1.5)):
        search._add(Trial(candidate, [value], Speed(value, 1.0, 1.0, 1.0), pruned=False))
    search._add(Trial(Skipped(), [10.0], Speed(10.0, 1.0, 1.0, 1.0), pruned=True))
    first, second = search.finalists()
    assert calls == [lucky, steady] * 3
    assert (first.candidate, second.candidate) == (steady, lucky)
    assert first.value == pytest.approx(1.4)
    assert second.value == pytest.approx(1.1)


# ---- resuming ------------------------------------------------------------------------------------


def interrupted_after(count: int) -> Measure:
    left = [count]

    def measure(candidate: Skipped) -> Iterator[Timing]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return planted(candidate)

    return measure


@pytest.mark.parametrize("stop", [4, 22])
def test_a_resumed_search_equals_an_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """Stopped among the first candidates, or those of TPE."""
    whole = run_search(tmp_path / "whole", 30)
    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path / "parts", 30, measure=interrupted_after(stop))
    with (tmp_path / "parts" / LOG).open("a") as log:
        log.write('{"number": 4, "skip_')  # a line that a crash has cut
    assert run_search(tmp_path / "parts", 30) == whole
    logs = [(tmp_path / name / LOG).read_text() for name in ("whole", "parts")]
    assert logs[0] == logs[1]


KILLED = """
import time
from pathlib import Path
from tests.test_draft_verify import new_search, planted, SETTINGS
def slow(candidate):
    time.sleep(0.05)
    return planted(candidate)
search = new_search(Path("{folder}"), 30, measure=slow)
search.resume(SETTINGS)
search.run()
"""


def test_a_killed_search_continues(tmp_path: Path) -> None:
    """SIGKILL between two candidates or within one."""
    process = subprocess.Popen([sys.executable, "-c", KILLED.format(folder=tmp_path)])
    log = tmp_path / LOG
    deadline = time.monotonic() + 300
    while not log.is_file() or len(log.read_text().splitlines()) < 8:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    search = new_search(tmp_path, 30)
    assert 6 <= search.resume(SETTINGS) < 30
    assert search.run() == run_search(tmp_path / "whole", 30)


def test_a_longer_search_continues_a_finished_one(tmp_path: Path) -> None:
    first = run_search(tmp_path, 20)
    longer = run_search(tmp_path, 26)
    assert (longer[:20], len(longer)) == (first, 26)


def test_a_search_with_other_settings_is_refused(tmp_path: Path) -> None:
    run_search(tmp_path, 3)
    with pytest.raises(ConfigError, match="seed = 0, not 1") as caught:
        new_search(tmp_path, 3).resume({**SETTINGS, "seed": 1})
    assert caught.value.key == "run.dir"


def test_a_search_with_other_prompts_is_refused_without_hashes(tmp_path: Path) -> None:
    new_search(tmp_path).resume({**SETTINGS, "prompts": "0badcafe"})
    with pytest.raises(ConfigError, match="other prompts") as caught:
        new_search(tmp_path).resume({**SETTINGS, "prompts": "deadbeef"})
    assert "cafe" not in caught.value.why
    assert "beef" not in caught.value.why


@pytest.mark.parametrize("line", ['{"number": 3}', "no json\n{}", '{"number": "x"}'])
def test_a_damaged_log_is_named(tmp_path: Path, line: str) -> None:
    run_search(tmp_path, 3)
    with (tmp_path / LOG).open("a") as log:
        log.write(f"{line}\n")
    with pytest.raises(CorruptFile, match=LOG):
        new_search(tmp_path, 3).resume(SETTINGS)


def test_no_candidate_is_started_after_the_time_limit(tmp_path: Path) -> None:
    assert len(run_search(tmp_path, 30, minutes=1e-9)) == 1


# ---- results -------------------------------------------------------------------------------------


def test_the_result_and_its_plot(tmp_path: Path) -> None:
    search = new_search(tmp_path, 24)
    search.resume(SETTINGS)
    trials, finalists = search.run(), search.finalists()
    assert not sublayer_results.is_finished(tmp_path, search.search)
    sublayer_results.save(tmp_path, LAYERS, trials, finalists, SETTINGS, search.search)
    assert sublayer_results.is_finished(tmp_path, search.search)
    assert not sublayer_results.is_finished(tmp_path, replace(search.search, minutes=1.0))
    found = read_found(tmp_path)
    (tmp_path / "found.json").write_text('{"format": ')
    assert not sublayer_results.is_finished(tmp_path, search.search), "a damaged result"
    best = finalists[0].candidate
    assert found["drafter"] == {"skip_attention": [*best.attention], "skip_mlp": [*best.mlp]}
    assert found["candidates"] == 24
    assert found["speedup"] == finalists[0].value
    assert (tmp_path / sublayer_results.PLOT).read_bytes()[:4] == b"\x89PNG"


def test_shares_count_the_best_quarter_of_the_complete_candidates() -> None:
    def trial(value: float, attention: tuple[int, ...], pruned: bool = False) -> Trial:
        return Trial(Skipped(attention, ()), [value], Speed(value, 1.0, 1.0, 1.0), pruned)

    trials = [trial(float(i), (0,)) for i in range(6)]
    trials += [trial(8.0, (1,)), trial(9.0, (1, 2)), trial(99.0, (3,), pruned=True)]
    shares = sublayer_results.skip_shares(4, trials)
    assert shares == {"attention": [0.0, 1.0, 0.5, 0.0], "mlp": [0.0] * 4}


def test_a_run_without_a_result_says_that_its_search_has_not_finished(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has not finished"):
        read_found(tmp_path)


# ---- the interface of a drafter that is searched -------------------------------------------------


def test_settings_become_a_candidate_and_a_candidate_settings() -> None:
    settings = Config(skip_attention=(5, 2, 5), skip_mlp=(1,))
    assert settings.skipped == Skipped((2, 5), (1,)), "each layer once, ascending"
    assert settings.skipping(BEST).found_settings() == BEST.settings()
    assert settings.skipping(BEST).depths == settings.depths


@pytest.mark.parametrize("folder", ["conf", "data", "train", "eval", "launch"])
def test_only_the_drafters_import_a_drafter_that_is_searched(folder: str) -> None:
    """The search knows `SearchedConfig`, so that it suits any drafter with such settings."""
    files = [*(ROOT / folder).rglob("*.py")]
    assert files
    assert not [str(file) for file in files if "drafters.draft_verify" in file.read_text()]


# ---- prompts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(parse(compose([])).target, "cpu")


def config_with(*words: str) -> Any:
    return parse(compose(["drafter=draft_verify", *words]), searched=True)


def test_prompts_have_their_lengths_in_turn(loaded: LoadedTarget) -> None:
    config = config_with("drafter.search.contexts=[20,150]", "drafter.search.prompts=2")
    prompts = search_prompts(config, loaded, config.drafter.search)
    lengths = [len(prompt) for prompt in prompts]
    assert len(lengths) == 4
    assert all(20 <= length < 150 for length in lengths[::2])
    assert all(150 <= length < 250 for length in lengths[1::2])
    assert prompts == search_prompts(config, loaded, config.drafter.search)
    other = config_with(*("drafter.search.contexts=[20,150]", "run.seed=1"))
    assert search_prompts(other, loaded, config.drafter.search) != prompts


def test_prompts_of_the_evaluation_are_left_out(loaded: LoadedTarget, tmp_path: Path) -> None:
    questions = [prompt.turns[0] for prompt in load_suite(config_with(), 3)]
    lines = [json.dumps({"turns": [question]}) for question in questions]
    own = "Please list all the rivers which you know in some alphabetical order."
    (tmp_path / "text.jsonl").write_text("\n".join([*lines, json.dumps({"turns": [own]})]))
    config = config_with(f"data.path={tmp_path}/text.jsonl", "drafter.search.contexts=[1]")
    (prompt,) = search_prompts(config, loaded, SearchConfig(contexts=(1,), prompts=1))
    assert own in loaded.tokenizer.decode(prompt)
    with pytest.raises(RunError, match="too few questions"):
        search_prompts(config, loaded, SearchConfig(contexts=(1,), prompts=2))


def test_a_context_beyond_the_positions_is_refused(loaded: LoadedTarget) -> None:
    config = config_with()
    with pytest.raises(ConfigError, match="2048 positions"):
        search_prompts(config, loaded, SearchConfig(contexts=(2040,), prompts=1))


def test_candidates_decode_the_answers_of_plain_decoding(loaded: LoadedTarget) -> None:
    config = config_with("drafter.search.tokens=6", "drafter.search.contexts=[8]")
    prompts = search_prompts(config, loaded, config.drafter.search)
    measurement = SpeedMeasurement(loaded, config.drafter, Chain(3, "best"), prompts)
    for candidate in (Skipped(), Skipped((1, 2, 5), (3,))):
        timings = list(measurement(candidate))
        assert len(timings) == len(measurement.prompts)
        for timing in timings:
            assert timing.tokens == timing.plain_tokens <= 5
            assert timing.seconds > 0
            assert timing.plain_seconds > 0
            assert timing.accepted <= timing.drafted
    (whole,) = (list(measurement(one)) for one in (Skipped(),))
    assert all(timing.accepted == timing.drafted for timing in whole)


# ---- settings and commands -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"skip_attention": [0, 4]}, "drafter.skip_attention[1]", "layers 0..3"),
        ({"skip_mlp": [-1]}, "drafter.skip_mlp[0]", "layers 0..3"),
        ({"skip_attention": range(4), "skip_mlp": range(4)}, "drafter.skip_attention", "All 4"),
    ],
)
def test_wrong_lists_are_named(changes: dict[str, Any], key: str, text: str) -> None:
    lists: dict[str, Any] = {name: tuple(value) for name, value in changes.items()}
    target, vocab = tiny.target(), tiny.vocab(tiny.VOCAB)
    with pytest.raises(ConfigError, match=text) as caught:
        tiny.drafter("draft_verify", target, vocab, draft_vocab_size=None, **lists)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("drafter.search.trials=0", "in [1, 65536]"),
        ("drafter.search.contexts=[]", "at least one length"),
        ("drafter.search.tokens=1", "in [2, 4194304]"),
        ("drafter.search.trails=9", "drafter.search.trials?"),
        ("target.place=sharded", "target.place=replicated"),
    ],
)
def test_wrong_search_settings_are_named(
    word: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "drafter=draft_verify", "target=tiny", f"run.dir={tmp_path}/dv", word])
    assert text in capsys.readouterr().err


def test_several_processes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "drafter=draft_verify", f"run.dir={tmp_path}/dv"])
    assert "runs in one" in capsys.readouterr().err


def test_the_folder_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["train", "drafter=draft_verify", f"run.dir={tmp_path}"])
    assert "another run" in capsys.readouterr().err


def test_a_sweep_over_the_drafter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "-m", "drafter=draft_verify", "train.lr=1e-3,1e-4"])
    assert "nothing to train" in capsys.readouterr().err


SHORT = [
    "target=tiny", "drafter.search.trials=5", "drafter.search.contexts=[8,24]",
    "drafter.search.prompts=1", "drafter.search.tokens=8", "eval.limit=2", "eval.max_new_tokens=10",
    "eval.warmup=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short search by the command line, whose first candidate is given."""
    folder = tmp_path_factory.mktemp("search") / "dv"
    given = ["drafter.skip_attention=[5,2]", "drafter.skip_mlp=[3]"]
    assert main(["train", "drafter=draft_verify", f"run.dir={folder}", *SHORT, *given]) == 0
    return folder


def test_a_search_measures_what_it_has_found(run_folder: Path) -> None:
    lines = [json.loads(line) for line in (run_folder / LOG).read_text().splitlines()]
    assert (lines[1]["skip_attention"], lines[1]["skip_mlp"]) == ([2, 5], [3])
    assert len(lines) == 6
    report = json.loads((run_folder / "eval" / "eval.json").read_text())
    found = read_found(run_folder)
    assert {name: report[name] for name in found["drafter"]} == found["drafter"]
    assert report["exact"] is True
    assert report["confidence"] == "adaptive"
    assert report["depth"] == 10
    manifest = json.loads((run_folder / "manifest.json").read_text())
    assert manifest["config"]["drafter"]["name"] == "draft_verify"


def test_the_run_decodes_with_what_was_found(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_found(run_folder)["drafter"]
    cfg = load_run(run_folder, []).drafter
    assert isinstance(cfg, SearchedConfig)
    assert cfg.found_settings() == found
    decoder = Decoder.from_run(run_folder)
    assert isinstance(decoder.drafter, DraftVerify)
    assert decoder.drafter.cfg == cfg
    plain = decoder.generate([11, 12, 13] * 4, 12, policy="plain")
    assert decoder.generate([11, 12, 13] * 4, 12).output_ids == plain.output_ids
    few = ["eval.limit=1", "eval.max_new_tokens=6", "eval.warmup=0", "eval.out=again"]
    assert main(["eval", f"run.dir={run_folder}", *few]) == 0
    assert f"skip_attention {found['skip_attention']}" in capsys.readouterr().out
    policy = decoder._policy(GenerationSettings.of({}))
    assert isinstance(policy, Chain)
    assert (policy.depth, type(policy.confidence)) == (cfg.depths, AdaptiveConfidence)
    assert main(["report", f"run.dir={run_folder}"]) == 0
    assert "speed of the candidates" in (run_folder / "report.html").read_text()
    figure, table = search_parts(read_run_files(run_folder))
    assert isinstance(figure, Figure)
    assert isinstance(table, Table)
    shown = [[cell.text for cell in row] for row in table.rows]
    best = read_found(run_folder)["finalists"]
    assert [row[2] for row in shown] == [f"{one['speedup']:.2f}x" for one in best]
    for row, one in zip(shown, best, strict=True):
        lists = ([int(n) for n in re.findall(r"\d+", text)] for text in row[:2])
        assert [*lists] == [one["skip_attention"], one["skip_mlp"]]
    (run_folder / "found.json").rename(run_folder / "aside")
    try:
        *_, note = search_parts(read_run_files(run_folder))
        assert isinstance(note, Note)
        assert "has not finished" in note.text
    finally:
        (run_folder / "aside").rename(run_folder / "found.json")


def test_the_same_command_continues_with_more_candidates(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for word in SHORT if "trials" not in word]
    given = ["drafter.skip_attention=[5,2]", "drafter.skip_mlp=[3]", "train.quick_eval=false"]
    more = ["drafter.search.trials=6", *given]
    assert main(["train", "drafter=draft_verify", f"run.dir={run_folder}", *words, *more]) == 0
    assert "5 candidates were measured before; 1 to measure" in capsys.readouterr().out
    assert read_found(run_folder)["candidates"] == 6
    before = (run_folder / "found.json").read_bytes()
    assert main(["train", "drafter=draft_verify", f"run.dir={run_folder}", *words, *more]) == 0
    assert "is finished: 6 candidates. To measure it: outrider eval" in capsys.readouterr().out
    assert (run_folder / "found.json").read_bytes() == before
    more = [word for word in more if "quick_eval" not in word]  # stopped before its report
    report = run_folder / "eval" / "eval.json"
    changed = report.stat().st_mtime_ns
    for is_measured in (True, False):
        assert main(["train", "drafter=draft_verify", f"run.dir={run_folder}", *words, *more]) == 0
        assert (report.stat().st_mtime_ns > changed) == is_measured
        changed = report.stat().st_mtime_ns


@pytest.mark.parametrize("verb", ["plan", "ranks", "publish"])
def test_commands_for_weights_say_that_the_run_has_none(
    verb: str, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([verb, f"run.dir={run_folder}"])
    assert "needs a drafter with weights" in capsys.readouterr().err


def test_a_damaged_result_is_named(run_folder: Path) -> None:
    file = run_folder / "found.json"
    good = file.read_text()
    wrong: list[Callable[[dict[str, Any]], object]] = [
        lambda content: content["drafter"].update(skip_mlp="all"),
        lambda content: content["drafter"].update(skip_everything=[1]),
        lambda content: content.pop("drafter"),
    ]
    try:
        for change in wrong:
            content = json.loads(good)
            change(content)
            file.write_text(json.dumps(content))
            with pytest.raises((CorruptFile, ConfigError), match=r"skip_|drafter"):
                load_run(run_folder, [])
    finally:
        file.write_text(good)
