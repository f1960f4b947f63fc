"""The model card, as people and as the Hub read it."""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import TrainerState, modelcard

from helpers.runs import SMALL, count_digits
from hfppo.reporting.card import last_evaluations
from hfppo.saving.manifest import find_damage

EVALUATED = {"eval_strategy": "steps", "eval_steps": 4}


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def tokens(card: ModelCard) -> list:
    return MarkdownIt("commonmark").enable("table").parse(card.text)


def shown(token) -> str:
    return "".join(part.content for part in token.children)


def headings(card: ModelCard) -> list[str]:
    pairs = zip(tokens(card), tokens(card)[1:], strict=False)
    return [shown(after) for token, after in pairs if token.type == "heading_open"]


def tables(card: ModelCard) -> list[list[list[str]]]:
    """The cells of all tables as they are shown."""
    found: list[list[list[str]]] = []
    for token, after in zip(tokens(card), tokens(card)[1:], strict=False):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            found[-1][-1].append(shown(after))
    return found


def blocks(card: ModelCard) -> dict[str, str]:
    """The code blocks by language."""
    return {token.info: token.content for token in tokens(card) if token.type == "fence"}


def test_card_tells_the_run(make_trainer, dataset, tmp_path):
    def short(completions, **kwargs):
        return [0.0 for _ in completions]

    changes = {**EVALUATED, "reward_weights": [1, 0.25], "lr_scheduler_type": "cosine"}
    trainer = make_trainer(
        changes,
        reward_funcs=[count_digits, short],
        eval_dataset={"easy": dataset, "hard": dataset},
        compute_metrics=lambda prediction: {"even": 1 / 3},
    )
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    card = card_of(tmp_path / "out")
    assert (card.data.library_name, card.data.pipeline_tag) == ("peft", "text-generation")
    assert {"lora", "ppo", "hfppo", "reinforcement-learning"} <= set(card.data.tags)
    evaluation, rewards = tables(card)
    assert rewards == [["function", "weight"], ["count_digits", "1"], ["short", "0.25"]]
    assert evaluation[0] == ["metric", "eval_easy, step 8", "eval_hard, step 8"]
    numbers = {row[0]: row[1] for row in evaluation[1:]}
    logged = next(e for e in reversed(trainer.state.log_history) if "eval_easy_reward" in e)
    assert float(numbers["reward"]) == pytest.approx(logged["eval_easy_reward"], rel=1e-3)
    assert numbers["even"] == "0.3333"
    assert not {"runtime", "samples_per_second", "epoch", "step"} & numbers.keys()
    changed = yaml.safe_load(blocks(card)["yaml"])
    assert changes.items() <= changed.items()
    assert changed["num_mini_batches"] == SMALL["num_mini_batches"]
    assert not {"output_dir", "use_cpu", "logging_steps", "save_strategy", "report_to"} & changed.keys()
    assert not {"bf16", "activation_checkpointing", "gradient_checkpointing"} & changed.keys()  # None became False
    assert [text in card.text for text in ("8 optimizer steps.", "The critic is in `critic/`")] == [True, True]
    compile(blocks(card)["python"], "card", "exec")


def test_every_save_has_the_card_of_the_run(make_trainer, tmp_path, monkeypatch):
    """Without a request to the Hub, which may be out of reach."""
    monkeypatch.setattr(modelcard, "is_offline_mode", lambda: False)
    monkeypatch.setattr(modelcard, "hf_api", lambda: pytest.fail("asks the Hub"))
    trainer = make_trainer({"save_strategy": "steps", "save_steps": 2, "max_steps": 4})
    trainer.model.config.name_or_path = "team/base"
    trainer.train()
    trainer.save_model()
    trainer.save_model(str(tmp_path / "copy"))
    for folder, step in (("out/checkpoint-2", 2), ("out/checkpoint-4", 4), ("out", 4), ("copy", 4)):
        card = card_of(tmp_path / folder)
        assert "More Information Needed" not in card.text
        assert headings(card)[0] == "out"
        assert f"{step} optimizer steps." in card.text
        assert "The critic is in `critic/`" in card.text
        assert tables(card) == [[["function", "weight"], ["count_digits", "1"]]]
        assert f'from_pretrained("{Path(folder).name}")' in blocks(card)["python"]
        assert {"lora", "ppo", "hfppo", "base_model:adapter:team/base"} <= set(card.data.tags)
        assert (card.data.library_name, card.data.base_model) == ("peft", "team/base")
    assert find_damage(tmp_path / "out/checkpoint-2") is None


