"""The embedded target and its text: size, reproducibility, held-out prompts, calibration."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from outrider.data.make import tiny_target
from outrider.data.make.corpus import make_corpus
from outrider.data.make.corpus.dice import Dice, ranked

TEXT = make_corpus.FOLDER
MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_target.FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        tiny_target.FOLDER, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def conversations() -> list[make_corpus.Conversation]:
    return make_corpus.shipped_conversations()


@pytest.fixture(scope="module")
def held_out(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of 100 conversations of a seed that neither training nor the files use."""
    texts = itertools.islice(tiny_target.texts(make_corpus.HELD_OUT_SEED), 100)
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def rows(model: PreTrainedModel, held_out: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Nats per held-out token, and the entropy of the model's distribution at its position."""
    nats, entropies = [], []
    for ids in held_out:
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nats.append(-log_p.gather(1, torch.tensor(ids)[1:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(nats), torch.cat(entropies)


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shipped_ids(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    rows = read(TEXT / "conversations.jsonl")
    return [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]


def test_the_weights_fit_into_eight_megabytes() -> None:
    assert (tiny_target.FOLDER / "model.safetensors").stat().st_size <= 8 * MEGABYTE


def test_the_text_fits_into_one_and_a_half_megabytes() -> None:
    assert sum(path.stat().st_size for path in TEXT.glob("*.jsonl")) <= 1.5 * MEGABYTE


def test_loading_needs_no_code_from_the_folder() -> None:
    assert "auto_map" not in json.loads((tiny_target.FOLDER / "config.json").read_text())
    assert [path.name for path in tiny_target.FOLDER.glob("*.py")] == ["__init__.py"]


def test_the_default_taps_are_three_different_layers(model: PreTrainedModel) -> None:
    n = model.config.num_hidden_layers
    assert 0 <= 1 < n // 2 - 1 < n - 4 < n


def test_the_shipped_text_is_what_the_script_makes(
    conversations: list[make_corpus.Conversation],
) -> None:
    rebuilt = make_corpus.to_jsonl(conversations)
    assert (TEXT / "conversations.jsonl").read_bytes() == rebuilt
    assert (TEXT / "prompts.jsonl").read_bytes() == make_corpus.to_jsonl(
        make_corpus.held_out_prompts()
    )


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_the_script_makes(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rebuilt = tiny_target.make_tokenizer()
    assert rebuilt.get_vocab() == tokenizer.get_vocab()
    assert rebuilt.chat_template == tokenizer.chat_template


def test_no_held_out_prompt_is_in_the_conversations(
    conversations: list[make_corpus.Conversation],
) -> None:
    questions = {
        message["content"]
        for row in conversations
        for message in row["messages"]
        if message["role"] == "user"
    }
    first = [row["turns"][0] for row in make_corpus.held_out_prompts()]
    assert len(set(first)) == len(first) >= 40
    assert questions.isdisjoint(first)


def test_a_stream_repeats_with_its_seed_and_differs_without() -> None:
    def rows(seed: int) -> list[make_corpus.Conversation]:
        return list(itertools.islice(make_corpus.stream(seed), 20))

    assert rows(5) == rows(5) != rows(6)


def test_dice_choose_each_rank_as_often_as_its_weight() -> None:
    """Slope 1 over three options: shares 1, 1/2, 1/3 of their sum 11/6; six sigma of 20000."""
    dice, options, draws = Dice(3), ("x", "y", "z"), 20_000
    counts = Counter(dice.choose(options, "here", slope=1.0) for _ in range(draws))
    for rank, option in enumerate(ranked(options, "here"), start=1):
        share = (1 / rank) / (11 / 6)
        sigma = math.sqrt(share * (1 - share) / draws)
        assert abs(counts[option] / draws - share) < 6 * sigma


def test_the_answer_mask_covers_each_answer_and_its_end_token(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [
        {"role": "system", "content": "You are an old sailor."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Ahoy! Hi!"},
        {"role": "user", "content": "What does the murlo eat?"},
        {"role": "assistant", "content": "Ahoy! Moss."},
    ]
    out = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = zip(out["input_ids"], out["assistant_masks"], strict=True)
    answers = tokenizer.decode([token for token, answer in marked if answer])
    assert answers == "Ahoy! Hi!<|end|>Ahoy! Moss.<|end|>"


def test_the_template_writes_what_the_model_was_trained_on(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for row, text in itertools.islice(
        zip(make_corpus.stream(1), tiny_target.texts(1), strict=True), 50
    ):
        assert tokenizer.apply_chat_template(row["messages"], tokenize=False) == text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_each_role_is_one_token_and_the_end_token_ends(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    assert all(len(tokenizer(piece)["input_ids"]) == 1 for piece in tiny_target.SPECIAL)
    assert tokenizer.eos_token == "<|end|>" != tokenizer.pad_token
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "  caf\u00e9 \U0001f600\n\tdef f(x):  # 10% {}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_model_beats_unigram_and_bigram_models(
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[list[int]],
    rows: tuple[Tensor, Tensor],
) -> None:
    """Less than a quarter of the unigram loss, less than half of the bigram one.

    Both are counted on the shipped conversations with add-one smoothing; the bigram model falls
    back on the unigram one with weight one.
    """
    vocabulary = len(tokenizer)
    documents = shipped_ids(tokenizer)
    single = Counter(itertools.chain.from_iterable(documents))
    pairs = Counter(itertools.chain.from_iterable(map(itertools.pairwise, documents)))
    total = single.total() + vocabulary
    one, two = [], []
    for before, token in itertools.chain.from_iterable(map(itertools.pairwise, held_out)):
        p = (single[token] + 1) / total
        one.append(-math.log(p))
        two.append(-math.log((pairs[before, token] + p) / (single[before] + 1)))
    loss, unigram, bigram = rows[0].mean().item(), sum(one) / len(one), sum(two) / len(two)
    assert unigram < math.log(vocabulary)
    assert loss < unigram / 4
    assert loss < bigram / 2


def test_the_model_is_calibrated(rows: tuple[Tensor, Tensor]) -> None:
    """Expected loss under the true distribution is its entropy; a calibrated model meets it."""
    nats, entropy = rows
    error = nats.std() / math.sqrt(len(nats))
    assert abs(nats.mean() - entropy.mean()) < 5 * error


def test_the_entropy_of_the_text_is_neither_zero_nor_that_of_noise(
    rows: tuple[Tensor, Tensor],
) -> None:
    """Between one bit at every third token and a uniform choice of three at every token."""
    assert math.log(2) / 3 < rows[1].mean() < math.log(3)


def test_greedy_answers_end_with_the_end_token(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """Nine in ten of the held-out prompts, two of each category, are answered within 200 tokens."""
    rows = make_corpus.held_out_prompts()[::2]
    dialogues = [[{"role": "user", "content": row["turns"][0]}] for row in rows]
    batch = tokenizer.apply_chat_template(
        dialogues,
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
        tokenizer_kwargs={"padding_side": "left"},
    )
    new = model.generate(**batch, max_new_tokens=200, do_sample=False)
    answers = new[:, batch["input_ids"].shape[1] :]
    ended = (answers == tokenizer.eos_token_id).any(1)
    assert ended.float().mean() >= 0.9
    assert (answers[:, 0] != tokenizer.eos_token_id).all(), "an answer is empty"
