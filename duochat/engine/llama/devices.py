"""The devices that this build of llama.cpp can compute on besides the CPU, servers of its RPC backend among them."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_cpp
from llama_cpp.llama_cpp import _lib as LIBRARY

from duochat import DuoChatError
from duochat.engine.llama.probe import rebuild

CPU = 0  # the kinds of ggml-backend.h: CPU, GPU, GPU that shares the CPU's memory, accelerator beside the CPU
GPUS = (1, 2)
CONNECTS = 5.0  # seconds until a server must answer
DRIVERS = (("/dev/nvidiactl", "NVIDIA", "CUDA"), ("/dev/kfd", "AMD", "VULKAN"))  # file of the driver, maker, for CMake


@dataclass(frozen=True, slots=True)
class Device:
    """One device of ggml's."""

    handle: int
    name: str  # as ggml calls it: "CUDA0"
    title: str  # as people call it
    kind: int
    free: int  # bytes
    total: int


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffers", ctypes.c_void_p))


def _call(name: str, result: type, *arguments: object) -> object:
    """A function of the ggml that this llama.cpp is linked to: `llama_cpp._ggml` may be another one."""
    function = getattr(LIBRARY, name)
    function.restype = result
    return function(*arguments)


def found() -> list[Device]:
    """All devices, the CPU among them."""
    return [_device(i) for i in range(_call("ggml_backend_dev_count", ctypes.c_size_t))]


def _device(index: int) -> Device:
    handle = _call("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t(index))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    this = ctypes.c_void_p(handle)
    _call("ggml_backend_dev_memory", None, this, ctypes.byref(free), ctypes.byref(total))
    name, title = (_call(f"ggml_backend_dev_{part}", ctypes.c_char_p, this) for part in ("name", "description"))
    kind = _call("ggml_backend_dev_type", ctypes.c_int, this)
    return Device(handle, name.decode(), title.decode(), kind, free.value, total.value)


def gpus(names: Sequence[str] = ()) -> list[Device]:
    """The GPUs that a model may use: those named, or all. Raises DuoChatError for an unknown name."""
    there = [device for device in found() if device.kind in GPUS]
    known = {device.name: device for device in there}
    for name in names:
        if name not in known:
            raise DuoChatError(f"llama.cpp has no device {name}: choose of {', '.join(known) or 'none'}.")
    return [known[name] for name in names] if names else there


def overrides(rules: Sequence[str]) -> ctypes.Array:
    """llama.cpp's list of "pattern=device" rules. Raises DuoChatError for one that is none."""
    known = {device.name: device.handle for device in found()}
    made = []
    for rule in rules:
        pattern, _, name = rule.rpartition("=")
        if not pattern or name not in known:
            raise DuoChatError(f"tensor_overrides has {rule!r}: give PATTERN=DEVICE, one of {', '.join(known)}.")
        buffers = _call("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p(known[name]))
        made.append(_Override(pattern.encode(), buffers))
    return (_Override * (len(made) + 1))(*made, _Override())


@cache
def connect(server: str) -> None:
    """Make the devices of a server "host:port" of llama.cpp's RPC backend known. Raises DuoChatError."""
    if not llama_cpp.llama_supports_rpc():
        raise DuoChatError(f"This llama.cpp cannot use other machines: build it with {rebuild('-DGGML_RPC=ON')}")
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECTS).close()
    except OSError as fault:  # llama.cpp would end this process
        why = f"No rpc-server answers at {server} ({fault.strerror or fault})"
        raise DuoChatError(f"{why}: start llama.cpp's ggml-rpc-server there, or leave it out of rpc.") from None
    registry = ctypes.c_void_p(_call("ggml_backend_reg_by_name", ctypes.c_void_p, b"RPC"))
    name = b"ggml_backend_rpc_add_server"
    add = _call("ggml_backend_reg_get_proc_address", ctypes.c_void_p, registry, name)
    added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add)(server.encode())
    if not added:
        raise DuoChatError(f"The rpc-server at {server} lends no device: see what it says, or leave it out of rpc.")
    _call("ggml_backend_register", None, ctypes.c_void_p(added))


def unused_gpu() -> str:
    """A sentence when this machine has an NVIDIA or AMD GPU that this build cannot use, else ""."""
    if gpus():
        return ""
    for driver, name, option in DRIVERS:
        if Path(driver).exists():
            return f"llama.cpp was built without support for this {name} GPU: {rebuild(f'-DGGML_{option}=on')}"
    return ""
