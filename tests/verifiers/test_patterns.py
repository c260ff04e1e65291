"""Expressions of others on text of the model's: a blow-up costs the candidate its score, never the run its life."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest

from hf_rlx.verifiers import JsonVerifier, RegexVerifier, ScriptVerifier, patterns
from hf_rlx.verifiers.answers import last_boxed
from hf_rlx.verifiers.workers import Outcome

BLOWS_UP = r"^(a+)+$"
TRAP = "a" * 40 + "!"  # 2^40 ways to split it


def test_a_blow_up_is_the_candidates_and_the_others_keep_their_scores(caplog):
    """One text of three does not end; the batch is judged again text by text."""
    verifier = RegexVerifier(BLOWS_UP, timeout=0.4)
    reasons: dict[str, list] = {}
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hf_rlx"):
        assert verifier([""] * 3, ["aaa", TRAP, "b"], log_extra=reasons.__setitem__) == [1.0, 0.0, 0.0]
        assert verifier([""], [TRAP]) == [0.0]
    assert time.monotonic() - start < 8
    assert reasons == {"format/reason": ["found", "not decided in 0.4 s", "not found"]}
    assert [record.message.count("was not decided within 0.4 s on 1 of 3") for record in caplog.records] == [1]


def test_other_threads_run_on_meanwhile():
    """The wait holds no lock of the interpreter's: a clock in another thread ticks on."""
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.02):
            ticks.append(time.monotonic())

    clock = threading.Thread(target=tick)
    clock.start()
    RegexVerifier(BLOWS_UP, timeout=0.4)([""], [TRAP])
    over.set()
    clock.join()
    assert len(ticks) > 5


def test_json_pattern_and_ignored_text_are_bounded():
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": BLOWS_UP}}}
    verifier = JsonVerifier(schema, timeout=0.4)
    reasons: dict[str, list] = {}
    texts = ['{"a": "aa"}', '{"a": "%s"}' % TRAP, '{"a": "b"}', "{"]  # noqa: UP031 - braces
    assert verifier([""] * 4, texts, log_extra=reasons.__setitem__) == [1.0, 0.0, 0.0, 0.0]
    assert reasons["json/reason"][1] == "not decided in 0.4 s"
    ignoring = ScriptVerifier("LATIN", ignore=r"(x+)+\d")
    assert ignoring([""] * 2, ["ab xx1", "x" * 40]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "length", "cheap"),
    [
        (r"</think>", 10_000, True),
        (r"\d", 900_000, True),  # no repeat: one try a place
        (r"a+", 900, True),
        (r"a+", 10_000, False),  # from each place to the end: 10^8
        (r"a.*?b.*c", 90, True),  # 91^3
        (r"a.*?b.*c", 200, False),
        (r"(a)", 1, False),  # what is inside groups may repeat
        (r"a{2,}b|c", 90, True),  # the repeat and the branch: 91^3
    ],
)
def test_what_is_cheap_enough_for_this_process(pattern: str, length: int, cheap: bool):
    assert patterns.is_cheap(re.compile(pattern), ["x" * length]) is cheap


def test_flags_of_a_compiled_pattern_go_along():
    verifier = RegexVerifier(re.compile(r"(yes)$", re.IGNORECASE | re.MULTILINE))
    assert verifier([""] * 2, ["so\nYES\nthen", "no"]) == [1.0, 0.0]
    assert RegexVerifier(r"(a).(b)")([""], ["a\nb"]) == [1.0]  # text patterns get DOTALL


@pytest.mark.parametrize("lost", [Outcome(lost="broken", how="gone"), Outcome(lost="late", how="late", cpu=0.01)])
def test_a_process_that_was_not_given_a_chance_is_nobodys_fault(lost: Outcome, monkeypatch):
    class Pool:
        def run(self, job, timeout):
            return lost

    monkeypatch.setattr(patterns, "_pool", Pool)
    assert RegexVerifier(r"(a)")([""], ["a"]) == [None]
    assert JsonVerifier({"pattern": "(a)"})([""], ['"a"']) == [None]


def test_the_timeout_must_be_positive():
    with pytest.raises(ValueError, match="timeout must be positive"):
        RegexVerifier("a", timeout=0)


def test_deeply_nested_boxes_are_opened_in_linear_time():
    """10^5 boxes around one another, the innermost empty."""
    text = "\\boxed{" * 100_000 + "7" + "}" * 100_000
    start = time.perf_counter()
    assert last_boxed(text) == "7"
    assert time.perf_counter() - start < 2
    assert last_boxed(r"\boxed{x = \boxed{5}}") == r"x = \boxed{5}"
    assert last_boxed(r"\boxed{1} \boxed{ \boxed{2}\boxed{3}}") == "3"
