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
        get, heads = self.header.get, self.header.get("attention.head_count")
        return Shape(
            width=get("embedding_length"),
            layers=get("block_count"),
            heads=heads,
            kv_heads=get("attention.head_count_kv", heads),
            ffn=get("feed_forward_length"),
            vocab=len(self.header.tokens),
            context=get("context_length"),
            rope_base=get("rope.freq_base", 10000.0),
            norm_eps=get("attention.layer_norm_rms_epsilon"),
            biased=self.header.architecture == "qwen2",
            tied=all(t.name != weights.HEAD for t in self.header.tensors),
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
    writer.add_name(name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in source.header.metadata.items():
        if key.startswith(COPIED):
            kinds.get(type(value), writer.add_array)(key, value)
