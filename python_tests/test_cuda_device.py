"""The ops on a real GPU, where there is one: the whole parity matrix, devices, streams."""

from __future__ import annotations

import re

import pytest
import torch
from cases import EDGES, Case, Span, build, pairwise
from kit import assert_bitwise_equal
from oracle import assert_right, expected
from torch import Tensor

from wim_ext import _native, ops

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or _native.CUDA_STATUS != "loaded",
    reason=f"no GPU, or the CUDA library is {_native.CUDA_STATUS}",
)


def moved(t: Tensor, device: str = "") -> Tensor:
    """On the device, with the same strides and gaps."""
    base = t.new_empty(0).set_(t.untyped_storage()).to(device or DEVICE)
    return base.as_strided(t.shape, t.stride(), t.storage_offset())


def attend(case: Case, device: str = "", num_threads: int | None = None) -> tuple[Tensor, Tensor]:
    inputs = build(case)
    tensors = [moved(t, device) for t in inputs.args[:3]]
    options = {
        name: moved(value, device) if isinstance(value, Tensor) else value
        for name, value in inputs.options.items()
    }
    plan = None
    if num_threads is not None:
        plan = ops.plan_attention(*inputs.tables, **inputs.plan_options, num_threads=num_threads)
    out = moved(inputs.output(), device)
    found = ops.paged_attention(
        *tensors, *inputs.tables, **options, plan=plan, out=out, return_lse=True
    )
    assert found[0].device == tensors[0].device
    return found


@pytest.mark.parametrize("case", [*pairwise(), *EDGES], ids=lambda c: c.name)
def test_matches_the_reference(case: Case) -> None:
    out, lse = attend(case)
    assert_right(expected(case), out.cpu(), lse.cpu())


@pytest.mark.parametrize("num_threads", [1, 33, 528])
def test_any_plan_gives_the_same_bits(num_threads: int) -> None:
    case = Case("device_split", (Span(1, 5000), Span(200, 3000), Span(2, 2050, 1, 2048)))
    for found, want in zip(attend(case, num_threads=num_threads), attend(case), strict=True):
        assert_bitwise_equal(found.cpu(), want.cpu())


def test_cache_ops_equal_those_on_the_cpu() -> None:
    caches = [torch.randn(6, 16, 2, 32).transpose(1, 2).contiguous().transpose(1, 2) for _ in "kv"]
    key, slots = torch.randn(5, 2, 32), torch.tensor([17, 90, -1, 3, 40])
    src, dst = torch.tensor([1, 5]), torch.tensor([0, 4])
    theirs = [moved(t) for t in caches]
    for k, v, new in ((*caches, key), (*theirs, moved(key))):
        ops.append_kv(new, -new, k, v, slots)
        ops.copy_pages([k, v], src, dst)
    for mine, right in zip(theirs, caches, strict=True):
        assert_bitwise_equal(mine.cpu(), right)
    states = [torch.randn(7, 2, 32), torch.randn(2, 7), torch.randn(7, 2, 32), torch.randn(2, 7)]
    states[1][0, :3] = states[3][:, 2] = -torch.inf
    merged = ops.merge_states(*map(moved, states))
    for mine, right in zip(merged, ops.merge_states(*states), strict=True):
        torch.testing.assert_close(mine.cpu(), right)


def test_bc39_devices() -> None:
    key, slots, there = torch.ones(1, 1, 8), torch.tensor([0]), f"{DEVICE}:0"
    k_cache, v_cache = (torch.zeros(2, 4, 1, 8, device=DEVICE) for _ in "kv")
    text = f"key must be on the device of k_cache ({there}), found cpu"
    with pytest.raises(ValueError, match=re.escape(text)):
        ops.append_kv(key, key, k_cache, v_cache, slots)
    on_device = key.to(DEVICE)
    with pytest.raises(ValueError, match=f"slot_mapping must be on the cpu, found {there}"):
        ops.append_kv(on_device, on_device, k_cache, v_cache, slots.to(DEVICE))
    assert not k_cache.any()


def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    case = Case("device_second", (Span(5, 70), Span(1, 900)))
    for found, want in zip(attend(case, "cuda:1"), attend(case, "cuda:0"), strict=True):
        assert_bitwise_equal(found.cpu(), want.cpu())
    assert torch.cuda.current_device() == 0


def test_runs_on_the_current_stream_without_waiting() -> None:
    """Enqueued behind a long sleep on a side stream, the calls return before it ends."""
    key, cache = torch.ones(1, 1, 8, device=DEVICE), torch.zeros(2, 4, 1, 8, device=DEVICE)
    ops.append_kv(key, key, cache, cache.clone(), torch.tensor([0]))  # first-use costs
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for slot in range(1, 8):
            ops.append_kv(key, key, cache, cache.clone(), torch.tensor([slot]))
        assert not stream.query(), "the op waited for the device"
    stream.synchronize()
    assert int(cache.sum()) == 64
