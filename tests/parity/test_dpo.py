"""One batch through TRL 1.16's DPOTrainer and through ours: the same model, rows, loss, gradient and metrics.

In float64 the loss and every entry of every gradient agree to 1e-6, gradients together to 2e-6 of their size: TRL's
loss is float32 even then, and so are our log-probs and Llama's norms, while the two answers' gradients nearly cancel.
In float32 gradients agree to 1e-5 of their size: the packed row and the padded batch add up in another order. SimPO
and ORPO are held to TRL's experimental trainers while those exist.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.pair_batches import PairBatch
from tests.parity.conftest import make_model, move
from tests.tiny import randomise_lora
from tests.trainers.pair_tools import KINDS, config, trainer
from tests.trainers.tools import lora, relative_gap

trl = pytest.importorskip("trl")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

ROWS = [
    {"prompt": "1+2=", "chosen": "3", "rejected": "12"},
    {"prompt": "12+345=", "chosen": "357", "rejected": "9876543"},
    {"prompt": "x", "chosen": "abcd", "rejected": "b"},
]
KEYS = "rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected entropy"


# Of gradients: relative.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 2e-6}


def theirs(tmp_path, rows=ROWS, adapter=False, dtype=torch.float32, **fields):
    """TRL's trainer, its policy moved off the reference."""
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    args = trl.DPOConfig(
        str(tmp_path / "trl"), per_device_train_batch_size=8, gradient_checkpointing=False, **quiet, **fields
    )
    other = trl.DPOTrainer(
        make_model(load_tokenizer("tiny")).to(dtype),
        None if adapter else make_model(load_tokenizer("tiny")).to(dtype),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora() if adapter else None,
    )
    randomise_lora(other.model, "default") if adapter else move(other.model)
    return other


def their_loss(other):
    """Loss, gradient and metrics of all rows as one batch."""
    batch = other.data_collator([other.train_dataset[i] for i in range(len(other.train_dataset))])
    other.model.train()
    loss = other.compute_loss(other.model, batch)
    loss.backward()
    metrics = {name: sum(values) / len(values) for name, values in other._metrics["train"].items()}
    return float(loss.detach()), grads_of(other.model), metrics


