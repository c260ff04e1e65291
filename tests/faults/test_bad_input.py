"""What users pass by mistake: each is refused before anything is trained, with the argument or row and the fix."""

from __future__ import annotations

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, LlamaForCausalLM

import hf_rlx
from hf_rlx.data.formats import PromptError
from hf_rlx.models.loading import load_causal_lm, load_tokenizer
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.preflight import check_room
from tests.trainers.tools import EOS, ScriptedSampler, Watched, by_ids, config, lora, rows, scripted, tiny_llama

# --- arguments -------------------------------------------------------------------------------------------------------


def make(folder, **changed):
    """A trainer with some arguments changed."""
    given = {
        "model": tiny_llama(),
        "reward_funcs": by_ids,
        "args": config(folder),
        "train_dataset": rows(8),
        "processing_class": load_tokenizer("tiny"),
    }
    return GRPOTrainer(**{**given, **changed})


@pytest.mark.parametrize(
    ("make_args", "message"),
    [
        (
            lambda folder: transformers.TrainingArguments(folder, use_cpu=True),
            r"args must be a hf_rlx\.GRPOConfig, got a transformers\.TrainingArguments; import it with \"from hf_rlx",
        ),
        (
            lambda folder: trl.GRPOConfig(folder, use_cpu=True, bf16=False, gradient_checkpointing=None),
            r"got a trl\.GRPOConfig; import it with \"from hf_rlx import GRPOConfig\": the names",
        ),
        (lambda folder: {"output_dir": folder}, r"got dict; write GRPOConfig\(\*\*args\)"),
        (lambda folder: OnlineConfig(folder, use_cpu=True), r"got a hf_rlx\.OnlineConfig; import it"),
        (lambda folder: rows(8), r"got a datasets\.Dataset; name the arguments: train_dataset=\.\.\."),
        (lambda folder: GRPOConfig, "got the class GRPOConfig"),
        (lambda folder: folder, "args must be a hf_rlx.GRPOConfig, got str"),
    ],
)
def test_args_of_another_kind(tmp_path, make_args, message):
    with pytest.raises(TypeError, match=message):
        make(tmp_path, args=make_args(str(tmp_path)))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("model", None, "model must be a name, a folder, or a causal language model of transformers, got NoneType"),
        (
            "model",
            LlamaForCausalLM,
            r"got the class LlamaForCausalLM; pass an instance, e\.g\. of AutoModelForCausalLM",
        ),
        ("model", torch.nn.Linear(2, 2), r"got a torch\.Linear; a module that is no transformers model"),
        ("processing_class", "tiny", r"got str; load it: AutoTokenizer\.from_pretrained\('tiny'\)"),
        ("processing_class", 3, "processing_class must be a tokenizer of transformers, got int"),
        ("peft_config", {"r": 4}, r"peft_config must be a configuration of PEFT .* got dict; write peft\.LoraConfig"),
        ("peft_config", "lora", "peft_config must be .* got str"),
    ],
)
def test_arguments_of_another_kind(tmp_path, argument, value, message):
    with pytest.raises(TypeError, match=message):
        make(tmp_path, **{argument: value})


def test_an_adapter_in_place_of_its_configuration(tmp_path):
    with pytest.raises(TypeError, match=r"got a peft\.PeftModel; pass the model that has it as model="):
        make(tmp_path, peft_config=get_peft_model(tiny_llama(), lora()))


def test_good_arguments_pass(tmp_path):
    args = config(tmp_path)
    for model in ("tiny", tmp_path, tiny_llama(), get_peft_model(tiny_llama(), lora())):
        check_arguments(model, args, GRPOConfig, load_tokenizer("tiny"), lora())


def test_models_that_predict_no_tokens(tmp_path):
    llama = tiny_llama().config
    for model in (
        AutoModelForSequenceClassification.from_config(llama),
        AutoModel.from_config(llama),
        AutoModel.from_config(BertConfig(vocab_size=101, hidden_size=16, num_hidden_layers=1, num_attention_heads=1)),
    ):
        with pytest.raises(ValueError, match=type(model).__name__):
            make(tmp_path, model=model)


def test_predict_points_to_evaluate(tmp_path):
    with pytest.raises(NotImplementedError, match=r"evaluate\(eval_dataset=\.\.\.\) samples, scores and reports"):
        make(tmp_path).predict(rows(4))


