"""Pushing to the Hub: what makes the model and its card, nothing else, and never a secret.

`transformers.Trainer` uploads the whole output folder: also logs, completions and whatever lies there. Here a list
says what goes; optimizer and random state go with `hub_strategy="checkpoint"` only, anything else by `include`.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_rlx.hub import telling, upload
from hf_rlx.models.hub import files_of_model, stale_files, warn_of_local_base
from hf_rlx.secrets import SecretFoundError
from hf_rlx.trainers import model_card
from hf_rlx.trainers.card_arguments import card_facts_of
from hf_rlx.trainers.settings import secrets_of

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)


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
        TypeError, ValueError: a fact that the card has no place for, see `card_facts_of`; nothing was done.
        SecretFoundError: a file of the upload holds a secret; nothing was uploaded.
        HubError: the upload failed and changed nothing; the folder is whole, and calling again resumes it.
    """
    args = trainer.args
    facts = card_facts_of(facts)
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    if trainer.hub_model_id is None:
        with telling("making the repository", token or args.hub_token):
            trainer.init_hf_repo(token=token, private=private)
    trainer._finish_current_push()  # before its files change under it
    trainer.save_model(_internal_call=True)
    if not trainer.is_world_process_zero():
        return None
    folder = Path(str(args.output_dir))
    if facts or not (folder / "README.md").is_file():
        model_card.write(trainer, folder, **facts)
    warn_of_local_base(folder)
    files = files_of_model(folder, include)
    return _upload(trainer, folder, files, commit_message, token, revision, not blocking, private=private)


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
    for path in files_of_model(checkpoint):
        target = folder / path.relative_to(checkpoint)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}")
        shutil.copy(path, staged)
        os.replace(staged, target)
    model_card.save_card(trainer, folder)
    message = f"Training in progress, step {trainer.state.global_step}"
    try:
        job = _upload(trainer, folder, files_of_model(folder), message, None, None, in_background=True)
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


def _upload(
    trainer: BaseTrainer,
    folder: Path,
    files: list[Path],
    message: str | None,
    token: str | None,
    revision: str | None,
    in_background: bool,
    path_in_repo: str | None = None,
    private: bool | None = None,
) -> Any:
    names = [path.relative_to(folder).as_posix() for path in files]

    def stale(there: Sequence[str]) -> list[str]:
        return stale_files(there, names) if path_in_repo is None else sorted(set(there) - set(names))

    job = upload(
        folder,
        files,
        str(trainer.hub_model_id),
        message=message,
        private=trainer.args.hub_private_repo if private is None else private,
        token=token or trainer.args.hub_token,
        revision=revision or trainer.args.hub_revision,
        path_in_repo=path_in_repo,
        stale=stale,
        secrets=secrets_of(trainer.args),
        in_background=in_background,
    )
    if in_background:
        job.add_done_callback(_tell_failure)
    return job


def _tell_failure(job: Any) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.error("%s", job.exception())  # says what was being pushed; a secret is masked
