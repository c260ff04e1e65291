# ---
# jupyter:
#   accelerator: GPU
#   colab:
#     gpuType: T4
#     provenance: []
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   language_info:
#     name: python
# ---

# %% [markdown]
# <!-- The notebook is made from this script and run: python examples/notebooks/run.py reward_model_then_ppo -->
# # A reward model from pairs, then PPO against it, on one base
#
# Policy, reference, critic and reward model are roles of one base model: memory for one, on a free T4 or a CPU.
#
# **Colab**: Runtime, Change runtime type, T4 GPU. **Kaggle**: Settings, Accelerator, GPU T4 x2, and *Internet* on: the
# switch is off at first and asks for an account verified by phone; without it nothing can be installed or loaded.
# **No GPU**: the same cells train the model that comes with hf_rlx, with no download, in under a minute.
#
# **A lost session**: run all cells again. Training goes on from the newest checkpoint in the output folder, which
# outlives a session in Colab on a mounted Drive only, and on Kaggle with *Persistence: Files* (the second cell says
# how). A run that has finished is not done again, so for another one change the folder.

# %%
# %pip install -q "hf_rlx[plots]"
# Not on PyPI yet: upload the wheel that `pip wheel --no-deps -w dist .` makes of a checkout, and put its name for
# "hf_rlx[plots]", with matplotlib behind it.
# The torch that is there stays. Colab carries a torchao that PEFT refuses; nothing here needs it.
# %pip uninstall -qy torchao
import os

# Kaggle gives two GPUs; without a launcher one process uses one of them. Before torch is imported.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")

# %%
import random
import re
from pathlib import Path

import torch
from datasets import Dataset
from IPython.display import Image, display
from pandas import DataFrame, read_parquet
from peft import LoraConfig

import hf_rlx
from hf_rlx import PPOConfig, PPOTrainer, RewardConfig, RewardTrainer, SharedModel, four_bit_config
from hf_rlx.estimate import GIB, estimate

ON_GPU = torch.cuda.is_available()
# At most 1.5 B parameters on a T4 ("Qwen/Qwen2.5-1.5B-Instruct"); "tiny" comes with hf_rlx.
MODEL = "Qwen/Qwen2.5-0.5B-Instruct" if ON_GPU else "tiny"
STEPS = int(os.environ.get("HF_RLX_NOTEBOOK_STEPS", 60))
PUSH_TO = ""  # "you/your-model": logs in now, pushes at the end

# What outlives a session: a mounted Drive in Colab (from google.colab import drive; drive.mount("/content/drive")),
# /kaggle/working on Kaggle (Session options, Persistence, Files). Anywhere else the current folder.
KEPT = [Path("/content/drive/MyDrive"), Path("/kaggle/working")]
OUTPUT = next((folder for folder in KEPT if folder.is_dir()), Path()) / "runs"

if PUSH_TO:
    from huggingface_hub import notebook_login

    notebook_login()
print(hf_rlx.doctor(model=MODEL, push_to_hub=PUSH_TO or None))

# %% [markdown]
# ## Preference data
#
# Somebody's taste: round numbers near the sum. Rows have `prompt`, `chosen` and `rejected`, as text or messages; your
# own come from `Dataset.from_list(hf_rlx.data.pairs.read_rows("pairs.csv"))`. Held-out prompts are not trained on.

# %%
dice = random.Random(0)
sums = [(a, b) for a in range(11, 50) for b in range(11, 50)]
dice.shuffle(sums)


def ask(a, b):
    """Words and messages for a chat model; the bundled one knows sums as they are written."""
    question = f"What is {a}+{b}, roughly? Reply with the number only."
    return [{"role": "user", "content": question}] if ON_GPU else f"{a}+{b}="


def say(number):
    """An answer of the same form as the prompt."""
    return [{"role": "assistant", "content": str(number)}] if ON_GPU else str(number)


def pair(a, b):
    """The sum in round tens is preferred to one that is not round, and to a round one far away."""
    tens = round((a + b) / 10) * 10
    return {"prompt": ask(a, b), "chosen": say(tens), "rejected": say(tens + dice.choice([-4, -2, 3, 5, 40, -20]))}


