"""Several vLLM servers: which one completes a prompt, and what happens when some are lost; vLLM is not needed."""

from collections import Counter
from types import SimpleNamespace

import pytest

from helpers.fake_vllm import FakeVLLM
from helpers.runs import assert_same_end
from helpers.vllm_runs import save_base
from hfppo.generation.vllm import Adapter
from hfppo.generation.vllm_server import ServerEngine
from hfppo.support.http_client import Endpoint, ServerError, Unreachable

FIRST, SECOND = (Adapter(f"run-{n}", n, f"/nowhere/policy-{n}") for n in (1, 2))
THREE, FOUR = [5, 6, 7], [8, 9, 10]


@pytest.fixture
def fakes():
    made: list[FakeVLLM] = []

    def make(*given: dict) -> list[FakeVLLM]:
        made.extend(FakeVLLM(**fields) for fields in given)
        return made

    yield make
    for fake in made:
        fake.server.stop()


@pytest.fixture
def engine_of(make_trainer, tmp_path):
    """An engine of some servers."""

    def make(servers: list[FakeVLLM], timeout: float = 30.0, process: int = 0) -> ServerEngine:
        model = make_trainer(model=save_base(str(tmp_path / "base"))).model
        urls = [server.url for server in servers]
        args = SimpleNamespace(vllm_server_base_url=urls, vllm_server_timeout=timeout, process_index=process)
        return ServerEngine(model, args)

    return make


def complete(engine: ServerEngine, prompts: list[list[int]], adapter: Adapter = FIRST) -> list:
    return engine.generate(prompts, [{"seed": n, "top_k": 0} for n in range(len(prompts))], adapter)


def test_completions_of_a_prompt_and_turns_of_an_episode_stay_on_a_server(fakes, engine_of):
    first, second, third = fakes({}, {}, {})
    engine = engine_of([first, second, third])
    engine.load(FIRST, None)
    prompts = [[1, n] for n in range(6) for _ in range(3)]
    found = complete(engine, prompts)
    assert [fake.loaded for fake in (first, second, third)] == [[FIRST.name]] * 3
    assert [ids[0] for ids, _ in found] == [3 + (seed + sum(ids)) % 9 for seed, ids in enumerate(prompts)]
    own = [fake.prompts(FIRST.name) for fake in (first, second, third)]
    assert own == [{(1, 0), (1, 3)}, {(1, 1), (1, 4)}, {(1, 2), (1, 5)}]
    assert [len(fake.completed) for fake in (first, second, third)] == [6, 6, 6]
    complete(engine, [[*prompt, *ids, 2] for prompt, (ids, _) in list(zip(prompts, found, strict=True))[::-4]])
    for fake, before in zip((first, second, third), own, strict=True):
        assert {prompt[:2] for prompt in fake.prompts(FIRST.name)} == before


def test_processes_begin_with_different_servers(fakes, engine_of):
    first, second, third = fakes({}, {}, {})
    complete(engine_of([first, second, third], process=4), [THREE])
    assert [fake.prompts(FIRST.name) for fake in (first, second, third)] == [set(), {tuple(THREE)}, set()]


def test_a_slow_server_is_waited_for(fakes, engine_of):
    slow, quick = fakes({"seconds": 0.5}, {})
    engine = engine_of([slow, quick])
    engine.load(FIRST, None)
    complete(engine, [THREE, FOUR])
    assert (slow.prompts(FIRST.name), quick.prompts(FIRST.name)) == ({tuple(THREE)}, {tuple(FOUR)})


@pytest.mark.parametrize("given", [[{"life": 1}, {}], [{}, {"life": 0}, {"life": 2}]], ids=["one", "two at once"])
def test_a_lost_servers_rows_go_to_the_others(fakes, engine_of, monkeypatch, given):
    failed, ask = Counter[tuple[str, str]](), Endpoint._ask

    async def counted(endpoint, method, url, body):
        try:
            return await ask(endpoint, method, url, body)
        except Unreachable:
            failed[url, str(body)] += 1
            raise

    monkeypatch.setattr(Endpoint, "_ask", counted)
    servers = fakes(*given)
    prompts = [[1, n // 2] for n in range(12)]
    expected = [3 + (seed + sum(ids)) % 9 for seed, ids in enumerate(prompts)]
    engine = engine_of(servers)
    engine.load(FIRST, None)
    assert [ids[0] for ids, _ in complete(engine, prompts)] == expected
    (lasting,) = (server for server, fields in zip(servers, given, strict=True) if not fields)
    assert len(lasting.prompts(FIRST.name)) == 6
    lost = [server for server in servers if server is not lasting]
    assert {url.partition("/v1")[0] for url, _ in failed} == {server.url for server in lost}
    assert max(failed.values()) == 3
    before = [len(server.completed) for server in lost]
    engine.load(SECOND, FIRST)  # while they are away
    for server in lost:
        server.start_again()
    assert [ids[0] for ids, _ in complete(engine, prompts, SECOND)] == expected
    assert all(server.loaded == [FIRST.name, SECOND.name] for server in servers)
    assert all(len(server.completed) > count for server, count in zip(lost, before, strict=True))


def test_without_any_server_the_run_ends(fakes, engine_of):
    first, second = fakes({"life": 0}, {"life": 0})
    engine = engine_of([first, second], timeout=1.0)
    engine.load(FIRST, None)
    with pytest.raises(ServerError, match=r"/v1/completions cannot be reached, after all retries"):
        complete(engine, [THREE, FOUR])


def test_servers_change_no_run(make_trainer, fakes, tmp_path):
    """One of three is killed in the first rollout, and back in the second."""
    base, runs = save_base(str(tmp_path / "base")), []
    one, *three = fakes({}, {"life": 1}, {}, {})
    for urls in (one.url, [fake.url for fake in three]):
        config = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": urls, "vllm_server_timeout": 30}
        trainer = make_trainer(config | {"output_dir": str(tmp_path / str(len(runs))), "max_steps": 8}, model=base)
        load = trainer.collector.sampler.engine.load

        def restart_then_load(adapter, old, load=load, urls=urls):
            if old is not None and urls != one.url:
                assert three[0].life is None, "it was killed in the first rollout"
                three[0].start_again()
            load(adapter, old)

        trainer.collector.sampler.engine.load = restart_then_load
        trainer.train()
        runs.append(trainer)
    assert all(len({name for name, _ in fake.completed}) == 2 for fake in three), "all complete in both rollouts"
    assert_same_end(*runs)
