"""Sampling with the real vLLM, in both placements: the policy is the training model's, and nothing that happens to
the engine or the server changes a run.

The environment is made by `tests/helpers/vllm_environment.sh`.
"""

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from helpers.processes import HELPERS, run_python
from helpers.runs import Keep, assert_same_end, digest, frozen_tensors
from helpers.tiny import LORA
from helpers.vllm_runs import ENGINE, PROMPTS, Server, save_base
from hfppo.generation.vllm import RANKS
from hfppo.generation.vllm_server import serve_command
from hfppo.models.actor_critic import ActorCritic
from hfppo.sample import Turn
from hfppo.support.http_client import Endpoint, ServerError

pytestmark = [
    pytest.mark.vllm,
    # vLLM walks through the modules that it finds imported.
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]

# 4 steps per rollout of 8. Completions are long enough to be interrupted.
CONFIG = {"use_vllm": True, "max_completion_length": 48}
SAVING = {"save_strategy": "steps", "save_steps": 1}
AHEAD = pytest.mark.parametrize(("placement", "ahead"), [("colocate", 0), ("server", 1)])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_base(str(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def one_engine():
    """Whoever asks for a colocated engine gets the same one, without the adapters of the run before."""
    import vllm

    create, made = vllm.LLM, []

    def llm(**kwargs):
        if not made:
            made.extend([create(**kwargs), kwargs])
        engine, with_which = made
        assert kwargs == with_which
        for number in engine.llm_engine.list_loras():
            engine.llm_engine.remove_lora(number)
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "LLM", llm)
        yield


@pytest.fixture(scope="module")
def command(base) -> str:
    return serve_command(ActorCritic(AutoModelForCausalLM.from_pretrained(base), LORA, critic=None))


@pytest.fixture(scope="module")
def server(command, tmp_path_factory):
    """It starts while the first tests, which do without it, run."""
    started = Server(command, tmp_path_factory.mktemp("server") / "log")
    started.start()
    yield started
    started.kill()


@pytest.fixture
def make(make_trainer, base, one_engine, server, tmp_path) -> Callable:
    """A trainer with vLLM in a placement, whose output goes into a folder of that name unless it is told."""

    def trainer(placement: str, config: dict | None = None, **kwargs):
        if placement == "server":
            server.wait()
        where = {"output_dir": str(tmp_path / placement), "vllm_mode": placement, "vllm_engine_kwargs": ENGINE}
        config = {**CONFIG, **where, "vllm_server_base_url": server.url, **(config or {})}
        return make_trainer(config, model=base, train_dataset=PROMPTS, **kwargs)

    return trainer


@pytest.mark.parametrize(("placement", "temperature"), [("colocate", 0.7), ("server", 1.0)])
def test_vllm_samples_from_the_training_models_policy(make, placement, temperature):
    """Log-probs agree before any update and after one and two rollouts of them; so do greedy completions."""
    keep = Keep()
    trainer = make(placement, {"temperature": temperature, "max_steps": 12}, callbacks=[keep])
    trainer.train()
    assert len(keep.rollouts) == 3
    for rollout in keep.rollouts:
        assert rollout.prompt_mask.sum(dim=1).max() > 128
        assert_close(rollout.rollout_logprobs, rollout.old_logprobs, rtol=0, atol=1e-4)
        ends = [Turn.up_to_end(ids, [0.0] * len(ids), [1]) for ids in rollout.completion_ids.tolist()]
        assert rollout.mask.sum(dim=1).tolist() == [len(turn.ids) for turn in ends]
        assert rollout.truncated.tolist() == [turn.truncated for turn in ends]
    for rollout in keep.rollouts[1:]:
        assert (rollout.old_logprobs - rollout.ref_logprobs).abs().max() > 0.5, "a stale adapter would show little"

    prompts = [trainer.processing_class(p)["input_ids"] for p in PROMPTS["prompt"]]
    with trainer.collector.sampler.ready():
        greedy = trainer.collector.sampler(prompts, None)
    for turn, prompt in zip(greedy, prompts, strict=True):
        theirs = trainer.model.generate(
            input_ids=torch.tensor([prompt]),
            **{"do_sample": False, "max_new_tokens": 48, "eos_token_id": 1, "pad_token_id": 0},
            **{"top_k": 0, "repetition_penalty": 1.0},
        )
        assert turn.ids == theirs[0, len(prompt) :].tolist()


def test_fifty_syncs_send_the_adapter_and_leave_both_bases_alone(make):
    trainer = make("colocate")
    sampler, model = trainer.collector.sampler, trainer.model
    adapter = model.actor_parameters()

    def bases() -> list[str]:
        ours = frozen_tensors(model)
        assert sum(p.numel() for p in ours) > 50_000
        return [digest(ours), *sampler.engine.llm.apply_model(lambda m: digest(m.parameters()))]

    before, sampled, sizes = bases(), set(), set()
    for _ in range(50):
        with sampler.ready():
            sampled.add(sampler([[5, 6, 7]], [1])[0].logprobs[0])
        (folder,) = sampler.folder.iterdir()  # the one before is gone
        sizes.add(sum(path.stat().st_size for path in folder.iterdir()))
        with torch.no_grad():
            for p in adapter:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)), alpha=1e-3)
    assert len(sampled) == 50, "each is sampled from"
    assert bases() == before
    (sent,) = sizes
    weights = sum(p.numel() * p.element_size() for p in adapter)
    assert weights <= sent <= 1.5 * weights


