"""A run's text and the target's states in the layout that `speculators train` reads.

    state.json, data-*.arrow            ids, answer tokens and length of each conversation
    hidden_states/hs_{i}.safetensors    [S, K + 1, H]: tapped layers, the last one before its norm
    held_out.json                       the share of training conversations, which come first

Legend: S tokens of a conversation, K taps, H hidden size.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from outrider.conf.files import write_json
from outrider.data.tokenise import Document
from outrider.models.target.target import Target

SPLIT = "held_out.json"


def write(
    folder: Path, train: Sequence[Document], held: Sequence[Document], target: Target,
    taps: Sequence[int],
) -> None:  # fmt: skip
    """Write the conversations of a run; the file of the split is written last."""
    documents = [*train, *held]
    columns = {
        "input_ids": [document.ids.tolist() for document in documents],
        "loss_mask": [document.answer.astype(int).tolist() for document in documents],
        "seq_len": [len(document.ids) for document in documents],
    }
    table = Dataset.from_dict(columns)
    table.set_format("torch", columns=[*columns])
    table.save_to_disk(str(folder))
    states = folder / "hidden_states"
    states.mkdir(exist_ok=True)
    before, last = target.taps, target.num_layers - 1
    target.set_taps((*taps, last))
    for i, document in enumerate(documents):
        save_file(_states(document, target), states / f"hs_{i}.safetensors")
    target.set_taps(before)
    # the library trains on int(share * documents) conversations
    share = (len(train) + 0.5) / len(documents)
    tokens = sum(columns["seq_len"][: len(train)])
    write_json(folder / SPLIT, {"share": share, "documents": len(train), "tokens": tokens})


@torch.no_grad()
def _states(document: Document, target: Target) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(document.ids).long()[None]
    answer, positions = torch.from_numpy(document.answer)[None], torch.arange(ids.shape[1])[None]
    place = target.device
    trace = target.trace(
        ids.to(place), answer.to(place), torch.zeros_like(ids).to(place), positions.to(place)
    )
    states = trace.taps[0].unflatten(-1, (len(target.taps), -1)).float().cpu()
    return {"hidden_states": states.contiguous(), "token_ids": ids[0]}
