"""PPO in one file: no Trainer, one loop, the bundled model, about a minute on a CPU.

    python examples/loops/ppo.py

The algorithm (Schulman et al. 2017, 1707.06347; for language models Ziegler et al. 2019, 1909.08593). Sample, score,
and let a critic V say what was to be expected before each token; what came better than that is made more probable:

    r_t     = -beta (log pi_old - log pi_ref)_t, and the score on the last token
    delta_t = r_t + V_{t+1} - V_t,      A_t = delta_t + lam A_{t+1},      R_t = A_t + V_t
    policy  = -mean_t min(rho_t A_t, clip(rho_t, 1 - 0.2, 1 + 0.2) A_t)        A whitened, rho_t = pi / pi_old
    value   = 1/2 mean_t (V_t - R_t)^2

How this departs from the papers:
- the reward is exact (is the number right?) instead of a learned model's;
- policy, reference and critic are one model: the reference is the LoRA adapter off, the critic a linear head on the
  policy's own hidden states, which starts at 0 and sends no gradient into them;
- the value loss is not clipped.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig

from hf_rlx import Generator, Group, SamplingParams, SharedModel, load_tokenizer
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.functional import explained_variance, gae, masked_whiten, ppo_policy_loss, shaped_reward, value_loss
from hf_rlx.models import critic
from hf_rlx.verifiers import NumberVerifier

PROMPTS = 128  # a step; one completion each: the critic is the baseline, not a group
EPOCHS, MINIBATCHES = 2, 2
BETA, LAM, LEARNING_RATE, CRITIC_RATE, MAX_TOKENS = 0.04, 0.95, 1e-3, 1e-2, 8


def main(steps: int, seed: int) -> tuple[float, float]:
    """Train, print the share of right answers as it grows; return the held-out accuracy before and after."""
    torch.manual_seed(seed)
    tokenizer = load_tokenizer("tiny")
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = SharedModel.from_pretrained("tiny", peft_config=lora)
    model.prepare_reference()  # before the optimizer: it may add a frozen adapter
    critic.prepare(model)
    head = list(model.heads[critic.CRITIC].parameters())
    known = {id(p) for p in head}
    adapter = [p for _, p in model.trainable_parameters() if id(p) not in known]
    optimizer = torch.optim.AdamW([{"params": adapter, "lr": LEARNING_RATE}, {"params": head, "lr": CRITIC_RATE}])
    generator = Generator(model, tokenizer)
    task = arithmetic_task(n_train=PROMPTS * steps, seed=seed)
    is_right = NumberVerifier("whole")

    def sample(rows, sampling_seed):
        """Prompts, completions and (P,) rewards: 1 where the number is right, else 0."""
        prompts = [tokenizer(p)["input_ids"] for p in rows["prompt"]]
        completions = [c for (c,) in generator.generate(prompts, 1, SamplingParams(MAX_TOKENS, seed=sampling_seed))]
        columns = {name: rows[name] for name in rows.column_names if name != "prompt"}
        rewards = is_right(prompts=None, completions=[c.text for c in completions], **columns)
        return prompts, completions, torch.tensor(rewards)

    before = float(sample(task.test, seed)[2].mean())
    print(f"held-out accuracy before: {before:.3f}")
    for step in range(steps):
        # 1. Sample with the policy as it is, and score.
        rows = task.train.select(range(step * PROMPTS, (step + 1) * PROMPTS))
        prompts, completions, rewards = sample(rows, seed * 10_000 + step)
        groups = [Group.from_lists(p, [c.token_ids]) for p, c in zip(prompts, completions, strict=True)]

        # 2. What sampled them, what the reference thinks, what the critic expected: constants from here on.
        with torch.no_grad():
            with model.as_role("policy"):
                old = model(groups, want_values=True)  # all (B, T)
            with model.as_role("reference"):
                reference = model(groups).per_token_logps

        # 3. Token rewards, advantages, and what the critic should have said.
        shaped = shaped_reward(rewards, old.per_token_logps, reference, old.mask, beta=BETA)
        advantages, returns = gae(shaped.rewards, old.values, old.mask, lam=LAM)
        explained = explained_variance(old.values, returns, old.mask)
        advantages = masked_whiten(advantages, old.mask).whitened

        # 4. Epochs over minibatches. Forward and backward stay inside the role: PEFT's gradients need it.
        for _ in range(EPOCHS):
            for part in torch.randperm(PROMPTS).chunk(MINIBATCHES):
                with model.as_role("policy"):
                    new = model([groups[i] for i in part], want_values=True)
                    here = slice(None, new.mask.shape[1])  # a minibatch is as wide as its longest completion
                    policy = ppo_policy_loss(
                        new.per_token_logps, old.per_token_logps[part, here], advantages[part, here], new.mask
                    )
                    value = value_loss(new.values, None, returns[part, here], new.mask, clip_range=None)
                    (policy.loss + value.loss).backward()
                torch.nn.utils.clip_grad_norm_(adapter, 1.0)
                optimizer.step()
                optimizer.zero_grad()

        if step % 5 == 0 or step == steps - 1:
            print(
                f"step {step:3d}  right {rewards.mean():.3f}  kl {shaped.kl_sequence.mean():.4f}  "
                f"explained {explained:+.3f}  value loss {value.loss:.4f}  approx kl {policy.approx_kl:.4f}"
            )
    after = float(sample(task.test, seed)[2].mean())
    print(f"held-out accuracy after: {after:.3f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.steps, options.seed)