@AHEAD
def test_resuming_equals_the_straight_run(make, tmp_path, placement, ahead):
    """From within a rollout, and from between two; evaluations publish adapters of their own."""
    config = {**SAVING, "rollouts_ahead": ahead, "eval_strategy": "steps", "eval_steps": 2}
    evaluated = {"eval_dataset": PROMPTS.select(range(1))}
    straight = make(placement, config, **evaluated)
    straight.train()
    for step in (3, 4):
        shutil.copytree(tmp_path / f"{placement}/checkpoint-{step}", tmp_path / f"from-{step}/checkpoint-{step}")
        resumed = make(placement, {**config, "output_dir": str(tmp_path / f"from-{step}")}, **evaluated)
        resumed.train(resume_from_checkpoint=True)
        assert_same_run(resumed, straight)


def assert_same_run(trainer, expected) -> None:
    """Bit for bit, and to the end."""
    assert trainer.state.global_step == expected.state.global_step == 8
    assert_same_end(trainer, expected)


class Accident:
    """Kills the server while it works on the second rollout."""

    def __init__(self, monkeypatch, server: Server):
        ask, numbers, self.under_way, self.at_once = Endpoint._ask, itertools.count(1), 0, 0

        async def watched(endpoint, method, url, body):
            # The check at the start, the 8 completions of the first rollout, and the last of the second.
            if url.endswith("/v1/completions") and next(numbers) == 1 + 8 + 8:
                await asyncio.sleep(0.1)
                self.at_once = self.under_way
                server.kill()
            self.under_way += 1
            try:
                return await ask(endpoint, method, url, body)
            finally:
                self.under_way -= 1

        monkeypatch.setattr(Endpoint, "_ask", watched)


@pytest.mark.nightly
@AHEAD
def test_a_killed_server_ends_the_run_within_the_limit_and_the_checkpoint_resumes_it(
    make, server, monkeypatch, tmp_path, placement, ahead
):
    straight = make(placement, {"rollouts_ahead": ahead, "output_dir": str(tmp_path / "straight")})
    straight.train()
    with monkeypatch.context() as patch:
        accident = Accident(patch, server)
        trainer = make("server", {**SAVING, "vllm_server_timeout": 3, "rollouts_ahead": ahead})
        begin = time.monotonic()
        with pytest.raises(ServerError, match=rf"{server.url}/v1/completions cannot be reached, after all retries"):
            trainer.train()
    assert 3 < time.monotonic() - begin < 15
    assert accident.at_once > 0
    assert trainer.state.global_step == 4
    server.start()
    resumed = make("server", {"rollouts_ahead": ahead})
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)


@pytest.mark.nightly
def test_runs_killed_while_a_server_samples_ahead_come_back_bit_for_bit():
    """Kills of the trainer right after it has sent an adapter, at any other moment, and with the server."""
    options = ["--seed", "3", "--kills", "5", "--variants", "server ahead"]
    found = run_python(HELPERS / "chaos.py", *options, timeout=500)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    counts = json.loads(found.stdout)
    assert counts["kills after publishing"] > 0
    assert counts["kills of the server as well"] > 0


def test_ranks_are_those_that_vllm_takes():
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS
