"""Reward functions in worker processes: what reaches them and comes back, and how they die.

Every test has a time limit, since a fault here is a wait without end. `fresh` is a folder for files by which a
function in its process tells the test something.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_rlx.rollout.isolation import Isolated, plain_state
from hf_rlx.rollout.reward_models import RewardError, RewardTimeoutError, RewardWorkerError
from hf_rlx.rollout.scoring import RewardScorer, ScoreRequest
from hf_rlx.rollout.seeding import call_seed
from tests.rollout.test_scoring import NAN, request, same, score

pytestmark = pytest.mark.timeout(60)


@contextlib.contextmanager
def isolated(function, timeout=None):
    worker = Isolated(function, "f", timeout)
    try:
        yield worker
    finally:
        worker.close()


def gone(pid, seconds=5.0):
    """Whether a process ends in time; one that nobody has waited for yet counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


# --- what reaches the function, and what comes back ------------------------------------------------------------------


def test_every_argument_of_the_convention_arrives_in_another_process():
    parent = os.getpid()

    def reward(prompts, completions, completion_ids, answer, tests, trainer_state, log_extra, log_metric, **kwargs):
        assert os.getpid() != parent
        assert (prompts, completion_ids, kwargs) == (["2+2="] * 2, [[0, 7], [1, 7]], {"level": [3, 3]})
        assert tests == [{"in": [1, 2]}] * 2
        log_extra("length", [len(text) for text in completions])
        log_metric("share", np.float32(0.5))
        return [float(a == "4") + trainer_state.global_step for a in answer]

    state = State(global_step=7)
    one = request(completions=("x", "yy"), answer="4", level=3, tests={"in": [1, 2]})
    result = score(reward, one, isolate=True, trainer_state=state)
    same(result.rewards, [[8.0], [8.0]])
    assert result.extra == {"length": [1, 2]}
    assert result.metrics["share"] == 0.5
    assert result.metrics["rewards/reward/infra"] == 0


@dataclass
class State:
    """Like transformers' TrainerState."""

    global_step: int = 0
    best_metric: float | None = None
    log_history: list = field(default_factory=list)
    handle: object = field(default_factory=threading.Lock)


def test_of_the_trainers_state_the_plain_parts_are_passed():
    """Numbers, texts, None and the last 100 of 150 log entries; not the lock."""
    passed = plain_state(State(3, None, [{"step": i} for i in range(150)]))
    assert vars(passed) == {
        "global_step": 3,
        "best_metric": None,
        "log_history": [{"step": i} for i in range(50, 150)],
    }
    assert plain_state("step 5") == "step 5"
    assert plain_state(threading.Lock()) is None


def test_kinds_of_functions_that_can_be_sent():
    """By name, by value with what they close over, objects with state (which lives in the worker), partials, and one
    that returns the call of an async function."""

    class Counts:
        def __init__(self):
            self.calls = 0

        def __call__(self, completions):
            self.calls += 1
            return [float(self.calls)] * len(completions)

        def method(self, completions):
            return self(completions)

    async def coroutine(completions):
        return [5.0] * len(completions)

    def helper(text):
        return 2.0 * len(text)

    bonus, counts = 0.5, Counts()
    for function, expected in [
        (json.dumps, '["x"]'),
        (lambda completions: [helper(text) + bonus for text in completions], [2.5]),
        (counts, [1.0]),
        (counts.method, [1.0]),
        (functools.partial(lambda completions, factor: [factor], factor=3.0), [3.0]),
        (lambda completions: coroutine(completions), [5.0]),
        (lambda completions: np.array([1.5], dtype=np.float32), [1.5]),
    ]:
        with isolated(function) as worker:
            reply = worker.call([["x"]], {})
            assert reply.error is None, reply.error
            assert (reply.value if isinstance(expected, str) else list(reply.value)) == expected
    with isolated(counts) as worker:
        assert [worker.call([["x"]], {}).value for _ in range(3)] == [[1.0], [2.0], [3.0]]
    assert counts.calls == 0


