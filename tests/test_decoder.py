"""The decoder for scripts: prompts of every kind, stop strings, seeds, batches, dialogues, folders.

The target is a random model over bytes, so that most tokens are only a part of a character. The
drafter proposes the target's tokens (or mostly does), and refuses rows that do not continue
what it has absorbed (tests/tiny.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.conf.errors import ConfigError, RunError
from outrider.data.conversations import Message
from outrider.data.tokenise import prompt_ids
from outrider.eval.decoder import Decoder, Piece
from outrider.eval.requests import PLAIN as ALONE
from outrider.eval.requests import Prompt
from outrider.models.decode.dynamic_tree import DynamicTree
from outrider.models.decode.engine import Engine
from outrider.models.decode.policy import Chain, Policy
from outrider.models.decode.request import DialogueCache, Request, Stops
from outrider.models.decode.rules.rule_table import DRAWN, bind_rule
from outrider.models.decode.sampling_params import Sampling
from outrider.models.decode.static_tree import StaticTree
from outrider.models.decode.tree_shapes import parse
from outrider.models.target.load import stop_ids
from outrider.models.target.target import Target, TargetStates
from tests.families import small_model
from tests.shapes import unchecked
from tests.test_tokenise import PLAIN, byte_tokenizer, dialogue
from tests.tiny import ScriptedDrafter, Text

QUESTION = "why?"
DIALOGUE = dialogue(QUESTION)
BUDGET = 24
POSITIONS = 512
CHAIN, TREE = Chain(5), DynamicTree(depth=4, width=3, budget=9)
SAMPLED = StaticTree(parse([(0,), (1,), (0, 0)]), DRAWN)
POLICIES = pytest.mark.parametrize("policy", [ALONE, CHAIN, TREE], ids=["plain", "chain", "tree"])
HEATS = pytest.mark.parametrize("heat", [0.0, 0.8], ids=["greedy", "sampled"])
# earlier answers are rendered without their last two characters: the history differs from them
FORGETFUL = PLAIN.replace(
    "{{ m.content }}",
    "{{ m.content if loop.last or m.role == 'user' else m.content[:-2] }}",
)


@cache
def target() -> Target:
    coder = byte_tokenizer(PLAIN)
    changes = {"eos_token_id": coder.eos_token_id, "max_position_embeddings": POSITIONS}
    return Target(small_model("llama", vocab_size=len(coder), **changes), name="bytes")


def oracle(right: Callable[[int], bool]) -> ScriptedDrafter:
    """The target's logits of the n-th token, negated unless right(n)."""

    @cache
    def row(text: Text) -> Tensor:
        logits: Tensor = target().model(input_ids=torch.tensor([text])).logits[0, -1]
        return logits if right(len(text)) else -logits

    return ScriptedDrafter(row, target().vocab_size)


@cache
def decoder(template: str = PLAIN) -> Decoder:
    return Decoder(target(), byte_tokenizer(template), oracle(lambda n: n % 3 > 0), CHAIN)


@cache
def perfect() -> Decoder:
    return Decoder(target(), byte_tokenizer(PLAIN), oracle(lambda n: True), CHAIN)


