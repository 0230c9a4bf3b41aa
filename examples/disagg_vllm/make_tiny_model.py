"""Make a tiny random language model and a byte-level tokenizer, without any download: enough for a real engine on a CPU.

    python make_tiny_model.py DIRECTORY [--kind llama|qwen3|hybrid|mla|mamba] [--layers 4] [--seed 0]

`hybrid` alternates sliding-window and full attention, so that vLLM keeps two KV groups; `mla` has multi-head latent attention (with the
sizes of DeepSeek-V2's, which vLLM's kernels want), and `mamba` layers with a state (short convolutions) beside attention. Weights are
spread wider than a trained model's, which keeps greedy outputs from falling into one repeated token. Same seed, same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant: "


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token an octet, plus the special ones: any text can be encoded, and a prompt's length is easy to choose."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make(directory: Path, kind: str = "llama", layers: int = 4, seed: int = 0) -> None:
    """Write model and tokenizer to `directory` (about 1.5 MB)."""
    tokenizer = byte_tokenizer()
    shape = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    torch.manual_seed(seed)
    model = _model(kind, layers, shape)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _model(kind: str, layers: int, shape: dict[str, Any]) -> Any:
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(head_dim=32, **shape))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=32, **shape))
    if kind == "hybrid":
        attention = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
        return transformers.Olmo3ForCausalLM(transformers.Olmo3Config(sliding_window=128, layer_types=attention, **shape))
    if kind == "mla":
        latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": None}
        dense = {"first_k_dense_replace": layers, "n_routed_experts": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
        return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**(shape | {"num_key_value_heads": 4}), **latent, **dense))
    kinds = ["conv" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(layer_types=kinds, conv_dim=shape["hidden_size"], block_dim=shape["hidden_size"], **shape)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=["llama", "qwen3", "hybrid", "mla", "mamba"], default="llama")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    make(chosen.directory, chosen.kind, chosen.layers, chosen.seed)
    print(f"{chosen.kind} model in {chosen.directory}")


if __name__ == "__main__":
    main()