def test_what_cannot_be_sent_is_refused_at_once():
    numbers = (float(i) for i in range(9))

    def draws(completions):
        return [next(numbers) for _ in completions]

    with pytest.raises(ValueError, match=r"'draws' cannot be sent to a worker process \(isolate_rewards\).*generator"):
        RewardScorer(draws, isolate=True)


SCRIPT = """
import sys
import re
from hf_rlx.rollout.isolation import Isolated

PATTERN = re.compile("a+")
UNUSED = (x for x in 'ab')

class Rule:
    def holds(self, text):
        return bool(PATTERN.fullmatch(text))

def rule(completions, **_):
    print("from the worker", flush=True)
    return [float(Rule().holds(text)) for text in completions] + ["torch" in sys.modules]

worker = Isolated(rule, "rule", 20.0)
print(worker.call([["aa", "b"]], {}).value)
print("torch" in sys.modules)
"""


def test_a_function_of_a_script_without_a_main_guard(tmp_path):
    """It goes by value, with the globals that it refers to and no others (`UNUSED` cannot be pickled); the script is
    not run again; torch is loaded on neither side; what the worker prints is seen; the worker ends with the script."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["from the worker", "[1.0, 0.0, False]", "False", ""]


# --- faults of the function ------------------------------------------------------------------------------------------


def test_an_exception_comes_back_with_its_type_and_traceback():
    def breaks_on_c(completions, **kwargs):
        if "c" in completions:
            raise ValueError("cannot parse c")
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=r"'breaks_on_c' raised ValueError: cannot parse c\n.*\n.*: 'c'") as caught:
        score(breaks_on_c, isolate=True)
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert "in its worker process:\nTraceback" in cause.__notes__[-1]
    assert 'raise ValueError("cannot parse c")' in cause.__notes__[-1]
    result = score(breaks_on_c, isolate=True, on_error="skip")
    same(result.rewards[:, 0], [1.0, 1.0, NAN, 1.0])
    assert result.metrics["rewards/breaks_on_c/errors"] == 1


def test_an_exception_of_a_class_that_cannot_travel_keeps_its_name():
    def reward(completions):
        class OddError(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        raise OddError(1, 2)

    with isolated(reward) as worker:
        error = worker.call([["x"]], {}).error
    assert (type(error).__name__, str(error)) == ("OddError", "1 and 2")


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_order_to_stop_is_not_an_abstention(error):
    def reward(completions):
        raise error

    with pytest.raises(RewardError, match=type(error).__name__):
        score(reward, isolate=True, on_error="skip")


def test_what_cannot_be_pickled_is_an_error_on_either_way():
    with isolated(lambda completions: [threading.Lock()]) as worker:
        assert "cannot pickle '_thread.lock' object" in str(worker.call([["x"]], {}).error)
        error = worker.call([[threading.Lock()]], {}).error
        assert isinstance(error, TypeError)
        assert "must be picklable" in error.__notes__[0]


def test_a_function_that_the_worker_cannot_load_is_told(tmp_path, monkeypatch):
    path = tmp_path / "only_here.py"
    path.write_text("def reward(completions):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here

    path.unlink()
    with isolated(only_here.reward) as worker:
        error = worker.call([["x"]], {}).error
    assert isinstance(error, ModuleNotFoundError)
    assert any("while the worker process loaded the function" in note for note in error.__notes__)


# --- death and time --------------------------------------------------------------------------------------------------


HANGS = {
    "interpreter lock": lambda: 9**9**9,
    "regular expression": lambda: re.match(r"(a+)+$", "a" * 40 + "b"),
    "sleep": lambda: time.sleep(60),
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_call_past_its_deadline_is_killed_and_the_others_are_scored(hang, tmp_path):
    """Also one that holds the interpreter lock, and what it started. Limit 0.5 s: all is over within 10 s."""
    pids, hangs = tmp_path / "pids", HANGS[hang]

    def reward(completions, **kwargs):
        if completions[0] == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            pids.write_text(f"{os.getpid()} {child.pid}")
            hangs()
        return [1.0] * len(completions)

    start = time.monotonic()
    texts = ("one", "hang", "two", "three")
    requests = [request(completions=(text, "x")) for text in texts]
    result = score(reward, *requests, isolate=True, timeout=0.5, on_error="skip")
    assert time.monotonic() - start < 10
    same(result.rewards[:, 0], [1.0, 1.0, NAN, NAN, 1.0, 1.0, 1.0, 1.0])
    assert result.metrics["rewards/timeouts"] == 1
    assert result.metrics["rewards/reward/errors"] == 2
    assert result.metrics["rewards/reward/infra"] == 0
    assert all(gone(int(pid)) for pid in pids.read_text().split())


def test_the_deadline_does_not_count_the_start_of_the_worker():
    """Loading the function takes 0.8 s, a call none; the limit is 0.5 s."""

    class SlowToLoad:
        def __setstate__(self, state):
            time.sleep(0.8)

        def __getstate__(self):
            return {"some": "state"}

        def __call__(self, completions):
            return [1.0]

    start = time.monotonic()
    same(score(SlowToLoad(), request(completions=("x",)), isolate=True, timeout=0.5).total, [1.0])
    assert time.monotonic() - start > 0.8


def test_in_raise_mode_a_deadline_raises():
    with pytest.raises(RewardTimeoutError, match=r"(?s)'sleep' did not return within 0.2 s.*'x'"):
        score(
            lambda completions: time.sleep(60), request(completions=("x",)), names=["sleep"], isolate=True, timeout=0.2
        )


DEATHS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: os._exit(3),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_worker_that_dies_is_replaced_and_asked_again(death, tmp_path):
    """It dies in the first call for "b" only: the same rewards as a run without that, and one death counted."""
    die, mark = DEATHS[death], tmp_path / "mark"

    def reward(completions, **kwargs):
        if completions[0] == "b" and not mark.exists():
            mark.touch()
            die()
        return [float(ord(text)) for text in completions]

    requests = [request(completions=(text, "x")) for text in "abc"]
    result = score(reward, *requests, isolate=True, timeout=20)
    assert mark.exists()
    same(result.rewards[:, 0], [97.0, 120.0, 98.0, 120.0, 99.0, 120.0])
    assert result.metrics["rewards/reward/infra"] == 1
    assert result.metrics["rewards/reward/errors"] == 0


def test_a_worker_killed_from_outside_in_the_middle_of_a_call(tmp_path):
    pid = tmp_path / "pid"

    def reward(completions, **kwargs):
        if not pid.exists():
            pid.with_suffix(".new").write_text(str(os.getpid()))
            pid.with_suffix(".new").rename(pid)
            time.sleep(60)
        return [1.0] * len(completions)

    with RewardScorer(reward, isolate=True, timeout=30) as scorer:
        scorer.submit(request())
        while not pid.exists():
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        result = scorer.gather()
    same(result.rewards[:, 0], [1.0] * 4)
    assert result.metrics["rewards/reward/infra"] == 1


def test_a_completion_that_always_kills_its_worker_abstains(caplog):
    """ "c" dies with its group (twice) and alone (twice): four deaths, one row lost."""

    def reward(completions, **kwargs):
        if "c" in completions:
            os._exit(3)
        return [1.0] * len(completions)

    with caplog.at_level(logging.WARNING):
        result = score(reward, isolate=True, on_error="skip")
    same(result.rewards[:, 0], [1.0, 1.0, NAN, 1.0])
    assert result.metrics["rewards/reward/infra"] == 4
    assert result.metrics["rewards/reward/errors"] == 1
    assert "'reward' ended its worker process, and that which replaced it (with exit code 3)" in caplog.text
    with pytest.raises(RewardWorkerError, match="with exit code 3"):
        score(reward, isolate=True)


@pytest.fixture
def forge():
    """Writes a reply to the call of a number into every open file, as multiprocessing frames it: its length, then 8
    bytes of number. Made here, so that it goes to workers by value and this module is not imported there."""

    def write(call, content):
        reply = call.to_bytes(8, "little") + content
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, struct.pack("!i", len(reply)) + reply)

    return write


def test_a_fork_that_returns_as_well_does_not_answer():
    """Two processes return; one of them is the worker. Every group gets its own rewards: a is 97."""

    def reward(completions):
        os.fork()
        return [float(ord(text)) for text in completions]

    result = score(reward, *[request(completions=(text,)) for text in "abcd"], isolate=True, timeout=20)
    same(result.total, [97.0, 98.0, 99.0, 100.0])
    assert result.metrics["rewards/reward/infra"] == 0


def test_a_reply_to_another_call_costs_the_worker(forge):
    """In call 1 the function itself replies 7, so that its own 97 is left for call 2: that worker is dropped, and a
    new one says 98."""

    def reward(completions):
        if completions == ["a"]:
            forge(1, pickle.dumps(([7.0], None, {}, [])))
        return [float(ord(text)) for text in completions]

    with isolated(reward, 20.0) as worker:
        assert worker.call([["a"]], {}).value == [7.0]
        replies = [worker.call([[text]], {}) for text in "bc"]
        assert [(reply.value, reply.deaths) for reply in replies] == [([98.0], 1), ([99.0], 0)]


def test_a_reply_that_cannot_be_read_costs_the_worker(forge, tmp_path):
    """Call 1 is spoilt and asked again as call 2; calls 3 and 4 are both spoilt: lost, and it is said how."""
    calls = tmp_path / "calls"
    calls.touch()

    def reward(completions):
        with calls.open("a") as file:
            file.write("x")
        number = calls.stat().st_size
        if number != 2:
            forge(number, b"nonsense")
        return [1.0]

    with isolated(reward, 20.0) as worker:
        reply = worker.call([["x"]], {})
        assert (reply.value, reply.deaths) == ([1.0], 1)
        reply = worker.call([["x"]], {})
        assert (reply.lost, reply.deaths) == ("died", 2)
        assert reply.how.startswith("its reply cannot be read: UnpicklingError")


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: (1.0 for _ in range(4)), "<generator.*of type generator"),
        (lambda: dict.fromkeys(range(4), 1.0).values(), r"dict_values\(\[.*of type dict_values"),
    ],
)
def test_what_is_no_list_is_refused_alike(make, shown, isolate):
    with pytest.raises(RewardError, match=f"'reward' returned {shown}; expected a list of 4 rewards"):
        score(lambda completions: make(), names=["reward"], isolate=isolate)


# --- random numbers --------------------------------------------------------------------------------------------------


def test_every_call_is_seeded_and_so_are_libraries_that_it_imports():
    """A worker that imports numpy and torch in this call, and one that has them: the same. Each generator as its own
    library seeds it with 5. Without a seed, no call is like another."""

    def dice(completions):
        news = [name not in sys.modules for name in ("numpy", "torch")]
        import numpy
        import torch

        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))], news

    with isolated(dice) as worker:
        (first, news), (other, _), (again, known) = (worker.call([["x"]], {}, seed).value for seed in (5, 6, 5))
        free = [worker.call([["x"]], {}).value[0] for _ in range(2)]
    assert (news, known) == ([True, True], [False, False])
    assert first == again != other
    assert free[0] != free[1]
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    assert first == [*expected, float(torch.rand((), generator=torch.Generator().manual_seed(5)))]


def test_random_rewards_follow_from_the_seed_and_the_place(tmp_path):
    """From run seed, process, step and the request's place; not from the worker, nor from earlier rollouts."""
    mark = tmp_path / "mark"

    def reward(completions):
        if completions[0] == "die" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return [random.random() for _ in completions]

    def rewards(seed, *rollouts, text="x"):
        with RewardScorer(reward, isolate=True, seed=seed, timeout=20) as scorer:
            for step in rollouts:
                scorer.trainer_state = SimpleNamespace(global_step=step)
                scorer.submit(request(completions=("x", "y")))
                scorer.submit(request(completions=(text, "y")))
                result = scorer.gather()
        return result.rewards[:, 0].tolist()

    whole = rewards((3, 0), 0, 1, 2)
    assert len(set(whole)) == 4
    dice = random.Random(call_seed(3, 0, 2, 0, "reward", [0, 1]))
    assert whole[:2] == pytest.approx([dice.random(), dice.random()], abs=1e-7)
    assert rewards((3, 0), 2) == whole
    assert rewards((3, 0), 2, text="die") == whole
    assert mark.exists()
    for seed, step in [((4, 0), 2), ((3, 1), 2), ((3, 0), 1)]:
        assert not set(rewards(seed, step)) & set(whole)


