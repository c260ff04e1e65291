"""SharedModel: roles, their switches and flags, and what trains where."""

import copy

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import BertConfig, BertModel

from hf_rlx.models.roles import CRITIC, POLICY, REFERENCE, REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny

QV = ["q_proj", "v_proj"]
HEADS = (REWARD, CRITIC)


def make(*roles, **options):
    """A llama with a LoRA policy, and an adapter and a head for each further role; all adapters look trained."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(target_modules=QV), **options)
    for name in roles:
        model.add_role(name, tiny.lora(r=2, target_modules=["v_proj", "down_proj"]))
    tiny.randomise_lora(model)
    return model


def flags(model):
    """All that a switch may touch, read independently of the code under test."""
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    return {
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "training": {n: m.training for n, m in model.named_modules()},
        "active": [list(layer.active_adapters) for layer in layers],
        "disabled": [layer.disable_adapters for layer in layers],
        "peft": (list(model.model.active_adapters), model.model.active_adapter),
    }


def logps(model, groups=None):
    with torch.no_grad():
        return model(groups or tiny.ragged_groups()).per_token_logps


def trainable_names(model):
    return {n for n, p in model.named_parameters() if p.requires_grad}


# --- as_role ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_as_role_restores_everything(training):
    model = make(REWARD)
    model.prepare_reference()
    model.train(training)
    model.causal_lm.model.layers[0].eval()  # a mixed state must come back mixed
    before = flags(model)
    for role in (REWARD, REFERENCE, POLICY):
        with model.as_role(role):
            assert flags(model)["peft"][0] == ([POLICY] if role == POLICY else [role])
        assert flags(model) == before


def test_as_role_restores_after_an_exception():
    model = make(REWARD).train()
    model.prepare_reference()
    before = flags(model)
    for role in (REWARD, REFERENCE):
        with pytest.raises(ZeroDivisionError), model.as_role(role):
            raise ZeroDivisionError
        assert flags(model) == before


def fail_unless(fine):
    assert fine
    raise ZeroDivisionError


def test_as_role_nests():
    model = make(REWARD).train()
    model.prepare_reference()
    outside = flags(model)
    with model.as_role(REWARD):
        inside = flags(model)
        with pytest.raises(ZeroDivisionError), model.as_role(REFERENCE), model.as_role(REWARD):
            fail_unless(flags(model)["requires_grad"] == inside["requires_grad"])
        assert flags(model) == inside
    assert flags(model) == outside


def test_adapters_off_inside_adapters_on_and_back():
    """The fresh policy's reference switches adapters off; a reward role inside switches them on, then off again."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    model.add_role(REWARD, tiny.lora())
    assert model.prepare_reference() == "adapters_off"
    before = flags(model)
    with model.as_role(REFERENCE):
        off = flags(model)
        assert all(off["disabled"])
        with model.as_role(REWARD):
            assert not any(flags(model)["disabled"])
        assert flags(model) == off
    assert flags(model) == before


def test_a_frozen_role_runs_in_evaluation_mode():
    model = make().train()
    model.prepare_reference()
    with model.as_role(REFERENCE):
        assert not any(m.training for m in model.modules())
        assert trainable_names(model) == set()


def test_unknown_role():
    with (
        pytest.raises(KeyError, match=r"no role 'judge'; this model has \['policy'\]"),
        SharedModel.build(tiny.causal_lm()).as_role("judge"),
    ):
        pass


# --- what trains where -----------------------------------------------------------------------------------------------


def parts(names):
    """Names -> the adapters and heads they belong to."""
    found = set()
    for name in names:
        pieces = name.split(".")
        found.add("head " + pieces[1] if pieces[0] == "heads" else pieces[-2] if "lora_" in name else "base")
    return found


def test_trainable_names_per_role():
    """Adding a role flips no flag of another one (peft#2759, peft#3487), and each role trains its own parts only."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(target_modules=QV))
    policy = trainable_names(model)
    assert len(policy) == 2 * 2 * 2  # layers x modules x (A, B)
    model.add_role(REWARD, tiny.lora(target_modules=QV))
    model.add_role(CRITIC)
    model.prepare_reference()
    assert trainable_names(model) == policy | {f"heads.{n}.linear.{p}" for n in HEADS for p in ("weight", "bias")}
    with model.as_role(POLICY):
        assert trainable_names(model) == policy
    with model.as_role(REWARD):
        assert parts(trainable_names(model)) == {"reward", "head reward"}
        assert len(trainable_names(model)) == 8 + 2
    with model.as_role(CRITIC):  # shares the policy's adapter, but only its head is its own
        assert trainable_names(model) == {"heads.critic.linear.weight", "heads.critic.linear.bias"}
    for role in (POLICY, REWARD, CRITIC):
        with model.as_role(role):
            assert {n for n, _ in model.trainable_parameters(role)} == trainable_names(model)
    assert model.trainable_parameters(REFERENCE) == []


def test_all_weights_train_without_peft():
    model = SharedModel.build(tiny.causal_lm())
    everything = {n for n, _ in model.named_parameters()}
    assert {n for n, _ in model.trainable_parameters()} == everything
    model.add_role(CRITIC)
    with model.as_role(POLICY):
        assert trainable_names(model) == everything
    assert model.prepare_reference() == "model_copy"
    assert {n for n, _ in model.named_parameters()} == everything | {
        "heads.critic.linear.weight",
        "heads.critic.linear.bias",
    }


def test_a_frozen_adapter_trains_nothing():
    """Continuing from an adapter that was loaded frozen must not look alive (trl#6700)."""
    peft = get_peft_model(tiny.causal_lm(), tiny.lora())
    for parameter in peft.parameters():
        parameter.requires_grad_(False)
    model = SharedModel(peft)
    assert model.trainable_parameters() == []
    model.add_role(REWARD, tiny.lora())
    assert parts(trainable_names(model)) == {"head reward"}  # and no adapter came to life
    with model.as_role(REWARD):
        pass
    assert parts(trainable_names(model)) == {"head reward"}
    assert model.trainable_parameters() == []
    with model.as_role(POLICY):
        assert trainable_names(model) == set()


def test_all_linear_lora_leaves_the_heads_alone():
    """`all-linear` means the decoder's layers: neither the vocabulary matrix nor any scalar head gets LoRA."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    model.add_role(CRITIC)
    model.add_role(REWARD, tiny.lora())
    wrapped = {n.split(".lora_")[0] for n, _ in model.named_parameters() if "lora_" in n}
    assert len(wrapped) == 2 * 7  # q k v o gate up down
    assert not any("lm_head" in n or "heads" in n for n in wrapped)
    assert type(model.causal_lm.get_output_embeddings()) is torch.nn.Linear


def test_step_of_one_role_changes_that_role_only():
    """Forward and backward of two roles, then the optimizer of one: the other's tensors stay (open-rl#80)."""
    model = make(REWARD)
    groups = tiny.ragged_groups()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with model.as_role(POLICY):
        model(groups).per_token_logps.sum().backward()
    with model.as_role(REWARD):
        model.score(groups).sum().backward()
    torch.optim.SGD([p for _, p in model.trainable_parameters(POLICY)], lr=0.1).step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, _ in model.trainable_parameters(POLICY)}


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_gradients_of_two_adapters_under_checkpointing(family):
    """Each role runs forward and backward in its own block: exact. Measured: one joint backward is 0.81x (peft#2832).

    Truth: the gradients of the same two losses, each taken without checkpointing on a model that knows no switch.
    """
    groups = tiny.ragged_groups()

    def run(model, role):
        with model.as_role(role):
            if role == POLICY:
                tiny.weighted(model(groups).per_token_logps).backward()
            else:
                tiny.weighted(model.score(groups, role)).backward()

    model = SharedModel.build(tiny.causal_lm(family), tiny.lora())
    model.add_role(REWARD, tiny.lora())
    tiny.randomise_lora(model)
    model.train()
    expected = {}
    for role in (POLICY, REWARD):
        alone = copy.deepcopy(model)
        run(alone, role)
        expected.update(tiny.gradients(alone))
    assert parts(expected) == {"policy", "reward", "head reward"}
    model.activation_checkpointing_enable()
    for role in (POLICY, REWARD, POLICY):
        run(model, role)
    actual = tiny.gradients(model)
    for name in actual:
        if ".policy." in name:
            actual[name] /= 2
    tiny.assert_gradients_close(actual, expected, rtol=1e-5)


# --- scores and values -----------------------------------------------------------------------------------------------


def scored_groups():
    """The same response without and with EOS = 2, and others of mixed lengths."""
    return [
        Group.from_lists([5, 6], [[7, 8, 9], [7, 8, 9, 2], [10]]),
        Group.from_lists([11, 12, 13, 14], [[15] * 9, [16, 2]]),
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("pad", [0, 2])
def test_the_score_reads_the_last_real_token(packing, pad):
    """With pad = EOS = 2 the appended EOS still counts (transformers#35352), and a batch of mixed lengths gives what
    one by one gives."""
    model = make(REWARD, packing=packing)
    model.config.pad_token_id = pad
    groups = scored_groups()
    scores = model.score(groups)
    assert scores.shape == (5,)
    assert (scores[0] - scores[1]).abs() > 1e-3
    alone = [model.score([g.select([k])]) for g in groups for k in range(g.num_responses)]
    torch.testing.assert_close(scores, torch.cat(alone), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores, model.score(groups, max_tokens=1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("packing", [True, False])
def test_the_score_stands_exactly_on_the_last_token(packing):
    """A head that returns the position: token embeddings 1 in channel 0 at one place would do; here the decoder is
    replaced by one whose hidden state is the token id. Last ids: 9, 2, 10, 15, 2; of an empty response, the
    prompt's last (6)."""
    model = make(REWARD, packing=packing)
    groups = [*scored_groups(), Group.from_lists([5, 6], [[]])]
    with torch.no_grad():
        model.heads[REWARD].linear.weight.zero_()[0, 0] = 1.0
        model.heads[REWARD].linear.bias.zero_()
    model(groups)  # decides the plan

    def ids_as_states(module, args, kwargs, output):
        output.last_hidden_state = kwargs["input_ids"][..., None].float().expand(-1, -1, 32)
        return output

    model.causal_lm.model.register_forward_hook(ids_as_states, with_kwargs=True)
    assert model.score(groups).tolist() == [9, 2, 10, 15, 2, 6]


def test_score_switches_to_its_role_by_itself():
    """Outside `as_role` the reward adapter runs all the same, without a gradient, and everything is put back."""
    model = make(REWARD).train()
    groups = scored_groups()
    with model.as_role(REWARD):
        expected = model.score(groups)
    assert expected.requires_grad
    before = flags(model)
    scores = model.score(groups)
    assert flags(model) == before
    assert not scores.requires_grad
    torch.testing.assert_close(scores, expected.detach())
    with torch.no_grad():  # the policy's own hidden states through the same head are something else
        model.roles[REWARD].adapter, adapter = POLICY, model.roles[REWARD].adapter
        wrong = model.score(groups)
        model.roles[REWARD].adapter = adapter
    assert (wrong - expected).abs().max() > 1e-3


def test_score_without_a_head():
    model = make()
    with pytest.raises(ValueError, match="role 'policy' has no head"):
        model.score(scored_groups(), POLICY)
    with pytest.raises(KeyError, match="no role 'reward'"):
        model.score(scored_groups())


def test_critic_values_stand_before_each_token():
    """A critic that reads the token id: V before token t is the id at t - 1, i.e. the state that chooses token t.

    Prompt 5 6, response 7 8 9: values 6, 7, 8; response 10: value 6. A fresh critic says 0 everywhere.
    """
    model = make()
    model.add_role(CRITIC)
    groups = [Group.from_lists([5, 6], [[7, 8, 9], [10]])]
    assert model(groups, want_values=True).values.tolist() == [[0, 0, 0], [0, 0, 0]]
    with torch.no_grad():
        model.heads[CRITIC].linear.weight[0, 0] = 1.0

    def ids_as_states(module, args, kwargs, output):
        output.last_hidden_state = kwargs["input_ids"][..., None].float().expand(-1, -1, 32)
        return output

    model.causal_lm.model.register_forward_hook(ids_as_states, with_kwargs=True)
    assert model(groups, want_values=True).values.tolist() == [[6, 7, 8], [6, 0, 0]]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_prompt_learning_is_refused():
    peft = get_peft_model(tiny.causal_lm(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="prompt-learning adapters change the prompt"):
        SharedModel(peft)


def test_several_active_adapters_are_refused():
    peft = get_peft_model(tiny.causal_lm(), tiny.lora(), adapter_name="one")
    peft.add_adapter("two", tiny.lora())
    peft.base_model.set_adapter(["one", "two"])
    with pytest.raises(ValueError, match=r"\['one', 'two'\] are active"):
        SharedModel(peft)


def test_peft_model_and_config_are_refused():
    with pytest.raises(ValueError, match="drop peft_config to train on the adapter"):
        SharedModel.build(get_peft_model(tiny.causal_lm(), tiny.lora()), tiny.lora())


def test_other_refusals():
    model = make(REWARD)
    with pytest.raises(ValueError, match="is a SharedModel already"):
        SharedModel(model)
    with pytest.raises(ValueError, match="role 'reward' exists already"):
        model.add_role(REWARD)
    with pytest.raises(ValueError, match="asks for an adapter, but all weights"):
        SharedModel.build(tiny.causal_lm()).add_role(REWARD, tiny.lora())
    encoder = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match="BertModel has no vocabulary head"):
        SharedModel(encoder)


# --- adapters of every kind ------------------------------------------------------------------------------------------


def test_a_users_adapter_of_any_name():
    peft = get_peft_model(tiny.causal_lm(), tiny.lora(target_modules=QV), adapter_name="mine")
    tiny.randomise_lora(peft)
    model = SharedModel(peft)
    model.add_role(REWARD, tiny.lora())
    assert model.roles[POLICY].adapter == "mine"
    assert parts(n for n, _ in model.trainable_parameters()) == {"mine"}
    assert model.prepare_reference() == "adapter_copy"
    before = logps(model)
    with model.as_role(REFERENCE):
        torch.testing.assert_close(logps(model), before, atol=0, rtol=0)
    assert flags(model)["peft"] == (["mine"], "mine")


def test_raw_parameters_of_experts():
    """LoRA on a mixture's fused expert weights (trl#5222): builds, a second role and a reference copy too."""
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    model = SharedModel.build(tiny.causal_lm("qwen3_moe"), config)
    tiny.randomise_lora(model, scale=0.3)
    groups = tiny.ragged_groups()
    assert any("experts" in n for n, _ in model.trainable_parameters())
    assert model.prepare_reference() == "adapter_copy"
    policy = logps(model)
    assert model.plan.packed
    with model.as_role(REFERENCE):
        torch.testing.assert_close(logps(model), policy, atol=0, rtol=0)
    tiny.weighted(model(groups).per_token_logps).backward()
    actual = tiny.gradients(model)
    model.zero_grad()
    tiny.weighted(tiny.naive(model.causal_lm, groups)[0]).backward()
    assert any("experts" in n for n in actual)
    tiny.assert_gradients_close(actual, tiny.gradients(model), rtol=1e-4)
