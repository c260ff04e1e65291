"""The lean decoding step: the model's own log-probs where it is built like Llama, and the model itself elsewhere."""

import inspect
import logging

import pytest
import torch

from hf_rlx.models.fast_linear import packed_for_sampling
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout import generate as module
from hf_rlx.rollout.cache import new_cache
from hf_rlx.rollout.generate import Generator
from hf_rlx.rollout.lean import lean_step
from hf_rlx.rollout.sampling import SamplingParams
from tests import tiny

PROMPTS = tiny.tokens(3, 9, 6, 1)
ALIKE = ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "granite", "gemma"]


def shared(family, dtype=torch.float32, **changes):
    model = SharedModel.build(tiny.causal_lm(family, **changes), tiny.lora(target_modules="all-linear"))
    tiny.randomise_lora(model)
    return model.to(dtype).eval()


def prefilled(model, ids):
    cache = new_cache(model.config)
    mask = (ids != 0).long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.causal_lm.forward).parameters)
    model.causal_lm(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})
    return cache, mask, positions[:, -1:] + 1, name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.no_grad()
def test_a_step_is_the_models_own(family, padded):
    """Logits and the grown cache equal the model's forward to 1e-10 in float64, biases, query and key norms and
    shared key heads included; the padding of the first row has a score of -inf."""
    model = shared(family, torch.float64)
    ids = torch.tensor([[0, 0, 5, 9], [3, 4, 7, 8]]) if padded else torch.tensor([[6, 2, 5, 9], [3, 4, 7, 8]])
    tokens = torch.tensor([11, 12])
    own, mask, position, name = prefilled(model, ids)
    grown = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    expected = model.causal_lm(
        input_ids=tokens[:, None], attention_mask=grown, position_ids=position, use_cache=True, **{name: own}
    ).logits[:, -1]
    cache, *_ = prefilled(model, ids)
    bias = torch.zeros(2, 1, 1, 5, dtype=torch.float64).masked_fill(grown[:, None, None] == 0, -torch.inf)
    step = lean_step(model.causal_lm, cache)
    actual = step(tokens, cache, bias if padded else None, position)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for ours, theirs in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "qwen3_moe", "mistral_window", "mamba", "gpt_neox"])
def test_other_architectures_have_none(family):
    model = tiny.causal_lm(family)
    assert lean_step(model, new_cache(model.config)) is None


@pytest.mark.parametrize("family", ALIKE)
def test_the_first_step_decides(family, caplog):
    """Families that look alike and multiply their residuals, norms or embeddings otherwise are found out by the first
    step; either way the log-probs are the trainer's."""
    generator = Generator(shared(family), tiny.word_tokenizer())
    generator.eos = frozenset()
    with caplog.at_level(logging.INFO, logger=module.__name__):
        generator.generate(PROMPTS, 3, SamplingParams(6, seed=3))
    same = {"llama": True, "qwen2": True, "qwen3": True, "mistral": True, "phi3": None, "olmo2": None, "gemma": True}
    expected = same.get(family, False)
    assert generator.lean is expected
    assert ("own forward: log-probs differ by" in caplog.text) == (expected is False)


def test_a_step_that_cannot_run_falls_back(caplog):
    """A head size of 8 whose rotation covers half: the shapes do not fit, and the cache is as it was."""
    generator, plain = (Generator(shared("llama"), tiny.word_tokenizer()) for _ in range(2))
    plain.lean = False
    inner = generator.model.causal_lm.model.rotary_emb

    class Narrow(torch.nn.Module):
        def forward(self, x, position_ids):
            cos, sin = inner(x, position_ids)
            return (cos, sin) if x.ndim == 3 else (cos[..., :3], sin[..., :3])

    generator.model.causal_lm.model.rotary_emb = Narrow()
    with caplog.at_level(logging.INFO, logger=module.__name__):
        actual = generator.generate(PROMPTS, 2, SamplingParams(8, seed=1))
    assert generator.lean is False
    assert "own forward: RuntimeError" in caplog.text
    assert actual == plain.generate(PROMPTS, 2, SamplingParams(8, seed=1))


def test_lean_and_plain_sample_the_same():
    """Ragged prompts, rows that end early, and adapters: the same tokens, and log-probs to 1e-5."""
    lean, plain = (Generator(shared("llama"), tiny.word_tokenizer()) for _ in range(2))
    plain.lean = False
    params = SamplingParams(24, seed=5)
    ours = [c for group in lean.generate(PROMPTS, 4, params) for c in group]
    theirs = [c for group in plain.generate(PROMPTS, 4, params) for c in group]
    assert lean.lean is True
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    gaps = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logps, y.logps, strict=True)]
    assert max(gaps) < 1e-5
    assert len({len(c.token_ids) for c in ours}) > 3


def test_what_others_hook_into_the_model_still_runs():
    """A hook on a projection is called at every step; one on a layer, which this never calls, rules lean steps out."""
    model = shared("llama")
    seen = []
    attention = model.causal_lm.model.layers[1].self_attn
    handle = attention.q_proj.register_forward_hook(lambda *_: seen.append(1))
    generator = Generator(model, tiny.word_tokenizer())
    generator.eos = frozenset()
    generator.generate(PROMPTS[:1], 2, SamplingParams(5))
    assert generator.lean is True
    # The prefill, four steps, and for the first of them the model's own forward and a trial.
    assert len(seen) == 7
    handle.remove()
    model.causal_lm.model.layers[1].register_forward_hook(lambda *_: None)
    assert lean_step(model.causal_lm, new_cache(model.config)) is None


def test_the_bundled_size_packs_and_is_lean():
    """Packed copies and the lean step together: the same log-probs as with neither, to 1e-5."""
    model = shared("llama", hidden_size=128, intermediate_size=256)
    ids, tokens = torch.tensor([[6, 2, 5, 9]]), torch.tensor([11])
    with torch.no_grad():
        cache, _, position, _ = prefilled(model, ids)
        expected = lean_step(model.causal_lm, cache)(tokens, cache, None, position)
        with packed_for_sampling(model.causal_lm, 4):
            cache, _, position, _ = prefilled(model, ids)
            actual = lean_step(model.causal_lm, cache)(tokens, cache, None, position)
    torch.testing.assert_close(actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
