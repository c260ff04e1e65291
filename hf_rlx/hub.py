"""Uploads to the Hub: one commit, no secret in it, and errors that say what to do next.

before      every file is searched for tokens; a public repository is refused where `private=True` was asked for
the commit  new files and the removal of what an earlier push left: all of it, or nothing
afterwards  what had arrived of an upload that broke off is not sent again: calling once more resumes it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session

from hf_rlx.secrets import SecretFoundError, mask_text, refuse_secrets

logger = logging.getLogger(__name__)

_PUBLIC_HUBS = ("https://huggingface.co", "https://hub-ci.huggingface.co")
_SECONDS = 10  # that the question for xet may take
RESUME = (
    "Nothing was changed in the repository, and nothing is lost here. Push once more: what had arrived is not sent "
    "again"
)


class HubError(OSError):
    """A push or a download that failed; the message names the repository and the next step, never a token."""


def upload(
    folder: Path,
    files: Sequence[Path],
    repo_id: str,
    *,
    repo_type: str = "model",
    message: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    path_in_repo: str | None = None,
    stale: Callable[[Sequence[str]], Iterable[str]] | None = None,
    secrets: Iterable[str | None] = (),
    in_background: bool = False,
    doing: str | None = None,
) -> Any:
    """Send files to a repository in one commit; it and the branch are made where they are missing.

    Args:
        folder: the files' names in the repository are relative to it.
        files: below `folder`.
        repo_id: `"name"` (of the account that the token is of) or `"owner/name"`.
        private: of a new repository; True also refuses an existing public one.
        token: default: `hf auth login` or `HF_TOKEN`.
        revision: branch, default `main`.
        create_pr: open a pull request; the repository must exist.
        path_in_repo: folder there.
        stale: of the names in the repository (below `path_in_repo`), those that this commit removes.
        secrets: further values that must not be in a file.
        in_background: return a future.
        doing: what errors call it, default "pushing FOLDER to REPO".

    Returns:
        `CommitInfo` of huggingface_hub, or a future of it.

    Raises:
        SecretFoundError: a file holds a secret; nothing was uploaded.
        HubError: not logged in, no permission, or the upload broke off; nothing was changed in the repository.
        ValueError: `repo_id` is none, or the card's metadata is not valid.
    """
    refuse_secrets(folder, [*secrets, token], files)
    doing = doing or f"pushing {folder} to {'' if repo_type == 'model' else f'{repo_type}s/'}{repo_id}"

    def send() -> Any:
        with telling(doing, token, RESUME):
            whole_id = prepare(repo_id, repo_type, private, token, revision, create_pr)
            removed: Iterable[str] = []
            if stale is not None:
                removed = stale(_there(whole_id, repo_type, token, revision, path_in_repo))
            return api().upload_folder(
                repo_id=whole_id,
                repo_type=repo_type,
                folder_path=folder,
                path_in_repo=path_in_repo,
                allow_patterns=[escape(path.relative_to(folder).as_posix()) for path in files],
                delete_patterns=[escape(name) for name in removed] or None,
                commit_message=message,
                token=token,
                revision=revision,
                create_pr=create_pr,
            )

    return api().run_as_future(send) if in_background else send()


def prepare(
    repo_id: str,
    repo_type: str = "model",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Make the repository and the branch where they are missing; returns the id with its owner. See `upload`.

    Raises:
        HubError: not logged in; the repository is public and must not be; or its storage does not work with xet.
    """
    repo_id = owned(repo_id, token)
    if not create_pr:
        url = api().create_repo(repo_id, repo_type=repo_type, private=private, token=token, exist_ok=True)
        repo_id = url.repo_id
    if private and not api().repo_info(repo_id, repo_type=repo_type, token=token).private:
        raise HubError(
            f"{repo_id} exists and is public, so private=True cannot hold; make it private in its settings, or "
            "choose another name"
        )
    if (problem := xet_problem(repo_id, token, repo_type)) is not None:
        raise HubError(problem)
    if revision not in (None, constants.DEFAULT_REVISION) and not str(revision).startswith("refs/"):
        api().create_branch(repo_id, repo_type=repo_type, branch=str(revision), token=token, exist_ok=True)
    return repo_id


def owned(repo_id: str, token: str | None = None) -> str:
    """`repo_id` with its owner: by default the account that the token is of.

    Raises:
        HubError: nobody is logged in, or the token is not known.
    """
    if token is None and get_token() is None:
        raise HubError("nobody is logged in to the Hub: run `hf auth login`, set HF_TOKEN, or pass token=")
    if "/" in repo_id:
        return repo_id
    with telling("asking the Hub whose token it is", token):
        return f"{api().whoami(token=token)['name']}/{repo_id}"


