"""Facts in, model card out: `README.md` with metadata the Hub reads, and the Hub's evaluation file."""

from __future__ import annotations

import re
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
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hf_rlx.cards.citations import papers_of
from hf_rlx.cards.command import short_path, without_local_paths
from hf_rlx.cards.facts import Measure, RunFacts, is_hub_id
from hf_rlx.cards.files import replace_file
from hf_rlx.cards.folder import ROLES, completed
from hf_rlx.secrets import mask_text

TEMPLATE = "model_card.md.jinja"
PLOT_NAME = "training.png"
"""A plot of this name in the card's folder is shown in the card."""
_TITLES = {
    "sft": "supervised fine-tuning",
    "simpo": "SimPO",
    "iterative_dpo": "iterative DPO",
    "reward": "a pairwise ranking loss",
    "prm": "labels of single steps",
}
_LARGEST_LIST = 8  # entries of a hyper-parameter's list that are shown


def render_card(facts: RunFacts, plot: str | None = None, folder: str = ".") -> ModelCard:
    """The card as an object of huggingface_hub, ready for `save` or `push_to_hub`.

    Args:
        facts: what to say. A fact that is missing is left out, with its heading.
        plot: file name of a plot that will lie beside the card.
        folder: name of the model's folder, for the snippet of a model that is on no Hub.
    """
    hub_base = facts.base_model if is_hub_id(facts.base_model) else None
    name, kind = _model_name(facts), facts.kind or _kind(facts)
    lines = _lines(facts)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    content = environment.get_template(TEMPLATE).render(
        card_data=_metadata(facts, hub_base, name, kind, lines).to_yaml(),
        facts=facts,
        name=name,
        kind=kind,
        base=hub_base or (Path(facts.base_model).name if facts.base_model else None),
        base_is_on_hub=hub_base is not None,
        what=_what(facts, kind),
        method=_TITLES.get(facts.method, facts.method.upper().replace("_", " ")),
        lines=lines,
        has_before=any(line.before is not None for line in lines),
        has_after=any(line.after is not None for line in lines),
        has_intervals=any(line.before_interval or line.after_interval for line in lines),
        after=_after(facts),
        eval_dataset=_eval_dataset(facts),
        counts=_counts(lines),
        rewards=_rewards(facts),
        duration=None if facts.seconds is None else _duration(facts.seconds),
        papers=papers_of(facts.method, facts.variant),
        plot=plot,
        source=facts.repo_id or f"./{folder}".replace("./.", "."),
        cell=_cell,
        number=_number,
        interval=_interval,
        fenced=_fenced,
    )
    return ModelCard(content)


