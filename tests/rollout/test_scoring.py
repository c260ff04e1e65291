"""RewardScorer with fake functions: the call convention, overlap and order, and one test per fault.

The default request is prompt "2+2=" with completions "a", "b", "c", "d" and column `answer="4"`.
"""

import asyncio
import functools
import importlib.util
import logging
import math
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from hf_rlx.rollout.reward_models import RewardError, RewardTimeoutError
from hf_rlx.rollout.scoring import RewardScorer, ScoreRequest

NAN = math.nan


def request(prompt="2+2=", completions=("a", "b", "c", "d"), **columns):
    ids = [[index, 7] for index in range(len(completions))]
    return ScoreRequest(prompt, list(completions), ids, columns or {"answer": "4"})


def score(func, *requests, **options):
    with RewardScorer(func, **options) as scorer:
        for one in requests or (request(),):
            scorer.submit(one)
        return scorer.gather()


def returns(value):
    def reward(completions, **kwargs):
        return value

    return reward


def same(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor(expected), equal_nan=True)


# --- the call --------------------------------------------------------------------------------------------------------


def test_every_argument_of_the_convention_arrives():
    seen = {}

    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids, state=trainer_state)
        return [1.0, 2.0]

    result = score(reward, request(completions=("x", "y"), answer="4", level=3), trainer_state="step 5")
    assert seen == {
        "prompts": ["2+2=", "2+2="],
        "completions": ["x", "y"],
        "ids": [[0, 7], [1, 7]],
        "state": "step 5",
        "answer": ["4", "4"],
        "level": [3, 3],
    }
    same(result.rewards, [[1.0], [2.0]])
    same(result.total, [1.0, 2.0])
    assert result.names == ["reward"]
    assert result.rewards.dtype == result.total.dtype == torch.float32


def test_a_function_without_kwargs_gets_only_what_it_accepts():
    def by_column(completions, answer):
        return [float(a == "4") for a in answer]

    def by_position(prompts, completions, /, *, completion_ids=None):
        return [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]

    result = score([by_column, by_position], request(answer="4", unused=1))
    same(result.rewards, [[1.0, 5.0]] * 4)


def test_the_arguments_stand_for_the_columns_of_their_names():
    def reward(completions, **kwargs):
        assert not {"prompt", "completion"} & set(kwargs)
        assert completions == ["x"]
        return [1.0]

    columns = {"prompt": "p", "completion": "gold", "completions": ["gold"]}
    same(score(reward, ScoreRequest("2+2=", ["x"], [[1]], columns)).total, [1.0])


def test_a_required_parameter_that_no_column_gives_is_named():
    def reward(completions, answers):
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"'reward' requires the parameter 'answers'.*mean 'answer'.*completion_ids"):
        score(reward, on_error="skip")


def test_conversations_arrive_as_message_lists_and_may_be_changed():
    prompt = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yo"}]

    def vandal(prompts, completions, **kwargs):
        prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
        completions.clear()
        return [0.0, 0.0]

    def reads(prompts, completions, **kwargs):
        return [len(p[0]["content"]) + len(c[0]["content"]) for p, c in zip(prompts, completions, strict=True)]

    for funcs in ([vandal, reads], [reads, vandal]):
        result = score(funcs, ScoreRequest(prompt, [answer, answer], [[1], [2]], {}))
        same(result.rewards[:, result.names.index("reads")], [4.0, 4.0])
    assert (prompt[0]["content"], answer[0]["content"]) == ("hi", "yo")


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions, **kwargs):
        return [self.factor] * len(completions)

    def method(self, completions):
        return [-self.factor] * len(completions)


class AsyncScale(Scale):
    async def __call__(self, completions, **kwargs):
        assert threading.current_thread().name == "reward-async-loop"
        return [self.factor] * len(completions)


async def async_double(completions, factor=2.0):
    return [factor] * len(completions)


def test_kinds_of_callables_and_their_names():
    def plain_but_async(completions, **kwargs):
        return async_double(completions)

    funcs = [
        Scale(1.0),
        Scale(3.0).method,
        functools.partial(Scale(0.0).__call__),
        functools.partial(async_double, factor=5.0),
        AsyncScale(6.0),
        async_double,
        plain_but_async,
    ]
    result = score(funcs, request(completions=("x",)))
    same(result.rewards, [[1.0, -3.0, 0.0, 5.0, 6.0, 2.0, 2.0]])
    assert result.names[:2] == ["Scale", "method"]
    assert result.names[3:6] == ["async_double", "AsyncScale", "async_double_2"]


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [1, 0.0, True, False],
        (np.float32(1.0), np.int64(0), np.bool_(True), 0),
        torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
        np.array([1, 0, 1, 0]),
        [torch.tensor(1.0), torch.tensor(0), np.array(1.0), 0],
    ],
)
def test_what_counts_as_numbers(value):
    same(score(returns(value)).rewards[:, 0], [1.0, 0.0, 1.0, 0.0])


