"""Names of models and data sets on the Hub, looked at before a client asks for them file by file, again and again."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_rlx.cli import UsageError
from hf_rlx.hub import api, unreachable
from hf_rlx.models.loading import SMOLLM2, TINY, weights_note

_SECONDS = 10.0  # that the Hub may take to answer


def check_model(name: str, loading: dict[str, Any] | None = None) -> None:
    """Refuse a model that is nowhere: no folder, not in the cache, not at the Hub.

    Args:
        name: as of `--model`. loading: arguments of `from_pretrained`, of which those that say where it is count.

    Raises:
        UsageError: the name is a folder's, which is not there. FileNotFoundError: a Hub id that is not there, or that
            nobody can look up; the message says where was looked and what to do.
    """
    path = Path(name).expanduser()
    first, _, rest = name.partition("/")
    like_a_folder = name.startswith((".", "/", "~")) or "/" in rest or (rest and Path(first).is_dir())
    if like_a_folder and not path.exists():
        raise UsageError(f"--model: there is no folder {name}")
    if path.exists() or name in (TINY, SMOLLM2) or weights_note(name) is not None:
        return
    near = difflib.get_close_matches(name, (TINY, SMOLLM2), n=1, cutoff=0.7)
    hint = f"Did you mean {near[0]!r}?" if near else "`--model tiny` is bundled and needs no network."
    _check_id(name, hint)
    loading = loading or {}
    revision, cache = loading.get("revision"), loading.get("cache_dir")
    below = f"{loading['subfolder']}/" if loading.get("subfolder") else ""
    for file in ("config.json", "adapter_config.json", "role.json"):
        if isinstance(try_to_load_from_cache(name, below + file, cache_dir=cache, revision=revision), str):
            return
    _look_up(name, "model", cache or constants.HF_HUB_CACHE, revision, loading.get("token"), hint)


def check_dataset(name: str, known: str) -> None:
    """Refuse a data set that is neither in the cache nor at the Hub.

    Args:
        name: a Hub id. known: what else could be meant, for the message.

    Raises:
        FileNotFoundError: see `check_model`.
    """
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    *owner, last = name.split("/")
    folder = "___".join([*owner, datasets.naming.camelcase_to_snakecase(last)])  # as the cache spells it
    if Path(name).exists() or (cache / folder).is_dir():
        return
    _check_id(name, known)
    _look_up(name, "dataset", str(cache), None, None, known)


def _check_id(name: str, hint: str) -> None:
    """Raises: FileNotFoundError where a name cannot be one at the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise FileNotFoundError(f"there is no folder {name!r}, and a Hub id is written owner/name. {hint}") from None


def _look_up(
    name: str, kind: Literal["model", "dataset"], cache: str, revision: str | None, token: Any, hint: str
) -> None:
    """Ask the Hub once; anything but a clear answer that it is not there is left to the client."""
    nowhere = f"the {kind} {name!r} is not on this machine: no folder is called so, nor is it in the cache ({cache})"
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(
            f"{nowhere}. The Hub was not asked, as HF_HUB_OFFLINE is set; unset it to download. {hint}"
        )
    ask: Any = api().model_info if kind == "model" else api().dataset_info
    try:
        ask(name, revision=revision, token=token, timeout=_SECONDS)
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"there is no {kind} {name!r}, neither here nor at {constants.ENDPOINT}; a private or gated one needs "
            f"`hf auth login`. {hint}"
        ) from None
    except Exception as error:
        if unreachable(error):
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FileNotFoundError(f"{nowhere}; and {constants.ENDPOINT} gives no answer ({why}). {hint}") from error
        return  # whatever it is, the client meets it again where it loads, and says it whole


__all__ = ["check_dataset", "check_model"]
