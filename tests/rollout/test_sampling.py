"""One sampling step: right distribution, clean log-probs, and settings that mean what they mean in transformers."""

import math

import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_rlx.rollout.sampling import (
    SamplingParams,
    filtered_probs,
    from_generation_kwargs,
    only_of_the_engine,
    sample_step,
    uniforms,
)

LOGITS = [1.0, 0.0, -1.0, 2.0, -30.0]
BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


def params(**settings):
    return SamplingParams(max_completion_length=8, **settings)


def draw(logits, uniform, settings, seen=None):
    rows = torch.tensor(logits).expand(len(uniform), -1)
    return sample_step(rows, torch.as_tensor(uniform), settings, seen)


def test_inversion_by_hand():
    """Logits log 1, log 2, log 1 -> probabilities 0.25, 0.5, 0.25, cumulated 0.25, 0.75, 1.

    u = 0 and 0.24 -> 0; 0.25 (not below its own bound) and 0.74 -> 1; 0.75 and just below 1 -> 2.
    """
    tokens, logps = draw([0.0, math.log(2), 0.0], [0.0, 0.24, 0.2500001, 0.74, 0.7500001, BELOW_ONE], params())
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    expected = torch.tensor([0.25, 0.25, 0.5, 0.5, 0.25, 0.25]).log()
    torch.testing.assert_close(logps, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_frequencies(settings):
    """20 000 draws: every frequency within 4 standard deviations sqrt(p (1 - p) / n) of what transformers' warpers
    leave of the softmax, and 0 draws where they leave nothing."""
    n = 20_000
    options = params(**settings)
    seen = torch.tensor([True, False, True, False, False]).expand(n, -1) if options.repetition_penalty != 1 else None
    tokens, _ = draw(LOGITS, torch.rand(n, generator=torch.Generator().manual_seed(11)), options, seen)
    expected = reference_probs(torch.tensor([LOGITS]), options, torch.tensor([[0, 2]]))[0]
    counts = torch.bincount(tokens, minlength=5)
    deviation = (expected * (1 - expected) / n).sqrt()
    assert ((counts / n - expected).abs() <= 4 * deviation + 1e-12).all()


def reference_probs(logits, options, seen_ids):
    """softmax after transformers' own processors, in the order in which `generate` applies them."""
    processors = LogitsProcessorList()
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.temperature != 1:
        processors.append(TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors(seen_ids, logits.clone()).softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 1.4, "top_p": 0.7, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_filters_are_those_of_transformers(settings):
    """50 rows of random logits over 40 tokens: the same probabilities, token by token."""
    logits = 3 * torch.randn(50, 40)
    seen_ids = torch.randint(0, 40, (50, 6))
    options = params(**settings)
    expected = reference_probs(logits, options, seen_ids)
    seen = torch.zeros(50, 40, dtype=torch.bool).scatter_(1, seen_ids, True)
    penalty = options.repetition_penalty
    penalised = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    probs = filtered_probs(penalised / options.temperature, options)
    probs = probs / probs.sum(-1, keepdim=True)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)
    # The step itself: a token is drawn exactly where the reference's cumulated mass says so.
    uniform = torch.rand(50)
    tokens, _ = sample_step(logits, uniform, options, seen if penalty != 1 else None)
    cumulated = expected.cumsum(-1)
    assert (cumulated.gather(1, tokens[:, None])[:, 0] >= uniform - 1e-5).all()
    assert ((cumulated - expected).gather(1, tokens[:, None])[:, 0] <= uniform + 1e-5).all()


@pytest.mark.parametrize(
    "settings", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.9}, {"repetition_penalty": 2.0}, {"temperature": 0.7}]
)
def test_log_probs_are_clean(settings):
    """Log-probs are those of softmax(logits / T), whatever the filters left (trl#2358)."""
    options = params(**settings)
    seen = torch.ones(50, 5, dtype=torch.bool) if options.repetition_penalty != 1 else None
    tokens, logps = draw(LOGITS, torch.rand(50), options, seen)
    clean = torch.log_softmax(torch.tensor(LOGITS) / options.temperature, -1)
    torch.testing.assert_close(logps, clean[tokens])


def test_greedy():
    """Temperature 0 takes the largest logit, after the penalty: 2 / 3 < 1. Its log-prob is that at temperature 1."""
    tokens, logps = draw(LOGITS, [0.0], params(temperature=0.0))
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logps, torch.log_softmax(torch.tensor(LOGITS), -1)[3:4])
    seen = torch.tensor([[False, False, False, True, False]])
    assert draw(LOGITS, [0.0], params(temperature=0.0, repetition_penalty=3.0), seen)[0].tolist() == [0]


