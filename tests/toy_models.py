"""Tiny model files: real formats, a few kilobytes, random weights."""

import json
import struct
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = Path(__file__).parent.parent / "LICENSE"  # a text that stays
PAD = "<|endoftext|>"
CONTROL = [PAD, "<|im_start|>", "<|im_end|>"]
WIDTH, HEADS, KV_HEADS, LAYERS, INNER = 64, 4, 2, 2, 96
EXPERTS, STATE, STEP = 4, 8, 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def byte_level_vocabulary(size=600):
    """(tokens, merges) of a BPE trained on the licence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.read_text(), "2024 1234567 " * 20], trainer)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]

    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    return tokens, merges


def sentencepiece_vocabulary():
    """(tokens, scores, types) as SentencePiece trains them: control, bytes, merged pieces by rank, single letters."""
    joined = ["▁t", "he", "▁the", "in", "er", "▁a", "re", "on", "▁c", "at", "▁m", "od", "el", "▁mod", "▁model", "ing"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;!?'\"()-"))
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(head) + [-float(i) for i in range(len(joined))] + [-1000.0 - i for i in range(len(letters))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(joined) + len(letters))]
    return head + joined + letters, scores, types


def write_sentencepiece(path, tokens, scores, types, model_type=2):
    """A tokenizer.model, encoded by hand."""

    def varint(n):
        out = b""
        while n > 0x7F:
            out, n = out + bytes([n & 0x7F | 0x80]), n >> 7
        return out + bytes([n])

    def message(number, body):
        return varint(number << 3 | 2) + varint(len(body)) + body

    pieces = b"".join(
        message(1, message(1, token.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + b"\x18" + varint(kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    path.write_bytes(pieces + message(2, b"\x18" + varint(model_type)) + message(3, message(1, b"identity")))
    return path


def write_gguf(
    path,
    architecture="llama",
    vocabulary=None,
    quantized=GGMLQuantizationType.Q8_0,
    extra=None,
    part=0,
    without=(),
    file_type=None,
    context=256,
):
    """A GGUF model with random weights. vocabulary: "llama" for SentencePiece's, else (tokens, merges).

    part: tensors in each of several files, named by llama.cpp after the path; 0: one file. without: tensors left out.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=part)
    _write_shape(writer, architecture, context)
    if vocabulary == "llama":
        count = _write_pieces(writer)
    else:
        count = _write_bytes(writer, *(vocabulary or byte_level_vocabulary()))
    if file_type is not None:
        writer.add_file_type(file_type)
    for name, value in (extra or {}).items():
        writer.add_string(name, value)
    for name, weights in _weights(architecture, count):
        if name in without:
            continue
        kind = quantized if weights.ndim > 1 and "ssm_" not in name else GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layers(architecture):
    return 6 if architecture == "gemma3" else LAYERS  # of which the last one sees all


def _write_shape(writer, architecture, context):
    writer.add_name("toy")
    writer.add_context_length(context)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(_layers(architecture))
    if architecture == "gemma3":
        writer.add_sliding_window(8)
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(INNER)
    if architecture == "mamba":
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(2 * WIDTH)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(STEP)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_key_length(WIDTH // HEADS)
    writer.add_value_length(WIDTH // HEADS)


def _write_bytes(writer, tokens, merges):
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def _write_pieces(writer):
    tokens, scores, types = sentencepiece_vocabulary()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return len(tokens)


def _weights(architecture, vocabulary):
    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.normal(0, 0.3, shape).astype(np.float32)

    yield "token_embd.weight", random(vocabulary, WIDTH)
    yield "output_norm.weight", random(WIDTH)
    yield "output.weight", random(vocabulary, WIDTH)
    of_layer = _recurrent_layer if architecture == "mamba" else _layer
    for layer in range(_layers(architecture)):
        yield f"blk.{layer}.attn_norm.weight", random(WIDTH)
        for name, weights in of_layer(architecture, random):
            yield f"blk.{layer}.{name}", weights


def _layer(architecture, random):
    head = WIDTH // HEADS
    yield "ffn_norm.weight", random(WIDTH)
    for name, rows in (("q", HEADS * head), ("k", KV_HEADS * head), ("v", KV_HEADS * head)):
        yield f"attn_{name}.weight", random(rows, WIDTH)
        if architecture == "qwen2":
            yield f"attn_{name}.bias", random(rows)
    if architecture in ("qwen3", "qwen3moe", "gemma3"):
        yield "attn_q_norm.weight", random(head)
        yield "attn_k_norm.weight", random(head)
    if architecture == "gemma3":
        yield "post_attention_norm.weight", random(WIDTH)
        yield "post_ffw_norm.weight", random(WIDTH)
    yield "attn_output.weight", random(WIDTH, HEADS * head)
    experts, end = ((EXPERTS,), "_exps") if architecture == "qwen3moe" else ((), "")
    if experts:
        yield "ffn_gate_inp.weight", random(EXPERTS, WIDTH)
    yield f"ffn_gate{end}.weight", random(*experts, INNER, WIDTH)
    yield f"ffn_up{end}.weight", random(*experts, INNER, WIDTH)
    yield f"ffn_down{end}.weight", random(*experts, WIDTH, INNER)


def _recurrent_layer(architecture, random):
    inner = 2 * WIDTH
    yield "ssm_in.weight", random(2 * inner, WIDTH)
    yield "ssm_conv1d.weight", random(inner, 4)
    yield "ssm_conv1d.bias", random(inner)
    yield "ssm_x.weight", random(STEP + 2 * STATE, inner)
    yield "ssm_dt.weight", random(inner, STEP)
    yield "ssm_dt.bias", random(inner)
    yield "ssm_a", -np.abs(random(inner, STATE))
    yield "ssm_d", random(inner)
    yield "ssm_out.weight", random(WIDTH, inner)


def write_wheel(folder, package, version, members):
    """A wheel that carries files; members: {path in the wheel: bytes}."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in members.items():
            archive.writestr(path, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel
