"""A `SharedModel` on the Hub: which files make one, and getting and sending them.

    push      saved as `storage.save` lays it out, with tokenizer and card, in one commit that removes stale roles
    locate    a name, a folder or a Hub id -> where its adapter and roles lie on this machine

Only JSON, tokenizer files and safetensors are downloaded for adapters and roles; pickled weights are refused, as they
can run code when they are loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rlx.hub import HubError, api, owned, telling, unreachable, upload
from hf_rlx.models.loading import HUB_OPTIONS, SMOLLM2, TINY
from hf_rlx.models.reward_role import tokenizer_of
from hf_rlx.secrets import mask_text

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

logger = logging.getLogger(__name__)

ROLE_FILE, HEAD_FILE, ADAPTER_FILE = "role.json", "head.safetensors", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ROLE_FILES = (ADAPTER_FILE, ADAPTER_WEIGHTS, HEAD_FILE, ROLE_FILE)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *("model.safetensors.index.json", ADAPTER_FILE, ADAPTER_WEIGHTS, ROLE_FILE),
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "*.model", "chat_template.jinja", "chat_template.json"),
)
CARD_FILES = ("README.md", "training.png")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class Source(NamedTuple):
    """name: for `from_pretrained` of transformers. folder: with everything but a base's weights, on this machine; None
    of a plain model elsewhere. options: of `HUB_OPTIONS`, for loading by `name`."""

    name: str
    folder: Path | None
    options: dict[str, Any]


def files_of_model(folder: Path, include: Sequence[str] = ()) -> list[Path]:
    """What of `folder` makes the model: weights, adapters and heads, configuration, tokenizer, card and plot.

    Args:
        folder: as `save_pretrained` or a trainer wrote it; sub-folders count where they hold a role, and
            `.eval_results`.
        include: further patterns of paths below `folder`, such as `"completions/*"`.
    """
    roles = {place.name for place in role_folders(folder)}
    names = {path: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()}
    return [
        path
        for path, name in names.items()
        if _is_part(name, roles) or any(fnmatch(name, pattern) for pattern in include)
    ]


def role_folders(folder: Path) -> list[Path]:
    """Sub-folders that hold a role. A checkpoint of a stand-alone classifier, which may lie beside them, is none,
    though it has a file of that name."""
    found = []
    for description in sorted(folder.glob(f"*/{ROLE_FILE}")):
        if "own_adapter" in json.loads(description.read_text(encoding="utf-8")):
            found.append(description.parent)
    return found


def stale_files(there: Sequence[str], uploaded: Iterable[str]) -> list[str]:
    """Names of a repository that an earlier push left and loading would take for a part of this model: weights of
    another layout, roles that it no longer has."""
    kept = set(uploaded)
    roles = _roles_in(there)
    ours = (*TOKENIZER_FILES, *CARD_FILES)
    return [
        name
        for name in there
        if name not in kept and _is_part(name, roles) and not any(fnmatch(name, pattern) for pattern in ours)
        if not name.startswith(".eval_results/")
    ]


def _roles_in(names: Iterable[str]) -> set[str]:
    """Role folders by the names in a repository; checkpoints, which may have a file of that name, are none."""
    places = (PurePosixPath(name) for name in names)
    return {p.parts[0] for p in places if len(p.parts) == 2 and p.name == ROLE_FILE and "checkpoint" not in p.parts[0]}


def _is_part(name: str, roles: Iterable[str]) -> bool:
    parts = PurePosixPath(name).parts
    if len(parts) == 1:
        return any(fnmatch(name, pattern) for pattern in (*MODEL_FILES, *TOKENIZER_FILES, *CARD_FILES))
    if len(parts) > 2:
        return False
    if parts[0] == ".eval_results":
        return name.endswith(".yaml")
    return parts[0] in roles and parts[1] in ROLE_FILES


# Sending.


def push(shared: SharedModel, repo_id: str, tokenizer: Any = None, card: str | None = None, **options: Any) -> Any:
    """See `SharedModel.push_to_hub`."""
    repo_id = owned(repo_id, options.get("token"))
    with tempfile.TemporaryDirectory(prefix="hf_rlx-push-") as scratch:
        folder = Path(scratch)
        shared.save_pretrained(folder)
        (tokenizer or tokenizer_of(shared)).save_pretrained(folder)
        if card is None and _has_card(repo_id, options):
            logger.info("%s keeps its card", repo_id)
        elif card is None:
            _write_card(shared, folder, repo_id)
        else:
            (folder / "README.md").write_text(mask_text(card), encoding="utf-8")
        return push_folder(folder, repo_id, doing=f"pushing the model to {repo_id}", **options)


def push_folder(folder: Path, repo_id: str, *, commit_message: str | None = None, **options: Any) -> Any:
    """Upload a folder that `save_pretrained` or a trainer wrote; `options` as of `hf_rlx.hub.upload`.

    Raises:
        FileNotFoundError: it holds no model. ValueError: a pickled one only.
    """
    files = files_of_model(folder)
    names = [path.relative_to(folder).as_posix() for path in files]
    if not any(name in (ADAPTER_WEIGHTS, "model.safetensors", "model.safetensors.index.json") for name in names):
        refuse_pickles([path.name for path in folder.iterdir()], str(folder))
        raise FileNotFoundError(f"{folder} holds no model: neither {ADAPTER_WEIGHTS} nor model.safetensors")
    warn_of_local_base(folder)
    return upload(
        folder,
        files,
        repo_id,
        message=commit_message or "Upload model",
        stale=lambda there: stale_files(there, names),
        **options,
    )


def _write_card(shared: SharedModel, folder: Path, repo_id: str) -> None:
    """A card with what the saved model tells by itself: its base, its roles, how to load it."""
    from hf_rlx.cards import facts_from_folder, installed_versions, write_card  # needed here only

    facts = dataclasses.replace(facts_from_folder(folder), repo_id=repo_id, versions=installed_versions())
    if facts.base_model is None and shared.config.name_or_path != repo_id:
        facts = dataclasses.replace(facts, base_model=shared.config.name_or_path or None)
    write_card(facts, folder)


def base_of(folder: Path) -> str | None:
    """The base that a folder's adapter names, if it holds an adapter and that names one."""
    if not (folder / ADAPTER_FILE).is_file():
        return None
    return json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path") or None


