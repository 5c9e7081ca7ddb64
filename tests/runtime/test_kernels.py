# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The choice of a kernel, and the calls of those that no CPU can run.

Where a GPU kernel would be, exact attention stands behind the real interface: torch's dispatcher
and op schemas for torch_flash, functions with the published parameters for flash-attn.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Optional

import pytest
import torch

from megatron_hdp.runtime.attention import kernels
from megatron_hdp.runtime.attention.flash_attn import FlashAttn2, FlashAttn3
from megatron_hdp.runtime.attention.reference import Reference
from megatron_hdp.runtime.attention.torch_flash import TorchFlash, active_implementation
from megatron_hdp.runtime.micro_batch import VarlenArguments
from megatron_hdp.testing.attention import worst_ring_error
from megatron_hdp.testing.virtual_ranks import virtual_ring
from tests.runtime.test_ring_attention import _slot, _tensors

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh():
    kernels.select_kernel.cache_clear()
    yield
    kernels.select_kernel.cache_clear()


def _chosen(name="auto", device=CUDA, dtype=torch.bfloat16, head_dim=128):
    return kernels.select_kernel(name, device=device, dtype=dtype, head_dim=head_dim).name


def _ring_error(kernel):
    """The worst of rings with all tokens seen, and with windows."""
    micro_batches = _slot((0, 1, 2), [37, 1], {0: [5, 1], 2: [13]}, 3)
    whole, gradients = _tensors(micro_batches, 4, 2, 8)
    return max(
        worst_ring_error(
            virtual_ring(micro_batches, whole, gradients, kernel, window=window),
            whole, gradients, window=window,
        )
        for window in (None, 3, 9)
    )  # fmt: skip


# What stands behind the interfaces.


def _window(cu_q, cu_k, causal, left, right):
    """None or the left side; FlashAttention's open right side reaches max_k keys, not all."""
    if left in (None, -1):
        assert right in (None, -1)
        return None
    assert right == (0 if causal else -1)
    assert causal or bool((cu_q.diff() <= cu_k.diff()).all()), "first rows would see no key"
    return left


def _exact_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window_left=None, window_right=None
):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert max_q >= int(cu_q.diff().max()), "a longest query that is too small"
    assert max_k >= int(cu_k.diff().max())
    assert max_q > 1, "FlashAttention 2 would take its decoding path"
    assert int(cu_q.diff().min()) > 0, "rows without a key have LSE +inf"
    assert int(cu_k.diff().min()) > 0
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k)), "rows would stay uninitialised"
    window = _window(cu_q, cu_k, causal, window_left, window_right)
    arguments = VarlenArguments(cu_q, cu_k, max_q, max_k, window)
    return Reference().forward(q, k, v, arguments, causal, scale)


def _exact_backward(
    do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale,
    window_left=None, window_right=None,
):  # fmt: skip
    assert lse.is_contiguous()
    assert lse.shape == (q.shape[1], len(q))
    window = _window(cu_q, cu_k, causal, window_left, window_right)
    arguments = VarlenArguments(cu_q, cu_k, max_q, max_k, window)
    return Reference().backward(do, q, k, v, out, lse, arguments, causal, scale)


# torch_flash: torch's ops, through torch's own switch.


