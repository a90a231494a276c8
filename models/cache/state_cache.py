"""Key-value cache of one forward over prompts whose keys and values are in their states.

Verified rows grow in place (`layer_rows.py`), so a draft token copies nothing of the text. Columns
are aligned at the new rows: two prompts with states of two and four rows, three and two new tokens
(n: new, .: padding, which the mask must exclude):

    . . r r n n n
    r r r r n n .

States of recurrent layers are values, too: one after the text and one after the branch, which then
is a chain. Recurrent modules run prompt by prompt, first on verified rows, then on drafted ones.

Legend: B prompts, W new columns, S columns, G query heads, A key heads, C head size, M drafted
rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.cache.attention_cache import AttentionCache
from outrider.models.cache.layer_rows import LayerRows
from outrider.models.cache.prompt_states import PromptStates
from outrider.models.cache.recurrent_states import States


class PromptRows(NamedTuple):
    """Keys and values of a prompt: of every layer; no layers at its start.

    Attributes:
        layers: by number; recurrent layers have none.
        branch_positions: of the rows of draft tokens; verified rows have 0, 1, 2, ..
        text, branch: states of recurrent layers after the verified rows, and after the others.
    """

    layers: Mapping[int, LayerRows]
    branch_positions: Int[Tensor, " M"]
    text: States = States()
    branch: States = States()

    @property
    def length(self) -> int:
        """Number of verified rows."""
        return max(map(len, self.layers.values()), default=0)

    def without_branch(self) -> "PromptRows":
        layers = {i: LayerRows(rows.keys, rows.values) for i, rows in self.layers.items()}
        return PromptRows(layers, self.branch_positions[:0], self.text)


class StateCache(AttentionCache):
    """The rows of some prompts and those that a forward appends.

    Attributes:
        length: columns before the new ones.
        padding: of each prompt, columns before its first row.
    """

    def __init__(
        self, prompts: Sequence[PromptRows], counts: Sequence[int], verified: Sequence[int]
    ) -> None:
        """
        Args:
            counts: of each prompt, new rows; the other new columns are padding.
            verified: how many of them, from the first on, are of verified tokens.
        """
        super().__init__()
        self.counts, self.verified = counts, verified
        before = [(prompt.text, prompt.branch) for prompt in prompts]
        self.states = self._states = PromptStates(before, counts, verified)
        self._before = prompts
        self._rows = [dict(prompt.layers) for prompt in prompts]
        old = [prompt.length + len(prompt.branch_positions) for prompt in prompts]
        self.length = max(old)
        self.padding = [self.length - count for count in old]
        self._branch_positions = [prompt.branch_positions for prompt in prompts]

    def prompt(self, index: int) -> PromptRows:
        """Return the rows of a prompt after the forward."""
        states = self._states.after[index]
        return PromptRows(self._rows[index], self._branch_positions[index], *states)

    # ---- a forward, as in KVCache ----

    def reserve(self, count: int) -> None:
        assert count == max(self.counts), "new columns"
        self.states.count = count

    def commit(self, positions: Int[Tensor, "B W"]) -> None:
        for i, (count, verified) in enumerate(zip(self.counts, self.verified, strict=True)):
            old = self._branch_positions[i][: 0 if verified else None]
            self._branch_positions[i] = torch.cat([old, positions[i, verified:count]])

    def column_positions(self, positions: Int[Tensor, "B W"]) -> Int[Tensor, "B S"]:
        """Return the position of every column."""
        out = list[Tensor]()
        for prompt, new, padding in zip(self._before, positions, self.padding, strict=True):
            text = torch.arange(-padding, prompt.length, device=new.device).clamp(min=0)
            out.append(torch.cat([text, prompt.branch_positions, new]))
        return torch.stack(out)

    def attend(
        self,
        query: Float[Tensor, "B G W C"],
        key: Float[Tensor, "B A W C"],
        value: Float[Tensor, "B A W C"],
        layer: int,
        mask: Float[Tensor, "B 1 W S"],
        scale: float,
    ) -> Float[Tensor, "B G W C"]:
        """Append rows and attend to all; called by every layer of `FastLlama`."""
        out = list[Tensor]()
        for i, count in enumerate(self.counts):
            rows = self._append(i, layer, key[i], value[i])
            bias = mask[i, 0, :count, self.padding[i] : self.length + count]
            attended = rows.attend(query[i, :, :count].transpose(0, 1), bias, scale)
            out.append(F.pad(attended, (0, 0, 0, 0, 0, query.shape[2] - count)))
        return torch.stack(out).transpose(1, 2)

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Float[Tensor, "B A S C"], Float[Tensor, "B A S Cv"]]:
        """Append rows and return a copy of all; called by the modules of transformers."""
        keys, values = list[Tensor](), list[Tensor]()
        for i, (count, padding) in enumerate(zip(self.counts, self.padding, strict=True)):
            rows = self._append(i, layer_idx, key[i], value[i])
            branch = rows.branch or (rows.keys.rows[:0], rows.values.rows[:0])
            sides = (0, 0, 0, 0, padding, key.shape[2] - count)
            keys.append(F.pad(torch.cat([rows.keys.rows, branch[0]]), sides))
            values.append(F.pad(torch.cat([rows.values.rows, branch[1]]), sides))
        return torch.stack(keys).transpose(1, 2), torch.stack(values).transpose(1, 2)

    def _append(
        self, index: int, layer: int, key: Float[Tensor, "A W C"], value: Float[Tensor, "A W Cv"]
    ) -> LayerRows:
        """Append the new rows of a prompt to those of a layer."""
        count, verified = self.counts[index], self.verified[index]
        key, value = (part[:, :count].transpose(0, 1) for part in (key, value))
        rows = self._rows[index].get(layer) or LayerRows.empty_like(key, value)
        if verified:
            rows = rows.append(key[:verified], value[:verified])
        if count > verified:
            rows = rows.append_draft(key[verified:], value[verified:])
        self._rows[index][layer] = rows
        return rows

    # ---- interface of transformers ----

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length + max(self.counts)
