# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""What loading costs: time that steps wait for it, tokens a core serves, memory of every role.

(a) The quickstart's corpus, model and ranks, trained from a store whose every read takes 20 ms.
(b) and (c): 2 servers, a scheduler and 4 to 64 clients, each a process of its own without training,
fetch the same corpus's steps as fast as they can, 12,288 tokens a client and step.

    python scripts/benchmarks/loader.py            # 6 minutes; writes results/loader.json
    python scripts/benchmarks/loader.py --quick    # a rehearsal with tiny sizes; prints only
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import psutil  # noqa: E402
import quickstart  # noqa: E402

from megatron_hdp import cpu  # noqa: E402
from megatron_hdp.cpu.launch import run_ranks  # noqa: E402

RESULT = Path(__file__).parent / "results" / "loader.json"
LATENCY_MS, LOADERS = 20.0, ("local", "ray")
STEPS, WARM_UP = 10, 2
CLIENTS, CLIENT_STEPS, SERVERS, AHEAD = (4, 8, 16, 32, 64), 12, 2, 2
CAPACITY = quickstart.CONTEXT // quickstart.STATIC_CP
PACKS_PER_CLIENT = quickstart.PACKS / quickstart.RANKS
Row = dict[str, Any]


def _spread(values: list[float], digits: int) -> Row:
    return {
        "mean": round(statistics.mean(values), digits),
        "sd": round(statistics.stdev(values), digits) if len(values) > 1 else 0.0,
        "worst": round(max(values), digits),
    }


