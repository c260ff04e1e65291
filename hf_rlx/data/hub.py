"""Preference data to the Hub, with a card; `hf_rlx.data.pair_files.read_rows("me/my-pairs")` brings them back.

Data and the metadata that loading needs go in one commit (`datasets.Dataset.push_to_hub`), the text of the card in a
second one: a push that breaks off between the two leaves a dataset that loads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hf_rlx.data.pair_checks import check_preferences
from hf_rlx.data.pair_files import even, write_rows
from hf_rlx.hub import RESUME, api, prepare, telling
from hf_rlx.secrets import SecretFoundError, mask_text, scan_for_secrets

_MARK = "<!-- written by hf_rlx; a text without this line is left alone -->"
_MEANING = {
    "prompt": "what is asked",
    "chosen": "the better answer",
    "rejected": "the worse answer",
    "responses": "the answers",
    "ranks": "of each response; lower is better",
    "scores": "of each response; higher is better",
    "margin": "how much better the chosen answer is",
    "score_chosen": "score of the chosen answer",
    "score_rejected": "score of the rejected answer",
}


def push_pairs(
    rows: Any,
    repo_id: str,
    *,
    split: str = "train",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    license: str | None = None,
    commit_message: str | None = None,
) -> Any:
    """Upload preference data as one split of a dataset; other splits of it stay.

    Args:
        rows: a `Dataset`, or dictionaries: (prompt,) chosen and rejected, or (prompt,) responses and ranks or scores.
        repo_id: made if it is missing.
        split: its name; replaced where it is there.
        private: of a new repository; True also refuses an existing public one.
        token: default: `hf auth login` or `HF_TOKEN`.
        revision: branch.
        license: of the data, an identifier of the Hub such as `"apache-2.0"`; the card names none without it.
        commit_message: default says the split and the number of rows.

    Returns:
        `CommitInfo` of the commit with the data.

    Raises:
        ValueError: the rows are no preference data; the message names the row.
        SecretFoundError: a row holds a secret; nothing was uploaded.
        HubError: the upload failed; it says what to do.
    """
    from datasets import Dataset

    dataset: Any = rows if isinstance(rows, Dataset) else Dataset.from_list(even(rows))
    check_preferences(dataset, "rows")
    _refuse_secrets_in(dataset, token)
    with telling(f"pushing {len(dataset)} rows to datasets/{repo_id}", token, RESUME):
        repo_id = prepare(repo_id, "dataset", private, token, revision)
        done = dataset.push_to_hub(
            repo_id,
            split=split,
            token=token,
            revision=revision,
            commit_message=commit_message or f"Upload {split}: {len(dataset)} rows",
        )
    with telling(f"the rows are at datasets/{repo_id}; writing its card", token):
        _describe(repo_id, token, revision, license)
    return done


def _describe(repo_id: str, token: str | None, revision: str | None, license: str | None) -> None:
    """Write the text of the card behind the metadata that is there."""
    from huggingface_hub import DatasetCard

    place: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "token": token}
    path = api().hf_hub_download(repo_id, "README.md", **place)
    before = Path(path).read_text(encoding="utf-8")
    card = DatasetCard(before)
    if license is not None:
        card.data["license"] = license
    card.data["tags"] = list(dict.fromkeys([*(card.data.get("tags") or []), "hf_rlx", "preference"]))
    if not card.text.strip() or _MARK in card.text:
        card.text = _text(repo_id, card.data.to_dict().get("dataset_info"))
    after = mask_text(str(card))
    if after != before:
        api().upload_file(
            path_or_fileobj=after.encode(), path_in_repo="README.md", repo_id=repo_id, commit_message="Card", **place
        )


def _text(repo_id: str, info: Any) -> str:
    """Splits and columns as the metadata have them; those of the first configuration, if there are several."""
    info = info[0] if isinstance(info, list) else info or {}
    lines = [_MARK, "", f"# {repo_id.rpartition('/')[2]}", "", "Preference data."]
    lines += ["", "| split | rows |", "|---|---|"]
    lines += [f"| {split['name']} | {split['num_examples']} |" for split in info.get("splits", [])]
    lines += ["", "| column | what |", "|---|---|"]
    names = [feature["name"] for feature in info.get("features", [])]
    lines += [f"| {name} | {_MEANING.get(name, '')} |" for name in names]
    code = f'```python\nfrom datasets import load_dataset\n\npairs = load_dataset("{repo_id}")\n```\n'
    return "\n".join([*lines, "", code])


def _refuse_secrets_in(rows: Iterable[dict[str, Any]], token: str | None) -> None:
    """Parquet is compressed: a search has to go through the rows as text."""
    with tempfile.TemporaryDirectory(prefix="hf_rlx-push-") as scratch:
        write_rows(rows, Path(scratch) / "rows.jsonl")
        found = [finding.what for finding in scan_for_secrets(scratch, [token])]
    if found:
        raise SecretFoundError(f"nothing was uploaded: the rows hold {', '.join(found)}. Remove it, and revoke it")


__all__ = ["push_pairs"]