@pytest.mark.parametrize("uniform", [0.0, BELOW_ONE])
def test_a_token_without_mass_is_never_drawn(uniform):
    """Banned tokens at both ends and in the middle; u at both ends of its range."""
    inf = math.inf
    logits = [-inf, -inf, 0.3, -inf, 0.1, -inf]
    expected = 2 if uniform == 0 else 4
    assert draw(logits, [uniform], params())[0].tolist() == [expected]
    assert draw(logits, [uniform], params(top_p=0.99, min_p=0.01))[0].tolist() == [expected]
    # top_k = 1 leaves one token, whatever u is; so do a tiny top_p and a min_p of 1
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert draw(LOGITS, [uniform], params(**settings))[0].tolist() == [3]


def test_rounding_never_passes_the_end():
    """151 936 equal tokens cumulate to something else than 1 in float32; u just below 1 still finds a real token."""
    logits = torch.zeros(1, 151_936)
    logits[0, -3:] = -math.inf
    tokens, _ = sample_step(logits, torch.tensor([BELOW_ONE]), params(), None)
    assert 151_000 < tokens.item() <= 151_932


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [[math.nan, 0.0, 1.0], [math.inf, 0.0, 1.0], [-math.inf] * 3])
def test_logits_without_a_distribution_are_refused(bad, temperature):
    """They used to give the last token of the vocabulary. A single -inf is a token of probability 0."""
    fine = torch.tensor([[0.0, 5.0, -math.inf]])
    assert sample_step(fine, torch.tensor([0.5]), params(temperature=temperature), None)[0].item() == 1
    logits = torch.cat([fine, torch.tensor([bad])])
    with pytest.raises(FloatingPointError, match=r"NaN or infinite in 1 of 2 rows \(torch.float32\).*diverged.*fp16"):
        sample_step(logits, torch.tensor([0.5, 0.5]), params(temperature=temperature), None)


def test_half_precision_logits():
    tokens, logps = sample_step(torch.tensor([LOGITS], dtype=torch.bfloat16), torch.tensor([0.5]), params(), None)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, torch.log_softmax(torch.tensor(LOGITS), -1)[tokens])


def test_uniforms():
    """Every prompt has numbers of its own; the same seed gives the same, and more rows or steps change no earlier
    row's stream of another prompt."""
    a = uniforms(3, 5, 4, 10)
    assert a.shape == (4, 10)
    assert torch.equal(a, uniforms(3, 5, 4, 10))
    assert not torch.equal(a, uniforms(4, 5, 4, 10))
    assert not torch.equal(a, uniforms(3, 6, 4, 10))
    assert (a >= 0).all()
    assert (a < 1).all()
    assert len(set(a.flatten().tolist())) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_completion_length": 0}, "max_completion_length must be at least 1"),
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be positive"),
        ({"stop_strings": ("a", "")}, "stop strings must not be empty"),
    ],
)
def test_values_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_completion_length": 8, **settings})


def test_generation_kwargs():
    assert from_generation_kwargs(None) == {}
    assert from_generation_kwargs({"temperature": 0.5, "max_new_tokens": 7, "stop": "x"}) == {
        "temperature": 0.5,
        "max_completion_length": 7,
        "stop_strings": ("x",),
    }
    assert from_generation_kwargs({"stop_strings": ["a", "b"]}) == {"stop_strings": ("a", "b")}
    assert from_generation_kwargs({"do_sample": False}) == {"temperature": 0.0}
    assert from_generation_kwargs({"do_sample": True, "top_k": 4}) == {"top_k": 4}
    with pytest.raises(ValueError, match=r"has no option 'num_beams'; it has do_sample, max_new_tokens, max_to"):
        from_generation_kwargs({"num_beams": 4})


def test_generation_kwargs_of_another_engine():
    """What has a field is translated, the rest is left to the engine."""
    kwargs = {"max_tokens": 7, "stop": ["a"], "do_sample": True, "bad_words": ["b"]}
    assert from_generation_kwargs(kwargs, others=True) == {"max_completion_length": 7, "stop_strings": ("a",)}
    assert only_of_the_engine(kwargs) == {"bad_words": ["b"]}
    assert only_of_the_engine(None) == {}


def test_generation_kwargs_order_does_not_matter():
    """`do_sample=False` wins over a temperature on either side, as in transformers."""
    for kwargs in ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.9, "do_sample": False}):
        assert from_generation_kwargs(kwargs) == {"temperature": 0.0}