def grads_of(model):
    """Gradients by the names that the bare model's weights have."""
    return {
        n.removeprefix("base_model.model.").replace(".default.", ".policy."): p.grad.clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def ours(tmp_path, rows=ROWS, adapter=False, kind="dpo", dtype=torch.float32, **fields):
    """Our trainer, its policy moved the same way."""
    mine = trainer(
        config(tmp_path, kind, **fields),
        make_model(load_tokenizer("tiny")).to(dtype),
        rows,
        peft_config=lora() if adapter else None,
    )
    randomise_lora(mine.shared.model, "policy") if adapter else move(mine.shared.causal_lm)
    return mine


def our_loss(mine):
    """Loss, gradient and metrics of all rows as one batch."""
    rows = mine.encode(list(enumerate(mine.train_dataset)))
    with mine.shared.as_role("policy"):
        loss = mine.pair_loss(mine.model, PairBatch(rows, torch.tensor(float(len(rows)))), "policy")
        loss.backward()
    return float(loss.detach()), grads_of(mine.shared.model), mine.metrics["train"].flush()


CASES = {
    "sigmoid": {},
    "beta": {"beta": 0.7},
    "hinge": {"loss_type": ["hinge"], "beta": 0.5},
    "ipo": {"loss_type": ["ipo"], "beta": 0.5},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.2},
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"], "beta": 1.0},
    "two losses": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [0.7, 0.3], "beta": 0.5},
    "ld_alpha": {"ld_alpha": 0.5, "beta": 0.7},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradient_and_metrics_are_trl_s(tmp_path, case, adapter, dtype):
    """With all weights and with an adapter that is not the identity any more."""
    fields = CASES[case]
    expected, their_grads, their_metrics = their_loss(theirs(tmp_path, adapter=adapter, dtype=dtype, **fields))
    mine = ours(tmp_path, adapter=adapter, dtype=dtype, **fields)
    found, our_grads, metrics = our_loss(mine)
    assert mine.shared.plan.packed
    # In float32 a loss of 1 is off by ten roundings: a packed row sums in another order than padded ones.
    assert found == pytest.approx(expected, abs=1e-6 if dtype == torch.float64 else 3e-6)
    assert {grad.dtype for grad in our_grads.values()} == {dtype}
    assert relative_gap(our_grads, their_grads) < TOLERANCE[dtype]
    if dtype == torch.float64:
        for name, grad in their_grads.items():
            torch.testing.assert_close(our_grads[name], grad, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    names = [n for n in KEYS.split() if case != "ld_alpha" or not n.startswith("logps")]
    assert {n: metrics[n] for n in names} == pytest.approx({n: their_metrics[n] for n in names}, abs=1e-5)


def test_the_likelihood_term_is_trl_s_on_answers_of_one_length(tmp_path):
    """TRL's "sft" is a mean over tokens, ours over pairs of means over tokens: the same where answers are of one
    length."""
    rows = [{**row, "chosen": "123"} for row in ROWS]
    fields = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    expected, their_grads, _ = their_loss(theirs(tmp_path, rows, **fields))
    for settings in (fields, {"rpo_alpha": 0.5}):
        found, our_grads, metrics = our_loss(ours(tmp_path, rows, **settings))
        assert found == pytest.approx(expected, abs=1e-6)
        assert relative_gap(our_grads, their_grads) < 1e-5
        assert metrics["nll_loss"] > 0


def test_the_likelihood_term_weighs_pairs_alike(tmp_path):
    """Chosen answers of 2, 4 and 5 tokens, EOS included: TRL's term weighs them by tokens, ours alike."""
    (expected, _, _), (found, _, _) = (
        their_loss(theirs(tmp_path, loss_type=["sft"])),
        our_loss(ours(tmp_path, loss_type="sft")),
    )
    each = [our_loss(ours(tmp_path, [row], loss_type="sft"))[0] for row in ROWS]
    assert expected == pytest.approx((2 * each[0] + 4 * each[1] + 5 * each[2]) / 11, abs=1e-6)
    assert found == pytest.approx(sum(each) / 3, abs=1e-6)
    assert abs(found - expected) > 1e-3


def test_the_ipo_trainer_is_trl_s_ipo(tmp_path):
    """Means per token. The rewards that are logged are those that the loss has, per token too."""
    double = {"beta": 0.5, "dtype": torch.float64}
    expected, their_grads, _ = their_loss(theirs(tmp_path, loss_type=["ipo"], **double))
    found, our_grads, _ = our_loss(ours(tmp_path, kind="ipo", **double))
    assert found == pytest.approx(expected, abs=1e-6)
    assert relative_gap(our_grads, their_grads) < TOLERANCE[torch.float64]


def test_label_smoothing_acts_in_the_sigmoid_loss(tmp_path):
    """TRL's "sigmoid" gives the same with and without; its "aot", which on a single pair is the smoothed sigmoid loss
    (2406.05882 without sorting), gives ours."""
    plain, smoothed = (their_loss(theirs(tmp_path, label_smoothing=e))[0] for e in (0.0, 0.2))
    assert plain == smoothed
    double = {"label_smoothing": 0.2, "dtype": torch.float64}
    for row in ROWS:
        expected, their_grads, _ = their_loss(theirs(tmp_path, [row], loss_type=["aot"], **double))
        found, our_grads, _ = our_loss(ours(tmp_path, [row], **double))
        assert found == pytest.approx(expected, abs=1e-6)
        assert relative_gap(our_grads, their_grads) < TOLERANCE[torch.float64]
    assert abs(our_loss(ours(tmp_path, label_smoothing=0.2))[0] - plain) > 1e-3


def test_tokens_are_trl_s(tmp_path):
    """Prompt and answers, token for token."""
    other, mine = theirs(tmp_path), ours(tmp_path)
    for row, theirs_row in zip(mine.encode(list(enumerate(ROWS))), other.train_dataset, strict=True):
        (group,) = row.groups
        assert group.prompt_ids.tolist() == theirs_row["prompt_ids"]
        assert [ids.tolist() for ids in group.response_ids] == [theirs_row["chosen_ids"], theirs_row["rejected_ids"]]


def test_ties_count_half(tmp_path):
    """Policy and reference are one: TRL logs an accuracy of 0, ours is 1/2."""
    args = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False}
    model = make_model(load_tokenizer("tiny"))
    other = trl.DPOTrainer(
        model,
        make_model(load_tokenizer("tiny")),
        trl.DPOConfig(str(tmp_path / "trl"), **args),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=load_tokenizer("tiny"),
    )
    assert their_loss(other)[2]["rewards/accuracies"] == 0
    mine = trainer(config(tmp_path), make_model(load_tokenizer("tiny")), ROWS)
    assert our_loss(mine)[2]["rewards/accuracies"] == 0.5


