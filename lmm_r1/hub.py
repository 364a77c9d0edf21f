"""The Hugging Face hub: whether it can be reached, downloads and uploads."""

import functools
from collections.abc import Sequence
from pathlib import Path

from lmm_r1.errors import UserError

TIMEOUT_SECONDS = 5.0


@functools.cache
def is_reachable() -> bool:
    """Return whether the hub answers; it is asked once. If it does not, Hugging Face's libraries use their caches only.

    Otherwise they would retry for half a minute for each file that is not in the cache.
    """
    import httpx
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
    except httpx.TransportError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True


def dataset_folder(dataset: str, *, patterns: Sequence[str], revision: str | None) -> Path:
    """Download files of a dataset, or find them in the hub's cache, and return their folder, named after its commit.

    An interrupted download continues where it stopped.

    Args:
        patterns: which files, as `fnmatch` reads them.

    Raises:
        UserError: the hub cannot be reached and the cache holds nothing, or the hub refuses.
    """
    import httpx
    import huggingface_hub

    is_reachable()
    try:
        folder = huggingface_hub.snapshot_download(
            dataset, repo_type="dataset", revision=revision, allow_patterns=list(patterns)
        )
    # The hub's own errors are those of HTTP, of files or of values.
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{dataset}: cannot be downloaded from the Hugging Face hub ({reason})") from error
    return Path(folder)


def check_uploadable(repo: str, *, flag: str) -> None:
    """Raise UserError if an upload to `repo` cannot succeed: a bad name, no connection, nobody logged in."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        huggingface_hub.utils.validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{flag} {repo}: not the name of a repository ({error}); write OWNER/NAME") from error
    if not is_reachable():
        raise UserError(
            f"{flag} {repo}: the Hugging Face hub cannot be reached from here; leave the flag out and upload the folder "
            "from a machine that reaches it"
        )
    if huggingface_hub.get_token() is None:
        raise UserError(
            f"{flag} {repo}: nobody is logged in to the Hugging Face hub; run `hf auth login` or set HF_TOKEN"
        )


def upload(folder: Path, repo: str, *, private: bool, flag: str, files: list[str] | None = None) -> str:
    """Upload a checkpoint folder to a repository, which is created if necessary, and return its address.

    Args:
        files: paths in the folder, in which `*` matches any text; None takes all of them.

    Raises:
        UserError: the hub refuses it, or the connection fails.
    """
    import httpx
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=None if files is None else list(files),
            commit_message=f"Upload {folder.name}",
        )
    # The hub's own errors are those of HTTP, of files or of values.
    except (httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        only = "" if files is None else f" . --include {' '.join(files)}"
        raise UserError(
            f"{flag} {repo}: the upload of {folder} failed ({reason}); upload it with `hf upload {repo} {folder}{only}`"
        ) from error
    return str(address)


def cached_commit(repo: str) -> str | None:
    """Return the commit of a model in the hub's cache by its name; None if the cache does not have it."""
    import huggingface_hub

    try:
        config = huggingface_hub.try_to_load_from_cache(repo, "config.json")
    except ValueError:
        # No name that the hub could have.
        return None
    return Path(config).parent.name if isinstance(config, str) else None
