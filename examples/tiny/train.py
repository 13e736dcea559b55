# SPDX-License-Identifier: Apache-2.0
"""Train a tiny Qwen3 to add two three-digit numbers, and save an early and a late checkpoint of the run.

    python examples/tiny/train.py --out DIR
    python examples/tiny/train.py --out DIR --experts 8

`--experts` makes it a mixture of so many experts, two for each token. Runs on the CPU in minutes. DIR/early answers fewer
than half of the held-out problems, DIR/late almost all of them. Both are measured as saved, after `round_mantissa`: in BF16
and under simulated blockwise FP8.
"""

import argparse
import copy
import json
import time
import types
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from vllm_fp8ext.checkpoints import DIGITS, AdditionProblem, held_out, problems
from vllm_fp8ext.kernels.moe.experts import reference_experts

Model: TypeAlias = Qwen3ForCausalLM | Qwen3MoeForCausalLM

MANTISSA_BITS = 3
"""Explicit mantissa bits that saved matrices keep of BF16's seven: what lets both files fit a 5 MB wheel."""

SEED = 0
BATCH = 256
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
PROMPT_LOSS_WEIGHT = 0.1
ROUTER_LOSS_WEIGHT = 0.01
"""Of the loss that keeps experts equally busy."""
EARLY_RANGE = (0.15, 0.45)
LATE_MINIMUM = 0.98
FP8_MAX = 448.0
BLOCK = 128

SPECIAL = ["<pad>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+="
VOCABULARY_SIZE = 128
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT_LENGTH = 2 * DIGITS + 2


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the vocabulary is filled up with `<unusedN>`."""
    tokens = SPECIAL + list(CHARACTERS)
    tokens += [f"<unused{n}>" for n in range(VOCABULARY_SIZE - len(tokens))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(experts: int = 0) -> Model:
    """A Qwen3 of 2.1 million parameters whose projections are all multiples of 128 wide; or a Qwen3-MoE of as many."""
    eos, pad = SPECIAL.index("<eos>"), SPECIAL.index("<pad>")
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    model: Model
    if experts:
        chosen = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        width = {"num_hidden_layers": 2, "moe_intermediate_size": 128}
        balance = {"output_router_logits": True, "router_aux_loss_coef": ROUTER_LOSS_WEIGHT}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **chosen, **width, **balance))
        model.set_experts_implementation("eager")
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, num_hidden_layers=3))
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos, pad_token_id=pad)
    return model


def encode(items: list[AdditionProblem]) -> Tensor:
    """Token ids of whole problems, end-of-sequence included: one row each, all of one length."""
    first, eos = len(SPECIAL), SPECIAL.index("<eos>")
    return torch.tensor([[first + CHARACTERS.index(c) for c in p.prompt + p.answer] + [eos] for p in items])


def training_rows() -> Tensor:
    """Token ids of every problem that is not held out."""
    limit = 10**DIGITS
    items = [AdditionProblem(a, b) for a in range(limit) for b in range(limit) if not held_out(a, b)]
    return encode(items).to(torch.uint8)


def round_mantissa(weight: Tensor, bits: int = MANTISSA_BITS) -> Tensor:
    """`weight` in BF16, rounded to the nearest value that has `bits` explicit mantissa bits."""
    drop = 23 - bits
    raw = weight.float().view(torch.int32)
    return (((raw + (1 << (drop - 1))) >> drop) << drop).view(torch.float32).to(torch.bfloat16)


def checkpoint(model: Model) -> Model:
    """The BF16 copy of `model` that is saved: matrices rounded, norms (one row each) as they are."""
    saved = copy.deepcopy(model).to(torch.bfloat16).eval()
    with torch.no_grad():
        for target, source in zip(saved.parameters(), model.parameters(), strict=True):
            if source.ndim > 1:
                target.copy_(round_mantissa(source))
    return saved


def fp8_roundtrip(values: Tensor, rows: int) -> Tensor:
    """`values` through E4M3 with one scale, amax / 448, per block of `rows` x 128, and back."""
    blocks = values.float().reshape(-1, values.shape[-1])
    blocks = blocks.unflatten(0, (-1, rows)).unflatten(2, (-1, BLOCK))
    scale = (blocks.abs().amax(dim=(1, 3), keepdim=True) / FP8_MAX).clamp_min(1e-12)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).reshape(values.shape).to(values.dtype)


def experts_in_fp8(experts: Qwen3MoeExperts, activations: bool) -> None:
    """Give fused experts weights, and on request inputs, as FP8 gives them: gate, up and down have blocks of their own."""
    for matrix in (*experts.gate_up_proj.data, *experts.down_proj.data):
        matrix.copy_(fp8_roundtrip(matrix, BLOCK))  # 128 rows of gate, then 128 of up

    def forward(self: Qwen3MoeExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        values = self.gate_up_proj.data.float(), None, self.down_proj.data.float(), None
        out: Tensor = reference_experts(x, *values, weights, chosen, "silu", "fp32")
        return out

    if activations:
        experts.forward = types.MethodType(forward, experts)


def simulate_fp8(model: Model, activations: bool) -> Model:
    """A copy of `model` with every projection's weight, and on request its input, as FP8 gives it."""
    simulated = copy.deepcopy(model)
    for name, module in simulated.named_modules():
        if name.endswith("_proj") and isinstance(module, nn.Linear):
            module.weight.data = fp8_roundtrip(module.weight.data, BLOCK)
            if activations:
                module.register_forward_pre_hook(lambda _, args: (fp8_roundtrip(args[0], 1),))
        elif isinstance(module, Qwen3MoeExperts):
            experts_in_fp8(module, activations)
    return simulated


@torch.no_grad()
def predict(model: Model, rows: Tensor) -> Tensor:
    """Log probabilities of every token of `rows` but the first, given the true tokens before it."""
    logits = [model(part[:, :-1], use_cache=False).logits.float() for part in rows.split(500)]
    return torch.cat(logits).log_softmax(-1)


def accuracy(logp: Tensor, rows: Tensor) -> float:
    """Share of rows whose answer and end are all the likeliest tokens: what greedy decoding gets right."""
    right = logp.argmax(-1) == rows[:, 1:]
    return right[:, PROMPT_LENGTH - 1 :].all(-1).float().mean().item()


def perplexity(logp: Tensor, rows: Tensor) -> float:
    """Perplexity over prompt digits and answer alike."""
    return logp.gather(-1, rows[:, 1:, None]).mean().neg().exp().item()


def report(model: Model, rows: Tensor) -> dict[str, float]:
    """Held-out accuracy in BF16 and under simulated FP8, and how far FP8 strays from BF16."""
    base = predict(model, rows)
    result = {"accuracy": accuracy(base, rows), "perplexity": perplexity(base, rows)}
    for key, activations in (("w8", False), ("w8a8", True)):
        other = predict(simulate_fp8(model, activations), rows)
        result[f"{key}_accuracy"] = accuracy(other, rows)
        result[f"{key}_perplexity_ratio"] = perplexity(other, rows) / result["perplexity"]
        result[f"{key}_kl"] = F.kl_div(other, base, log_target=True, reduction="none").sum(-1).mean().item()
    return result


def save(model: Model, folder: Path) -> int:
    """Write `model` and its tokenizer as a Hugging Face folder; the size of its weights once deflated."""
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    settings = folder / "tokenizer_config.json"
    entries = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(entries, indent=2) + "\n")
    return len(zlib.compress(weights.read_bytes(), 9))


