"""The built-in generator: transformers' tokens, the trainer's log-probs, and a base that stays as it is."""

import hashlib
import logging

import pytest
import torch

from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout import generate as module
from hf_rlx.rollout.cache import GrowingLayer, new_cache
from hf_rlx.rollout.generate import Generator, eos_token_ids
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.types import Group
from tests import tiny

PROMPTS = tiny.tokens(3, 9, 6, 1)


def make(family="llama", tokenizer=None, lora=True, **options):
    options, changes = (
        {k: v for k, v in options.items() if k in ("max_rows", "extra_eos")},
        {k: v for k, v in options.items() if k not in ("max_rows", "extra_eos")},
    )
    config = tiny.lora(fan_in_fan_out=family == "gpt2", target_modules="all-linear") if lora else None
    model = SharedModel.build(tiny.causal_lm(family, **changes), config)
    tiny.randomise_lora(model)
    return Generator(model, tokenizer or tiny.word_tokenizer(), **options)


def without_eos(generator):
    """Rows then run to the limit, whatever they draw."""
    generator.eos = frozenset()
    return generator


def ids_of(groups):
    return [[c.token_ids for c in completions] for completions in groups]


def trainer_logps(model, groups, temperature):
    with torch.no_grad():
        scores = model([Group.from_lists(p, [c.token_ids for c in cs]) for p, cs in groups], temperature=temperature)
    return [row[m].tolist() for row, m in zip(scores.per_token_logps, scores.mask, strict=True)]


# --- tokens and log-probs --------------------------------------------------------------------------------------------

# gpt2 and opt: absolute positions behind left padding. mistral_window: 5 tokens. falcon_h1, qwen3_next, mamba:
# recurrent state beside or instead of keys. bloom: its own attention.
FAMILIES = [
    "llama",
    "gpt2",
    "opt",
    "mistral_window",
    "gemma3_text",
    "gemma2",
    "bloom",
    "falcon_h1",
    "qwen3_next",
    "mamba",
    "qwen3_moe",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family):
    """Four prompts of 3, 9, 6 and 1 tokens in one batch, twice each, against `generate` on each prompt alone."""
    generator = make(family, lora=False)
    sampled = generator.generate(PROMPTS, 2, SamplingParams(16, temperature=0.0))
    for prompt, completions in zip(PROMPTS, sampled, strict=True):
        expected = generator.model.causal_lm.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=16,
        )[0, len(prompt) :].tolist()
        assert [c.token_ids for c in completions] == [expected, expected]


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 2}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.8}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_window", "falcon_h1"])
def test_log_probs_are_the_trainers(family, settings):
    """Row 40 of the reports: with filters, too, the first ratio new / old is 1, at the sampling temperature."""
    generator = make(family, lora=family != "falcon_h1")
    params = SamplingParams(12, seed=4, **settings)
    groups = list(zip(PROMPTS, generator.generate(PROMPTS, 3, params), strict=True))
    expected = trainer_logps(generator.model, groups, params.temperature)
    actual = [c.logps for _, completions in groups for c in completions]
    assert [len(a) for a in actual] == [len(e) for e in expected]
    assert max(abs(a - e) for x, y in zip(actual, expected, strict=True) for a, e in zip(x, y, strict=True)) < 1e-4
    assert len({tuple(c.token_ids) for _, completions in groups for c in completions}) > 6  # they differ


def test_greedy_with_repetition_penalty_equals_transformers():
    generator = make(lora=False)
    (completions,) = generator.generate([PROMPTS[1]], 1, SamplingParams(16, temperature=0.0, repetition_penalty=1.7))
    expected = generator.model.causal_lm.generate(
        input_ids=torch.tensor([PROMPTS[1]]),
        attention_mask=torch.ones(1, 9, dtype=torch.long),
        do_sample=False,
        max_new_tokens=16,
        repetition_penalty=1.7,
    )[0, 9:].tolist()
    assert completions[0].token_ids == expected
    plain = generator.generate([PROMPTS[1]], 1, SamplingParams(16, temperature=0.0))
    assert plain[0][0].token_ids != expected