# --- devices ---------------------------------------------------------------------------------------------------------


def test_several_gpus_without_a_launcher(tmp_path, monkeypatch):
    """transformers would wrap the model in DataParallel."""
    monkeypatch.setattr(GRPOConfig, "n_gpu", property(lambda self: 2))
    with pytest.raises(
        ValueError, match=r"2 GPUs are visible without a launcher.*set CUDA_VISIBLE_DEVICES=0 .*accelerate"
    ):
        make(tmp_path)


def test_bf16_on_a_gpu_that_emulates_it(tmp_path, monkeypatch):
    """A T4 has compute capability 7.5: it computes bfloat16 as slowly as float32 and more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ValueError, match=r"bf16=True, but this GPU has no bfloat16 .* use fp16=True"):
        GRPOConfig(str(tmp_path), bf16=True)


def test_fp16_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match="fp16=True needs a GPU; on the CPU leave fp16 and bf16 alone"):
        GRPOConfig(str(tmp_path), use_cpu=True, fp16=True)


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"question": ["1+1="] * 8}, r"train_dataset has no column `prompt`; it has \['question'\]\. If `question`"),
        (
            {"prompt": ["1"] * 7 + [None]},
            "train_dataset: row 7 has the prompt None; give it text or messages, or drop",
        ),
        ({"prompt": ["1"] * 6 + ["", "2"]}, "train_dataset: row 6 has the prompt ''"),
        (
            {"prompt": ["1"] * 3 + ["9" * 1_048_576], "number": [0] * 4},
            "train_dataset: row 3 has a prompt of 1,048,576 characters",
        ),
        ({"prompt": [[{"role": "user", "content": None}]]}, "train_dataset: row 0 has the content None in message 0"),
    ],
)
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_datasets(tmp_path, column, message, place):
    with pytest.raises(ValueError, match=message.replace("train_dataset", place)):
        make(tmp_path, **{place: Dataset.from_dict(column)})


def test_datasets_of_a_later_evaluation(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(ValueError, match="eval_dataset: row 1 has the prompt None"):
        trainer.evaluate([{"prompt": "1"}, {"prompt": None}])
    with pytest.raises(ValueError, match="eval_dataset has no column `prompt`"):
        trainer.evaluate(Dataset.from_dict({"text": ["1"]}))


def test_fewer_rows_than_a_rollout(tmp_path):
    with pytest.raises(ValueError, match="the dataset has 3 prompts but a rollout needs 4; add some, or lower"):
        make(tmp_path, train_dataset=rows(3)).train()


def test_a_misspelt_bundled_model():
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(OSError, match="there is no folder and no model 'tinny'; did you mean 'tiny'"):
            load("tinny")
        with pytest.raises(OSError, match=r"connect|nobody/tinny"):
            load("nobody/tinny")


def test_a_context_that_holds_no_prompt(tmp_path):
    with pytest.raises(ValueError, match="leaves no token for a prompt in the model's context of 64; lower it"):
        make(tmp_path, args=config(tmp_path, max_completion_length=64)).train()


@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset"])
def test_a_prompt_that_leaves_no_room_is_named_by_its_row(tmp_path, place):
    """64 positions, 6 new tokens: 58 are left for a prompt. 70 characters are few enough for a longer look only when
    the prompt is sampled for."""
    data = Dataset.from_list([{"prompt": "1" * (70 if i == 5 else 3), "number": i} for i in range(8)])
    trainer = make(tmp_path, args=config(tmp_path, per_device_train_batch_size=32), **{place: data})
    with pytest.raises(PromptError, match=rf"^{place}: row 5: a prompt of 71 tokens leaves no room for 6 new ones"):
        trainer.train() if place == "train_dataset" else trainer.evaluate()


# --- special tokens --------------------------------------------------------------------------------------------------

INJECTED = [[{"role": "user", "content": f"{i}+<eos>1<bos>="}] for i in range(8)]


def conversational(folder, **fields):
    """A run over messages with two special tokens each."""
    trainer = scripted(
        config(folder, **fields), reward=lambda prompts, **_: [float(i % 2) for i in range(len(prompts))]
    )
    trainer.train_dataset = Dataset.from_dict({"prompt": INJECTED})
    return trainer


def test_special_tokens_in_messages_are_text_and_counted(tmp_path, caplog):
    """Four prompts a rollout with two special tokens each: 8, told once. The template's own <bos> stays."""
    trainer = conversational(tmp_path, max_steps=2)
    seen = []
    generate = trainer.sampler.generate
    trainer.sampler.generate = lambda ids, *rest, **kw: (seen.extend(ids), generate(ids, *rest, **kw))[1]
    trainer.train()
    assert len(seen) == 8
    assert all(ids.count(1) == 1 and ids[0] == 1 and EOS not in ids for ids in seen)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["prompts/special_tokens_neutralised"] for log in logs] == [8, 8]
    assert caplog.text.count("8 special tokens stood inside messages") == 1


