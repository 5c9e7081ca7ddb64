# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What HDP's adapter and the recorder take for granted, in the source of Transformer Engine.

The meta wheel (about 1 MB of Python) is downloaded, read and never installed: Megatron's import
would break over it on a machine without CUDA.
"""

from __future__ import annotations

import ast
import enum
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from megatron_hdp.planning.values import MicroBatch, Ring, Sequence
from megatron_hdp.runtime.attention import flash_attn
from megatron_hdp.runtime.attention.te_partition import ring_call, te_layout
from tests.transformer_engine import recorder

FOLDER = "transformer_engine/pytorch/attention/dot_product_attention"


@pytest.fixture(scope="module", params=["2.9.0", recorder.TE_VERSION])
def te(request, tmp_path_factory):
    """Module name -> its syntax tree, of the oldest version that is accepted and the newest."""
    folder = tmp_path_factory.mktemp("te")
    wanted = f"transformer-engine=={request.param}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1",
               "--timeout", "20", "--disable-pip-version-check", "-d", str(folder),
               wanted]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"pip cannot download {wanted}: {reason}")
    with zipfile.ZipFile(next(folder.iterdir())) as wheel:
        names = ("dot_product_attention", "context_parallel", "backends")
        trees = {name: ast.parse(wheel.read(f"{FOLDER}/{name}.py")) for name in names}
        constants = ast.parse(wheel.read("transformer_engine/pytorch/constants.py"))
        return trees | {"constants": constants}


def _find(tree, path):
    """The class or function at "A.b"."""
    for name in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        (tree,) = (n for n in tree.body if isinstance(n, kinds) and n.name == name)
    return tree


def _parameters(function):
    """Name -> default as source text, None without one; in order."""
    positional = function.args.args
    defaults = [None] * (len(positional) - len(function.args.defaults)) + function.args.defaults
    named = {a.arg: d and ast.unparse(d) for a, d in zip(positional, defaults, strict=True)}
    keyword_only = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return named | {a.arg: d and ast.unparse(d) for a, d in keyword_only}


def _statements(function):
    """Source of every statement in it, docstrings left out."""
    return {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.stmt)}


@pytest.mark.parametrize("method", ["__init__", "forward", "set_context_parallel_group"])
def test_the_recorder_has_the_real_signature(te, method):
    real = _parameters(_find(te["dot_product_attention"], f"DotProductAttention.{method}"))
    with open(recorder.__file__) as stream:
        ours = _parameters(_find(ast.parse(stream.read()), f"DotProductAttention.{method}"))
    assert set(ours) <= set(real)
    assert {name: real[name] for name, default in ours.items() if default} == {
        name: default for name, default in ours.items() if default
    }
    leading = 5 if method != "__init__" else 3  # what Megatron passes by position
    assert list(real)[:leading] == list(ours)[:leading]


def test_setting_a_group_only_assigns(te, megatron_on_cpu):
    """Changing it for every micro-batch is free, and these are the attributes to put back."""
    from megatron_hdp.runtime import te_core_attention

    function = _find(te["dot_product_attention"], "DotProductAttention.set_context_parallel_group")
    body = [n for n in function.body if not isinstance(n, ast.Assert | ast.Expr)]
    targets = {ast.unparse(node.targets[0]) for node in body}
    assert all(isinstance(node, ast.Assign) for node in body)
    assert targets - {"self.load_balancing_strategy"} == {
        f"self.{name}" for name in te_core_attention._GROUP_ATTRIBUTES
    }


def test_backward_has_the_group_of_its_forward(te):
    ring = _find(te["context_parallel"], "AttnFuncWithCPAndKVP2P")
    assert {f"ctx.{name} = {name}" for name in ("cp_group", "cp_global_ranks", "cp_stream")} <= (
        _statements(_find(ring, "forward"))
    )


def test_lengths_are_global_and_divided_there(te):
    statements = _statements(_find(te["context_parallel"], "AttnFuncWithCPAndKVP2P.forward"))
    assert "max_seqlen_q = max_seqlen_q // cp_size" in statements
    assert "cu_seqlens_q_padded = cu_seqlens_q_padded // cp_size" in statements


def test_peers_are_taken_from_the_ranks_in_group_order(te):
    statements = _statements(_find(te["context_parallel"], "AttnFuncWithCPAndKVP2P.forward"))
    assert "rank = get_distributed_rank(cp_group)" in statements
    assert any(s.startswith("send_dst = cp_global_ranks[(rank + 1) % cp_size") for s in statements)


def test_padded_lengths_are_required_and_their_meaning_can_be_said(te):
    text = ast.unparse(_find(te["context_parallel"], "attn_forward_func_with_cp"))
    assert "cu_seqlens_padded can not be None" in text
    forward = _find(te["dot_product_attention"], "DotProductAttention.forward")
    guesses = [n for n in ast.walk(forward) if isinstance(n, ast.If)
               and ast.unparse(n.test) == "pad_between_seqs is None"]  # fmt: skip
    assert guesses, "pad_between_seqs=False no longer overrides the guess"


def test_windows_and_sinks_do_not_go_with_its_ring(te):
    tests = {ast.unparse(node.test)
             for node in ast.walk(_find(te["context_parallel"], "attn_forward_func_with_cp"))
             if isinstance(node, ast.Assert)}  # fmt: skip
    assert "softmax_type == 'vanilla' or cp_comm_type == 'a2a'" in tests
    assert "not sliding_window_attn or cp_comm_type in ['a2a', 'all_gather']" in tests


def test_batched_transfers_can_be_asked_for(te):
    assert "NVTE_BATCH_MHA_P2P_COMM" in ast.unparse(te["context_parallel"])


def test_flash_attn_is_called_where_it_calls_it(te):
    """The same functions of the flash-attn packages as megatron_hdp's kernels call."""
    imported = {(node.module, alias.name)
                for node in ast.walk(te["backends"]) if isinstance(node, ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    for modules, prefix in (
        ({flash_attn.MODULE_2}, "_flash_attn_varlen"),
        (set(flash_attn.MODULES_3), "_flash_attn"),
    ):
        for name in (f"{prefix}_forward", f"{prefix}_backward"):
            assert any((module, name) in imported for module in modules)


@pytest.mark.parametrize(("size", "lengths"), [(2, [16, 24]), (3, [13, 1, 40]), (4, [1, 9, 31])])
def test_the_partition_is_its_own(te, monkeypatch, size, lengths):
    """Runs Transformer Engine's own function on tokens numbered through the padded pack."""
    names = {"torch": torch, "enum": enum}
    wanted = ("CPLoadBalancingStrategy", "get_batch_on_this_cp_rank")
    nodes = [node for node in (*te["constants"].body, *te["context_parallel"].body)
             if getattr(node, "name", "") in wanted]  # fmt: skip
    exec(compile(ast.Module(nodes, []), "transformer_engine", "exec"), names)
    sequences = tuple(Sequence(i, length) for i, length in enumerate(lengths))
    ranks = tuple(range(size))
    for rank in ranks:
        layout = te_layout(MicroBatch(0, Ring(ranks), sequences, ()), rank)
        call = ring_call(layout, sequences)
        cu = torch.from_numpy(call.cu_seqlens)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group, rank=rank: rank)
        padded = torch.arange(int(cu[-1]))[None]
        theirs = names["get_batch_on_this_cp_rank"](cu, padded, padded, padded)[0][0]
        assert torch.equal(theirs, recorder.rank_indices(cu.diff().tolist(), size, rank))
        assert len(theirs) == call.num_rows
        rows = np.arange(call.num_rows) if call.rows is None else call.rows
        ours = [int(cu[s]) + t for s, start, stop in layout.pieces for t in range(start, stop)]
        assert theirs[rows].tolist() == ours[: layout.ring_tokens]
