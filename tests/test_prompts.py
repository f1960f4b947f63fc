"""Prompts: what the tokenizer is given, which prompts are left, and the order they come in."""

import io
import itertools
import json
import logging
from types import SimpleNamespace

import PIL.Image
import pytest
from build_arithmetic_base import character_tokenizer
from datasets import Dataset, Image, load_from_disk
from tokenizers.processors import TemplateProcessing

from helpers.runs import chat_tokenizer
from helpers.scripted import training_rows
from helpers.tiny import CHAT_TEMPLATE
from hfppo import PPOConfig
from hfppo.collect.collector import Collector
from hfppo.data import prompts as prompts_module
from hfppo.data.prompts import Prompts, prepare_prompts, prompt_indices

# In the order of the test tokenizer's alphabet: 0 is padding, 1 is EOS, then 0123456789 and the signs.
IDS = {"1": 3, "2": 4, "3": 5, "+": 12, "=": 13, "请": 14, "问": 15, "？": 16, "，": 21, "不": 19, "对": 20}


def ids_of(text: str) -> list[int]:
    return [IDS[character] for character in text]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def prompts_of(tokenizer, prompts: list, **kwargs) -> Prompts:
    columns = {"prompt": prompts, "number": list(range(len(prompts)))}
    return prepare_prompts(Dataset.from_dict(columns), tokenizer, **kwargs)


TALKS = [[user("1+2=")], [user("1"), assistant("2"), user("3")]]
TWO = [[user("1")], [user("2")]]
THINK = "{% if think %}请{% endif %}"
ADD = [{"type": "function", "function": {"name": "add"}}]
TOOLS = "{% if tools %}{{ tools | length }}{% endif %}{{ mark }}{{ other }}"
X, Y = ([{"name": name, "properties": {name: {"type": "int"}}}] for name in "xy")
OWN = {"chat_template_kwargs": [{"mark": "不"}, {"other": "对"}]}

# The columns of a dataset, what its chat template begins with, the arguments of all rows, and the prompts' tokens.
RENDERED = {
    "text as it stands": ({"prompt": ["1+2=", "请问3"]}, "", {}, ["1+2=", "请问3"]),
    "the assistant's turn, also after several": ({"prompt": TALKS}, "", {}, ["1+2=？，", "1？23？，"]),
    "each decides whether the assistant goes on": (
        {"prompt": [[user("1"), assistant("对")], [user("1")], [user("1+2="), assistant("不")]]},
        *("", {}, ["1？对", "1？，", "1+2=？不"]),
    ),
    "a system prompt": ({"prompt": [[{"role": "system", "content": "请"}, user("1")]]}, "", {}, ["请1？，"]),
    "without an argument": ({"prompt": TWO}, THINK, {}, ["1？，", "2？，"]),
    "an argument of all rows": ({"prompt": TWO}, THINK, {"think": True}, ["请1？，", "请2？，"]),
    "keys that other rows have": (  # Arrow gives a row's tools the keys of all others
        {"prompt": TWO, "tools": [X, Y]},
        *("{% if tools and 'y' in tools[0].properties %}不{% endif %}", {}, ["1？，", "不2？，"]),
    ),
    "columns before what all rows get": (
        {"prompt": TWO, "tools": [ADD, None], **OWN},
        *(TOOLS, {"mark": "请"}, ["1不1？，", "请对2？，"]),
    ),
    "columns of JSON": (
        {"prompt": TWO, "tools": [json.dumps(ADD), ""], **OWN},
        *(TOOLS, {"mark": "请"}, ["1不1？，", "请对2？，"]),
    ),
    "columns for a template beside text": (
        {"prompt": ["1+2="], "tools": ["a hammer"], "chat_template_kwargs": [7]},
        *(TOOLS, {}, ["1+2="]),
    ),
}


@pytest.mark.parametrize("kind", RENDERED)
def test_prompts_are_tokenised_as_text_or_by_the_chat_template(tokenizer, kind):
    columns, beginning, options, rendered = RENDERED[kind]
    tokenizer.chat_template = beginning + CHAT_TEMPLATE
    dataset = Dataset.from_dict(columns)
    prompts = prepare_prompts(dataset, tokenizer, chat_template_kwargs=options)
    assert prompts.ids.to_pylist() == [ids_of(text) for text in rendered]
    assert prompts.conversational == isinstance(columns["prompt"][0], list)
    # Reward functions see all columns.
    assert [prompts[i] for i in range(len(prompts))] == [*zip(dataset, prompts.ids.to_pylist(), strict=True)]


