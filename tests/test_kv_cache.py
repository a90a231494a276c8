"""Slots of a key-value cache against plain lists of rows, and against one cache per prompt."""

import statistics
import time
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from outrider.models.cache.kv_cache import KVCache, is_prefix
from outrider.models.target.target import Target
from tests import tiny

LAYERS, HEADS, SIZE = 3, 2, 4
SLOTS, CAPACITY = 4, 24


def named(rows: list[list[int]], layer: int, kind: int, size: int) -> Tensor:
    """[B, A, T, C]: every number encodes row, layer and kind."""
    row = torch.tensor(rows, dtype=torch.float32)[:, None, :, None]
    return (row + 1000 * layer + 5000 * kind).expand(-1, HEADS, -1, size).clone()


@dataclass
class Plain:
    """A cache beside the lists of rows it should hold; a row's name is its position too."""

    cache: KVCache = field(
        default_factory=lambda: KVCache(SLOTS, CAPACITY, LAYERS, torch.device("cpu"))
    )
    rows: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SLOTS)])
    named: int = 0

    def forward(self, first: int, count: int, new: int) -> None:
        """Every layer appends; the last one has keys and values of other sizes."""
        self.cache.select_slots(first, count)
        assert self.cache.active_lengths == [len(rows) for rows in self.rows[first : first + count]]
        self.cache.reserve(new)
        fresh = [[self.named + i * new + j for j in range(new)] for i in range(count)]
        self.named += count * new
        positions = torch.tensor(fresh)
        whole = [[*self.rows[first + i], *fresh[i]] for i in range(count)]
        columns = self.cache.column_positions(positions)
        for layer in range(LAYERS):
            sizes = (SIZE, SIZE + 2 * (layer == LAYERS - 1))
            parts = [named(fresh, layer, kind, size) for kind, size in enumerate(sizes)]
            appended = self.cache.update(parts[0], parts[1], layer)
            for kind, (size, actual) in enumerate(zip(sizes, appended, strict=True)):
                for i, rows in enumerate(whole):
                    assert actual.shape[2] == max(map(len, whole))
                    expected = named([rows], layer, kind, size)[0]
                    assert torch.equal(actual[i, :, : len(rows)], expected)
                    assert columns[i, : len(rows)].tolist() == rows
        self.cache.commit(positions)
        self.rows[first : first + count] = whole

    def check(self) -> None:
        assert self.cache.lengths == [len(rows) for rows in self.rows]
        for slot, rows in enumerate(self.rows):
            assert self.cache.positions(slot).tolist() == [rows]
            for layer in range(LAYERS if self.named else 0):
                sizes = (SIZE, SIZE + 2 * (layer == LAYERS - 1))
                for kind, actual in enumerate(self.cache.rows(layer, slot)):
                    assert torch.equal(actual, named([rows], layer, kind, sizes[kind]))


@settings(max_examples=60)
@given(data=st.data())
def test_slots_equal_plain_lists(data: st.DataObject) -> None:
    """Forwards on any slots, paths kept, slots moved, cropped and widened, in any order."""
    plain = Plain()
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        what = data.draw(st.sampled_from(["forward", "forward", "move", "crop", "ensure"]))
        slot, other = (data.draw(st.integers(0, SLOTS - 1)) for _ in range(2))
        if what == "forward":
            count, new = data.draw(st.integers(1, SLOTS - slot)), data.draw(st.integers(1, 5))
            longest = max(map(len, plain.rows[slot : slot + count]))
            if longest + new > plain.cache.capacity:
                with pytest.raises(ValueError, match="more do not fit"):
                    plain.forward(slot, count, new)
                continue
            before = [len(rows) for rows in plain.rows]
            plain.forward(slot, count, new)
            if data.draw(st.booleans()):
                inside = st.sets(st.integers(0, new - 1), min_size=1).map(sorted)
                paths = [data.draw(inside) for _ in range(count)]
                # entries after the end of a path are not read
                most, ends = max(map(len, paths)), data.draw(st.integers(0, new - 1))
                there = torch.tensor([[*p, *[ends] * (most + 1 - len(p))] for p in paths])
                needed = not is_prefix(paths) or data.draw(st.booleans())
                plain.cache.keep_rows(paths, there if needed else None)
                for i, path in enumerate(paths, start=slot):
                    fresh = plain.rows[i][before[i] :]
                    plain.rows[i][before[i] :] = [fresh[node] for node in path]
        elif what == "move":
            plain.cache.move_slot(slot, other)
            plain.rows[other] = list(plain.rows[slot])
        elif what == "crop":
            length = data.draw(st.integers(0, len(plain.rows[slot])))
            plain.cache.crop(slot, length)
            del plain.rows[slot][length:]
        else:
            expected = data.draw(st.integers(1, 40))
            known = plain.cache.capacity
            plain.cache.ensure_capacity(expected)
            assert plain.cache.capacity == max(expected, known)
        plain.check()


