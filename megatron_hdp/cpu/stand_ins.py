# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Stand-ins for torch.cuda on a machine without a GPU: one CPU "device" per local rank.

Megatron allocates with device="cuda", asks torch.cuda for streams and memory, and compares
`Tensor.type()` with CUDA names. Every stand-in here answers one such use.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import resource
import time
import types
from collections.abc import Callable
from typing import Any

import torch

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "linspace",
    "eye", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "as_tensor", "empty_strided", "randperm", "asarray", "scalar_tensor", "tril_indices",
    "triu_indices", "logspace",
)  # fmt: skip
_NEW_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_HOST_BYTES = 1 << 36


class Stream:
    """A stream on which everything has already happened."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class Event:
    """An event that has already happened; remembers when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 * (other.recorded_s - self.recorded_s)


class _Device:
    """`torch.cuda.device(...)` as a context that changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Device:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Generators:
    """`torch.cuda.default_generators[i]` is the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _resident_bytes(*args: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _properties(*args: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=_HOST_BYTES, multi_processor_count=1
    )


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    generator = torch.default_generator
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "init": _nothing,
        "_lazy_init": _nothing,
        "_lazy_call": lambda callback, **kwargs: callback(),
        "current_device": lambda: 0,
        "set_device": _nothing,
        "synchronize": _nothing,
        "current_stream": lambda *a, **k: Stream(),
        "default_stream": lambda *a, **k: Stream(),
        "set_stream": _nothing,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *a: (9, 0),
        "get_device_name": lambda *a: "cpu",
        "get_device_properties": _properties,
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "memory_allocated": _resident_bytes,
        "max_memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_reserved": _resident_bytes,
        "device_memory_used": _resident_bytes,
        "reset_peak_memory_stats": _nothing,
        "memory_stats": lambda *a, **k: collections.defaultdict(int),
        "mem_get_info": lambda *a: (_HOST_BYTES, _HOST_BYTES),
        "check_error": _nothing,
        "cudart": lambda: types.SimpleNamespace(
            cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0
        ),
    }


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: Dynamo refuses one object under two names of torch."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _replace_cuda_module() -> None:
    for name, function in _cuda_functions().items():
        setattr(torch.cuda, name, _own(function))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.Stream, torch.cuda.Event, torch.cuda.device = Stream, Event, _Device  # type: ignore
    torch.cuda.default_generators = _Generators()  # type: ignore[assignment]
    # torch.optim asks the accelerator API whether a graph is being captured.
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda *a, **k: None
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _own(_nothing))
    torch.cuda.nvtx.range = lambda *a, **k: contextlib.nullcontext()  # type: ignore


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory, updated=())
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _replace_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _replace_tensor_methods() -> None:
    tensor, module = torch.Tensor, torch.nn.Module
    to, type_, to_empty = tensor.to, tensor.type, module.to_empty

    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # Megatron's optimizer tells dtypes by 'torch.cuda.FloatTensor'
            return type_(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_(self, dtype, *args, **kwargs)

    def module_to_empty(self: torch.nn.Module, *, device: Any, recurse: bool = True) -> Any:
        return to_empty(self, device="cpu" if _is_cuda(device) else device, recurse=recurse)

    for name in _NEW_METHODS:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    tensor.to, tensor.type = tensor_to, tensor_type  # type: ignore[assignment,method-assign]
    tensor.cuda = lambda self, *a, **k: self  # type: ignore[assignment,method-assign]
    tensor.record_stream = _nothing  # type: ignore[assignment,method-assign]
    tensor.pin_memory = lambda self, *a: self  # type: ignore[assignment,method-assign]
    module.cuda = lambda self, device=None: self  # type: ignore[assignment,method-assign]
    module.to_empty = module_to_empty  # type: ignore[assignment,method-assign]


def _replace_compile() -> None:
    # Megatron's jit_fuser compiles at import, and Dynamo probes CUDA when it seems to be there.
    def compile_nothing(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = compile_nothing  # type: ignore[assignment]


def install() -> None:
    """Puts every stand-in in place, for the life of the process."""
    _replace_cuda_module()
    _replace_factories()
    _replace_tensor_methods()
    _replace_compile()
    # The CPU generator is the tracked one, which Megatron takes for a leak and logs each time.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
