"""The target's key-value cache, whose slots also hold rows of a draft model.

The two caches have rows of different models, but the same prompts in the same slots:

    slot   target's rows    draft model's rows
    0      o o o o o o      o o o o           the draft model reads the last two before it drafts
    1      o o o            o o o

A forward of the target writes to this cache as to any other; a forward of the draft model writes to
`draft`. The draft model never has more rows of the text than the target.
"""

from typing import TYPE_CHECKING

from outrider.models.cache.kv_cache import KVCache

if TYPE_CHECKING:
    from outrider.models.target.target import Target


class PairedCache(KVCache):
    """A `KVCache` of the target.

    Attributes:
        draft: the draft model's cache; its slots are selected, moved and cropped with these.
    """

    def __init__(self, target: "Target", draft_model: "Target", capacity: int, slots: int) -> None:
        """
        Args:
            capacity: rows of a slot, at first.
        """
        super().__init__(slots, capacity, target.num_layers, target.layer_device)
        self.draft = KVCache(slots, capacity, draft_model.num_layers, draft_model.layer_device)

    @property
    def unread_counts(self) -> list[int]:
        """Of each selected slot, how many of the newest tokens the draft model has not read."""
        pairs = zip(self.active_lengths, self.draft.active_lengths, strict=True)
        return [text - read for text, read in pairs]

    def select_slots(self, first: int, count: int) -> None:
        super().select_slots(first, count)
        self.draft.select_slots(first, count)

    def ensure_capacity(self, capacity: int) -> None:
        super().ensure_capacity(capacity)
        self.draft.ensure_capacity(capacity)

    def move_slot(self, source: int, slot: int) -> None:
        super().move_slot(source, slot)
        self.draft.move_slot(source, slot)

    def crop(self, slot: int, length: int) -> None:
        super().crop(slot, length)
        self.draft.crop(slot, min(length, self.draft.lengths[slot]))
