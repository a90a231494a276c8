"""What may be a hub id, and a hub that cannot be reached."""

import os
import socket
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console

from outrider.conf import hub
from outrider.conf.errors import ConfigError
from outrider.conf.schema import TargetConfig
from outrider.eval.hub import upload
from outrider.models.drafting.causal_lm import load_lm
from outrider.models.target import load
from tests import fake_hub


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-8B", "a/b.c_d-e", "me/draft-1.0"])
def test_names_of_models_may_be_hub_ids(name: str) -> None:
    hub.require_folder_or_id("target.path", name)


@pytest.mark.parametrize(
    "name", ["nowhere/at/all", "./here", "/there", "~/home", "a b", "a/", "/a", "a--b", "a..b", "",
             "a/b?c", "a/-b", "-a", "a" * 200],
)  # fmt: skip
def test_what_can_be_no_hub_id_is_refused_with_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match="There is no such folder") as refused:
        hub.require_folder_or_id("target.path", name)
    assert refused.value.key == "target.path"


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint at which no one listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    fake_hub.as_if_not_asked(monkeypatch)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unreachable")
def test_a_hub_that_does_not_answer_is_not_waited_for() -> None:
    """Its client would retry for half a minute."""
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"nowhere.*\n.*couldn't connect"):
        load_lm("nowhere")
    with pytest.raises(ConfigError, match=r"nowhere.*\n.*couldn't connect"):
        load.read_shape(TargetConfig(name="hf", path="nowhere"))
    assert time.monotonic() - start < 10


@pytest.mark.usefixtures("unreachable")
def test_the_hub_is_asked_again_once_it_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    hub.use_cache_if_unreachable()
    assert constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    monkeypatch.setattr(hub, "_answers", lambda endpoint: True)
    hub.use_cache_if_unreachable()
    assert not constants.HF_HUB_OFFLINE
    assert os.environ["HF_HUB_OFFLINE"] == "0"


@pytest.mark.usefixtures("unreachable")
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("it was asked"))
    hub.use_cache_if_unreachable()
    assert constants.HF_HUB_OFFLINE


def test_an_upload_asks_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A target whose hub did not answer may have been loaded before in the same process."""
    with fake_hub.running(monkeypatch) as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub, "_missed", {"http://other"})
        (tmp_path / "config.json").write_text("{}")
        upload(tmp_path, "me/draft", private=True, console=Console(quiet=True))
        assert running.repos["me/draft"]["files"]
