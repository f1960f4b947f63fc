"""Refusals of a run with vLLM before it begins, and its errors for wrongly started servers; vLLM is not needed.

The servers here give the answers of vLLM 0.32 servers started with the same mistakes.
"""

import itertools
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config
from transformers import AutoModelForCausalLM

from helpers.tiny import lora, tiny_model
from helpers.vllm_runs import save_base
from hfppo.generation.sampler import Sampling
from hfppo.generation.stop_strings import StopStrings
from hfppo.generation.vllm import ColocatedEngine, VLLMSampler, sampling_fields, start_rank
from hfppo.generation.vllm_server import serve_command
from hfppo.support.http_client import ServerError


@pytest.fixture
def base(tmp_path) -> str:
    return save_base(str(tmp_path / "base"))


def at(url: str, timeout: float = 5.0) -> dict:
    """Fields of a run that asks a server."""
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": timeout}


NOWHERE = at("http://127.0.0.1:9", timeout=0.5)


def resized(base: str):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    return model


def written(tmp_path: Path) -> list[Path]:
    """Files that a run wrote."""
    return [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


IA3 = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
UNSERVED = {
    "DoRA": (lora(use_dora=True), "use_dora=True; leave it out of peft_config, or set use_vllm=False"),
    "modules_to_save": (lora(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\]; leave it out"),
    "rank": (lora(r=600), "ranks up to 512, the adapter has r=600; lower it"),
    "rank_pattern": (lora(rank_pattern={"q_proj": 4}), "rank_pattern={'q_proj': 4}; leave it out"),
    "parameters": (
        lora(target_modules=[], target_parameters=["q_proj.weight"]),
        r"target_parameters=\['q_proj.weight'\]; leave it out",
    ),
    "IA3": (IA3, "serves LoRA, not IA3Config; use peft.LoraConfig, or set use_vllm=False"),
    "no name": (tiny_model, "the model has no id or path; save it with save_pretrained"),
    "added tokens": (resized, "load the base from '.*base'.*another size than the model's; save the"),
}


@pytest.mark.parametrize(("placement", "kind"), [("server", "DoRA"), *(("colocate", kind) for kind in UNSERVED)])
def test_adapters_and_bases_that_vllm_cannot_serve(make_trainer, base, tmp_path, placement, kind):
    """Refused whether vLLM is there or not. An engine would load the base in a folder, without added tokens."""
    given, message = UNSERVED[kind]
    if given is tiny_model:
        parts = {"model": tiny_model()}
    else:
        parts = {"model": resized(base)} if given is resized else {"model": base, "peft_config": given}
    with pytest.raises(ValueError, match=message):
        make_trainer({**NOWHERE, "vllm_mode": placement}, **parts)
    assert written(tmp_path) == []


class Engine:
    """Takes what it is sent; its completions go on by a token after a stop string."""

    def __init__(self, shared: bool = False):
        self.shared = shared

    def load(self, adapter, old):
        pass

    def awake(self):
        return nullcontext()

    def generate(self, prompts, sampling, adapter):
        rows = [[0, 1, 4], [3, 0, 3, 4], [3, 25]]
        return [(ids, [-float(i) for i in range(len(ids))]) for ids in rows]


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_vllm_is_started_for_the_next_rank_that_it_knows(rank, expected):
    assert start_rank(lora(r=rank)) == expected


@pytest.mark.parametrize(("seed", "temperature"), [(3, 0.7), (None, 0.0)])
def test_nothing_of_how_to_sample_is_left_to_defaults(seed, temperature):
    """vLLM would take what a request leaves open from the model's generation config."""
    assert sampling_fields(Sampling(0.7, 5, [1, 2], 0), seed) == {
        **{"temperature": temperature, "seed": seed, "max_tokens": 5, "stop_token_ids": [1, 2], "ignore_eos": True},
        **{"logprobs": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1},
        **{"presence_penalty": 0, "frequency_penalty": 0},
    }


def test_stop_strings_stay_in_what_vllm_returns():
    tokenizer = Signs()
    params = sampling_fields(Sampling(1.0, 5, [1], 0, StopStrings(tokenizer, ("ab", "c"))), 3)
    asked = {name: params[name] for name in ("stop", "include_stop_str_in_output", "skip_special_tokens")}
    assert asked == {"stop": ["ab", "c"], "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert "stop" not in sampling_fields(Sampling(1.0, 5, [1], 0), 3)


class Signs:
    """A tokenizer of letters: "a" is token 0."""

    def __call__(self, text, **_):
        return {"input_ids": []}

    def batch_decode(self, rows, **_):
        return ["".join(chr(ord("a") + i) for i in ids) for ids in rows]


def test_a_completion_of_vllm_ends_with_its_stop_string(make_trainer, tmp_path):
    trainer = make_trainer()
    sampling = Sampling(1.0, 5, [25], 0, StopStrings(Signs(), ("ab", "c")))
    sampler = VLLMSampler(trainer.model, Engine(), trainer.accelerator, str(tmp_path), sampling)
    with sampler.ready():
        found = sampler([[5], [5], [5]], [1, 2, 3])
    assert [len(turn.ids) for turn in found] == [2, 4, 2]
    assert [turn.truncated for turn in found] == [False, True, False]
    assert found[0].logprobs == [0.0, -1.0]


SUCCESS = (200, "Success: LoRA adapter 'a' added successfully.")
WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"


def refused(status: int, message: str) -> tuple[int, str]:
    return status, json.dumps({"error": {"message": message, "type": "InternalServerError", "code": status}})


@pytest.fixture
def serve_vllm(serve):
    """Answers what vLLM answers up to the first rollout.

    Takes the answers to load_lora_adapter in order, the last for good, and the log-prob of the only token that top_k=1
    leaves. Returns the server's address, and the paths that it is asked for.
    """

    def start(*load: tuple[int, str], logprob: float = 0.0) -> tuple[str, list[str]]:
        loads = itertools.chain(load, itertools.repeat(load[-1]))
        models = {"object": "list", "data": [{"id": "the base", "object": "model"}]}
        completions = {"choices": [{"text": "1", "logprobs": {"token_logprobs": [logprob]}}]}
        fixed = {"/v1/models": models, "/v1/completions": completions}

        def answer(body: dict) -> tuple[int, bytes]:
            path = server.paths[-1]
            status, text = (200, json.dumps(fixed[path])) if path in fixed else next(loads)
            return status, text.encode()

        server = serve(answer)
        return server.url.removesuffix("/score"), server.paths

    return start


def assert_says_the_command(error: BaseException, base: str) -> None:
    for part in (
        f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True python -m vllm.entrypoints.openai.api_server --model {base} ",
        "--enable-lora",
        "--max-lora-rank 8",
        "--logprobs-mode processed_logprobs",
        "--dtype float32",
    ):
        assert part in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "/"])
def test_a_server_that_is_down(make_trainer, base, tmp_path, end):
    begin = time.monotonic()
    with pytest.raises(ServerError, match=r"http://127.0.0.1:9/v1/models cannot be reached") as error:
        make_trainer({**NOWHERE, "vllm_server_base_url": f"http://127.0.0.1:9{end}"}, model=base)
    assert 0.5 < time.monotonic() - begin < 5
    assert_says_the_command(error.value, base)
    assert written(tmp_path) == []


def test_a_server_without_processed_logprobs(make_trainer, base, serve_vllm, tmp_path):
    url, _ = serve_vllm(SUCCESS, logprob=-0.99)
    with pytest.raises(ServerError, match="reports raw log-probs; start it with") as error:
        make_trainer(at(url), model=base)
    assert_says_the_command(error.value, base)
    assert written(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        refused(500, WORKER.format("LoRA is not enabled. Use --enable-lora to enable LoRA.")),
        refused(500, WORKER.format("LoRA rank 4 is greater than max_lora_rank 1.")),
        (404, '{"detail":"Not Found"}'),
        refused(404, "Loading lora a failed: No adapter found for <path>"),
    ],
    ids=["--enable-lora", "--max-lora-rank", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "folder out of sight"],
)
def test_a_server_that_cannot_take_the_adapter(make_trainer, base, serve_vllm, answer):
    """Asked once: another attempt would not help."""
    url, paths = serve_vllm(answer)
    trainer = make_trainer(at(url), model=base)
    with pytest.raises(ServerError) as error:
        trainer.train()
    assert str(answer[0]) in str(error.value)
    assert_says_the_command(error.value, base)
    assert paths.count("/v1/load_lora_adapter") == 1
    assert paths[-1] == "/v1/load_lora_adapter", "nothing was sampled"


