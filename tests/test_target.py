"""The target in every family: taps, head, cache and tree forward."""

from typing import Any

import pytest
import torch
import transformers as hf

from outrider.conf.errors import ConfigError
from outrider.models.target import target_check
from outrider.models.target.target import Target
from tests.families import FAMILIES, small_model

PREFIX, TOLERANCE = 12, 1e-4

# a tree after the prefix: node 0 is the root, parents[i] < i
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
DEPTHS = [0, 1, 1, 2, 2, 2, 3]


@pytest.fixture(params=FAMILIES, scope="module")
def target(request: pytest.FixtureRequest) -> Target:
    return Target(small_model(request.param), taps=(0, 2), name=request.param)


def path_to(node: int) -> list[int]:
    path = [node]
    while PARENTS[path[-1]] >= 0:
        path.append(PARENTS[path[-1]])
    return path[::-1]


def tree_mask(prefix: int) -> torch.Tensor:
    nodes = len(PARENTS)
    seen = torch.zeros(1, nodes, prefix + nodes, dtype=torch.bool)
    seen[..., :prefix] = True
    for node in range(nodes):
        seen[0, node, [prefix + i for i in path_to(node)]] = True
    return seen


def causal(count: int, past: int = 0) -> torch.Tensor:
    return torch.ones(1, count, past + count, dtype=torch.bool).tril(past)


def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """The model's own logits of one sequence, without cache and mask."""
    with torch.no_grad():
        out: torch.Tensor = target.model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return out[0]


def test_target_agrees_with_the_model(target: Target) -> None:
    target_check.check_target(target)


def test_tree_forward_equals_every_path_alone(target: Target) -> None:
    """Before and after a commit that skips rows, and after a crop."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(3, 61, (40,), generator=generator).tolist()
    tree = torch.randint(3, 61, (len(PARENTS),), generator=generator)
    cache = target.new_cache(64)
    prompt = text[:PREFIX]
    target.forward(torch.tensor([prompt]), torch.arange(PREFIX)[None], causal(PREFIX), cache)
    for accepted in ([0, 1, 4], [0, 2, 5]):
        start = cache.lengths[0]
        positions = torch.tensor([DEPTHS]) + start
        seen = target.forward(tree[None], positions, tree_mask(start), cache)
        logits = target.logits(seen.last[0])
        for node in range(len(PARENTS)):
            alone = plain_logits(target, prompt + [int(tree[i]) for i in path_to(node)])
            torch.testing.assert_close(logits[node], alone[-1], atol=TOLERANCE, rtol=TOLERANCE)
        cache.keep_rows([accepted], torch.tensor([accepted]))
        prompt = prompt + [int(tree[i]) for i in accepted]
        assert cache.lengths[0] == len(prompt)
    cache.crop(0, PREFIX)
    prompt = text[:PREFIX] + text[20:23]
    ids, positions = torch.tensor([text[20:23]]), torch.arange(PREFIX, PREFIX + 3)[None]
    seen = target.forward(ids, positions, causal(3, PREFIX), cache)
    alone = plain_logits(target, prompt)[-3:]
    torch.testing.assert_close(target.logits(seen.last[0]), alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_wrong_mask_fails_the_comparison(target: Target) -> None:
    """Negative control: nodes that attend to their siblings give other logits."""
    prompt = torch.arange(3, 3 + PREFIX)
    tree = torch.arange(20, 20 + len(PARENTS))
    cache = target.new_cache(64)
    target.forward(prompt[None], torch.arange(PREFIX)[None], causal(PREFIX), cache)
    wrong = causal(len(PARENTS), PREFIX)
    seen = target.forward(tree[None], torch.tensor([DEPTHS]) + PREFIX, wrong, cache)
    alone = plain_logits(target, prompt.tolist() + [int(tree[i]) for i in path_to(6)])
    assert (target.logits(seen.last[0])[6] - alone[-1]).abs().max() > 10 * TOLERANCE


def test_packed_documents_do_not_attend_to_each_other(target: Target) -> None:
    a, b = list(range(5, 14)), list(range(30, 37))
    ids = torch.tensor([a + b + [0] * 3])
    document = torch.tensor([[4] * len(a) + [9] * len(b) + [-1] * 3])
    positions = torch.tensor([[*range(len(a)), *range(len(b)), *range(3)]])
    trace = target.trace(ids, torch.ones_like(ids).bool(), document, positions)
    for start, part in ((0, a), (len(a), b)):
        own = plain_logits(target, part)
        rows = target.logits(trace.last[0, start : start + len(part)])
        torch.testing.assert_close(rows, own, atol=TOLERANCE, rtol=TOLERANCE)


def test_taps_are_outputs_of_their_layers(target: Target) -> None:
    """hidden_states[k+1] is the output of layer k, but for the last (that one is normed)."""
    ids = torch.arange(3, 3 + PREFIX)[None]
    with torch.no_grad():
        states = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    seen = target.forward(ids, torch.arange(PREFIX)[None], causal(PREFIX))
    torch.testing.assert_close(seen.taps, torch.cat([states[1], states[3]], -1))


def test_a_tap_out_of_range_names_the_valid_layers() -> None:
    with pytest.raises(ConfigError, match=r"drafter.taps\[1\] = 4\n.*0\.\.3"):
        Target(small_model("llama"), taps=(0, 4))


def test_logits_of_some_tokens_are_a_part_of_all_logits(target: Target) -> None:
    last, ids = torch.randn(3, 32), torch.tensor([1, 7, 60])
    torch.testing.assert_close(target.logits_of(last, ids), target.logits(last)[:, ids])


def test_rows_of_the_head_are_kept_while_their_ids_are(target: Target) -> None:
    last, first, second = torch.randn(2, 32), torch.tensor([1, 2]), torch.tensor([3, 4])
    for ids in (first, second, first):
        expected = target.logits(last)[:, ids]
        torch.testing.assert_close(target.logits_of(last, ids), expected)
    kept = target._head_rows[first][0]
    target.logits_of(last, second)
    assert target._head_rows[first][0] is kept
    del second, ids
    assert len(target._head_rows) == 1


def test_a_full_cache_raises() -> None:
    target = Target(small_model("llama"))
    nine = torch.arange(9)[None]
    with pytest.raises(ValueError, match="do not fit"):
        target.forward(nine, nine, causal(9), target.new_cache(8))


# ---- wrappers of text models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "wrapper", "config"),
    [
        ("llama4", hf.Llama4ForConditionalGeneration, hf.Llama4Config),
        ("gemma3", hf.Gemma3ForConditionalGeneration, hf.Gemma3Config),
    ],
)
def test_decoder_of_a_wrapper_is_its_text_model(family: str, wrapper: Any, config: Any) -> None:
    """`get_decoder` of Llama-4's wrapper returns a model with a head."""
    text = small_model(family)
    sizes = ("hidden_size", "intermediate_size", "vision_output_dim", "projector_input_dim",
             "projector_output_dim")  # fmt: skip
    vision = {**dict.fromkeys(sizes, 32), "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = config(text_config=text.config.to_dict(), vision_config=vision)
    target = Target(wrapper(whole).float().eval(), name="wrapper")
    assert type(target.base_model) is type(text.model)
    target.base_model.load_state_dict(text.model.state_dict())
    rows = torch.arange(3, 3 + PREFIX)[None], torch.arange(PREFIX)[None], causal(PREFIX)
    torch.testing.assert_close(target.forward(*rows).last, Target(text).forward(*rows).last)
    target_check.check_target(target)