def unreachable(error: BaseException) -> bool:
    """Whether an error of the Hub's client says that it got no answer, or one of a server in trouble. Transport errors
    are known by what the HTTP libraries that the client may use call them."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status >= 500 or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


@contextmanager
def telling(doing: str, token: str | bool | None = None, then: str = "Try again") -> Iterator[None]:
    """Errors of the Hub's client inside the block as `HubError`s that say what to do.

    Args:
        doing: such as `"pushing runs/x to me/x"`. token: made unreadable wherever the error holds it.
        then: the next step where it is neither the token nor the name that is wrong.
    """
    try:
        yield
    except (HubError, SecretFoundError):
        raise
    except Exception as error:
        chain = list(_chain(error))
        if not isinstance(error, OSError) and not any(
            unreachable(link) or hasattr(link, "response") for link in chain
        ):
            raise
        said = next((link for link in chain if hasattr(link, "response")), chain[-1])  # the server, if it spoke
        status = said.response.status_code if hasattr(said, "response") else None
        hidden = [value for value in (token, get_token()) if isinstance(value, str) and value]
        shown = " ".join(mask_text(str(said)).split())
        for value in hidden:
            shown = shown.replace(value, "<HUB_TOKEN>")
        what = f"{doing} failed: {type(said).__name__}: {shown}. {_next_step(said, status) or then}"
        raise HubError(what) from shareable_cause(error, *hidden)


def shareable_cause(error: BaseException, *secrets: str | None) -> BaseException | None:
    """`error`, for `raise ... from`; None where it, or what it came from, shows a token or one of `secrets`."""
    link: BaseException | None = error
    while link is not None:
        text = str(link)
        if mask_text(text) != text or any(value in text for value in secrets if value):
            return None
        link = link.__cause__ or link.__context__
    return error


@cache
def api() -> HfApi:
    """One client: its background uploads run one after the other, and do not commit against each other."""
    return HfApi(library_name="hf_rlx")


def _there(repo_id: str, repo_type: str, token: str | None, revision: str | None, below: str | None) -> list[str]:
    """Names in the repository below a folder, relative to it."""
    names = api().list_repo_files(repo_id, repo_type=repo_type, revision=revision, token=token)
    start = f"{below.strip('/')}/" if below else ""
    return [name.removeprefix(start) for name in names if name.startswith(start)]


def xet_problem(repo_id: str | None = None, token: str | None = None, repo_type: str = "model") -> str | None:
    """Whether uploads would go through xet to a server that has none, whose client retries for more than a minute
    without a word: what is wrong and, after "; ", the fix.

    Args:
        repo_id: of a repository that is there, to ask the server by; None: nothing is asked.
        token: None: the one that is logged in.
    """
    uses_xet = not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
    if not uses_xet or constants.ENDPOINT in _PUBLIC_HUBS:
        return None
    fix = "set HF_HUB_DISABLE_XET=1 before Python starts, and files go by the ordinary way"
    if repo_id is None:
        return f"the server {constants.ENDPOINT} may not have xet, which uploads would hang on; {fix}"
    url = f"{constants.ENDPOINT}/api/{repo_type}s/{repo_id}/xet-write-token/main"
    try:
        answer = get_session().get(url, headers=build_hf_headers(token=token), timeout=_SECONDS)
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}", token)
        return f"the server {constants.ENDPOINT} does not answer the question for xet ({why}); {fix}"
    if "x-xet-cas-url" in {name.lower() for name in answer.headers}:
        return None
    return f"the server {constants.ENDPOINT} has no xet ({answer.status_code}), and uploads would hang on it; {fix}"


def one_line(text: str, token: str | None = None) -> str:
    """One line without any token, for a message."""
    if token:
        text = text.replace(token, "<HUB_TOKEN>")
    return mask_text(" ".join(text.split()))[:300]


def _chain(error: BaseException | None) -> Iterator[Any]:
    """An exception and what it was raised from, the cause last."""
    while error is not None:
        yield error
        error = error.__cause__


def _next_step(error: Exception, status: int | None) -> str | None:
    if isinstance(error, RepositoryNotFoundError):  # to nobody in particular the Hub answers 401
        status = 404
    if status == 401:
        return "The Hub does not know the token, or it has expired: run `hf auth login` again"
    if status == 403:
        return "The token may not do this: it needs write access to that account, or the name has another owner"
    if status == 404:
        return "There is no such repository or revision, or it is private and the token may not read it"
    return None


__all__ = [
    "RESUME",
    "HubError",
    "api",
    "one_line",
    "owned",
    "prepare",
    "shareable_cause",
    "telling",
    "unreachable",
    "upload",
    "xet_problem",
]