def train(steps: int, experts: int = 0) -> tuple[Model, Model]:
    """Train from scratch; the early and the late model as they are to be saved."""
    torch.manual_seed(SEED)
    model, data, rows = build_model(experts), training_rows(), encode(problems(400, seed=1))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / (steps - WARMUP_STEPS))
    )
    token_weight = torch.ones(data.shape[1] - 1)
    token_weight[: PROMPT_LENGTH - 1] = PROMPT_LOSS_WEIGHT
    token_weight /= token_weight.sum()
    low, high = EARLY_RANGE
    early, early_accuracy = checkpoint(model), 0.0
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = data[torch.randint(len(data), (BATCH,))].long()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[:, :-1], use_cache=False)
        losses = F.cross_entropy(out.logits.float().transpose(1, 2), batch[:, 1:], reduction="none")
        loss = (losses.mean(0) * token_weight).sum()
        if experts:
            loss = loss + ROUTER_LOSS_WEIGHT * out.aux_loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        searching = not low <= early_accuracy <= high
        if step % (20 if searching else 100) == 0 or step == steps:
            saved = checkpoint(model)
            now = accuracy(predict(saved, rows), rows)
            answer_loss = losses[:, PROMPT_LENGTH - 1 :].mean().item()
            seconds = time.monotonic() - start
            print(f"{step:5d} {seconds:5.0f} s  answer loss {answer_loss:.4f}  right {now:.1%}", flush=True)
            middle = (low + high) / 2
            if searching and now < 0.5 and abs(now - middle) < abs(early_accuracy - middle):
                early, early_accuracy = saved, now
    return early, checkpoint(model)


def main() -> None:
    """Train, save both checkpoints, and print what they measure."""
    parser = argparse.ArgumentParser(description="Train the tiny addition model on the CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for early/ and late/")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="of a mixture; 0: none")
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than {WARMUP_STEPS}")
    torch.set_num_threads(options.threads)
    rows, packed, measured = encode(problems(2000, seed=2)), 0, {}
    for name, model in zip(("early", "late"), train(options.steps, options.experts), strict=True):
        measured[name] = report(model, rows)
        packed += save(model, options.out / name)
        print(name, *(f"{key}={value:.5f}" for key, value in measured[name].items()))
    print(f"both weight files deflated: {packed / 1e6:.2f} MB")
    if not measured["early"]["accuracy"] < 0.5 or not measured["late"]["accuracy"] > LATE_MINIMUM:
        raise SystemExit("the checkpoints missed their accuracies: train longer, or change SEED")


if __name__ == "__main__":
    main()
