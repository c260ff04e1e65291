"""Facts in, model card out: `README.md` with metadata the Hub reads, and the Hub's evaluation file."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rlx.cards.facts import RunFacts, Score
from hf_rlx.secrets import mask_text

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
PLOT_NAME = "training.png"
"""A plot of this name in the card's folder is shown in the card."""


def render_card(facts: RunFacts, plot: str | None = None) -> ModelCard:
    """The card as an object of huggingface_hub, ready for `save` or `push_to_hub`.

    Args:
        facts: what to say. A fact that is missing is left out, with its heading.
        plot: file name of a plot that will lie beside the card.
    """
    hub_base = facts.base_model if is_hub_id(facts.base_model) else None
    name = _model_name(facts)
    score = facts.after
    tags = ["hf_rlx", facts.method, *(["lora"] if facts.adapter else []), *facts.tags]
    data = ModelCardData(
        base_model=hub_base,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag=facts.pipeline_tag,
        tags=list(dict.fromkeys(tags)),
        datasets=[facts.dataset_id] if facts.dataset_id else None,
        license=facts.license,
        metrics=["accuracy"] if score else None,
        model_name=name if score else None,
        eval_results=[_eval_result(facts, score)] if score else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        facts=facts,
        name=name,
        base=hub_base or (Path(facts.base_model).name if facts.base_model else None),
        base_is_on_hub=hub_base is not None,
        method=facts.method.upper(),
        eval_dataset=_eval_dataset(facts),
        duration=None if facts.seconds is None else _duration(facts.seconds),
        plot=plot,
        cell=_cell,
        fenced=_fenced,
    )


def write_card(facts: RunFacts, folder: str | Path) -> Path:
    """Write `README.md`, and `.eval_results/*.yaml` when the facts name a held-out dataset on the Hub and a score.

    Each file is written beside its place and then renamed, so a reader never sees half of one. Hub tokens, and user
    and password in URLs, are made unreadable, wherever they came from.

    Args:
        facts: what to say.
        folder: the model's folder; made if it is missing. A `training.png` in it is shown in the card.

    Returns:
        Path of the `README.md`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plot = PLOT_NAME if (folder / PLOT_NAME).is_file() else None
    card = folder / "README.md"
    _replace(card, mask_text(str(render_card(facts, plot))))
    if facts.eval_dataset_id and facts.after:
        score = facts.after
        notes = [facts.decoding, f"n={score.n}", f"95% Wilson interval {score.low:.4f} to {score.high:.4f}"]
        entry = EvalResultEntry(
            dataset_id=facts.eval_dataset_id,
            task_id=facts.eval_task,
            value=round(score.accuracy, 6),
            notes=", ".join(note for note in notes if note),
        )
        results = folder / ".eval_results"
        results.mkdir(exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False)
        _replace(results / f"{_slug(facts.eval_dataset_id)}.yaml", mask_text(text))
    return card


def is_hub_id(model: str | None) -> bool:
    """True when `model` can be a Hub id and is no folder on this machine."""
    if not model or Path(model).exists():
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _model_name(facts: RunFacts) -> str:
    if facts.model_name:
        return facts.model_name
    if facts.repo_id:
        return facts.repo_id.rpartition("/")[2]
    return f"{Path(facts.base_model).name}-{facts.method}" if facts.base_model else f"{facts.method} model"


def _eval_dataset(facts: RunFacts) -> str | None:
    return facts.eval_dataset or facts.eval_dataset_id or facts.dataset or facts.dataset_id


def _eval_result(facts: RunFacts, score: Score) -> EvalResult:
    name = _eval_dataset(facts) or "held-out data"
    return EvalResult(
        task_type=facts.pipeline_tag,
        dataset_type=facts.eval_dataset_id or _slug(name),
        dataset_name=name,
        metric_type="accuracy",
        metric_value=round(score.accuracy, 6),
        metric_name=f"accuracy (n={score.n}, 95% interval {score.low:.3f} to {score.high:.3f})",
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _cell(value: Any) -> str:
    """`value` for a Markdown table: one line, no column breaks."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _fenced(text: Any) -> str:
    """`text` as a code block, fenced by more backticks than it holds in a row."""
    body = text if isinstance(text, str) else _conversation(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{fence}text\n{body}\n{fence}"


def _conversation(messages: list[dict[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _replace(path: Path, text: str) -> None:
    """Write `text` to a new file in the same folder, then rename it onto `path`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes private files; a card is for everyone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