def write_card(facts: RunFacts, folder: str | Path, source: str | Path | None = None, name: str | None = None) -> Path:
    """Write `README.md`, and `.eval_results/*.yaml` when the facts name a held-out dataset on the Hub and a score.

    Each file is written beside its place and then renamed, so a reader never sees half of one. Hub tokens, user and
    password in URLs, and paths of this machine are made unreadable, wherever they came from.

    Args:
        facts: what to say; what they do not say of the model's kind and roles is looked up in the folder.
        folder: where the card goes; made if it is missing. A `training.png` in it is shown in the card.
        source: the model's folder, where it is another one.
        name: that this folder will have, where it is to be renamed.

    Returns:
        Path of the `README.md`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = folder if source is None else Path(source)
    facts = completed(facts, model)
    plot = PLOT_NAME if (folder / PLOT_NAME).is_file() else None
    card = folder / "README.md"
    replace_file(card, _public(str(render_card(facts, plot, name or _path_of(model)))))
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
        replace_file(results / f"{_slug(facts.eval_dataset_id)}.yaml", _public(text))
    return card


def _path_of(model: Path) -> str:
    """A folder as a snippet names it: from the working folder, where it lies below that, else by its name."""
    place, here = model.resolve(), Path.cwd()
    inside = here != Path(here.anchor) and place.is_relative_to(here)
    return place.relative_to(here).as_posix() if inside and place != here else place.name


def _public(text: str) -> str:
    return without_local_paths(mask_text(text))


def _metadata(facts: RunFacts, hub_base: str | None, name: str, kind: str, lines: list[Measure]) -> ModelCardData:
    """What the Hub reads. Nothing is given that is not known."""
    results = [_eval_result(facts, line) for line in lines if line.metric and line.after is not None]
    quantised = [f"q{facts.adapter_type}" if facts.adapter_type == "lora" else facts.adapter_type]
    adapter = quantised if facts.quantization else [facts.adapter_type]
    tags = ["hf_rlx", facts.method.replace("_", "-"), *(adapter if facts.adapter else []), "generated_from_trainer"]
    further: dict[str, Any] = {
        "base_model_relation": ("adapter" if facts.adapter else "finetune") if hub_base else None,
        "license_name": facts.license_name,
        "license_link": facts.license_link,
    }
    return ModelCardData(
        base_model=hub_base,
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag=facts.pipeline_tag,
        tags=[tag for tag in dict.fromkeys([*tags, *facts.tags]) if tag],
        datasets=[facts.dataset_id] if facts.dataset_id else None,
        license=facts.license,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        model_name=name if results else None,
        eval_results=results or None,
        **{key: value for key, value in further.items() if value},
    )


def _kind(facts: RunFacts) -> str:
    """How a model is loaded whose folder is not known."""
    return ROLES.get(facts.pipeline_tag, "adapter" if facts.adapter else "model")


def _what(facts: RunFacts, kind: str) -> str:
    """What this is, at the start of a sentence: "A LoRA adapter for"."""
    adapter = "LoRA" if facts.adapter_type == "lora" else facts.adapter_type.upper()
    base = f"the {facts.quantization} quantised " if facts.quantization and facts.base_model else ""
    return {
        "adapter": f"A {adapter} adapter for {base}",
        "model": "A fine-tune of ",
        "reward": f"A reward model, as a {adapter} adapter and a head on {base}",
        "step_reward": f"A process reward model, as a {adapter} adapter and a head on {base}",
        "classifier": "A reward model, as a sequence classifier from ",
        "classifier_adapter": f"A reward model, as a {adapter} adapter with a classification head for {base}",
    }[kind]


def _lines(facts: RunFacts) -> list[Measure]:
    """The held-out table: the score, then the measures."""
    if facts.after is None:
        return list(facts.measures)
    before, after = facts.before, facts.after
    score = Measure(
        facts.score_name,
        None if before is None else before.accuracy,
        after.accuracy,
        None if before is None else (before.low, before.high),
        (after.low, after.high),
        after.n,
        "accuracy",
    )
    return [score, *facts.measures]


def _after(facts: RunFacts) -> str:
    """Heading of the column after training."""
    if facts.after_step is None or facts.after_step == facts.steps:
        return "after training"
    return f"after step {facts.after_step}" + (f" of {facts.steps}" if facts.steps else "")


def _counts(lines: list[Measure]) -> str | None:
    """How many rows the table is over, where all lines that say so say the same."""
    counts = {line.n for line in lines if line.n is not None}
    return str(counts.pop()) if len(counts) == 1 else None


def _rewards(facts: RunFacts) -> list[str]:
    weights: list[float | None] = list(facts.reward_weights) or [None] * len(facts.rewards)
    pairs = zip(facts.rewards, weights, strict=False)
    return [f"`{short_path(name)}`" + ("" if w is None else f" (weight {w:g})") for name, w in pairs]


def _model_name(facts: RunFacts) -> str:
    if facts.model_name:
        return facts.model_name
    if facts.repo_id:
        return facts.repo_id.rpartition("/")[2]
    method = facts.method.replace("_", "-")
    parts = [Path(facts.base_model).name if facts.base_model else "", method]
    return "-".join(part for part in parts if part) if facts.base_model else f"{method} model".strip()


def _eval_dataset(facts: RunFacts) -> str | None:
    return facts.eval_dataset or facts.eval_dataset_id or facts.dataset or facts.dataset_id


def _eval_result(facts: RunFacts, line: Measure) -> EvalResult:
    name = line.dataset or _eval_dataset(facts) or "held-out data"
    told = [f"n={line.n}"] if line.n is not None else []
    if line.after_interval:
        told.append("95% interval {:.3f} to {:.3f}".format(*line.after_interval))
    return EvalResult(
        task_type=facts.pipeline_tag,
        dataset_type=(None if line.dataset else facts.eval_dataset_id) or _slug(name),
        dataset_name=name,
        metric_type=str(line.metric),
        metric_value=round(float(line.after or 0.0), 6),
        metric_name=line.name.replace("`", "") + (f" ({', '.join(told)})" if told else ""),
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _number(value: float | None) -> str:
    """Three decimals, or as many digits as a small number needs; empty for none."""
    if value is None:
        return ""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def _interval(ends: tuple[float, float] | None) -> str:
    """ " (0.219 to 0.396)" behind a number; empty for none."""
    return "" if ends is None else f" ({_number(ends[0])} to {_number(ends[1])})"


def _cell(value: Any) -> str:
    """`value` for a Markdown table: one line, no column breaks, no paths of this machine."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, [*value[:_LARGEST_LIST], *(["..."] if len(value) > _LARGEST_LIST else [])]))
    text = f"{value:g}" if isinstance(value, float) else short_path(str(value))
    return " ".join(text.split()).replace("|", "\\|")


def _fenced(text: Any, language: str = "text") -> str:
    """`text` as a code block, fenced by more backticks than it holds in a row."""
    body = text if isinstance(text, str) else _conversation(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", body)), default=0))
    return f"{fence}{language}\n{body}\n{fence}"


def _conversation(messages: list[dict[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
