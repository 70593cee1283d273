"""GGUF files as `distill` needs them: weights and tokenizer of a target in, a quantised student out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import torch

from duochat import DuoChatError
from duochat.chat.text import Tokenizer
from duochat.distill.student import Llama, Shape
from duochat.models import weights
from duochat.models.gguf import Header, Tensor, read
from duochat.models.tokenizer import stops
from duochat.models.trim import RANKING

COPIED = ("tokenizer.", "general.license", "general.languages")
FAMILIES = ("llama", "qwen2")
KEYS = {  # of a Shape, in a file
    **{"width": "embedding_length", "layers": "block_count", "ffn": "feed_forward_length", "context": "context_length"},
    **{"heads": "attention.head_count", "kv_heads": "attention.head_count_kv"},
    **{"rope_base": "rope.freq_base", "norm_eps": "attention.layer_norm_rms_epsilon"},
}
Kinds = dict[str, str]  # part of a tensor's name -> quantisation, "" = all others


@dataclass(frozen=True)
class Source:
    """A GGUF file of a family that is a Llama, with or without biases at queries, keys and values."""

    header: Header

    @classmethod
    def open(cls, path: Path) -> Source:
        header = read(path)
        if header.architecture not in FAMILIES:
            known = " and ".join(FAMILIES)
            raise DuoChatError(f"{path} is a {header.architecture} model: distill knows only {known}.")
        weights.config(header)  # refuses what would change the function
        return cls(header)

    @property
    def path(self) -> Path:
        return self.header.path

    @cached_property
    def shape(self) -> Shape:
        told = {name: value for name, key in KEYS.items() if (value := self.header.get(key)) is not None}
        told |= {"vocab": len(self.header.tokens), "biased": self.header.architecture == "qwen2"}
        return Shape(
            **{"kv_heads": told["heads"]} | told, tied=all(t.name != weights.HEAD for t in self.header.tensors)
        )

    def model(self) -> Llama:
        """The weights de-quantised to fp32 on the CPU."""
        model = Llama(self.shape)
        with ThreadPoolExecutor() as pool:
            values = pool.map(self._values, self.header.tensors)
            model.load_state_dict({t.name: v for t, v in zip(self.header.tensors, values, strict=True)})
        return model.requires_grad_(False)

    def _values(self, tensor: Tensor) -> torch.Tensor:
        raw = np.array(tensor.rows())
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(tensor.type)).astype(np.float32, copy=False)
        heads = {"attn_q": self.shape.heads, "attn_k": self.shape.kv_heads}.get(tensor.name.split(".")[-2], 0)
        halves = heads if self.header.architecture != "llama" else 0
        return interleaved(torch.from_numpy(values).reshape(tensor.shape), halves)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.path)

    @property
    def ends(self) -> list[int]:
        """Tokens that end a turn, the usual one first."""
        usual = self.header.metadata["tokenizer.ggml.eos_token_id"]
        return sorted(stops(self.header), key=lambda token: token != usual)


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries and keys in GGUF's order for Llama: what rotates together lies together, not in two halves."""
    if not heads:
        return tensor
    return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def kinds(text: str) -> Kinds:
    """`q8_0` or `q4_1,token_embd=q8_0,ffn_down=q8_0` as the quantisation of each tensor."""
    found = {}
    for part in text.lower().split(","):
        where, _, kind = part.rpartition("=")
        if not hasattr(gguf.GGMLQuantizationType, kind.upper()):
            raise DuoChatError(f"{kind!r} is no GGUF quantisation: use f16, q8_0, q4_0, q4_1, q5_0 or q5_1.")
        found[where] = kind
    return {"": "q8_0"} | found


def kind_of(tensor: str, by_part: Kinds) -> str:
    """The quantisation of a tensor of two dimensions by its name."""
    return next((kind for part, kind in by_part.items() if part and part in tensor), by_part[""])


def coarse(model: Llama, mix: str) -> list[str]:
    """Names of the parameters that the mix keeps in Q4_0, the one quantisation that training prepares for."""
    by_part, named = kinds(mix), model.named_parameters()
    return [name for name, parameter in named if parameter.ndim == 2 and kind_of(name, by_part) == "q4_0"]


def write(model: Llama, source: Source, path: Path, mix: str, name: str, frequent: Sequence[int] = ()) -> int:
    """Write the model as GGUF with the source's tokenizer; returns the size in bytes. A half file never has `path`.

    frequent: the tokens that it is to propose when it drafts, the most frequent first; none = all.
    """
    half = path.with_suffix(".part")
    writer = gguf.GGUFWriter(half, "llama")
    write_meta(writer, model.shape, source, name)
    if len(frequent):
        writer.add_array(RANKING, [int(token) for token in frequent])
    by_part = kinds(mix)
    for tensor, value in model.state_dict().items():
        quantisation = gguf.GGMLQuantizationType[("f32" if value.ndim == 1 else kind_of(tensor, by_part)).upper()]
        data = gguf.quants.quantize(value.float().cpu().numpy(), quantisation)
        writer.add_tensor(tensor, data, raw_dtype=quantisation)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    half.replace(path)
    return path.stat().st_size


def write_meta(writer: gguf.GGUFWriter, shape: Shape, source: Source, name: str) -> None:
    """All that a file of a Llama says of itself; the tokenizer is the source's."""
    entries = {f"{writer.arch}.{key}": getattr(shape, name) for name, key in KEYS.items()}
    entries |= {key: value for key, value in source.header.metadata.items() if key.startswith(COPIED)}
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in entries.items():
        kinds.get(type(value), writer.add_array)(key, value)
    writer.add_name(name)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_vocab_size(shape.vocab)
