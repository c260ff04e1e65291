"""DPO in one file: no Trainer, one loop, the bundled model, under a minute on a CPU.

    python examples/loops/dpo.py

The algorithm (Rafailov et al. 2023, 2305.18290, eq. 7). For each prompt there is a chosen and a rejected answer. The
reward that a policy implies is beta (log p - log p_ref) of an answer; fit it to the preferences as a reward model
would be (Bradley and Terry):

    h = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))
    loss = -log sigmoid(beta h)

No sampling, no reward model, no critic: a classification of pairs, whose optimum is the policy that RL with that
reward and a KL of weight beta would reach.

How this departs from the paper:
- the pairs are made: the right sum is chosen, a wrong one that the model might write is rejected;
- the reference costs no second model: it is the same weights with the LoRA adapter off;
- the prompt is computed once for both answers: `SharedModel` lays them out as a tree.
"""

from __future__ import annotations

import argparse
import random

import torch
from peft import LoraConfig

from hf_rlx import Generator, Group, SamplingParams, SharedModel, load_tokenizer
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.functional import dpo_sigmoid, sequence_logprobs
from hf_rlx.verifiers import NumberVerifier

PAIRS = 32  # a step
BETA, LEARNING_RATE, MAX_TOKENS = 0.1, 5e-4, 8


def main(steps: int, seed: int) -> tuple[float, float]:
    """Train, print loss, margin and the log-probs behind it; return the held-out accuracy before and after."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = load_tokenizer("tiny")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = SharedModel.from_pretrained("tiny", peft_config=lora)
    model.prepare_reference()  # before the optimizer: it may add a frozen adapter
    optimizer = torch.optim.AdamW([p for _, p in model.trainable_parameters()], lr=LEARNING_RATE)
    generator = Generator(model, tokenizer)
    task = arithmetic_task(n_train=PAIRS * steps, seed=seed)
    is_right = NumberVerifier("whole")

    def evaluate():
        """Share of right answers to held-out problems, one sampled answer each."""
        prompts = [tokenizer(p)["input_ids"] for p in task.test["prompt"]]
        completions = generator.generate(prompts, 1, SamplingParams(MAX_TOKENS, seed=seed))
        columns = {name: task.test[name] for name in task.test.column_names if name != "prompt"}
        rewards = is_right(prompts=None, completions=[c.text for (c,) in completions], **columns)
        return sum(rewards) / len(rewards)

    def ids(answer):
        """An answer's tokens, and the token that ends it: without it the model would not learn to stop."""
        return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def log_probs(groups):
        """(pairs,) summed log-probs of the chosen and of the rejected answers."""
        scores = model(groups)  # rows in group order: chosen, rejected, chosen, rejected, ...
        return sequence_logprobs(scores.per_token_logps, scores.mask).sum.reshape(-1, 2).unbind(1)

    before = float(evaluate())
    print(f"held-out accuracy before: {before:.3f}")
    for step in range(steps):
        # 1. Pairs: one group of two answers a prompt.
        groups = []
        for row in task.train.select(range(step * PAIRS, (step + 1) * PAIRS)):
            wrong = str(int(row["answer"]) + rng.choice([-10, -2, -1, 1, 2, 10]))
            groups.append(Group.from_lists(tokenizer(row["prompt"])["input_ids"], [ids(row["answer"]), ids(wrong)]))

        # 2. The reference's log-probs: constants.
        with torch.no_grad(), model.as_role("reference"):
            ref_chosen, ref_rejected = log_probs(groups)

        # 3. The loss. Forward and backward stay inside the role: PEFT's gradients need it.
        with model.as_role("policy"):
            chosen, rejected = log_probs(groups)
            out = dpo_sigmoid(chosen, rejected, ref_chosen, ref_rejected, beta=BETA)
            out.loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()

        if step % 5 == 0 or step == steps - 1:
            # The loss sees the margin only. Watch chosen: where it falls, both answers are becoming rarer.
            print(
                f"step {step:3d}  loss {out.loss:.4f}  accuracy {out.accuracy:.3f}  margin {out.mean_margin:+.3f}  "
                f"change of log-prob: chosen {(chosen - ref_chosen).mean():+.3f}  "
                f"rejected {(rejected - ref_rejected).mean():+.3f}"
            )
    after = float(evaluate())
    print(f"held-out accuracy after: {after:.3f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)
