# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""Process groups per ring: made together, cached, dropped together, never past the budget."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from megatron_hdp.cpu.launch import run_ranks
from megatron_hdp.planning.values import Ring
from megatron_hdp.runtime.ring_groups import RingGroups, RingGroupsError


def _plan(*rings):
    return SimpleNamespace(num_rings=len(rings), ring=lambda i: Ring(rings[i]))


def _groups(domains, budget, seconds=20.0):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # a rank that has ended breaks the connections of one that is still making them
    return RingGroups(domains, budget=budget, timeout=timedelta(seconds=seconds))


def _sum(group):
    import torch
    import torch.distributed as dist

    mine = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(mine, group=group)
    return int(mine)


def test_every_domain_has_its_own_group_of_a_ring():
    def run():
        groups = _groups(((0, 2), (1, 3)), budget=1)
        groups.prepare(_plan((0, 1), (1, 0)), "step 0 of train")
        first = groups.group((0, 1))
        groups.prepare(_plan((1, 0)), "step 1 of train")
        assert groups.group((1, 0)) is first, "another order of the same ranks is another group"
        return _sum(first)

    assert run_ranks(run, 4, timeout_s=60) == [101, 1010, 101, 1010]


STEPS = [[(0, 1)], [(1, 2)], [(0, 1), (0, 2)], [(0, 1, 2), (0, 1)], [(1, 2), (2, 0)], []]


@pytest.mark.parametrize(("budget", "kept"), [(2, 2), (3, 3), (10, 4)])
def test_the_least_recently_used_goes_and_comes_back(budget, kept):
    def run():
        import torch.distributed as dist

        groups, found = _groups(((0, 1, 2),), budget), []
        for number, rings in enumerate(STEPS):
            groups.prepare(_plan(*rings), f"step {number} of train")
            assert len(groups) <= budget
            found += [_sum(groups.group(r)) for r in rings if dist.get_rank() in r]
        return found, len(groups)

    got = run_ranks(run, 3, timeout_s=60)
    for rank, (sums, count) in enumerate(got):
        rings = [ring for step in STEPS for ring in step if rank in ring]
        assert sums == [sum(10**member for member in ring) for ring in rings]
        assert count == kept


def test_past_the_budget_all_ranks_end_with_the_flag():
    def run():
        groups = _groups(((0, 1, 2),), budget=2)
        with pytest.raises(RingGroupsError) as error:
            groups.prepare(_plan((0, 1), (1, 2), (0, 2)), "step 7 of train")
        return str(error.value)

    (message,) = set(run_ranks(run, 3, timeout_s=60))
    for words in ("step 7 of train", "3 different rings", "--hdp-te-groups 2", "raise it"):
        assert words in message


def test_a_rank_that_never_comes_is_reported():
    def run():
        import time

        import torch.distributed as dist

        groups = _groups(((0, 1),), budget=2, seconds=1.0)
        if dist.get_rank() == 1:
            time.sleep(3)
            return ""
        with pytest.raises(RingGroupsError) as error:
            groups.prepare(_plan((0, 1)), "step 3 of train")
        return str(error.value)

    message = run_ranks(run, 2, timeout_s=60)[0]
    for words in ("0:00:01", "ring (0, 1)", "step 3 of train", "never came"):
        assert words in message
