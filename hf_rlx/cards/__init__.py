"""Model cards and plots: facts in, Markdown and PNGs out. Imports no torch."""

from hf_rlx.cards.card import PLOT_NAME, render_card, write_card
from hf_rlx.cards.facts import RunFacts, Score, installed_versions
from hf_rlx.cards.plots import plot_run

__all__ = ["PLOT_NAME", "RunFacts", "Score", "installed_versions", "plot_run", "render_card", "write_card"]
