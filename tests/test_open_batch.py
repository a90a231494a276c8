"""Open batches: requests join and leave between rounds, and no answer changes."""

from collections.abc import Iterator

import pytest
import torch

from outrider.models import drafters
from outrider.models.decode.engine import Engine
from outrider.models.decode.open_batch import OpenBatch
from outrider.models.decode.policy import Chain
from outrider.models.decode.request import Output, Request, Stops
from outrider.models.decode.rules.rule_table import DRAWN
from outrider.models.decode.sampling_params import Sampling
from tests import tiny

SAMPLING = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
SIZES = [(3, 12), (40, 5), (1, 20), (17, 1), (60, 9), (5, 14), (5, 8), (28, 11)]
CANCELLED = 2


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist(), budget, n)
        for n, (length, budget) in enumerate(SIZES)
    ]


def engine(name: str, sampling: Sampling) -> Engine:
    target = tiny.target()
    policy = Chain(3, "best" if sampling.greedy else DRAWN)
    if name in drafters.trained_names():
        drafter = tiny.drafter(name, target).requires_grad_(False)
        return Engine(target, drafter, policy, sampling=sampling)
    whole = tiny.vocab(tiny.VOCAB)
    drafter = tiny.drafter(name, target, whole, draft_vocab_size=None).requires_grad_(False)
    return Engine(target, drafter, policy, sampling=sampling)


def joined(batch: OpenBatch, waiting: list[tuple[int, Request]]) -> Iterator[tuple[int, Output]]:
    """Run with one or two new requests per round; request CANCELLED leaves after three tokens."""
    while waiting or len(batch):
        free = min(batch.slots - len(batch), 2, len(waiting))
        events = batch.join(waiting[:free]) if free else []
        del waiting[:free]
        events += batch.advance() if len(batch) else []
        for event in events:
            if event.number == CANCELLED and len(event.out.ids) >= 3 and not event.out.stop_reason:
                batch.cancel(event.number)
            yield event.number, event.out


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["eagle3", "kangaroo", "lookahead", "sparse_kv", "suffix"])
def test_answers_do_not_depend_on_when_others_join_and_leave(name: str, sampling: Sampling) -> None:
    alone = [engine(name, sampling).generate_all([request], 1)[0] for request in requests()]
    batch = OpenBatch(engine(name, sampling), 3)
    outs = dict(joined(batch, [*enumerate(requests())]))
    assert outs.pop(CANCELLED).stop_reason == "cancelled"
    assert all(out.ids == alone[number].ids for number, out in outs.items())
    assert len(outs) == len(SIZES) - 1
    assert not len(batch)


def test_a_batch_has_no_more_requests_than_slots() -> None:
    batch = OpenBatch(engine("eagle3", Sampling()), 2)
    with pytest.raises(ValueError, match="3 requests join 0 of 2"):
        batch.join([*enumerate(requests()[:3])])


def test_two_batches_take_turns_on_one_target_and_drafter() -> None:
    """Greedy and sampled requests decode beside each other, round by round."""
    first = engine("eagle3", Sampling())
    other = Engine(first.target, first.drafter, Chain(2, DRAWN), sampling=SAMPLING)
    expected = [one.generate_all(requests(), 8) for one in (first, other)]
    turns = [joined(OpenBatch(one, 3), [*enumerate(requests())]) for one in (first, other)]
    outs: list[dict[int, Output]] = [{}, {}]
    while turns:
        for turn, found in zip([*turns], [*outs], strict=False):
            try:
                found.__setitem__(*next(turn))
            except StopIteration:
                turns.remove(turn)
    for found, answers in zip(outs, expected, strict=True):
        del found[CANCELLED]
        assert all(out.ids == answers[number].ids for number, out in found.items())


def test_stops_of_a_request_replace_those_of_the_engine() -> None:
    prompt = requests()[0].prompt
    answer = engine("eagle3", Sampling()).generate(prompt, 12)
    own = Request(prompt, 12, stops=Stops([answer.ids[4]]))
    batch = OpenBatch(engine("eagle3", Sampling()), 2)
    outs = dict(joined(batch, [(0, own), (1, Request(prompt, 12))]))
    assert outs[0].ids == answer.ids[: answer.ids.index(answer.ids[4]) + 1]
    assert (outs[0].stop_reason, outs[1].ids) == ("end token", answer.ids)