@pytest.mark.parametrize("name", ["a|b {{ 7 * 7 }} &amp;\n\n---\n# b", "``` x</table><script> [x](y) *a* _b_ \\|"])
def test_text_of_users_stays_text(make_trainer, tmp_path, name):
    def reward(completions, **kwargs):
        return [0.0 for _ in completions]

    reward.__name__ = name
    trainer = make_trainer(reward_funcs=reward, compute_metrics=lambda prediction: {name: 1.0})
    trainer.evaluate(trainer.train_dataset)
    trainer.create_model_card(model_name=name, tags=[name, "a: b\n---\nc"], license=name, dataset=name)
    card = card_of(tmp_path / "out")
    line = " ".join(name.split())
    assert headings(card)[0] == line
    assert len(headings(card)) == 7
    evaluation, rewards = tables(card)
    assert rewards[1:] == [[line, "1"]]
    assert [line, "1"] in evaluation
    assert {name, "a: b\n---\nc"} <= set(card.data.tags)
    assert card.data.license == name
    assert not any(part.type.startswith("html") for token in tokens(card) for part in (token, *(token.children or [])))


def test_local_base_is_no_base_model_of_the_hub(make_trainer, tmp_path, base_path, monkeypatch):
    trainer = make_trainer(model=base_path)
    monkeypatch.chdir(tmp_path)
    for name in (base_path, "base"):
        trainer.model.config.name_or_path = name
        trainer.save_model()
        trainer.create_model_card()
        card = card_of(tmp_path / "out")
        assert card.data.base_model is None
        assert not any("base" in tag for tag in card.data.tags)
        assert str(tmp_path) not in card.text
    trainer.create_model_card(finetuned_from="team/base")
    trainer.save_model()
    card = card_of(tmp_path / "out")
    assert card.data.base_model == "team/base"
    assert "[team/base](https://huggingface.co/team/base)" in card.text


def test_evaluations_are_those_of_the_saved_weights(config):
    """Step 2 was the best, and its weights were taken back at the end; what came after them counts again."""

    def entry(name: str, step: int, reward: float) -> dict:
        return {f"{name}_reward": reward, f"{name}_samples_per_second": 1.0, "step": step}

    history = [
        {"loss": 1.0, "step": 1},
        entry("eval", 2, 0.9),
        entry("eval", 4, 0.1),
        {"train_runtime": 1.0, "train_samples_per_second": 1.0, "step": 4},
        entry("test", 4, 0.8),
    ]
    state = TrainerState(log_history=history, best_global_step=3, global_step=4)  # step 3 was not saved
    state.best_model_checkpoint = "some-where/checkpoint-2"
    last, best = config(), config(load_best_model_at_end=True, eval_strategy="steps", eval_steps=500)
    ended = {"eval": {"step": 4, "reward": 0.1}, "test": {"step": 4, "reward": 0.8}}
    assert last_evaluations(state, last) == ended
    assert last_evaluations(state, best) == {**ended, "eval": {"step": 2, "reward": 0.9}}
    state.best_model_checkpoint = None
    assert last_evaluations(state, best) == ended
    state.log_history = history[:3]  # training goes on
    assert last_evaluations(state, best) == {"eval": {"step": 4, "reward": 0.1}}
