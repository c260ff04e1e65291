"""Card, plot and facts beside a model: written together, and a card that somebody has changed is known by its hash."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from hf_rlx.cards.card import PLOT_NAME, write_card
from hf_rlx.cards.facts import FACTS_FILE, RunFacts
from hf_rlx.cards.plots import panels_of, plot_run

logger = logging.getLogger(__name__)


def write_beside(facts: RunFacts, folder: Path, source: Path | None = None, name: str | None = None) -> Path:
    """Write `README.md`, `training.png` (of two logs or more, where matplotlib is installed), `.eval_results` and
    `card_facts.json`; whatever is there is replaced.

    Args:
        facts: what to say. folder: where they go; made if it is missing.
        source: the model's folder, where it is another one; the facts stay with the model then.
        name: that the model's folder will have, where it is to be renamed.

    Returns:
        Path of the card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not panels_of(facts.curve, points=2):
        if (folder / FACTS_FILE).is_file():  # the plot is of an earlier, longer run that was saved here
            (folder / PLOT_NAME).unlink(missing_ok=True)
    else:
        try:
            plot_run(facts.curve, folder / PLOT_NAME)
        except ImportError as error:
            logger.warning("no plot: %s", error)
    card = write_card(facts, folder, source, name)
    if source is None or source.resolve() == folder.resolve():
        facts.save(folder, _digest(card))
    return card


def is_ours(folder: Path) -> bool:
    """Whether the folder has no card, or still the one that was written there last by `write_beside`."""
    card, noted = folder / "README.md", folder / FACTS_FILE
    if not card.is_file():
        return True
    if not noted.is_file():
        return False
    try:
        told = json.loads(noted.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return False
    return isinstance(told, dict) and told.get("card_sha256") == _digest(card)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