def train(loader: str, data: list[str], steps: int, folder: Path) -> Row:
    """(a) One run of the quickstart's model; its steps' waits, the slowest rank's of each step."""
    from megatron_hdp.observability.timeline import load_records

    trace = folder / f"trace-{loader}"
    training = quickstart.TRAINING.replace(
        f"--train-iters {quickstart.STEPS}", f"--train-iters {steps}"
    )
    command = [
        sys.executable, "-W", "ignore", "-m", "megatron_hdp.cpu.launch",
        "--nproc", str(quickstart.RANKS), str(ROOT / "scripts" / "benchmarks" / "slow_store.py"),
        *quickstart.MODEL.split(), *training.split(), *data, "--hdp", "--hdp-cpu",
        "--hdp-trace", str(trace), "--hdp-loader", loader,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "HDP_STORE_LATENCY_MS": str(LATENCY_MS)}
    found = subprocess.run(
        command, env=environment, timeout=280, capture_output=True, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(f"training with {loader} failed:\n{found.stdout[-2000:]}{found.stderr}")
    records = [rs for step, rs in sorted(load_records(str(trace)).items()) if step >= WARM_UP]
    step_s = [max(r["end_s"] - r["begin_s"] for r in rs) for rs in records]
    loading = [max(r["exposed_loading_s"] for r in rs) for rs in records]
    planning = [max(r["exposed_planning_s"] for r in rs) for rs in records]
    shares = [100 * wait / whole for wait, whole in zip(loading, step_s, strict=True)]
    return {
        "loader": loader,
        "latency_ms": LATENCY_MS,
        "steps": len(records),
        "step_s": _spread(step_s, 3),
        "exposed_loading_ms": _spread([1000 * wait for wait in loading], 2),
        "exposed_loading_percent": _spread(shares, 3),
        "exposed_planning_ms": _spread([1000 * wait for wait in planning], 2),
        "fetching_behind_training_ms": _spread(
            [1000 * max(r["loaded_s"] for r in rs) for rs in records], 1
        ),
    }


def packs(prefix: str, vocabulary: int, count: int, cache: str) -> Any:
    """`count` packs of the corpus, as `--data-path` would give them."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    from megatron_hdp.data.pack_dataset import DocumentPackDataset, PackDatasetConfig
    from megatron_hdp.data.sources import source_of

    config = PackDatasetConfig(
        random_seed=1234,
        sequence_length=quickstart.CONTEXT,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=NullTokenizer(vocabulary),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [count, None, None]
    return source_of(
        BlendedMegatronDatasetBuilder(DocumentPackDataset, sizes, lambda: True, config).build()[0]
    )


def _memory() -> int:
    return int(psutil.Process().memory_full_info().uss)


def client(source: Any, steps: int) -> Row:
    """(b, c) One rank without training; rank 0 starts the roles and looks at them at the end."""
    from torch.distributed import TCPStore

    from megatron_hdp.data.remote import cluster
    from megatron_hdp.data.remote.client import RayLoader
    from megatron_hdp.data.requests import Steps
    from megatron_hdp.planning import PlannerConfig
    from megatron_hdp.runtime.sharding import MicroBatchLayout
    from megatron_hdp.runtime.step import StreamConfig

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=240))
    before = _memory()
    stream = Steps("train", round(PACKS_PER_CLIENT * count), len(source))
    if rank == 0:
        config = PlannerConfig(num_ranks=count, capacity=CAPACITY, cost_model="cpu-estimate")
        options = cluster.ClusterOptions(None, SERVERS, AHEAD, 120.0)
        known = {"train": cluster.Stream(stream, config)}
        joined, where = cluster.start(options, known, {"train": source})
        store.set("where", where)
    else:
        joined = cluster.join(store.get("where").decode())
    connected = _memory()
    own = StreamConfig("train", 0, rank, 1, 120.0, "", MicroBatchLayout.build)
    loader = RayLoader(
        joined,
        stream,
        source,
        shares_of=lambda plan: own.layouts(plan.micro_batches(rank)),
        number=rank,
        rank=rank,
        depth=AHEAD,
        timeout_s=120.0,
    )
    _meet(store, "connected", count)
    begun, at = joined.roles() if rank == 0 else [], time.perf_counter()
    tokens, most = 0, 0
    for step in range(steps):
        tokens += loader.read(step, ()).tokens
        most = max(most, _memory())
    _meet(store, "read", count)
    seconds = time.perf_counter() - at
    found: Row = {
        "tokens": tokens, "seconds": seconds, "ray_client_bytes": connected - before,
        "bytes": most - before,
    }  # fmt: skip
    if rank == 0:
        found |= _roles(begun, joined.roles())
    _meet(store, "looked", count)
    joined.close()
    return found


def _meet(store: Any, name: str, count: int) -> None:
    """All clients come here before any goes on."""
    if store.add(f"{name}/count", 1) == count:
        store.set(name, "all")
    store.get(name)


def _roles(begun: list[Any], ended: list[Any]) -> Row:
    """What servers, scheduler and Ray's own daemons have used."""
    daemons = psutil.Process(ended[0].pid).parents()[:2]  # raylet, and who started it
    own = {role.pid for role in ended}
    others = [p for p in daemons[1].children(recursive=True) if p.pid not in own]
    started = {role.name: role for role in begun}
    spent = [role.cpu_s - started[role.name].cpu_s for role in ended]
    scheduler, *servers = ended
    return {
        "scheduler_bytes": scheduler.memory_bytes,
        "scheduler_cpu_s": spent[0],
        "server_bytes": [server.memory_bytes for server in servers],
        "servers_cpu_s": sum(spent[1:]),
        "served_tokens": sum(s.tokens - started[s.name].tokens for s in servers),
        "daemon_bytes": sum(p.memory_full_info().uss for p in (daemons[1], *others)),
    }


def serve(source: Any, count: int, steps: int) -> Row:
    """(b, c) `count` clients at once."""
    found = run_ranks(client, count, source, steps, timeout_s=280.0)
    first, mib = found[0], 2.0**20
    tokens = sum(one["tokens"] for one in found)
    clients = [one["bytes"] / mib for one in found]
    return {
        "clients": count,
        "date": datetime.date.today().isoformat(),
        "tokens_per_step": tokens // steps,
        "served_tokens": first["served_tokens"],
        "tokens_per_s_per_server_core": round(first["served_tokens"] / first["servers_cpu_s"]),
        "tokens_per_s": round(tokens / max(one["seconds"] for one in found)),
        "scheduler_ms_per_step": round(1000 * first["scheduler_cpu_s"] / steps, 1),
        "server_mib": [round(size / mib) for size in first["server_bytes"]],
        "scheduler_mib": round(first["scheduler_bytes"] / mib),
        "ray_daemons_mib": round(first["daemon_bytes"] / mib),
        "client_adds_mib": _spread(clients, 1),
        "of_which_ray_mib": round(statistics.mean(o["ray_client_bytes"] for o in found) / mib, 1),
    }


def read_here(source: Any, count: int) -> Row:
    """(b) The local loader's reading, in this thread."""
    from megatron_hdp.data.requests import SEQUENCES_PER_PACK

    begun, tokens = time.process_time(), 0
    for pack in range(count):
        for position, length in enumerate(source.lengths(pack)):
            sequence = pack * SEQUENCES_PER_PACK + position
            tokens += len(source.read_sequence(sequence, 0, int(length)).tokens)
    return {
        "tokens": tokens,
        "tokens_per_s_per_core": round(tokens / (time.process_time() - begun)),
    }


def tiny_corpus(folder: Path) -> list[str]:
    """For the rehearsal."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.RandomState(3)
    builder = IndexedDatasetBuilder(str(folder / "tiny.bin"), dtype=np.int32)
    for length in rng.randint(20, 2000, 100):
        builder.add_item(torch.from_numpy(rng.randint(0, 4095, length)))
        builder.end_document()
    builder.finalize(str(folder / "tiny.idx"))
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "4096"]
    return ["--data-path", str(folder / "tiny"), *tokenizer]


def run(part: str, quick: bool, clients: list[int], folder: Path) -> Row:
    """One of the parts, or `all`."""
    cpu.install()
    import megatron.training  # noqa: F401

    steps, counts = (WARM_UP + 2, [3]) if quick else (STEPS, clients)
    quickstart.OUT.mkdir(parents=True, exist_ok=True)
    data = tiny_corpus(folder) if quick else quickstart.build_corpus()
    result: Row = {}
    if part in ("all", "training"):
        loaders = LOADERS[1:] if quick else LOADERS
        result["training"] = [_shown(train(name, data, steps, folder)) for name in loaders]
    if part in ("all", "serving"):
        packs_needed = round(PACKS_PER_CLIENT * max(counts)) * CLIENT_STEPS
        source = packs(data[1], 4096, packs_needed, str(folder / "cache"))
        result["local_reading"] = _shown(read_here(source, min(packs_needed, 200)))
        each = 3 if quick else CLIENT_STEPS
        result["serving"] = [_shown(serve(source, count, each)) for count in counts]
    return result


def _shown(row: Row) -> Row:
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Runs, prints, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--part", choices=("all", "training", "serving"), default="all")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="of part serving")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hdp-loader-"))
    try:
        found = run(args.part, args.quick, args.clients, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.quick:
        return 0
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    head = {
        "what": "training: exposed loading at the quickstart's size, a store of 20 ms a read; "
        "serving, where it was run: tokens per core of CPU time, memory that no process shares",
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    if "serving" in found:  # row by row, since 64 clients take minutes on a small machine
        rows = {row["clients"]: row for row in (*known.get("serving", ()), *found["serving"])}
        found["serving"] = [rows[count] for count in sorted(rows)]
    RESULT.write_text(json.dumps({**known, **head, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
