"""The column "critic_prompt": only the critic reads it, before the same completions."""

import json
from types import SimpleNamespace

import best_of
import pytest
import torch
from datasets import Dataset, load_from_disk
from torch.testing import assert_close

from helpers.agents import Doors, call, collect
from helpers.runs import SUMS, assert_same_run, chat_tokenizer, critic_values, small_trainer
from helpers.scripted import first_rollout, ids_of, training_rows
from helpers.tiny import scorer, tiny_model
from hfppo import TokenTraceCallback
from hfppo.data.prompts import prepare_prompts
from hfppo.learn.flops import FlopCounter
from hfppo.learn.run import StepPlan
from hfppo.models import layout
from hfppo.token_trace.from_checkpoint import trace_prompt

LONG = SUMS.map(lambda row: {"prompt": "请问" * 6 + row["prompt"]})  # long enough to be read once for a group
SAME = LONG.add_column("critic_prompt", LONG["prompt"])
TOLD = SUMS.map(lambda x: {"critic_prompt": None if x["answer"] == "4" else f"{x['answer']}！{x['prompt']}"})
PROMPT, ANSWERED = "请问1+2=", "3！请问1+2="
GROUPS = {"num_generations": 4, "max_tokens_per_micro_batch": 40, "bootstrap_truncated": True}


def randomized(trainer):
    torch.manual_seed(0)
    for parameter in trainer.model.critic_parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return trainer


def trained(make_trainer, folder, config, rows):
    trainer = make_trainer({**config, "output_dir": str(folder / rows._fingerprint)}, train_dataset=rows)
    trainer.train()
    return trainer


def values_by_hand(trainer, prompt: list[int], completion: list[int]) -> list[float]:
    with torch.no_grad():
        return critic_values(trainer.model, torch.tensor([prompt + completion]))[len(prompt) - 1 :].tolist()


@pytest.mark.parametrize("config", [{"critic_pretraining_completions": 16, "prompt_candidates": 2}, GROUPS])
def test_a_critic_prompt_equal_to_the_prompt_changes_no_bit(make_trainer, tmp_path, monkeypatch, config):
    trees, as_tree = [], layout.Layout.as_tree
    monkeypatch.setattr(layout.Layout, "as_tree", lambda *args, **kw: trees.append(args) or as_tree(*args, **kw))
    assert_same_run(*(trained(make_trainer, tmp_path, {**config, "max_steps": 6}, rows) for rows in (LONG, SAME)))
    assert trees


@pytest.mark.parametrize("critic", ["adapter", scorer])
def test_only_values_change_and_are_those_of_the_sequence_by_hand(make_trainer, critic):
    fields = {"max_steps": 1, "bootstrap_truncated": True, "lam_critic": 1.0, "kl_coef": 0.0}
    critics = (critic if critic == "adapter" else critic() for _ in range(2))
    plain, told = (randomized(make_trainer(fields, train_dataset=rows, critic=next(critics))) for rows in (SUMS, TOLD))
    without, rollout = first_rollout(plain), first_rollout(told)
    for name in ("prompt_ids", "completion_ids", "rollout_logprobs", "rewards"):
        assert torch.equal(getattr(rollout, name), getattr(without, name)), name
    assert_close(rollout.old_logprobs, without.old_logprobs)
    rows = training_rows(told.collector, told._train_prompts, 0)
    critic_prompts = [row.columns["critic_prompt"] for row in rows]
    read = [ids_of(own or row.columns["prompt"]) for own, row in zip(critic_prompts, rows, strict=True)]
    completions = [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.mask, strict=True)]
    for i, (own, completion) in enumerate(zip(read, completions, strict=True)):
        *values, final = values_by_hand(told, own, completion)
        assert_close(rollout.values[i][rollout.mask[i]], torch.tensor(values), rtol=1e-4, atol=1e-5)
        returned = rollout.rewards[i].sum() + final * bool(rollout.truncated[i])
        assert_close(rollout.returns[i][0], returned, rtol=1e-4, atol=1e-5)
        assert torch.allclose(rollout.values[i], without.values[i], atol=1e-4) == (critic_prompts[i] is None)
    assert_close(told.collector.prompt_values(rows), rollout.values[:, 0], rtol=1e-4, atol=1e-5)
    completed, prompts = sum(map(len, completions)), [max(6, len(own)) for own in read]
    assert int(rollout.lengths.sum()) == sum(prompts) + completed
    flops = FlopCounter(actor=10, critic=7, head=0).count([rollout], StepPlan(0, True, True, warms_up=False))
    assert flops == 10 * (6 * len(rows) + completed) + 7 * (sum(map(len, read)) + completed)

    def loss_terms(outputs, batch):  # of the first step
        assert outputs.values is None or torch.allclose(outputs.values, batch.values, rtol=1e-4, atol=1e-5)
        return type(told).loss_terms(told, outputs, batch)

    told.loss_terms = loss_terms
    told.train()


def test_the_text_of_reset_and_later_turns_follow_both_prompts(make_agent):
    hidden = [{"role": "system", "content": "keys 0 1 2"}, {"role": "user", "content": "go "}]
    rows = [{"prompt": hidden[1:], "start": 0, "critic_prompt": critic} for critic in (hidden, None)]
    dataset, turns = Dataset.from_list(rows), [call("open", key=1), "Done."]
    for number in (0, 1):
        trainer = randomized(make_agent(turns, dataset=dataset.select([number]), environment_factory=Doors))
        rollout, _, _ = collect(trainer, 1)
        critic_prompt, decode = rollout.critic_prompt_ids[0].tolist(), trainer.processing_class.decode
        prompt, before = decode(rollout.prompt_ids[0]), "" if number else "<system>keys 0 1 2<eos>"
        assert "<user>go door 0<eos>" in prompt
        assert decode(critic_prompt) == prompt.replace("<user>", f"{before}<user>")
        assert rollout.context.any()
        values = torch.tensor(values_by_hand(trainer, critic_prompt, rollout.completion_ids[0].tolist())[:-1])
        assert_close(rollout.values[0], values.where(rollout.mask[0], 0.0), rtol=1e-4, atol=1e-5)


