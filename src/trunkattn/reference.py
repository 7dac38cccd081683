"""The oracle: paged attention in float64, one request and one head at a time. It is meant to be slow and obvious."""

import math

import torch

from trunkattn.validate import check_int


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's last tokens over its pages (PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180).

    Args:
        q: [num_query_tokens, num_qo_heads, head_dim], any dtype.
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or head_dim_v].
        block_table: [num_requests, max_pages] page ids.
        seq_lens: [num_requests] tokens of KV, this step's query tokens included.
        query_start_loc: [num_requests + 1] or None for one query token each.
        sm_scale: None for 1 / sqrt(head_dim).
        sliding_window: a query sees this many last tokens, itself included.
        logits_soft_cap: c, for logits c · tanh(x / c).
        sinks: [num_qo_heads] extra logits without a value.

    Returns:
        out [num_query_tokens, num_qo_heads, head_dim_v] and lse [num_query_tokens, num_qo_heads], both float64, on the
        device of q. lse is the natural log-sum-exp of the logits, sinks not included.

    Raises:
        ValueError: a length, a query start or a page of a request is out of bounds; the message names it.
    """
    num_requests = len(seq_lens)
    if query_start_loc is None:
        query_start_loc = torch.arange(num_requests + 1, dtype=torch.int64, device="cpu")
    page_size, num_kv_heads = k_cache.shape[1], k_cache.shape[2]
    group_size = q.shape[1] // num_kv_heads
    scale = 1 / math.sqrt(q.shape[2]) if sm_scale is None else sm_scale
    out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[3], dtype=torch.float64)
    lse = q.new_full((q.shape[0], q.shape[1]), -math.inf, dtype=torch.float64)
    for request in range(num_requests):
        (begin, end), length = query_start_loc[request : request + 2].tolist(), int(seq_lens[request])
        if begin == end:
            continue
        _check_request(request, (begin, end, length), block_table, (len(q), page_size, len(k_cache)))
        tokens = torch.arange(length, dtype=torch.int64, device=q.device)
        pages, offsets = block_table[request].to(q.device).long()[tokens // page_size], tokens % page_size
        keys, values = k_cache[pages, offsets].double(), v_cache[pages, offsets].double()
        hidden = _hidden(tokens, end - begin, sliding_window)
        for head in range(q.shape[1]):
            logits = q[begin:end, head].double() @ keys[:, head // group_size].T * scale
            if logits_soft_cap is not None:
                logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
            logits = logits.masked_fill(hidden, -math.inf)
            lse[begin:end, head] = torch.logsumexp(logits, dim=-1)
            norm = lse[begin:end, head]
            norm = norm if sinks is None else torch.logaddexp(norm, sinks[head].double())
            out[begin:end, head] = torch.exp(logits - norm[:, None]) @ values[:, head // group_size]
    return out, lse


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    *,
    latent_dim: int,
    sm_scale: float,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, §2.1, https://arxiv.org/abs/2405.04434).

    Args:
        q: [num_query_tokens, num_qo_heads, width], the latent columns absorbed, then the rope columns.
        cache: [num_pages, page_size, width], one row a token: the key of all heads; its first columns are their value.
        latent_dim: how many columns are the value.
        sm_scale: what logits are multiplied by.

    The other arguments and the results are those of `paged_attention`; out is [num_query_tokens, num_qo_heads,
    latent_dim].
    """
    keys = cache.unsqueeze(2)
    tables, values = (block_table, seq_lens, query_start_loc), keys[..., :latent_dim]
    return paged_attention(q, keys, values, *tables, sm_scale=sm_scale, sliding_window=sliding_window)


def _check_request(
    request: int, place: tuple[int, int, int], block_table: torch.Tensor, sizes: tuple[int, int, int]
) -> None:
    """Raises ValueError if a request is out of bounds: torch counts what is negative from the end.

    place: its first query token, one past the last, and its length. sizes: of q, of a page, and of the cache in pages.
    """
    (begin, end, length), (num_query_tokens, page_size, num_pages) = place, sizes
    if not 0 <= begin <= end <= num_query_tokens:
        wanted = f"expected ascending numbers from 0 to {num_query_tokens}, the rows of q"
        raise ValueError(f"query_start_loc[{request}:{request + 2}]={[begin, end]}: {wanted}")
    most = block_table.shape[1] * page_size
    if not end - begin <= length <= most:
        wanted = f"expected its {end - begin} query tokens to {most}, block_table's columns × page_size"
        raise ValueError(f"seq_lens[{request}]={length}: {wanted}")
    for column, page in enumerate(block_table[request, : -(-length // page_size)].tolist()):
        if not 0 <= page < num_pages:
            raise ValueError(f"block_table[{request}, {column}]={page}: expected a page id from 0 to {num_pages - 1}")


def _hidden(tokens: torch.Tensor, num_queries: int, sliding_window: int | None) -> torch.Tensor:
    """[num_queries, length] bool: whether token j of a sequence is hidden from each of its last `num_queries`
    tokens."""
    positions = tokens[len(tokens) - num_queries :, None]
    hidden = tokens[None, :] > positions
    if sliding_window is not None:
        hidden |= tokens[None, :] <= positions - check_int("sliding_window", sliding_window, at_least=1)
    return hidden
