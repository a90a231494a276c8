"""Matrix products and attention for a few rows, as in decoding.

Each function calls `F.linear` or `F.scaled_dot_product_attention` with other shapes where that was
measured to be faster (docs/log.md). Results differ in the order of sums only.

Legend: X inputs and Y outputs of a linear map; B prompts, A key heads, G query heads to each of
them, N rows, L keys, M the last of them, C numbers of a head.
"""

import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

# rows up to which W x^T is faster in float32 on an EPYC with two threads: all and wide matrices
MAX_ROWS, MAX_ROWS_WIDE = 4, 9
WIDE = 2**20  # elements of a wide matrix, where it is also faster for a single row
TREE = 64  # rows up to which masks may be repeated
CPUINFO = Path("/proc/cpuinfo")


@cache
def mkl_on_amd() -> bool:
    """Return whether float32 products run in Intel's MKL on an AMD CPU."""
    cpu = CPUINFO.read_text() if CPUINFO.is_file() else platform.processor()
    return torch.backends.mkl.is_available() and "AuthenticAMD" in cpu


def linear(
    x: Float[Tensor, "*rows X"], weight: Float[Tensor, "Y X"], bias: Float[Tensor, " Y"] | None
) -> Float[Tensor, "*rows Y"]:
    """Compute `F.linear`; on AMD CPUs, for a few float32 rows, as W x^T, which MKL runs faster.

    MKL uses one thread for a single row, so that row is duplicated. On Intel CPUs W x^T is two to
    three times slower and is not used.
    """
    rows = x.shape[:-1].numel()
    applies = x.dtype == torch.float32 and x.device.type == "cpu" and bias is None and mkl_on_amd()
    if not applies or not 1 <= rows <= MAX_ROWS_WIDE:
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    wide = outputs >= 4 * inputs and outputs * inputs >= WIDE
    if not (wide or 1 < rows <= MAX_ROWS):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    transposed = torch.mm(weight, (flat if rows > 1 else torch.cat([flat, flat])).t())
    return transposed[:, :rows].t().contiguous().view(*x.shape[:-1], -1)


def gqa_attention(
    q: Float[Tensor, "B AG N C"],
    keys: Float[Tensor, "B A L C"],
    values: Float[Tensor, "B A L C"],
    mask: Shaped[Tensor, "#B 1 N L"] | None,
    scale: float | None = None,
) -> Float[Tensor, "B AG N C"]:
    """Compute grouped-query attention of a few rows over many keys.

    Where faster, the query heads of a group become rows of one head. CPU kernels process a single
    row in half precision key by key, and read the keys of a batch once per head (in float32 this
    pays on AMD only). GPUs use the same shapes.
    """
    batch, heads, count, size = q.shape
    key_heads = keys.shape[1]
    pays = half = q.dtype in (torch.bfloat16, torch.float16)
    if count > 1:
        pays = batch > 1 and count <= TREE and (half or q.device.type != "cpu" or mkl_on_amd())
    gqa = heads != key_heads
    if not (gqa and pays):
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=gqa)
    rows = q.reshape(batch, key_heads, -1, size)
    if mask is not None and count > 1:
        mask = mask.repeat(1, 1, heads // key_heads, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
    return out.reshape(batch, heads, count, size)  # on a GPU the result is strided


def split_attention(
    q: Float[Tensor, "B AG N C"],
    parts: Sequence[tuple[Float[Tensor, "B A _ C"], Float[Tensor, "B A _ C"]]],
    bias: Float[Tensor, "#B 1 N M"] | None,
    scale: float,
) -> Float[Tensor, "B AG N C"]:
    """Compute `gqa_attention` of keys and values in several tensors, which are not concatenated.

    Args:
        parts: keys and values.
        bias: added to the scores of the last M keys.
    """
    batch, heads, count, size = q.shape
    key_heads = parts[0][0].shape[1]
    rows = q.reshape(batch, key_heads, -1, size)
    scores = torch.cat([torch.matmul(rows, keys.mT) for keys, _ in parts], dim=-1).float() * scale
    if bias is not None:
        by_query = scores.view(batch, key_heads, -1, count, scores.shape[-1])
        by_query[..., -bias.shape[-1] :] += bias[:, :, None]
    lengths = [keys.shape[2] for keys, _ in parts]
    weights = scores.softmax(-1).to(q.dtype).split(lengths, dim=-1)
    out = torch.zeros_like(rows)
    for weight, (_, values) in zip(weights, parts, strict=True):
        out = out + torch.matmul(weight, values)
    return out.reshape(batch, heads, count, size)