def _has_card(repo_id: str, options: dict[str, Any]) -> bool:
    """Whether the repository is there and has a card, which a trainer may have written."""
    try:
        return api().file_exists(repo_id, "README.md", revision=options.get("revision"), token=options.get("token"))
    except Exception as error:
        if not isinstance(error, HfHubHTTPError) and not unreachable(error):
            raise
        return False  # the upload, which comes next, tells what is wrong


def warn_of_local_base(folder: Path) -> None:
    """Say so where an adapter is about to leave its base behind."""
    base = base_of(folder)
    if base is not None and Path(base).exists():
        logger.warning(
            "the adapter names the folder %s of this machine as its base, so nobody else can load it: push the base "
            "too, and load it by its Hub id before you train the adapter",
            base,
        )


# Getting.


def locate(name_or_path: str | Path, given: dict[str, Any], kwargs: dict[str, Any]) -> Source:
    """Find a model, and download its adapter and roles, if it has any; a base's weights are left to transformers.

    Args:
        name_or_path: folder, short name or Hub id.
        given: `revision`, `subfolder` and `token`, or None.
        kwargs: for `from_pretrained`; the rest of `HUB_OPTIONS` counts here, and `use_safetensors=False`, which takes
            pickled weights of a plain model too.

    Raises:
        HubError: there is no such repository or revision, or it may not be read.
        ValueError: all weights are pickled.
    """
    name, options = str(name_or_path), {key: value for key, value in given.items() if value is not None}
    pickled = kwargs.get("use_safetensors") is False or "gguf_file" in kwargs
    below = str(options.get("subfolder") or "").strip("/")
    if name in (TINY, SMOLLM2):
        return Source(name, None, {})
    if Path(name).is_dir():
        folder = Path(name) / below
        if not folder.is_dir():
            raise FileNotFoundError(f"{name} has no folder {below}")
        if not pickled:
            refuse_pickles([path.name for path in folder.iterdir()], str(folder))
        return Source(str(folder), folder, {})
    if not _is_hub_id(name):
        return Source(name, None, options)
    start = f"{below}/" if below else ""
    cache = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs and key not in given}
    cache["revision"] = options.get("revision")
    doing = f"loading {name} (there is no folder of that name here)"
    with telling(doing, options.get("token")):
        every = None if cache.get("local_files_only") else _listed(name, options)
        if every is None:
            return Source(name, _cached(name, start, cache), options)
        names = [each.removeprefix(start) for each in every if each.startswith(start)]
        if not names:
            raise HubError(f"{name} has no folder {below}")
        if not pickled:
            refuse_pickles([each for each in names if "/" not in each], name)
        described = [name for name in names if name == ROLE_FILE] + [
            f"{role}/{ROLE_FILE}" for role in _roles_in(names)
        ]
        if ADAPTER_FILE not in names and not described:
            return Source(name, None, options)
        # Descriptions first: what a download that broke off has left is then known to be incomplete.
        snapshot = ""
        for wanted in (described, [each for each in names if _is_wanted(each, _roles_in(names))]):
            if wanted:
                patterns = [escape(start + each) for each in wanted]
                snapshot = snapshot_download(name, allow_patterns=patterns, token=options.get("token"), **cache)
    return Source(name, Path(snapshot) / below, options)


