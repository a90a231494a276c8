"""On-policy text: answers sampled from the draft model replace the first answers of a batch.

Source: DistillSpec (arXiv:2310.08461) and GKD (arXiv:2306.13649), which train on samples of the
student.

Legend: N prompts, m sampled tokens, E end tokens, D hidden size of the model.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from outrider.models.interface import Batch
from outrider.models.target.target import Target

Draw = Callable[[Float[Tensor, "N D"]], Int[Tensor, "N 1"]]  # a token from each final state


class FirstAnswer(NamedTuple):
    """Location of a document's first answer: row of the batch, and columns."""

    row: int
    start: int  # of the document
    first: int  # of the answer
    stop: int  # of the document


def first_answers(batch: Batch) -> list[FirstAnswer]:
    """Return each document's first answer; at least one token precedes it."""
    spans = []
    rows = zip(batch.document.cpu(), batch.answer.tolist(), strict=True)
    for row, (document, answer) in enumerate(rows):
        for index in document.unique().tolist():
            columns = torch.nonzero(document == index).flatten().tolist()
            start, stop = columns[0], columns[-1] + 1
            first = max(start + 1, next((i for i in columns if answer[i]), stop))
            if index >= 0 and first < stop:
                spans.append(FirstAnswer(row, start, first, stop))
    return spans


def replace_answers(
    batch: Batch, spans: Sequence[FirstAnswer], answers: Sequence[Int[Tensor, " _"]]
) -> Batch:
    """Put an answer into each span; the rest of the document becomes padding."""
    ids, answer, document = (c.clone() for c in (batch.ids, batch.answer, batch.document))
    for (row, _, first, stop), text in zip(spans, answers, strict=True):
        end = first + len(text)
        ids[row, first:stop] = F.pad(text.to(ids.device), (0, stop - end))
        answer[row, first:end], answer[row, end:stop] = True, False
        document[row, end:stop] = -1
    return batch._replace(ids=ids, answer=answer, document=document)


def sample_answers(
    lm: Target, draw: Draw, batch: Batch, spans: Sequence[FirstAnswer], max_tokens: int
) -> list[Int[Tensor, " _"]]:
    """Sample an answer for each span, up to an end token, `max_tokens` or its document's end."""
    limits = [min(span.stop - span.first, max_tokens) for span in spans]
    prompts = [batch.ids[span.row, span.start : span.first].to(lm.device) for span in spans]
    ends = getattr(lm.text_config, "eos_token_id", None)
    end_ids = torch.tensor([] if ends is None else ends, dtype=torch.long, device=lm.device)
    end_ids = end_ids.flatten()
    texts = _sample(lm, draw, prompts, max(limits), end_ids)
    return [_cut_at_end(text[:limit], end_ids) for text, limit in zip(texts, limits, strict=True)]


@torch.no_grad()
def _sample(
    lm: Target,
    draw: Draw,
    prompts: Sequence[Int[Tensor, " _"]],
    count: int,
    end_ids: Int[Tensor, " E"],
) -> Int[Tensor, "N m"]:
    """Sample `count` tokens after each prompt, or fewer once all have ended."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=ids.device)
    columns = torch.arange(longest, device=ids.device)
    real, positions = columns >= padding[:, None], (columns - padding[:, None]).clamp(min=0)
    causal = columns <= columns[:, None]
    mask = (real[:, None, :] & causal) | torch.eye(longest, device=ids.device).bool()
    cache, text = lm.new_cache(longest + count, len(ids)), ids[:, :0]
    while True:
        ids = draw(lm.forward(ids, positions, mask, cache).last[:, -1])
        text, positions = torch.cat([text, ids], dim=1), positions[:, -1:] + 1
        real = F.pad(real, (0, 1), value=True)
        ended = torch.isin(text, end_ids).any(dim=1)
        if text.shape[1] == count or bool(ended.all()):
            return text
        mask = real[:, None, :]


def _cut_at_end(text: Int[Tensor, " m"], end_ids: Int[Tensor, " E"]) -> Int[Tensor, " n"]:
    """Cut after the first end token."""
    ends = torch.nonzero(torch.isin(text, end_ids)).flatten()
    return text[: int(ends[0]) + 1] if len(ends) else text