def letters_only() -> dict[str, Any]:
    """Small letters, none of them too often."""
    coder = byte_tokenizer(PLAIN)
    banned = [i for i in range(len(coder)) if coder.decode([i]) not in "abcdefghijklmnopqrstuvwxyz"]
    return {"banned": banned, "repetition_penalty": 10.0}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every forward of the target."""
    seen: list[list[int]] = []
    forward = Target.forward

    def recorded(self: Target, ids: Tensor, *rest: Any, **more: Any) -> TargetStates:
        seen.append(ids[0].tolist())
        return forward(self, ids, *rest, **more)

    monkeypatch.setattr(Target, "forward", recorded)
    return seen


# ---- prompts and answers -------------------------------------------------------------------------


def test_tokens_text_and_messages_are_prompts() -> None:
    """Text is tokenised as it is; messages are rendered by the template, ready to be answered."""
    ours, coder = decoder(), byte_tokenizer(PLAIN)
    bare, rendered = coder(QUESTION)["input_ids"], prompt_ids(coder, DIALOGUE)
    assert bare != rendered
    prompts: list[Prompt] = [bare, QUESTION, DIALOGUE, [QUESTION]]
    for prompt, ids in zip(prompts, (bare, bare, rendered, rendered), strict=True):
        assert ours.ids(prompt) == ids
        assert ours.generate(prompt, 8).output_ids == ours.generate(ids, 8).output_ids
    assert ours.generate(bare, 8).output_ids != ours.generate(rendered, 8).output_ids


@POLICIES
@HEATS
def test_generate_matches_the_engine(policy: str | Policy, heat: float) -> None:
    ours = decoder().generate(DIALOGUE, BUDGET, temperature=heat, seed=5, policy=policy)
    coder, shape = byte_tokenizer(PLAIN), None if isinstance(policy, str) else policy
    engine = Engine(
        target(),
        decoder().drafter if shape is not None else None,
        shape,
        sampling=Sampling(heat),
        stops=Stops(stop_ids(coder, target())),
    )
    (out,) = engine.generate_all([Request(prompt_ids(coder, DIALOGUE), BUDGET, 5)], 1)
    assert (ours.output_ids, ours.origins, ours.accepted) == (out.ids, out.origins, out.accepted)
    assert (ours.tau, ours.stop_reason) == (out.tau, out.stop_reason)
    assert len(ours.origins) == len(ours.output_ids) == 1 + sum(n + 1 for n in ours.accepted)


@POLICIES
def test_greedy_answers_match_the_target(policy: str | Policy) -> None:
    own = decoder().generate(DIALOGUE, BUDGET, policy=ALONE)
    ours = decoder().generate(DIALOGUE, BUDGET, policy=policy)
    assert ours.output_ids == own.output_ids
    assert set(own.origins[1:]) == {"bonus"}
    assert own.tau == 1
    assert policy == ALONE or "accepted" in ours.origins


@POLICIES
@HEATS
def test_stream_pieces_concatenate_to_the_answer(policy: str | Policy, heat: float) -> None:
    """Bytes come one by one, so that pieces end within characters; nothing is repeated."""
    how: dict[str, Any] = {"temperature": heat, "seed": 3, "policy": policy}
    pieces = list(decoder().stream(DIALOGUE, BUDGET, **how))
    whole = decoder().generate(DIALOGUE, BUDGET, **how)
    assert [token for piece in pieces for token in piece.ids] == whole.output_ids
    assert [origin for piece in pieces for origin in piece.origins] == whole.origins
    assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].result.text
    assert len(pieces) == 1 + len(whole.accepted)
    assert pieces[-1].result.stop_reason == whole.stop_reason != ""
    assert all(piece.result.stop_reason == "" for piece in pieces[:-1])


def test_incomplete_characters_are_held_back() -> None:
    coder = byte_tokenizer(PLAIN)
    tokens = [*coder("n\u00e9\U0001f600.")["input_ids"], coder.eos_token_id]

    def row(text: Text) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(tokens[len(text)]), len(coder)).float()

    pieces = stream_of(row)
    assert [piece.text for piece in pieces] == [
        "n",
        "",
        "\u00e9",
        "",
        "",
        "",
        "\U0001f600",
        ".",
        "",
    ]
    assert (pieces[-1].result.text, pieces[-1].result.stop_reason) == (
        "n\u00e9\U0001f600.",
        "end token",
    )
    assert pieces[-1].result.output_ids == tokens


def stream_of(row: Callable[[Text], Tensor]) -> list[Piece]:
    """What plain decoding makes of a target whose logits are `row`; its prompt is not read."""

    class Scripted(Target):
        steps = 0

        def logits(self, last: Tensor) -> Tensor:
            logits = row(tuple(range(self.steps)))
            self.steps += 1
            return logits.expand(*last.shape[:-1], -1)

    script = Scripted(target().model)
    return list(Decoder(script, byte_tokenizer(PLAIN), None, ALONE).stream("?", BUDGET))


def test_a_budget_of_0_gives_no_tokens() -> None:
    none = decoder().generate(DIALOGUE, 0)
    assert (none.output_ids, none.text, none.tau, none.tokens_per_second) == ([], "", None, None)


# ---- stop strings --------------------------------------------------------------------------------


@pytest.fixture(name="text", scope="module")
def unstopped() -> str:
    """The answer without a stop string: one token per letter."""
    whole = perfect().generate(DIALOGUE, BUDGET, **letters_only())
    assert len(whole.text) == len(whole.output_ids) == BUDGET
    assert len(set(whole.text)) > 8
    return whole.text


@POLICIES
@pytest.mark.parametrize("size", [1, 3])
def test_text_ends_before_a_stop_string(text: str, policy: str | Policy, size: int) -> None:
    """Wherever it stands: at the start, over the border of a round, inside what was accepted."""
    for start in range(BUDGET - size):
        stop = text[start : start + size]
        first = text.find(stop)
        pieces = list(
            perfect().stream(DIALOGUE, BUDGET, stop=[stop], policy=policy, **letters_only())
        )
        ours = pieces[-1].result
        assert (ours.text, ours.stop_reason) == (text[:first], "stop string")
        assert perfect().text(ours.output_ids) == text[: first + size]
        assert "".join(piece.text for piece in pieces) == ours.text


def test_a_stop_string_inside_a_round_cuts_what_was_accepted(text: str) -> None:
    """A perfect chain of five: tokens 1..5 are accepted in the first round; the stop ends at 3."""
    assert text.find(text[1:4]) == 1
    ours = perfect().generate(DIALOGUE, BUDGET, stop=text[1:4], **letters_only())
    assert ours.accepted == [3]
    assert ours.origins == ["first", "accepted", "accepted", "accepted"]
    assert ours.text == text[:1]


def test_the_first_of_several_stop_strings_counts(text: str) -> None:
    stops = [text[9:12], "not written", text[4:7]]
    ours = perfect().generate(DIALOGUE, BUDGET, stop=stops, **letters_only())
    assert ours.text == text[: min(text.find(stops[0]), text.find(stops[2]))]


def test_stop_strings_outside_the_answer_stop_nothing(text: str) -> None:
    """Half a stop string waits, and is emitted when it turns out to be none."""
    assert QUESTION not in text
    half = text[:-1] + "!"
    pieces = list(perfect().stream(DIALOGUE, BUDGET, stop=[QUESTION, half], **letters_only()))
    assert (pieces[-1].result.text, pieces[-1].result.stop_reason) == (text, "budget")
    assert [piece.text for piece in pieces[:-1]] == [""] * (len(pieces) - 1)
    assert pieces[-1].text == text


# ---- random numbers ------------------------------------------------------------------------------


@POLICIES
def test_a_seed_determines_the_answer(policy: str | Policy) -> None:
    def output_ids(seed: int) -> list[int]:
        how: dict[str, Any] = {"temperature": 1.0, "policy": policy}
        return decoder().generate(DIALOGUE, BUDGET, seed=seed, **how).output_ids

    answers = [output_ids(seed) for seed in range(4)]
    assert answers == [output_ids(seed) for seed in range(4)]
    assert len({tuple(answer) for answer in answers}) > 1


@POLICIES
@HEATS
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_batch_equals_single_prompts(policy: str | Policy, heat: float, batch: int) -> None:
    """The n-th answer has the seed raised by n; prompts are of different lengths."""
    question = "what is to be said about this?"
    prompts: list[Prompt] = [DIALOGUE, "a", dialogue("and then?"), [5, 6, 7], question]
    how: dict[str, Any] = {"temperature": heat, "policy": policy}
    batched = decoder().generate_batch(prompts, 12, batch=batch, seed=7, **how)
    alone = [decoder().generate(p, 12, seed=7 + n, **how) for n, p in enumerate(prompts)]
    assert [r.output_ids for r in batched] == [r.output_ids for r in alone]
    assert [(r.text, r.origins, r.stop_reason) for r in batched] == [
        (r.text, r.origins, r.stop_reason) for r in alone
    ]


def test_rule_argument_selects_the_rule() -> None:
    """With such an epsilon typical acceptance takes every guess."""
    how: dict[str, Any] = {
        "temperature": 1.0,
        "rule": bind_rule("lossy_typical", "drawn", epsilon=1e-9),
    }
    assert decoder().generate(DIALOGUE, 13, **how).accepted == [5, 5]
    assert decoder().generate(DIALOGUE, 13, temperature=1.0).accepted != [5, 5]


# ---- dialogues -----------------------------------------------------------------------------------


@POLICIES
@HEATS
@pytest.mark.parametrize("template", [PLAIN, FORGETFUL], ids=["plain", "forgetful"])
def test_a_chat_equals_decoding_the_whole_dialogue(
    policy: str | Policy, heat: float, template: str
) -> None:
    """Also where the template renders history differently from the answers."""
    ours = decoder(template)
    how: dict[str, Any] = {"temperature": heat, "policy": policy}
    chat = ours.chat(seed=11, **how)
    for turn, question in enumerate(["why?", "and\nthen?", "so"]):
        reply = chat.say(question, 9 + turn)
        seed = 11 + len(chat.messages) - 1
        anew = ours.generate(chat.messages[:-1], 9 + turn, seed=seed, **how)
        assert (reply.output_ids, reply.origins) == (anew.output_ids, anew.origins)
        assert chat.messages[-2:] == dialogue(question, reply.text)


@POLICIES
def test_chat_reads_only_new_tokens(policy: str | Policy, read: list[list[int]]) -> None:
    """The last token of an answer is in no cache yet; with what follows it, it is read next."""
    ours = decoder()
    chat, cached = ours.chat(policy=policy, **letters_only()), 0
    for question in ("why?", "and then?", "so"):
        read.clear()
        reply = chat.say(question, 10)
        prompt = ours.ids(chat.messages[:-1])
        assert read[0] == prompt[cached:]
        assert len(read) == 1 + len(reply.accepted)
        cached = len(prompt) + len(reply.output_ids) - 1
    assert cached > 60


def test_a_plain_chat_reads_every_token_once(read: list[list[int]]) -> None:
    ours = decoder()
    chat = ours.chat(policy=ALONE, **letters_only())
    for question in ("why?", "and then?", "so"):
        chat.say(question, 10)
    whole = byte_tokenizer(PLAIN)(chat.messages[-1]["content"])["input_ids"]
    everything = ours.ids(chat.messages[:-1]) + whole
    assert [token for ids in read for token in ids] == everything[:-1]


def test_template_that_drops_history_rereads_only_the_answer(read: list[list[int]]) -> None:
    """The caches go on from the end of the prompt, the last place that was not rewritten."""
    ours = decoder(FORGETFUL)
    chat = ours.chat(**letters_only())
    chat.say("why?", 10)
    before = len(ours.ids(chat.messages[:-1]))
    read.clear()
    chat.say("and then?", 10)
    assert read[0] == ours.ids(chat.messages[:-1])[before:]


def test_a_stop_string_in_a_chat_is_not_part_of_the_history(text: str) -> None:
    chat = perfect().chat(stop=text[3:6], **letters_only())
    assert chat.say(QUESTION, BUDGET).text == text[:3]
    reply = chat.say("so", BUDGET)
    dialogue_so_far = dialogue(QUESTION, text[:3], "so")
    anew = perfect().generate(dialogue_so_far, BUDGET, stop=text[3:6], **letters_only())
    assert (reply.output_ids, reply.origins) == (anew.output_ids, anew.origins)


def test_chat_turns_accept_different_settings(read: list[list[int]]) -> None:
    """Without the drafter its state stands still: each way of decoding has a cache of its own."""
    chat = decoder().chat(**letters_only())
    for policy in (CHAIN, ALONE, ALONE, TREE, CHAIN, ALONE):
        reply = chat.say("and?", 8, policy=policy)
        anew = decoder().generate(chat.messages[:-1], 8, policy=policy, **letters_only())
        assert (reply.output_ids, reply.origins) == (anew.output_ids, anew.origins)


def test_a_system_message_comes_first() -> None:
    chat = decoder().chat()
    chat.messages.insert(0, Message(role="system", content="brief"))
    reply = chat.say("why?", 8)
    anew = decoder().generate(dialogue("why?", system="brief"), 8)
    assert reply.output_ids == anew.output_ids != decoder().generate(DIALOGUE, 8).output_ids


@POLICIES
@pytest.mark.parametrize("heard", [1, 2, 4])
def test_interrupted_answer_stays_in_the_history(policy: str | Policy, heard: int) -> None:
    chat = perfect().chat(policy=policy, **letters_only())
    stream = chat.stream(QUESTION, BUDGET)
    pieces = [next(stream) for _ in range(heard)]
    stream.close()
    assert chat.messages == dialogue(QUESTION, pieces[-1].result.text)
    for question in ("so", "and then?"):
        reply = chat.say(question, 8)
        anew = perfect().generate(chat.messages[:-1], 8, policy=policy, **letters_only())
        assert (reply.output_ids, reply.origins) == (anew.output_ids, anew.origins)


def test_streamed_tokens_of_an_interrupted_answer_are_not_reread(read: list[list[int]]) -> None:
    """The last streamed token is in no cache yet."""
    chat = perfect().chat(**letters_only())
    stream = chat.stream(QUESTION, BUDGET)
    heard = [token for _ in range(3) for token in next(stream).ids]
    stream.close()
    cached = len(perfect().ids(DIALOGUE)) + len(heard) - 1
    read.clear()
    chat.say("so", 8)
    assert len(heard) == 13
    assert read[0] == perfect().ids(chat.messages[:-1])[cached:]


def test_rewritten_dialogue_after_an_interruption_is_decoded_correctly() -> None:
    """A shorter dialogue is broken off, then the longer one before it comes back."""
    ours = perfect()
    chat = ours.chat(**letters_only())
    chat.say(QUESTION, BUDGET)
    chat.say("and then?", BUDGET)
    longer = list(chat.messages)
    chat.messages[:] = dialogue("x")
    stream = chat.stream("y", BUDGET)
    next(stream)
    stream.close()
    chat.messages[:] = longer
    reply = chat.say("so", 8)
    anew = ours.generate(chat.messages[:-1], 8, **letters_only())
    assert (reply.output_ids, reply.origins) == (anew.output_ids, anew.origins)


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_ctrl_c_in_absorb_leaves_the_dialogue_cache_valid(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The target has read rows then that the drafter's state does not hold."""
    drafter, memory = oracle(lambda n: True), DialogueCache()
    engine, prompt = Engine(target(), drafter, CHAIN), decoder().ids(DIALOGUE)
    absorb, left = drafter.absorb, [calls]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return absorb(*arguments)

    monkeypatch.setattr(drafter, "absorb", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run([Request(prompt, BUDGET)], 1, dialogue=memory))
    longer = [*prompt, *engine.generate(prompt, BUDGET).ids, 5]
    reply = list(engine.run([Request(longer, 8)], 1, dialogue=memory))[-1].out
    assert reply.ids == Engine(target(), None, None).generate(longer, 8).ids


