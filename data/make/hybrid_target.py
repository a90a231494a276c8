"""Generator of a small Qwen3-Next: three gated delta rules per attention layer, no experts.

It learns the corpus of `models/tiny` with the tokenizer of that folder, so that acceptance by a
target with recurrent layers can be measured. It is not shipped.

    python -m outrider.data.make.hybrid_target --out tiny-hybrid   # ten minutes on one core

Equal versions, machine and thread count give equal weights.

Shape letters: B rows, T tokens of a row.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from outrider.data.make import tiny_target

STEPS, BATCH_TOKENS, POOL = 400, 2048, 256  # a pool of conversations is sorted by length
UNSUPERVISED = -100  # label of padding, as in transformers


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3NextForCausalLM:
    """Return the untrained model: 2.9 million parameters, float32."""
    torch.manual_seed(seed)
    config = Qwen3NextConfig(
        vocab_size=tiny_target.VOCABULARY, hidden_size=192, intermediate_size=384,
        num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
        linear_num_key_heads=2, linear_key_head_dim=32, linear_num_value_heads=4,
        linear_value_head_dim=32, num_experts=0, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.04, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def conversation_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]]:
    """Yield batches of about `BATCH_TOKENS` without end: ids and labels.

    A row is one conversation, padded at its end, because a state does not respect a mask between
    documents.
    """
    order = torch.Generator().manual_seed(seed)
    texts = tiny_target.texts(seed)
    while True:
        pool = [
            torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in itertools.islice(texts, POOL)
        ]
        pool.sort(key=len)
        batches, rows = list[list[Tensor]](), list[Tensor]()
        for row in pool:
            if rows and (len(rows) + 1) * len(row) > BATCH_TOKENS:
                batches.append(rows)
                rows = []
            rows.append(row)
        batches.append(rows)
        for index in torch.randperm(len(batches), generator=order).tolist():
            ids, labels = (
                torch.nn.utils.rnn.pad_sequence(batches[index], True, value)
                for value in (tokenizer.pad_token_id, UNSUPERVISED)
            )
            yield ids, labels


def next_token_loss(
    model: Qwen3NextForCausalLM, ids: Int[Tensor, "B T"], labels: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy in nats."""
    loss: Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(tiny_target.FOLDER, local_files_only=True)
    tiny_target.build(
        make_model(tokenizer), tokenizer, options.steps, options.out, conversation_batches,
        next_token_loss,
    )  # fmt: skip


if __name__ == "__main__":
    main()
