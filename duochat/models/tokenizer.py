"""The tokenizer of a GGUF file as transformers' tokenizer.json, with its chat template and its stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.models.gguf import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types of llama.cpp
# Control tokens that end an answer.
STOPS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>")

# How each family cuts text into words before merging; named by `tokenizer.ggml.pre`.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "deepseek-r1-qwen": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # GPT-2's words, each digit apart
GPT2 = ("gpt-2", "default", "olmo", "phi-2")


def write_tokenizer(header: Header, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF's vocabulary."""
    build(header).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(header))
    _write(folder / "generation_config.json", {"eos_token_id": stops(header), "do_sample": False})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def build(header: Header) -> Tokenizer:
    """A byte-level BPE tokenizer that gives llama.cpp's token ids. Raises DuoChatError for another kind."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    merges = header.metadata.get("tokenizer.ggml.merges")
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or merges is None:
        raise _unfit(header, "Only byte-level BPE vocabularies are converted")
    vocabulary = {token: id for id, token in enumerate(header.tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    tokenizer.pre_tokenizer = _words(header, pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(header, tokenizer)
    return tokenizer


def _unfit(header: Header, why: str) -> DuoChatError:
    return DuoChatError(f"{why}: as target, name the model's own folder (hf:owner/repo) instead of {header.path.name}.")


def _words(header: Header, pre: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in WORDS:
        split = Split(Regex(WORDS[pre]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre in SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if pre in GPT2:
        return ByteLevel(add_prefix_space=False)
    raise _unfit(header, f"The vocabulary's kind {pre!r} is not converted")


def _add_whole_tokens(header: Header, tokenizer: Tokenizer) -> None:
    """Control tokens and the author's own are matched whole in a text, before it is cut into words."""
    from tokenizers import AddedToken

    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        tokens = [AddedToken(t, special=special, normalized=False) for t in _of_type(header, kind)]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(tokens)


def _of_type(header: Header, kind: int) -> list[str]:
    types = header.metadata.get("tokenizer.ggml.token_type", [])
    return [token for token, t in zip(header.tokens, types, strict=False) if t == kind]


def stops(header: Header) -> list[int]:
    """Ids of the tokens that end an answer: the file's own, and those whose name says so."""
    named = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = set(_of_type(header, CONTROL))
    known = [id for id, token in enumerate(header.tokens) if token in STOPS and token in control]
    return sorted({id for id in (*named, *known) if id is not None})


def _tokenizer_config(header: Header) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.get("context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": header.metadata.get("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token"] = None if id is None else header.tokens[id]
    return config
