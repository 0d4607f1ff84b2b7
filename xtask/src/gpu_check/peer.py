"""The peer: decoding and prompts of the same shapes with the same kind of
noise for weights, by transformers on the same card: peer.py FILE [--quick].
What was measured is written as it comes."""

import json
import sys
import time

try:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as missing:
    print(missing, file=sys.stderr)
    sys.exit(77)  # as run.sh means it

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


def measure(shape, batches, told, keep):
    config = AutoConfig.for_model(**shape, max_position_embeddings=8192)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    told["decode"] = []
    warm = False
    for batch in batches:
        ids = torch.randint(0, shape["vocab_size"], (batch, CONTEXT), device="cuda")
        mask = torch.ones_like(ids)

        def generate(new):
            model.generate(ids, attention_mask=mask, do_sample=False,
                           min_new_tokens=new, max_new_tokens=new)

        if not warm:
            generate(2)
            warm = True
        first = timed(lambda: generate(1))
        seconds = timed(lambda: generate(TOKENS + 1)) - first
        told["decode"].append({"batch": batch, "tokens_per_second": batch * TOKENS / seconds})
        keep()
    ids = torch.randint(0, shape["vocab_size"], (1, PROMPT), device="cuda")
    with torch.no_grad():
        model(ids)
        seconds = min(timed(lambda: model(ids, logits_to_keep=1)) for _ in range(3))
    told["prefill"] = {"tokens": PROMPT, "tokens_per_second": PROMPT / seconds}
    keep()
    del model
    torch.cuda.empty_cache()


def main():
    path, quick = sys.argv[1], "--quick" in sys.argv
    names = ["qwen2.5-0.5b"] if quick else list(SHAPES)
    batches = [1] if quick else [1, 32, 128]
    told = {"check": "peer", "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name(), "measured": {name: {} for name in names}}

    def keep():
        with open(path, "w", encoding="utf-8") as file:
            json.dump(told, file, indent=1)

    with torch.no_grad():
        for name in names:
            measure(SHAPES[name], batches, told["measured"][name], keep)


main()