def holds_reward(name_or_path: str | Path, kwargs: dict[str, Any]) -> bool:
    """Whether a folder or a Hub repository holds a reward model that `RewardTrainer` made, and not a plain one.

    Args:
        name_or_path: as for `locate`. kwargs: for `SharedModel.from_pretrained`.

    Raises:
        HubError, ValueError: see `locate`.
    """
    given = {key: kwargs.get(key) for key in ("revision", "subfolder", "token")}
    folder = locate(name_or_path, given, kwargs).folder
    return folder is not None and any((folder / place).is_file() for place in (ROLE_FILE, f"reward/{ROLE_FILE}"))


def refuse_pickles(names: Iterable[str], place: str) -> None:
    """Raises: ValueError where weights are there as pickles only."""
    names = list(names)
    pickles = [
        name
        for name in names
        if name.endswith(_PICKLES) and name.startswith(("adapter_model", "pytorch_model", "model", "head"))
    ]
    whole = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    if not pickles or (whole and (ADAPTER_FILE not in names or ADAPTER_WEIGHTS in names)):
        return
    advice = "load it once where you trust it, and save it again with save_pretrained"
    if ADAPTER_FILE not in names:
        advice += "; or pass use_safetensors=False to take the risk"
    raise ValueError(
        f"{place} has its weights as a pickle only ({pickles[0]}), which can run code when it is loaded; {advice}"
    )


def _is_wanted(name: str, roles: Iterable[str]) -> bool:
    """Of a repository: the files of adapter, roles and tokenizer, but not a whole model's weights."""
    if name.startswith("model") and name.endswith((".safetensors", ".safetensors.index.json")):
        return False
    return _is_part(name, roles) and name not in CARD_FILES and not name.startswith(".eval_results")


def _listed(name: str, options: dict[str, Any]) -> list[str] | None:
    """File names of a repository; None where the Hub is out of reach or not to be asked: the cache then decides."""
    try:
        info = api().model_info(name, revision=options.get("revision"), token=options.get("token"))
    except ConnectionError as error:  # HF_HUB_OFFLINE is set
        logger.debug("%s: %s", name, error)
        return None
    except Exception as error:
        if not unreachable(error):
            raise
        logger.warning("%s: the Hub is out of reach, so the cache is looked at: %s", name, error)
        return None
    return [each.rfilename for each in info.siblings or []]


def _cached(name: str, start: str, cache: dict[str, Any]) -> Path | None:
    """The folder of a repository in the cache, where it holds an adapter or roles."""
    known = {key: cache[key] for key in ("cache_dir", "revision") if key in cache}
    for file in (ADAPTER_FILE, "config.json"):
        found = try_to_load_from_cache(name, start + file, **known)
        if isinstance(found, str):
            folder = Path(found).parent
            return folder if file == ADAPTER_FILE or (folder / ROLE_FILE).is_file() or role_folders(folder) else None
    return None


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


__all__ = ["Source", "files_of_model", "holds_reward", "locate", "push", "push_folder", "role_folders"]
