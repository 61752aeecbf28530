"""The one list of attention cases that all tests share.

`pairwise()` is a covering array: every pair of values of any two axes occurs in some case. `EDGES`
adds shapes that no axis spans. `build` makes the tensors of a case: a pool whose pages are
shuffled, sequences that share pages as forks do, NaN in every slot that no sequence may see, and
nonsense in every table entry that none uses.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from covering import covering_array
from kit import LAYOUTS, ROW_LAYOUTS, rows_like
from torch import Tensor

from wim_ext.reference import visible_range


@dataclass(frozen=True)
class Span:
    """One sequence of a batch: `q` query rows, `kv` keys, the first `shared` of them those of
    sequence `parent` of the batch. `stale` slots after its end hold what a rollback left there."""

    q: int
    kv: int
    parent: int = -1
    shared: int = 0
    stale: int = 0


def _staircase() -> tuple[Span, ...]:
    """A trunk chunk, and branches forked at several offsets of one page, as WiM makes them."""
    trunk = Span(48, 240)
    tails = [(193, 1, 1), (195, 4, 4), (199, 1, 9), (200, 17, 17), (207, 2, 3), (208, 1, 1)]
    branches = [Span(q, fork + tail, 0, fork) for fork, q, tail in tails]
    # Forked without a token of their own: their last page is the trunk's, with more tokens in it.
    watching = [Span(1, 201, 0, 201), Span(3, 222, 0, 222)]
    return (trunk, *branches, *watching)


PROFILES: dict[str, tuple[Span, ...]] = {
    "decode_first": (Span(1, 1),),
    "decode_short": (Span(1, 7), Span(1, 2), Span(1, 31)),
    "decode_page_edge": (Span(1, 63), Span(1, 64), Span(1, 65)),
    "decode_long": (Span(1, 7812),),
    "decode_longest": (Span(1, 16384),),
    "chunk_whole": (Span(17, 17),),
    "chunk_warm": (Span(64, 128),),
    "chunk_odd": (Span(113, 203),),
    "chunk_offset_one": (Span(239, 240),),
    "chunk_large": (Span(512, 4096),),
    "rows_above_keys": (Span(65, 16),),
    "mixed": (Span(292, 956), Span(1, 834), Span(98, 1145), Span(1, 2162)),
    "with_empties": (Span(0, 0), Span(5, 5), Span(0, 77), Span(1, 0), Span(3, 40)),
    "staircase": _staircase(),
    "refilled": (Span(9, 70, stale=57), Span(1, 33, stale=15), Span(4, 41, 0, 37, stale=20)),
    "same_prefix": (Span(6, 136), *(Span(q, 130 + q, 0, 130) for q in (1, 1, 3))),
}

MASKS: dict[str, tuple[bool, tuple[int, int]]] = {
    "causal": (True, (-1, -1)),
    "full": (False, (-1, -1)),
    "causal_self": (True, (0, -1)),
    "causal_left37": (True, (37, -1)),
    "causal_left300": (True, (300, 4)),
    "full_band": (False, (13, 5)),
    "full_right0": (False, (-1, 0)),
    "full_left64": (False, (64, -1)),
}

OTHER_V_DIM = {32: 64, 64: 32, 80: 96, 96: 80, 128: 64, 192: 128, 256: 192}

AXES: dict[str, tuple[Any, ...]] = {
    "profile": tuple(PROFILES),
    "heads": ((1, 1), (3, 3), (4, 2), (9, 3), (8, 2), (10, 2), (7, 1), (16, 2), (16, 1), (24, 1)),
    "page_size": (1, 16, 32, 48, 64, 128, 192, 256),
    "mask": tuple(MASKS),
    "head_dim": tuple(OTHER_V_DIM),
    "layout": tuple(LAYOUTS),
    "rows": ROW_LAYOUTS,
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "softcap": (0.0, 3.0, 30.0),
    "alibi": ("none", "heads", "batch"),
    "scales": ("none", "one", "heads"),
    "v_dim": ("same", "other"),
    "sinks": (False, True),
    "sharpness": (1.0, 4.0),
}  # fmt: skip

MAX_FLOPS = 2_500_000_000  # of a case that the covering arrays may contain

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Case:
    name: str
    spans: tuple[Span, ...]
    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    page_size: int = 16
    layout: str = "nhd"
    rows: str = "contiguous"
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = "none"
    sinks: bool = False
    scales: str = "none"
    sharpness: float = 1.0  # times 1 / sqrt(head_dim); 1 leaves softmax_scale at its default

    @property
    def flops(self) -> int:
        pairs = sum(s.q * s.kv for s in self.spans)
        return 2 * pairs * self.num_heads * (self.head_dim + self.v_head_dim)


@dataclass
class Inputs:
    """The tensors of a case, ready for `paged_attention(*inputs.args, **inputs.options)`."""

    case: Case
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    options: dict[str, Any]
    used: Tensor = field(repr=False)  # [num_pages, page_size], slots that some sequence holds

    @property
    def args(self) -> tuple[Tensor, ...]:
        return (self.query, self.k_cache, self.v_cache, *self.tables)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.block_table, self.cu_seqlens_q, self.seqused_k

    @property
    def plan_options(self) -> dict[str, Any]:
        c = self.case
        return {
            "num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "page_size": c.page_size,
            "causal": c.causal, "window_size": c.window_size,
        }  # fmt: skip

    @property
    def keys_seen(self) -> Tensor:
        """How many keys each row sees: [total_q]."""
        c = self.case
        ranges = [visible_range(s.q, s.kv, c.causal, c.window_size) for s in c.spans]
        return torch.cat([torch.zeros(0), *((e - f).clamp(min=0) for f, e in ranges)]).long()

    def poison(self, value: float) -> None:
        """Fill every slot that no sequence may see."""
        for cache in (self.k_cache, self.v_cache):
            cache.masked_fill_(~self.used[:, :, None, None], value)

    def output(self) -> Tensor:
        """An `out` of this case's row layout."""
        c = self.case
        return rows_like(c.rows, len(self.query), c.num_heads, c.v_head_dim, c.dtype)