def test_the_worked_example() -> None:
    """Slots of lengths 5, 2 and 4 and two new tokens: seven columns."""
    plain = Plain()
    for slot, length in enumerate((5, 2, 4)):
        plain.forward(slot, 1, length)
    plain.forward(0, 3, 2)
    assert plain.cache.lengths[:3] == [7, 4, 6]
    plain.cache.keep_rows([[0], [1], [0, 1]], torch.tensor([[0, 0], [1, 0], [0, 1]]))
    plain.rows[0].pop()
    del plain.rows[1][2]
    plain.check()


def test_crop_beyond_the_length_of_a_slot_is_refused() -> None:
    plain = Plain()
    plain.forward(1, 2, 3)
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot crop 3 rows to {length}"):
            plain.cache.crop(1, length)
    plain.check()


def test_nothing_is_allocated_after_the_first_rows() -> None:
    plain = Plain()
    plain.forward(0, 4, 2)
    before = plain.cache.rows(0)[0].data_ptr()
    plain.forward(1, 2, 3)
    plain.cache.keep_rows([[0, 2], [1]], torch.tensor([[0, 2], [1, 0]]))
    plain.cache.move_slot(1, 3)
    assert plain.cache.rows(0)[0].data_ptr() == before


def test_sizes_for_the_masks_of_transformers() -> None:
    plain = Plain()
    plain.forward(0, 1, 3)
    plain.cache.select_slots(0, 2)
    assert plain.cache.get_mask_sizes(4) == (7, 0)
    assert (plain.cache.get_query_offset(), plain.cache.get_max_length()) == (3, CAPACITY)
    assert (plain.cache.get_seq_length(), len(plain.cache)) == (3, LAYERS)


# ---- against the cache of transformers ----


def assert_equals_dynamic(cache: KVCache, dynamic: DynamicCache, slots: int) -> None:
    assert cache.lengths == [dynamic.get_seq_length()] * slots
    for layer, theirs in enumerate(dynamic.layers):
        ours = [
            torch.cat(part)
            for part in zip(*(cache.rows(layer, s) for s in range(slots)), strict=True)
        ]
        assert torch.equal(ours[0], theirs.keys)
        assert torch.equal(ours[1], theirs.values)


@pytest.mark.parametrize("slots", [1, 4])
def test_slots_of_equal_lengths_hold_what_a_dynamic_cache_holds(slots: int) -> None:
    """Append a prompt and trees, keep rows of each path, crop and reorder the prompts."""
    draw = torch.Generator().manual_seed(slots)
    cache, dynamic = KVCache(slots, CAPACITY, LAYERS, torch.device("cpu")), DynamicCache()

    def append(new: int) -> None:
        cache.reserve(new)
        for layer in range(LAYERS):
            parts = torch.randn(2, slots, HEADS, new, SIZE, generator=draw)
            ours, theirs = cache.update(*parts, layer), dynamic.update(*parts, layer)
            assert all(map(torch.equal, ours, theirs))
        cache.commit(torch.arange(new).expand(slots, -1) + dynamic.get_seq_length() - new)

    append(6)
    for trees in ([[0, 2, 3], [0, 1, 4]], [[0, 4], [0, 1]], [[0], [0]], [[0, 1, 2, 3, 4]] * 2):
        append(5)
        paths = [trees[slot % 2] for slot in range(slots)]
        start = dynamic.get_seq_length() - 5
        cache.keep_rows(paths, torch.tensor(paths))
        kept = [[*range(start), *(start + node for node in path)] for path in paths]
        for layer in dynamic.layers:  # which has no call for it
            for name in ("keys", "values"):
                rows = zip(getattr(layer, name), kept, strict=True)
                setattr(layer, name, torch.stack([prompt[:, index] for prompt, index in rows]))
        assert_equals_dynamic(cache, dynamic, slots)
    for slot in range(slots):
        cache.crop(slot, cache.lengths[slot] - 4)
    dynamic.crop(-4)
    assert_equals_dynamic(cache, dynamic, slots)
    cache.move_slot(slots - 1, 0)  # the last prompt takes the place of an ended one
    dynamic.reorder_cache(torch.tensor([slots - 1, *range(1, slots)]))
    append(2)
    assert_equals_dynamic(cache, dynamic, slots)


# ---- a target on slots ---------------------------------------------------------------------------

