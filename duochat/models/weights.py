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
RECIPE = "recipe.json"
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_config(header: Header, folder: Path) -> None:
    """config.json of the model that a GGUF header describes. Raises DuoChatError where none can be made."""
    (folder / "config.json").write_text(json.dumps(config(header), indent=2), encoding="utf-8")


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
        "attention_bias": any(t.name.endswith("attn_q.bias") for t in header.tensors),
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": header.get("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)},
        "tie_word_embeddings": all(t.name != "output.weight" for t in header.tensors),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _refuse_unfit(header: Header) -> None:
    """Only what converts to the very same function is converted."""
    remedy = f"as target, name the model's own folder (hf:owner/repo) instead of {header.path.name}"
    if header.architecture not in CLASSES:
        known = ", ".join(CLASSES)
        raise DuoChatError(f"A GGUF of architecture {header.architecture!r} is not converted (only {known}): {remedy}.")
    scaled = header.get("rope.scaling.type", "none") != "none"
    if scaled or any(t.name == "rope_freqs.weight" for t in header.tensors):
        raise DuoChatError(f"This GGUF scales its rotary positions, which is not converted: {remedy}.")
    if strange := [t.name for t in header.tensors if not _renamed(t.name) or t.type not in BLOCKS]:
        raise DuoChatError(f"This GGUF holds {strange[0]}, which is not converted: {remedy}.")


def _renamed(name: str) -> str:
    """The name that transformers gives a GGUF tensor, "" for one that it does not know."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|(?<=attn_[qkv]\.)bias)", name)
    if not match or match[2] not in NAMES:
        return ""
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def write_weights(header: Header, folder: Path, progress: Progress) -> None:
    """model.safetensors; progress counts bytes. Memory: one tensor."""
    out = folder / "model.safetensors"
    total = sum(_bytes(t) for t in header.tensors)
    store.need_room(out, total)
    done = 0
    with header.path.open("rb") as source, out.open("wb") as sink:
        _write_table(header.tensors, sink)
        for tensor in header.tensors:
            for chunk in _values(header, tensor, source):
                sink.write(chunk)
                done += chunk.nbytes
                progress(f"Unpacking the weights of {header.path.name}", done, total)


def refuse_broken(folder: Path) -> None:
    """Raises DuoChatError when a model folder's weights are missing or cut short; reads their heads only."""
    if recipe(folder):
        return
    index = folder / "model.safetensors.index.json"
    listed = _listed(index) if index.is_file() else set()
    if missing := sorted(name for name in listed if not (folder / name).is_file()):
        raise DuoChatError(f"{folder} lacks {missing[0]}: copy it there or fetch the model again.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not next(folder.glob("*.bin"), None):
        raise DuoChatError(f"{folder} has no weights: copy its *.safetensors there or fetch the model again.")
    if broken := next((path for path in weights if not _is_whole(path)), None):
        raise DuoChatError(f"{broken} is cut short or damaged: delete it and fetch or copy it again.")


def recipe(folder: Path) -> dict[str, Any]:
    """How the weights of a folder are made at load, {} where they lie in it.

    maker: the module whose `build(folder, device, dtype, attention)` does it. told: what users should know of it.
    """
    path = folder / RECIPE
    made = _json(path) if path.is_file() else {}
    if path.is_file() and not (isinstance(made, dict) and str(made.get("maker")).startswith("duochat.")):
        raise DuoChatError(f"{path} names nobody who makes its weights: make the folder again.")
    return made


def _listed(index: Path) -> set[str]:
    """The files that an index names."""
    try:
        return set(_json(index)["weight_map"].values())
    except (TypeError, KeyError, AttributeError):
        raise DuoChatError(f"{index} lists no weights: delete it and fetch or copy it again.") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise DuoChatError(f"{path} is damaged: delete it and fetch or copy it again.") from None


def _is_whole(path: Path) -> bool:
    """Does a safetensors file end where its head says?"""
    size = path.stat().st_size
    with path.open("rb") as f:
        head = int.from_bytes(f.read(8), "little")
        try:
            table = json.loads(f.read(head)) if head < size else {}
            ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return bool(ends) and 8 + head + max(ends) == size


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


def _values(header: Header, tensor: Tensor, source: IO[bytes]) -> Iterator[np.ndarray]:
    """A tensor's values in row order, by blocks of rows so that a large embedding takes little memory."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = tensor.elements // tensor.shape[-1]
    source.seek(tensor.offset)
    raw = np.frombuffer(source.read(tensor.size), np.uint8).reshape(rows, -1)
    raw = _row_order(header, tensor, raw)
    for start in range(0, len(raw), 4096):
        part = np.ascontiguousarray(raw[start : start + 4096])
        yield part if tensor.type in PLAIN else dequantize(part, GGMLQuantizationType(tensor.type)).astype(np.float32)


def _row_order(header: Header, tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    """Undo the row order that llama.cpp gives the llama architecture's queries and keys.

    There, the halves of a head that rotate together lie interleaved; transformers keeps first half, then second.
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", tensor.name)
    if header.architecture != "llama" or not match:
        return raw
    heads = header.get("attention.head_count")
    heads = header.get("attention.head_count_kv", heads) if match[1] == "k" else heads
    if len(tensor.shape) == 1:
        raw = raw.reshape(tensor.shape[0], -1)
    return raw.reshape(heads, -1, 2, raw.shape[-1]).swapaxes(1, 2).reshape(raw.shape)