def test_none_abstains_and_is_no_zero():
    """Group [1, None, 0, None] (TRL PR 5902): the None rows are NaN, and out of the total."""
    result = score(returns([1, None, 0, None]))
    same(result.rewards[:, 0], [1.0, NAN, 0.0, NAN])
    same(result.total, [1.0, NAN, 0.0, NAN])
    assert result.metrics["rewards/reward/abstained"] == 2
    assert result.metrics["rewards/reward/errors"] == 0
    assert result.metrics["rewards/unscored"] == 2


def test_the_total_weighs_the_components_present():
    def first(completions):
        return [1.0, None, 3.0, None]

    def second(completions):
        return [10.0, 20.0, None, None]

    result = score([first, second], weights=[1.0, 0.1])
    same(result.total, [2.0, 2.0, 3.0, NAN])
    assert result.metrics["rewards/unscored"] == 1


def test_nan_abstains_and_is_told_once(caplog):
    with caplog.at_level(logging.WARNING), RewardScorer(returns([1.0, NAN, NAN, 0.0])) as scorer:
        for _ in range(2):
            scorer.submit(request())
            scorer.submit(request())
            result = scorer.gather()
    same(result.rewards[:, 0], [1.0, NAN, NAN, 0.0] * 2)
    assert result.metrics["rewards/reward/abstained"] == 4
    assert [r.message.count("returned NaN") for r in caplog.records] == [1]
    assert "completion at index 1 of 4: 'b'" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            [1.0, "1.0", 0.0, 0.0],
            "'reward' returned '1.0' of type str; expected a number.*'2\\+2='.*index 1 of 4: 'b'",
        ),
        ([1.0, 0.0, [1.0], 0.0], "'reward' returned \\[1.0\\] of type list; .*index 2 of 4: 'c'"),
        ([1.0, 0.0, 1j, 0.0], "of type complex"),
        ([1.0, 2.0, 3.0], r"3 rewards; expected 4, one each \(it is called for the 4 completions of one prompt at a"),
        (torch.zeros(5), "returned 5 rewards; expected 4"),
        (1.0, "returned 1.0 of type float; expected a list of 4"),
        (None, "returned None of type NoneType; expected a list of 4"),
        ("abcd", "returned 'abcd' of type str; expected a list of 4"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "of type dict; expected a list of 4"),
        (torch.tensor(1.0), "of type Tensor; expected a list of 4"),
    ],
)
def test_a_result_of_wrong_type_or_length_always_raises(value, message, on_error):
    with pytest.raises(RewardError, match=f"(?s){message}"):
        score(returns(value), on_error=on_error)


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e38, 10**400])
def test_values_out_of_range(value, caplog):
    with pytest.raises(RewardError, match=r"(?s)'reward' returned -?(inf|1e\+38).*finite.*index 2 of 4: 'c'"):
        score(returns([0.0, 1.0, value, 0.5]))
    with caplog.at_level(logging.WARNING):
        result = score(returns([0.0, 1.0, value, 0.5]), on_error="skip")
    same(result.rewards[:, 0], [0.0, 1.0, NAN, 0.5])
    assert result.metrics["rewards/reward/errors"] == result.metrics["rewards/reward/abstained"] == 1
    assert len(caplog.records) == 1


# --- exceptions ------------------------------------------------------------------------------------------------------


def breaks_on_c(completions, **kwargs):
    if "c" in completions:
        raise ValueError("cannot parse c")
    return [1.0] * len(completions)


async def async_breaks_on_c(completions, **kwargs):
    return breaks_on_c(completions)


def main_breaks_on_c(completions, **kwargs):
    return breaks_on_c(completions)


main_breaks_on_c.runs_on_main_thread = True
BREAKING = [breaks_on_c, async_breaks_on_c, main_breaks_on_c]


@pytest.mark.parametrize("func", BREAKING)
def test_an_exception_names_function_prompt_and_completion(func):
    with pytest.raises(RewardError) as caught:
        score(func, request(prompt="q" * 500))
    message = str(caught.value)
    assert f"reward function '{func.__name__}' raised ValueError: cannot parse c" in message
    assert "completion at index 2 of 4: 'c'" in message
    assert "q" * 100 + " ... " + "q" * 100 in message
    assert "q" * 101 not in message
    assert re.search(r"\nraised at (\S*/)?test_scoring\.py:\d+, in breaks_on_c$", message)
    assert isinstance(caught.value.__cause__, ValueError)


