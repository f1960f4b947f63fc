"""What is checked by a forward: on the training device, in training's precision, before completions are sampled."""

import pytest
import torch
from peft import get_peft_model
from transformers import LlamaForCausalLM, RemBertConfig, RemBertForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from helpers.attention import register_attention
from helpers.runs import untimed_logs
from helpers.tiny import lora, scorer, tiny_model
from hfppo import PPOTrainer
from hfppo.generation.generate import TransformersSampler
from hfppo.models import layout


class Scaled(LlamaForCausalLM):
    """Changes its logits after the head, by no field of its configuration."""

    def forward(self, *args, **kwargs) -> CausalLMOutputWithPast:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 0.5
        return outputs


def test_an_architecture_that_changes_its_logits_is_refused_before_it_samples(make_trainer, dataset, monkeypatch):
    model = tiny_model()
    model.__class__ = Scaled
    trainer = make_trainer(model=model, eval_dataset=dataset)
    monkeypatch.setattr(TransformersSampler, "__call__", lambda *_: pytest.fail("completions were sampled"))
    for start in (trainer.train, trainer.evaluate, lambda: trainer.rollout(["1+1="])):
        with pytest.raises(ValueError, match=r"Scaled changes its logits .* use another architecture"):
            start()


def test_an_architecture_with_more_than_a_head_after_its_trunk_is_refused(make_trainer):
    """RemBERT's head has another width than its trunk, with a layer between them."""
    shape = {"vocab_size": 26, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "input_embedding_size": 16, "output_embedding_size": 24, "is_decoder": True}
    model = RemBertForCausalLM(RemBertConfig(**shape, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    with pytest.raises(ValueError, match=r"RemBertForCausalLM needs more .* use another architecture"):
        make_trainer(model=model, critic="shared").rollout(["1+1="])


@pytest.mark.parametrize("given", ["model", "adapter", "ref_model", "critic", "reward_funcs"])
def test_a_model_whose_configuration_asks_for_tuples(make_trainer, tokenizer, given):
    def plain(name: str):
        made = scorer() if name in ("critic", "reward_funcs") else tiny_model()
        made = get_peft_model(made, lora()) if name == "adapter" else made
        made.config.return_dict = name != given
        return made

    def rollout(given: dict):
        peft_config = None if "adapter" in given else lora()
        models = {name.replace("adapter", "model"): model for name, model in given.items()}
        own = tokenizer if "reward_funcs" in given else None
        return make_trainer({"max_steps": 1}, **models, peft_config=peft_config, reward_processing_classes=own)

    trainer = rollout({name: plain(name) for name in {"ref_model", "critic", given}})
    trainer.train()
    assert trainer.rollout(["1+1="]).values.isfinite().all()


@pytest.mark.parametrize("fields", [{}, {"entropy_coef": 0.1}, {"temperature": 0.5}])
def test_a_head_that_never_writes_a_token(make_trainer, fields):
    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(26).index_fill_(0, torch.arange(20, 26), -torch.inf))
    without = tiny_model()
    without.lm_head.bias = torch.nn.Parameter(torch.zeros(26).index_fill_(0, torch.arange(20, 26), -1e30))
    runs = [make_trainer({"max_steps": 2, **fields}, model=each) for each in (model, without)]
    for trainer in runs:
        trainer.train()
    assert untimed_logs(runs[0]) == untimed_logs(runs[1])


@pytest.mark.parametrize("critic", ["adapter", "shared", "a model by its path"])
def test_an_attention_that_wants_half_precision_runs_by_path(make_trainer, dataset, base_path, monkeypatch, critic):
    """It raises in float32 without autocast, as flash attention does: so no forward may run outside of it."""
    monkeypatch.setattr(layout, "PACKING_ATTENTION", "halves")
    monkeypatch.setattr(layout, "_tried", {})
    seen = register_attention("halves", lambda query: torch.is_autocast_enabled("cpu"))
    attention = {"attn_implementation": "halves"}
    fields = {"bf16": True, "max_steps": 2, "model_init_kwargs": attention}
    critic = base_path if critic.startswith("a model") else critic
    trainer = make_trainer(fields, model=base_path, critic=critic, eval_dataset=dataset)
    assert seen == []
    trainer.evaluate()
    trainer.train()
    assert seen
    with trainer.accelerator.autocast():
        assert layout.can_pack(trainer.model.causal_lm)


@pytest.mark.parametrize("critic", ["adapter", "shared"])
def test_layouts_are_tried_before_the_first_step_also_of_a_resumed_run(make_trainer, monkeypatch, tmp_path, critic):
    """Where weights are sharded, a trial that one process alone makes later would wait for the others."""
    fields = {"max_steps": 2, "num_mini_batches": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(fields, critic=critic).train()
    tried: list[set] = []
    compute_loss = PPOTrainer.compute_loss

    def record(*args, **kwargs):
        tried.append(set(layout._tried))
        return compute_loss(*args, **kwargs)

    monkeypatch.setattr(PPOTrainer, "compute_loss", record)
    monkeypatch.setattr(layout, "_tried", {})
    make_trainer(fields, critic=critic).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
    assert len(tried[0]) == 1, "the trunk of both"
    assert all(kinds == tried[0] for kinds in tried)