def to_taste(completions, answer, **columns):
    """What the pairs are made by: 1 for a round number within 10 of the sum. The policy is not trained on it."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    numbers = [re.fullmatch(r"\s*(\d+)\.?\s*", text) for text in texts]
    return [
        float(bool(n) and int(n[1]) % 10 == 0 and abs(int(n[1]) - int(wanted)) <= 10)
        for n, wanted in zip(numbers, answer, strict=True)
    ]


pairs = Dataset.from_list([pair(a, b) for a, b in sums[:1000]])
held_out = Dataset.from_list([pair(a, b) for a, b in sums[1000:1200]])
questions = [{"prompt": ask(a, b), "answer": str(a + b)} for a, b in sums]
prompts, asked = Dataset.from_list(questions[:1000]), Dataset.from_list(questions[1000:1100])
print(pairs[0])

# %% [markdown]
# ## Settings for a T4
#
# A T4 (compute capability 7.5, 14.6 GiB) has no bfloat16 and no FlashAttention 2. On a newer GPU leave `fp16` and
# `float16` out: bfloat16 is chosen there. Without a GPU none of this applies.

# %%
T4 = {
    "fp16": True,  # float16 autocast; the adapters stay in float32, where their small steps are not lost
    "optim": "paged_adamw_8bit",  # the optimizer's numbers in 8 bits; they move to the CPU where the GPU is full
    "gradient_checkpointing": True,  # activations are computed again in the backward
}
four_bit = four_bit_config(compute_dtype=torch.float16) if ON_GPU else None  # the base in 4 bits, NF4
attention = {"attn_implementation": "sdpa"}
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")

common = {
    "max_steps": STEPS,
    "logging_steps": max(1, STEPS // 12),
    "eval_strategy": "steps",
    "eval_steps": max(1, STEPS // 3),
    "eval_on_start": True,
    "save_steps": max(1, STEPS // 3),
    "save_total_limit": 2,
    "disable_tqdm": True,  # no bars: a line a log is printed
    "report_to": "none",
    **(T4 if ON_GPU else {}),
}
reward_args = RewardConfig(
    str(OUTPUT / "reward"),
    per_device_train_batch_size=16,  # pairs
    max_length=128,  # tokens of a prompt and an answer
    learning_rate=1e-4 if ON_GPU else 1e-3,
    normalizer="running",  # scores with mean 0 and standard deviation 1, which PPO likes
    **common,
)
ppo_args = PPOConfig(
    str(OUTPUT / "ppo"),
    reward_weights=[1.0, 0.0],  # the second one is only watched
    per_device_train_batch_size=32,  # completions
    num_iterations=2,  # updates on a rollout
    critic_adapter=True,  # the critic has an adapter of its own beside the policy's; False: a head on the policy's
    max_completion_length=8,
    learning_rate=5e-5 if ON_GPU else 1e-3,
    kl_target=3.0,  # nats a completion
    hub_model_id=PUSH_TO or None,
    eval_temperature=1.0,  # judged as it samples
    **common,
)
for algorithm, args, roles in (("reward", reward_args, 0), ("ppo", ppo_args, 1)):
    device = "cuda" if ON_GPU else "cpu"
    memory = estimate(MODEL, algorithm, args, lora, ON_GPU, prompt_tokens=64, device=device, roles=roles)
    print(f"{memory.what}: {memory.total / GIB:.2f} GiB at the peak; fits: {memory.fits()}")
    if not memory.fits():
        print("to take less:", *memory.advice, sep="\n  ")

# %% [markdown]
# ## The reward model: a role of the shared base
#
# Look at the held-out accuracy, and at how the score follows the length: PPO will exploit whatever is wrong with it.


# %%
def resumes(folder):
    """Whether an earlier session left a checkpoint to go on from."""
    steps = [int(path.name.partition("-")[2]) for path in Path(folder).glob("checkpoint-*")]
    print(f"going on after step {max(steps)}" if steps else "starting")
    return bool(steps)


torch.manual_seed(0)  # of the adapters' first values
model = SharedModel.from_pretrained(MODEL, peft_config=lora, quantization_config=four_bit, **attention)
reward_trainer = RewardTrainer(model, reward_args, train_dataset=pairs, eval_dataset=held_out)
reward_trainer.train(resume_from_checkpoint=resumes(reward_args.output_dir))
reward_trainer.save_model(reward_args.output_dir)

# %%
print(reward_trainer.report().table())
display(Image(f"{reward_args.output_dir}/training.png", width=900))

# %% [markdown]
# ## PPO against it
#
# Beside the learned reward watch a score that you trust, here `to_taste`: when the one rises and the other does not,
# the policy has found a fault of the reward model. The plot's explained variance says whether the critic has learned;
# it falls again once the rewards hardly differ.

# %%
rewards = [model.reward_function(), to_taste]
trainer = PPOTrainer(model, rewards, ppo_args, train_dataset=prompts, eval_dataset=asked)
print("adapters and critic in", {str(weight.dtype) for _, weight in model.trainable_parameters()})
trainer.train(resume_from_checkpoint=resumes(ppo_args.output_dir))
trainer.save_model(ppo_args.output_dir)

# %% [markdown]
# ## Look, save, push
#
# One folder has everything: the policy at the root, reward model and critic beside it.
# `SharedModel.from_pretrained(folder)` brings all roles back.

# %%
folder = Path(ppo_args.output_dir)
before, *_, after = [read_parquet(path) for path in sorted(folder.glob("completions/eval_*.parquet"))]
shown = {"prompt": after["prompt"], "before": before["completion"], "after": after["completion"]}
display(DataFrame(shown | {"learned reward": after["rewards/reward"], "to_taste": after["rewards/to_taste"]}).tail(8))
display(Image(f"{folder}/training.png", width=900))

# %%
if PUSH_TO:
    print(trainer.push_to_hub())  # all roles
