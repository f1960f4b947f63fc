"""Raise if the processes of a run have been given different inputs."""

from torch import nn

from hfppo.checkpoint import RunDescription, fingerprint
from hfppo.models.actor_critic import ActorCritic
from hfppo.prompt_maker import PromptMaker
from hfppo.reporting.card import OUTPUT, installed_versions
from hfppo.support.processes import check_alike

# Prefixes of settings that may differ: they are about a host, its device, or what one process writes.
OWN = (
    *OUTPUT, "deepspeed", "fsdp", "ddp_timeout", "model_init_kwargs", "vllm_",
    "reference",  # with an adapter it has weights that `is_given` leaves out
)  # fmt: skip


def check_processes(run: RunDescription, model: ActorCritic, prompt_maker: PromptMaker) -> None:
    """Raise if the processes differ in prompts, settings, weights, reward functions, tools or versions.

    Raises:
        ValueError: they differ.
    """
    args, prompts = prompt_maker.args, prompt_maker.prompts
    if args.world_size == 1:
        return
    given = (parameter for name, parameter in model.named_parameters() if is_given(name, parameter))
    facts = {
        **installed_versions(),
        **{f"{name} (SHA-256 of its prompts)": some.head.digest() for name, some in prompts.items()},
        **run.structure,
        **args.to_dict(),
        "reward_funcs": run.settings["reward_funcs"],
        "model, ref_model or critic (SHA-256 of some weights)": fingerprint(given),
    }
    check_alike({name: value for name, value in facts.items() if not name.startswith(OWN)})


def is_given(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a weight is a base's, or one of LoRA's that are 0 before they are trained.

    The others may be drawn by each process: they change no output before DDP broadcasts them.
    """
    return ".lora_B." in name or ".lora_embedding_B." in name or not (parameter.requires_grad or ".lora_" in name)
