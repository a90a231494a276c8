"""Matrix products and attention of a few rows against the library functions."""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models import small_matmul
from outrider.models.small_matmul import gqa_attention, split_attention

uncached_mkl_on_amd = small_matmul.mkl_on_amd.__wrapped__
ATTEND = F.scaled_dot_product_attention


@pytest.fixture(params=[True, False], ids=["AMD", "others"], autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test as on either kind of processor."""
    monkeypatch.setattr(small_matmul, "mkl_on_amd", lambda: request.param)


@pytest.mark.parametrize(
    ("cpuinfo", "amd"),
    [("vendor_id\t: AuthenticAMD\n", True), ("vendor_id\t: GenuineIntel\n", False)],
)
def test_mkl_on_amd_is_detected(
    cpuinfo: str, amd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From /proc/cpuinfo, and without it from `platform.processor`."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(small_matmul, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: f"Family 25 Model 1, {cpuinfo}")
    assert uncached_mkl_on_amd() == amd
    (tmp_path / "cpuinfo").write_text("vendor_id\t: GenuineIntel\n")
    assert not uncached_mkl_on_amd()


@pytest.mark.parametrize("rows", [(0,), (1,), (3,), (1, 1), (2, 2), (1, 9), (10,)])
@pytest.mark.parametrize("size", [(7, 5), (64, 16)], ids=["narrow", "wide"])
def test_linear_equals_the_library(
    rows: tuple[int, ...], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_matmul, "WIDE", 1000)
    rng = torch.Generator().manual_seed(sum(rows))
    weight, x = torch.randn(size, generator=rng), torch.randn(*rows, size[1], generator=rng)
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (
            f(x.to(dtype), weight.to(dtype), None) for f in (small_matmul.linear, F.linear)
        )
        assert ours.shape == theirs.shape
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs)
    bias = torch.randn(size[0], generator=rng)
    assert torch.equal(small_matmul.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_gqa_attention_equals_repeated_keys(
    key_heads: int, batch: int, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference repeats every key head; a mask of one prompt may serve all.

    The library's result may be strided, as on a GPU.
    """
    rng = torch.Generator().manual_seed(key_heads)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, 8, generator=rng).to(dtype)

    q = random(batch, count, 6).transpose(1, 2)
    keys, values = (random(batch, key_heads, 11)[:, :, :9] for _ in range(2))
    seen = torch.rand(batch, 1, count, 9, generator=rng) < 0.6
    seen[..., 0] = True
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))
    close = 1e-5 if dtype == torch.float32 else 2**-6  # a few units in the last place
    for mask in (None, seen, added, added[:1]):
        ours = gqa_attention(q, keys, values, mask, 0.3)
        each, all_values = (x.repeat_interleave(6 // key_heads, dim=1) for x in (keys, values))
        theirs = F.scaled_dot_product_attention(q, each, all_values, mask, scale=0.3)
        torch.testing.assert_close(ours, theirs, atol=close, rtol=close)
        with monkeypatch.context() as patched:
            patched.setattr(F, "scaled_dot_product_attention", strided_attention)
            assert torch.equal(gqa_attention(q, keys, values, mask, 0.3), ours)


def strided_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Attention with the memory layout of the memory-efficient kernel's result."""
    return ATTEND(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("lengths", [(5,), (3, 7), (1, 4, 2)])
@pytest.mark.parametrize(("batch", "count"), [(1, 1), (3, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_keys_in_several_tensors_are_attended_to_as_in_one(
    lengths: tuple[int, ...], batch: int, count: int, biased: bool
) -> None:
    torch.manual_seed(0)
    q = torch.randn(batch, 6, count, 8)
    parts = [(torch.randn(batch, 2, n, 8), torch.randn(batch, 2, n, 8)) for n in lengths]
    keys, values = (torch.cat(group, dim=2) for group in zip(*parts, strict=True))
    bias = torch.randn(batch, 1, count, 2) if biased else None
    mask = None if bias is None else F.pad(bias, (keys.shape[2] - 2, 0))
    expected = ATTEND(q, keys, values, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(split_attention(q, parts, bias, 0.3), expected)
