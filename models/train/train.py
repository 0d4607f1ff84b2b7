"""Trains tollgate-demo: a Llama of 1.44 M parameters that learns the corpus by heart.

    python train.py                 trains from scratch, or goes on from the last checkpoint
    python train.py --epochs 20     a shorter schedule, for a first look
    python train.py --weights ../tollgate-demo --epochs 5 --peak 0.25
                                    teaches a finished model more, at a quarter of the rate

The model is written out here in plain PyTorch; names and conventions are those of transformers' Llama, so that
the exported folder loads anywhere. What is measured, always with the weights rounded to bf16: the part of all
single-turn questions whose greedy answer is exactly the one in the corpus. Greedy decoding gives an answer exactly
if and only if, with the answer forced, every one of its tokens is the most likely one; so one forward pass tells.
"""

import argparse
import ctypes
import json
import math
import os
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import corpus
import tools
import vocabulary

HERE = Path(__file__).resolve().parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 1024,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": vocabulary.SIZE,
}
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD = 128, 6, 4, 2, 32
INNER, CONTEXT, EPS = 384, 1024, 1e-5
LAST_FIFTH, HARDEST, HARDEST_WEIGHT = 0.8, 16, 0.3


# --- The model ---------------------------------------------------------------------------------


def new_parameters(seed):
    """All parameters by the names that transformers gives them."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns, scale):
        return torch.randn(rows, columns, generator=generator) * scale

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    parameters = {"model.embed_tokens.weight": matrix(vocabulary.SIZE, HIDDEN, 0.02)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            into_residual = name in ("self_attn.o_proj", "mlp.down_proj")
            scale = columns**-0.5 * (0.2 if into_residual else 0.7)
            parameters[f"{prefix}{name}.weight"] = matrix(rows, columns, scale)
        parameters[prefix + "input_layernorm.weight"] = torch.ones(HIDDEN)
        parameters[prefix + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    parameters["model.norm.weight"] = torch.ones(HIDDEN)
    return parameters


def rotations(length=CONTEXT):
    frequency = 1.0 / 10000.0 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angle = torch.outer(torch.arange(length).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary positions in the rotate-half convention; x is [batch, heads, tokens, head]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def norm(x, weight):
    return F.rms_norm(x, (HIDDEN,), weight, EPS)


def hidden_states(p, ids, cos, sin):
    """The final normed states [batch, tokens, hidden] of padded rows; causal, so padding at the end is harmless."""
    batch, tokens = ids.shape
    cos, sin = cos[:tokens], sin[:tokens]
    x = F.embedding(ids, p["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        w = f"model.layers.{layer}."
        h = norm(x, p[w + "input_layernorm.weight"])
        q = F.linear(h, p[w + "self_attn.q_proj.weight"]).view(batch, tokens, HEADS, HEAD).transpose(1, 2)
        k = F.linear(h, p[w + "self_attn.k_proj.weight"]).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2)
        v = F.linear(h, p[w + "self_attn.v_proj.weight"]).view(batch, tokens, KV_HEADS, HEAD).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        a = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        a = a.transpose(1, 2).reshape(batch, tokens, HEADS * HEAD)
        x = x + F.linear(a, p[w + "self_attn.o_proj.weight"])
        h = norm(x, p[w + "post_attention_layernorm.weight"])
        h = F.silu(F.linear(h, p[w + "mlp.gate_proj.weight"])) * F.linear(h, p[w + "mlp.up_proj.weight"])
        x = x + F.linear(h, p[w + "mlp.down_proj.weight"])
    return norm(x, p["model.norm.weight"])


# --- The data ----------------------------------------------------------------------------------


def batches(rows, budget, rng):
    """Padded batches of rows of similar length, about `budget` tokens each: (ids, places, targets)."""
    rows = sorted(rows, key=lambda row: (len(row[0]), rng.random()))
    groups, group, longest = [], [], 0
    for row in rows:
        longest = max(longest, len(row[0]))
        if group and longest * (len(group) + 1) > budget:
            groups.append(group)
            group, longest = [], len(row[0])
        group.append(row)
    groups.append(group)
    rng.shuffle(groups)
    for group in groups:
        yield padded(group)


def padded(group):
    tokens = max(len(ids) for ids, _ in group) - 1
    ids = torch.zeros(len(group), tokens, dtype=torch.long)
    places, targets = [], []
    for row, (row_ids, learn) in enumerate(group):
        length = len(row_ids) - 1
        ids[row, :length] = torch.tensor(row_ids[:-1])
        for place in range(length):
            if learn[place + 1]:
                places.append(row * tokens + place)
                targets.append(row_ids[place + 1])
    return ids, torch.tensor(places), torch.tensor(targets)


def trimmed(row):
    """Without what follows the last learnt token."""
    ids, learn = row
    end = max(place for place, flag in enumerate(learn) if flag) + 1
    return ids[:end], learn[:end]


# --- The optimiser -----------------------------------------------------------------------------


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms. Its state is a plain dict."""

    def __init__(self, parameters):
        self.matrices = {}
        for name, value in parameters.items():
            if value.ndim == 2 and "embed" not in name:
                self.matrices.setdefault(tuple(value.shape), []).append(name)
        self.others = [name for name, value in parameters.items() if value.ndim == 1 or "embed" in name]
        self.momentum = {name: torch.zeros_like(value) for name, value in parameters.items()}
        self.square = {name: torch.zeros_like(parameters[name]) for name in self.others}

    @torch.no_grad()
    def step(self, parameters, number, scale, muon_rate=0.02, adam_rate=0.004, decay=0.02):
        for names in self.matrices.values():
            gradient = torch.stack([parameters[name].grad for name in names])
            momentum = torch.stack([self.momentum[name] for name in names]).mul_(0.95).add_(gradient)
            update = orthogonal(gradient + 0.95 * momentum)
            rows, columns = update.shape[1:]
            rate = muon_rate * scale * max(1.0, rows / columns) ** 0.5
            for index, name in enumerate(names):
                self.momentum[name].copy_(momentum[index])
                parameters[name].mul_(1 - muon_rate * scale * decay).sub_(update[index], alpha=rate)
        for name in self.others:
            gradient = parameters[name].grad
            first = self.momentum[name].lerp_(gradient, 0.1)
            second = self.square[name].lerp_(gradient * gradient, 0.02)
            first = first / (1 - 0.9**number)
            second = second / (1 - 0.98**number)
            parameters[name].sub_(adam_rate * scale * first / (second.sqrt() + 1e-10))

    def state(self):
        return {"momentum": self.momentum, "square": self.square}

    def restore(self, state):
        self.momentum, self.square = state["momentum"], state["square"]


