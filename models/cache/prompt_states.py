"""States of recurrent layers that are values of prompts, for one forward over several prompts.

`RecurrentStates` has them in slots instead.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.cache.recurrent_states import Call, RecurrentStates, States, join_rows


class PromptStates(RecurrentStates):
    """The states of some prompts, which recurrent modules continue on new rows.

    Attributes:
        after: of each prompt, the states after its text, and after its branch; empty: none.
    """

    def __init__(
        self, before: Sequence[tuple[States, States]], counts: Sequence[int],
        verified: Sequence[int],
    ) -> None:  # fmt: skip
        """
        Args:
            before: as `after`; they are not modified.
            counts, verified: see `StateCache`.
        """
        super().__init__(len(counts))
        self._pieces = [
            sorted({0, own, count}) for own, count in zip(verified, counts, strict=True)
        ]
        self._verified = verified
        # a branch is dropped when its text grows
        starts = [
            text if own or not branch else branch
            for (text, branch), own in zip(before, verified, strict=True)
        ]
        self._known = [bool(start) for start in starts]
        self._now = [{key: state.clone() for key, state in start.items()} for start in starts]
        self.after = [
            (States(), States()) if own else (text, States())
            for (text, _), own in zip(before, verified, strict=True)
        ]

    def __len__(self) -> int:
        return len({layer for _, layer, _ in self._now[0]})

    @property
    def continues_text(self) -> bool:
        return any(self._known) and self.count > 1

    def ignores_state(self, call: Call) -> bool:
        prompt = self._known.index(True)
        part = self._part_of(prompt, self.count)
        self._part = part
        try:
            return part.ignores_state(call.part(self.count, slice(None), self._index(prompt)))
        finally:
            self._part = None

    def run(self, call: Call, by_rows: bool) -> Any:
        outputs = [self._run_prompt(call, prompt, by_rows) for prompt in range(len(self._now))]
        return _stack(outputs, self.count)

    def _run_prompt(self, call: Call, prompt: int, by_rows: bool) -> Any:
        """Run a module on the new rows of a prompt, and keep its states after each piece."""
        outputs, own = list[Any](), self._index(prompt)
        for start, stop in pairwise(self._pieces[prompt]):
            part = self._part_of(prompt, stop - start, filled=start > 0)
            self._part = part
            try:
                piece = call.part(self.count, slice(start, stop), own)
                outputs.append(part.run(piece, by_rows))
            finally:
                self._part = None
            states = {key: self._now[prompt][key].clone() for key in part._touched}
            self.after[prompt][start >= self._verified[prompt]].update(states)
        return join_rows(outputs)

    def _part_of(self, prompt: int, count: int, filled: bool = False) -> RecurrentStates:
        part = RecurrentStates(1)
        part._states, part._filled = self._now[prompt], [self._known[prompt] or filled]
        part.count = count
        return part

    def _index(self, prompt: int) -> Tensor:
        return torch.tensor([prompt])


def _stack(outputs: Sequence[Any], count: int) -> Any:
    """Pad the rows of prompts to `count`, and stack them."""
    if isinstance(outputs[0], tuple):
        return tuple(_stack(part, count) for part in zip(*outputs, strict=True))
    if not isinstance(outputs[0], Tensor):
        return outputs[0]
    padded = []
    for out in outputs:
        sides = [0, 0] * (out.dim() - 2) + [0, max(0, count - out.shape[1])]
        padded.append(F.pad(out, sides))
    return torch.cat(padded)
