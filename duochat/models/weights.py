"""Which GGUF files are unpacked for torch: those of which the very same function comes out; and how.

The other way, from a model of transformers' to a file: `duochat.distill.gguf_file`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from duochat import DuoChatError
from duochat.models.gguf import BLOCKS, Header, Tensor
from duochat.models.tokenizer import stops

if TYPE_CHECKING:
    import torch
    import transformers

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}  # qwen3's
AT_ONCE = 8  # tensors that are unpacked before they are copied: a whole model would lie in memory twice
HEAD = "output.weight"  # not there: the embedding serves
SHAPE = (  # entries that no model is without
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
ENTRIES = (
    *SHAPE,
    "attention.head_count_kv",
    "attention.key_length",
    "rope.freq_base",
    "rope.scaling.type",
    "vocab_size",
)


def config(header: Header) -> dict[str, Any]:
    """The transformers configuration of a llama, qwen2 or qwen3 GGUF."""
    _refuse_unfit(header)
    heads, width = header.get("attention.head_count"), header.get("embedding_length")
    return {
        "architectures": [CLASSES[header.architecture]],
        "model_type": header.architecture,
        "vocab_size": len(header.tokens),
        "hidden_size": width,
        "intermediate_size": header.get("feed_forward_length"),
        "num_hidden_layers": header.get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.get("attention.head_count_kv", heads),
        "head_dim": header.get("attention.key_length", width // heads),
        "attention_bias": header.architecture == "qwen2",
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.get("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)},
        "tie_word_embeddings": all(t.name != HEAD for t in header.tensors),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _refuse_unfit(header: Header) -> None:
    """Only what converts to the very same function is converted: with these entries and these tensors, no others."""
    remedy = f"as target, name the model's own folder (hf:owner/repo) instead of {header.path.name}"
    if header.architecture not in CLASSES:
        known = ", ".join(CLASSES)
        raise DuoChatError(f"A GGUF of architecture {header.architecture!r} is not converted (only {known}): {remedy}.")
    if absent := next((name for name in SHAPE if header.get(name) is None), None):
        raise DuoChatError(f"{header.path} does not say its {absent}: fetch or copy the model again.")
    needed, held = _needed(header), {t.name: t for t in header.tensors}
    if missing := next((name for name in needed if name not in held), None):
        raise DuoChatError(f"{header.path} lacks the tensor {missing}: fetch or copy the whole model again.")
    if "rope_freqs.weight" in held or header.get("rope.scaling.type", "none") != "none":
        raise DuoChatError(f"This GGUF scales its rotary positions, which is not converted: {remedy}.")
    strange = [t.name for t in header.tensors if t.name not in (*needed, HEAD) or t.type not in BLOCKS]
    if strange := [*strange, *_strange_entries(header)]:
        raise DuoChatError(f"This GGUF holds {strange[0]}, which is not converted: {remedy}.")


def _needed(header: Header) -> dict[str, None]:
    """The names of all tensors that the architecture has, HEAD apart."""
    family = header.architecture
    layer = [f"{part}.weight" for part in (*LAYER, *(NORMS if family == "qwen3" else ()))]
    layer += [f"attn_{part}.bias" for part in "qkv" if family == "qwen2"]
    layers = [f"blk.{n}.{part}" for n in range(header.get("block_count", 0)) for part in layer]
    return dict.fromkeys([f"{part}.weight" for part in MODEL if f"{part}.weight" != HEAD] + layers)


def _strange_entries(header: Header) -> list[str]:
    """Entries of the architecture that config() does not write and that may change what the model says."""
    about = {k.partition(".")[2]: v for k, v in header.metadata.items() if k.startswith(f"{header.architecture}.")}
    head = about.get("attention.key_length", about["embedding_length"] // about["attention.head_count"])
    same = {"attention.value_length": head, "rope.dimension_count": head, "expert_count": 0, "expert_used_count": 0}
    return [k for k, v in about.items() if (v != same[k] if k in same else k not in ENTRIES or isinstance(v, list))]


def loaded(
    header: Header, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> transformers.PreTrainedModel:
    """The model, for inference, what is quantised unpacked; in float32, which holds it exactly, unless said."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.no_grad(), ThreadPoolExecutor() as pool:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(header)))
        model = allocated(empty, device, dtype or torch.float32)
        for first in range(0, len(header.tensors), AT_ONCE):
            some = header.tensors[first : first + AT_ONCE]
            for tensor, unpacked in zip(some, pool.map(partial(_values, model.config), some), strict=True):
                model.get_parameter(inner(tensor.name)).copy_(unpacked)
    model.generation_config.eos_token_id = stops(header)
    return model


def allocated(
    empty: transformers.PreTrainedModel, device: torch.device | str, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A model of the meta device, for inference, with memory of its own for its weights, and frequencies in float32."""
    model = empty.to(dtype).to_empty(device=device)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model.eval().requires_grad_(False)


def _values(config: Any, tensor: Tensor) -> torch.Tensor:
    import torch
    from gguf import GGMLQuantizationType, quants

    values = quants.dequantize(np.array(tensor.rows()), GGMLQuantizationType(tensor.type))
    values = torch.from_numpy(values.astype(np.float32, copy=False)).reshape(tensor.shape)
    return reordered(values, config, inner(tensor.name), to_file=False)


def inner(name: str) -> str:
    """Transformers' name of a tensor of a file."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{MODEL[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{(LAYER | NORMS)[part]}.{kind}"


def reordered(values: torch.Tensor, config: Any, name: str, to_file: bool = True) -> torch.Tensor:
    """A parameter with the rows of queries and keys as a Llama's file has them, or back.

    What rotates together lies together there; transformers has two halves.
    """
    count = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = count.get(name.split(".")[-2], 0)
    if not heads or config.model_type != "llama":
        return values
    each = (heads, 2, -1) if to_file else (heads, -1, 2)
    return values.view(*each, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