def test_where_a_function_raised_is_a_line_of_its_author(tmp_path):
    """Line 5 of the file calls json, which raises inside the standard library; in a worker process likewise."""
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef reads(completions, **_):\n    return [json.loads(c) for c in completions]\n")
    spec = importlib.util.spec_from_file_location("mine_of_a_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for isolate in (False, True):
        with pytest.raises(RewardError) as caught:
            score(module.reads, request(), isolate=isolate)
        assert f"\nraised at {file}:5, in " in str(caught.value)


@pytest.mark.parametrize("func", BREAKING)
def test_skip_loses_only_the_offending_completion(func, caplog):
    with caplog.at_level(logging.WARNING):
        result = score(func, request(), request(), on_error="skip")
    same(result.rewards[:, 0], [1.0, 1.0, NAN, 1.0] * 2)
    assert result.metrics[f"rewards/{func.__name__}/errors"] == 2
    assert len(caplog.records) == 1
    assert "cannot parse c" in caplog.text


def test_a_passing_fault_is_told_and_costs_nothing_under_skip():
    calls = []

    def flaky(completions):
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("reset")
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"ConnectionError: reset; .*for none of them alone"):
        score(flaky)
    assert calls == [4, 1, 1, 1, 1]
    calls.clear()
    same(score(flaky, on_error="skip").rewards[:, 0], [1.0] * 4)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_that_would_end_a_worker_are_reported(error, is_async):
    def sync(completions, **kwargs):
        raise error

    async def coroutine(completions, **kwargs):
        raise error

    with pytest.raises(RewardError, match=type(error).__name__):
        score(coroutine if is_async else sync, request(completions=("x",)))


def test_the_first_fault_in_order_is_raised_and_the_scorer_stays_usable():
    def slow_then_bad(completions):
        if completions[0] == "slow":
            time.sleep(0.1)
        if completions[0] != "good":
            raise ValueError(completions[0])
        return [1.0]

    with RewardScorer([slow_then_bad, async_breaks_on_c]) as scorer:
        for text in ("slow", "c"):
            scorer.submit(request(completions=(text,)))
        with pytest.raises(RewardError, match="slow_then_bad' raised ValueError: slow"):
            scorer.gather()
        assert scorer.gather().rewards.shape == (0, 2)
        scorer.submit(request(completions=("good",)))
        same(scorer.gather().rewards, [[1.0, 1.0]])


def test_after_an_error_what_was_submitted_with_it_is_dropped():
    ran = []
    all_wait = threading.Event()  # what has not begun is dropped without being cancelled

    def bad_first(completions):
        ran.append(completions[0])
        if completions[0] == "bad":
            assert all_wait.wait(20)
            raise ValueError
        time.sleep(0.4)
        return [1.0]

    async def endless(completions):
        ran.append("begun")
        if ran.count("begun") == 4:
            all_wait.set()
        try:
            await asyncio.sleep(0 if completions[0] == "new" else 20)
        except asyncio.CancelledError:
            ran.append("cancelled")
            raise
        return [1.0]

    with RewardScorer([bad_first, endless]) as scorer:
        for text in ("bad", "running", "queued", "queued"):
            scorer.submit(request(completions=(text,)))
        with pytest.raises(RewardError):
            scorer.gather()
        scorer.submit(request(completions=("new",)))
        same(scorer.gather().rewards, [[1.0, 1.0]])
        assert ran.count("cancelled") == 4
        assert "queued" not in ran


# --- time limits -----------------------------------------------------------------------------------------------------


def test_a_hung_thread_is_replaced_and_the_others_are_scored():
    release = threading.Event()
    threads = []

    def hangs(completions, log_extra):
        threads.append(threading.current_thread())
        if completions[0] == "hang":
            release.wait(20)
            log_extra("late", ["never seen"])
        return [1.0] * len(completions)

    try:
        start = time.monotonic()
        texts = ["one", "hang", "two", "three"]
        requests = [request(completions=(text, "x")) for text in texts]
        result = score(hangs, *requests, timeout=0.3, on_error="skip")
        assert time.monotonic() - start < 5
    finally:
        release.set()
    same(result.rewards[:, 0], [1.0, 1.0, NAN, NAN, 1.0, 1.0, 1.0, 1.0])
    assert result.metrics["rewards/timeouts"] == 1
    assert result.metrics["rewards/hangs/errors"] == 2
    assert result.extra == {}
    assert threads[0] is threads[1]
    assert threads[2] is threads[3]
    assert threads[1] is not threads[2]
    assert all(thread.daemon and thread.name == "reward-hangs" for thread in threads)


