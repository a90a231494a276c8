"""Help and wrong settings need neither torch nor transformers, whose import takes seconds."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from outrider.conf.compose import choices, compose, to_container
from outrider.conf.schema import UntrainedConfig
from outrider.conf.searched import SearchedConfig
from outrider.models.drafters import drafter_module
from outrider.train.settings import is_searched, is_untrained

COMMANDS = {  # command -> a part of what it prints
    "--help": "VERB",
    "--version": ".",
    "train --help": "train.lr",
    "train --help all": "train.lr",
    "eval --help": "eval.limit",
    "publish --help": "publish.repo",
    "trian": "There is no such verb",
    "train train.lrr=1": "Did you mean train.lr?",
    "train +train.lrr=1": "Did you mean train.lr?",
    "train lrr=1": "Did you mean train.lr?",
    "train drafter.foo=1": "drafter: activation, attention",
    "train +drafter.foo=1": "drafter: activation, attention",
    "train drafter=eagel": "no such choice",
    "train drafter=suffix": "nothing to train",
    "train train.lr=abc": "This key expects a number",
    "train drafter.depths=abc": "This key expects a whole number",
    "train drafter=eagle drafter.bias=2": "This key expects true or false",
    "train plan.depths=[1]": "It belongs to outrider plan",
    "train sweep.trials=3": "It belongs to outrider train -m",
    "train -m train.lrr=1,2": "Did you mean train.lr?",
    "train -m sweep=search train.lrr=1": "Did you mean train.lr?",
    "prepare data.generate.smples=1": "Did you mean data.generate.samples?",
    "record record.stats=int8": "Did you mean record.states?",
    "doctor jsn=x": "Did you mean json?",
    "doctor train.lrr=1": "Did you mean train.lr?",
    "advise stepps=3": "Did you mean advise.steps?",
    "launch cluster.foo=1": "cluster: by, cores",
    "launch train.lrr=1": "Did you mean train.lr?",
    "memory memory.gpus=0": "The value must be >= 1",
    "memory train.lr=abc": "This key expects a number",
    "eval train.lr=1": "eval only measures it",
    "eval evl.limit=1": "Did you mean eval.limit?",
    "eval drafter=eagel target=tiny": "no drafter of this name",
    "eval drafter=a/b/c target=tiny": "no hub id",
    "eval drafter=suffix target=tiny drafter.foo=1 run.dir=x": "drafter: answers",
    "eval": "Add run.dir=runs/<name>",
    "chat eval.limt=3": "eval: drafter, max_new_tokens.",
    "chat eval.max_new_tokns=3": "Did you mean eval.max_new_tokens?",
    "plan decode.temprature=1": "Did you mean decode.temperature?",
    "plan depths=[1]": "Did you mean plan.depths?",
    "publish formt=vllm": "Did you mean format?",
    "ranks eval.limit=3": "ranks does not use this key",
    "report run.dir=x foo=1": "There is no such key",
    "compare": "compare needs run folders",
}

SCRIPT = """
import contextlib, io, sys
from outrider.launch import cli

for command, part in eval(sys.argv[1]).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        with contextlib.suppress(SystemExit):
            cli.main(command.split())
    assert part in out.getvalue(), (command, out.getvalue())
    heavy = {"torch", "transformers", "accelerate", "datasets"} & sys.modules.keys()
    assert not heavy, (command, heavy)
print("all")
"""


def test_help_and_wrong_settings_import_no_torch(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SCRIPT, repr(COMMANDS)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "all\n", done.stderr


@pytest.mark.parametrize("name", choices("drafter"))
def test_the_yaml_file_of_a_drafter_says_what_its_class_does(name: str) -> None:
    """Where its default is a number, or true or false, a key has exactly that type, or null."""
    schema = drafter_module(name).Config
    assert is_untrained(name) == issubclass(schema, UntrainedConfig)
    assert is_searched(name) == issubclass(schema, SearchedConfig)
    values = to_container(compose([], f"drafter/{name}"))["drafter"]
    assert values.keys() == {field.name for field in dataclasses.fields(schema)}
    for key, value in values.items():
        if isinstance(value, bool | int | float):
            kind = get_type_hints(schema)[key]
            assert {*(get_args(kind) or (kind,))} <= {type(value), type(None)}, key