def test_the_trainer_passes_its_fields_on(make_trainer, tokenizer):
    tokenizer.chat_template = THINK + CHAT_TEMPLATE
    dataset = Dataset.from_dict({"prompt": [[user("1")], [user("1+1+1+1=")]]})
    fields = {"chat_template_kwargs": '{"think": true}', "max_prompt_length": 4}
    trainer = make_trainer(fields, train_dataset=dataset)
    rows = training_rows(trainer.collector, trainer._train_prompts, 0)
    assert {tuple(row.prompt_ids) for row in rows} == {tuple(ids_of("请1？，"))}


LENGTHS = ["1+2=", "请问1", "1+2+3=", "1+", "2+3+1="]  # 4, 3, 6, 2 and 6 tokens


@pytest.mark.parametrize(
    ("texts", "max_length", "kept"),
    [
        (LENGTHS, 4, [0, 1, 3]),
        *((LENGTHS, length, range(5)) for length in (6, 7, None)),
        ([[user("1+2=")], [user("1+")]], 4, [1]),  # 4 and 2 characters, rendered 6 and 4
    ],
)
def test_longer_prompts_are_dropped_and_counted(tokenizer, caplog, texts, max_length, kept):
    whole = prompts_of(tokenizer, texts)
    with caplog.at_level(logging.DEBUG, "hfppo"):
        prompts = whole.limited(max_length, "my_dataset")
    assert prompts.ids.to_pylist() == [whole.ids[i].as_py() for i in kept]
    # Columns and ids stay together.
    assert [prompts[i][0] for i in range(len(prompts))] == [{"prompt": texts[n], "number": n} for n in kept]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    dropped = f"{len(texts) - len(kept)} of {len(texts)}"
    assert len(said) == len(caplog.records) == (len(kept) < len(texts))
    assert all(part in text for text in said for part in (dropped, "my_dataset", "max_prompt_length=4", "dropped"))


@pytest.mark.parametrize("form", ["torch", "pandas"])
@pytest.mark.parametrize("prompts", [TALKS, ["1+2=", "1+3="]], ids=["messages", "text"])
def test_rows_are_plain_in_any_format(tokenizer, form, prompts):
    plain = Dataset.from_dict({"prompt": prompts, "tools": ["", "[]"], "answer": [[3], [4]]})
    prepared = prepare_prompts(plain.with_format(form, ["answer"]), tokenizer)
    assert prepared.ids.equals(prepare_prompts(plain, tokenizer).ids)
    row, _ = prepared[1]
    assert (row["prompt"], row["tools"]) == (prompts[1], "[]")
    assert type(row["prompt"]) is type(prompts[1])
    assert row["answer"] == [4]


@pytest.mark.parametrize(("column", "value"), [("tools", "calculator"), ("chat_template_kwargs", "{think")])
def test_a_column_for_the_template_that_it_cannot_read_is_named(tokenizer, column, value):
    dataset = Dataset.from_dict({"prompt": [TALKS[0]] * 3, column: ["", "", value]})
    with pytest.raises(ValueError, match=r"train_dataset row 2: the tokenizer cannot render "):
        prepare_prompts(dataset, tokenizer)


def count_calls(call, calls: list):
    def counted(self, given, *args, **kwargs):
        calls.append(given)
        return call(self, given, *args, **kwargs)

    return counted


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Make a dataset of ten rows that lies on disk and counts as large, and the list of the tokenizer's calls."""
    monkeypatch.setattr(prompts_module, "STORED_FROM", 10)
    calls = []
    kind = type(character_tokenizer())
    monkeypatch.setattr(kind, "__call__", count_calls(kind.__call__, calls))

    def make(prompts: list) -> tuple[Dataset, list]:
        Dataset.from_dict({"prompt": prompts}).save_to_disk(tmp_path / "rows")
        return load_from_disk(tmp_path / "rows"), calls

    return make


