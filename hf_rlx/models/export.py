"""A policy adapter merged into its base: a plain model, for programs that know no adapters."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists

from hf_rlx.assets import tiny_arith_path
from hf_rlx.cards import RunFacts, facts_from_folder, write_beside
from hf_rlx.cards.facts import is_hub_id
from hf_rlx.models import hub, storage
from hf_rlx.models.hub import ADAPTER_FILE
from hf_rlx.models.loading import TINY, load_causal_lm, load_tokenizer, weights_note
from hf_rlx.models.storage import has_adapter


def merge(
    folder: str | Path, out: Path, dtype: str = "float32", base: str | None = None, revision: str | None = None
) -> Path:
    """Merge the adapter at the root of `folder` into its base and save a plain `transformers` model.

    The base is loaded anew in float32, also where the adapter was trained on 4-bit weights; the sum of both is
    computed in float32 and rounded to `dtype` once.

    Args:
        folder: an adapter's, or a Hub id. out: new or empty; it is complete or not there.
        dtype: "float32", "bfloat16" or "float16", of the saved weights.
        base: name or folder of the base; None: as the adapter's settings say.
        revision: of a Hub id.

    Returns:
        `out`.

    Raises:
        ValueError: no adapter is there; it cannot be merged; the base has quantised weights only; a type of other
            bits. FileNotFoundError: the base is not found. FileExistsError: `out` is not empty.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there already and not empty; name another folder")
    source = hub.locate(folder, {"revision": revision}, {})
    place = source.folder
    if place is None and not is_hub_id(str(folder)):
        raise FileNotFoundError(f"{folder} does not exist")
    if place is None or not has_adapter(place):
        raise ValueError(f"{folder} holds no adapter ({ADAPTER_FILE}), so there is nothing to merge")
    config = PeftConfig.from_pretrained(str(place))
    if str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS":
        raise ValueError(f"{folder} holds the adapter of a classifier; only policies are merged")
    name = base or config.base_model_name_or_path
    loaded = _base(place, name, None if base else config.revision)
    _untie(loaded, config)
    model: Any = storage.load_model(source, None, loaded, False, None, {})
    try:
        merged: Any = model.merge_and_unload(safe_merge=True)
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(f"an adapter of kind {config.peft_type} cannot be merged into its base") from error
    merged.to(getattr(torch, dtype))
    own = (place / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(place if own else str(name))
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        merged.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        write_beside(_facts(place, out.name, str(name), dtype), staging, name=out.name)
        staging.chmod(0o755)  # temporary folders are their owner's alone
        if out.is_dir():
            out.rmdir()
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _untie(model: Any, config: PeftConfig) -> None:
    """Give embedding and head each its own weights, where they share them and the adapter changes one: merged into
    the shared weights, its change would reach both."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if None in ends or ends[0].weight is not ends[1].weight:
        return
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    if any(check_target_module_exists(config, name) for name in names):
        ends[1].weight = torch.nn.Parameter(ends[1].weight.detach().clone())
        model.config.tie_word_embeddings = False


def _base(folder: Path, name: str | None, revision: str | None) -> Any:
    """The base in float32."""
    if not name:
        raise FileNotFoundError(
            f"{folder / ADAPTER_FILE} names no base model (it was made in memory); give it with --base NAME_OR_FOLDER"
        )
    given = {} if revision is None else {"revision": revision}
    try:
        model: Any = load_causal_lm(name, dtype=torch.float32, **given)
    except OSError as error:
        raise FileNotFoundError(
            f"the base {name!r} that the adapter in {folder} stands on is not found; give its name or folder with "
            f"--base NAME_OR_FOLDER ({str(error).splitlines()[0]})"
        ) from error
    if getattr(model, "is_quantized", False):
        raise ValueError(f"the base {name!r} has quantised weights; give the 16- or 32-bit model with --base")
    return model


def _facts(folder: Path, title: str, base: str, dtype: str) -> RunFacts:
    """What the adapter's run left, of which a merged policy keeps all but the adapter and the other roles; with the
    licence, data and tags of the adapter's own card where the run left nothing."""
    facts = facts_from_folder(folder)
    if facts.pipeline_tag != "text-generation":  # the run trained a reward model: its numbers are not the policy's
        facts = RunFacts("", versions=facts.versions, license=facts.license)
    card = folder / "README.md"
    known = ModelCard.load(card).data.to_dict() if card.is_file() else {}
    data, tags = known.get("datasets") or [None], [tag for tag in known.get("tags") or [] if "lora" not in tag]
    notes = [
        f"The policy adapter was merged into its base and saved in {dtype}; it loads as a plain `transformers` model."
    ]
    if facts.after or facts.measures:
        notes[0] += " The numbers above are of the adapter on the base that it was trained on."
    return dataclasses.replace(
        facts,
        base_model=str(tiny_arith_path()) if base == TINY else base,
        model_name=title,
        repo_id=None,
        adapter=False,
        kind="model",
        quantization=None,
        adapter_settings=None,
        roles={},
        license=facts.license or known.get("license"),
        license_name=facts.license_name or known.get("license_name"),
        license_link=facts.license_link or known.get("license_link"),
        dataset_id=facts.dataset_id or data[0],
        tags=[*tags, *facts.tags, "merged"],
        notes=[*facts.notes, *notes, *([note] if (note := weights_note(base)) is not None else [])],
    )


__all__ = ["merge"]
