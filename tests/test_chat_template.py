"""Chat templates that write the date: it is that of the run, whatever the clock says."""

import datetime
import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset, load_from_disk
from transformers import AddedToken
from transformers.utils import chat_template_utils

from helpers.agents import TEMPLATE
from helpers.runs import assert_same_run
from helpers.scripted import Scripted
from helpers.tiny import CHAT_TEMPLATE, other_tokenizer, scorer, tiny_model
from hfppo import TextEnvironment
from hfppo.checkpoint import state_file
from hfppo.data import chat_template
from hfppo.data import prompts as prompts_module
from hfppo.data.chat_template import RunDate, apply_chat_template
from hfppo.data.prompts import prepare_prompts
from hfppo.rewards.model import RewardModel
from hfppo.token_trace.from_checkpoint import trace_prompt

DATED = "{{ strftime_now('%d') }}" + CHAT_TEMPLATE
TALKS = [[{"role": "user", "content": f"{a}+{b}="}] for a in range(4) for b in range(4)]
CONFIG = {"max_steps": 4, "num_ppo_epochs": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def clock(monkeypatch):
    """Set the day for this package and for transformers."""

    class Day(datetime.date):
        @classmethod
        def today(cls):
            return datetime.date(2026, 5, now[0])

    class Moment(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 5, now[0], 12, 30)

    now = [7]
    monkeypatch.setattr(chat_template, "date", Day)
    monkeypatch.setattr(chat_template_utils, "datetime", Moment)
    return partial(now.__setitem__, 0)


@pytest.fixture
def make_dated(make_trainer, tokenizer):
    """Build a trainer whose prompts, and whose reward model's texts, have the date."""
    tokenizer.chat_template = DATED

    def make(config=None, **kwargs):
        reads = other_tokenizer("left", "<end>")
        reads.chat_template = DATED
        data = Dataset.from_dict({"prompt": TALKS})
        given = {"train_dataset": data, "eval_dataset": data.take(2), "reward_funcs": RewardModel(scorer(), reads)}
        return make_trainer({**CONFIG, **(config or {})}, **{**given, **kwargs})

    return make


def of_day(trainer, ids: list[int]) -> str:
    return trainer.processing_class.decode(ids[:2])


@pytest.mark.parametrize("beginning", ["", " \n", "  {% if true %}\n请{% endif %}"])
def test_the_clock_alone_is_replaced(tokenizer, clock, beginning):
    codes = "".join(f"%{letter} " for letter in "aAbBdjmUwWxyY") + "%-d %-m %% %%d"
    tokenizer.chat_template = (
        f"{beginning}{{% set f = '{codes}' %}}{{{{ strftime_now(f) if strftime_now is defined }}}}"
    )
    expected = tokenizer.apply_chat_template(TALKS[0], tokenize=False)
    today, earlier = (RunDate(datetime.date(*day)) for day in ((2026, 5, 7), (2001, 2, 3)))
    assert apply_chat_template(tokenizer, TALKS[0], today, tokenize=False) == expected
    assert apply_chat_template(tokenizer, TALKS[0], earlier, tokenize=False).endswith("01 2001 3 2 % %d")


def test_all_processes_have_the_main_ones_date(clock, monkeypatch):
    monkeypatch.setattr(chat_template, "broadcast_object_list", lambda objects: [datetime.date(2026, 5, 6)])
    assert RunDate.today() == RunDate(datetime.date(2026, 5, 6))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_resumed_on_another_day_equals_the_straight_run(make_dated, tmp_path, clock, streamed):
    kwargs = {"train_dataset": Dataset.from_dict({"prompt": TALKS}).to_iterable_dataset()} if streamed else {}
    config = {"max_prompt_length": 20} if streamed else {}
    straight = make_dated({**config, "output_dir": str(tmp_path / "straight")}, **kwargs)
    straight.train()
    shutil.copytree(tmp_path / "straight/checkpoint-2", tmp_path / "resumed/checkpoint-2")
    clock(8)
    resumed = make_dated({**config, "output_dir": str(tmp_path / "resumed")}, **kwargs)
    assert of_day(resumed, resumed.rollout(TALKS[:1]).prompt_ids[0].tolist()) == "08"
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(straight, resumed)
    for trainer in (straight, resumed):  # also what comes later
        assert of_day(trainer, trainer.rollout(TALKS[:1]).prompt_ids[0].tolist()) == "07"
    evaluated = [{k: v for k, v in t.evaluate().items() if "reward" in k} for t in (straight, resumed)]
    assert evaluated[0] == evaluated[1]


def test_a_checkpoint_of_a_resumed_run_has_the_date_of_its_start(make_dated, tmp_path, clock):
    make_dated({"max_steps": 1}).train()
    for day in (8, 9):
        clock(day)
        make_dated({"max_steps": day - 6}).train(resume_from_checkpoint=True)
        saved = json.loads(state_file(tmp_path / f"out/checkpoint-{day - 6}", 0).read_text())
        assert saved["run"]["date"] == "2026-05-07"


def test_a_checkpoint_shows_what_its_run_saw(make_dated, tmp_path, base_path, clock):
    trainer = make_dated({"max_steps": 1}, model=base_path)
    trainer.train()
    checkpoint = tmp_path / "out/checkpoint-1"
    clock(8)
    trace, _ = trace_prompt(checkpoint, "1+1=", completion="2", chat=True)
    assert of_day(trainer, trace.prompt_ids) == "07"


class Asks(TextEnvironment):
    """Asks, whatever it is told."""

    def reset(self, **row):
        return "1+1"

    def step(self, text):
        return "2+2", 1.0, False, False, {}


def test_prompts_and_replies_of_an_environment_do_not_change_at_midnight(make_agent, monkeypatch, clock):
    template = TEMPLATE.replace("<assistant>", "<assistant>{{ strftime_now('%d') }}")  # in a reply as well
    monkeypatch.setattr("helpers.agents.TEMPLATE", template)
    trainer = make_agent(environment_factory=Asks, config={"max_turn_length": 3, "max_tool_calling_iterations": 2})
    seen = []
    for day in (7, 8):
        clock(day)
        trainer.collector.player.chat_format._cached.cache_clear()  # what was rendered on the day before
        rollout = trainer.rollout([TALKS[0]])
        seen.append(trainer.processing_class.decode(torch.cat([rollout.prompt_ids, rollout.completion_ids], dim=1)[0]))
    assert seen[0] == seen[1]
    assert seen[0].replace(" ", "").count("<assistant>07") == 3  # the prompt, and two replies


def test_stored_ids_of_another_day_are_not_found_and_those_without_a_date_are(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts_module, "STORED_FROM", 10)
    Dataset.from_dict({"prompt": TALKS}).save_to_disk(tmp_path / "rows")
    dataset = load_from_disk(tmp_path / "rows")
    tokenizer = character_tokenizer()

    def ids(template: str, day: int) -> list[list[int]]:
        tokenizer.chat_template = template
        date = RunDate(datetime.date(2026, 5, day))
        return prepare_prompts(dataset, tokenizer, chat_template_kwargs={"strftime_now": date}).ids.to_pylist()

    assert tokenizer.decode(ids(DATED, 7)[0][:2]) == "07"
    assert tokenizer.decode(ids(DATED, 8)[0][:2]) == "08"
    plain = ids(CHAT_TEMPLATE, 7)
    monkeypatch.setattr(prompts_module, "render_all", None)
    assert ids(CHAT_TEMPLATE, 8) == plain


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture
def chat(make_trainer, tokenizer):
    """Build a trainer whose tokenizer ends texts with <eos>, and whose template may end turns with another token."""

    def make(template: str, prompts=TALKS):
        tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>", "<think>")])
        tokenizer.chat_template = template
        data = Dataset.from_dict({"prompt": prompts})
        return make_trainer(model=tiny_model(vocab_size=32), train_dataset=data)

    return make


@pytest.mark.parametrize(
    ("template", "prompts", "ends"),
    [
        (CHATML, TALKS, True),
        (CHATML.replace("<|im_end|>", "<eos>"), TALKS, False),  # EOS already
        (CHAT_TEMPLATE, TALKS, False),  # nothing ends a turn
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_start|>", TALKS, False),  # begins the next one
        (CHATML, ["1+1=", "1+2="], False),  # no prompt needs the template
    ],
)
def test_the_token_that_ends_the_templates_turns_ends_completions(chat, caplog, template, prompts, ends):
    trainer = chat(template, prompts)
    end = trainer.processing_class.convert_tokens_to_ids("<|im_end|>")
    assert trainer.collector.sampler.sampling.eos_ids == ([1, end] if ends else [1])
    assert ("<|im_end|>" in caplog.text) == ends


@pytest.mark.parametrize(("inside", "warned"), [("<think>", True), ("<eos>", False), ("1", False)])
def test_special_tokens_that_rewards_do_not_see_are_warned_of(chat, caplog, inside, warned):
    """Ends of turns and the tokenizer's usual tokens are no news."""
    trainer = chat(CHATML)
    ids = trainer.processing_class.convert_tokens_to_ids(["2", inside, "3", "<|im_end|>"])
    trainer.collector = replace(trainer.collector, sampler=Scripted(ids))
    rows = trainer.collector.eval_rows(trainer._train_prompts)[:2]
    for _ in range(2):
        trainer.collector.reward_batch(trainer.collector.complete(rows), trainer.state)
    assert caplog.text.count("'<think>'") == warned
