"""GRPO in one file: no Trainer, one loop, the bundled model, under a minute on a CPU.

    python examples/loops/grpo.py

The algorithm (Shao et al. 2024, DeepSeekMath, 2402.03300, section 4.1). For each prompt sample K completions, score
them, and call a completion good or bad by comparison with its own group:

    A_k = (r_k - mean(r)) / (std(r) + 1e-6)

Then move the policy so that the good ones become more probable, but not far from the policy that sampled them, nor
from the reference. With rho_t = pi(token_t) / pi_old(token_t), the loss of a completion is the mean over its tokens of

    -min(rho_t A, clip(rho_t, 1 - 0.2, 1 + 0.2) A) + beta (pi_ref/pi - log(pi_ref/pi) - 1)

How this departs from the paper:
- the reward is exact (is the number right?) instead of a learned model's;
- a group whose completions are all right or all wrong says nothing and is left out, of the mean as well;
- the reference stays the starting model; the paper replaces it, and trains the reward model on, between iterations;
- the reference costs no second model: it is the same weights with the LoRA adapter off;
- each prompt is computed once for its K completions: `SharedModel` lays them out as a tree.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig

from hf_rlx import Generator, Group, SamplingParams, SharedModel, load_tokenizer
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.functional import grpo_advantages, grpo_loss
from hf_rlx.verifiers import NumberVerifier

PROMPTS, K = 16, 8  # prompts a step, completions a prompt
UPDATES = 2  # optimizer steps on each batch of samples: the first at rho = 1, then the clip has work to do
BETA, LEARNING_RATE, MAX_TOKENS = 0.04, 5e-4, 8


def main(steps: int, seed: int) -> tuple[float, float]:
    """Train, print the share of right answers as it grows; return the held-out accuracy before and after."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("tiny")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = SharedModel.from_pretrained("tiny", peft_config=lora)
    model.prepare_reference()  # before the optimizer: it may add a frozen adapter
    optimizer = torch.optim.AdamW([p for _, p in model.trainable_parameters()], lr=LEARNING_RATE)
    generator = Generator(model, tokenizer)
    task = arithmetic_task(n_train=PROMPTS * steps, seed=seed)
    is_right = NumberVerifier("whole")

    def score(rows, completions):
        """(P, K) rewards: 1 where the number is right, else 0."""
        k = len(completions[0])
        texts = [c.text for group in completions for c in group]
        columns = {name: [row[name] for row in rows for _ in range(k)] for name in rows.column_names}
        prompts = columns.pop("prompt")
        return torch.tensor(is_right(prompts=prompts, completions=texts, **columns)).reshape(-1, k)

    def evaluate():
        """Share of right answers to held-out problems, sampled as in training."""
        prompts = [tokenizer(p)["input_ids"] for p in task.test["prompt"]]
        return score(task.test, generator.generate(prompts, 1, SamplingParams(MAX_TOKENS, seed=seed))).mean()

    before = float(evaluate())
    print(f"held-out accuracy before: {before:.3f}")
    for step in range(steps):
        rows = task.train.select(range(step * PROMPTS, (step + 1) * PROMPTS))

        # 1. Sample K completions of every prompt, with the policy as it is.
        prompts = [tokenizer(p)["input_ids"] for p in rows["prompt"]]
        completions = generator.generate(prompts, K, SamplingParams(MAX_TOKENS, seed=seed * 10_000 + step))

        # 2. Score them, and compare each with its group.
        rewards = score(rows, completions)
        result = grpo_advantages(rewards)
        kept = [p for p in range(PROMPTS) if result.keep[p].any()]  # groups with right and wrong answers
        if not kept:
            continue
        groups = [Group.from_lists(prompts[p], [c.token_ids for c in completions[p]]) for p in kept]
        advantages = result.advantages[kept].flatten()  # (B,), B = groups x K

        # 3. Log-probs of the tokens under the policy that sampled, and under the reference: constants from here on.
        with torch.no_grad():
            with model.as_role("policy"):
                old = model(groups).per_token_logps  # (B, T)
            with model.as_role("reference"):
                reference = model(groups).per_token_logps

        # 4. A few steps on the same samples. Forward and backward stay inside the role: PEFT's gradients need it.
        for _ in range(UPDATES):
            with model.as_role("policy"):
                scores = model(groups, want_entropy=True)
                out = grpo_loss(scores.per_token_logps, old, advantages, scores.mask, ref_logps=reference, beta=BETA)
                out.loss.backward()
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.step()
            optimizer.zero_grad()

        if step % 5 == 0 or step == steps - 1:
            entropy = scores.entropies[scores.mask].mean()
            print(
                f"step {step:3d}  right {rewards.mean():.3f}  groups kept {len(kept)}/{PROMPTS}  "
                f"loss {out.loss:+.4f}  kl {out.kl_mean:.4f}  entropy {entropy:.3f}  "
                f"clipped {out.clip_low_fraction + out.clip_high_fraction:.3f}"
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
