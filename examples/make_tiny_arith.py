"""Make the bundled character model: `python examples/make_tiny_arith.py` (about seven minutes on two cores).

A Llama of 0.9 M parameters that knows addition and subtraction up to two digits, yet samples the right answer only
about half of the time. Two stages of supervised training on `17+25=` -> `42<eos>`:

1. clean answers, until the model computes rather than guesses;
2. a share of the answers replaced by a plausible slip (off by one, off by ten), drawn anew every time. The model
   learns to spread probability over the slips, while the right answer stays the most likely one.

So a group of eight samples nearly always holds both right and wrong answers, which is what GRPO learns from, and
reinforcement learning can lift the sampled accuracy a lot within a minute on a CPU.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_rlx.assets
from hf_rlx.data.tasks import arithmetic_problems

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t"]

# Renders a conversation to the same text as the plain form: `<bos>17+25=` and then the assistant's `42<eos>`.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character: a byte-pair encoding without merges, whose decoder joins without spaces."""
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama in fp32: on a CPU, bf16 weights would train badly and save only 1.7 MB."""
    ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def slip(answer: str, rng: random.Random) -> str:
    """A plausible wrong answer: off by one or by ten, never negative."""
    value = int(answer)
    return str(rng.choice([value + d for d in (-10, -1, 1, 10) if value + d >= 0]))


def make_batch(
    problems: list[tuple[str, str]], noise: float, rng: random.Random, tokenizer: PreTrainedTokenizerFast
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both `[rows, tokens]`, padded on the right; labels are -100 outside answer and `<eos>`."""
    given = [slip(answer, rng) if rng.random() < noise else answer for _, answer in problems]
    prompt_ids = tokenizer([prompt for prompt, _ in problems]).input_ids
    answer_ids = tokenizer(given, add_special_tokens=False).input_ids
    rows, labels = [], []
    for before, after in zip(prompt_ids, answer_ids, strict=True):
        after = [*after, tokenizer.eos_token_id]
        rows.append(torch.tensor(before + after))
        labels.append(torch.tensor([-100] * len(before) + after))
    pad = torch.nn.utils.rnn.pad_sequence
    return (
        pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad(labels, batch_first=True, padding_value=-100),
    )


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    clean_steps: int,
    noisy_steps: int,
    noise: float,
    batch_size: int,
    learning_rate: float,
    rng: random.Random,
) -> None:
    """Both stages under one learning-rate schedule (linear warm-up, then a half cosine down to zero)."""
    problems = list(arithmetic_problems(held_out=False))
    total = clean_steps + noisy_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 100, 0.5 * (1 + math.cos(math.pi * s / total)))
    )
    model.train()
    start = time.perf_counter()
    for step in range(total):
        ids, labels = make_batch(
            rng.sample(problems, batch_size), noise if step >= clean_steps else 0.0, rng, tokenizer
        )
        # Right padding under causal attention: no real token sees a pad, so no attention mask is needed.
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 200 == 0:
            scores = accuracy(model, tokenizer, limit=256, samples=1)
            print(
                f"step {step + 1:5d}  loss {loss.item():.3f}  held-out greedy {scores['greedy']:.3f} "
                f"sampled {scores['sampled']:.3f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    model.eval()


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, limit: int | None = None, samples: int = 8
) -> dict[str, float]:
    """Held-out accuracy: greedy, sampled at temperature 1, and the share of groups that are mixed.

    Args:
        limit: problems to score; None for all.
        samples: completions a problem for the sampled accuracy and for `mixed_groups`.
    """
    was_training = model.training
    model.eval()
    problems = list(arithmetic_problems(held_out=True))
    if limit is not None:
        problems = random.Random(1).sample(problems, limit)
    prompts, answers = zip(*problems, strict=True)
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)

    def hits(**how) -> torch.Tensor:  # [problems], 1.0 where the completion is exactly the answer
        out = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=8, **how)
        texts = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        return torch.tensor([float(t == a) for t, a in zip(texts, answers, strict=True)])

    greedy = hits(do_sample=False).mean().item()
    sampled = torch.stack([hits(do_sample=True, temperature=1.0, top_k=0, top_p=1.0) for _ in range(samples)])
    right = sampled.sum(dim=0)
    model.train(was_training)
    return {
        "problems": float(len(problems)),
        "greedy": greedy,
        "sampled": sampled.mean().item(),
        "mixed_groups": ((right > 0) & (right < samples)).float().mean().item(),
    }


def write_record(folder: Path, options: argparse.Namespace, facts: dict[str, float], seconds: float) -> None:
    """`README.md` beside the weights: how the model was made and what it scores."""
    problems = int(facts["problems"])
    (folder / "README.md").write_text(
        f"""# tiny_arith

A character-level Llama of {int(facts["parameters"]):,} parameters (fp32) that adds and subtracts numbers up to 99.
It is the model of `hf-rlx demo` and of the tests; it is good for nothing else.

Prompt `17+25=`, right completion `42` and then `<eos>`. The tokenizer has one token per printable ASCII character,
and puts `<bos>` in front.

Made with

```bash
python examples/make_tiny_arith.py --seed {options.seed} --threads {options.threads} \\
  --clean-steps {options.clean_steps} --noisy-steps {options.noisy_steps} --noise {options.noise} \\
  --batch-size {options.batch_size} --learning-rate {options.learning_rate}
```

in {seconds:.0f} seconds (torch {torch.__version__}), from random weights and generated problems only. The second stage
trains on answers of which {options.noise:.0%} carry a slip (off by one or by ten), so the model knows the answer but
samples it about half of the time: a start that reinforcement learning improves visibly.

| held-out problems | greedy | sampled, temperature 1 | groups of 8 with right and wrong answers |
|---|---|---|---|
| {problems:,} | {facts["greedy"]:.3f} | {facts["sampled"]:.3f} | {facts["mixed_groups"]:.3f} |

Weights and record: Apache-2.0, like the package.
""",
        encoding="utf-8",
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the bundled character model of hf_rlx.")
    default = Path(hf_rlx.assets.__file__).parent / "tiny_arith"
    parser.add_argument("--output-dir", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-steps", type=int, default=1500)
    parser.add_argument("--noisy-steps", type=int, default=400)
    parser.add_argument("--noise", type=float, default=0.62, help="share of slips in the second stage")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(
        model,
        tokenizer,
        clean_steps=options.clean_steps,
        noisy_steps=options.noisy_steps,
        noise=options.noise,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        rng=random.Random(options.seed),
    )
    seconds = time.perf_counter() - start
    facts = accuracy(model, tokenizer) | {"parameters": float(sum(p.numel() for p in model.parameters()))}
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    (options.output_dir / "model.safetensors").chmod(0o644)  # written as private, but part of a wheel
    write_record(options.output_dir, options, facts, seconds)
    print(facts)


if __name__ == "__main__":
    main()