def test_long_prompts_keep_their_rows(tmp_path):
    """max_length 8: TRL drops rows whose prompt fills it, and cuts answers; ours keeps all three, EOS at every end."""
    other = theirs(tmp_path, max_length=8)
    assert len(other.train_dataset) == 2
    rows = ours(tmp_path, max_length=8).encode(list(enumerate(ROWS)))
    assert len(rows) == 3
    for row in rows:
        (group,) = row.groups
        assert all(len(group.prompt_ids) + len(ids) <= 8 and ids[-1] == 2 for ids in group.response_ids)


def test_identical_answers_leave_the_mean(tmp_path):
    """TRL counts them with log 2 and no gradient; ours are counted and left out."""
    rows = [*ROWS, {"prompt": "1", "chosen": "a", "rejected": "a"}]
    expected = their_loss(theirs(tmp_path, rows))[0]
    args = config(tmp_path, per_device_train_batch_size=8, learning_rate=0.0)
    mine = trainer(args, make_model(load_tokenizer("tiny")), rows)
    move(mine.shared.causal_lm)
    mine.train()
    log = mine.state.log_history[0]
    assert (3 * log["loss"] + 0.693147) / 4 == pytest.approx(expected, abs=1e-5)
    assert log["rows/without_pair"] == 1


# --- SimPO and ORPO against TRL's experimental trainers --------------------------------------------------------------


def experimental(name: str) -> Any:
    """TRL's module of that name, which says by a warning that it may vanish."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(f"trl.experimental.{name}")


def their_pair_loss(tmp_path, name, rows, **fields):
    """Loss and gradient of all rows as one batch, by one of TRL's experimental trainers."""
    kind = name.upper()
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    args = getattr(experimental(name), f"{kind}Config")(
        str(tmp_path / "trl"), gradient_checkpointing=False, remove_unused_columns=False, **quiet, **fields
    )
    other = getattr(experimental(name), f"{kind}Trainer")(
        make_model(load_tokenizer("tiny")).double(),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer("tiny"),
    )
    move(other.model)
    batch = other.data_collator([other.train_dataset[i] for i in range(len(other.train_dataset))])
    loss = other.compute_loss(other.model, batch)
    loss.backward()
    return float(loss.detach()), grads_of(other.model)


@pytest.mark.parametrize("fields", [{}, {"cpo_alpha": 0.3}, {"label_smoothing": 0.1}], ids=str)
def test_simpo_is_trl_s_cpo(tmp_path, fields):
    """Loss and gradient; with a likelihood term pair by pair, as TRL's is a mean over tokens."""
    same = {"beta": 2.0, "simpo_gamma": 1.0, **fields}
    for rows in [[row] for row in ROWS] if "cpo_alpha" in fields else [ROWS]:
        settings = {"cpo_alpha": 0.0, **same}
        expected, their_grads = their_pair_loss(tmp_path, "cpo", rows, loss_type="simpo", **settings)
        found, our_grads, _ = our_loss(ours(tmp_path, rows, kind="simpo", dtype=torch.float64, **settings))
        assert found == pytest.approx(expected, abs=1e-6)
        assert relative_gap(our_grads, their_grads) < TOLERANCE[torch.float64]


def test_orpo_is_trl_s_with_the_prompt_in_its_likelihood(tmp_path):
    """Pair by pair, as TRL's likelihood term is a mean over the micro-batch's tokens."""
    for row in ROWS:
        expected, their_grads = their_pair_loss(tmp_path, "orpo", [row], beta=0.5)
        mine = ours(tmp_path, [row], kind="orpo", dtype=torch.float64, beta=0.5, nll_on_prompt=True)
        found, our_grads, _ = our_loss(mine)
        assert found == pytest.approx(expected, abs=1e-6)
        assert relative_gap(our_grads, their_grads) < TOLERANCE[torch.float64]


@pytest.mark.parametrize(("kind", "name"), [("simpo", "cpo"), ("orpo", "orpo")])
def test_fields_and_arguments_are_trl_s(kind, name):
    """Every field of TRL's configuration is known, and positional calls mean the same."""
    config_of, trainer_of = (getattr(experimental(name), f"{name.upper()}{part}") for part in ("Config", "Trainer"))
    ours_config, ours_trainer = KINDS[kind]
    known, wanted = ({f.name: f for f in dataclasses.fields(cls)} for cls in (ours_config, config_of))
    assert not wanted.keys() - known.keys()
    mine, other = (list(inspect.signature(cls.__init__).parameters) for cls in (ours_trainer, trainer_of))
    assert mine[: len(other)] == other
    if kind == "orpo":
        for field in ("beta", "max_length", "max_completion_length", "learning_rate", "disable_dropout"):
            assert known[field].default == wanted[field].default, field
