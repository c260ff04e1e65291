"""`--dry-run`: the settings of a run, its data, its first row as tokens, its rewards, and the memory it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from hf_rlx.cli import UsageError, rewards
from hf_rlx.cli.estimate import of_session
from hf_rlx.cli.session import Session
from hf_rlx.data.demonstrations import check_demonstrations, encode_demonstration
from hf_rlx.data.formats import check_all_prompts
from hf_rlx.data.pairs import RankedGroup, check_preferences, encode_preference
from hf_rlx.data.steps import check_step_rows, encode_step_row
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.secrets import public
from hf_rlx.trainers.preference_config import set_tokens
from hf_rlx.trainers.preflight import check_room

_SHOWN = 120  # tokens of one text


def preview(session: Session, whole: bool = False) -> str:
    """What a run would do, for people; the settings are a YAML file for `--config`.

    Args:
        session: not trained. whole: all settings, also those left at their defaults.

    Raises:
        ValueError, OSError: of the data, the tokenizer and the rewards, as the run would raise them.
    """
    tokenizer = load_tokenizer(session.options["model"])
    parts = [
        "# settings (what differs from the defaults)" if not whole else "# settings",
        settings_text(session, whole),
        f"# data: {_counts(session)}",
        _first_row(session, tokenizer),
    ]
    if session.recipe.rewards:
        check_room(session.options["model"], session.config)
        parts.append("# rewards: " + _rewards(session))
    parts.append("# memory: " + of_session(session).replace("\n", "\n#"))
    return "\n".join(parts)


def settings_text(session: Session, whole: bool = False) -> str:
    """The options and the configuration as YAML."""
    options = {
        name: value
        for name, value in session.options.items()
        if name not in ("dry_run", "verbose") and value is not None
    }
    config, default = session.config, session.defaults
    names = [f.name for f in dataclasses.fields(config) if f.init]
    if not whole:
        names = [name for name in names if getattr(config, name) != getattr(default, name)]
    shown = config.to_dict()
    fields = {name: shown.get(name, getattr(config, name)) for name in names}
    text: str = yaml.safe_dump(public({**options, **fields}), sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def tokens_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Token by token, as text between bars; of a long text both ends."""
    texts = [repr(tokenizer.decode([i]))[1:-1] for i in ids]
    if len(texts) > _SHOWN:
        half = _SHOWN // 2
        texts = [*texts[:half], f" ... {len(texts) - 2 * half} more ... ", *texts[-half:]]
    return "|".join(texts)


def _counts(session: Session) -> str:
    data = session.data
    held_out = "nothing is held out" if data.held_out is None else f"{len(data.held_out)} held out"
    return f"{data.name}, {len(data.train)} rows to train on, {held_out}; columns {', '.join(data.train.column_names)}"


def _first_row(session: Session, tokenizer: Any) -> str:
    config: Any = session.config
    data, row = session.data, session.data.train[0] if len(session.data.train) else {}
    common = {
        "chat_template_kwargs": config.chat_template_kwargs,
        "special_tokens": config.special_tokens_in_messages,
    }
    if session.recipe.data == "prompts":
        check_all_prompts(data.train, data.held_out)
        template = {**(config.chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})}
        encoded = encode_prompt(row["prompt"], tokenizer, template, config.special_tokens_in_messages)
        return "\n".join(
            [
                f"first prompt, {len(encoded.ids)} tokens, not in the loss:",
                f"  {tokens_of(encoded.ids, tokenizer)}",
                f"then {config.num_generations} answers of up to {config.max_completion_length} tokens are sampled; "
                "their tokens are in the loss, EOS included",
            ]
        )
    set_tokens(config, tokenizer)
    if session.recipe.data == "steps":
        return _first_steps(row, session, tokenizer, common)
    pairs = session.recipe.data == "pairs"
    for rows, name in ((data.train, "train_dataset"), (data.held_out, "eval_dataset")):
        (check_preferences if pairs else check_demonstrations)(rows, name)
    encode = encode_preference if pairs else encode_demonstration
    ranked = encode(row, 0, tokenizer, max_length=config.max_length, **common)
    return _ranked(ranked, tokenizer, ("chosen", "rejected") if "responses" not in row else ())


def _first_steps(row: dict[str, Any], session: Session, tokenizer: Any, common: dict[str, Any]) -> str:
    """The first solution with its labels, as a process reward model learns it."""
    config: Any = session.config
    for rows, name in ((session.data.train, "train_dataset"), (session.data.held_out, "eval_dataset")):
        check_step_rows(rows, name, config.step_separator, config.ratings)
    limits = {"max_length": config.max_length, "max_completion_length": config.max_completion_length}
    found = encode_step_row(
        row, 0, tokenizer, separator=config.step_separator, ratings=config.ratings, **limits, **common
    )
    prompt, solution = found.groups[0].prompt_ids.tolist(), found.groups[0].response_ids[0].tolist()
    lines = [f"first prompt, {len(prompt)} tokens:", f"  {tokens_of(prompt, tokenizer)}"]
    begin = 0
    for place, (end, label) in enumerate(zip(found.ends, found.labels, strict=False)):
        told = "no label" if label != label else f"right with probability {label:g}"
        lines += [
            f"step {place + 1}, {end + 1 - begin} tokens, read at the last; {told}:",
            f"  {tokens_of(solution[begin : end + 1], tokenizer)}",
        ]
        begin = end + 1
    if found.cut:
        lines.append("prompt or solution lost tokens to max_length or max_completion_length")
    return "\n".join(lines)


def _ranked(row: RankedGroup, tokenizer: Any, names: tuple[str, ...]) -> str:
    """A prompt and its answers; `names` of them, where they have some."""
    lines = []
    place = 0
    for group in row.groups:
        ids = group.prompt_ids.tolist()
        lines += [f"first prompt, {len(ids)} tokens, not in the loss:", f"  {tokens_of(ids, tokenizer)}"]
        for answer in group.response_ids:
            rank = f", rank {row.ranks[place]:g} (lower is better)" if len(row.ranks) > 1 else ""
            title = names[place] if names and len(row.ranks) > 1 else f"answer {place + 1}{rank}"
            lines += [
                f"{title}, {answer.numel()} tokens, in the loss:",
                f"  {tokens_of(answer.tolist(), tokenizer)}",
            ]
            place += 1
    if row.cut:
        lines.append(f"{row.cut} of prompt and answers lost tokens to max_length")
    return "\n".join(lines)


def _rewards(session: Session) -> str:
    functions = rewards.read_rewards(session.reward_specs, session.beside)
    rewards.close(functions)
    weights = getattr(session.config, "reward_weights", None) or [1.0] * len(functions)
    if len(weights) != len(functions):
        raise UsageError(f"reward_weights has {len(weights)} entries for {len(functions)} of --reward")
    named = [f if isinstance(f, str) else getattr(f, "__name__", type(f).__name__) for f in functions]
    return ", ".join(f"{weight:g} x {name}" for weight, name in zip(weights, named, strict=True))