@pytest.mark.parametrize("message", [None, 3, ["why?"]], ids=str)
def test_a_message_is_a_string(message: Any) -> None:
    with unchecked(), pytest.raises(TypeError, match="must be a string"):
        decoder().chat().say(message)


def test_a_message_without_an_answer_is_dropped() -> None:
    talk = decoder().chat()
    assert talk.say(QUESTION, 0).output_ids == []
    assert talk.messages == []


def test_a_message_that_does_not_fit_is_dropped() -> None:
    chat = decoder().chat()
    chat.say("why?", 8)
    before = list(chat.messages)
    with pytest.raises(RunError, match="do not fit"):
        chat.say("x" * POSITIONS, 8)
    with pytest.raises(TypeError, match="heat"):
        chat.say("x", 8, heat=2)  # type: ignore[call-arg]
    assert chat.messages == before
    reply = chat.say("so", 8)
    assert reply.output_ids == decoder().generate(chat.messages[:-1], 8).output_ids


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "tokens"])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(RunError, match="A prompt is empty"):
        decoder().generate(prompt)


IDS = [5, 6, 7]


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(IDS), torch.tensor(IDS), torch.tensor([IDS]), np.array(IDS), np.array([IDS]),
        list(np.array(IDS)), list(torch.tensor(IDS)),
    ],
)  # fmt: skip
def test_prompt_tokens_may_be_an_array(prompt: Any) -> None:
    assert decoder().ids(prompt) == IDS
    assert all(type(token) is int for token in decoder().ids(prompt))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "None is not a prompt"),
        (5, "5 is not a prompt"),
        ({5, 6}, "is not a prompt"),
        (b"abc", "is not a prompt"),
        ({"role": "user", "content": "a"}, "is not a prompt"),
        ([1, "a"], "'a' is not a valid part of a prompt"),
        ([1.5, 2], "1.5 is not a valid part of a prompt"),
        (["why?", {"role": "user", "content": "a"}], "'why[?]' is not a valid part"),
        ([{"role": "user"}], "{'role': 'user'} is not a valid part"),
        (torch.tensor([IDS, IDS]), "is not a valid part of a prompt of 2"),
        ([5, 10**6], "token 1000000, and the target's are 0 to"),
        ([-1], "token -1, and the target's are 0 to"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Any, message: str) -> None:
    with unchecked(), pytest.raises(RunError, match=message):
        decoder().generate(prompt, 4)
    with unchecked(), pytest.raises(RunError, match=message):
        decoder().generate_batch([QUESTION, prompt], 4)


