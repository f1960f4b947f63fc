"""Refusals of a run with vLLM before it begins, and its errors for wrongly started servers; vLLM is not needed.

The servers here give the answers of vLLM 0.32 servers started with the same mistakes.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LoraConfig
from transformers import AutoModelForCausalLM

from helpers.tiny import tiny_model
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


def lora(**config) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **config})


def written(tmp_path: Path) -> list[Path]:
    """Files that a run wrote."""
    return [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lora(use_dora=True), "use_dora=True; leave it out of peft_config, or set use_vllm=False"),
        (lora(modules_to_save=["lm_head"]), r"modules_to_save=\['lm_head'\]; leave it out"),
        (lora(lora_bias=True), "lora_bias=True; leave it out"),
        (lora(r=600), "ranks up to 512, the adapter has r=600; lower it"),
        (lora(rank_pattern={"q_proj": 4}), "rank_pattern={'q_proj': 4}; leave it out"),
        (lora(alpha_pattern={"q_proj": 4}), "alpha_pattern={'q_proj': 4}; leave it out"),
        (
            IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
            "serves LoRA, not IA3Config; use peft.LoraConfig, or set use_vllm=False",
        ),
    ],
    ids=["DoRA", "modules_to_save", "lora_bias", "rank", "rank_pattern", "alpha_pattern", "IA3"],
)
@pytest.mark.parametrize("placement", ["colocate", "server"])
def test_adapters_that_vllm_cannot_serve(make_trainer, base, tmp_path, placement, config, message):
    """Refused whether vLLM is there or not."""
    with pytest.raises(ValueError, match=message):
        make_trainer({**NOWHERE, "vllm_mode": placement}, model=base, peft_config=config)
    assert written(tmp_path) == []


@pytest.mark.parametrize("placement", ["colocate", "server"])
def test_a_base_without_a_name(make_trainer, tmp_path, placement):
    with pytest.raises(ValueError, match="the model has no id or path; save it with save_pretrained"):
        make_trainer({**NOWHERE, "vllm_mode": placement}, model=tiny_model())
    assert written(tmp_path) == []


@pytest.mark.parametrize("placement", ["colocate", "server"])
def test_a_base_with_added_tokens(make_trainer, base, tmp_path, placement):
    """The engine would load the one in the folder, without them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 2)
    with pytest.raises(ValueError, match=rf"load the base from '{base}'.*another size than the model's; save the"):
        make_trainer({**NOWHERE, "vllm_mode": placement}, model=model)
    assert written(tmp_path) == []


class Deaf:
    """An engine that takes what it is sent."""

    shared = False

    def load(self, adapter, old):
        pass

    def awake(self):
        return nullcontext()


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (lora(r=1), 1),
        (lora(r=2), 8),
        (lora(r=8), 8),
        (lora(r=9), 16),
        (lora(r=257), 320),
        (lora(r=512), 512),
    ],
)
def test_vllm_is_started_for_the_next_rank_that_it_knows(config, rank):
    assert start_rank(config) == rank


def test_nothing_of_how_to_sample_is_left_to_defaults():
    """vLLM would take what a request leaves open from the model's generation config."""
    sampled, greedy = (sampling_fields(Sampling(0.7, 5, [1, 2], 0), seed) for seed in (3, None))
    assert sampled["temperature"] == 0.7
    assert sampled["seed"] == 3
    assert greedy["temperature"] == 0.0
    for params in (sampled, greedy):
        assert (params["max_tokens"], params["stop_token_ids"], params["logprobs"]) == (5, [1, 2], 0)
        neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        neutral |= {"presence_penalty": 0, "frequency_penalty": 0}
        assert {name: params[name] for name in neutral} == neutral


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


class GoesOn:
    """An engine whose completions go on by a token after a stop string."""

    shared = False

    def awake(self):
        return nullcontext()

    def load(self, adapter, old):
        pass

    def generate(self, prompts, sampling, adapter):
        rows = [[0, 1, 4], [3, 0, 3, 4], [3, 25]]
        return [(ids, [-float(i) for i in range(len(ids))]) for ids in rows]


def test_a_completion_of_vllm_ends_with_its_stop_string(make_trainer, tmp_path):
    trainer = make_trainer()
    sampling = Sampling(1.0, 5, [25], 0, StopStrings(Signs(), ("ab", "c")))
    sampler = VLLMSampler(trainer.model, GoesOn(), trainer.accelerator, str(tmp_path), sampling)
    with sampler.ready():
        found = sampler([[5], [5], [5]], [1, 2, 3])
    assert [len(turn.ids) for turn in found] == [2, 4, 2]
    assert [turn.truncated for turn in found] == [False, True, False]
    assert found[0].logprobs == [0.0, -1.0]


SUCCESS = (200, "Success: LoRA adapter 'a' added successfully.")
WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above"


def refused(status: int, message: str) -> tuple[int, str]:
    return status, json.dumps({"error": {"message": message, "type": "InternalServerError", "code": status}})