def test_a_hang_raises_in_raise_mode():
    release = threading.Event()
    with RewardScorer(lambda completions: [float(release.wait(20))], names=["wait"], timeout=0.3) as scorer:
        scorer.submit(request(completions=("x",)))
        with pytest.raises(RewardTimeoutError, match=r"(?s)'wait' did not return within 0.3 s.*'x'"):
            scorer.gather()
        release.set()
        scorer.submit(request(completions=("x",)))
        same(scorer.gather().total, [1.0])
    assert issubclass(RewardTimeoutError, TimeoutError)


def test_the_limit_counts_from_the_start_of_the_call():
    def takes_a_while(completions):
        time.sleep(0.25)
        return [1.0]

    result = score(takes_a_while, *[request(completions=("x",))] * 4, timeout=0.7)
    same(result.total, [1.0] * 4)


def test_a_slow_coroutine_is_cancelled():
    cancelled = []

    async def slow(completions):
        try:
            await asyncio.sleep(20 if completions[0] == "slow" else 0)
        except asyncio.CancelledError:
            cancelled.append(completions[0])
            raise
        return [1.0]

    with RewardScorer(slow, timeout=0.3, on_error="skip") as scorer:
        for text in ("fast", "slow", "fast"):
            scorer.submit(request(completions=(text,)))
        result = scorer.gather()
        scorer.submit(request(completions=("fast",)))
        scorer.gather()
        assert cancelled == ["slow"]
    same(result.total, [1.0, NAN, 1.0])
    assert result.metrics["rewards/timeouts"] == 1


def test_an_async_function_that_blocks_its_loop_is_given_up():
    release = threading.Event()

    async def blocks(completions):
        if completions[0] == "block":
            release.wait(20)
        return [1.0]

    try:
        with RewardScorer(blocks, timeout=0.3) as scorer:
            scorer.submit(request(completions=("block",)))
            with pytest.raises(RewardTimeoutError, match="blocked the event loop"):
                scorer.gather()
            scorer.submit(request(completions=("fine",)))
            same(scorer.gather().total, [1.0])
    finally:
        release.set()


# --- overlap and order -----------------------------------------------------------------------------------------------


def test_submit_returns_at_once_and_scoring_overlaps_with_work():
    """Four requests of 0.2 s in one worker take 0.8 s; 0.8 s of other work passes meanwhile: 0.8 s, not 1.6 s."""

    def slow(completions):
        time.sleep(0.2)
        return [1.0]

    with RewardScorer(slow) as scorer:
        start = time.monotonic()
        handles = [scorer.submit(request(completions=("x",))) for _ in range(4)]
        assert time.monotonic() - start < 0.15
        assert handles == [0, 1, 2, 3]
        assert scorer.pending == 4
        time.sleep(0.8)
        result = scorer.gather()
        assert time.monotonic() - start < 1.4
        assert scorer.pending == 0
    assert 0.8 <= result.metrics["rewards/slow/seconds"] < 1.4


def test_functions_run_in_parallel_and_coroutines_across_requests():
    def slow(completions):
        time.sleep(0.3)
        return [1.0]

    async def slow_too(completions):
        await asyncio.sleep(0.3)
        return [1.0]

    start = time.monotonic()
    score([slow, slow, slow], request(completions=("x",)), names=["a", "b", "c"])
    assert time.monotonic() - start < 0.75
    start = time.monotonic()
    score(slow_too, *[request(completions=("x",))] * 10)
    assert time.monotonic() - start < 1.5


def test_a_function_sees_its_calls_in_submission_order_in_one_thread():
    seen, threads = [], set()

    def stateful(completions):
        time.sleep(0.01 if len(seen) % 3 == 0 else 0)
        seen.append(completions[0])
        threads.add(threading.current_thread().name)
        return [float(len(seen))]

    result = score(stateful, *[request(completions=(str(i),)) for i in range(30)])
    assert seen == [str(i) for i in range(30)]
    assert threads == {"reward-stateful"}
    same(result.total, [float(i + 1) for i in range(30)])


def test_rows_stay_in_order_whatever_the_coroutines_do():
    async def later_first(completions):
        await asyncio.sleep(0.05 if completions[0] == "0" else 0)
        return [float(text) for text in completions]

    requests = [request(completions=("0", "1", "2")), request(completions=("3",)), request(completions=("4", "5"))]
    same(score(later_first, *requests).total, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])