# --- the scorer's side -----------------------------------------------------------------------------------------------


def test_async_functions_and_models_stay_and_it_is_said(caplog):
    async def judge(completions):
        return [1.0] * len(completions)

    def model(completions):
        return [float(os.getpid())] * len(completions)

    model.runs_on_main_thread = True
    with caplog.at_level(logging.WARNING):
        result = score([judge, model, lambda completions: [2.0]], request(completions=("x",)), isolate=True)
    assert result.rewards[0, 1] == os.getpid()
    assert "isolate_rewards: judge, model run in this process" in caplog.text
    assert "rewards/judge/infra" not in result.metrics


def test_isolated_functions_run_side_by_side_and_while_this_process_works():
    """Each holds its own interpreter's lock 0.4 s a call, three calls each; here 1.2 s of other work: one after the
    other it would be 3.6 s with the workers' start on top."""

    def busy(completions):
        time.sleep(0.4)
        return [1.0]

    with RewardScorer([busy, busy], isolate=True) as scorer:
        scorer.submit(request(completions=("warm",)))
        scorer.gather()
        start = time.monotonic()
        for _ in range(3):
            scorer.submit(request(completions=("x",)))
        time.sleep(1.2)
        scorer.gather()
        assert time.monotonic() - start < 2.4


def test_closing_ends_a_call_that_runs_and_its_worker(tmp_path):
    pid = tmp_path / "pid"

    def reward(completions):
        pid.write_text(str(os.getpid()))
        time.sleep(60)

    scorer = RewardScorer(reward, isolate=True)
    scorer.submit(request(completions=("x",)))
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < 5
    assert gone(int(pid.read_text()))


