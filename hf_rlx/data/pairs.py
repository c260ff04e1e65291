"""Preference data: from judged responses to pairs and ranked lists, and what is wrong with them. Knows no torch.

| rows in | function |
|---|---|
| prompt, responses, scores | `build_pairs` |
| prompt, responses, ranks (or ranking) | `from_rankings` |
| prompt, responses, ratings of several annotators | `from_ratings` |
| prompt, completion, label (or reward): one completion a row | `from_outcomes` |
| prompt, response_a, response_b, verdict: one vote a row | `from_judgements` |
| prompt, chosen, rejected | `from_pairs` |
| instruction, completions | `from_ultrafeedback`, then `build_pairs` |

    deduplicate       repeated rows, and those that say the opposite of one another
    filter_margin     near ties
    length_balance    whether the longer answer is chosen more often; `balance_lengths` drops pairs until it is not
    agreement         percent agreement, Cohen's and Fleiss' kappa, Krippendorff's alpha
    convert           explicit or implicit prompt, text, messages, "\\n\\nHuman: ...\\n\\nAssistant: ..."
    read_rows, write_rows  files that `datasets.load_dataset` reads too
    prepare_pairs     all of it in one call, with a report; `hf-rlx pairs FILE` on the command line

What they return is a list of rows, for `datasets.Dataset.from_list`, with what was left out and why (`Pairs`).

How pairs are tokenized stands in `hf_rlx/data/pair_encoding.py`; its names can be imported from here too, which loads
torch then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hf_rlx.data.pair_agreement import (
    Agreement,
    agreement,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    percent_agreement,
)
from hf_rlx.data.pair_building import Pairs, Strategy, build_pairs
from hf_rlx.data.pair_files import read_rows, write_rows
from hf_rlx.data.pair_filters import LengthBalance, balance_lengths, deduplicate, filter_margin, length_balance
from hf_rlx.data.pair_formats import convert, from_pairs, from_ultrafeedback
from hf_rlx.data.pair_judges import from_judgements
from hf_rlx.data.pair_report import PairReport, kind_of, prepare_pairs
from hf_rlx.data.pair_sources import from_outcomes, from_rankings, from_ratings

_ENCODING = ("EncodedAnswers", "RankedGroup", "check_preferences", "encode_answers", "encode_preference", "fit")

__all__ = [
    "Agreement",
    "LengthBalance",
    "PairReport",
    "Pairs",
    "Strategy",
    "agreement",
    "balance_lengths",
    "build_pairs",
    "cohen_kappa",
    "convert",
    "deduplicate",
    "filter_margin",
    "fleiss_kappa",
    "from_judgements",
    "from_outcomes",
    "from_pairs",
    "from_rankings",
    "from_ratings",
    "from_ultrafeedback",
    "kind_of",
    "krippendorff_alpha",
    "length_balance",
    "percent_agreement",
    "prepare_pairs",
    "read_rows",
    "write_rows",
]


def __getattr__(name: str) -> Any:
    if name in _ENCODING:
        return getattr(import_module("hf_rlx.data.pair_encoding"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
