"""The peer: decoding and prompts of the same shapes with the same kind of
noise for weights, by transformers on the same card. Prints one JSON document."""

import json
import sys
import time

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

SHAPES = {
    "qwen2.5-0.5b": dict(model_type="qwen2", vocab_size=151936, hidden_size=896,
                         intermediate_size=4864, num_hidden_layers=24,
                         num_attention_heads=14, num_key_value_heads=2,
                         tie_word_embeddings=True),
    "qwen2.5-7b": dict(model_type="qwen2", vocab_size=152064, hidden_size=3584,
                       intermediate_size=18944, num_hidden_layers=28,
                       num_attention_heads=28, num_key_value_heads=4,
                       tie_word_embeddings=False),
    "llama-3-8b": dict(model_type="llama", vocab_size=128256, hidden_size=4096,
                       intermediate_size=14336, num_hidden_layers=32,
                       num_attention_heads=32, num_key_value_heads=8,
                       tie_word_embeddings=False),
}
CONTEXT, PROMPT, TOKENS = 1024, 2048, 32


def timed(act):
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(shape, batches):
    config = AutoConfig.for_model(**shape, max_position_embeddings=8192)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    told = {"decode": []}
    for batch in batches:
        ids = torch.randint(0, shape["vocab_size"], (batch, CONTEXT), device="cuda")
        mask = torch.ones_like(ids)

        def generate(new):
            model.generate(ids, attention_mask=mask, do_sample=False,
                           min_new_tokens=new, max_new_tokens=new)

        generate(2)
        seconds = timed(lambda: generate(TOKENS + 1)) - timed(lambda: generate(1))
        told["decode"].append({"batch": batch, "tokens_per_second": batch * TOKENS / seconds})
    ids = torch.randint(0, shape["vocab_size"], (1, PROMPT), device="cuda")
    with torch.no_grad():
        model(ids)
        seconds = min(timed(lambda: model(ids, logits_to_keep=1)) for _ in range(3))
    told["prefill"] = {"tokens": PROMPT, "tokens_per_second": PROMPT / seconds}
    del model
    torch.cuda.empty_cache()
    return told


def main():
    quick = "--quick" in sys.argv
    names = ["qwen2.5-0.5b"] if quick else list(SHAPES)
    batches = [1] if quick else [1, 32, 128]
    with torch.no_grad():
        measured = {name: measure(SHAPES[name], batches) for name in names}
    print(json.dumps({"check": "peer", "torch": torch.__version__,
                      "transformers": transformers.__version__,
                      "device": torch.cuda.get_device_name(), "measured": measured}, indent=1))


main()