def test_special_tokens_in_messages_can_be_refused_or_allowed(tmp_path):
    trainer = conversational(tmp_path, special_tokens_in_messages="refuse")
    with pytest.raises(
        PromptError, match=r"^train_dataset: row \d: a message holds the special token '<eos>'; take it"
    ):
        trainer.train()
    trainer = conversational(tmp_path, special_tokens_in_messages="allow")
    trainer.train()
    assert trainer.state.log_history[0]["prompts/special_tokens_neutralised"] == 0
    with pytest.raises(ValueError, match=r"special_tokens_in_messages must be one of .* got 'drop'"):
        config(tmp_path, special_tokens_in_messages="drop")


# --- pad == EOS ------------------------------------------------------------------------------------------------------


def test_a_pad_token_that_is_eos_leaves_the_eos_in_the_loss(tmp_path):
    """Masks come from lengths; `id != pad` would drop the real EOS (trl PR 4970). Completions that end have their EOS
    inside the mask, cut ones have every token, and the loss does not depend on the pad token."""
    losses = []
    for pad in ("<pad>", "<eos>"):
        tokenizer = load_tokenizer("tiny")
        tokenizer.pad_token = pad
        trainer = Watched(tiny_llama(), by_ids, config(tmp_path), rows(16), processing_class=tokenizer)
        trainer.sampler = ScriptedSampler(tokenizer, 6)
        trainer.train()
        batch = trainer.batches[0]
        responses = [ids.tolist() for group in batch.groups for ids in group.response_ids]
        assert batch.mask.sum(dim=1).tolist() == [len(ids) for ids in responses]
        assert 0 < sum(ids[-1] == EOS for ids in responses) < len(responses)
        losses.append(trainer.state.log_history[0]["grad_norm"])
    assert losses[0] > 0
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)


# --- alerts in a run -------------------------------------------------------------------------------------------------


def test_a_constant_reward_is_told_once(tmp_path, caplog):
    """Also across a resume: the checkpoint knows what was told."""
    fields = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    scripted(config(tmp_path, **fields), reward=lambda prompts, **_: [0.5] * len(prompts)).train()
    assert caplog.text.count("constant reward: all completions of a prompt got the same reward") == 1
    assert "step 2: constant reward" in caplog.text
    caplog.clear()
    again = scripted(config(tmp_path, **fields), reward=lambda prompts, **_: [0.5] * len(prompts))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.global_step == 6
    assert "constant reward" not in caplog.text


def test_cut_completions_are_told(tmp_path, caplog):
    trainer = scripted(config(tmp_path, max_steps=2))
    trainer.sampler.generate = _never_ending(trainer.sampler.generate)
    trainer.train()
    assert "every completion was cut at max_completion_length=6" in caplog.text


def _never_ending(generate):
    def cut(*args, **kwargs):
        groups = generate(*args, **kwargs)
        for group in groups:
            for completion in group:
                completion.finished = False
        return groups

    return cut


def test_no_room_for_a_prompt_is_told_before_a_model_is_loaded(tmp_path):
    """The bundled model's context is 128 tokens, by its name and through a folder with an adapter; data do not matter.
    The dry run of the commands asks `check_room`."""
    get_peft_model(load_causal_lm("tiny"), lora()).save_pretrained(tmp_path / "adapter")
    load_tokenizer("tiny").save_pretrained(tmp_path / "adapter")
    for model in ("tiny", str(tmp_path / "adapter")):
        args = config(tmp_path, max_completion_length=128)
        with pytest.raises(ValueError, match="=128 leaves no token for a prompt in the model's context of 128; lower"):
            check_room(model, args)
        assert "max_completion_length=128 leaves none for a prompt" in str(hf_rlx.doctor(model, rows(4), None, args))
        check_room(model, config(tmp_path, max_completion_length=127))
