"""Whether an upload to the Hub would work: asked before hours of training, and never with the token in a message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_rlx.hub import HubError, one_line, shareable_cause, xet_problem
from hf_rlx.preflight.report import Finding

_LOGIN = (
    "log in with `hf auth login` (in a notebook huggingface_hub.notebook_login()), set HF_TOKEN, or train without "
    "push_to_hub"
)
_WRITE = 'make a token of the type "write" at {endpoint}/settings/tokens and log in with it'


def check_login(token: str | None = None) -> dict[str, Any]:
    """Who the token belongs to; one request.

    Args:
        token: None: the one that is logged in.

    Returns:
        what the Hub says of the account.

    Raises:
        HubError: no token, no network, or a token that the Hub refuses or that may only read.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    used = token or get_token()
    if used is None:
        raise HubError(f"pushing to {constants.ENDPOINT} needs a token, and there is none; {_LOGIN}")
    try:
        known = HfApi().whoami(token=used)
    except LocalTokenNotFoundError as error:
        raise HubError(f"pushing to {constants.ENDPOINT} needs a token, and there is none; {_LOGIN}") from error
    except OfflineModeIsEnabled as error:
        raise HubError(
            "push_to_hub=True, but HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it before Python starts, "
            "or train without push_to_hub and call trainer.push_to_hub() later"
        ) from shareable_cause(error, used)
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            told = one_line(str(error), used)
            raise HubError(
                f"{constants.ENDPOINT} refuses the token ({status}: {told}); {_LOGIN}"
            ) from shareable_cause(error, used)
        if status not in (404, 429):  # no such question there, or asked too often: creating the repository tells
            raise HubError(
                f"{constants.ENDPOINT} answers {status}: {one_line(str(error), used)}; try later, or train without "
                "push_to_hub and call trainer.push_to_hub() at the end"
            ) from shareable_cause(error, used)
        return {}
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}", used)
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached ({why}); check the network and HF_ENDPOINT, or train without "
            "push_to_hub and call trainer.push_to_hub() later"
        ) from shareable_cause(error, used)
    if _reads_only(known):
        raise HubError(
            f"the token of {known.get('name')!r} may only read; {_WRITE.format(endpoint=constants.ENDPOINT)}"
        )
    return known


def refused(error: Any, repo: str, token: str | None = None) -> HubError:
    """What an HTTP error of the Hub about a repository means.

    Args:
        error: a `HfHubHTTPError`. repo: name of the repository. token: kept out of the message.
    """
    from huggingface_hub import constants

    status = error.response.status_code
    told = one_line(str(error), token)
    if status in (401, 403):
        fix = f"{_WRITE.format(endpoint=constants.ENDPOINT)}, or set hub_model_id to a repository of your own"
        return HubError(f"no permission to write {repo!r} at {constants.ENDPOINT} ({status}: {told}); {fix}")
    return HubError(f"{constants.ENDPOINT} does not make the repository {repo!r} ({status}: {told})")


def check_repository(repo: str, token: str | None = None) -> None:
    """That a repository which is there may be written, and its server takes files the way this client sends them.

    Args:
        repo: "name/repository". token: None: the one that is logged in.

    Raises:
        HubError: no permission; or xet is on and the server has none: the client would try for minutes, silently.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # Servers of others may lack this question, and older clients the argument.
        HfApi().auth_check(repo, token=token, write=True)
    except HfHubHTTPError as error:
        if error.response.status_code == 403:
            raise refused(error, repo, token) from shareable_cause(error, token)
    except TypeError:
        pass
    if (problem := xet_problem(repo, token)) is not None:
        raise HubError(problem)


def hub_findings(push: bool = False, repo: str | None = None, token: str | None = None) -> Iterator[Finding]:
    """Login and, where something is to be pushed, permission. Without `push` nothing is asked of the network.

    Args:
        push: whether the run pushes. repo: where to; None: not known yet. token: None: the one that is logged in.
    """
    from huggingface_hub import constants, get_token

    what = "Hub"
    if not push:
        there = (token or get_token()) is not None
        found = "a token is there (not tried)" if there else "not logged in"
        yield Finding(what, found + "; only pushing and gated models need it")
        return
    try:
        known = check_login(token)
        _check_namespace(known, repo)
        if repo is not None and "/" in repo and _exists(repo, token):
            check_repository(repo, token)
        elif (problem := xet_problem()) is not None:
            found, _, fix = problem.partition("; ")
            yield Finding("xet", found, "note", fix)
    except HubError as error:
        found, _, fix = str(error).partition("; ")
        yield Finding(what, found, "problem", fix)
        return
    name = known.get("name", "somebody")
    yield Finding(what, f"logged in as {name} at {constants.ENDPOINT}, with permission to write")


def _exists(repo: str, token: str | None) -> bool:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().repo_exists(repo, token=token)
    except HfHubHTTPError as error:
        if error.response.status_code == 404:
            return False
        raise refused(error, repo, token) from shareable_cause(error, token)


def _check_namespace(known: dict[str, Any], repo: str | None) -> None:
    """That a repository's owner is the account or one of its organisations, and the token covers it."""
    if not known or repo is None or "/" not in repo:
        return
    owner = repo.partition("/")[0]
    orgs = {org.get("name"): org for org in known.get("orgs") or [] if isinstance(org, dict)}
    if owner != known.get("name") and owner not in orgs:
        fix = "set hub_model_id to a repository of your own, or ask for membership"
        raise HubError(f"{known.get('name')!r} is not a member of {owner!r}; {fix}")
    if orgs.get(owner, {}).get("roleInOrg") == "read":
        raise HubError(f"{known.get('name')!r} may only read in {owner!r}; ask for the role contributor or write")
    scoped = _fine_grained(known)
    if scoped is not None and not any(
        "repo.write" in (entry.get("permissions") or ())
        and (entry.get("entity") or {}).get("name") in (owner, repo, None)
        for entry in scoped
    ):
        raise HubError(f"the token may not write {repo!r}; give it that permission in the settings of your tokens")


def _access(known: dict[str, Any]) -> dict[str, Any]:
    token = (known.get("auth") or {}).get("accessToken")
    return token if isinstance(token, dict) else {}


def _fine_grained(known: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The scopes of a fine-grained token; None: it is another kind."""
    rights = _access(known).get("fineGrained")
    return [e for e in rights.get("scoped") or [] if isinstance(e, dict)] if isinstance(rights, dict) else None


def _reads_only(known: dict[str, Any]) -> bool:
    if _access(known).get("role") == "read":
        return True
    scoped = _fine_grained(known)
    return scoped is not None and not any("repo.write" in (entry.get("permissions") or ()) for entry in scoped)
