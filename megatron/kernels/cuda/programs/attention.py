"""The Triton program that joins two parts of attention. Arithmetic is fp32.

Shapes: b batch, a heads, s queries, d channels of a head.
"""

import triton
import triton.language as tl


@triton.jit
def join_parts(
    out_basd,
    log_bas,
    part_basd,
    part_log_bas,
    s,
    a,
    d,
    out_batch,
    out_head,
    out_token,
    log_batch,
    log_head,
    part_batch,
    part_head,
    part_token,
    part_log_batch,
    part_log_head,
    QUERIES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Add a part of the softmax to the parts that ``out`` has already, in place.

    ``*_batch``, ``*_head`` and ``*_token`` are strides; the channels of a head lie densely, and so
    do the logarithms of a head's queries. A part in which a query sees no key has the logarithm
    -inf, and the query has seen a key in the other one.
    """
    both = tl.program_id(1).to(tl.int64)
    batch, head = both // a, both % a
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    channel = tl.arange(0, CHANNELS)
    own = log_bas + batch * log_batch + head * log_head + query
    other = part_log_bas + batch * part_log_batch + head * part_log_head + query
    log = tl.load(own, mask=query < s, other=0.0)
    part_log = tl.load(other, mask=query < s, other=0.0)
    most = tl.maximum(log, part_log)
    total = most + tl.log(tl.exp(log - most) + tl.exp(part_log - most))
    here = (query < s)[:, None] & (channel < d)[None, :]
    to = out_basd + batch * out_batch + head * out_head
    to += query[:, None] * out_token + channel[None, :]
    source = part_basd + batch * part_batch + head * part_head
    source += query[:, None] * part_token + channel[None, :]
    out = tl.load(to, mask=here, other=0.0).to(tl.float32) * tl.exp(log - total)[:, None]
    out += tl.load(source, mask=here, other=0.0).to(tl.float32) * tl.exp(part_log - total)[:, None]
    tl.store(to, out.to(out_basd.dtype.element_ty), mask=here)
    tl.store(own, total, mask=query < s)
