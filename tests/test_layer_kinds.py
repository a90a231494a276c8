"""Kinds of layers, missing kernels, the doctor's finding, and the table of families."""

import json
from pathlib import Path

import pytest

from outrider.conf.errors import ConfigError
from outrider.launch.bench.families import families
from outrider.launch.doctor.target import check_family
from outrider.models.target.layer_kinds import layer_kinds, missing_kernels
from outrider.models.target.load import LoadedTarget
from outrider.models.target.target import Target
from tests.families import small_model


def target(family: str) -> Target:
    return Target(small_model(family), name=family)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"attention": 4}),
        ("qwen3_next", {"recurrent": 3, "attention": 1}),
        ("falcon_h1", {"recurrent with attention": 4}),
        ("nemotron_h", {"recurrent": 2, "MLP": 2, "attention": 1}),
        ("mamba", {"recurrent": 4}),
    ],
)
def test_layers_are_counted_by_kind(family: str, kinds: dict[str, int]) -> None:
    assert layer_kinds(target(family)) == kinds


def test_packages_that_are_not_installed_are_named() -> None:
    """None of them is installed with the tests."""
    assert missing_kernels(target("llama")) == []
    assert missing_kernels(target("qwen3_next")) == ["causal-conv1d", "flash-linear-attention"]
    assert missing_kernels(target("bamba")) == ["causal-conv1d", "mamba-ssm"]


def test_doctor_says_what_a_hybrid_supports() -> None:
    found = check_family(LoadedTarget(target("qwen3_next"), None, ""))
    assert found.state == "note"
    for part in ("3 recurrent, 1 attention", "not trees", "layerskip", "slow code"):
        assert part in found.message
    assert "flash-linear-attention" in found.fix


def test_doctor_accepts_attention_families() -> None:
    found = check_family(LoadedTarget(target("llama"), None, ""))
    assert (found.state, found.facts["missing"]) == ("ok", [])
    assert "trees" in found.message


def test_the_table_of_families_is_generated(tmp_path: Path) -> None:
    out = tmp_path / "families.json"
    assert families(["families=llama,lfm2", f"out={out}"]) == 0
    rows = {row["family"]: row for row in json.loads(out.read_text())["rows"]}
    assert {rows["llama"][name] for name in ("train", "chain", "tree", "batch")} == {"yes"}
    assert {rows["lfm2"][name] for name in ("train", "chain", "batch")} == {"yes"}
    assert rows["lfm2"]["tree"] == "refused"
    assert "vllm" in rows["lfm2"]["export"]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such family"):
        families(["families=gpt9"])
