"""Model cards and plots: facts in, Markdown and PNGs out. Imports no torch."""

from hf_rlx.cards.beside import write_beside
from hf_rlx.cards.card import PLOT_NAME, render_card, write_card
from hf_rlx.cards.command import command_line
from hf_rlx.cards.facts import FACTS_FILE, Course, Measure, RunFacts, Score, installed_versions
from hf_rlx.cards.folder import facts_from_folder
from hf_rlx.cards.plots import plot_run

__all__ = [
    "FACTS_FILE",
    "PLOT_NAME",
    "Course",
    "Measure",
    "RunFacts",
    "Score",
    "command_line",
    "facts_from_folder",
    "installed_versions",
    "plot_run",
    "render_card",
    "write_beside",
    "write_card",
]
