"""Kill training at any moment, go on, and compare with a run that nothing happened to.

    PYTHONPATH=tests:recipes/arithmetic python tests/helpers/chaos.py --kills 40 [--processes 2 …] [--variants NAME]

Every operation on the output folder that Python knows of (opening, renaming, removing, making a folder) is a
moment to be killed at, by SIGKILL, and so are each step of an environment, each start of an agent's command, each
backward pass, each adapter just sent to a vLLM server, and any point in time. A run that was killed goes on, and may
be killed again. One kill in four of a run with a server is followed by one of the server, which is started again.
In the end its weights, optimiser and logs must equal the undisturbed run's, bit for bit; to 1e-6 if each life of the
run has one of several numbers of processes. The variant "server ahead" needs vLLM's environment, see
tests/test_vllm.py, and is not among those that run unasked.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, TrainerCallback

from helpers.agents import Chatter, talking_trainer
from helpers.endpoint import wandering
from helpers.processes import HELPERS, free_port, freeze_imports
from helpers.runs import SMALL, final_state, logs, small_trainer, stops_at_kl
from helpers.tiny import LORA, tiny_model
from helpers.vllm_runs import Server, save_base
from hfppo import AdaptiveKLCallback, Command, PPOTrainer
from hfppo.collect import candidates
from hfppo.environments import episodes
from hfppo.generation.vllm import Adapter
from hfppo.generation.vllm_server import ServerEngine, serve_command
from hfppo.models.actor_critic import ActorCritic

disable_progress_bars()
freeze_imports()  # before a process is forked
CONFIG = {
    **SMALL,
    **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 3},
    **{"save_strategy": "steps", "save_steps": 1, "weight_decay": 0.01},
}
# For several numbers of processes: the same rollouts, and steps that rounding does not turn.
ELASTIC = {"rollout_size": 16, "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "adam_epsilon": 1e-6}
STEPS = 10  # two rollouts and a half
VARIANTS = {
    "adapter": ({}, "adapter"),
    "shared": ({"critic_warmup": 1, "save_total_limit": 2}, "shared"),
    "groups": ({"advantage_estimator": "grpo", "num_generations": 2, "save_steps": 2}, "adapter"),
    "pretraining": ({"critic_pretraining_completions": 24, "save_steps": 2}, "adapter"),
    "chosen": ({"prompt_candidates": 3}, "adapter"),
    "chosen groups": (
        {"advantage_estimator": "grpo", "num_generations": 2, "prompt_candidates": 3, "save_steps": 2},
        "adapter",
    ),
    "aligned": ({"critic_update": "policy_aligned", "lam_critic": 1.0}, "adapter"),
    "ahead": ({"rollouts_ahead": 1}, "adapter"),
    "chosen ahead": ({"rollouts_ahead": 1, "prompt_candidates": 3}, "adapter"),
    # Four steps per rollout: all checkpoints fall between the updates of one.
    "environment": ({"save_steps": 3, "gamma_turn": 0.9, "lam_turn": 0.7, "max_completion_length": 40}, "adapter"),
    "environment ahead": ({"rollouts_ahead": 1, "save_steps": 3, "max_completion_length": 40}, "adapter"),
    "agent": ({"save_steps": 3, "max_completion_length": 40}, "adapter"),
    "command": ({"save_steps": 3, "max_completion_length": 40}, "adapter"),
    "server ahead": ({"rollouts_ahead": 1, "use_vllm": True, "max_completion_length": 24}, "adapter"),
}
UNASKED = [name for name in VARIANTS if name != "server ahead"]  # those that need no vLLM
candidates.EXPLAINED = 0.0  # the critic chooses whatever little it knows
OPERATIONS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
MOMENTS = {
    "turn": "in an episode",
    "subprocess.Popen": "at the start of a command",
    "backward": "in an update",
    "published": "after publishing",
    **dict.fromkeys(OPERATIONS, "at an operation"),
}
SERVER: dict[str, str] = {}  # the model and the address of a vLLM server
DATASET = Dataset.from_list([{"prompt": f"请问{a}+{b}="} for a in range(10) for b in range(3, 9)])


class Tell(TrainerCallback):
    """Prints where a run starts, and tells the audit hook of each backward pass."""

    def on_train_begin(self, args, state, control, **kwargs):
        print(f"resumed from step {state.global_step}", flush=True)

    def on_substep_end(self, args, state, control, **kwargs):
        sys.audit("backward", args.output_dir)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        sys.audit("backward", args.output_dir)


class MortalChatter(Chatter):
    """Tells the audit hook of each turn, after it has changed."""

    def __init__(self, out: str):
        self.out = out

    def step(self, text: str):
        answer = super().step(text)
        sys.audit("turn", self.out)
        return answer


def mortal_agent(out: str) -> Callable[..., float]:
    """An agent that tells the audit hook of the moments between its conversations."""

    def agent(**row: Any) -> float:
        return wandering(pause=lambda: sys.audit("turn", out), **row)

    return agent


def command_agent(out: str) -> Command:
    """An agent in a process of its own, whose program has a name by which the audit hook knows the run."""
    program = Path(f"{out}.{os.getpid()}.python")
    program.symlink_to(sys.executable)
    return Command([str(program), str(HELPERS / "nodding_command.py")])


def tell_of_publishing(out: str) -> None:
    """Tell the audit hook of each adapter that the server has loaded."""
    load = ServerEngine.load

    def told(engine: ServerEngine, new: Adapter, old: Adapter | None) -> None:
        load(engine, new, old)
        sys.audit("published", out)

    ServerEngine.load = told


@contextmanager
def serving(folder: str) -> Iterator[Server]:
    """A vLLM server for the runs inside the block."""
    base = save_base(f"{folder}/base")
    actor = ActorCritic(AutoModelForCausalLM.from_pretrained(base), LORA, critic=None)
    server = Server(serve_command(actor), Path(folder) / "server.log")
    SERVER.update(base=base, url=server.url)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def make_trainer(out: str, variant: str, steps: int) -> PPOTrainer:
    """The trainer of a variant."""
    config, critic = VARIANTS[variant]
    given = {**CONFIG, **config, "max_steps": steps}
    callbacks = [AdaptiveKLCallback(target=0.01, horizon=100), Tell()]
    callbacks += [stops_at_kl(0.02)] if variant == "groups" else []
    if variant.startswith("environment"):
        return talking_trainer(out, given, environment_factory=lambda: MortalChatter(out), callbacks=callbacks)
    if variant in ("agent", "command"):
        episodes.PATIENCE = 5.0  # the same batches; others round otherwise
        agent = mortal_agent(out) if variant == "agent" else command_agent(out)
        return talking_trainer(out, given, environment_factory=None, agent=agent, callbacks=callbacks)
    if variant == "server ahead":
        given |= {"vllm_mode": "server", "vllm_server_base_url": SERVER["url"]}
        tell_of_publishing(out)
    model = SERVER["base"] if variant == "server ahead" else tiny_model()
    return small_trainer(out, given, model=model, train_dataset=DATASET, critic=critic, callbacks=callbacks)


def train(out: str, variant: str, steps: int) -> str:
    """Train to the end, from the last checkpoint if there is one; a digest of all that came of it."""
    trainer = make_trainer(out, variant, steps)
    trainer.train(resume_from_checkpoint=bool(list(Path(out).glob("checkpoint-*"))))
    if trainer.args.process_index == 0:
        torch.save(final_state(trainer), f"{out}.state")
    state = b"".join(tensor.double().numpy().tobytes() for _, tensor in sorted(final_state(trainer).items()))
    return hashlib.sha256(state + json.dumps(logs(trainer), sort_keys=True).encode()).hexdigest()


def count_moments(out: str, kill_at: tuple[str, int] | None) -> Counter[str]:
    """Count the moments of each kind from now on; be killed at the given one."""
    seen: Counter[str] = Counter()

    def hook(event: str, arguments: tuple) -> None:
        if event in MOMENTS and arguments and str(arguments[0]).startswith(out):
            kind = MOMENTS[event]
            seen[kind] += 1
            if (kind, seen[kind]) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


def child(
    rank: int, world: int, port: int, out: str, variant: str, steps: int, kill_at: tuple[str, int] | None
) -> None:
    """One process of a run; leaves a file beside the folder when it gets to the end."""
    os.setpgid(0, 0)
    if world > 1:
        os.environ.update(
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"},
            MASTER_PORT=str(port),
        )
    quiet = os.open(f"{out}.{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    seen = count_moments(out, kill_at)
    try:
        result = train(out, variant, steps)
        Path(f"{out}.{rank}.json").write_text(json.dumps({"digest": result, "moments": seen}))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run(
    out: str,
    variant: str,
    steps: int,
    world: int,
    kill_at: tuple[str, int] | None = None,
    seconds: float | None = None,
) -> list | None:
    """What the processes of a run leave; None if it was killed, at a moment of one or after some seconds."""
    port = free_port()
    victim = random.randrange(world)
    pids = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            child(rank, world, port, out, variant, steps, kill_at if rank == victim else None)
        pids.append(pid)
    start, codes = time.monotonic(), {}
    while len(codes) < world:
        for pid in pids:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = done[1]
        late = seconds is not None and time.monotonic() - start > seconds
        if late or any(codes.values()):  # a launcher ends the others when one dies
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
                codes[pid] = os.waitpid(pid, 0)[1]
        time.sleep(0.02)
    if any(codes.values()):
        if not all(code in (0, signal.SIGKILL) or world > 1 for code in codes.values()):
            raise RuntimeError(Path(f"{out}.0.log").read_text()[-3000:])
        return None
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]


def is_near(out: str, straight: str) -> bool:
    """Whether a run's weights and moments, in `out`.state, are another one's to 1e-6."""
    found, expected = torch.load(f"{out}.state"), torch.load(f"{straight}.state")
    return all(float((found[name] - tensor).abs().max()) < 1e-6 for name, tensor in expected.items())


def chaos(
    kills: int, worlds: list[int], seed: int, chosen: list[str], steps: int, folder: str, server: Server | None
) -> dict[str, int]:
    """Kill runs of the chosen variants until there were enough kills.

    Args:
        worlds: numbers of processes; the undisturbed runs have the first one.
    Returns:
        Counts of kills by the kind of their moment, of runs compared, and of those that differed.
    """
    random.seed(seed)
    killed, compared, differed = Counter(), 0, 0
    straight, length = {}, {}
    for variant in chosen:
        start = time.monotonic()
        whole = f"{folder}/straight {variant}"
        straight[variant] = run(whole, variant, steps, worlds[0])
        assert straight[variant], Path(f"{whole}.0.log").read_text()[-3000:]
        length[variant] = time.monotonic() - start
        shutil.rmtree(whole)
    while killed.total() < kills:
        for variant in chosen:
            out, result = f"{folder}/killed", None
            moments = straight[variant][0]["moments"]
            for attempt in range(100):
                kill_at = seconds = None
                if attempt < 2 or (attempt == 2 and random.random() < 0.7):
                    kind = min(moments, key=lambda kind: (killed[kind], kind == "at an operation", random.random()))
                    kill_at = kind, random.randint(1, moments[kind])
                elif attempt < 3:
                    seconds = random.uniform(0, length[variant])
                if (result := run(out, variant, steps, random.choice(worlds), kill_at, seconds)) is not None:
                    break
                killed[kill_at[0] if kill_at else "at a point in time"] += 1
                if server is not None and killed.total() % 4 == 3:
                    server.kill()
                    server.start()
                    server.wait()
                    killed["of the server as well"] += 1
            compared += 1
            if len(worlds) > 1:
                differed += not is_near(out, f"{folder}/straight {variant}")
            else:
                differed += [x["digest"] for x in result] != [x["digest"] for x in straight[variant]]
            shutil.rmtree(out)
    return {f"kills {kind}": count for kind, count in killed.items()} | {
        "runs compared": compared,
        "runs that differed": differed,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=UNASKED, metavar="NAME")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    options = parser.parse_args()
    CONFIG |= ELASTIC if len(options.processes) > 1 else {}
    with ExitStack() as around:
        folder = around.enter_context(tempfile.TemporaryDirectory())
        server = around.enter_context(serving(folder)) if "server ahead" in options.variants else None
        found = chaos(options.kills, options.processes, options.seed, options.variants, options.steps, folder, server)
    print(json.dumps(found))
    sys.exit(found["runs that differed"])
