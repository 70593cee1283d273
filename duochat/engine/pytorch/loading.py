"""From a folder to a model on its device, with what is missing or does not fit said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from duochat import DuoChatError
from duochat.engine.pytorch import few_rows, memory, skinny, widened
from duochat.engine.pytorch.attention import NAME
from duochat.engine.pytorch.joining import join

if TYPE_CHECKING:
    from duochat.engine.pytorch.lane import TorchTarget

COMPILE = ("whole", "parts")  # in the order of trial; the first is the faster one


def load(
    target: type[TorchTarget],
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int = 4096,
    compile: bool = True,
    quantize: str = "none",
    reproducible: bool = False,
    threads: int | str = "auto",
    prompt_threads: int = 0,
) -> TorchTarget:
    """See `config.Settings` for the options. Raises DuoChatError when folder or device cannot be used.

    prompt_threads: for reading prompts on a CPU; 0 = threads.
    """
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if place.type != "cpu":
        torch.set_num_threads(1)  # OpenMP pools that together outnumber the cores sleep at barriers
    elif isinstance(threads, int):
        torch.set_num_threads(threads)
    config = read_config(folder)
    length = min(context_length, longest(config))
    need = memory.needed(config, kind)
    plan = memory.plan(need, length, quantize, place)
    try:
        model = read(folder, place, kind, plan)
        made = _assemble(target, model, length, compile, reproducible, plan)
        made.prompt_threads = prompt_threads if place.type == "cpu" else 0
        if shape := widened.like(folder):
            made.facts["target"] = f"a small target with the shape of {shape} (cost-faithful)"
        return made
    except RuntimeError as fault:
        if memory.ran_out(fault):
            raise memory.too_small(need, plan.quantize, length, memory.free(place) or 0) from fault
        raise


def _assemble(
    target: type[TorchTarget],
    model: torch.nn.Module,
    context_length: int,
    compile: bool,
    reproducible: bool,
    plan: memory.Plan,
) -> TorchTarget:
    """The lane with what is fast on the model's device. A model over several cards runs plainly."""
    cuda = model.device.type == "cuda" and not plan.spread
    products = "torch"
    if compile and model.device.type == "cpu" and skinny.swap(model):
        products = "skinny"
    if compile and cuda and few_rows.swap(model):
        products = "few rows"
    made = target(model, context_length, COMPILE if compile and cuda else (), cuda, reproducible)
    made.facts |= {"target_products": products, "target_quantize": plan.quantize, "target_notice": plan.note}
    return made


def read_config(folder: Path) -> Any:
    """The configuration of the model that `read` will give."""
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise DuoChatError(f"{folder} holds no config.json: name a folder with a transformers model as the target.")
    if widened.is_recipe(Path(folder)):
        return widened.config(Path(folder))
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as fault:
        raise DuoChatError(f"{folder} cannot be loaded as a causal language model: {_first_line(fault)}") from fault


def read(folder: Path, device: torch.device, dtype: torch.dtype, plan: memory.Plan) -> torch.nn.Module:
    """The model with our attention, ready for inference where it is to run."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars write over ours and leave a semaphore behind
    begin = torch.device("cpu") if plan.spread or plan.quantize != "none" else device
    model = _weights(folder, begin, dtype, plan.spread)
    if device.type == "cuda":
        join(model)
    if plan.quantize != "none":
        _quantize(model, plan.quantize, device)
    return (model if plan.spread else model.to(device)).eval().requires_grad_(False)


def _weights(folder: Path, device: torch.device, dtype: torch.dtype, spread: bool) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    if widened.is_recipe(Path(folder)):
        model = widened.build(Path(folder), device, dtype, NAME)
        return _spread(model) if spread else model
    try:
        places = "auto" if spread else None
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME, device_map=places)
    except (OSError, ValueError, KeyError) as fault:
        raise DuoChatError(f"{folder} cannot be loaded as a causal language model: {_first_line(fault)}") from fault


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    """The layers of a model in main memory over all cards."""
    import accelerate

    whole = model._no_split_modules
    limits = accelerate.utils.get_balanced_memory(model, no_split_module_classes=whole)
    places = accelerate.infer_auto_device_map(model, limits, no_split_module_classes=whole)
    return accelerate.dispatch_model(model, places)


def _quantize(model: torch.nn.Module, quantize: str, device: torch.device) -> None:
    """Weight-only, layer by layer on the device, so that the whole never has to fit there unquantised."""
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as fault:
        raise DuoChatError(f"quantize {quantize} needs the package torchao: pip install torchao.") from fault
    if quantize == "4bit" and device.type != "cuda":
        raise DuoChatError("quantize 4bit needs a CUDA device: choose 8bit or none.")
    packing = {"int4_packing_format": "tile_packed_to_4d"}  # the kernels that come with torch
    config = Int8WeightOnlyConfig() if quantize == "8bit" else Int4WeightOnlyConfig(group_size=64, **packing)
    quantize_(model, config, device=device)


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA, then MPS, then the CPU."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in found.items() if there))
    if not found.get(name.split(":")[0], False):
        raise DuoChatError(f"Device {name} is not there: choose one of {', '.join(k for k, v in found.items() if v)}.")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, bfloat16 where the GPU has it, else float16."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    known |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name != "auto":
        if name not in known:
            raise DuoChatError(f"dtype {name} is unknown: choose one of {', '.join(known)} or auto.")
        return known[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16


def end_tokens(model: torch.nn.Module) -> frozenset[int]:
    """All ids that end an answer, by the generation settings and the model's own."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config())
    found = [getattr(source, "eos_token_id", None) for source in sources]
    return frozenset(i for ids in found if ids is not None for i in ([ids] if isinstance(ids, int) else ids))


def longest(config: Any) -> int:
    """The context that a model was made for."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights as they are kept, shared ones once."""
    return sum(_stored(parameter) for parameter in model.parameters())


def _stored(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised one, made of several
        return sum(_stored(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": f"CPU, {torch.get_num_threads()} threads", "mps": "Apple GPU"}.get(device.type, device.type)


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
