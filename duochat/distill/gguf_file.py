"""GGUF files as `distill` and `widen` need them: a target's tokenizer in, a Llama of transformers' out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from transformers import AutoConfig

from duochat import DuoChatError
from duochat.chat.text import Tokenizer
from duochat.models import weights
from duochat.models.gguf import Header, read
from duochat.models.tokenizer import stops
from duochat.models.trim import RANKING
from duochat.models.weights import LAYER, MODEL, NORMS, reordered

COPIED = ("tokenizer.", "general.license", "general.languages")
KEYS = {  # of a file, with transformers' names
    **{"embedding_length": "hidden_size", "block_count": "num_hidden_layers", "vocab_size": "vocab_size"},
    **{"feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings"},
    **{"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"},
    **{"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.dimension_count": "head_dim"},
}
OUTER = {inner: outer for outer, inner in (MODEL | LAYER | NORMS).items()}
PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}  # torch converts these
Kinds = dict[str, str]  # part of a tensor's name -> quantisation, "" = all others


@dataclass(frozen=True)
class Source:
    """A GGUF file of a family that `models.weights` knows."""

    header: Header

    @classmethod
    def open(cls, path: Path) -> Source:
        header = read(path)
        weights.config(header)  # refuses what would change the function
        return cls(header)

    @property
    def path(self) -> Path:
        return self.header.path

    @cached_property
    def config(self) -> Any:
        """The transformers configuration."""
        return AutoConfig.for_model(**weights.config(self.header))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)

    @property
    def ends(self) -> list[int]:
        """Tokens that end a turn, the usual one first."""
        usual = self.header.metadata["tokenizer.ggml.eos_token_id"]
        return sorted(stops(self.header), key=lambda token: token != usual)


def outer(name: str) -> str:
    """GGUF's name of a parameter of transformers'."""
    layer, name = ("", name) if ".layers." not in name else name.removeprefix("model.layers.").split(".", 1)
    stem, _, kind = name.rpartition(".")
    return f"blk.{layer}.{OUTER[stem]}.{kind}" if layer else f"{OUTER[stem]}.{kind}"


def kinds(text: str) -> Kinds:
    """`q8_0` or `q4_1,token_embd=q8_0,ffn_down=q8_0` as the quantisation of each tensor."""
    found = {}
    for part in text.lower().split(","):
        where, _, kind = part.rpartition("=")
        if not hasattr(GGMLQuantizationType, kind.upper()):
            raise DuoChatError(f"{kind!r} is no GGUF quantisation: use f16, q8_0, q4_0, q4_1, q5_0 or q5_1.")
        found[where] = kind
    return {"": "q8_0"} | found


def kind_of(by_part: Kinds, tensor: str) -> str:
    """The quantisation of a tensor of two dimensions by its name in the file."""
    return next((kind for part, kind in by_part.items() if part and part in tensor), by_part[""])


def coarse(model: torch.nn.Module, mix: str) -> list[str]:
    """Names of the parameters that the mix keeps in Q4_0, the one quantisation that training prepares for."""
    by_part, named = kinds(mix), model.named_parameters()
    return [name for name, value in named if value.ndim == 2 and kind_of(by_part, outer(name)) == "q4_0"]


def write_student(
    model: torch.nn.Module, source: Source, path: Path, mix: str, name: str, frequent: Sequence[int] = ()
) -> int:
    """Write the model as GGUF with the source's tokenizer; returns the size in bytes. A half file never has `path`.

    frequent: the tokens that it is to propose when it drafts, the most frequent first; none = all.
    """
    half, more = path.with_suffix(".part"), {RANKING: [int(token) for token in frequent]} if len(frequent) else {}
    parameters = dict(model.named_parameters())
    write(half, model.config, source, name, parameters, parameters.get, partial(kind_of, kinds(mix)), more)
    half.replace(path)
    return path.stat().st_size


def write(
    path: Path,
    config: Any,
    source: Source,
    name: str,
    parameters: Mapping[str, torch.Tensor],
    values: Callable[[str], torch.Tensor],
    kind: Callable[[str], str],
    more: Mapping[str, Any],
) -> None:
    """A file of a model of transformers', a tensor at a time; the tokenizer is the source's.

    parameters: by transformers' names; of what sizes they are. values: those of a name, asked for in this order. kind:
    the quantisation of a tensor of two dimensions, by its name in the file. more: of the metadata.
    """
    writer, raw = gguf.GGUFWriter(path, config.model_type), {}
    entries = {f"{writer.arch}.{key}": getattr(config, name) for key, name in KEYS.items()}
    entries |= {f"{writer.arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]), "general.name": name}
    entries |= {key: value for key, value in source.header.metadata.items() if key.startswith(COPIED)}
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (entries | more).items():
        add.get(type(value), writer.add_array)(key, value)
    for inside, value in parameters.items():
        raw[inside] = GGMLQuantizationType[("f32" if value.ndim == 1 else kind(outer(inside))).upper()]
        block, size = GGML_QUANT_SIZES[raw[inside]]
        bytes_ = value.numel() // block * size
        writer.add_tensor_info(outer(inside), value.shape, np.dtype(np.float32), bytes_, raw[inside])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        step()
    for inside in parameters:
        writer.write_tensor_data(_stored(reordered(values(inside), config, inside), raw[inside]))
    writer.close()


def _stored(values: torch.Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    if plain := PLAIN.get(kind.name.lower()):
        return values.detach().to(plain).cpu().contiguous().view(torch.uint8).numpy()
    return gguf.quants.quantize(values.detach().float().cpu().numpy(), kind)
