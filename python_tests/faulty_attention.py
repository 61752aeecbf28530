"""A small tiled attention into which a named fault can be planted.

Without a fault it is right. With one of `FAULTS` it makes a mistake that attention kernels make;
`test_sensitivity.py` proves that the case list and the tolerances catch every one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import Inputs
from torch import Tensor

from wim_ext.reference import visible_range

TILE = 64  # keys, on an absolute grid, as splits of a long context are

# Name of the fault, and the option that a case must have for the fault to show.
FAULTS: dict[str, str] = {
    "drops_last_key": "",
    "drops_first_key": "",
    "drops_page_tail": "",
    "drops_second_tile": "",
    "reads_past_the_end": "",
    "sees_one_key_too_many": "",
    "sees_one_key_too_few": "",
    "anchors_mask_top_left": "",
    "multiplies_hidden_values_by_zero": "",
    "maps_heads_round_robin": "",
    "maps_heads_across_groups": "",
    "swaps_two_pages": "",
    "uses_table_of_first_sequence": "",
    "never_rescales_sum": "",
    "never_rescales_accumulator": "",
    "weighs_tiles_equally": "",
    "accumulates_in_the_dtype": "",
    "scales_twice": "",
    "forgets_the_scale": "",
    "lse_in_base_two": "",
    "lse_without_maximum": "",
    "empty_row_attends_to_first_key": "",
    "empty_row_has_lse_zero": "",
    "left_window_one_too_wide": "window",
    "left_window_one_too_narrow": "window",
    "right_window_one_too_wide": "window",
    "ignores_window": "window",
    "ignores_sinks": "sinks",
    "adds_sink_in_every_tile": "sinks",
    "takes_sink_of_next_head": "sinks",
    "leaves_sink_out_of_lse": "sinks",
    "ignores_softcap": "softcap",
    "caps_before_scaling": "softcap",
    "caps_after_alibi": "softcap",
    "ignores_alibi": "alibi_slopes",
    "alibi_grows_with_distance": "alibi_slopes",
    "alibi_from_row_number": "alibi_slopes",
    "alibi_of_first_sequence": "alibi_slopes",
    "ignores_k_scale": "k_scale",
    "ignores_v_scale": "v_scale",
    "takes_scale_of_first_head": "k_scale",
}


@dataclass
class _Rows:
    """The rows of one sequence and one query head, and where their keys are."""

    q: Tensor  # [rows, head_dim]
    first: Tensor  # [rows]
    end: Tensor  # [rows]
    position: Tensor  # [rows]


def attention(x: Inputs, fault: str | None = None) -> tuple[Tensor, Tensor]:
    """(out [total_q, num_heads, v_head_dim], lse [num_heads, total_q] float32)."""
    c = x.case
    out = torch.zeros(len(x.query), c.num_heads, c.v_head_dim, dtype=c.dtype)
    lse = torch.full((c.num_heads, len(x.query)), -torch.inf)
    starts = x.cu_seqlens_q.tolist()
    for b, kv_len in enumerate(x.seqused_k.tolist()):
        span = slice(starts[b], starts[b + 1])
        first, end, position = _limits(x, span.stop - span.start, kv_len, fault)
        for head in range(c.num_heads):
            rows = _Rows(x.query[span, head].float(), first, end, position)
            out[span, head], lse[head, span] = _one_head(x, b, head, kv_len, rows, fault)
    return out, lse


def _limits(x: Inputs, q: int, kv: int, fault: str | None) -> tuple[Tensor, Tensor, Tensor]:
    left, right = x.case.window_size
    if fault == "left_window_one_too_wide" and left >= 0:
        left += 1
    if fault == "left_window_one_too_narrow" and left > 0:
        left -= 1
    if fault == "right_window_one_too_wide" and right >= 0:
        right += 1
    if fault == "ignores_window":
        left = right = -1
    position = torch.arange(kv - q, kv)
    first, end = visible_range(q, kv, x.case.causal, (left, right))
    if fault == "anchors_mask_top_left" and x.case.causal:
        position = torch.arange(q)
        end = (position + 1).clamp(max=kv)
    if fault == "sees_one_key_too_many":
        end = (end + 1).clamp(max=kv)
    if fault == "sees_one_key_too_few":
        end = (end - 1).clamp(min=0)
    if fault == "drops_last_key":
        end = end.clamp(max=max(kv - 1, 0))
    if fault == "drops_first_key":
        first = first.clamp(min=1)
    if fault == "drops_page_tail":
        end = end.clamp(max=kv // x.case.page_size * x.case.page_size)
    if fault == "reads_past_the_end":
        end = torch.where(end == kv, kv + (kv % x.case.page_size > 0), end)
    if fault == "empty_row_attends_to_first_key" and kv > 0:
        end = torch.where(end <= first, first + 1, end).clamp(max=kv)
    return first, end, position


def _one_head(
    x: Inputs, b: int, head: int, kv_len: int, rows: _Rows, fault: str | None
) -> tuple[Tensor, Tensor]:
    options, num_rows = x.options, len(rows.q)
    kv_head = _kv_head(x, head, fault)
    sinks = None if fault == "ignores_sinks" else options.get("sinks")
    sink_head = (head + 1) % x.case.num_heads if fault == "takes_sink_of_next_head" else head
    sink = None if sinks is None else sinks[sink_head]
    largest = torch.full((num_rows,), -torch.inf) if sink is None else sink.expand(num_rows)
    total = torch.zeros(num_rows) if sink is None else torch.ones(num_rows)
    acc = torch.zeros(num_rows, x.case.v_head_dim)

    high = int(rows.end.max()) if num_rows else 0
    for low in range(0, high, TILE):
        if fault == "drops_second_tile" and low == TILE:
            continue
        keys = torch.arange(low, min(low + TILE, high))
        k, v = _gather(x, b, kv_head, keys, fault)
        seen = (keys >= rows.first[:, None]) & (keys < rows.end[:, None])
        s = torch.where(seen, _scores(x, b, head, kv_head, rows, k, keys, fault), -torch.inf)
        new = torch.maximum(largest, s.amax(dim=1))
        pivot = torch.where(new == -torch.inf, 0.0, new)
        p, shrink = (s - pivot[:, None]).exp(), (largest - pivot).exp()
        if fault == "weighs_tiles_equally":
            shrink = torch.where(shrink > 0, 1.0, 0.0)
        if sink is not None and low > 0 and fault == "adds_sink_in_every_tile":
            total = total + (sink - largest).exp()
        total = (total if fault == "never_rescales_sum" else total * shrink) + p.sum(dim=1)
        acc = acc if fault == "never_rescales_accumulator" else acc * shrink[:, None]
        acc = acc + p @ v
        if fault == "accumulates_in_the_dtype":
            acc, total = acc.to(x.case.dtype).float(), total.to(x.case.dtype).float()
        largest = new
    return _finish(x, kv_head, rows, sink, largest, total, acc, fault)


def _kv_head(x: Inputs, head: int, fault: str | None) -> int:
    kv_heads = x.case.num_kv_heads
    group = x.case.num_heads // kv_heads
    if fault == "maps_heads_round_robin":
        return head % kv_heads
    if fault == "maps_heads_across_groups":
        return min((head + 1) // group, kv_heads - 1)
    return head // group


def _gather(
    x: Inputs, b: int, kv_head: int, keys: Tensor, fault: str | None
) -> tuple[Tensor, Tensor]:
    table = x.block_table[0 if fault == "uses_table_of_first_sequence" else b].long()
    page = keys // x.case.page_size
    if fault == "swaps_two_pages" and int(x.seqused_k[b]) > 2 * x.case.page_size:
        page = torch.where(page < 2, 1 - page, page)
    # A wrong table may point anywhere; a mistake must not become a crash of the test.
    table = table.clamp(0, len(x.k_cache) - 1)
    pages, slots = table[page], keys % x.case.page_size
    k, v = (cache[:, :, kv_head][pages, slots].float() for cache in (x.k_cache, x.v_cache))
    if fault == "multiplies_hidden_values_by_zero":  # those behind the end of the last page
        hidden = torch.arange(int(slots[-1]) + 1, x.case.page_size)
        v = v + (0 * x.v_cache[pages[-1], hidden, kv_head].float()).sum(dim=0)
    return k, v


def _scores(
    x: Inputs, b: int, head: int, kv_head: int, rows: _Rows, k: Tensor, keys: Tensor,
    fault: str | None,
) -> Tensor:  # fmt: skip
    o = x.options
    scale = o.get("softmax_scale", x.case.head_dim**-0.5)
    if fault == "scales_twice":
        scale *= scale
    if fault == "forgets_the_scale":
        scale = 1.0
    if "k_scale" in o and fault != "ignores_k_scale":
        scale *= _scale(o["k_scale"], kv_head, fault)
    s = rows.q @ k.T
    cap, slopes = o.get("softcap", 0.0), o.get("alibi_slopes")
    cap = 0.0 if fault == "ignores_softcap" else cap
    if cap and fault == "caps_before_scaling":
        s, cap = cap * torch.tanh(s / cap), 0.0
    s = s * scale
    if cap and fault != "caps_after_alibi":
        s = cap * torch.tanh(s / cap)
    if slopes is not None and fault != "ignores_alibi":
        row = 0 if fault == "alibi_of_first_sequence" else b
        slope = slopes[row, head] if slopes.dim() == 2 else slopes[head]
        shift = rows.position[0] if fault == "alibi_from_row_number" else 0
        bias = slope * (rows.position[:, None] - shift - keys).abs()
        s = s + bias if fault == "alibi_grows_with_distance" else s - bias
    if cap and fault == "caps_after_alibi":
        s = cap * torch.tanh(s / cap)
    return s


def _scale(scale: Tensor, kv_head: int, fault: str | None) -> float:
    first = scale.numel() == 1 or fault == "takes_scale_of_first_head"
    return float(scale[0 if first else kv_head])


def _finish(
    x: Inputs, kv_head: int, rows: _Rows, sink: Tensor | None, largest: Tensor, total: Tensor,
    acc: Tensor, fault: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = acc / torch.where(total == 0, 1.0, total)[:, None]
    if "v_scale" in x.options and fault != "ignores_v_scale":
        out = out * _scale(x.options["v_scale"], kv_head, fault)
    lse = largest + total.log()
    if fault == "lse_in_base_two":
        lse = lse / torch.log(torch.tensor(2.0))
    if fault == "lse_without_maximum":
        lse = total.log()
    if fault == "leaves_sink_out_of_lse" and sink is not None:
        lse = largest + (total - (sink - largest).exp()).log()
    if fault == "empty_row_has_lse_zero":
        lse = torch.where(rows.end <= rows.first, 0.0, lse)
    return out.to(x.case.dtype), lse