class Server:
    """Answers what vLLM answers up to the first rollout.

    Args:
        load: the answers to load_lora_adapter in order, the last for good.
        logprob: of the only token that top_k=1 leaves.
    """

    def __init__(self, *load: tuple[int, str], logprob: float = 0.0):
        answers, self.asked = list(load), []
        fixed = {
            "/v1/models": {"object": "list", "data": [{"id": "the base", "object": "model"}]},
            "/v1/completions": {"choices": [{"text": "1", "logprobs": {"token_logprobs": [logprob]}}]},
        }
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.asked.append(self.path)
                if self.path in fixed:
                    status, text = 200, json.dumps(fixed[self.path])
                else:
                    status, text = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(status)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator:
    servers: list[Server] = []

    def start(*load, **kwargs) -> Server:
        servers.append(Server(*load, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


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


def test_without_an_address_the_server_is_the_local_one(make_trainer, base):
    with pytest.raises(ServerError, match=r"^http://127.0.0.1:8000/"):
        make_trainer({**NOWHERE, "vllm_server_base_url": None}, model=base)


def test_a_server_without_processed_logprobs(make_trainer, base, serve, tmp_path):
    with pytest.raises(ServerError, match="reports raw log-probs; start it with") as error:
        make_trainer(at(serve(SUCCESS, logprob=-0.99).url), model=base)
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
def test_a_server_that_cannot_take_the_adapter(make_trainer, base, serve, answer):
    """Asked once: another attempt would not help."""
    server = serve(answer)
    trainer = make_trainer(at(server.url), model=base)
    with pytest.raises(ServerError) as error:
        trainer.train()
    assert str(answer[0]) in str(error.value)
    assert_says_the_command(error.value, base)
    assert server.asked.count("/v1/load_lora_adapter") == 1
    assert server.asked[-1] == "/v1/load_lora_adapter", "nothing was sampled"


@pytest.mark.parametrize(
    "first",
    [refused(500, "EngineCore encountered an issue"), refused(503, "starting")],
    ids=["engine dead", "not ready"],
)
def test_a_server_that_takes_the_adapter_a_moment_later(make_trainer, base, serve, first):
    """Here a 200 is lost, too: the adapter is there when it is asked for again."""
    already = refused(400, "The lora adapter 'a' has already been loaded. If you want to load the adapter in place")
    server = serve(first, already)
    with make_trainer(at(server.url), model=base).collector.sampler.ready():
        assert server.asked.count("/v1/load_lora_adapter") == 2


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
def test_the_engine_of_each_process_takes_its_own_gpu(make_trainer, base, asked, processes):
    """By itself vLLM takes the first one in each."""
    trainer = make_trainer(model=base)
    args = SimpleNamespace(**vars(trainer.args), world_size=processes)
    ColocatedEngine(trainer.model, args)
    assert asked.get("distributed_executor_backend") == {1: None, 2: "external_launcher"}[processes]


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
    ("fields", "expected"),
    [
        ({"max_prompt_length": 20, "max_completion_length": 12}, 32),
        ({"max_prompt_length": 512, "max_completion_length": 12}, 512),  # the base has 512 positions
        ({"max_prompt_length": None}, None),
        ({"max_prompt_length": 20, "vllm_engine_kwargs": {"max_model_len": 99}}, 99),
    ],
)
def test_the_engine_reserves_no_more_than_prompt_and_completion(make_trainer, base, asked, fields, expected):
    trainer = make_trainer(fields, model=base)
    ColocatedEngine(trainer.model, SimpleNamespace(**vars(trainer.args), world_size=1))
    assert asked.get("max_model_len") == expected


@pytest.mark.parametrize(
    ("given", "share", "sleeps"),
    [({}, 0.3, False), ({"gpu_memory_utilization": 0.5, "enable_sleep_mode": True}, 0.5, True)],
)
def test_the_engines_memory_is_set_in_vllms_own_words(make_trainer, base, asked, given, share, sleeps):
    trainer = make_trainer({"vllm_engine_kwargs": given}, model=base)
    engine = ColocatedEngine(trainer.model, trainer.args)
    assert asked["gpu_memory_utilization"] == share
    calls = []
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
    sampler = VLLMSampler(trainer.model, Deaf(), Accelerator(cpu=True), str(tmp_path), Sampling(1.0, 4, [1], 0))
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
        engine = Deaf()
        engine.shared = shared
        process = SimpleNamespace(
            is_main_process=rank == 0,
            is_local_main_process=rank % 2 == 0,
            process_index=rank,
            wait_for_everyone=lambda: None,
        )
        machine = tmp_path / f"machine-{rank // 2}"
        sampler = VLLMSampler(model, engine, process, str(machine), Sampling(1.0, 4, [1], 0))
        folders[rank] = sampler.folder if rank in at else None
        samplers.append(sampler)
        with sampler.ready():
            assert Path(sampler.adapter.folder, "adapter_model.safetensors").is_file()
    assert [s.folder for s in samplers] == [samplers[writer].folder for writer in at]
    assert samplers[at[2]].folder.parent == tmp_path / f"machine-{at[2] // 2}"