@pytest.mark.parametrize("prompts", [[f"{n}+1=" for n in range(10)], [[user(str(n))] for n in range(10)]])
def test_a_large_dataset_on_disk_is_tokenized_once(on_disk, tmp_path, prompts):
    in_memory = prompts_of(chat_tokenizer(), prompts)
    dataset, calls = on_disk(prompts)
    first = prepare_prompts(dataset, chat_tokenizer())
    assert [len(given) for given in calls[-1:]] == [10]
    del calls[:]
    again = prepare_prompts(load_from_disk(tmp_path / "rows"), chat_tokenizer())
    assert calls == []
    assert first.ids.to_pylist() == again.ids.to_pylist() == in_memory.ids.to_pylist()
    assert first.digest() == again.digest() == in_memory.digest()
    assert again[3] == ({"prompt": prompts[3]}, in_memory.ids[3].as_py())


def test_what_changes_the_ids_is_tokenized_anew(on_disk):
    dataset, calls = on_disk([[user(str(n))] for n in range(10)])
    tokenizer = chat_tokenizer()
    plain = prepare_prompts(dataset, tokenizer)
    tokenizer.chat_template = THINK + CHAT_TEMPLATE
    assert prepare_prompts(dataset, tokenizer).ids.equals(plain.ids)
    thinking = prepare_prompts(dataset, tokenizer, chat_template_kwargs={"think": True})
    assert thinking.lengths.tolist() == [length + 1 for length in plain.lengths.tolist()]
    assert len(calls) == 3


def test_where_nothing_can_be_stored_every_start_tokenizes(on_disk, monkeypatch):
    dataset, _ = on_disk([f"{n}+1=" for n in range(10)])
    monkeypatch.setattr(Dataset, "_get_cache_file_path", lambda *_: "/dev/full/rows.arrow")
    assert len(prepare_prompts(dataset, character_tokenizer()).ids) == 10


def test_a_transform_is_not_stored(on_disk):
    dataset, _ = on_disk([f"{n}+1=" for n in range(10)])
    for more in ("1", "2="):
        dataset.set_transform(lambda rows, more=more: {"prompt": [text + more for text in rows["prompt"]]})
        assert prepare_prompts(dataset, character_tokenizer())[0][1] == [2, 12, 3, 13, *ids_of(more)]


def test_a_transform_reads_all_columns(tokenizer):
    dataset = Dataset.from_dict({"prompt": ["1+", "2+"], "second": ["1=", "2="]})
    dataset.set_transform(
        lambda rows: {"prompt": [a + b for a, b in zip(rows["prompt"], rows["second"], strict=True)]}
    )
    assert prepare_prompts(dataset, tokenizer).ids.to_pylist() == [ids_of("1+1="), ids_of("2+2=")]


def test_an_error_names_its_row_among_those_that_are_tokenized_at_once(tokenizer, on_disk):
    """In memory and on disk."""
    tokenizer.chat_template = "{% if '9' in messages[0].content %}{{ raise_exception('no nines') }}{% endif %}？"
    with pytest.raises(ValueError, match=r"train_dataset row 9: the tokenizer cannot render .*no nines"):
        prompts_of(tokenizer, [[user(str(n))] for n in range(12)])
    texts = ["1"] * 6 + [""] + ["1"] * 3
    for dataset in (Dataset.from_dict({"prompt": texts}), on_disk(texts)[0]):
        with pytest.raises(ValueError, match=r"train_dataset row 6: the prompt '' has no tokens"):
            prepare_prompts(dataset, tokenizer)


def test_the_digest_tells_ids_and_their_order_and_ends(tokenizer):
    def digest(*texts: str) -> str:
        return prompts_of(tokenizer, list(texts)).digest()

    assert digest("1+", "2=") == digest("1+", "2=")
    assert len({digest("1+", "2="), digest("2=", "1+"), digest("1", "+2="), digest("1+2="), digest("1+", "2+")}) == 5


def test_epochs_differ_and_so_do_seeds():
    firsts = itertools.product(range(0, 100, 20), range(5))
    orders = {tuple(prompt_indices(range(first, first + 20), 20, seed)) for first, seed in firsts}
    assert len(orders) == 25
    assert tuple(range(20)) not in orders


