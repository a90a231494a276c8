"""Upload and download of drafters, through huggingface_hub.

The token is that of `hf auth login` or HF_TOKEN; it is removed from error messages. An interrupted
upload continues when the command is repeated: files that the hub has are not sent again.
"""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.tree import Tree

from outrider.conf.errors import RunError
from outrider.conf.hub import HUB_ID, use_cache_if_unreachable
from outrider.conf.shown_text import mask_credentials
from outrider.models import drafters

DRAFTER_FILES = ["*.json", "*.safetensors"]  # what a drafter needs; never a pickle
RETRY = "Log in (hf auth login, or HF_TOKEN) and repeat the command; it continues the upload."


def file_tree(folder: Path, name: str) -> Tree:
    """Return the files of a folder and their sizes for the console."""
    files = sorted(f for f in folder.rglob("*") if f.is_file())
    total = decimal(sum(f.stat().st_size for f in files))
    out = Tree(f"{name}  {total}")
    for file in files:
        out.add(f"{file.relative_to(folder)}  {decimal(file.stat().st_size)}")
    return out


def upload(folder: Path, repo: str, private: bool, console: Console) -> None:
    """Create the repository if needed and upload what it lacks, in one commit.

    Raises:
        RunError: the hub refuses or cannot be reached, or the repository is public and `private`
            is set.
    """
    from huggingface_hub import HfApi

    use_cache_if_unreachable()  # connects again if the hub did not answer before
    api = HfApi(library_name="outrider")
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            message = f"{repo} is public on the hub, and publish.private is true."
            raise RunError(message, "Set publish.private=false, or choose another publish.repo.")
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Drafter trained with Outrider"
        )
    except RunError:
        raise
    except _errors() as error:
        raise RunError(f"{repo} was not uploaded: {without_token(error)}", RETRY) from None
    console.print(f"uploaded: {url}")


def fetch(name: str) -> Path:
    """Return a drafter's folder: a local one, or the downloaded copy of a hub repository.

    Raises:
        RunError: it is neither.
    """
    from huggingface_hub import snapshot_download

    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    others = ", ".join(sorted({*drafters.names()} - {*drafters.trained_names()}))
    fix = f"Use the folder of a drafter, its hub id, or one without weights: {others}."
    if not HUB_ID.fullmatch(name):
        raise RunError(f"{name} is no folder, and can be no hub id.", fix)
    use_cache_if_unreachable()
    try:
        return Path(snapshot_download(name, allow_patterns=DRAFTER_FILES))
    except _errors() as error:
        why = "is no folder, and cannot be downloaded from the hub"
        message = f"{name} {why}: {without_token(error)}"
        raise RunError(message, fix) from None


def without_token(error: Exception) -> str:
    """Return the first line of an error, without the user's token."""
    from huggingface_hub import get_token

    message = mask_credentials((str(error).strip() or type(error).__name__).splitlines()[0])
    token = get_token()
    return message.replace(token, "***") if token else message


def _errors() -> tuple[Any, ...]:
    """Return huggingface_hub's errors that a user can fix; a failed upload is a RuntimeError."""
    from huggingface_hub.errors import HfHubHTTPError

    transport = HfHubHTTPError.__bases__  # of its HTTP library, which depends on the version
    return (*transport, OSError, ValueError, RuntimeError)
