"""What holds, always: the base's bytes, the first ratio, KL 0 at the start, padding, cuts, counts, warmup, seeds."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from helpers.runs import Keep, assert_same_tensors, critic_values, gradients, logged, small_trainer, trainable
from helpers.scripted import training_rows
from helpers.tiny import tiny_gpt2, tiny_model, tiny_of_type, tiny_opt, tiny_qwen3
from hfppo import PPOCallback
from hfppo.models.actor_critic import Want

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.1}
UNUSUAL = {
    "layers are dropped": lambda: tiny_opt(layerdrop=0.5),
    "inputs of experts are jittered": lambda: tiny_of_type("mixtral", **EXPERTS),
    "logits are capped in bfloat16": lambda: tiny_of_type("gemma2", head_dim=16).bfloat16(),
    "logits are divided in bfloat16": lambda: tiny_of_type("granite", logits_scaling=0.3).bfloat16(),
    "logits are multiplied": lambda: tiny_of_type("cohere", logit_scale=0.3),
    "dropout is read from the configuration": lambda: tiny_of_type(
        "falcon", hidden_dropout=0.3, attention_dropout=0.3
    ),
    "states have another width before the head": lambda: tiny_opt(word_embed_proj_dim=16),
    "logits are multiplied after a state space": lambda: tiny_of_type("falcon_h1", lm_head_multiplier=0.3),
    "a router is a linear layer": lambda: tiny_of_type("llama4_text"),
    "the trunk has another name": lambda: tiny_of_type("mllama_text_model"),
}
ARCHITECTURES = [tiny_model, tiny_gpt2, tiny_qwen3, tiny_opt]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run with the settings of all small runs, and the bytes of its base before it."""
    base = tiny_model()
    before = {name: p.detach().clone() for name, p in base.state_dict().items()}
    trainer = small_trainer(tmp_path_factory.mktemp("plain"), model=base)
    trainer.train()
    trainer.before = before
    return trainer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ratio_is_one_on_the_first_update_and_against_generation(make_trainer, architecture):
    trainer = make_trainer({"temperature": 0.7}, model=architecture())
    trainer.train()
    first_ratio, against_generation = logged(trainer, "policy/first_ratio_deviation"), logged(trainer, "mismatch/max")
    assert len(first_ratio) == len(against_generation) == 2
    assert max(first_ratio) < 1e-6
    assert max(against_generation) < 1e-4


def test_logprobs_entropy_and_values_agree_with_the_plain_model(plain):
    """Against PEFT's own logits, one completion at a time and without any padding."""
    rollout = plain.rollout(["请问1+2=", "请问3="])
    actor = plain.model.eval()
    for i in range(2):
        prompt = rollout.prompt_ids[i][rollout.prompt_mask[i]]
        completion = rollout.completion_ids[i][rollout.mask[i]]
        n = len(completion)
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            logp = actor(input_ids=ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            with actor.disable_adapter():
                ref = actor(input_ids=ids).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            values = critic_values(actor, ids)[len(prompt) - 1 : -1]
        assert_close(rollout.old_logprobs[i, :n], logp[range(n), completion])
        assert_close(rollout.ref_logprobs[i, :n], ref[range(n), completion])
        assert_close(rollout.values[i, :n], values)
        assert not torch.equal(rollout.old_logprobs[i, :n], rollout.ref_logprobs[i, :n])


def test_actor_reference_and_critic_share_one_copy_of_the_base(make_trainer):
    base = tiny_model()
    storages = {p.untyped_storage().data_ptr() for p in base.parameters()}
    trainer = make_trainer(model=base)
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    assert {p.untyped_storage().data_ptr() for p in frozen} == storages
    assert [name for name, _ in trainer.model.critic.named_children()] == ["value_head"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_nothing(make_trainer, architecture):
    trainer = make_trainer(model=architecture())
    model = trainer.model.eval()
    rollout = trainer.rollout(["请问1+2=", "3=", "请问10+20="])

    def outputs(left: int, right: int, final_value: bool = True):
        def pad(x, amounts, value):
            return torch.nn.functional.pad(x, amounts, value=value)

        mask = pad(rollout.mask, (0, right), False)
        with torch.no_grad():
            out = model(
                input_ids=torch.cat(
                    [pad(rollout.prompt_ids, (left, 0), 7), pad(rollout.completion_ids, (0, right), 7)], dim=1
                ),
                attention_mask=torch.cat([pad(rollout.prompt_mask, (left, 0), False), mask], dim=1),
                completion_mask=mask,
                want=Want(entropy="constant", final_value=final_value),
            )
        width = rollout.mask.shape[1]
        assert not out.logprobs[:, width:].any()
        return out.logprobs[:, :width], out.entropy[:, :width], out.values[:, :width], out.final_value

    plain = outputs(0, 0)
    for left, right in [(5, 0), (0, 4), (3, 2)]:
        for a, b in zip(plain, outputs(left, right), strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-5)
    *others, none = outputs(3, 2, final_value=False)
    assert none is None
    for a, b in zip(plain, others, strict=False):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_padding_with_eos_gives_the_same_run(make_trainer, tokenizer):
    """The mask must come from the first EOS, not from `ids != pad`."""

    def run(pad_token):
        tokenizer.pad_token = pad_token
        trainer = make_trainer(processing_class=tokenizer, model=tiny_model(seed=1))
        trainer.train()
        return trainer

    ordinary, eos = run("<pad>"), run("<eos>")
    assert 0 < logged(ordinary, "completions/truncated_frac")[0] < 1
    assert_same_tensors(trainable(eos), trainable(ordinary))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"loss_reduction": "seq-mean-token-sum"},
        {"loss_reduction": "seq-mean-token-mean", "kl_loss_coef": 0.5, "entropy_coef": 0.1},
        {"loss_reduction": "seq-mean-token-sum-norm", "mask_truncated_completions": True},
    ],
)
def test_cutting_a_mini_batch_changes_no_gradient(make_trainer, dataset, config):
    trainer = make_trainer(
        {"num_mini_batches": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, **config},
        model=tiny_model(seed=1),
    )
    trainer.train()
    rollout = trainer.rollout(dataset["prompt"][:8])
    assert rollout.mask.sum(dim=1).unique().numel() > 1, "completions of one length would hide a wrong weight"
    whole = gradients(trainer, rollout, 1)
    assert max(g.abs().max() for g in whole.values()) > 1e-3
    for cuts in (2, 8):
        assert_close(gradients(trainer, rollout, cuts), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "critic"),
    [*((name, "adapter") for name in UNUSUAL), ("states have another width before the head", "shared")],
)
def test_the_first_ratio_of_unusual_models_is_one(make_trainer, name, critic):
    made = UNUSUAL[name]().eval()  # as from_pretrained leaves it
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    trainer = make_trainer({"max_steps": 1}, model=made, critic=critic)
    trainer.train()
    deviation = trainer.state.log_history[0]["policy/first_ratio_deviation"]
    assert deviation == pytest.approx(0, abs=0.05 if made.dtype == torch.bfloat16 else 1e-5)


