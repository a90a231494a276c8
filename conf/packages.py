"""What pyproject.toml says of the project: its address, and the extras of optional packages."""

import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata

from outrider.conf.errors import ConfigError
from outrider.conf.schema import Config

EXTRAS = {  # package: extra
    "deepspeed": "deepspeed",
    "gguf": "smollm2",
    "openai": "endpoint",
    "optuna": "search",
    "starlette": "serve",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
    "uvicorn": "serve",
    "wandb": "wandb",
}


def project_url() -> str | None:
    """Return the first address of `[project.urls]`; None as long as there is none."""
    with suppress(PackageNotFoundError):
        for line in metadata("outrider").get_all("Project-URL") or ():
            return str(line.partition(", ")[2])
    return None


def install_command(package: str) -> str:
    """Return the command that adds an optional package to an installation."""
    return f"pip install 'outrider[{EXTRAS[package]}]'"


def require_package(package: str, key: str, value: object) -> None:
    """Raise a `ConfigError` for a key that needs an optional package, if that is not installed."""
    if importlib.util.find_spec(package) is None:
        why = f"It needs the package {package}, which is not installed."
        raise ConfigError(key, value, why, f"Install it: {install_command(package)}")


def require_packages(config: Config) -> None:
    """Require the optional packages of a training run: of its launch mode and its trackers."""
    launch, train = config.launch.name, config.train
    if launch.startswith("zero"):
        require_package("deepspeed", "launch", launch)
    if train.wandb.mode != "disabled":
        require_package("wandb", "train.wandb.mode", train.wandb.mode)
    if train.tensorboard:
        require_package("tensorboard", "train.tensorboard", True)