TEXTS = [[7, 3, 9, 30, 12, 5, 44, 18, 2, 11], [20, 6], [15, 33, 8, 41, 50, 9, 3]]
CHILDREN = [[-1, 0, 0, 1], [0, 1, 1, 2]]  # parents and depths of a small tree after every text


def alone(target: Target, text: list[int], tree: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of a text and of a tree after it, with a cache of its own."""
    cache = target.new_cache(40)
    count = len(text)
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    read = target.forward(torch.tensor([text]), torch.arange(count)[None], causal, cache)
    return target.logits(read.last[0]), branch(target, cache, tree, count)


def branch(target: Target, cache: KVCache, tree: list[int], count: int) -> Tensor:
    seen = torch.zeros(1, 4, count + 4, dtype=torch.bool)
    seen[..., :count] = True
    seen[0, :, count:] = ancestors()
    positions = torch.tensor([CHILDREN[1]]) + count
    return target.logits(target.forward(torch.tensor([tree]), positions, seen, cache).last[0])


def ancestors() -> Tensor:
    seen = torch.eye(4, dtype=torch.bool)
    for node, parent in enumerate(CHILDREN[0]):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_target_gives_equal_logits_on_slots_and_separate_caches(family: str) -> None:
    """Ragged slots, a tree after each, and garbage after the shorter ones."""
    target = tiny.target(family)
    cache = target.new_cache(40, 3)
    waste = torch.arange(3, 18)[None].repeat(3, 1)
    causal = torch.ones(3, 15, 15, dtype=torch.bool).tril()
    target.forward(waste, torch.arange(15).repeat(3, 1), causal, cache)
    trees = [[5, 9, 13, 4], [22, 31, 6, 10], [3, 3, 8, 40]]
    expected = [alone(target, text, tree) for text, tree in zip(TEXTS, trees, strict=True)]
    for slot, text in enumerate(TEXTS):
        cache.crop(slot, 0)
        cache.select_slots(slot, 1)
        own = torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
        ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
        read = target.forward(ids, positions, own, cache)
        torch.testing.assert_close(target.logits(read.last[0]), expected[slot][0])
    cache.select_slots(0, 3)
    at = torch.tensor(cache.active_lengths)[:, None]
    visible = torch.zeros(3, 4, max(cache.active_lengths) + 4, dtype=torch.bool)
    for slot, text in enumerate(TEXTS):
        visible[slot, :, : len(text)] = True
        visible[slot, :, len(text) : len(text) + 4] = ancestors()
    positions = torch.tensor([CHILDREN[1]]) + at
    logits = target.logits(target.forward(torch.tensor(trees), positions, visible, cache).last)
    for slot in range(3):
        torch.testing.assert_close(logits[slot], expected[slot][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("splits", [(), (2,)], ids=["one cache", "two ranges"])
def test_rows_dropped_after_a_forward_do_not_count_among_its_rows(splits: tuple[int, ...]) -> None:
    """Of five new rows two are dropped; keeping rows 0 and 2 of the others moves row 2."""
    target = tiny.target()
    rows = []
    for dropped in (0, 2):
        cache = target.new_cache(16, 2, splits)
        ids = torch.tensor([TEXTS[0][: 5 + dropped], TEXTS[2][: 5 + dropped]])
        for new in (ids[:, :2], ids[:, 2:]):
            start, count = cache.active_lengths[0], new.shape[1]
            positions = torch.arange(start, start + count).expand(2, -1)
            visible = torch.arange(start + count) <= positions[..., None]
            target.forward(new, positions, visible, cache)
        cache.drop_newest(dropped)
        cache.keep_rows([[0, 2], [0]], torch.tensor([[0, 2], [0, 0]]))
        assert cache.lengths == [4, 3]
        rows.append(
            [part for layer in range(4) for slot in (0, 1) for part in cache.rows(layer, slot)]
        )
    for mine, theirs in zip(*rows, strict=True):
        torch.testing.assert_close(mine, theirs)


def seconds_to_append(capacity: int, lengths: tuple[int, int]) -> float:
    """Return the median time of a forward's appends to two slots of these lengths."""
    cache = KVCache(2, capacity, LAYERS, torch.device("cpu"))
    cache.lengths = [*lengths]
    rows = torch.ones(2, HEADS, 1, 64, dtype=torch.bfloat16)
    times = list[float]()
    for _ in range(15):
        cache.reserve(1)
        start = time.perf_counter()
        for layer in range(LAYERS):
            cache.update(rows, rows, layer)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("shift", [0, 3])
def test_time_to_append_does_not_grow_with_the_context(shift: int) -> None:
    """Slots of equal and of different lengths, in half precision, 1,024 times as long."""
    short = seconds_to_append(64, (32, 32 + shift))
    assert seconds_to_append(65536, (32768, 32768 + shift)) < 10 * short