def rows_of(tokenizer, tmp_path, processes: int, process: int, batch_size: int, num_generations: int, rollout: int):
    """A process's rows of a rollout of 7 prompts: (prompt, group, seed) of each."""
    sizes = {"per_device_train_batch_size": batch_size, "num_mini_batches": 1, "num_generations": num_generations}
    args = PPOConfig(output_dir=str(tmp_path / "out"), use_cpu=True, seed=11, **sizes)
    place = SimpleNamespace(num_processes=processes, process_index=process)
    collector = Collector(model=None, sampler=None, rewards=None, tokenizer=tokenizer, accelerator=place, args=args)
    prompts = prompts_of(tokenizer, ["1", "2", "3", "1+", "2+", "3+", "1="])
    return [(row.columns["prompt"], row.group, row.seed) for row in training_rows(collector, prompts, rollout)]


@pytest.mark.parametrize("num_generations", [1, 2])
def test_rollouts_of_two_processes_are_those_of_one(tokenizer, tmp_path, num_generations):
    for rollout in range(3):
        alone = rows_of(tokenizer, tmp_path, 1, 0, 8, num_generations, rollout)
        first = rows_of(tokenizer, tmp_path, 2, 0, 4, num_generations, rollout)
        second = rows_of(tokenizer, tmp_path, 2, 1, 4, num_generations, rollout)
        assert len(alone) == 8
        assert first + second == alone


def test_rollouts_go_through_the_prompts_without_gap_or_repetition(tokenizer, tmp_path):
    rows = [row for rollout in range(7) for row in rows_of(tokenizer, tmp_path, 1, 0, 4, 2, rollout)]
    prompts = [prompt for prompt, _, _ in rows]
    assert prompts[::2] == prompts[1::2]  # two completions per prompt, side by side
    for epoch in (prompts[0:14:2], prompts[14:28:2]):  # 28 rows: two epochs of seven prompts
        assert sorted(epoch) == ["1", "1+", "1=", "2", "2+", "3", "3+"]
    groups = [group for _, group, _ in rows]
    assert groups == [i // 2 for i in range(28)]
    assert len({seed for _, _, seed in rows}) == 28  # each completion its own random numbers


def test_a_column_of_files_that_a_function_names_is_decoded(make_trainer, dataset):
    seen = []

    def reward(completions, image, **kwargs):
        seen.extend(image)
        return [0.0] * len(image)

    picture = io.BytesIO()
    PIL.Image.new("RGB", (4, 2)).save(picture, "PNG")
    images = [{"bytes": picture.getvalue(), "path": None}] * len(dataset)
    data = dataset.add_column("image", images).cast_column("image", Image())
    make_trainer({"max_steps": 4}, reward_funcs=reward, train_dataset=data).train()
    assert {one.size for one in seen} == {(4, 2)}


def encloses(tokenizer, start: str = "", end: str = ""):
    """Let a tokenizer add special tokens to what it encodes, as add_bos_token and add_eos_token do."""
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, end) if token]
    template = " ".join(part for part in (start, "$A", end) if part)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def test_a_tokenizer_that_ends_prompts_is_refused(make_trainer, tokenizer, dataset):
    ending = encloses(tokenizer, end="<eos>")
    with pytest.raises(ValueError, match=r"train_dataset.*'<eos>'.*add_eos_token"):
        make_trainer(processing_class=ending)
    own = dataset.map(lambda row: {"prompt": row["prompt"] + "<eos>"})
    make_trainer(processing_class=ending, train_dataset=own)  # the text itself ends so
    chat = dataset.map(lambda row: {"prompt": [user(row["prompt"])]})
    trainer = make_trainer(processing_class=ending, train_dataset=chat)
    with pytest.raises(ValueError, match=r"eval_dataset.*add_eos_token"):
        trainer.evaluate(dataset)


def test_two_tokens_at_the_start_of_prompts_are_warned_of(make_trainer, tokenizer, dataset, caplog):
    tokenizer.bos_token = "！"
    starting = encloses(tokenizer, start="！")
    make_trainer(processing_class=starting)
    assert "two" not in caplog.text
    rendered = dataset.map(lambda row: {"prompt": "！" + row["prompt"]})
    make_trainer(processing_class=starting, train_dataset=rendered)
    assert "two" in caplog.text
    assert "add_bos_token" in caplog.text
