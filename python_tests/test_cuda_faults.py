"""Planted faults: what the tests of the CUDA kernels are worth. Each is one edit of csrc/cuda that
the same checks as in test_cuda_attention.py and test_cuda_cache_ops.py must reject."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import Case, Inputs, Span, build
from cuda_shim.emulated import CSRC, EmulatedOps, compile_shim
from kit import assert_bitwise_equal
from oracle import assert_right, expected
from test_cuda_attention import SPLIT, attend

from wim_ext import reference

pytestmark = [
    pytest.mark.slow,  # twenty compilations
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the shim"),
]


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    right: str
    wrong: str


FAULTS = [
    Fault("cells begin elsewhere", "attention.cuh", "(low / kCellKeys + 1)",
          "(low / kCellKeys + 2)"),
    Fault("one key too many", "attention.cuh", "key < high; ++key", "key <= high; ++key"),
    Fault("fold forgets a scale", "attention.cuh", "+ b.sum * scale_b", "+ b.sum"),
    Fault("no pivot", "attention.cuh", "largest == -INFINITY ? 0.0f : largest;", "largest;"),
    Fault("no rescaling", "attention.cuh", "state->out[i] *= scale;", "state->out[i] *= 1.0f;"),
    Fault("V's stride", "attention.cuh", "v[i * v_stride]", "v[i * (v_stride > 0)]"),
    Fault("heads interleaved", "attention.cuh", "(params.k_cache.data) + kv_head",
          "(params.k_cache.data) + (head % params.k_cache.heads)"),
    Fault("ALiBi is signed", "attention.cuh", "fabsf(position", "(position"),
    Fault("softcap before the scale", "attention.cuh", "tanhf(score / params.softcap)",
          "tanhf(score)"),
    Fault("sink without its logit", "attention.cuh", "sink.largest = params.sinks[head]",
          "sink.largest = 0.0f"),
    Fault("v_scale forgotten", "attention.cuh", "/ state.sum * v_scale",
          "/ state.sum * (v_scale > 0.0f)"),
    Fault("combine skips a partial", "attention.cuh", "combine.slot_begin + 1;",
          "combine.slot_begin + 2;"),
    Fault("32-bit pages", "attention.cuh", "k + page * params.k_cache.page_stride",
          "k + static_cast<int32_t>(page * params.k_cache.page_stride)"),
    Fault("a grid that must be large", "attention.cuh", "index += index_stride()",
          "index += count"),
    Fault("a row left out", "attention.cu", "plan.get(PlanField::max_item_rows)",
          "plan.get(PlanField::max_item_rows) - 1"),
    Fault("lse before out", "cache_ops.cu", "with_element(params.dtype,",
          'launch(context, "", states, merge_lse_kernel, params);\n  with_element(params.dtype,'),
    Fault("empty state counts", "cache_ops.cuh", "? at(params.out_a) : at(params.out_b)",
          "? at(params.out_b) : at(params.out_a)"),
    Fault("page offsets", "cache_ops.cuh", "number /= shape.sizes[d]", "number /= shape.sizes[0]"),
    Fault("slots are pages", "cache_ops.cuh", "slot / cache.page_size", "slot"),
    Fault("widened too far", "cache_ops.cu", "shape->page_stride % 2 == 0", "true"),
]  # fmt: skip

ALL_OPTIONS = Case(
    "faults_all_options", (Span(9, 40), Span(1, 7)), torch.float32, 6, 2, 24, 16, 8,
    "v_transposed", causal=False, window_size=(20, 4), softcap=3.0, alibi="heads", sinks=True,
    scales="heads", sharpness=2.0,
)  # fmt: skip


def judge(cuda: EmulatedOps, folder: Path) -> None:
    """Raises AssertionError unless everything is right."""
    for case in (ALL_OPTIONS, SPLIT):
        assert_right(expected(case), *attend(cuda, build(case)))
    judge_bits(cuda)
    judge_infinities(cuda)
    judge_far_pages(cuda, folder)
    judge_merging(cuda)
    judge_pages(cuda)


def judge_bits(cuda: EmulatedOps) -> None:
    inputs = build(SPLIT)
    want = attend(cuda, inputs, num_threads=1)[0]
    assert_bitwise_equal(attend(cuda, inputs, num_threads=64)[0], want)
    cuda.order(last_thread_first=True, largest_grid=3)
    try:
        assert_bitwise_equal(attend(cuda, inputs)[0], want)
    finally:
        cuda.order()


def judge_infinities(cuda: EmulatedOps) -> None:
    inputs = build(Case("faults_infinity", (Span(1, 3),), head_dim=8, v_head_dim=8))
    inputs.query[..., 0] = 1.0
    inputs.k_cache[int(inputs.block_table[0, 0]), 0, :, 0] = -torch.inf
    assert attend(cuda, inputs)[0].isfinite().all()


def judge_far_pages(cuda: EmulatedOps, folder: Path) -> None:
    stride = 2**32 + 8
    path = str(folder / "sparse")
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=2 * (stride + 64))
    flat = torch.empty(0, dtype=torch.bfloat16).set_(storage)
    cache = flat.as_strided((2, 4, 1, 8), (stride, 8, 8, 1))
    key = torch.randn(4, 1, 8).bfloat16()
    for page in (0, 1):  # page 1 wrapped to 32 bits is page 0, eight elements on
        slots = torch.arange(4 * page, 4 * page + 4)
        reference.append_kv(key * (page + 1), key * (page + 1), cache, cache, slots)
    inputs = build(Case("faults_far", (Span(2, 4),), torch.bfloat16, 1, 1, 8, 8, 4))
    inputs.block_table[0, 0] = 1
    far = Inputs(**{**vars(inputs), "k_cache": cache, "v_cache": cache})
    near = Inputs(**{**vars(inputs), "k_cache": cache[1:], "v_cache": cache[1:],
                     "block_table": torch.zeros_like(inputs.block_table)})  # fmt: skip
    assert_bitwise_equal(attend(cuda, far)[0], attend(cuda, near)[0])


def judge_merging(cuda: EmulatedOps) -> None:
    args = [torch.randn(5, 2, 8), torch.randn(2, 5), torch.randn(5, 2, 8), torch.randn(2, 5)]
    args[1][0, 1] = args[3][1, 3] = -torch.inf
    want, want_lse = reference.merge_states(*args)
    out, lse = cuda.merge_states(*args, lse=args[1])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def judge_pages(cuda: EmulatedOps) -> None:
    src, dst = torch.tensor([3]), torch.tensor([1])
    for shape, part in (((4, 5, 9), (..., slice(3), slice(4))), ((4, 45), (..., slice(4)))):
        ours, theirs = (torch.arange(180.0).reshape(shape)[part] for _ in range(2))
        cuda.copy_pages([ours], src, dst)
        reference.copy_pages([theirs], src, dst)
        assert_bitwise_equal(ours.contiguous(), theirs.contiguous())
    ours, theirs = (torch.zeros(3, 4, 1, 8) for _ in range(2))
    key, slots = torch.randn(2, 1, 8), torch.tensor([2, 1])
    cuda.append_kv(key, key, ours, ours.clone(), slots)
    reference.append_kv(key, key, theirs, theirs.clone(), slots)
    assert_bitwise_equal(ours, theirs)


def planted(fault: Fault | None, folder: Path) -> EmulatedOps:
    """The kernels with one fault in a copy of the sources."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    if fault is not None:
        path = csrc / "cuda" / fault.file
        source = path.read_text()
        assert source.count(fault.right) == 1, f"{fault.file} has no single {fault.right!r}"
        path.write_text(source.replace(fault.right, fault.wrong))
    return EmulatedOps(compile_shim(csrc, folder / "emulated.so"))


def test_the_kernels_as_they_are_pass(tmp_path: Path) -> None:
    judge(EmulatedOps(), tmp_path)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_is_caught(fault: Fault, tmp_path: Path) -> None:
    cuda = planted(fault, tmp_path)
    with pytest.raises(AssertionError):
        judge(cuda, tmp_path)
