"""GGUF files as `distill` needs them: weights and tokenizer of a target in, a quantised student out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import jinja2
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from duochat import DuoChatError
from duochat.distill.student import Llama, Shape
from duochat.models.trim import RANKING

COPIED = ("tokenizer.", "general.license", "general.languages")
DIGITS_APART = {"smollm"}
PLAIN_BYTE_LEVEL = {"gpt-2", "gpt2"}
Kinds = dict[str, str]  # part of a tensor's name -> quantisation, "" = all others


@dataclass(frozen=True)
class Source:
    """An opened GGUF file: its metadata, read once, and its tensors."""

    path: Path
    meta: dict[str, Any]
    reader: gguf.GGUFReader

    @classmethod
    def open(cls, path: Path) -> Source:
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise DuoChatError(f"{path} cannot be read as a GGUF file ({error}): give the target's .gguf.") from error
        source = cls(path, {name: field.contents() for name, field in reader.fields.items()}, reader)
        if source.meta["general.architecture"] != "llama":
            raise DuoChatError(f"{path} is a {source.meta['general.architecture']} model: distill knows only llama.")
        return source

    @property
    def shape(self) -> Shape:
        m = self.meta
        return Shape(
            width=m["llama.embedding_length"],
            layers=m["llama.block_count"],
            heads=m["llama.attention.head_count"],
            kv_heads=m.get("llama.attention.head_count_kv", m["llama.attention.head_count"]),
            ffn=m["llama.feed_forward_length"],
            vocab=len(m["tokenizer.ggml.tokens"]),
            context=m["llama.context_length"],
            rope_base=m.get("llama.rope.freq_base", 10000.0),
            norm_eps=m["llama.attention.layer_norm_rms_epsilon"],
        )

    def model(self) -> Llama:
        """The weights de-quantised to fp32 on the CPU."""
        if any(t.name == "output.weight" for t in self.reader.tensors):
            raise DuoChatError(f"{self.path} has a head apart from its embedding: distill knows only tied ones.")
        model = Llama(self.shape)
        model.load_state_dict({_inner(t.name): _dequantized(t) for t in self.reader.tensors}, strict=True)
        return model.requires_grad_(False)

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE described in the metadata; special tokens in a text are recognised."""
        pre = self.meta.get("tokenizer.ggml.pre", "")
        if pre not in DIGITS_APART | PLAIN_BYTE_LEVEL:
            raise DuoChatError(f"{self.path} splits text by the rule {pre!r}: distill knows smollm and gpt-2.")
        tokens, kinds = self.meta["tokenizer.ggml.tokens"], self.meta["tokenizer.ggml.token_type"]
        merges = [tuple(pair.split(" ")) for pair in self.meta["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS_APART else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
        tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
        return tokenizer

    def chat(self, messages: list[dict[str, str]], answer: bool = True) -> str:
        """The messages through the file's own chat template, opened for the assistant if `answer`."""
        template = self.meta.get("tokenizer.chat_template")
        if template is None:
            raise DuoChatError(f"{self.path} has no chat template: distill needs an instruction-tuned target.")
        special = {
            f"{name}_token": self.meta["tokenizer.ggml.tokens"][self.meta.get(f"tokenizer.ggml.{name}_token_id", 0)]
            for name in ("bos", "eos")
        }
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(messages=messages, add_generation_prompt=answer, **special)

    @property
    def end_of_turn(self) -> int:
        return self.meta["tokenizer.ggml.eos_token_id"]


def _inner(name: str) -> str:
    """GGUF's tensor name as this package's parameter name: norms are bare parameters."""
    return name.removesuffix(".weight") if "norm" in name else name


def _outer(name: str) -> str:
    return name if name.endswith(".weight") else f"{name}.weight"


def _dequantized(tensor: gguf.ReaderTensor) -> torch.Tensor:
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))


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
    by_part = kinds(mix)
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim == 2]
    return [name for name in matrices if kind_of(name, by_part) == "q4_0"]


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
    for tensor_name, data in _tensors(model):
        kind = kind_of(tensor_name, by_part)
        quantisation = gguf.GGMLQuantizationType[("f32" if data.ndim == 1 else kind).upper()]
        writer.add_tensor(tensor_name, gguf.quants.quantize(data, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.replace(path)
    return path.stat().st_size


def _tensors(model: Llama) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in model.state_dict().items():
        yield _outer(name), value.detach().float().cpu().numpy()


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
    for key, field in source.reader.fields.items():
        if key.startswith(COPIED):
            kind = field.types[0]
            inner = field.types[1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, source.meta[key], kind, sub_type=inner)