def test_settings_may_be_numpy_numbers() -> None:
    how: dict[str, Any] = {"temperature": 1.0, "policy": CHAIN}
    mine = decoder().generate(QUESTION, 8, seed=3, top_k=4, **how)
    with unchecked():
        numbers: list[Any] = [np.int64(8), np.uint8(3), np.int32(4)]
        budget, seed, top_k = numbers
        theirs = decoder().generate(QUESTION, budget, seed=seed, top_k=top_k, **how)
    assert theirs.output_ids == mine.output_ids


def test_several_prompts_are_a_list() -> None:
    with pytest.raises(RunError, match="one text"):
        decoder().generate_batch("Once", 4)


def test_a_prompt_that_is_too_long_is_refused() -> None:
    decoder().generate([7] * (POSITIONS - 4), 4)
    with pytest.raises(RunError, match=f"the target's {POSITIONS} positions"):
        decoder().generate([7] * (POSITIONS - 3), 4)
    with pytest.raises(RunError, match="do not fit"):
        decoder().generate_batch(["a", [7] * POSITIONS], 4)


def test_unknown_policy_error_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"policy = 'chains'") as caught:
        decoder().generate("a", 4, policy="chains")
    assert {"plain", "chain", "dynamic_tree"} <= set(caught.value.fix[:-1].replace(",", "").split())


