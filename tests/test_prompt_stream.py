"""Prompts of a stream: in its order, each once per pass, checked as they come, the same for every process."""

import pytest
from datasets import Dataset, IterableDataset

from helpers.runs import count_digits
from helpers.scripted import training_rows
from hfppo.data import prompt_stream
from hfppo.data.prompt_stream import PromptStream
from hfppo.data.prompts import Prompts, prepare_prompts


def prompts_of(dataset: IterableDataset | list[str], tokenizer, longest: int = 6) -> PromptStream:
    def prepare(rows: Dataset, name: str) -> Prompts:
        return prepare_prompts(rows, tokenizer, name=name).limited(longest, name, may_be_empty=True)

    if isinstance(dataset, list):
        dataset = Dataset.from_dict({"prompt": dataset}).to_iterable_dataset()
    return PromptStream(dataset, prepare, longest)


def texts_at(made: PromptStream, *positions: int) -> list[str]:
    return [row["prompt"] for row, _ in made.at(range(*positions), seed=0)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 256])
def test_a_stream_is_read_in_its_order_and_again(monkeypatch, tokenizer, chunk):
    monkeypatch.setattr(prompt_stream, "CHUNK", chunk)
    texts = [f"{n}+{n}=" for n in range(5)]
    made = prompts_of(texts, tokenizer)
    assert texts_at(made, 0, 3) == texts[:3]
    assert texts_at(made, 3, 7) == texts[3:] + texts[:2]
    assert texts_at(made, 9, 11) == [texts[4], texts[0]], "another process had the ones between"
    assert texts_at(made, 9, 11) == [texts[4], texts[0]]
    assert texts_at(made, 1, 2) == [texts[1]], "a run that is trained anew starts anew"
    row, ids = made.at(range(2, 3), seed=0)[0]
    assert ids == tokenizer(row["prompt"])["input_ids"]


@pytest.mark.parametrize("chunk", [2, 256])
def test_prompts_that_are_too_long_do_not_count(monkeypatch, tokenizer, chunk):
    monkeypatch.setattr(prompt_stream, "CHUNK", chunk)
    made = prompts_of(["12345678", "12345679", "1+1=", "12345670", "2+2="], tokenizer)
    assert made.head[0][0]["prompt"] == "1+1="
    assert texts_at(made, 0, 5) == ["1+1=", "2+2=", "1+1=", "2+2=", "1+1="]


def test_a_stream_may_have_a_format(tokenizer):
    talks = [[{"role": "user", "content": "1+2="}], [{"role": "user", "content": "1"}]]
    rows = Dataset.from_dict({"prompt": talks, "answer": [3, 4]})
    assert texts_at(prompts_of(rows.to_iterable_dataset().with_format("numpy"), tokenizer), 0, 2) == talks


def test_every_pass_is_an_epoch_of_the_dataset(tokenizer):
    """Whose shuffle takes another order then."""
    rows = Dataset.from_dict({"prompt": [f"{n}+{m}=" for n in range(5) for m in range(5)]})
    shuffled = rows.to_iterable_dataset().shuffle(seed=3, buffer_size=100)
    made = prompts_of(shuffled, tokenizer)
    first, second = texts_at(made, 0, 25), texts_at(made, 25, 50)
    assert sorted(first) == sorted(second) == sorted(rows["prompt"])
    assert first != second


def test_a_bad_row_is_named_when_it_comes(make_trainer):
    def rows():
        yield from ({"prompt": f"{n % 10}+1="} for n in range(300))
        yield {"prompt": None}

    stream = IterableDataset.from_generator(rows)
    trainer = make_trainer({"max_steps": 400, "max_prompt_length": 10}, train_dataset=stream)
    with pytest.raises(ValueError, match=r"train_dataset, from row 256, .*row 44"):
        training_rows(trainer.collector, trainer._train_prompts, 40)


def test_columns_of_a_stream_reach_the_reward_functions(make_trainer):
    seen = []

    def reward(completions, answer, **kwargs):
        seen.extend(answer)
        return count_digits(completions)

    data = Dataset.from_list([{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(4)]).to_iterable_dataset()
    trainer = make_trainer({"max_steps": 4, "max_prompt_length": 10}, reward_funcs=reward, train_dataset=data)
    trainer.train()
    assert seen == ["1", "2", "3", "4"] * 2
    assert trainer.state.epoch == 1.0


def test_an_evaluation_set_may_be_a_stream_that_ends(make_trainer, dataset):
    """It is read whole; a later one too."""
    rows = dataset.select(range(6))
    trainer = make_trainer(eval_dataset={"stream": rows.to_iterable_dataset(), "rows": rows})
    metrics = trainer.evaluate()
    assert metrics["eval_stream_reward"] == metrics["eval_rows_reward"]
    again = trainer.predict(rows.to_iterable_dataset())
    assert len(again.predictions) == 6
    assert again.label_ids["answer"] == rows["answer"]
