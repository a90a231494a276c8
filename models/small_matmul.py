"""Products and attention of few rows, which decoding is made of and libraries are not made for.

Each is `F.linear` or `F.scaled_dot_product_attention` asked in another shape, where that was found
faster (docs/log.md); which shape is a matter of sizes and of who made the processor, and what comes
out is the same but for the order of sums.

Legend: X inputs and Y outputs of a linear map; B prompts, A key heads, G query heads to each of
them, N rows, L keys, C numbers of a head.
"""

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

FEW, SOME = 4, 9  # rows up to which AMD's CPUs multiply faster from the other side, in float32
WIDE = 2**20  # numbers of a matrix from which on that holds for more rows, and for a single one
TREE = 64  # rows up to which masks may be repeated
CPUINFO = Path("/proc/cpuinfo")


@cache
def foreign() -> bool:
    """Whether MKL, Intel's library, multiplies float32 numbers on a CPU of AMD's."""
    known = CPUINFO.read_text() if CPUINFO.is_file() else platform.processor()
    return torch.backends.mkl.is_available() and "AuthenticAMD" in known


def linear(
    x: Float[Tensor, "*rows X"], weight: Float[Tensor, "Y X"], bias: Float[Tensor, " Y"] | None
) -> Float[Tensor, "*rows Y"]:
    """`F.linear`; for a few rows in float32 W x^T, for which MKL needs a fraction on AMD's CPUs.

    A single row is read there by one thread alone, so that two of it can be faster. On Intel's own
    CPUs W x^T takes two to three times as long, and is not asked for.
    """
    rows = x.shape[:-1].numel()
    known = x.dtype == torch.float32 and x.device.type == "cpu" and bias is None and foreign()
    if not known or not _few(rows, weight):
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    turned = torch.mm(weight, (flat if rows > 1 else torch.cat([flat, flat])).t())
    return turned[:, :rows].t().contiguous().view(*x.shape[:-1], -1)


def _few(rows: int, weight: Float[Tensor, "Y X"]) -> bool:
    """Whether W x^T pays, as measured on an EPYC with two threads (docs/log.md)."""
    outputs, inputs = weight.shape
    wide = outputs >= 4 * inputs and outputs * inputs >= WIDE
    return 1 < rows <= FEW or (wide and 1 <= rows <= SOME)


def lent_attention(
    q: Float[Tensor, "B AG N C"],
    keys: Float[Tensor, "B A L C"],
    values: Float[Tensor, "B A L C"],
    mask: Shaped[Tensor, "#B 1 N L"] | None,
    scale: float | None = None,
) -> Float[Tensor, "B AG N C"]:
    """Attention of groups of query heads that share a key head, for few rows over many keys.

    A group asks as rows of one head where that was found faster, on CPUs: their kernel takes a
    single row in half precision key by key, and reads the keys once per head where it has a batch
    (in float32 that pays on AMD's alone). A GPU is asked in the same way, where it can choose.
    """
    batch, heads, count, size = q.shape
    lent = keys.shape[1]
    half = q.dtype in (torch.bfloat16, torch.float16)
    if count == 1:
        pays = half
    else:
        pays = batch > 1 and count <= TREE and (half or q.device.type != "cpu" or foreign())
    if heads == lent or not pays:
        shared = heads != lent
        return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale, enable_gqa=shared)
    rows = q.reshape(batch, lent, -1, size)
    if mask is not None and count > 1:
        mask = mask.repeat(1, 1, heads // lent, 1)
    out = F.scaled_dot_product_attention(rows, keys, values, mask, scale=scale)
    return out.reshape(batch, heads, count, size)  # on a GPU it lies the other way round