@pytest.mark.parametrize("policy", ["chain", CHAIN], ids=["name", "object"])
def test_speculation_without_a_drafter_is_refused(policy: str | Policy) -> None:
    bare = Decoder(target(), byte_tokenizer(PLAIN), None, ALONE)
    with pytest.raises(RunError, match="no drafter"):
        bare.generate("a", 4, policy=policy)


def test_searched_tree_without_a_rank_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks\.json"):
        decoder().generate("a", 4, policy="static_tree")


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ({"heat": 1.0}, TypeError, "unknown setting 'heat'"),
        ({"temprature": 1.0}, TypeError, "did you mean temperature"),
        ({"temperature": "1"}, TypeError, "temperature='1': must be a number"),
        ({"top_p": None}, TypeError, "top_p=None: must be a number"),
        ({"top_k": 2.5}, TypeError, "top_k=2.5: must be a whole number"),
        ({"seed": None}, TypeError, "seed=None: must be a whole number"),
        ({"stop": [5]}, TypeError, "stop=.5.: must be a string, or a list of strings"),
        ({"stop": None}, TypeError, "stop=None: must be"),
        ({"banned": 3}, TypeError, "banned=3: must be a list"),
        ({"banned": [1.5]}, TypeError, "banned=1.5: must be a whole number"),
        ({"policy": 5}, TypeError, "policy=5: must be a name, or a policy"),
        ({"policy": Chain}, TypeError, "must be a name, or a policy"),
        ({"rule": "nonsense"}, ValueError, "rule='nonsense': unknown; use one of match, ratio"),
        ({"rule": 5}, TypeError, "rule=5: must be a rule's name"),
        ({"rule": "ratio", "policy": TREE, "temperature": 1.0}, ValueError, "does not fit 'best'"),
        ({"rule": "ratio", "policy": SAMPLED, "temperature": 1.0}, ValueError, "chains only"),
        ({"temperature": -1.0, "policy": "chain"}, ValueError, "temperature"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"stop": [""]}, ValueError, "empty stop string"),
        ({"banned": [10**6]}, ValueError, "banned"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"),
    ],
)
def test_invalid_settings_are_refused(
    how: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with unchecked(), pytest.raises(kind, match=message):
        decoder().generate("a", 4, **how)
    with unchecked(), pytest.raises(kind, match=message):
        list(decoder().stream("a", 4, **how))
    with unchecked(), pytest.raises(kind, match=message):
        decoder().generate_batch(["a"], 4, **how)
    with unchecked(), pytest.raises(kind, match=message):
        decoder().chat(**how).say("a", 4)


@pytest.mark.parametrize(("count", "kind"), [(-1, ValueError), (3.5, TypeError), ("8", TypeError)])
def test_invalid_budgets_are_refused(count: Any, kind: type[Exception]) -> None:
    ours = decoder()
    for ask in (ours.generate, ours.chat().say, lambda q, n: ours.generate_batch([q], n)):
        with unchecked(), pytest.raises(kind, match="max_new_tokens"):
            ask("a", count)


def test_unknown_policy_is_refused_by_the_constructor() -> None:
    with pytest.raises(ConfigError, match="no such policy"):
        Decoder(target(), byte_tokenizer(PLAIN), None, "xx")


def test_policy_deeper_than_the_drafter_warns() -> None:
    """The answer is the same."""
    short = oracle(lambda n: n % 3 > 0)
    short.max_depth = 2
    ours = Decoder(target(), byte_tokenizer(PLAIN), short, CHAIN)
    with pytest.warns(
        UserWarning, match="depth=5 is deeper than this drafter can draft: drafts end at depth 2"
    ):
        result = ours.generate(QUESTION, BUDGET)
    assert result.output_ids == decoder().generate(QUESTION, BUDGET).output_ids
    assert max(result.accepted) <= 2


# ---- several at once, and what is refused --------------------------------------------------------


def test_streams_may_be_interleaved() -> None:
    """Another answer with other taps comes between two rounds of this one."""

    class Tapped(ScriptedDrafter):
        def absorb(self, state: Any, trace: Any) -> Any:
            assert trace.taps.shape[-1] == trace.last.shape[-1], "the taps are another engine's"
            return super().absorb(state, trace)

    knowing = oracle(lambda n: n % 3 > 0)
    tapped = Decoder(
        target(), byte_tokenizer(PLAIN), Tapped(knowing.row, target().vocab_size, (1,)), CHAIN
    )
    alone = tapped.generate(QUESTION, BUDGET)
    pieces = tapped.stream(QUESTION, BUDGET)
    last = next(pieces)
    tapped.generate("another", 3, policy=ALONE)
    for piece in pieces:
        last = piece
        tapped.generate("another", 2, policy=ALONE)
    assert last.result.output_ids == alone.output_ids


def test_a_rule_made_for_other_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="made for 'independent' drafts"):
        decoder().generate(
            QUESTION, 4, temperature=1.0, policy=Chain(2), rule=bind_rule("ratio", "independent")
        )
    greedy = decoder().generate(
        QUESTION, 4, policy=Chain(2), rule=bind_rule("ratio", "independent")
    )
    assert greedy.output_ids == decoder().generate(QUESTION, 4).output_ids  # the rule is not used


