"""Generator of `models/tiny`: a small Llama trained on the corpus, shipped as bf16.

Eight narrow layers rather than a few wide ones: a one-layer drafter is then clearly cheaper than
its target even on a CPU, and EAGLE-3's default taps are three different layers.

    python -m outrider.data.make.tiny_target   # about 20 minutes on one core; rebuilds models/tiny

Equal versions, machine and thread count give equal weights; the text is equal everywhere.

Shape letters: B rows, T tokens of a row.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from outrider.data.make.corpus import make_corpus
from outrider.models.cache.attention_masks import document_mask

FOLDER = Path(__file__).parents[2] / "models" / "tiny"
VOCABULARY, TOKENIZER_ROWS = 1536, 12_000
PAD, END, SYSTEM, USER, ASSISTANT = SPECIAL = (
    "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
CHAT_TEMPLATE = "".join(
    map(str.strip, Path(__file__).with_name("chat_template.jinja").read_text().splitlines())
)
STEPS, WARMUP, ROWS, ROW_TOKENS, PEAK_LR = 1900, 60, 8, 256, 4e-3

Batch: TypeAlias = tuple[Tensor, Tensor]
Batches: TypeAlias = Callable[[PreTrainedTokenizerFast, int], Iterator[Batch]]  # of a seed
Loss: TypeAlias = Callable[..., Tensor]  # of a model and a batch: nats per token


def texts(seed: int) -> Iterator[str]:
    """Yield the conversations of `stream(seed)` as the chat template renders them."""
    for row in make_corpus.stream(seed):
        yield "".join(f"<|{m['role']}|>{m['content']}{END}" for m in row["messages"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of `VOCABULARY` tokens; each digit is a token of its own."""
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = Sequence(
        [Split(Regex(r"\d"), behavior="isolated"), ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL),
        initial_alphabet=ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    rows = itertools.islice(texts(make_corpus.TARGET_SEED), TOKENIZER_ROWS)
    bpe.train_from_iterator(rows, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT], model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """Return the untrained model: 3.4 million parameters, float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.04, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def packed_batches(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> Iterator[tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]]:
    """Yield full batches without end: ids, and the index of the document of each token.

    A document that does not fit continues in the next row, as a document of its own.
    """
    ids, documents, size = list[int](), list[int](), ROWS * ROW_TOKENS
    for document, text in enumerate(texts(seed)):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        documents += [document] * len(tokens)
        if len(ids) >= size:
            full = torch.tensor([ids[:size], documents[:size]]).view(2, ROWS, ROW_TOKENS)
            yield full[0], full[1]
            ids, documents = ids[size:], documents[size:]


def next_token_loss(
    model: LlamaForCausalLM, ids: Int[Tensor, "B T"], documents: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy in nats over tokens whose predecessor is of their document."""
    mask = document_mask(documents)
    positions = mask.sum(-1) - 1  # of each token in its document
    logits = model(input_ids=ids, attention_mask=mask[:, None], position_ids=positions).logits
    inside = documents[:, 1:] == documents[:, :-1]
    return F.cross_entropy(logits[:, :-1][inside].float(), ids[:, 1:][inside])


def lr_factor(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine to 0.05."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    progress = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


def train(model: PreTrainedModel, batches: Iterator[Batch], steps: int, loss_of: Loss) -> None:
    """Train with AdamW on fresh text; a conversation repeats only by chance."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps))
    start = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, *batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - start
            print(f"step {step}/{steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True)


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel, batches: Iterator[Batch], loss_of: Loss, count: int = 10
) -> float:
    """Return the mean loss in nats on the first batches."""
    return sum(loss_of(model, *batch).item() for batch in itertools.islice(batches, count)) / count


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 weights, configuration and tokenizer, its chat template inside its json."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def build(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, folder: Path,
    batches_of: Batches = packed_batches, loss_of: Loss = next_token_loss,
) -> None:  # fmt: skip
    """Train a model, print its loss on conversations that training does not use, and save it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(f"{model.num_parameters():,} parameters", flush=True)
    train(model, batches_of(tokenizer, make_corpus.TARGET_SEED), steps, loss_of)
    model.eval().to(torch.bfloat16).float()
    held_out = mean_loss(model, batches_of(tokenizer, make_corpus.HELD_OUT_SEED), loss_of)
    print(f"held-out loss {held_out:.3f} nats per token")
    save(model, tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    make_corpus.main()
    tokenizer = make_tokenizer()
    build(make_model(tokenizer), tokenizer, options.steps, options.out)


if __name__ == "__main__":
    main()
