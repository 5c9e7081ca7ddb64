# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The uses that Megatron makes of torch.cuda, each answered by the CPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("megatron_on_cpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 0), "cpu", None])
def test_factories_make_cpu_tensors(device):
    assert torch.zeros(3, device=device).device.type == "cpu"
    assert torch.tensor([1.0], device=device).device.type == "cpu"
    assert torch.empty_like(torch.zeros(2), device=device).device.type == "cpu"
    assert torch.nn.Linear(2, 2, device=device).weight.device.type == "cpu"


def test_meta_device_is_left_alone():
    assert torch.zeros(3, device="meta").device.type == "meta"
    module = torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda")
    assert module.weight.device.type == "cpu"


def test_tensor_methods():
    tensor = torch.arange(4.0)
    assert tensor.cuda() is tensor
    assert tensor.cuda(non_blocking=True).pin_memory() is tensor
    assert tensor.to("cuda", torch.float64).dtype == torch.float64
    assert tensor.to(device="cuda:0") is tensor
    assert tensor.to(torch.bfloat16).device.type == "cpu"
    assert tensor.to(torch.zeros(1, dtype=torch.int64)).dtype == torch.int64
    assert torch.empty(1, pin_memory=True).device.type == "cpu"
    assert tensor.new_empty((2,), device=torch.cuda.current_device()).device.type == "cpu"
    assert tensor.new_zeros(2, device="cuda").device.type == "cpu"


def test_current_device_serves_as_number_and_as_device():
    """Megatron passes it as `device=`, and writes f"cuda:{...}" (training FLOPs)."""
    current = torch.cuda.current_device()
    assert torch.zeros(1, device=current).device.type == "cpu"
    assert torch.zeros(1, device=f"cuda:{current}").device.type == "cpu"
    assert torch.zeros(1, device=torch.device("cuda", current)).device.type == "cpu"


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "Float"), (torch.bfloat16, "BFloat16"), (torch.float16, "Half")],
)
def test_type_is_what_the_optimizer_compares_with(dtype, name):
    tensor = torch.zeros(1, dtype=dtype)
    assert tensor.type() == f"torch.cuda.{name}Tensor"
    assert tensor.type(f"torch.cuda.{name}Tensor").dtype == dtype
    assert torch.zeros(1).type(dtype).dtype == dtype


def test_random_state_is_the_cpu_generator():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    torch.cuda.default_generators[0].manual_seed(7)
    assert torch.equal(torch.rand(4), first)


def test_events_measure_and_streams_are_done():
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        sum(range(100_000))
    end.record(torch.cuda.current_stream())
    assert 0 < begin.elapsed_time(end) < 10_000
    assert torch.cuda.current_stream().query()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


def test_memory_is_this_process():
    assert 50e6 < torch.cuda.memory_allocated() < 1e11
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] >= 0


def test_devices_are_the_local_ranks(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert torch.cuda.device_count() == 3


def test_an_optimizer_steps():
    """torch.optim asks the accelerator whether a CUDA graph is being captured."""
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    assert weight.max() < 1
