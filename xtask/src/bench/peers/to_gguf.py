"""Writes a Qwen2 folder of bf16 safetensors as one GGUF file, bit for bit.

    to_gguf.py MODEL_DIR FILE.gguf

Matrices stay bf16; norms and biases become f32, as llama.cpp keeps them. The
file has no vocabulary: a benchmark feeds token ids.
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

PER_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def main(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen2":
        sys.exit(f"{folder}: only qwen2 is converted, this is {config['model_type']}")
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(str(unfinished), "qwen2")
    describe(writer, config)
    for name, shape, bits in tensors(folder / "model.safetensors"):
        if len(shape) == 1:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(renamed(name), wide)
        else:
            rows = bits.reshape(shape).view(np.uint8)
            writer.add_tensor(renamed(name), rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)


def describe(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def tensors(path: Path):
    """Name, shape and bf16 bits of each tensor, one in memory at a time."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        if tensor["dtype"] != "BF16":
            sys.exit(f"{path}: {name} is {tensor['dtype']}, not BF16")
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        yield name, tensor["shape"], data[begin:end].view(np.uint16)


def renamed(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{PER_LAYER[part]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