def test_a_forgotten_scorer_ends_its_workers():
    scorer = RewardScorer(lambda completions: [float(os.getpid())], isolate=True)
    scorer.submit(request(completions=("x",)))
    pid = int(scorer.gather().total[0])
    del scorer
    assert gone(pid)


ORPHAN = """
import os, sys, time
from hf_rlx.rollout.isolation import Isolated

def reward(completions):
    open(sys.argv[1], "w").write(str(os.getpid()))
    9 ** 9 ** 9

worker = Isolated(reward, "reward")
print("up", flush=True)
worker.call([["x"]], {})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal of a parent is Linux's")
def test_a_worker_that_holds_its_lock_dies_with_a_killed_parent(tmp_path):
    pid = tmp_path / "pid"
    code = ORPHAN.replace("sys.argv[1]", repr(str(pid)))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    )
    try:
        while not (pid.exists() and pid.read_text()):
            assert parent.poll() is None
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
    assert gone(int(pid.read_text()))


def test_a_call_that_is_interrupted_does_not_answer_the_next(monkeypatch):
    """Ctrl-C while the caller waits: the worker goes, and with it the answer nobody took."""
    with isolated(lambda completions: [float(len(completions[0]))]) as worker:
        assert worker.call([["a"]], {}).value == [1.0]
        with monkeypatch.context() as patch:
            patch.setattr(type(worker._pipe), "poll", interrupt)
            with pytest.raises(KeyboardInterrupt):
                worker.call([["bb"]], {})
        assert worker.call([["ccc"]], {}).value == [3.0]


def interrupt(*_):
    raise KeyboardInterrupt


def test_conversations_and_nested_columns_travel():
    prompt = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yo!"}]

    def reward(prompts, completions, tests):
        return [
            len(p[0]["content"]) + len(c[0]["content"]) + t["n"][0]
            for p, c, t in zip(prompts, completions, tests, strict=True)
        ]

    result = score(reward, ScoreRequest(prompt, [answer], [[1]], {"tests": {"n": [10]}}), isolate=True)
    same(result.total, [15.0])