def build(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tables, num_pages = _page_tables(case, generator)
    sizes = (num_pages, case.page_size, case.num_kv_heads, case.head_dim, case.v_head_dim)
    k_cache, v_cache = LAYOUTS[case.layout](*sizes, case.dtype)
    used = torch.zeros(num_pages, case.page_size, dtype=torch.bool)
    for span, pages in zip(case.spans, tables, strict=True):
        own = torch.arange(span.shared, span.kv + span.stale)
        own = own[own < len(pages) * case.page_size]
        page = torch.tensor(pages, dtype=torch.long)[own // case.page_size]
        offset = own % case.page_size
        k_cache[page, offset] = normal(len(own), *sizes[2:4]).to(case.dtype)
        v_cache[page, offset] = normal(len(own), case.num_kv_heads, case.v_head_dim).to(case.dtype)
        used[page[own < span.kv], offset[own < span.kv]] = True
        if span.shared % case.page_size and span.kv > span.shared:  # the copy that a fork made
            last, size = divmod(span.shared, case.page_size)
            source, copy = tables[span.parent][last], pages[last]
            k_cache[copy, :size] = k_cache[source, :size]
            v_cache[copy, :size] = v_cache[source, :size]
            used[copy, :size] = True

    starts = [0, *itertools.accumulate(s.q for s in case.spans)]
    query = rows_like(case.rows, starts[-1], case.num_heads, case.head_dim, case.dtype)
    query.copy_(normal(*query.shape))
    return Inputs(
        case, query, k_cache, v_cache, _block_table(tables, generator),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([s.kv for s in case.spans], dtype=torch.int32),
        _options(case, generator), used,
    )  # fmt: skip


def _page_tables(case: Case, generator: torch.Generator) -> tuple[list[list[int]], int]:
    """Page ids of each sequence, in an order that no kernel can guess, and the size of the pool."""
    tables: list[list[int]] = []
    taken = 0
    for span in case.spans:
        # A fork shares whole pages, and the half page at its end until it writes to it.
        writes = span.kv > span.shared
        keeps = span.shared // case.page_size if writes else -(-span.shared // case.page_size)
        needs = -(-span.kv // case.page_size)
        own = list(range(taken, taken + needs - keeps))
        taken += len(own)
        tables.append((tables[span.parent][:keeps] if keeps else []) + own)
    num_pages = taken + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    return [[order[page] for page in pages] for pages in tables], num_pages


def _block_table(tables: list[list[int]], generator: torch.Generator) -> Tensor:
    """Unused entries hold what a kernel must never follow."""
    nonsense = torch.tensor([-1, -(2**31), 2**31 - 1, 2147480000, -123456], dtype=torch.int32)
    width = max(map(len, tables), default=0) + 2
    picks = torch.randint(len(nonsense), (len(tables), width), generator=generator)
    table = nonsense[picks]
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return table


def _options(case: Case, generator: torch.Generator) -> dict[str, Any]:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    options: dict[str, Any] = {"causal": case.causal, "window_size": case.window_size}
    if case.sharpness != 1.0:
        options["softmax_scale"] = case.sharpness * case.head_dim**-0.5
    if case.softcap:
        options["softcap"] = case.softcap
    if case.alibi != "none":
        batch = [len(case.spans)] if case.alibi == "batch" else []
        options["alibi_slopes"] = uniform(0.0, 0.5, *batch, case.num_heads)
    if case.sinks:
        options["sinks"] = uniform(-2.0, 4.0, case.num_heads)
    if case.scales != "none":
        size = 1 if case.scales == "one" else case.num_kv_heads
        options["k_scale"] = uniform(0.3, 1.5, size)
        options["v_scale"] = uniform(0.3, 1.5, size)
    return options


@functools.cache
def pairwise() -> tuple[Case, ...]:
    return tuple(map(_case, covering_array(AXES, 2, _is_cheap)))


@functools.cache
def triplewise() -> tuple[Case, ...]:
    return tuple(map(_case, covering_array(AXES, 3, _is_cheap)))


def _is_cheap(values: Mapping[str, Any]) -> bool:
    """A pair's worth lies in the pair, not in how long it takes: dear combinations are left out."""
    return _cheapest(values) <= MAX_FLOPS


def _cheapest(values: Mapping[str, Any]) -> int:
    """FLOPs of the cheapest case with these values."""
    spans = PROFILES[values.get("profile", "decode_first")]
    num_heads: int = values.get("heads", (1, 1))[0]
    head_dim: int = values.get("head_dim", 32)
    v_head_dim = OTHER_V_DIM[head_dim] if values.get("v_dim") == "other" else head_dim
    return 2 * sum(s.q * s.kv for s in spans) * num_heads * (head_dim + v_head_dim)


def _case(values: dict[str, Any]) -> Case:
    num_heads, num_kv_heads = values["heads"]
    causal, window = MASKS[values["mask"]]
    v_dim = OTHER_V_DIM[values["head_dim"]] if values["v_dim"] == "other" else values["head_dim"]
    name = "-".join(
        [
            values["profile"], DTYPE_NAMES[values["dtype"]], f"h{num_heads}x{num_kv_heads}",
            f"d{values['head_dim']}v{v_dim}", f"p{values['page_size']}", values["layout"],
            values["rows"], values["mask"], *(f"cap{c:g}" for c in [values["softcap"]] if c),
            *(f"alibi_{a}" for a in [values["alibi"]] if a != "none"),
            *(["sinks"] if values["sinks"] else []),
            *(f"scale_{s}" for s in [values["scales"]] if s != "none"),
            *(["sharp"] if values["sharpness"] != 1 else []),
        ]
    )  # fmt: skip
    return Case(
        name, PROFILES[values["profile"]], values["dtype"], num_heads, num_kv_heads,
        values["head_dim"], v_dim, values["page_size"], values["layout"], values["rows"],
        causal, window, values["softcap"], values["alibi"], values["sinks"], values["scales"],
        values["sharpness"],
    )  # fmt: skip


def _edges() -> tuple[Case, ...]:
    """Shapes outside the axes: every head dim, big groups, one-key windows, extreme options."""
    f32, bf16, f16 = DTYPE_NAMES
    warm, few = (Span(17, 70), Span(1, 33)), (Span(5, 37), Span(1, 20))
    cases = [
        *(Case(f"dim{d}", few, f32, 3, 1, d, d) for d in range(8, 257, 8)),
        *(Case(f"dim{d}v{v}", few, bf16, 4, 4, d, v, 32, "v_transposed")
          for d, v in [(8, 256), (256, 8), (24, 40), (104, 16), (192, 128), (72, 200)]),
        *(Case(f"group{g}", warm, t, 2 * g, 2, 32, 32, 16)
          for g in (1, 2, 3, 5, 6, 7, 8, 12, 16, 24) for t in (f32, bf16)),
        *(Case(f"mqa{h}", warm, f16, h, 1, 64, 64, 64, "hnd") for h in (1, 7, 32, 71)),
        *(Case(f"page{p}", few, f32, 4, 2, 32, 32, p) for p in (1, 2, 3, 5, 7, 17, 100, 255)),
        *(Case(f"chunk{q}of{kv}", (Span(q, kv),), f32, 3, 1, 32, 32, 16)
          for q, kv in [(1, 1), (2, 5), (5, 5), (64, 65), (63, 128), (7, 4096), (2, 1), (17, 16)]),
        *(Case(f"left{w}", (Span(40, 150),), bf16, 3, 3, 64, 64, 16, window_size=(w, -1))
          for w in (0, 1, 15, 16, 17, 63, 64, 149, 150, 1000)),
        *(Case(f"band{a}_{b}", (Span(33, 90),), f16, 2, 1, 64, 64, 32, causal=False,
               window_size=(a, b))
          for a, b in [(0, 0), (5, 0), (0, 5), (31, 32), (-1, 7), (200, -1)]),
        Case("window_before_empty_rows", (Span(65, 16), Span(9, 4)), window_size=(3, -1)),
        Case("sinks_without_keys", (Span(17, 5), Span(3, 0)), sinks=True),
        Case("sinks_over_splits", (Span(1, 5000), Span(2, 3000)), bf16, sinks=True, sharpness=4.0),
        Case("all_options", warm, bf16, 6, 2, 64, 32, 16, "padded", "padded", True, (20, -1), 5.0,
             "batch", True, "heads", 2.0),
        Case("batch_of_40", tuple(Span(1, 3 + 11 * i) for i in range(40)), bf16, 9, 3),
        Case("alibi_far", (Span(2, 2000),), f32, alibi="heads"),
        Case("alibi_both_sides", (Span(20, 60),), f32, causal=False, alibi="batch"),
        Case("no_rows_at_all", (Span(0, 3), Span(0, 0))),
        Case("no_sequences", ()),
    ]  # fmt: skip
    return tuple(replace(c, name=f"edge-{c.name}-{DTYPE_NAMES[c.dtype]}") for c in cases)


EDGES = _edges()
