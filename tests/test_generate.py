"""The target writes its own text: right tokens, right traces, resumable, whatever the batch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from outrider.conf.compose import compose
from outrider.conf.errors import RunError
from outrider.data.batches import gather
from outrider.data.generate import Question, Settings, Writer, write_answers
from outrider.data.prepare import material
from outrider.data.traces import Store, Written
from outrider.models import load
from outrider.models.decode.engine import Engine
from outrider.models.decode.request import Stops
from outrider.models.load import Loaded
from outrider.models.target import Target
from outrider.train.settings import parse
from tests.families import small_model

STOP, TAPS = [2], (0, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(small_model("llama"), taps=TAPS)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    lengths = [5, 9, 3, 12, 7, 4, 8]
    generator = torch.Generator().manual_seed(3)
    return [
        Question(i, f"q{i}", torch.randint(3, 61, (n,), generator=generator).tolist())
        for i, n in enumerate(lengths)
    ]


def answers(target: Target, questions: list[Question], **settings: object) -> dict[int, Written]:
    out: dict[int, Written] = {}
    chosen = Settings(**{"max_new_tokens": 11, "batch": 3, **settings})  # type: ignore[arg-type]

    def done(question: Question, answer: Written | None) -> bool:
        assert answer is not None
        out[question.place] = answer
        return True

    target.set_taps(TAPS)
    Writer(target, STOP, chosen).run(questions, done)
    return out


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_greedy_answers_are_those_of_plain_decoding(family: str, questions: list[Question]) -> None:
    """Slots of unequal prompts, refilled as they end, give what one prompt alone gives."""
    target = Target(small_model(family), taps=TAPS)
    written = answers(target, questions, temperature=0.0)
    decoder = Engine(target, None, None, stops=Stops(STOP))
    for question in questions:
        alone = decoder.generate(question.ids, 11).ids
        assert written[question.place].ids == question.ids + alone


def test_a_late_long_prompt_finds_room(target: Target) -> None:
    """Short answers use up the columns, the cache moves up, and then a long prompt comes."""
    lengths = [4] * 14 + [30]
    written = answers(
        target, [Question(i, f"r{i}", [5 + i] * n) for i, n in enumerate(lengths)], batch=1
    )
    assert sorted(written) == list(range(15))
    decoder = Engine(target, None, None, stops=Stops(STOP))
    greedy = answers(
        target, [Question(i, f"r{i}", [5 + i] * n) for i, n in enumerate(lengths)], batch=2,
        temperature=0.0,
    )  # fmt: skip
    assert greedy[14].ids == [19] * 30 + decoder.generate([19] * 30, 11).ids


def test_sampled_answers_do_not_depend_on_the_batch(
    target: Target, questions: list[Question]
) -> None:
    one, many = (answers(target, questions, batch=b, temperature=1.0) for b in (1, 5))
    assert {p: a.ids for p, a in one.items()} == {p: a.ids for p, a in many.items()}
    other = answers(target, questions, temperature=1.0, seed=1)
    assert {p: a.ids for p, a in other.items()} != {p: a.ids for p, a in one.items()}


def test_recorded_rows_are_what_the_target_says_of_the_text(
    target: Target, questions: list[Question]
) -> None:
    for answer in answers(target, questions, temperature=1.0).values():
        ids = torch.tensor([answer.ids[:-1]])
        length = ids.shape[1]
        seen = target.forward(
            ids, torch.arange(length)[None], torch.ones(1, length, length).bool().tril()
        )
        assert answer.taps is not None
        assert answer.last is not None
        torch.testing.assert_close(answer.taps, seen.taps[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(answer.last, seen.last[0], atol=1e-4, rtol=1e-4)
        assert answer.favourite is not None
        favourite = target.logits(seen.last[0]).argmax(-1)
        assert answer.favourite[: answer.prompt - 1].eq(-1).all()  # nobody asks there
        assert torch.equal(
            answer.favourite[answer.prompt - 1 :].long(), favourite[answer.prompt - 1 :]
        )


def test_an_interrupted_writing_goes_on_where_it_stopped(
    target: Target, questions: list[Question], tmp_path: Path
) -> None:
    settings = Settings(max_new_tokens=6, batch=2, temperature=1.0)
    about = {"a": 1}
    store = Store(tmp_path, about, TAPS)
    write_answers(Writer(target, STOP, settings), questions[:3], store)
    again = Store(tmp_path, about, TAPS)
    writer = Writer(target, STOP, settings)
    write_answers(writer, questions, again)
    assert writer.read == sum(len(q.ids) for q in questions[3:])  # nothing was written twice
    assert sorted(a.place for a in again.answers()) == list(range(7))
    assert not Store(tmp_path, about, TAPS).fulfilled
    again.finish("all")
    again.add([replace(again.answers()[0], place=7)])  # somebody else asks for more
    done = Store(tmp_path, about, TAPS)
    assert len(done.answers()) == 8
    assert len(done.only("all").answers()) == 7


def test_what_a_shard_holds_depends_on_the_questions_alone(target: Target, tmp_path: Path) -> None:
    """Not on the batch, nor on the shards that a kill has left; more questions leave the fewer."""
    many = [Question(i, f"q{i}", [3 + i % 50] * (1 + i % 7)) for i in range(200)]

    def store(name: str, questions: list[Question], batch: int = 7) -> Store:
        made = Store(tmp_path / name, {}, ())
        settings = Settings(max_new_tokens=3, batch=batch, record=False)
        write_answers(Writer(target, STOP, settings), questions, made)
        made.finish(str(len(questions)))
        return made

    whole = store("whole", many)
    assert len(whole.shards) == 4
    assert whole.shards == store("other batch", many, 50).shards
    torn = Store(tmp_path / "torn", {}, ())
    for name in list(whole.shards)[1:3]:
        torn.add(held_by(whole, name))
    assert whole.shards == store("torn", many).shards
    fewer = store("grown", many[:70]).shards
    assert fewer == store("grown", many).only("70").shards
    assert {a.place for a in Store(tmp_path / "grown", {}, ()).answers()} == set(range(200))


def held_by(store: Store, name: str) -> list[Written]:
    """The answers of one shard."""
    part = Store(store.folder, store.about, store.taps)
    part.shards = {name: store.shards[name]}
    return part.answers()


def test_minutes_are_those_of_all_writing(
    target: Target, questions: list[Question], tmp_path: Path
) -> None:
    """A killed or shorter call counts: the limit belongs to the text, not to the process."""
    store = Store(tmp_path, {"a": 1}, TAPS)
    writer = Writer(target, STOP, Settings(max_new_tokens=6, batch=2))
    write_answers(writer, questions[:3], store, minutes=5.0)
    assert 0 < store.seconds < 300
    again = Store(tmp_path, {"a": 1}, TAPS)
    assert again.seconds == pytest.approx(store.seconds)
    again.seconds = 301.0
    write_answers(writer, questions, again, minutes=5.0)
    assert len(again.answers()) == 3
    write_answers(writer, questions, again, minutes=6.0)
    assert len(again.answers()) == 7


def test_a_store_of_something_else_or_damaged_is_refused(
    target: Target, questions: list[Question], tmp_path: Path
) -> None:
    store = Store(tmp_path, {"a": 1}, TAPS)
    write_answers(Writer(target, STOP, Settings(max_new_tokens=3)), questions, store)
    with pytest.raises(RunError, match="something else"):
        Store(tmp_path, {"a": 2}, TAPS)
    (shard,) = tmp_path.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(RunError, match="damaged"):
        Store(tmp_path, {"a": 1}, TAPS).answers()


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load.load(parse(compose(["target=tiny"])).target)


def test_training_from_recorded_traces_is_training_online(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traces of packed rows put together from the store are those of a fresh forward."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    words = [
        "target=tiny", "data=self", "data.max_length=200", "data.generate.samples=12",
        "data.generate.max_new_tokens=24", "data.generate.batch=4", "data.holdout=0.3",
        "data.path=data/tiny/prompts.jsonl", "data.overlap=keep",
    ]  # fmt: skip
    config = parse(compose(words))
    made = material(config, loaded, (1, 3, 4), Console(quiet=True), rank=0)
    assert made.recorded is not None
    for rows, recorded in zip((made.train, made.held), made.recorded, strict=True):
        batch = gather(rows, torch.arange(len(rows)))
        ours, fresh = recorded.trace(batch), loaded.target.trace(*batch)
        for depth in (1, 2):
            counted = ours.counts(depth)
            assert torch.equal(counted, fresh.counts(depth))
            assert counted.any()
            torch.testing.assert_close(
                ours.taps[counted], fresh.taps[counted], atol=1e-3, rtol=1e-3
            )
            torch.testing.assert_close(
                ours.last[counted], fresh.last[counted], atol=1e-3, rtol=1e-3
            )
            judging = counted.roll(depth, 1)
            favourite = loaded.target.logits(fresh.last[judging]).argmax(-1)
            assert ours.favourite is not None
            assert torch.equal(ours.favourite[judging], favourite)
