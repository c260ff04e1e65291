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
# <!-- The notebook is made from this script and run: python examples/notebooks/run.py grpo_with_your_reward -->
# # GRPO with a reward of your own, on a free T4 or a CPU
#
# The reward is a Python function, and the model learns to do what it pays for: groups of sampled answers to one prompt
# are compared with one another.
#
# **Colab**: Runtime, Change runtime type, T4 GPU. **Kaggle**: Settings, Accelerator, GPU T4 x2, and *Internet* on: the
# switch is off at first and asks for an account verified by phone; without it nothing can be installed or loaded.
# **No GPU**: the same cells train the model that comes with hf_rlx, with no download, in half a minute.
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
import re
from pathlib import Path

import torch
from IPython.display import Image, display
from pandas import DataFrame, read_parquet
from peft import LoraConfig

import hf_rlx
from hf_rlx import GRPOConfig, GRPOTrainer, four_bit_config
from hf_rlx.data.tasks import arithmetic_task, spoken_arithmetic_task
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
# ## Data and reward
#
# Rows with a `prompt`, text or messages, and whatever columns the rewards read. A reward gets lists, one entry a
# completion, and returns one number each; `None` means *does not apply*. Put your own rows and your own function here.

# %%
task = spoken_arithmetic_task(400, 64, seed=0) if ON_GPU else arithmetic_task(400, 64, seed=0)


def text_of(completion):
    """An answer is text, or messages where the prompt is messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions, answer, **columns):
    """1 where the last number is the answer, 0 elsewhere."""
    numbers = [re.findall(r"-?\d+", text_of(completion)) for completion in completions]
    return [float(found[-1:] == [wanted]) for found, wanted in zip(numbers, answer, strict=True)]


def short(completions, **columns):
    """A second reward: up to 1 for a short answer."""
    return [max(0.0, 1 - len(text_of(completion)) / 200) for completion in completions]


print(task.train[0], right(["112", "113"], ["113", "113"]))

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

args = GRPOConfig(
    str(OUTPUT / "grpo"),
    reward_weights=[1.0, 0.1],  # of right and short
    per_device_train_batch_size=32,  # completions: 4 prompts
    num_generations=8,
    max_completion_length=task.max_completion_length,
    learning_rate=1e-4 if ON_GPU else 1e-3,
    max_steps=STEPS,
    logging_steps=max(1, STEPS // 12),
    eval_strategy="steps",
    eval_steps=max(1, STEPS // 3),
    eval_on_start=True,  # the score of the base
    eval_temperature=1.0,  # judged as it samples; leave it out for greedy answers
    save_steps=max(1, STEPS // 3),
    save_total_limit=2,
    model_init_kwargs=attention,
    hub_model_id=PUSH_TO or None,
    disable_tqdm=True,  # no bars: a line a log is printed
    report_to="none",
    **(T4 if ON_GPU else {}),
)
device = "cuda" if ON_GPU else "cpu"
memory = estimate(MODEL, "grpo", args, lora, four_bit=ON_GPU, prompt_tokens=64, device=device)
print(f"{memory.what}: {memory.total / GIB:.2f} GiB at the peak; fits: {memory.fits()}")
if not memory.fits():
    print("to take less:", *memory.advice, sep="\n  ")

# %% [markdown]
# ## Train
#
# `reward` should rise. `kl` says how far the policy has moved, `no signal` in how many groups all answers earned the
# same, so that nothing was learned from them.


# %%
def resumes(folder):
    """Whether an earlier session left a checkpoint to go on from."""
    steps = [int(path.name.partition("-")[2]) for path in Path(folder).glob("checkpoint-*")]
    print(f"going on after step {max(steps)}" if steps else "starting")
    return bool(steps)


trainer = GRPOTrainer(
    MODEL,
    [right, short],
    args,
    train_dataset=task.train,
    eval_dataset=task.test,
    peft_config=lora,
    quantization_config=four_bit,
)
print("adapters in", {str(weight.dtype) for _, weight in trainer.shared.trainable_parameters()})
trainer.train(resume_from_checkpoint=resumes(args.output_dir))
trainer.save_model(args.output_dir)

# %% [markdown]
# ## Look, save, push
#
# The folder has the adapter, a model card and its plot, and what was answered in each evaluation.

# %%
before, *_, after = [read_parquet(path) for path in sorted(Path(args.output_dir).glob("completions/eval_*.parquet"))]
shown = {"prompt": after["prompt"], "before": before["completion"], "after": after["completion"]}
display(DataFrame(shown | {"right": after["rewards/right"]}).tail(8))
scores = {log["step"]: log for log in trainer.state.log_history if "eval_accuracy/right" in log}
for step, log in scores.items():
    low, high = log["eval_accuracy/right_low"], log["eval_accuracy/right_high"]
    print(f"step {step:3}: {log['eval_accuracy/right']:.3f} right ({low:.3f} to {high:.3f})")
display(Image(f"{args.output_dir}/training.png", width=900))

# %%
if PUSH_TO:
    print(trainer.push_to_hub())