def test_optimiser_steps_and_rollouts_are_counted_exactly(make_trainer):
    """16 prompts, rollouts of 2 × 2 × 2 = 8, used 3 × 2 times: 2 rollouts and 12 steps per epoch."""
    keep = Keep()
    config = {"max_steps": -1, "num_train_epochs": 2, "num_ppo_epochs": 3, "num_mini_batches": 2}
    config |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = make_trainer(config, callbacks=[keep])
    trainer.train()
    assert trainer.state.global_step == len(logged(trainer, "loss")) == 24
    assert trainer.ppo_state.rollouts == 4
    assert [len(rollout) for rollout in keep.rollouts] == [8] * 4


def test_a_ppo_callback_may_return_the_control_as_trainers_may(make_trainer):
    class Stop(PPOCallback):
        def on_update_end(self, args, state, control, **kwargs):
            return replace(control, should_training_stop=True)

    trainer = make_trainer(callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == trainer.args.updates_per_rollout < trainer.args.max_steps


def test_another_seed_is_another_run(make_trainer, plain):
    assert plain.args.seed == 3
    other = make_trainer({"seed": 4})
    other.train()
    ours, others = trainable(plain), trainable(other)
    assert not any(torch.equal(ours[name], others[name]) for name in ours if "lora_B" in name)
    seeds = [{row.seed for row in training_rows(t.collector, t._train_prompts, 0)} for t in (plain, other)]
    assert seeds[0].isdisjoint(seeds[1]), "the adapter's initial weights are not all that differs"


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_same_seed_is_the_same_run_and_evaluation_changes_no_training(make_trainer, plain, dataset, do_sample):
    config = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    evaluated = make_trainer(config, eval_dataset=dataset.select(range(4)))
    with evaluated.eval_sampling(do_sample):
        evaluated.train()
    assert len(logged(evaluated, "eval_reward")) == 9
    assert_same_tensors(trainable(evaluated), trainable(plain))


def test_training_never_changes_the_base(make_trainer, plain):
    """The last test of this module: it takes the run's model apart."""
    base = tiny_model()
    before = {name: p.detach().clone() for name, p in base.state_dict().items()}
    shared = make_trainer(model=base, critic="shared")
    shared.train()
    for trainer, bytes_before in ((plain, plain.before), (shared, before)):
        trainer.evaluate(trainer.train_dataset)
        lora_b = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(p.abs().sum() > 0 for p in lora_b), "nothing was trained"
        assert_same_tensors(trainer.model.unload().state_dict(), bytes_before)
