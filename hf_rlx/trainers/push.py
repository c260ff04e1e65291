"""Pushing to the Hub: what makes the model and its card, nothing else, and never a secret.

`transformers.Trainer` uploads the whole output folder: also logs, completions and whatever lies there. Here a list
says what goes; optimizer and random state go with `hub_strategy="checkpoint"` only, anything else by `include`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_rlx.cards import PLOT_NAME, RunFacts, installed_versions, write_card
from hf_rlx.models.roles import POLICY
from hf_rlx.models.storage import ADAPTER_FILE, HEAD_FILE, ROLE_FILE
from hf_rlx.secrets import SecretFoundError, mask_text, refuse_secrets
from hf_rlx.trainers.config import BaseConfig

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

_MODEL = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *("model.safetensors.index.json", ADAPTER_FILE, "adapter_model.safetensors", ROLE_FILE, HEAD_FILE),
)
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "*.model", "chat_template.jinja", "chat_template.json"),
)
_CARD = ("README.md", PLOT_NAME)


def files_to_push(folder: Path, include: Sequence[str] = ()) -> list[Path]:
    """What of `folder` makes the model: weights, adapters and heads, configuration, tokenizer, card and plot.

    Args:
        folder: as `save_model` wrote it; sub-folders count where they hold a role, and `.eval_results`.
        include: further patterns of paths below `folder`, such as `"completions/*"`.
    """
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and _goes(path, folder, include)]


def _goes(path: Path, folder: Path, include: Sequence[str]) -> bool:
    below = path.relative_to(folder)
    if any(fnmatch(below.as_posix(), pattern) for pattern in include):
        return True
    if len(below.parts) == 1:
        return any(fnmatch(path.name, pattern) for pattern in (*_MODEL, *_TOKENIZER, *_CARD))
    if len(below.parts) > 2:
        return False
    if below.parts[0] == ".eval_results":
        return path.suffix == ".yaml"
    return (path.parent / ROLE_FILE).is_file() and any(fnmatch(path.name, pattern) for pattern in _MODEL)


def push_model(
    trainer: BaseTrainer,
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    include: Sequence[str],
    facts: dict[str, Any],
) -> Any:
    """Save the model and upload it; see `BaseTrainer.push_to_hub`.

    Raises:
        SecretFoundError: a file of the upload holds a secret; nothing was uploaded.
    """
    args = trainer.args
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if trainer.hub_model_id is None:
        trainer.init_hf_repo(token=token, private=private)
    trainer._finish_current_push()  # before its files change under it
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    folder = Path(str(args.output_dir))
    if facts or not (folder / "README.md").is_file():
        plain_card(trainer, **facts)
    return _upload(trainer, folder, files_to_push(folder, include), commit_message, token, revision, not blocking)


def push_checkpoint(trainer: BaseTrainer, checkpoint: Path) -> None:
    """Upload the weights of a checkpoint while training goes on, as `hub_strategy` says. A secret in a file stops the
    upload, not the run: an error is logged."""
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    running = getattr(trainer, "push_in_progress", None)
    if running is not None and not running.is_done():
        if not args.hub_always_push:
            return
        trainer._finish_current_push()
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    folder = Path(str(args.output_dir))
    for path in files_to_push(checkpoint):
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}")
        shutil.copy(path, staged)
        os.replace(staged, target)
    message = f"Training in progress, step {trainer.state.global_step}"
    try:
        job = _upload(trainer, folder, files_to_push(folder), message, None, None, in_background=True)
        # Its annotation says one job; it goes through a list.
        progress: Any = PushInProgress([job])  # type: ignore[arg-type]
        trainer.push_in_progress = progress
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
            every = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
            whole = _upload(trainer, checkpoint, every, f"{message}, checkpoint", None, None, True, path_in_repo=name)
            whole.exception()  # waited for: a later save may delete the folder
    except SecretFoundError as error:
        logger.error("step %d: %s", trainer.state.global_step, error)


def plain_card(trainer: BaseTrainer, **facts: Any) -> Path:
    """A card with what a trainer knows by itself; `facts` are fields of `RunFacts`."""
    known: dict[str, Any] = {
        "method": trainer.method,
        "base_model": trainer.shared.config.name_or_path or None,
        "repo_id": trainer.hub_model_id,
        "adapter": trainer.shared.roles[POLICY].adapter is not None,
        "steps": trainer.state.global_step,
        "versions": installed_versions(),
    }
    return write_card(RunFacts(**{**known, **trainer.card_facts(), **facts}), str(trainer.args.output_dir))


def secrets_of(args: BaseConfig) -> list[str]:
    """Values of the configuration that are secrets: the Hub token, and tokens for loading the model."""
    loading = args.model_init_kwargs or {}
    found = [args.hub_token, *(loading.get(name) for name in ("token", "use_auth_token"))]
    return [value for value in found if isinstance(value, str)]


def _upload(
    trainer: BaseTrainer,
    folder: Path,
    files: list[Path],
    message: str | None,
    token: str | None,
    revision: str | None,
    in_background: bool,
    path_in_repo: str | None = None,
) -> Any:
    refuse_secrets(folder, [*secrets_of(trainer.args), token], files)
    job = _api().upload_folder(
        repo_id=str(trainer.hub_model_id),
        folder_path=folder,
        path_in_repo=path_in_repo,
        allow_patterns=[escape(path.relative_to(folder).as_posix()) for path in files],
        commit_message=message,
        token=token or trainer.args.hub_token,
        revision=revision or trainer.args.hub_revision,
        run_as_future=in_background,
    )
    if in_background:
        job.add_done_callback(_tell_failure)
    return job


@cache
def _api() -> Any:
    """One client: its background uploads run one after the other, and do not commit against each other."""
    return HfApi(library_name="hf_rlx")


def _tell_failure(job: Any) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.error("an upload failed: %s: %s", type(job.exception()).__name__, mask_text(str(job.exception())))
