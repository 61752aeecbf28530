"""What is special about the AMX kernels: the permission they need, the tiles they leave."""

import pytest
import torch
from kit import run_python

from wim_ext import ops

# A seccomp filter of this process that answers EPERM to arch_prctl(ARCH_REQ_XCOMP_PERM, ...) only.
REFUSE = """
import ctypes, struct
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSED = 0x7FFF0000, 0x00050001
code = [
    (LOAD, 0, 0, 0), (EQUAL, 0, 3, 158),  # the system call's number
    (LOAD, 0, 0, 16), (EQUAL, 0, 1, 0x1023),  # its first argument
    (RETURN, 0, 0, REFUSED), (RETURN, 0, 0, ALLOW),
]
text = b"".join(struct.pack("<HBBI", *line) for line in code)
buffer = ctypes.create_string_buffer(text, len(text))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
"""
TELL = """
from wim_ext import ops
built, available, used, why = ops.cpu_kernels()
print(used, "amx" in available, why, sep="|")
"""
HALVES = """
import sys, threading, torch
from wim_ext import ops
assert ops.cpu_kernels()[2] == "amx"
torch.manual_seed(0)
left, right = (torch.randn(256, 256).bfloat16() for _ in range(2))
before = left @ right  # oneDNN's own tiles
def attend():
    q = torch.randn(70, 4, 64).bfloat16()
    pages = torch.randn(2, 2, 2, 64, 64).bfloat16()
    k, v = (p.transpose(1, 2) for p in pages)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    ops.paged_attention(q, k, v, table, torch.tensor([0, 70], dtype=torch.int32),
                        torch.tensor([100], dtype=torch.int32))
thread = threading.Thread(target=attend)
thread.start(); thread.join()
attend()
assert torch.equal(left @ right, before)
"""

needs_amx = pytest.mark.skipif(
    "amx" not in ops.cpu_kernels()[1], reason="needs a CPU with AMX and the right to use it"
)


@needs_amx
def test_a_refused_permission_is_told_and_the_next_best_is_used():
    done = run_python(REFUSE + TELL)
    assert done.returncode == 0, done.stderr
    used, available, why = done.stdout.strip().split("|")
    assert (used, available) == ("avx512", "False")
    assert "refused the use of AMX tiles (arch_prctl: Operation not permitted)" in why


@needs_amx
def test_forcing_amx_without_permission_is_an_error():
    done = run_python(
        REFUSE + "from wim_ext import ops\nops.cpu_kernels()", env={"WIM_CPU_ISA": "amx"}
    )
    assert "WIM_CPU_ISA=amx is not supported by this CPU" in done.stderr


@needs_amx
def test_tiles_are_left_as_other_libraries_expect_them():
    done = run_python(HALVES, env={"WIM_CPU_ISA": "amx"})
    assert done.returncode == 0, done.stderr


@needs_amx
@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 70])
def test_rows_of_every_tile_shape(head_dim, rows):
    """Every number of rows that a tile can be set to, against float64."""
    keys = 150
    generator = torch.Generator().manual_seed(rows * 1000 + head_dim)
    q, k, v = (
        torch.randn(n, 1, head_dim, generator=generator).bfloat16() for n in (rows, keys, keys)
    )
    pages = torch.full((2, 4, 64, 1, head_dim), float("nan"), dtype=torch.bfloat16)
    for cache, values in zip(pages, (k, v), strict=True):
        cache[1:].flatten(0, 1)[:keys] = values
    cu = torch.tensor([0, rows], dtype=torch.int32)
    out, lse = ops.paged_attention(
        q,
        pages[0],
        pages[1],
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        cu,
        torch.tensor([keys], dtype=torch.int32),
        return_lse=True,
    )
    scores = (q[:, 0].double() @ k[:, 0].double().T) * head_dim**-0.5
    hidden = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
    scores.masked_fill_(hidden, float("-inf"))
    exact = scores.softmax(-1) @ v[:, 0].double()
    assert (out[:, 0].double() - exact).abs().max() <= 2.0 * 2**-9 * exact.abs().max() + 2**-8
    torch.testing.assert_close(lse.flatten().double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
