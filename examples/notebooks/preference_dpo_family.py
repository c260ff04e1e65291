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
# <!-- The notebook is made from this script and run: python examples/notebooks/run.py preference_dpo_family -->
# # DPO, IPO, SimPO or ORPO on pairs of your own, on a free T4 or a CPU
#
# One switch chooses the loss, one line the pairs: a CSV, JSON or parquet file, a dataset of the Hub, or rows.
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
import random
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from IPython.display import Image, display
from pandas import DataFrame
from peft import LoraConfig

import hf_rlx
from hf_rlx import SharedModel, four_bit_config
from hf_rlx.data.pairs import prepare_pairs, read_rows
from hf_rlx.estimate import GIB, estimate

LOSS = "dpo"  # or "ipo", "simpo", "orpo"
PAIRS = ""  # "pairs.csv", .jsonl, .json, .parquet, or a dataset of the Hub; empty: the sums below
COLUMNS = {}  # where yours are called otherwise: {"question": "prompt", "good": "chosen", "bad": "rejected"}

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
# ## Pairs
#
# A row has `prompt`, `chosen` and `rejected`, as text or messages. The report says what was left out and whether the
# better answer is simply the longer one, which is the first thing that a model learns.


# %%
def sums():
    """Right and wrong sums: messages for a chat model; the bundled one knows them as they are written."""
    dice = random.Random(0)
    for a in range(11, 41):
        for b in range(11, 31):
            question, wrong = f"{a}+{b}=", a + b + dice.choice([-10, -2, -1, 1, 3])
            if ON_GPU:
                question = [{"role": "user", "content": f"What is {a}+{b}? Reply with the number only."}]
            answers = [[{"role": "assistant", "content": str(n)}] if ON_GPU else str(n) for n in (a + b, wrong)]
            yield {"prompt": question, "chosen": answers[0], "rejected": answers[1]}


rows, report = prepare_pairs(read_rows(PAIRS, renames=COLUMNS) if PAIRS else sums(), dedupe="exact")
print(report.text())
display(DataFrame(rows[:5]))

# %%
# A fifth of the prompts is held out, with all their pairs.
questions = sorted({str(row.get("prompt")) for row in rows})
kept = set(random.Random(0).sample(questions, max(1, len(questions) // 5)))
train = Dataset.from_list([row for row in rows if str(row.get("prompt")) not in kept])
held_out = Dataset.from_list([row for row in rows if str(row.get("prompt")) in kept][:100])
print(f"{len(train)} pairs to train on, {len(held_out)} held out")

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

# What each loss has for itself: beta is another thing in each of them.
NAME, FIELDS = {
    "dpo": ("DPO", {"beta": 0.1}),  # the larger, the nearer the policy stays to where it starts
    "ipo": ("IPO", {"beta": 0.5}),  # the margin to reach is 1 / (2 beta) nats, and no further
    "simpo": ("SimPO", {"beta": 2.0, "gamma_beta_ratio": 0.5}),  # log-probs per token, no reference
    "orpo": ("ORPO", {"beta": 0.1}),  # likelihood of the chosen answer plus beta times the odds ratio, no reference
}[LOSS]
args = getattr(hf_rlx, f"{NAME}Config")(
    str(OUTPUT / LOSS),
    per_device_train_batch_size=8,  # pairs
    max_length=256,  # tokens of a prompt and an answer
    learning_rate=5e-5 if ON_GPU else 5e-4,
    max_steps=STEPS,
    logging_steps=max(1, STEPS // 12),
    eval_strategy="steps",
    eval_steps=max(1, STEPS // 6),
    eval_on_start=True,
    save_steps=max(1, STEPS // 3),
    save_total_limit=2,
    hub_model_id=PUSH_TO or None,
    disable_tqdm=True,  # no bars: a line a log is printed
    report_to="none",
    **FIELDS,
    **(T4 if ON_GPU else {}),
)
device = "cuda" if ON_GPU else "cpu"
memory = estimate(MODEL, LOSS, args, lora, four_bit=ON_GPU, prompt_tokens=64, device=device)
print(f"{memory.what}: {memory.total / GIB:.2f} GiB at the peak; fits: {memory.fits()}")
if not memory.fits():
    print("to take less:", *memory.advice, sep="\n  ")

# %% [markdown]
# ## Train
#
# The implicit reward of an answer is what the loss looks at: for DPO `beta` times how much likelier it has become.
# `accuracy` is the share of pairs whose chosen answer has the higher one.


# %%
def resumes(folder):
    """Whether an earlier session left a checkpoint to go on from."""
    steps = [int(path.name.partition("-")[2]) for path in Path(folder).glob("checkpoint-*")]
    print(f"going on after step {max(steps)}" if steps else "starting")
    return bool(steps)


torch.manual_seed(0)  # of the adapter's first values
model = SharedModel.from_pretrained(MODEL, peft_config=lora, quantization_config=four_bit, **attention)
trainer = getattr(hf_rlx, f"{NAME}Trainer")(model, args=args, train_dataset=train, eval_dataset=held_out)
print("adapters in", {str(weight.dtype) for _, weight in model.trainable_parameters()})
before = trainer.examine_all(held_out)  # the adapter is fresh and changes nothing yet
trainer.train(resume_from_checkpoint=resumes(args.output_dir))
trainer.save_model(args.output_dir)

# %% [markdown]
# ## Chosen and rejected answers, before and after
#
# The loss looks at the difference only. When it grows because *both* answers become less likely, probability goes to
# answers that nobody chose: lower the learning rate, raise `beta`, set `rpo_alpha=1.0` (DPO), or take ORPO.

# %%
after = trainer.examine_all(held_out)
table = DataFrame(
    {
        f"{side}, {when}": [sum(pair[f"logps/{side}"] for pair in row) / len(row) for row in found if row]
        for side in ("chosen", "rejected")
        for when, found in (("before", before), ("after", after))
    }
)
print("log-probs of held-out answers, nats")
display(table.describe().loc[["mean", "min", "max"]].round(2))

figure, (curves, margins) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
logs = {log["step"]: log for log in trainer.state.log_history if "eval_logps/chosen" in log}
for side, colour in (("chosen", "#2f8f5b"), ("rejected", "#b6423b")):
    curves.plot(list(logs), [log[f"eval_logps/{side}"] for log in logs.values()], "o-", color=colour, label=side)
curves.set(title="log-probs of held-out answers (nats)", xlabel="step")
for when, colour in (("before", "#5f6b76"), ("after", "#3b6fb6")):
    margins.hist(table[f"chosen, {when}"] - table[f"rejected, {when}"], bins=25, color=colour, alpha=0.6, label=when)
margins.axvline(0.0, color="black", linewidth=0.8)
margins.set(title="chosen minus rejected (nats)", ylabel="held-out pairs")
for axes in (curves, margins):
    axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Look, save, push
#
# The folder has the adapter, a model card and its plot.

# %%
display(Image(f"{args.output_dir}/training.png", width=900))

# %%
if PUSH_TO:
    print(trainer.push_to_hub())
