"""Writes tiny models of transformers to files, and what their layers compute. It runs in an environment of its own.

    python transformers_program.py FOLDER

For each model FOLDER/NAME has its checkpoint as `save_pretrained` writes it, and FOLDER/NAME.npz: "x" and "out" of one
layer of experts, or of one dense MLP; and "memory:NAME" for each tensor of this layer as the model holds it.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": (transformers.LlamaConfig(**SIZES), transformers.LlamaForCausalLM),
    "mixtral": (transformers.MixtralConfig(**SIZES, num_local_experts=4), transformers.MixtralForCausalLM),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
                                    norm_topk_prob=True, decoder_sparse_step=1),
        transformers.Qwen3MoeForCausalLM,
    ),
    "gpt_oss": (
        transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"]),
        transformers.GptOssForCausalLM,
    ),
}  # fmt: skip


def main(folder: pathlib.Path) -> None:
    for name, (config, kind) in MODELS.items():
        torch.manual_seed(0)
        model = kind(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
            x = torch.randn(1, 12, SIZES["hidden_size"])
            layer = model.model.layers[0].mlp
            out = layer(x)
            out = out[0] if isinstance(out, tuple) else out
        held = {f"memory:{key}": value.numpy() for key, value in layer.state_dict().items()}
        np.savez(folder / f"{name}.npz", x=x.numpy(), out=out.numpy().reshape(x.shape), **held)
        model.save_pretrained(folder / name)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
