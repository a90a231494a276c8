"""`outrider publish` and `outrider eval drafter=...` on a run: folder, card, hub, refusals."""

import json
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

from outrider.conf.command_settings import PublishConfig
from outrider.conf.compose import compose, verb_group
from outrider.conf.files import sha256_of
from outrider.conf.schema import to_yaml
from outrider.conf.tensor_files import fingerprint
from outrider.eval.plan.surface import FORMAT as PLAN
from outrider.eval.publish import card
from outrider.eval.publish.reference_outputs import compare_outputs
from outrider.eval.publish.round_trip import RoundTrip
from outrider.launch.cli import main
from outrider.models import drafters, formats
from outrider.models.drafting.vocab import DraftVocab
from outrider.models.formats import native
from outrider.models.formats.eagle3 import Eagle3SGLang
from outrider.models.target.load import TINY, LoadedTarget
from outrider.train.settings import parse
from tests import fake_hub
from tests.runs import config
from tests.test_page import measured

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of its client
SHORT = ["publish.prompts=1", "publish.new_tokens=16"]
METRICS = {
    "tau": 2.5, "tau_95": [2.25, 2.75], "speedup": 1.5, "speedup_95": [1.25, 1.75], "prompts": 3,
    "accept_at": [0.75, 0.5], "cond_at": [0.75, 0.67],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(loaded: LoadedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a drafter, its manifest, two reports and a plan."""
    run = tmp_path_factory.mktemp("run")
    run_config = config(run, "drafter.depths=3")
    (run / "config.yaml").write_text(to_yaml(run_config))
    torch.manual_seed(0)
    vocab = DraftVocab.identity(loaded.target.vocab_size)
    drafter = drafters.build(run_config.drafter, loaded.target, vocab)
    native.save(drafter, run / "drafter", loaded.target, run_config.drafter, {})
    about = measured(depth=2, nodes=2).fields()
    part = about["categories"]["story"] | METRICS
    about |= {
        "exact_note": "all 3 answers equal plain decoding", **METRICS,
        "categories": {"story": part, "a|b *c*": part},
    }  # fmt: skip
    (run / "eval").mkdir()
    for name, owner in (("mine", fingerprint(drafter.state_dict())), ("stale", "other")):
        report = {**about, "fingerprints": {**about["fingerprints"], "drafter": owner}}
        (run / "eval" / f"{name}.json").write_text(json.dumps(report))
    mine = json.loads((run / "eval" / "mine.json").read_text())
    bent = {**mine, "temperature": 1.0, "lossy": True, "verify": "lossy_typical", "tau": 3}
    (run / "eval" / "bent.json").write_text(json.dumps(bent))
    (run / "plan").mkdir()
    row = {"batch": 4, "context": 256, "depth": 3, "width": 1, "nodes": 3, "shape": "chain 3",
           **dict.fromkeys(("draft_ms", "verify_ms", "round_ms", "plain_ms"), 1.0),
           "tau": 2.25, "speedup": 1.75}  # fmt: skip
    plan = {"format": PLAN, "machine": "H100 SXM 80GB", "assumptions": [], "rows": [row],
            "recommended": [row], "warnings": ["It does not *fit*."]}  # fmt: skip
    (run / "plan" / "plan.json").write_text(json.dumps(plan))
    argv = ["/somewhere/cli.py", "train", "drafter=eagle3", "train.lr=1e-3", f"run.dir={run}"]
    (run / "manifest.json").write_text(json.dumps({"argv": argv, "data": {"source": "tiny"}}))
    return run


def publish(run: Path, *words: str) -> int:
    return main(["publish", f"run.dir={run}", *SHORT, *words])


def parts(page: Path) -> tuple[dict[str, Any], str]:
    """Return metadata and text."""
    model_card = ModelCard(page.read_text())
    return model_card.data.to_dict(), model_card.text  # type: ignore[no-untyped-call]


# ---- folder and card -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(run: Path) -> Path:
    """The drafter in every format that supports it."""
    assert publish(run) == 0
    return run / "published"


def test_all_exports_every_supported_format(published: Path) -> None:
    assert {f.name for f in published.iterdir()} == {"native", "sglang", "vllm", "speculators"}
    for folder in published.iterdir():
        files = {"README.md", "config.json", "golden", "golden.json", "verify.py"}
        assert {f.name for f in folder.iterdir()} == {*files, "model.safetensors", "outrider.json"}


def test_published_files_have_no_local_paths(published: Path) -> None:
    """The target is named without its path, and the command has no run folder."""
    for file in published.rglob("*"):
        if file.suffix in (".json", ".md", ".py"):
            text = file.read_text()
            assert str(published.parent) not in text, file
            assert str(TINY) not in text, file
    config = json.loads((published / "speculators" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"


def test_card_has_the_numbers_of_the_run(published: Path) -> None:
    data, text = parts(published / "vllm" / "README.md")
    assert data["license"] == "apache-2.0"
    assert data["library_name"] == "outrider"
    assert {"speculative-decoding", "eagle3", "vllm"} <= set(data["tags"])
    (result,) = data["model-index"][0]["results"]  # none of the lossy report's
    assert "LOSSY (lossy_typical) | 1.0 | 3 | 3.00" in text
    assert {m["type"]: m["value"] for m in result["metrics"]} == {"tau": 2.5, "speedup": 1.5}
    assert "| chain, depth 2 | 0.0 | 3 | 2.50 (2.25-2.75) | 1.50x (1.25-1.75) | float32" in text
    assert "| accept@k | 0.75 | 0.50 |" in text
    assert "| story | 3 | 2.50 | 1.50x |" in text
    assert r"| a\|b \*c\* | 3 | 2.50 | 1.50x |" in text
    assert "left out: stale" in text
    assert "| 4 | 256 | chain 3 | 2.25 | 1.75x |" in text
    assert r"for H100 SXM 80GB: a prediction, not a measurement. It does not \*fit\*." in text
    assert "outrider train drafter=eagle3 train.lr=1e-3\n" in text
    assert '"method": "eagle3", "model": "FOLDER", "num_speculative_tokens": 3}' in text


def test_model_index_has_no_speedup_that_may_be_none_or_noise() -> None:
    """A model-index has no intervals and no remarks, so it keeps tau alone then."""
    report = {"prompts": 3, "tau": 2.0, "speedup": 1.5, "speedup_95": [1.25, 1.75]}
    others: dict[str, dict[str, Any]] = {
        "slower": {"speedup": 0.5, "speedup_95": [0.25, 0.75]},
        "around one": {"speedup_95": [0.75, 2.0]},
        "above tau": {"speedup": 2.5, "speedup_95": [2.25, 2.75]},
        "one prompt": {"speedup_95": None},
        "unknown": {"speedup": None, "speedup_95": None},
    }
    results = card.eval_results(
        {"faster": report, **{n: {**report, **c} for n, c in others.items()}}
    )
    speedups = {r.dataset_config: r.metric_value for r in results if r.metric_type == "speedup"}
    assert speedups == {"faster": 1.5, "slower": 0.5}
    assert [r.metric_value for r in results if r.metric_type == "tau"] == [2.0] * 6


def test_only_folders_written_by_outrider_are_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["format=native", f"publish.out={tmp_path / 'out'}", "publish.license=mit"]
    assert publish(run, *words) == 0
    assert publish(run, *words) == 0
    assert parts(tmp_path / "out" / "README.md")[0]["license"] == "mit"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("text")
    with pytest.raises(SystemExit) as stop:
        publish(run, "format=native", f"publish.out={tmp_path / 'mine'}")
    assert stop.value.code == 2
    assert "was not written by Outrider" in capsys.readouterr().err
    assert [f.name for f in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("fault", ["a weight", "a tap"])
def test_faulty_exporter_publishes_nothing(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    """If one of the formats is faulty, none is published."""
    original = Eagle3SGLang.tensors

    def faulty(self: Eagle3SGLang, *args: Any) -> Any:
        out = original(self, *args)
        if fault == "a weight":
            out["midlayer.mlp.down_proj.weight"] = -9 * out["midlayer.mlp.down_proj.weight"]
        return out

    monkeypatch.setattr(Eagle3SGLang, "tensors", faulty)
    if fault == "a tap":
        monkeypatch.setattr(Eagle3SGLang, "stored_taps", lambda self, *args: (0, 3, 4))
    with pytest.raises(SystemExit) as stop:
        publish(run, f"publish.out={tmp_path / 'out'}")
    assert stop.value.code == 2
    output = capsys.readouterr().err
    assert "Traceback" not in output
    assert "Nothing was published" in output
    cause = {
        "a tap": "and the files (0, 3, 4)",
        "a weight": "of the drafter in the folder differs by",
    }
    assert cause[fault] in output
    assert not any((tmp_path / "out").glob("*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["format=medusa"], "It holds medusa, and this is eagle3"),
        (["format=gguf"], "There is no such format"),
        (["publish.typo=1"], "There is no such key"),
        (["publish.repo=noslash"], "has an owner and a name"),
        (["publish.base_model='x; rm y'"], "has an owner and a name"),
        (["publish.prompts=0"], "must be >= 1"),
        (["train.lr=1"], "The run folder fixes what was trained"),
        (["publish.new_tokens=99999"], "No prompt fits"),
    ],
)
def test_invalid_options_exit_with_a_message(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        publish(run, *words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_unsupported_format_is_refused_before_decoding(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Eagle3SGLang, "refusal_reason", lambda self, *args: "not supported")
    monkeypatch.setattr(RoundTrip, "decode", lambda self, drafter: pytest.fail("decode was called"))
    with pytest.raises(SystemExit) as stop:
        publish(run, "format=sglang")
    assert stop.value.code == 2
    assert "not supported" in capsys.readouterr().err


def test_help_lists_the_keys_of_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    main(["publish", "--help"])
    assert "publish.dry_run" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["native", "sglang"])
def test_verify_recomputes_the_reference_outputs_with_outrider(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    """Negative controls: wrong golden logits with matching hashes, and another target."""
    folder = Path(shutil.copytree(published / word, tmp_path / "out"))
    verify = runpy.run_path(str(folder / "verify.py"))["main"]
    assert verify([str(folder), "--target", "tiny"]) == 0
    assert "checked: golden logits: 3 depths from 3 rows" in capsys.readouterr().out
    other = Path(shutil.copytree(TINY, tmp_path / "other")) / "model.safetensors"
    tensors = load_file(other)
    tensors["model.embed_tokens.weight"] += 0.1
    save_file(tensors, other, {"format": "pt"})
    assert verify([str(folder), "--target", str(tmp_path / "other")]) == 1
    assert "trained for" in capsys.readouterr().out
    file = folder / "golden" / "outputs.safetensors"
    tensors = load_file(file)
    tensors["logits"][1, 1, 1] += 0.1
    save_file(tensors, file, {"format": "pt"})
    golden = json.loads((folder / "golden.json").read_text())
    golden["sha256"]["golden/outputs.safetensors"] = sha256_of(file)
    (folder / "golden.json").write_text(json.dumps(golden))
    assert verify([str(folder)]) == 0
    assert "golden logits not checked: no --target is given" in capsys.readouterr().out
    assert verify([str(folder), "--target", "tiny"]) == 1
    assert "logits of the drafter in the folder differs by" in capsys.readouterr().out


def test_folder_of_the_previous_version_is_read(
    published: Path, tmp_path: Path, loaded: LoadedTarget
) -> None:
    """Its outrider.json does not list the tensors, and its reference outputs are beside them."""
    folder = Path(shutil.copytree(published / "vllm", tmp_path / "out"))
    (folder / "golden" / "outputs.safetensors").rename(folder / "golden.safetensors")
    golden = json.loads((folder / "golden.json").read_text())
    golden["sha256"]["golden.safetensors"] = golden["sha256"].pop("golden/outputs.safetensors")
    (folder / "golden.json").write_text(json.dumps(golden))
    assert runpy.run_path(str(folder / "verify.py"))["check_files"](folder)[0] == []
    drafter, _ = formats.load(folder, loaded.target)
    assert "golden logits" in compare_outputs(folder, drafter, loaded.target)
    content = json.loads((folder / "outrider.json").read_text())
    assert content.pop("tensors")["fc.weight"]["dtype"] == "F32"
    (folder / "outrider.json").write_text(json.dumps(content))
    assert formats.load(folder, loaded.target)[1].name == "eagle3"


# ---- the licence ---------------------------------------------------------------------------------


def licence(*words: str, **publish: str) -> dict[str, Any]:
    keys = [f"publish.{key}={value}" for key, value in publish.items()]
    settings, _ = verb_group(PublishConfig, "publish", keys)
    return card.license_fields(parse(compose(list(words))), settings)


def test_licence_comes_from_the_target(tmp_path: Path) -> None:
    folder = ["target=hf", f"target.path={tmp_path}"]
    assert licence(*folder) == {"license": "unknown"}
    assert licence("target=hf", "target.path=owner/missing") == {"license": "unknown"}
    (tmp_path / "README.md").write_text("no block")
    assert licence(*folder) == {"license": "unknown"}
    block = "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n"
    (tmp_path / "README.md").write_text(block)
    expected = {"license": "other", "license_name": "own", "license_link": "LICENSE"}
    assert licence(*folder) == expected
    assert licence(*folder, license="mit") == {"license": "mit"}
    assert licence("target=smollm2") == {"license": "apache-2.0"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["target=tiny"], None),
        (["target=smollm2"], "HuggingFaceTB/SmolLM2-135M-Instruct"),
        (["target=hf", "target.path=Qwen/Qwen3-8B"], "Qwen/Qwen3-8B"),
        (["target=hf", "target.path=/models/qwen"], None),
    ],
)
def test_base_model_is_a_hub_id_or_none(words: list[str], name: str | None) -> None:
    target = parse(compose(words))
    assert card.base_model(target, PublishConfig()) == name
    assert card.base_model(target, PublishConfig(base_model="a/b")) == "a/b"


# ---- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[fake_hub.Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with fake_hub.running(monkeypatch) as hub:
        yield hub


def upload(run: Path, tmp_path: Path, *words: str) -> int:
    options = ["format=sglang", f"publish.out={tmp_path / 'out'}", "publish.repo=me/draft"]
    return publish(run, *options, *words)


def test_dry_run_lists_the_files_and_sends_no_request(
    run: Path, tmp_path: Path, hub: fake_hub.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upload(run, tmp_path, "publish.dry_run=true") == 0
    output = capsys.readouterr().out
    assert "golden/outputs.safetensors" in output
    assert "not uploaded to me/draft" in output
    assert hub.requests == []


def test_private_upload_then_download_and_measurement(
    run: Path, tmp_path: Path, hub: fake_hub.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert upload(run, tmp_path) == 0
    uploaded = hub.repos["me/draft"]
    assert uploaded["private"]
    out = tmp_path / "out"
    local = {str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file()}
    assert uploaded["files"] == local
    assert b"me/draft" in uploaded["files"]["README.md"]
    words = ["target=tiny", f"run.dir={tmp_path / 'report'}", "eval.limit=1", "eval.warmup=0"]
    assert main(["eval", "drafter=me/draft", *words, "eval.max_new_tokens=8"]) == 0
    report = json.loads((tmp_path / "report" / "eval" / "eval.json").read_text())
    assert report["drafter"] == "eagle3"
    assert report["published"]["format"] == "sglang"
    golden = json.loads(local["golden.json"])
    weights = report["published"]["files"]["model.safetensors"]
    assert weights == golden["sha256"]["model.safetensors"]
    output = capsys.readouterr()
    assert "drafter: me/draft, format sglang: config.json" in output.out
    assert fake_hub.TOKEN not in output.out + output.err


def test_interrupted_upload_resumes(
    run: Path, tmp_path: Path, hub: fake_hub.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuse_after = 1
    with pytest.raises(SystemExit):
        upload(run, tmp_path)
    output = capsys.readouterr()
    assert "me/draft was not uploaded" in output.err
    assert fake_hub.TOKEN not in output.out + output.err
    assert len(hub.sent) == 1
    assert hub.commits == 0, "a partial upload is not visible"
    hub.refuse_after = None
    assert upload(run, tmp_path) == 0
    assert len(hub.sent) == len(set(hub.sent)) == 2, "files on the hub were sent again"
    assert hub.commits == 1


def test_rejected_token_is_not_printed(
    run: Path, tmp_path: Path, hub: fake_hub.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.open = False
    with pytest.raises(SystemExit) as stop:
        upload(run, tmp_path)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert "me/draft was not uploaded" in output.err
    assert fake_hub.TOKEN not in output.out + output.err


def test_private_upload_to_a_public_repository_is_refused(
    run: Path, tmp_path: Path, hub: fake_hub.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["me/draft"] = {"private": False, "files": {}}
    with pytest.raises(SystemExit):
        upload(run, tmp_path)
    assert "is public on the hub" in capsys.readouterr().err
    assert hub.repos["me/draft"]["files"] == {}


# ---- measuring without a run ---------------------------------------------------------------------


def measure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["eval", *words])
    assert stop.value.code == 2
    return str(capsys.readouterr().err)


def test_published_drafter_needs_a_target_and_a_folder(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter, run_dir = f"drafter={published / 'vllm'}", f"run.dir={tmp_path}"
    assert "This drafter needs its target" in measure(capsys, drafter, run_dir)
    assert "needs its own folder" in measure(capsys, drafter, "target=tiny")
    run = f"run.dir={published.parent}"
    assert "not a training run's" in measure(capsys, drafter, "target=tiny", run)
    invalid = ["target=tiny", run_dir, "train.lr=1"]
    assert "train.lr" in measure(capsys, drafter, *invalid)
    assert "no such folder" in measure(capsys, "drafter=a b c", "target=tiny", run_dir)


def test_eval_drafter_is_refused_by_other_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["ranks", "target=tiny", f"run.dir={tmp_path}"], ["train"]):
        with pytest.raises(SystemExit):
            main([*words, "eval.drafter=x"])
        assert "uses the drafter of a run" in capsys.readouterr().err


def test_modified_published_folder_is_refused(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(published / "vllm", tmp_path / "out"))
    weights = load_file(folder / "model.safetensors")
    weights["fc.weight"] += 1
    save_file(weights, folder / "model.safetensors")
    words = [f"drafter={folder}", "target=tiny", f"run.dir={tmp_path / 'report'}"]
    assert "its bytes are not the ones that were written" in measure(capsys, *words)