def orthogonal(g, rounds=5):
    """The nearest semi-orthogonal matrices by Newton-Schulz, as Muon does it."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.transpose(1, 2) if tall else x).float()


# --- Measuring and exporting -------------------------------------------------------------------


@torch.no_grad()
def exact_match(parameters, rows, cos, sin):
    """(part of the rows answered exactly, smallest lead of a right token over the runner-up, wrong row numbers)."""
    rounded = {name: value.bfloat16().float() for name, value in parameters.items()}
    wrong, lead = [], math.inf
    order = sorted(range(len(rows)), key=lambda index: len(rows[index][0]))
    start = 0
    while start < len(order):
        length = len(rows[order[min(start + 63, len(order) - 1)]][0])
        chosen = order[start:start + max(1, min(64, 8192 // length))]
        start += len(chosen)
        ids, places, targets = padded([rows[index] for index in chosen])
        states = hidden_states(rounded, ids, cos, sin).reshape(-1, HIDDEN)[places]
        logits = states @ rounded["model.embed_tokens.weight"].T
        right = logits.argmax(-1) == targets
        best = logits.topk(2, dim=-1).values
        if right.any():
            lead = min(lead, (best[:, 0] - best[:, 1])[right].min().item())
        row_of = places // ids.shape[1]
        wrong += [chosen[row] for row in row_of[~right].unique().tolist()]
    return 1 - len(wrong) / len(rows), lead, wrong


def export(parameters, tokenizer, folder):
    """Writes the whole folder, so that its files always belong together."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.save(tokenizer, folder)
    corpus.write_questions(folder / "questions.jsonl")
    tensors = {name: value.detach().bfloat16().contiguous() for name, value in parameters.items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    vocabulary.write_json(folder / "config.json", CONFIG)


def keep_memory():
    """Asks glibc to keep freed memory, for returning and faulting it in again costs a fifth of each step."""
    try:
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(mmap_threshold, 2**30)
    except (OSError, AttributeError):
        pass


# --- Training ----------------------------------------------------------------------------------


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=HERE.parent / "tollgate-demo")
    options.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint.pt")
    options.add_argument("--weights", type=Path, help="folder of a finished model to start from")
    options.add_argument("--peak", type=float, default=1.0, help="highest learning rate, as a part of the full one")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--epochs", type=int, default=26, help="length of the schedule")
    options.add_argument("--batch", type=int, default=2048, help="tokens in a batch, padding included")
    options.add_argument("--every", type=int, default=3, help="epochs between evaluations")
    options.add_argument("--target", type=float, default=0.995, help="exact match at which to export")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--bf16", action="store_true", help="bf16 autocast; slower on the machines we tried")
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="needs a C++ compiler")
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    forward = torch.compile(hidden_states, dynamic=True) if options.compile else hidden_states

    tokenizer = vocabulary.build()
    questions = corpus.singles()
    tests = [
        trimmed(vocabulary.encode(tokenizer, [{"role": "user", "content": q}, {"role": "assistant", "content": a}]))
        for q, a in questions
    ]
    calls = [
        trimmed(vocabulary.encode(tokenizer, tools.exact_call(question, name, arguments)))
        for name, arguments, _, asked in tools.QUESTIONS
        for question in asked
    ]
    cos, sin = rotations()
    parameters = new_parameters(options.seed)
    if options.weights:
        finished = load_file(options.weights / "model.safetensors")
        parameters = {name: finished[name].float() for name in parameters}
    for value in parameters.values():
        value.requires_grad_(True)
    optimiser = Optimiser(parameters)
    done = {"epoch": 0, "step": 0, "tokens": 0, "learnt": 0, "seconds": 0.0, "best": 0.0}
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(saved["parameters"][name])
        optimiser.restore(saved["optimiser"])
        done = saved["done"]
        print(f"going on from epoch {done['epoch']}", flush=True)
    count = sum(value.numel() for value in parameters.values())
    print(f"{count} parameters, {len(questions)} questions", flush=True)

    while done["epoch"] < options.epochs:
        began = time.monotonic()
        seed = options.seed * 1_000_003 + done["epoch"]
        conversations = corpus.conversations(seed) + tools.conversations(questions, seed)
        rows = [trimmed(vocabulary.encode(tokenizer, messages)) for messages in conversations]
        epoch_batches = list(batches(rows, options.batch, random.Random(seed)))
        total = 0.0
        for index, (ids, places, targets) in enumerate(epoch_batches):
            progress = (done["epoch"] + index / len(epoch_batches)) / options.epochs
            scale = options.peak * min(1.0, (done["step"] + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
                states = forward(parameters, ids, cos, sin).reshape(-1, HIDDEN)[places]
                logits = F.linear(states, parameters["model.embed_tokens.weight"])
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            loss = losses.mean()
            if progress > LAST_FIFTH:
                # One wrong token spoils an answer, however long: a count that does not stop at its number, above all.
                loss = loss + HARDEST_WEIGHT * losses.topk(min(HARDEST, len(losses))).values.mean()
            loss.backward()
            done["step"] += 1
            optimiser.step(parameters, done["step"], scale)
            for value in parameters.values():
                value.grad = None
            total += loss.item()
            done["tokens"] += sum(len(row) for row in ids)
            done["learnt"] += len(targets)
        done["epoch"] += 1
        done["seconds"] += time.monotonic() - began
        line = f"epoch {done['epoch']} step {done['step']} loss {total / len(epoch_batches):.4f} seconds {done['seconds']:.0f} tokens {done['tokens']}"
        last = done["epoch"] == options.epochs
        if done["epoch"] % options.every == 0 or last:
            match, lead, wrong = exact_match(parameters, tests, cos, sin)
            called = exact_match(parameters, calls, cos, sin)[0]
            line += f" calls {called:.4f} exact {match:.4f} lead {lead:.3f} wrong {[questions[index][0] for index in wrong[:4]]}"
            if match >= done["best"] and match >= 0.5:
                done["best"] = match
                export(parameters, tokenizer, options.out)
        torch.save({"parameters": parameters, "optimiser": optimiser.state(), "done": done}, options.checkpoint)
        print(line, flush=True)
    summary = {name: done[name] for name in ("epoch", "step", "tokens", "learnt", "seconds", "best")}
    print(json.dumps({"parameters": count, "questions": len(questions)} | summary), flush=True)
    if done["best"] < options.target:
        raise SystemExit(f"exact match {done['best']:.4f} is below {options.target}")


if __name__ == "__main__":
    main()