def _register_on_cpu():
    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None,
                window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
                block_table=None, num_splits=None):  # fmt: skip
        assert (dropout, debug) == (0.0, False)
        window = (window_size_left, window_size_right)
        out, lse = _exact_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, *window)
        return out, lse, torch.empty(0), torch.empty(0), torch.empty(0)

    def backward(do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *,
                 scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
        window = (window_size_left, window_size_right)
        return _exact_backward(
            do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale, *window
        )

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    return SimpleNamespace(remove=library._destroy)


@pytest.fixture
def switched():
    """torch's ops with exact attention behind them, put there as FA3 and FA4 are."""
    from torch.nn.attention import (
        activate_flash_attention_impl,
        register_flash_attention_impl,
        restore_flash_attention_impl,
    )

    register_flash_attention_impl("EXACT", register_fn=_register_on_cpu)
    activate_flash_attention_impl("EXACT")
    yield
    restore_flash_attention_impl()


def test_torch_flash_through_torchs_switch(switched):
    assert TorchFlash.version() == "EXACT"
    assert _ring_error(TorchFlash()) < 1e-12


def test_what_a_script_switched_on_in_torch_is_preferred(switched, packages):
    assert _chosen() == "torch_flash"
    text = kernels.describe_choice("auto", device=CUDA, dtype=torch.bfloat16, head_dim=128)
    assert text == "torch_flash (EXACT)"


def test_torchs_own_is_called_built_in():
    assert active_implementation() is None
    assert TorchFlash.version() == "built-in"


def test_torch_knows_the_implementations_that_are_offered():
    from torch.nn.attention import list_flash_attention_impls

    names = {kernels._load(name).implementation for name in ("torch_flash_fa3", "torch_flash_fa4")}
    assert names <= set(list_flash_attention_impls())


# flash-attn: functions with the parameters of flash-attn 2.8.3 and of FlashAttention 3 at 3.0.0b1
# and at its newest; in a name, ! marks a parameter without a default.

FORWARD_2 = """q! k! v! cu_seqlens_q! cu_seqlens_k! max_seqlen_q! max_seqlen_k! dropout_p!
    softmax_scale! causal! window_size_left window_size_right softcap alibi_slopes return_softmax
    block_table leftpad_k seqused_k zero_tensors"""
BACKWARD_2 = """dout! q! k! v! out! softmax_lse! dq! dk! dv! cu_seqlens_q! cu_seqlens_k!
    max_seqlen_q! max_seqlen_k! dropout_p! softmax_scale! causal! window_size_left!
    window_size_right! softcap! alibi_slopes! deterministic! rng_state zero_tensors"""
FORWARD_3_BETA = """q! k! v! k_new! v_new! qv! out! cu_seqlens_q! cu_seqlens_k! cu_seqlens_k_new!
    seqused_q! seqused_k! max_seqlen_q! max_seqlen_k! page_table! kv_batch_idx! leftpad_k!
    rotary_cos! rotary_sin! seqlens_rotary! q_descale! k_descale! v_descale! softmax_scale! causal!
    window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa
    sm_margin"""
BACKWARD_3_BETA = """dout! q! k! v! out! softmax_lse! cu_seqlens_q! cu_seqlens_k! sequed_q!
    sequed_k!
    max_seqlen_q! max_seqlen_k! dq! dk! dv! softmax_scale! causal! window_size softcap deterministic
    sm_margin"""
FORWARD_3 = """q! k! v! k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q
    seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin
    seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left
    window_size_right attention_chunk softcap rotary_interleaved scheduler_metadata num_splits
    pack_gqa sm_margin"""
BACKWARD_3 = """dout! q! k! v! out! softmax_lse! cu_seqlens_q cu_seqlens_k sequed_q sequed_k
    max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right
    softcap deterministic sm_margin"""


def _function(parameters, body):
    """A function that takes exactly `parameters` and gives `body` what it was passed."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([
        inspect.Parameter(name.rstrip("!"), kind)
        if name.endswith("!") else inspect.Parameter(name, kind, default=None)
        for name in parameters.split()
    ])  # fmt: skip

    def function(*args, **kwargs):
        return body(SimpleNamespace(**signature.bind(*args, **kwargs).arguments))

    function.__signature__ = signature
    return function


def _sides(x):
    """The window under either name."""
    if hasattr(x, "window_size"):
        return x.window_size or (None, None)
    return getattr(x, "window_size_left", None), getattr(x, "window_size_right", None)


def _flash_forward(x):
    out, lse = _exact_forward(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, max(x.max_seqlen_q, 2),
                              x.max_seqlen_k, x.causal, x.softmax_scale, *_sides(x))  # fmt: skip
    return out, lse, torch.empty(0), torch.empty(0)


seen_deterministic = []


def _flash_backward(x):
    seen_deterministic.append(x.deterministic)
    causal = x.causal if hasattr(x, "causal") else x.is_causal
    found = _exact_backward(
        x.dout, x.q, x.k, x.v, x.out, x.softmax_lse, x.cu_seqlens_q, x.cu_seqlens_k,
        x.max_seqlen_q, x.max_seqlen_k, causal, x.softmax_scale, *_sides(x),
    )  # fmt: skip
    for place, value in zip((x.dq, x.dk, x.dv), found, strict=True):
        place.copy_(value)
    return torch.empty(0)


@pytest.fixture
def packages(monkeypatch):
    """flash-attn 2 and 3, installed on a machine of compute capability 9."""

    def install(name, prefix, forward, backward):
        *parents, _ = name.split(".")
        for parent in parents:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        setattr(module, f"{prefix}_forward", _function(forward, _flash_forward))
        setattr(module, f"{prefix}_backward", _function(backward, _flash_backward))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install("flash_attn.flash_attn_interface", "_flash_attn_varlen", FORWARD_2, BACKWARD_2)
    install("flash_attn_interface", "_flash_attn", FORWARD_3, BACKWARD_3)
    return install


def test_flash_attn_2(packages):
    assert FlashAttn2.refusal(CUDA, torch.bfloat16, 64) is None
    assert _ring_error(FlashAttn2()) < 1e-12


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("flash_attn_interface", FORWARD_3, BACKWARD_3),
        ("flash_attn_interface", FORWARD_3_BETA, BACKWARD_3_BETA),
        ("flash_attn_3.flash_attn_interface", FORWARD_3_BETA, BACKWARD_3_BETA),
    ],
)
def test_flash_attn_3(packages, monkeypatch, name, forward, backward):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # not importable
    packages(name, "_flash_attn", forward, backward)
    assert FlashAttn3.refusal(CUDA, torch.bfloat16, 64) is None
    assert _ring_error(FlashAttn3()) < 1e-12


def test_a_torch_custom_op_takes_the_keywords_too(packages, monkeypatch):
    """flash-attn wraps its functions so; the wrapper hides the signature."""
    tensor, optional = torch.Tensor, Optional[torch.Tensor]  # noqa: UP045
    kinds = dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "window_size_left", "window_size_right"),
                          int)  # fmt: skip
    kinds |= {"dropout_p": float, "softmax_scale": float, "softcap": float, "causal": bool,
              "deterministic": bool, "alibi_slopes": optional}  # fmt: skip
    plain = _function(BACKWARD_2.split(" rng_state")[0], _flash_backward)
    parameters = [
        parameter.replace(annotation=kinds.get(name, tensor))
        for name, parameter in inspect.signature(plain).parameters.items()
    ]
    plain.__signature__ = inspect.Signature(parameters, return_annotation=tensor)
    wrapped = torch.library.custom_op(
        "hdp_test::varlen_backward", mutates_args=("dq", "dk", "dv"), device_types="cpu"
    )(plain)
    monkeypatch.setattr(
        sys.modules["flash_attn.flash_attn_interface"], "_flash_attn_varlen_backward", wrapped
    )
    assert FlashAttn2.refusal(CUDA, torch.bfloat16, 64) is None
    assert _ring_error(FlashAttn2()) < 1e-12


def test_deterministic_mode_reaches_backward(packages):
    torch.use_deterministic_algorithms(True)
    try:
        seen_deterministic.clear()
        _ring_error(FlashAttn2())
        _ring_error(FlashAttn3())
        assert "not deterministic for head dims above 192" in FlashAttn3.refusal(
            CUDA, torch.bfloat16, 256
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(seen_deterministic) == {True}


def test_a_build_without_windows_is_refused_for_them_alone(packages):
    forward, backward = (
        " ".join(word for word in names.split() if not word.startswith("window_size"))
        for names in (FORWARD_3, BACKWARD_3)
    )
    packages("flash_attn_interface", "_flash_attn", forward, backward)
    assert _chosen() == "flash_attn_3"
    options = {"device": CUDA, "dtype": torch.bfloat16, "head_dim": 128, "windowed": True}
    assert kernels.select_kernel("auto", **options).name == "torch_flash"
    assert "take no window_size" in kernels.choice_refusal("flash_attn_3", **options)


def test_an_old_package_is_named(packages):
    old = FORWARD_2.replace("window_size_left window_size_right", "window_size")
    packages("flash_attn.flash_attn_interface", "_flash_attn_varlen", old, BACKWARD_2)
    reason = FlashAttn2.refusal(CUDA, torch.bfloat16, 64)
    assert "lack window_size_left, window_size_right: install flash-attn 2.7" in reason


def test_a_package_that_does_not_import_is_told_from_a_missing_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "is not installed" in FlashAttn2.refusal(CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(OSError("undefined symbol: _ZN3c10")),
    )
    reason = FlashAttn2.refusal(CUDA, torch.bfloat16, 64)
    assert "does not import (undefined symbol" in reason


# The choice.


def test_auto_on_a_cpu():
    choose = functools.partial(_chosen, device=torch.device("cpu"))
    assert choose() == "cpu_flash"
    assert choose("reference", dtype=torch.float64) == "reference"


def test_auto_on_cuda(packages, monkeypatch):
    assert _chosen() == "flash_attn_3"
    assert _chosen("flash_attn") == "flash_attn_3"
    assert _chosen(dtype=torch.float32) == "reference"
    assert _chosen(head_dim=13) == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    kernels.select_kernel.cache_clear()
    assert _chosen() == "torch_flash"
    assert _chosen("flash_attn") == "flash_attn_2"
    monkeypatch.setattr(TorchFlash, "refusal", classmethod(lambda *args: "built without it"))
    kernels.select_kernel.cache_clear()
    assert _chosen() == "flash_attn_2"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flash", ["--hdp-attention flash is not known", "flash_attn_3", "transformer_engine"]),
        ("transformer_engine", ["transformer_engine", "it needs a CUDA device", "use auto"]),
        ("flash_attn", ["flash_attn_3: it needs a CUDA device; flash_attn_2: it", "use auto"]),
        ("torch_flash_fa3", ["--hdp-attention torch_flash_fa3", "it needs a CUDA device"]),
    ],
)
def test_what_cannot_be_had_is_one_sentence(name, words, megatron_on_cpu):
    found = kernels.choice_refusal(
        name, device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=64
    )
    for word in words:
        assert word in found


def test_doctor_lists_every_choice(megatron_on_cpu):
    rows = {row["name"]: row for row in kernels.describe_kernels()}
    assert set(rows) == set(kernels.CHOICES) - {"auto", "flash_attn"}
    assert {name for name, row in rows.items() if row["usable"]} == {"cpu_flash", "reference"}
    assert rows["torch_flash"]["version"] == "built-in"
