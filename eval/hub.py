"""The model hub, through huggingface_hub: a folder goes up, a drafter comes down.

The token is the one that `hf auth login` keeps, or HF_TOKEN; it is read by huggingface_hub alone,
and what the hub answers is printed without it. An upload that was cut off goes on when the same
command is given again: files that are there are not sent twice.
"""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.tree import Tree

from outrider.conf.errors import RunError

WANTED = ["*.json", "*.safetensors"]  # of a drafter's repository; never a pickle
AGAIN = "Log in (hf auth login, or HF_TOKEN), and give the same command again: it goes on."


def tree(folder: Path, name: str) -> Tree:
    """The files of a folder and their sizes."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    total = decimal(sum(f.stat().st_size for f in files))
    out = Tree(f"{name}  {total}", highlight=False)
    for file in files:
        out.add(f"{file.relative_to(folder)}  {decimal(file.stat().st_size)}")
    return out


def upload(folder: Path, repo: str, private: bool, console: Console) -> None:
    """Make the repository if there is none, and send what it lacks, in one commit.

    Raises:
        RunError: the hub refuses or cannot be reached, or it would be seen by everybody where it
            should be private.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="outrider")
    try:
        place = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            message = f"{repo} is public on the hub, and publish.private is true."
            raise RunError(message, "Set publish.private=false, or choose another publish.repo.")
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Drafter trained with Outrider"
        )
    except RunError:
        raise
    except _errors() as error:
        raise RunError(f"{repo} was not uploaded: {without_token(error)}", AGAIN) from None
    console.print(f"uploaded: {place}", highlight=False)


def fetch(name: str) -> Path:
    """The folder of a drafter: on this machine, or a copy of its repository on the hub.

    Raises:
        RunError: it is neither.
    """
    from huggingface_hub import snapshot_download

    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except _errors() as error:
        message = f"{name} is no folder, and not to be had from the hub: {without_token(error)}"
        raise RunError(message, "Give the folder of a drafter, or its hub id.") from None


def without_token(error: Exception) -> str:
    """What an error says first, the user's token left out."""
    from huggingface_hub import get_token

    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    token = get_token()
    return said.replace(token, "***") if token else said


def _errors() -> tuple[Any, ...]:
    """What huggingface_hub raises where a user can help it; a failed upload is a RuntimeError."""
    from huggingface_hub.errors import HfHubHTTPError

    transport = HfHubHTTPError.__bases__  # of the library it speaks http with, which has changed
    return (*transport, OSError, ValueError, RuntimeError)