def test_a_critics_prompt_that_reset_makes_too_long_has_no_score(make_agent, caplog):
    texts = {"prompt": "go ", "critic_prompt": "a" * 20}
    dataset = Dataset.from_list([{name: [{"role": "user", "content": text}] for name, text in texts.items()}])
    trainer = make_agent(dataset=dataset, environment_factory=Doors, config={"max_prompt_length": 40})
    (row,) = trainer.collector.player.complete_prompts(trainer.collector.eval_rows(trainer._train_prompts))
    assert (len(row.critic_prompt_ids), len(row.prompt_ids)) == (40, 24)
    assert "the prompt has 41 tokens, more than 40; it has no score" in caplog.text


def test_a_row_is_dropped_if_either_prompt_is_too_long(make_trainer, caplog):
    rows = Dataset.from_dict({"prompt": ["1", "1", "1+2=3"], "critic_prompt": ["1", "1+2=3", "1"]})
    prompts = make_trainer({"max_prompt_length": 4}, train_dataset=rows, eval_dataset=rows)._prompt_maker.prompts
    assert (len(prompts["train_dataset"]), len(prompts["eval_dataset"])) == (1, 2)
    assert "2 of 3 prompts or critic_prompts in train_dataset are longer than max_prompt_length=4" in caplog.text


def test_stored_ids_are_those_of_a_dataset_in_memory(tmp_path, monkeypatch):
    TOLD.save_to_disk(tmp_path / "rows")
    plain, told = (prepare_prompts(TOLD, chat_tokenizer(), for_critic=reads) for reads in (False, True))
    assert told.critic_ids.to_pylist() == [ids_of(row["critic_prompt"] or row["prompt"]) for row in TOLD]
    monkeypatch.setattr("hfppo.data.prompts.STORED_FROM", 1)
    stored = prepare_prompts(load_from_disk(tmp_path / "rows"), chat_tokenizer(), for_critic=True)
    assert stored.arrays == told.arrays
    assert stored.digest() == told.digest() != plain.digest()


def test_without_a_critic_the_column_is_for_reward_functions_only(make_trainer):
    trainer = make_trainer({"advantage_estimator": "reinforce_plus_plus"}, train_dataset=TOLD)
    assert (trainer._train_prompts.critic_ids, trainer.rollout([PROMPT]).values) == (None, None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> SimpleNamespace:
    """A run with checkpoints, 2 of them within a rollout; `make` makes another one."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_model().save_pretrained(folder / "base")

    def make(name: str, **kwargs):
        config = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6}
        return small_trainer(folder / name, config, **{"model": str(folder / "base"), "train_dataset": TOLD, **kwargs})

    straight = make("straight")
    straight.train()
    straight.save_model()
    asked = straight.rollout([PROMPT] * 2, critic_prompt=[ANSWERED, None])
    return SimpleNamespace(straight=straight, make=make, folder=folder / "straight", asked=asked)


def test_a_run_resumes_within_a_rollout_to_the_bit_and_with_the_same_prompts_only(saved):
    resumed = saved.make("resumed")
    resumed.train(resume_from_checkpoint=str(saved.folder / "checkpoint-2"))
    assert_same_run(saved.straight, resumed)
    other = saved.make("other", train_dataset=TOLD.map(lambda row: {"critic_prompt": row["prompt"]}))
    with pytest.raises(ValueError, match=r"was written with prompts \(SHA-256"):
        other.train(resume_from_checkpoint=str(saved.folder / "checkpoint-2"))


def test_a_saved_critic_tells_that_it_reads_more(saved):
    assert json.loads((saved.folder / "critic/critic_config.json").read_text())["privileged"] is True
    assert "It read the dataset's column `critic_prompt`" in (saved.folder / "README.md").read_text()
    saved.make("again", critic=str(saved.folder))
    with pytest.raises(ValueError, match=r"a critic with \{'privileged': True\}, but"):
        saved.make("plain", critic=str(saved.folder), train_dataset=SUMS)
    trace, _ = trace_prompt(saved.folder / "checkpoint-6", PROMPT, critic_prompt=ANSWERED)
    values, (answered, plain) = torch.tensor([row.value for row in trace.rows]), saved.asked.values
    assert_close(values, answered, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(values, plain, atol=1e-3)


def test_values_without_a_critic_prompt_are_refused(saved, make_trainer):
    loaded = best_of.load_run(str(saved.folder), max_completion_length=6, use_cpu=True)
    for asked in (
        lambda: best_of.best_of(loaded, PROMPT, 2),
        lambda: trace_prompt(saved.folder / "checkpoint-6", PROMPT),
        lambda: TokenTraceCallback(trainer=saved.straight, prompts=[PROMPT]),
    ):
        with pytest.raises(ValueError, match="the critic was trained with it, and its values"):
            asked()
    with pytest.raises(ValueError, match="the critic was trained without it; leave it out"):
        make_trainer().rollout([PROMPT], critic_prompt=["1"])