@pytest.mark.parametrize("policy", [CHAIN, SAMPLED], ids=["chain", "tree"])
def test_rules_are_selected_by_name(policy: Policy) -> None:
    how: dict[str, Any] = {"policy": policy, "temperature": 1.0, "seed": 5}
    made = decoder().generate(QUESTION, BUDGET, rule=bind_rule("sampled", "drawn"), **how)
    named = decoder().generate(QUESTION, BUDGET, rule="sampled", **how)
    usual = decoder().generate(QUESTION, BUDGET, **how)
    assert named.output_ids == made.output_ids != usual.output_ids
    plain = decoder().generate(QUESTION, 4, rule="sampled", policy=ALONE, temperature=1.0)
    assert (
        plain.output_ids
        == decoder().generate(QUESTION, 4, policy=ALONE, temperature=1.0).output_ids
    )


@pytest.mark.parametrize("policy", ["chain", "dynamic_tree", Chain(2), ALONE], ids=str)
def test_coupled_answers_are_those_of_plain_sampling(policy: str | Policy) -> None:
    """Whatever drafts them, by name or of one's own."""
    how: dict[str, Any] = {"temperature": 1.0, "seed": 5, "rule": "coupled"}
    plain = decoder().generate(QUESTION, BUDGET, policy=ALONE, **how)
    ours = decoder().generate(QUESTION, BUDGET, policy=policy, **how)
    assert ours.output_ids == plain.output_ids
    assert ours.lossy is False
    other = decoder().generate(QUESTION, BUDGET, policy=policy, **{**how, "seed": 6})
    assert other.output_ids != plain.output_ids


def test_a_custom_rule_has_unknown_loss() -> None:
    own = bind_rule("lossy_typical", "drawn").__call__  # any function
    result = decoder().generate(QUESTION, 4, temperature=1.0, rule=own, policy=Chain(2))
    assert result.lossy is None
    assert decoder().generate(QUESTION, 4, rule=own, policy=Chain(2)).lossy is False


def test_a_lossy_answer_is_marked() -> None:
    typical: dict[str, Any] = {
        "rule": bind_rule("lossy_typical", "drawn"), "policy": Chain(2)
    }  # fmt: skip
    assert decoder().generate(QUESTION, 4, temperature=1.0, **typical).lossy
    named = {**typical, "rule": "lossy_typical"}
    assert decoder().generate(QUESTION, 4, temperature=1.0, **named).lossy
    assert (
        not decoder().generate(QUESTION, 4, **typical).lossy
    )  # greedy decoding does not use the rule
    alone = {**typical, "policy": ALONE}
    assert not decoder().generate(QUESTION, 4, temperature=1.0, **alone).lossy
    assert not decoder().generate(QUESTION, 4, temperature=1.0).lossy