@pytest.mark.parametrize(
    "first",
    [refused(500, "EngineCore encountered an issue"), refused(503, "starting")],
    ids=["engine dead", "not ready"],
)
def test_a_server_that_takes_the_adapter_a_moment_later(make_trainer, base, serve_vllm, first):
    """Here a 200 is lost, too: the adapter is there when it is asked for again."""
    already = refused(400, "The lora adapter 'a' has already been loaded. If you want to load the adapter in place")
    url, paths = serve_vllm(first, already)
    with make_trainer(at(url), model=base).collector.sampler.ready():
        assert paths.count("/v1/load_lora_adapter") == 2


@pytest.fixture
def asked(monkeypatch) -> dict:
    """What `vllm.LLM` is made with; vLLM itself need not be there."""
    asked = {}
    vllm, request = ModuleType("vllm"), ModuleType("vllm.lora.request")
    vllm.SamplingParams = vllm.TokensPrompt = request.LoRARequest = None
    vllm.LLM = lambda **kwargs: asked.update(kwargs)
    for module in (vllm, ModuleType("vllm.lora"), request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def test_engine_and_server_load_the_base_in_the_revision_that_is_trained_on(make_trainer, base, asked):
    trainer = make_trainer(model=base)
    trainer.model.peft_config["default"].revision = "v2"
    assert f" {base} --revision v2 " in serve_command(trainer.model)
    ColocatedEngine(trainer.model, trainer.args)
    assert asked["revision"] == "v2"


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_colocated_engine_has_one_gpu(make_trainer, base, asked, processes, name):
    """Also with one process: if it sees several GPUs, Trainer would split its batches among them."""
    trainer = make_trainer(model=base)
    given = {"world_size": processes, "vllm_engine_kwargs": {name: 2}}
    with pytest.raises(ValueError, match=rf"'{name}': 2.*one of {processes}; leave {name} out, or set vllm_mode"):
        ColocatedEngine(trainer.model, SimpleNamespace(**{**vars(trainer.args), **given}))
    assert not asked


@pytest.mark.parametrize(
    ("fields", "processes", "expected"),
    [
        ({"max_prompt_length": 20, "max_completion_length": 12}, 1, {"max_model_len": 32}),
        ({"max_prompt_length": 512, "max_completion_length": 12}, 1, {"max_model_len": 512}),  # the base's positions
        ({"max_prompt_length": None}, 1, {"max_model_len": None}),
        ({"max_prompt_length": 20, "vllm_engine_kwargs": {"max_model_len": 99}}, 1, {"max_model_len": 99}),
        ({}, 1, {"gpu_memory_utilization": 0.3, "distributed_executor_backend": None}),
        ({}, 2, {"distributed_executor_backend": "external_launcher"}),  # each its own GPU, not the first one
        ({"vllm_engine_kwargs": {"gpu_memory_utilization": 0.5}}, 1, {"gpu_memory_utilization": 0.5}),
    ],
)
def test_what_the_engine_is_made_with(make_trainer, base, asked, fields, processes, expected):
    trainer = make_trainer(fields, model=base)
    ColocatedEngine(trainer.model, SimpleNamespace(**vars(trainer.args), world_size=processes))
    assert {name: asked.get(name) for name in expected} == expected


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_engine_sleeps_between_rollouts_if_it_may(make_trainer, base, asked, sleeps):
    trainer = make_trainer({"vllm_engine_kwargs": {"enable_sleep_mode": sleeps}}, model=base)
    engine, calls = ColocatedEngine(trainer.model, trainer.args), []
    engine.llm = SimpleNamespace(wake_up=lambda: calls.append("wake_up"), sleep=lambda level: calls.append("sleep"))
    with engine.awake():
        calls.append("awake")
    assert calls == (["wake_up", "awake", "sleep"] if sleeps else ["awake"])


def test_the_engine_leaves_the_training_process_its_threads(make_trainer, base, asked, monkeypatch):
    """vLLM sets one thread, and the rewards and passes of the training process run on the CPU as well."""
    trainer = make_trainer(model=base)
    before = torch.get_num_threads()
    monkeypatch.setattr(sys.modules["vllm"], "LLM", lambda **kwargs: torch.set_num_threads(1))
    torch.set_num_threads(3)
    try:
        ColocatedEngine(trainer.model, trainer.args)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_sync_asks_no_hub(make_trainer, base, tmp_path, monkeypatch):
    """PEFT by itself compares the vocabulary with the configuration on the Hub, and waits for it offline too."""
    trainer = make_trainer(model=base)
    trainer.model.peft_config["default"].base_model_name_or_path = "somebody/somewhere"
    asked = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *x, **_: asked.append(x))
    sampler = VLLMSampler(trainer.model, Engine(), Accelerator(cpu=True), str(tmp_path), Sampling(1.0, 4, [1], 0))
    with sampler.ready():
        assert (Path(sampler.adapter.folder) / "adapter_config.json").is_file()
    assert asked == []


