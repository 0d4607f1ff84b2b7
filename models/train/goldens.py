"""Reference logits for the engine's tests: tiny random models of every family, run by transformers.

    python goldens.py OUT           writes OUT/<name>/ for each case below, the same bytes for the same versions

Each folder is what a user would bring: config.json as transformers writes it (or in an older spelling), weights in
model.safetensors (or in shards). Beside them lie golden.json, the input token ids, and golden.safetensors, the logits
[tokens, vocabulary] in float32, computed in float32 from the very weights on disk with eager attention.

The shapes are small and odd on purpose: a vocabulary and an inner width that are no multiple of any vector length,
weights large enough that attention is far from uniform and the logits spread over several units.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, VOCABULARY = 48, 98

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # So short that of the eight frequencies some stay, some are blended and some are stretched.
    "original_max_position_embeddings": 64,
}

# name -> (model_type, what differs from SHAPE, dtype on disk, "shards" | "older spelling" | None)
CASES = {
    "llama-bf16": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, torch.bfloat16, None),
    "llama3-f32": ("llama", {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE}, torch.float32, "shards"),
    "llama3-bf16": ("llama", {"rms_norm_eps": 1e-5, "rope_parameters": LLAMA3_ROPE}, torch.bfloat16, "older spelling"),
    "mistral-bf16": ("mistral", {"num_hidden_layers": 3, "num_key_value_heads": 1, "sliding_window": None, "rms_norm_eps": 1e-5}, torch.bfloat16, "older spelling"),
    "qwen2-bf16": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.bfloat16, None),
    "qwen3-f32": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.float32, None),
    "qwen3-bf16": ("qwen3", {"head_dim": 24, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, torch.bfloat16, "shards"),
}


def write_case(folder, number, model_type, differences, dtype, variant):
    config = AutoConfig.for_model(model_type, **{**SHAPE, "tie_word_embeddings": False, **differences})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1000 + number)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(weights_for(name, value.shape, generator))
    model = model.to(dtype)

    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="60KB" if variant == "shards" else "1GB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if variant == "older spelling":
        respell(folder / "config.json")

    # Loaded again from what was written, so that the logits belong to the files and not to our memory.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0]
    assert logits.dtype == torch.float32 and 1.0 < logits.std() < 10.0, (folder.name, logits.std())
    save_file({"logits": logits.contiguous()}, str(folder / "golden.safetensors"))
    golden = {"tokens": tokens.tolist(), "transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "golden.json").write_text(json.dumps(golden) + "\n", encoding="ascii")
    return logits


def weights_for(name, shape, generator):
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name:
        return 0.4 * noise
    scale = 1.6 if "q_proj" in name or "k_proj" in name else 3.0 if "lm_head" in name else 1.0
    return scale * noise / shape[-1] ** 0.5


def respell(path):
    """Rewrites a config as transformers 4 wrote it: torch_dtype, rope_theta and rope_scaling; no head_dim."""
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config.pop("head_dim", None)
    config["transformers_version"] = "4.46.0"
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def main():
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        logits = write_case(out / name, number, *case)
        size = sum(file.stat().st_size for file in (out / name).iterdir())
        print(f"{name:14} {size:7} bytes, logits spread {logits.std():.2f}, most likely {logits.argmax(-1)[:6].tolist()}")


if __name__ == "__main__":
    main()
