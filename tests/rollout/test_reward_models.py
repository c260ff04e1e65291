"""Reward functions by name, and sequence classifiers as rewards (tiny random models, a character tokenizer)."""

import logging
import sys

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hf_rlx.rollout.reward_models import ModelReward, prepare, resolve
from hf_rlx.rollout.scoring import RewardError, RewardScorer, ScoreRequest

EOS = "<eos>"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz+= :;"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"


def tokenizer(chat_template=TEMPLATE, **special):
    vocabulary = {token: i for i, token in enumerate([EOS, "<pad>", "<unk>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"eos_token": EOS, "pad_token": EOS, "unk_token": "<unk>"} | special  # pad == eos
    made = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=64, **special)
    made.chat_template = chat_template
    return made


SIZES = {"vocab_size": 3 + len(CHARACTERS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


def llama(seed=0, num_labels=1, **changes):
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(LlamaConfig(**(LLAMA | changes), num_labels=num_labels)).eval()
    torch.nn.init.normal_(model.score.weight)
    return model


def by_hand(model, text):
    """Backbone and head on one text without padding: the score at its last token."""
    ids = torch.tensor([tokenizer()(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        return model.score(hidden[:, -1])[0, 0].item()


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attribute", "value"), [("hf_device_map", {"": 0}), ("quantization_method", "bitsandbytes")])
def test_models_move_to_the_device(attribute, value):
    """`meta` stands for a GPU; a model that accelerate or a quantiser has placed stays."""
    for given in (llama(), ModelReward(llama(), tokenizer())):
        scorer = RewardScorer(given, reward_processing_classes=tokenizer(), device="meta")
        assert scorer.functions[0].call.model.device.type == "meta"
    placed = llama()
    setattr(placed, attribute, value)
    RewardScorer(placed, reward_processing_classes=tokenizer(), device="meta")
    assert placed.device.type == "cpu"
    stays = llama()
    RewardScorer(stays, reward_processing_classes=tokenizer())
    assert stays.device.type == "cpu"


# --- ModelReward -----------------------------------------------------------------------------------------------------


def test_the_score_is_read_at_eos_also_when_pad_is_eos():
    model = llama()
    reward = ModelReward(model, tokenizer())
    texts = ["b", "b" + EOS, "b" + EOS + EOS, "bcdefgh"]
    scores = reward(prompts=["a"] * 4, completions=texts)
    assert scores == pytest.approx([by_hand(model, "a" + text) for text in texts], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3
    assert abs(scores[1] - scores[2]) > 1e-3
    # transformers' own forward takes the rightmost token that is not pad, here the one before EOS.
    ids = torch.tensor([tokenizer()("ab" + EOS, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        assert model(ids).logits.item() == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_mixed_lengths_in_a_batch_score_as_alone(batch_size):
    model = llama(pad_token_id=None)
    reward = ModelReward(model, tokenizer(), batch_size=batch_size)
    prompts = ["a", "abc", "", "hello world", "x"]
    completions = ["", "defghijklmnop", "z", "=", "y" + EOS]
    expected = [by_hand(model, p + c) for p, c in zip(prompts, completions, strict=True)]
    assert reward(prompts, completions) == pytest.approx(expected, abs=1e-5)


def test_a_text_without_tokens_abstains():
    assert ModelReward(llama(), tokenizer())(["", "a"], ["", ""])[0] is None


def test_conversations_go_through_the_chat_template():
    model = llama()
    prompt = [{"role": "user", "content": "hi"}]
    reward = ModelReward(model, tokenizer(), append_eos=True)
    expected = pytest.approx([by_hand(model, "u:hi;a:yo;")], abs=1e-5)
    assert reward([prompt], [[{"role": "assistant", "content": "yo"}]]) == expected
    assert reward([prompt], ["yo"]) == expected
    with pytest.raises(ValueError, match="no chat template"):
        ModelReward(model, tokenizer(chat_template=None))([prompt], ["yo"])


def test_append_eos_ends_plain_text_once():
    model = llama()
    reward = ModelReward(model, tokenizer(), append_eos=True)
    with_eos = by_hand(model, "ab" + EOS)
    assert reward(["a", "a"], ["b", "b" + EOS]) == pytest.approx([with_eos, with_eos], abs=1e-5)


def test_a_long_text_loses_its_beginning():
    model = llama()
    assert ModelReward(model, tokenizer()).max_length == 64
    reward = ModelReward(model, tokenizer(), max_length=3)
    assert reward(["abcd"], ["ef"]) == pytest.approx([by_hand(model, "def")], abs=1e-5)


def test_training_flags_and_gradients_are_left_alone():
    model = llama(attention_dropout=0.5)
    model.train()
    model.score.eval()
    reward = ModelReward(model, tokenizer())
    assert reward(["a"], ["b"]) == reward(["a"], ["b"])  # dropout is off
    assert model.training
    assert model.base_model.layers[0].self_attn.training
    assert not model.score.training
    reward.tokenizer = None
    with pytest.raises(AttributeError):
        reward(["a"], ["b"])
    assert model.training


def test_half_precision_gives_float32_scores():
    reward = ModelReward(llama().to(torch.bfloat16), tokenizer())
    assert reward._forward([[3, 4], [5]]).dtype == torch.float32


def test_other_backbones_and_the_model_s_own_logits():
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=34, n_embd=16, n_layer=1, n_head=2, n_positions=64, pad_token_id=0, num_labels=1)
    decoder = GPT2ForSequenceClassification(gpt2).eval()
    texts = ["b" + EOS, "bcdef"]
    expected = [by_hand(decoder, "a" + text) for text in texts]
    assert ModelReward(decoder, tokenizer())(["a", "a"], texts) == pytest.approx(expected, abs=1e-5)

    encoder = BertForSequenceClassification(BertConfig(**SIZES, intermediate_size=32, num_labels=1)).eval()
    ids = torch.tensor([tokenizer()("abc", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        expected = [encoder(ids).logits.item()] * 2
    scores = ModelReward(encoder, tokenizer())(["abc", "abc", "abcdefg"], ["", "", ""])
    assert scores[:2] == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_a_peft_adapter_counts():
    from peft import LoraConfig, get_peft_model

    plain = llama()
    before = ModelReward(plain, tokenizer())(["a"], ["b" + EOS])
    model = get_peft_model(plain, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    (scorer,) = prepare(model, processing_classes=tokenizer())
    after = scorer.call(["a"], ["b" + EOS])
    assert scorer.kind == "main"
    assert abs(after[0] - before[0]) > 1e-4
    with model.disable_adapter():
        assert scorer.call(["a"], ["b" + EOS]) == pytest.approx(before, abs=1e-5)


def test_peft_prompt_learning_is_refused():
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(llama(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="prompt learning is not supported"):
        ModelReward(model, tokenizer())


def test_models_that_give_no_single_score_are_refused():
    with pytest.raises(ValueError, match="num_labels=3"):
        ModelReward(llama(num_labels=3), tokenizer())
    language_model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_labels=1))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM\) gave logits of shape \(1, 2, 34\)"):
        ModelReward(language_model, tokenizer())(["a"], ["b"])
    with pytest.raises(ValueError, match=r"no name to load its tokenizer by; pass it in reward_processing_classes"):
        ModelReward(llama())


# --- in the scorer ---------------------------------------------------------------------------------------------------


def length(completions, **kwargs):
    return [len(text) for text in completions]


def test_the_scorer_takes_a_model_beside_a_function():
    model = llama()
    with RewardScorer([model, length], reward_processing_classes=[tokenizer(), None], weights=[1.0, 0.0]) as scorer:
        assert scorer.names == ["LlamaForSequenceClassification", "length"]
        scorer.submit(ScoreRequest("a", ["b", "cd" + EOS], [[1], [2]], {}))
        scorer.submit(ScoreRequest("xyz", ["b"], [[1]], {}))
        result = scorer.gather()
    expected = [by_hand(model, text) for text in ("ab", "acd" + EOS, "xyzb")]
    torch.testing.assert_close(result.total, torch.tensor(expected), atol=1e-5, rtol=0)
    assert result.rewards[:, 1].tolist() == [1.0, 7.0, 1.0]


def test_a_fault_of_the_model_is_a_reward_error():
    with RewardScorer(llama(), reward_processing_classes=tokenizer(chat_template=None)) as scorer:
        scorer.submit(ScoreRequest([{"role": "user", "content": "hi"}], ["yo"], [[1]], {}))
        with pytest.raises(RewardError, match=r"(?s)ValueError: .*no chat template.*prompt: 'user: hi'"):
            scorer.gather()


def test_a_folder_is_loaded_as_a_model_with_its_tokenizer(tmp_path):
    folder = tmp_path / "judge"
    model = llama()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with RewardScorer(str(folder), model_init_kwargs={"dtype": torch.float32}) as scorer:
        assert scorer.names == ["judge"]
        scorer.submit(ScoreRequest("a", ["b" + EOS], [[1]], {}))
        assert scorer.gather().total.tolist() == pytest.approx([by_hand(model, "ab" + EOS)], abs=1e-5)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewards_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def fine(completions):\n    return [1.0]\n\nnothing = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize("separator", [":", "."])
def test_dotted_paths_are_imported(rewards_module, separator):
    assert resolve(f"{rewards_module}{separator}fine")(["x"]) == [1.0]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("my_rewards:missing", "no attribute 'missing'"),
        ("my_rewards.missing", "no attribute 'missing'"),
        ("my_rewards:nothing", "is None, which is not callable"),
        ("no_such_package.module.reward", "No module named"),
        (":fine", "Empty module name"),
    ],
)
def test_paths_that_lead_nowhere_are_import_errors_with_the_name(rewards_module, path, reason):
    with pytest.raises(ImportError, match=f"reward function {path!r}.*{reason}"):
        resolve(path)


def test_a_model_that_does_not_exist_is_an_import_error(monkeypatch):
    from transformers import AutoModelForSequenceClassification

    def missing(name, **options):
        raise OSError(f"{name} is not a local folder, options {options}")

    monkeypatch.setattr(AutoModelForSequenceClassification, "from_pretrained", missing)
    with pytest.raises(ImportError, match=r"'acuracy_reward'.*package.module:function.*'num_labels': 1"):
        resolve("acuracy_reward")


def test_a_name_that_occurs_again_gets_a_number_and_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        names = [func.name for func in prepare([length, length, length], names=["len", "len", "len"])]
    assert names == ["len", "len_2", "len_3"]
    assert [record.message for record in caplog.records] == [
        "two reward functions are called 'len': the later is logged as 'len_2'",
        "two reward functions are called 'len': the later is logged as 'len_3'",
    ]