@pytest.mark.parametrize(("shared", "at"), [(False, [0, 0, 2, 2]), (True, [0, 0, 0, 0])])
def test_each_machine_writes_the_adapter_for_its_own_engines(make_trainer, base, tmp_path, monkeypatch, shared, at):
    """Two machines of two processes without a shared file system; a server reads from the first machine."""
    model, folders = make_trainer(model=base).model, {}

    def gather(own: list) -> list:
        """As if all processes gathered; those before this one have done so."""
        return [folders.get(i) for i in range(rank)] + own + [None] * (3 - rank)

    monkeypatch.setattr("hfppo.generation.vllm.gather_object", gather)
    samplers = []
    for rank in range(4):
        process = SimpleNamespace(
            is_main_process=rank == 0,
            is_local_main_process=rank % 2 == 0,
            process_index=rank,
            wait_for_everyone=lambda: None,
        )
        machine = tmp_path / f"machine-{rank // 2}"
        sampler = VLLMSampler(model, Engine(shared), process, str(machine), Sampling(1.0, 4, [1], 0))
        folders[rank] = sampler.folder if rank in at else None
        samplers.append(sampler)
        with sampler.ready():
            assert Path(sampler.adapter.folder, "adapter_model.safetensors").is_file()
    assert [s.folder for s in samplers] == [samplers[writer].folder for writer in at]
    assert samplers[at[2]].folder.parent == tmp_path / f"machine-{at[2] // 2}"
