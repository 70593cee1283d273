"""A model's tokenizer as tokenizer.json, made from what a GGUF file or a SentencePiece file says.

The token ids are llama.cpp's, so target and draft read a text alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.models import sentencepiece
from duochat.models.gguf import Header
from duochat.models.sentencepiece import Pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types of llama.cpp
SPACE = "▁"  # how SentencePiece writes a space

# Control tokens that end an answer.
STOPS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>")

# How each family cuts text into words before merging; named by `tokenizer.ggml.pre`.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
WORDS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2}
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # GPT-2's words, each digit apart
GPT2 = ("gpt-2", "default", "olmo", "phi-2")


def write_tokenizer(header: Header, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF's vocabulary."""
    build(header).save(str(folder / "tokenizer.json"))
    stopping = {"eos_token_id": stops(header), "do_sample": False}
    for name, content in (("tokenizer_config.json", settings(header)), ("generation_config.json", stopping)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def of_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises DuoChatError when it has none that can be used."""
    from tokenizers import Tokenizer

    path, pieces = folder / "tokenizer.json", folder / "tokenizer.model"
    if not path.is_file() and pieces.is_file():
        return from_pieces(sentencepiece.read(pieces))
    if not path.is_file():
        raise DuoChatError(f"{folder} has no tokenizer.json: give the folder of a model that has one.")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as fault:  # the tokenizers library raises nothing narrower
        raise DuoChatError(f"{path} is not a usable tokenizer ({fault}): fetch the model again.") from fault


def build(header: Header) -> Tokenizer:
    """The tokenizer of a GGUF's vocabulary. Raises DuoChatError for a kind that is not converted."""
    about = {key.removeprefix("tokenizer.ggml."): value for key, value in header.metadata.items()}
    kind, types = about.get("model"), about.get("token_type", [1] * len(header.tokens))
    if kind == "gpt2" and "merges" in about:
        tokenizer = _byte_level(header, about["merges"], types)
    elif kind == "llama" and "scores" in about:
        tokenizer = from_pieces(Pieces(header.tokens, about["scores"], types, about.get("add_space_prefix", True)))
    else:
        raise _unfit(header, f"The vocabulary's kind {kind!r} is not converted")
    if about.get("add_bos_token", kind == "llama" or about.get("pre") in ("llama-bpe", "llama3")):  # as in llama.cpp
        _open_texts(tokenizer, header.tokens, about.get("bos_token_id"))
    return tokenizer


def _open_texts(tokenizer: Tokenizer, tokens: list[str], bos: int | None) -> None:
    """Put the token that begins a text before one that has no template."""
    from tokenizers.processors import TemplateProcessing

    if bos is not None:
        tokenizer.post_processor = TemplateProcessing(single="BOS $A", special_tokens=[("BOS", bos)])


def _unfit(header: Header, why: str) -> DuoChatError:
    return DuoChatError(f"{why}: as target, name the model's own folder (hf:owner/repo) instead of {header.path.name}.")


def _byte_level(header: Header, merges: list[str], types: list[int]) -> Tokenizer:
    """BPE over bytes, as GPT-2 introduced it."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    vocabulary = {token: id for id, token in enumerate(header.tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(BPE(vocabulary, pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    tokenizer.pre_tokenizer = _words(header, pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_whole_tokens(tokenizer, header.tokens, types)
    return tokenizer


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


def from_pieces(pieces: Pieces) -> Tokenizer:
    """BPE over characters with single bytes for the rest, as SentencePiece trains it for the Llama 2 family."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    vocabulary = {token: id for id, token in enumerate(pieces.tokens)}
    merges = _merges(vocabulary, pieces)
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), spaces] if pieces.space_prefix else [spaces]
    )
    strip = [decoders.Strip(" ", 1, 0)] if pieces.space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    _add_whole_tokens(tokenizer, pieces.tokens, pieces.types)
    return tokenizer


def _merges(vocabulary: dict[str, int], pieces: Pieces) -> list[tuple[str, str]]:
    """All ways to join two tokens into a third, the best score first; none of them makes a control token."""
    joins = [
        (-pieces.scores[id], vocabulary[token[:cut]], vocabulary[token[cut:]], token, cut)
        for token, id in vocabulary.items()
        for cut in range(1, len(token))
        if pieces.types[id] != CONTROL and token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(joins)]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens, "<unk>" and the author's own are matched whole in a text, before it is cut into words."""
    from tokenizers import AddedToken

    def of(kind: int, special: bool) -> list[AddedToken]:
        return [AddedToken(token, special=special, normalized=False) for token in _of_type(tokens, types, kind)]

    tokenizer.add_special_tokens(of(UNKNOWN, True) + of(CONTROL, True))
    tokenizer.add_tokens(of(USER_DEFINED, False))


def _of_type(tokens: list[str], types: list[int], kind: int) -> list[str]:
    return [token for token, t in zip(tokens, types, strict=False) if t == kind]


def stops(header: Header) -> list[int]:
    """Ids of the tokens that end an answer: the file's own, and those whose name says so."""
    named = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = set(_of_type(header.tokens, header.metadata.get("tokenizer.ggml.token_type", []), CONTROL))
    known = [id for id, token in enumerate(header.tokens) if token in STOPS and token in control]
    return sorted({id for id in (*named, *known) if id is not None})


def settings(header: Header) -> dict[str, Any]:
    """What tokenizer_config.json says: the chat template and the named tokens."""
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
