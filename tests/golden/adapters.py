"""Golden name -> adapter: decode a case, call hf_rlx, name the results as the case's `expected` does.

No adapter computes: it turns JSON into tensors, calls public functions of hf_rlx, and differentiates with autograd.
`use_dtype` chooses the floating type of the tensors (float64 unless told otherwise).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import hf_rlx.functional as F

Case = dict[str, Any]
Adapter = Callable[[Case, Case], Case]

ADAPTERS: dict[str, Adapter] = {}

_dtype = torch.float64

# Settings whose null is a value ("no bound"); any other null means "not given".
_NULL_IS_A_VALUE = {"clamp", "kl_clamp", "log_ratio_clamp", "clip_range"}


@contextmanager
def use_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Run adapters with tensors of `dtype` inside the block."""
    global _dtype
    before, _dtype = _dtype, dtype
    try:
        yield
    finally:
        _dtype = before


def adapter(name: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter under a golden name; it receives the inputs, and the settings that were given."""

    def register(function: Adapter) -> Adapter:
        def run(inputs: Case, settings: Case) -> Case:
            return function(inputs, {k: v for k, v in settings.items() if v is not None or k in _NULL_IS_A_VALUE})

        ADAPTERS[name] = run
        return run

    return register


def decode(x: Any) -> Any:
    """JSON numbers to Python floats: null is NaN, "Infinity" and "-Infinity" are infinities, lists recurse."""
    if isinstance(x, list):
        return [decode(y) for y in x]
    return math.nan if x is None else float(x)


def tensor(x: Any) -> Tensor | None:
    """Decode a whole input; null as a whole is None (not given)."""
    return None if x is None else torch.tensor(decode(x), dtype=_dtype)


def leaf(x: Any) -> Tensor:
    """A decoded input that gradients are taken for."""
    return torch.tensor(decode(x), dtype=_dtype, requires_grad=True)


def matrix(x: list[list[float]]) -> tuple[Tensor, Tensor]:
    """Rows of unequal length, padded with NaN, and the mask of what is real."""
    width = max((len(row) for row in x), default=0)
    values = [decode(row) + [math.nan] * (width - len(row)) for row in x]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in x]
    return torch.tensor(values, dtype=_dtype).reshape(len(x), width), torch.tensor(mask).reshape(len(x), width)


def ragged(x: Tensor, rows: list[list[float]]) -> list[list[float]]:
    """Undo `matrix`."""
    return [values[: len(row)] for values, row in zip(x.tolist(), rows, strict=True)]


def grad(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a scalar with respect to leaves."""
    return torch.autograd.grad(loss, leaves, retain_graph=True)


def fields(result: Any, *names: str) -> Case:
    """The named fields of a NamedTuple."""
    return {name: getattr(result, name) for name in names}


@adapter("token_logprobs")
def _token_logprobs(inputs: Case, settings: Case) -> Case:
    return {"logp": F.token_logprobs(tensor(inputs["logits"]), torch.tensor(inputs["ids"]), **settings)}


@adapter("sequence_logprobs")
def _sequence_logprobs(inputs: Case, settings: Case) -> Case:
    out = F.sequence_logprobs(tensor(inputs["logp"]), tensor(inputs["mask"]))
    return fields(out, "sum", "length", "mean")


@adapter("aggregate")
def _aggregate(inputs: Case, settings: Case) -> Case:
    mask = tensor(inputs["mask"])
    weights = F.aggregation_weights(mask, **settings, dtype=_dtype)
    return {"loss": F.aggregate(tensor(inputs["values"]), mask, **settings), "weights": weights}


@adapter("bradley_terry")
def _bradley_terry(inputs: Case, settings: Case) -> Case:
    return _pair_loss(F.bradley_terry, inputs, ("chosen", "rejected", "margin"), settings, "mean_margin")


@adapter("soft_bradley_terry")
def _soft_bradley_terry(inputs: Case, settings: Case) -> Case:
    a, b = leaf(inputs["score_a"]), leaf(inputs["score_b"])
    out = F.soft_bradley_terry(a, b, tensor(inputs["preference"]), **settings)
    grad_a, grad_b = grad(out.loss, a, b)
    return {**fields(out, "loss", "pair_loss"), "grad_a": grad_a, "grad_b": grad_b}


@adapter("ranked_all_pairs")
def _ranked_all_pairs(inputs: Case, settings: Case) -> Case:
    scores, mask = matrix(inputs["scores"])
    ranks, _ = matrix(inputs["ranks"])
    scores.requires_grad_()
    out = F.ranked_all_pairs(scores, ranks, mask, **settings)
    (gradient,) = grad(out.loss, scores)
    return {
        **fields(out, "loss", "prompt_loss", "n_pairs", "accuracy"),
        "grad": ragged(gradient, inputs["scores"]),
    }


@adapter("plackett_luce")
def _plackett_luce(inputs: Case, settings: Case) -> Case:
    scores, mask = matrix(inputs["scores"])
    scores.requires_grad_()
    out = F.plackett_luce(scores, mask, **settings)
    (gradient,) = grad(out.loss, scores)
    return {**fields(out, "loss", "prompt_loss"), "grad": ragged(gradient, inputs["scores"])}


@adapter("pairwise_accuracy")
def _pairwise_accuracy(inputs: Case, settings: Case) -> Case:
    out = F.pairwise_accuracy(tensor(inputs["chosen"]), tensor(inputs["rejected"]))
    return {"accuracy": out.accuracy, "ties": out.ties, "count": out.n_pairs}


@adapter("calibration_error")
def _calibration_error(inputs: Case, settings: Case) -> Case:
    return F.calibration_error(tensor(inputs["margins"]), **settings)._asdict()


@adapter("reward_length_correlation")
def _reward_length_correlation(inputs: Case, settings: Case) -> Case:
    out = F.reward_length_correlation(tensor(inputs["rewards"]), tensor(inputs["lengths"]))
    return {"pearson": out.pearson, "spearman": out.spearman, "count": out.n_pairs}


@adapter("running_normalize")
def _running_normalize(inputs: Case, settings: Case) -> Case:
    running = F.RunningMoments(**settings)
    moments, normalized = [], []
    for batch in inputs["batches"]:
        running.update(tensor(batch))
        moments.append(fields(running, "mean", "std", "count"))
        normalized.append(running.normalize(tensor(batch)))
    return {"moments": moments, "normalized": normalized}


@adapter("combine_rewards")
def _combine_rewards(inputs: Case, settings: Case) -> Case:
    return F.combine_rewards(tensor(inputs["components"]), tensor(inputs["weights"]))._asdict()


@adapter("kl_estimators")
def _kl_estimators(inputs: Case, settings: Case) -> Case:
    logp, mask = leaf(inputs["logp"]), tensor(inputs["mask"])
    out = F.kl_estimators(logp, tensor(inputs["ref_logp"]), mask, **settings)
    names = [f"{k}{suffix}" for k in ("k1", "k2", "k3") for suffix in ("", "_sequence", "_mean")]
    return {
        **fields(out, *names),
        "grad_k2": grad(out.k2.sum(), logp)[0],
        "grad_k3": grad(out.k3.sum(), logp)[0],
    }


@adapter("shaped_reward")
def _shaped_reward(inputs: Case, settings: Case) -> Case:
    arguments = (tensor(inputs[name]) for name in ("score", "logp", "ref_logp", "mask"))
    return F.shaped_reward(*arguments, **settings)._asdict()


@adapter("adaptive_kl")
def _adaptive_kl(inputs: Case, settings: Case) -> Case:
    controller = F.AdaptiveKLController(**settings)
    steps = zip(decode(inputs["kls"]), inputs["counts"], strict=True)
    return {"coefficients": [controller.update(kl, n) for kl, n in steps]}


@adapter("masked_whiten")
def _masked_whiten(inputs: Case, settings: Case) -> Case:
    return F.masked_whiten(tensor(inputs["values"]), tensor(inputs["mask"]), **settings)._asdict()


@adapter("gae")
def _gae(inputs: Case, settings: Case) -> Case:
    arguments = (tensor(inputs[name]) for name in ("rewards", "values", "mask"))
    return F.gae(*arguments, bootstrap=tensor(inputs.get("bootstrap")), **settings)._asdict()


@adapter("grpo_advantages")
def _grpo_advantages(inputs: Case, settings: Case) -> Case:
    return F.grpo_advantages(tensor(inputs["rewards"]), **settings)._asdict()


@adapter("rloo_advantages")
def _rloo_advantages(inputs: Case, settings: Case) -> Case:
    out = F.rloo_advantages(tensor(inputs["rewards"]), tensor(inputs.get("kl")), **settings)
    return fields(out, "advantages")


def _policy_case(function: Callable[..., Any], inputs: Case, settings: Case, *names: str) -> tuple[Any, Case]:
    logp = leaf(inputs["logp"])
    constants = (tensor(inputs[name]) for name in ("old_logp", "advantages", "mask"))
    optional = {"ref_logps": "ref_logp", "is_weights": "is_weights", "keep": "keep"}
    options = {option: tensor(inputs[name]) for option, name in optional.items() if inputs.get(name) is not None}
    out = function(logp, *constants, **options, **settings)
    names = ("loss", "clip_low_fraction", "clip_high_fraction", *names)
    return out, {**fields(out, *names), "grad": grad(out.loss, logp)[0]}


@adapter("ppo_policy_loss")
def _ppo_policy_loss(inputs: Case, settings: Case) -> Case:
    names = ("clip_fraction", "ratio_outside_fraction", "ratio_mean", "approx_kl", "old_minus_new")
    return _policy_case(F.ppo_policy_loss, inputs, settings, "token_loss", *names)[1]


@adapter("grpo_loss")
def _grpo_loss(inputs: Case, settings: Case) -> Case:
    names = ("token_loss", "policy_loss", "kl_loss", "kl_mean")
    return _policy_case(F.grpo_loss, inputs, settings, *names)[1]


@adapter("dapo_loss")
def _dapo_loss(inputs: Case, settings: Case) -> Case:
    return _policy_case(F.dapo_loss, inputs, settings, "token_loss")[1]


@adapter("gspo_loss")
def _gspo_loss(inputs: Case, settings: Case) -> Case:
    out, case = _policy_case(F.gspo_loss, inputs, settings)
    return {**case, "ratio": out.ratio.squeeze(1)}


@adapter("rloo_loss")
def _rloo_loss(inputs: Case, settings: Case) -> Case:
    out, case = _policy_case(F.rloo_loss, inputs, settings)
    return {**case, "ratio": out.ratio.squeeze(1)}


@adapter("value_loss")
def _value_loss(inputs: Case, settings: Case) -> Case:
    values = leaf(inputs["values"])
    arguments = (tensor(inputs[name]) for name in ("old_values", "returns", "mask"))
    out = F.value_loss(values, *arguments, **settings)
    return {**out._asdict(), "grad": grad(out.loss, values)[0]}


@adapter("explained_variance")
def _explained_variance(inputs: Case, settings: Case) -> Case:
    arguments = (tensor(inputs[name]) for name in ("values", "returns", "mask"))
    return {"explained_variance": F.explained_variance(*arguments, **settings)}


@adapter("entropy_from_logits")
def _entropy_from_logits(inputs: Case, settings: Case) -> Case:
    logits, mask = leaf(inputs["logits"]), tensor(inputs["mask"])
    entropy = F.entropy_from_logits(logits, mask=mask, **settings)
    mean = F.masked_mean(entropy, mask)
    return {"entropy": entropy, "mean": mean, "grad": grad(mean, logits)[0]}


@adapter("importance_weights")
def _importance_weights(inputs: Case, settings: Case) -> Case:
    arguments = (tensor(inputs[name]) for name in ("train_logp", "sample_logp", "mask"))
    out = F.importance_weights(*arguments, **settings)
    return fields(out, "weights", "outside_fraction", "mean_weight", "sampler_kl")


_PAIR = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
_REWARDS = ("chosen_reward", "rejected_reward", "mean_margin")


def _pair_loss(function: Callable[..., Any], inputs: Case, names: tuple[str, ...], settings: Case, *rest: str) -> Case:
    chosen, rejected = leaf(inputs[names[0]]), leaf(inputs[names[1]])
    out = function(chosen, rejected, *(tensor(inputs.get(name)) for name in names[2:]), **settings)
    grad_chosen, grad_rejected = grad(out.loss, chosen, rejected)
    return {
        **fields(out, "loss", "pair_loss", "accuracy", *rest),
        "grad_chosen": grad_chosen,
        "grad_rejected": grad_rejected,
    }


@adapter("dpo_sigmoid")
def _dpo_sigmoid(inputs: Case, settings: Case) -> Case:
    return _pair_loss(F.dpo_sigmoid, inputs, _PAIR, settings, *_REWARDS)


@adapter("dpo_hinge")
def _dpo_hinge(inputs: Case, settings: Case) -> Case:
    return _pair_loss(F.dpo_hinge, inputs, _PAIR, settings, *_REWARDS)


@adapter("dpo_ipo")
def _dpo_ipo(inputs: Case, settings: Case) -> Case:
    return _pair_loss(F.ipo, inputs, (*_PAIR, "chosen_length", "rejected_length"), settings)


@adapter("simpo")
def _simpo(inputs: Case, settings: Case) -> Case:
    return _pair_loss(F.simpo, inputs, ("chosen_mean_logp", "rejected_mean_logp"), settings, *_REWARDS)


@adapter("orpo")
def _orpo(inputs: Case, settings: Case) -> Case:
    leaves = [leaf(inputs[name]) for name in ("chosen_mean_logp", "rejected_mean_logp", "chosen_nll")]
    out = F.orpo(*leaves, **settings)
    names = ("grad_chosen", "grad_rejected", "grad_nll")
    return {**out._asdict(), **dict(zip(names, grad(out.loss, *leaves), strict=True))}


@adapter("prm_hard_loss")
def _prm_hard_loss(inputs: Case, settings: Case) -> Case:
    logits = leaf(inputs["logits"])
    out = F.prm_hard_loss(logits, tensor(inputs["labels"]), **settings)
    return {**out._asdict(), "grad": grad(out.loss, logits)[0]}


@adapter("prm_soft_loss")
def _prm_soft_loss(inputs: Case, settings: Case) -> Case:
    logits = leaf(inputs["logits"])
    out = F.prm_soft_loss(logits, tensor(inputs["targets"]), **settings)
    return {**fields(out, "loss", "n_steps", "step_loss"), "grad": grad(out.loss, logits)[0]}


@adapter("step_scores")
def _step_scores(inputs: Case, settings: Case) -> Case:
    return {"scores": F.step_scores(tensor(inputs["logits"]), **settings)}


@adapter("step_aggregate")
def _step_aggregate(inputs: Case, settings: Case) -> Case:
    return {"aggregated": F.step_aggregate(*matrix(inputs["scores"]), **settings)}


@adapter("best_of_n")
def _best_of_n(inputs: Case, settings: Case) -> Case:
    return {"index": F.best_of_n(decode(inputs["scores"]))}


@adapter("weighted_best_of_n")
def _weighted_best_of_n(inputs: Case, settings: Case) -> Case:
    return fields(F.weighted_best_of_n(inputs["answers"], decode(inputs["scores"])), "answer", "totals")


@adapter("majority_vote")
def _majority_vote(inputs: Case, settings: Case) -> Case:
    return fields(F.majority_vote(inputs["answers"]), "answer", "votes")


@adapter("maj_at_k")
def _maj_at_k(inputs: Case, settings: Case) -> Case:
    return {"maj_at_k": F.maj_at_k(inputs["answers"], inputs["correct"], inputs["k"])}


@adapter("pass_at_k")
def _pass_at_k(inputs: Case, settings: Case) -> Case:
    return {"pass_at_k": F.pass_at_k(inputs["n"], inputs["c"], inputs["k"])}


@adapter("soft_overlong")
def _soft_overlong(inputs: Case, settings: Case) -> Case:
    return {"penalty": F.soft_overlong(tensor(inputs["lengths"]), **settings)}


@adapter("position_swap")
def _position_swap(inputs: Case, settings: Case) -> Case:
    return F.position_swap(decode(inputs["first_wins_ab"]), decode(inputs["first_wins_ba"]))._asdict()


@adapter("uct")
def _uct(inputs: Case, settings: Case) -> Case:
    priors = inputs.get("priors")
    out = F.uct(decode(inputs["value_sum"]), inputs["visits"], None if priors is None else decode(priors), **settings)
    return {"scores": out.scores, "index": out.best}
