"""The weights of a GGUF file as transformers' safetensors and config.json, one tensor at a time.

Every tensor keeps the values that the file holds: half-precision ones stay as they are, quantised ones become
float32, the narrowest type that holds them exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.models import store
from duochat.models.gguf import BLOCKS, Header, Tensor
from duochat.models.store import Progress

if TYPE_CHECKING:
    import numpy as np

PLAIN = {0: "F32", 1: "F16", 30: "BF16"}  # GGUF type: its name in safetensors; all others are quantised
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}
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


def _renamed(name: str) -> str:
    """The name that transformers gives a GGUF tensor."""
    *layer, part, kind = name.split(".")
    return f"model.layers.{layer[1]}.{(LAYER | NORMS)[part]}.{kind}" if layer else f"{MODEL[part]}.{kind}"


def write_weights(header: Header, folder: Path, progress: Progress) -> None:
    """model.safetensors; progress counts bytes. Memory: one tensor."""
    out = folder / "model.safetensors"
    total = sum(_bytes(t) for t in header.tensors)
    store.need_room(out, total)
    done = 0
    with out.open("wb") as sink:
        _write_table(header.tensors, sink)
        for tensor in header.tensors:
            for chunk in _values(header, tensor):
                sink.write(chunk)
                done += chunk.nbytes
                progress(f"Unpacking the weights of {header.path.name}", done, total)


def _type(tensor: Tensor) -> str:
    return PLAIN.get(tensor.type, "F32")


def _bytes(tensor: Tensor) -> int:
    return tensor.elements * WIDTH[_type(tensor)]


def _write_table(tensors: tuple[Tensor, ...], sink: IO[bytes]) -> None:
    """The head of a safetensors file: its own length, then name, type, shape and place of each tensor."""
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        place = [at, at + _bytes(t)]
        table[_renamed(t.name)] = {"dtype": _type(t), "shape": list(t.shape), "data_offsets": place}
        at = place[1]
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    sink.write(len(text).to_bytes(8, "little") + text)


def _values(header: Header, tensor: Tensor) -> Iterator[np.ndarray]:
    """A tensor's values in row order, by blocks of rows so that a large embedding takes little memory."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = _row_order(header, tensor, np.atleast_2d(tensor.rows()))
    for start in range(0, len(raw), 4096):
        part = np.ascontiguousarray(raw[start : start + 4096])
        yield part if tensor.type in PLAIN else dequantize(part, GGMLQuantizationType(tensor.type)).astype(np.float32)


def _row_order(header: Header, tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    """Undo the row order that llama.cpp gives the llama architecture's queries and keys.

    There, the halves of a head that rotate together lie interleaved; transformers keeps first half, then second.
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.weight", tensor.name)
    if header.architecture != "llama" or not match:
        return raw
    heads = header.get("attention.head_count")
    heads = header.get("attention.head_count_kv", heads) if match[1] == "k" else heads
    return raw.reshape(heads, -1, 2, raw.shape[-1]).swapaxes(1, 2).reshape(raw.shape)
