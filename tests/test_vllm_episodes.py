"""Episodes of several turns with the real vLLM, in both placements."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from helpers.agents import VOCAB_SIZE, calling_tokenizer, end_of_turn_ids, talking_trainer
from helpers.runs import Keep, logged
from helpers.tiny import LORA, tiny_model
from helpers.vllm_runs import ENGINE, Server
from hfppo.generation.vllm_server import serve_command
from hfppo.models.actor_critic import ActorCritic

pytestmark = [
    pytest.mark.vllm,
    # vLLM walks through the modules that it finds imported.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A model with heads wide enough for vLLM, a sixth of whose letters end a turn."""
    folder = str(tmp_path_factory.mktemp("base"))
    model = tiny_model(vocab_size=VOCAB_SIZE, hidden_size=64, max_position_embeddings=512, seed=1)
    model.generation_config.eos_token_id = end_of_turn_ids()
    model.save_pretrained(folder)
    calling_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("placement", ["colocate", pytest.param("server", marks=pytest.mark.nightly)])
def test_each_turn_is_sampled_from_the_training_models_policy(base, tmp_path, placement):
    actor = ActorCritic(AutoModelForCausalLM.from_pretrained(base), LORA, critic=None)
    server, keep = Server(serve_command(actor), tmp_path / "log"), Keep()
    config = {"use_vllm": True, "vllm_mode": placement, "max_steps": 12, "vllm_engine_kwargs": ENGINE}
    try:
        if placement == "server":
            config["vllm_server_base_url"] = server.url
            server.start()
            server.wait()
        trainer = talking_trainer(tmp_path / "out", config, model=base, callbacks=[keep])
        trainer.train()
    finally:
        server.kill()
    assert len(keep.rollouts) == 3
    assert min(logged(trainer, "turns/mean")) > 1
    for rollout in keep.rollouts:
        assert_close(rollout.rollout_logprobs, rollout.old_logprobs, rtol=0, atol=1e-4)
        assert not rollout.rollout_logprobs[rollout.context].any()
        assert torch.equal(rollout.real.long().cumsum(dim=1)[rollout.real], columns(rollout)[rollout.real])
    assert (keep.rollouts[-1].old_logprobs - keep.rollouts[-1].ref_logprobs).abs().max() > 0.1, "a stale adapter"


def columns(rollout) -> torch.Tensor:
    """The number of each column from 1, which the tokens of a completion without holes have."""
    return torch.arange(1, rollout.mask.shape[1] + 1).expand_as(rollout.mask)