def test_main_thread_functions_run_once_on_all_requests():
    calls = []

    class Judge:
        runs_on_main_thread = True

        def __call__(self, prompts, completions, hint, **kwargs):
            calls.append((threading.current_thread(), prompts, completions, hint))
            return [float(len(text)) for text in completions]

    requests = [request("p", ("a", "bb"), hint=1), request("q", ("ccc",), other=2)]
    same(score(Judge(), *requests).total, [1.0, 2.0, 3.0])
    assert calls == [(threading.current_thread(), ["p", "p", "q"], ["a", "bb", "ccc"], [1, 1, None])]


@pytest.fixture
def interruptible():
    """Ctrl-C raises, also where the tests were started in the background of a shell, which ignores it for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_passes_gather_promptly_and_leaves_the_scorer_usable():
    release = threading.Event()
    with RewardScorer(lambda completions: [float(release.wait(20))]) as scorer:
        scorer.submit(request(completions=("x",)))
        timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            scorer.gather()
        assert time.monotonic() - start < 3
        timer.join()
        release.set()
        scorer.submit(request(completions=("x",)))
        same(scorer.gather().total, [1.0])


def test_an_interrupt_inside_a_main_thread_function_passes():
    def model(completions, **kwargs):
        raise KeyboardInterrupt

    model.runs_on_main_thread = True
    with pytest.raises(KeyboardInterrupt):
        score(model)


# --- logging by the functions ----------------------------------------------------------------------------------------


def test_extra_columns_have_a_value_per_row_and_metrics_are_averaged():
    def first(completions, log_extra, log_metric):
        if completions[0] == "a":
            log_extra("length", [len(text) for text in completions])
        log_metric("share", len(completions))
        return [0.0] * len(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("length", ["s"] * len(completions))
        return [0.0] * len(completions)

    result = score([first, second], request(completions=("a", "bb")), request(completions=("c",)))
    assert result.extra == {"length": [1, 2, None], "second/length": ["s", "s", "s"]}
    assert result.metrics["share"] == 1.5


def test_an_extra_column_of_wrong_length_is_refused():
    def reward(completions, log_extra):
        log_extra("length", [1, 2, 3])
        return [0.0] * 4

    with pytest.raises(RewardError, match="logged 3 values for 'length'; expected 4"):
        score(reward)


# --- construction and end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("funcs", "options", "error", "message"),
    [
        ([], {}, ValueError, "empty"),
        (None, {}, ValueError, r"reward_funcs\[0\] is None"),
        ([returns([]), None], {}, ValueError, r"reward_funcs\[1\] is None"),
        ([returns([])], {"weights": [1.0, 2.0]}, ValueError, "reward_weights has 2 weights for 1 reward functions"),
        ([returns([])], {"names": ["a", "b"]}, ValueError, "names has 2 entries for 1"),
        ([returns([])], {"reward_processing_classes": [None, None]}, ValueError, "reward_processing_classes has 2"),
        ([returns([])], {"timeout": 0}, ValueError, "timeout must be a positive"),
        ([returns([])], {"on_error": "ignore"}, ValueError, "on_error"),
        ("no_such_package.rewards:accuracy", {}, ImportError, "no_such_package.rewards:accuracy"),
    ],
)
def test_bad_arguments(funcs, options, error, message):
    with pytest.raises(error, match=message):
        RewardScorer(funcs, **options)


def test_requests_without_completions_or_ids_are_refused():
    with RewardScorer(returns([])) as scorer:
        for completions, ids in (([], []), (["x"], [])):
            with pytest.raises(ValueError, match="K >= 1 completions and K completion_ids"):
                scorer.submit(ScoreRequest("p", completions, ids, {}))


def test_close_ends_the_threads_and_drops_what_waits():
    ran = []

    def slow(completions):
        ran.append(completions[0])
        time.sleep(0.2)
        return [1.0]

    def names():
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("reward-")}

    before = names()
    scorer = RewardScorer([slow, async_double, returns([1.0])])
    for text in ("0", "1", "2"):
        scorer.submit(request(completions=(text,)))
    time.sleep(0.05)
    scorer.close()
    scorer.close()
    deadline = time.monotonic() + 5
    while names() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert names() - before == set()
    assert ran == ["0"]
    for call in (lambda: scorer.submit(request()), scorer.gather):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_forgotten_scorer_closes_itself():
    scorer = RewardScorer([returns([1.0]), async_double])
    scorer.submit(request(completions=("x",)))
    same(scorer.gather().rewards, [[1.0, 2.0]])
    threads = [loop.thread for loop in scorer._pool.loops.values()]
    assert len(threads) == 2
    del scorer
    assert not any(thread.is_alive() for thread in threads)