def test_the_penalty_ignores_padding():
    """Padding is not "seen": let the padding id be the very token that comes first, and behind padding it still does.

    The penalty of 1e6 would take it out of the race.
    """
    generator = without_eos(make())
    params = SamplingParams(1, temperature=0.0, repetition_penalty=1e6)
    ((alone,),) = generator.generate(PROMPTS[:1], 1, params)
    (generator.pad,) = alone.token_ids
    assert generator.pad not in PROMPTS[0]
    beside = generator.generate(PROMPTS[:2], 1, params)
    assert beside[0][0].token_ids == alone.token_ids


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_seeds():
    generator = without_eos(make())
    first = ids_of(generator.generate(PROMPTS, 3, SamplingParams(8, seed=1)))
    assert ids_of(generator.generate(PROMPTS, 3, SamplingParams(8, seed=1))) == first
    assert ids_of(generator.generate(PROMPTS, 3, SamplingParams(8, seed=2))) != first
    assert len({tuple(ids) for group in first for ids in group}) == 12  # K rows of a prompt differ


def test_the_global_random_state_plays_no_part():
    generator = without_eos(make())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = ids_of(generator.generate(PROMPTS, 2, SamplingParams(8)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert ids_of(generator.generate(PROMPTS, 2, SamplingParams(8))) == first


def test_tokens_of_a_prompt_do_not_depend_on_the_others():
    """The prompt at index 1 gets the same tokens beside others, and in batches of its own."""
    params = SamplingParams(12, seed=5)
    expected = ids_of(without_eos(make()).generate(PROMPTS, 3, params))
    assert ids_of(without_eos(make(max_rows=3)).generate(PROMPTS, 3, params)) == expected
    other = [PROMPTS[2], PROMPTS[1], [7] * 20]
    assert ids_of(without_eos(make()).generate(other, 3, params))[1] == expected[1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon_h1", "mamba"])
def test_rows_that_leave_change_nothing_for_the_rest(family):
    """A quarter of all tokens ends a row: every row is a prefix of what it is when none ends."""
    params = SamplingParams(12, seed=5)
    generator = make(family, lora=False)
    expected = ids_of(without_eos(generator).generate(PROMPTS, 3, params))
    generator.eos = frozenset(range(3, 20))
    cut = ids_of(generator.generate(PROMPTS, 3, params))
    rows = [(full, ids) for f, c in zip(expected, cut, strict=True) for full, ids in zip(f, c, strict=True)]
    assert all(full[: len(ids)] == ids for full, ids in rows)
    assert len({len(ids) for _, ids in rows}) > 3


# --- ends ------------------------------------------------------------------------------------------------------------


def test_eos_ids_are_a_union():
    """generation_config [2, 7], configuration 5, tokenizer t9, and what the caller adds (11)."""
    tokenizer = tiny.word_tokenizer(eos_token="t9")
    model = SharedModel.build(tiny.causal_lm(eos_token_id=5))
    model.causal_lm.generation_config.eos_token_id = [2, 7]
    assert eos_token_ids(model, tokenizer) == {2, 5, 7, 9}
    assert Generator(model, tokenizer, extra_eos=[11]).eos == {2, 5, 7, 9, 11}
    model.causal_lm.generation_config.eos_token_id = model.config.eos_token_id = None
    tokenizer.eos_token = None
    assert eos_token_ids(model, tokenizer) == frozenset()


def test_every_eos_ends_a_row_and_is_kept():
    generator = make()
    generator.eos = frozenset(range(3, 30))
    for completions in generator.generate(PROMPTS, 4, SamplingParams(6, seed=3)):
        for c in completions:
            assert len(c.token_ids) == len(c.logps)
            assert all(t not in generator.eos for t in c.token_ids[:-1])
            assert c.finished == (c.token_ids[-1] in generator.eos)
            assert c.finished or len(c.token_ids) == 6


def test_text_is_without_special_tokens():
    generator = make()
    generator.eos = frozenset([2])
    for c in (c for group in generator.generate(PROMPTS, 8, SamplingParams(10, seed=1)) for c in group):
        assert c.text.split() == [f"t{t}" for t in c.token_ids if t > 2]


def test_stop_strings():
    """`t1` ends a row with the token that completes it: t1, or one that begins so (t10 to t19)."""
    generator = without_eos(make())
    sampled = generator.generate(PROMPTS, 8, SamplingParams(12, seed=2, stop_strings=("t1", "t63")))
    ends = {1: 0, 0: 0}
    for c in (c for group in sampled for c in group):
        stops = [i for i, t in enumerate(c.token_ids) if 10 <= t < 20 or t == 63]
        assert c.finished == bool(stops)
        assert stops in ([], [len(c.token_ids) - 1])
        assert c.finished or len(c.token_ids) == 12
        ends[c.finished] += 1
    assert ends[1] > 5


def test_finished_rows_leave_the_batch():
    """Two prompts of 4 rows: 2 rows prefilled, then at most 8 rows a step, and no row that is finished stays once an
    eighth of the batch is. So the rows computed never exceed the open ones by an eighth, but for the last four."""
    generator = make()
    generator.eos = frozenset(range(3, 12))
    rows = []
    generator.model.causal_lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    steps = []
    sampled = generator.generate(PROMPTS[:2], 4, SamplingParams(40, seed=6), on_step=steps.append)
    lengths = [len(c.token_ids) for group in sampled for c in group]
    assert len(set(lengths)) > 3
    assert rows[0] == (2, 9)  # each prompt once, padded to the longest
    assert [r[1] for r in rows[1:]] == [1] * (max(lengths) - 1)
    open_rows = [sum(n > step for n in lengths) for step in range(max(lengths))]
    assert steps == open_rows
    # Of 8 rows, one is an eighth: it leaves at once. Fewer than four rows are no faster than four.
    assert [r[0] for r in rows[1:]] == [max(n, 4) for n in open_rows[1:]]


def test_no_more_rows_than_asked_for():
    """max_rows = 4 and K = 2: two prompts at a time. K = 6 > max_rows: one prompt at a time, its 6 rows together."""
    for k, expected in ((2, [(2, 4), (2, 4)]), (6, [(1, 6)] * 4)):
        generator = without_eos(make(max_rows=4))
        rows = []
        generator.model.causal_lm.model.register_forward_pre_hook(
            lambda _, args, kwargs, rows=rows: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        sampled = generator.generate(PROMPTS, k, SamplingParams(2))
        assert [len(group) for group in sampled] == [k] * 4
        prefills, decodes = rows[::2], rows[1::2]
        assert list(zip([p[0] for p in prefills], [d[0] for d in decodes], strict=True)) == expected


def test_groups_are_handed_on_while_others_decode():
    """A group is announced once, with the object that is returned, before steps in which others still sample."""
    generator = make()
    generator.eos = frozenset(range(3, 24))
    events = []
    sampled = generator.generate(
        PROMPTS,
        2,
        SamplingParams(40, seed=3),
        on_group=lambda index, completions: events.append((index, completions)),
        on_step=lambda n: events.append(n),
    )
    groups = [e for e in events if isinstance(e, tuple)]
    assert sorted(index for index, _ in groups) == [0, 1, 2, 3]
    assert all(completions is sampled[index] for index, completions in groups)
    assert all(len(completions) == 2 and all(c.text for c in completions) for _, completions in groups)
    last_step = max(i for i, e in enumerate(events) if not isinstance(e, tuple))
    first_group = next(i for i, e in enumerate(events) if isinstance(e, tuple))
    assert last_step - first_group > 4
    assert sum(e for e in events if not isinstance(e, tuple)) == sum(len(c.token_ids) for g in sampled for c in g)


def test_one_prompt_one_row_one_token():
    ((completion,),) = make().generate([[5]], 1, SamplingParams(1))
    assert len(completion.token_ids) == len(completion.logps) == 1


# --- flags and weights -----------------------------------------------------------------------------------------------


def test_cache_on_and_checkpointing_off_in_a_rollout():
    """Training mode with activation checkpointing: the rollout still uses the cache (one token a step), computes no
    graph, and puts every flag back, also when a callback raises (trl#3683)."""
    generator = without_eos(make())
    model = generator.model
    model.train()
    model.causal_lm.model.layers[1].eval()
    model.activation_checkpointing_enable()
    before = [(n, m.training, getattr(m, "gradient_checkpointing", None)) for n, m in model.named_modules()]
    seen = []

    def look(_, args, kwargs):
        seen.append((kwargs["use_cache"], kwargs["input_ids"].shape[1], model.training, torch.is_grad_enabled()))

    model.causal_lm.model.register_forward_pre_hook(look, with_kwargs=True)
    generator.generate(PROMPTS[:1], 2, SamplingParams(3))
    assert seen == [(True, 3, False, False), (True, 1, False, False), (True, 1, False, False)]
    assert [(n, m.training, getattr(m, "gradient_checkpointing", None)) for n, m in model.named_modules()] == before

    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        generator.generate(PROMPTS[:1], 2, SamplingParams(3), on_step=fail)
    assert [(n, m.training, getattr(m, "gradient_checkpointing", None)) for n, m in model.named_modules()] == before


def test_fifty_rollouts_leave_every_weight_bit_identical():
    """The adapter runs beside the base and is never merged into it."""
    generator = make()

    def digest():
        state = generator.model.state_dict()
        return hashlib.sha256(b"".join(state[k].numpy().tobytes() for k in sorted(state))).hexdigest()

    before = digest()
    for seed in range(50):
        generator.generate(PROMPTS[:2], 2, SamplingParams(3, seed=seed))
    assert digest() == before


def test_a_rollout_uses_the_current_weights():
    """A step on the adapter changes the greedy tokens; the reference's role does not linger."""
    generator = without_eos(make())
    generator.model.prepare_reference()
    params = SamplingParams(8, temperature=0.0)
    before = ids_of(generator.generate(PROMPTS, 1, params))
    with generator.model.as_role("reference"):
        generator.model([Group.from_lists([3], [[4]])])
    assert ids_of(generator.generate(PROMPTS, 1, params)) == before
    tiny.randomise_lora(generator.model, "policy", seed=8, scale=0.3)
    assert ids_of(generator.generate(PROMPTS, 1, params)) != before


def test_reference_sample_has_adapters_off():
    """A sample inside `as_role("reference")` is the base's (trl#1871)."""
    generator = without_eos(make())
    params = SamplingParams(8, temperature=0.0)
    base = without_eos(Generator(SharedModel.build(tiny.causal_lm()), tiny.word_tokenizer()))
    generator.model.roles["reference"] = type(generator.model.roles["policy"])(None, trainable=False)
    with generator.model.as_role("reference"):
        assert ids_of(generator.generate(PROMPTS, 1, params)) == ids_of(base.generate(PROMPTS, 1, params))


# --- refusals and caches ---------------------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        make().generate([[3], []], 2, SamplingParams(4))


def test_a_model_without_a_cache_is_refused():
    """Without this the cache would vanish among the keyword arguments, and every step see one token only."""
    generator = make(lora=False)
    lm = generator.model.causal_lm
    forward = lm.forward
    lm.forward = lambda input_ids=None, attention_mask=None, **kwargs: forward(input_ids=input_ids)
    with pytest.raises(ValueError, match="LlamaForCausalLM takes no transformers cache"):
        generator.generate(PROMPTS, 1, SamplingParams(2))


def test_a_cache_that_cannot_repeat_rows(monkeypatch):
    """Then all K rows are prefilled, and finished ones stay: slower, with the same tokens."""
    params = SamplingParams(10, seed=1)
    generator = make()
    generator.eos = frozenset(range(3, 12))
    expected = ids_of(generator.generate(PROMPTS, 3, params))
    monkeypatch.setattr(module, "takes_rows", lambda cache: False)
    assert ids_of(generator.generate(PROMPTS, 3, params)) == expected


def test_growing_layer_equals_concatenation():
    """Prefill of 3, then 80 single tokens with rows repeated at the start and dropped on the way."""
    layer, keys = GrowingLayer(), torch.randn(2, 1, 3, 4)
    layer.update(keys, -keys)
    layer.reorder_cache(torch.tensor([0, 0, 1, 1]))
    keys = keys[[0, 0, 1, 1]]
    for step in range(80):
        new = torch.randn(len(keys), 1, 1, 4)
        keys = torch.cat([keys, new], dim=2)
        got, values = layer.update(new, -new)
        assert torch.equal(got, keys)
        assert torch.equal(values, -keys)
        assert layer.get_seq_length() == step + 4
        if step == 40:
            layer.reorder_cache(torch.tensor([3, 1]))
            keys = keys[[3, 1]]


def test_growing_layers_stand_for_plain_ones_only():
    kinds = [type(layer).__name__ for layer in new_cache(tiny.config("gemma3_text")).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "GrowingLayer"]


def test_generation_is_quiet(caplog):
    with caplog.at_level(logging.WARNING):
        make().generate(PROMPTS, 2, SamplingParams(4))
    assert not caplog.records
