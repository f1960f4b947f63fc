"""Load and check the arguments of `PPOTrainer`. Nothing is sampled or saved here."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, TypeAlias, cast

from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from hfppo.checks.data import check_calls, check_ends, check_ids, check_lengths
from hfppo.config import PPOConfig
from hfppo.data.chat_template import CLOCK, RunDate, find_turn_end
from hfppo.data.prompt_stream import AnyDataset, EvalDataset, PromptStream
from hfppo.data.prompts import Prompts
from hfppo.endpoint.player import Agent, AgentPlayer, load_program
from hfppo.environments.agents import Agents, EnvironmentFactories, load_agents
from hfppo.environments.environment import Tool
from hfppo.environments.episodes import EpisodePlayer, make_player
from hfppo.environments.turn_rewards import episode_rewards
from hfppo.generation.sampler import eos_token_ids
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.adapter_checks import check_same_policy, policy_of
from hfppo.models.critic import CRITIC_KINDS, CriticSource, find_critic
from hfppo.models.loading import (
    check_adapter,
    check_architecture,
    check_trainable,
    check_vocabulary,
    load_model,
    load_tokenizer,
    positions_of,
    separate_adapter,
)
from hfppo.prompt_maker import TRAIN, PromptMaker, by_name
from hfppo.rewards.functions import RewardFunctions, check_weights
from hfppo.rewards.load_rewards import RewardTokenizers, load_reward_funcs
from hfppo.rewards.model import RewardAdapter, RewardModel
from hfppo.rewards.process_model import ProcessRewardModel
from hfppo.rewards.reward_func import RewardFunc, plain_name, unwrap
from hfppo.support.refusals import raise_first

logger = logging.getLogger(__name__)

ModelSource: TypeAlias = str | PathLike[str] | PreTrainedModel  # or its id or path
RewardSource: TypeAlias = RewardFunc | ModelSource
InitKwargs: TypeAlias = dict[str, Any]  # arguments of `from_pretrained`


@dataclass(frozen=True)
class TrainerInputs:
    """The arguments of `PPOTrainer` that its parts are made from."""

    model: str | PreTrainedModel | PeftModel
    args: PPOConfig
    reward_funcs: RewardSource | Sequence[RewardSource] | None = None
    train_dataset: AnyDataset | None = None
    eval_dataset: EvalDataset = None
    processing_class: PreTrainedTokenizerBase | None = None
    peft_config: PeftConfig | None = None
    critic_peft_config: PeftConfig | None = None
    ref_model: str | PreTrainedModel | None = None
    critic: str | PreTrainedModel = "adapter"
    reward_processing_classes: RewardTokenizers = None
    tools: Sequence[Tool] | None = None
    environment_factory: EnvironmentFactories | None = None
    agent: Agent | None = None
    quantization_config: QuantizationConfigMixin | InitKwargs | None = None

    @property
    def init_kwargs(self) -> InitKwargs:
        """Arguments of `from_pretrained` for models given by name."""
        own = {} if self.quantization_config is None else {"quantization_config": self.quantization_config}
        return dict(**cast(InitKwargs, self.args.model_init_kwargs or {}), **own)

    @property
    def of_model(self) -> InitKwargs:
        """Arguments of `from_pretrained` for `model`; empty if it is already loaded."""
        return self.init_kwargs if isinstance(self.model, str) else {}


@dataclass(frozen=True)
class Parts:
    """The checked and loaded parts of a trainer."""

    model: ActorCritic
    eos_ids: list[int]
    rewards: RewardFunctions
    peft_config: PeftConfig
    prompt_maker: PromptMaker
    sources: dict[str, object]  # models by the names of their arguments
    player: EpisodePlayer | None  # plays episodes with tools and environments


def load_parts(inputs: TrainerInputs) -> Parts:
    """Return the parts of `PPOTrainer`; the prompts are checked before a model is loaded.

    Raises:
        TypeError, ValueError: an input cannot be used.
    """
    args = inputs.args
    prompt_maker = load_prompt_maker(inputs)
    tokenizer, agents, prompts = prompt_maker.tokenizer, prompt_maker.agents, prompt_maker.prompts

    loaded = load_model(inputs.model, **inputs.of_model)
    check_trainable(loaded, inputs.peft_config)
    eos_ids = with_turn_end(eos_token_ids(tokenizer, loaded.generation_config), prompt_maker)
    padding = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    special = {
        "the end of sequence": eos_ids,
        "the padding token": [padding],
        "generation_kwargs['stop_token_ids']": args.stop_token_ids or eos_ids,
    }
    plays: Callable[..., EpisodePlayer] = EpisodePlayer
    if inputs.agent is not None:
        plays = partial(AgentPlayer, is_judge=inputs.reward_funcs is None)
    player = None if agents is None else make_player(agents, eos_ids, args, positions_of(loaded)[0], plays)

    reference = None if inputs.ref_model is None else load_model(inputs.ref_model, "ref_model", **inputs.init_kwargs)
    rewards = reward_functions(inputs, str(loaded.config.name_or_path or ""), agents)
    critic = load_critic(inputs, loaded, prompt_maker)
    models = {"the model": loaded, "ref_model": reference, "the critic": critic and critic.model}
    check_prompts(prompts, models, rewards, prompt_maker, special)
    policy = None
    if isinstance(inputs.model, PeftModel):
        inputs.model.enable_adapter_layers()
        policy = policy_of(inputs.model)
    base, peft_config, start_adapter = separate_adapter(loaded, inputs.peft_config, inputs.of_model.get("revision"))
    prepare_reward_models(rewards, base, prompt_maker)
    tokenizer.pad_token_id = padding
    model = ActorCritic(base, peft_config, critic, reference, start_adapter)
    if policy is not None and start_adapter is not None:
        check_same_policy(model, policy, start_adapter)
    return Parts(
        model=model,
        eos_ids=eos_ids,
        rewards=rewards,
        peft_config=peft_config,
        prompt_maker=prompt_maker,
        sources={
            "model": inputs.model,
            "the base's path": base.name_or_path,
            "ref_model": inputs.ref_model,
            "critic": None if inputs.critic in CRITIC_KINDS else inputs.critic,
        },
        player=player,
    )


def check_prompts(
    prompts: Mapping[str, Prompts | PromptStream],
    models: Mapping[str, object],
    rewards: RewardFunctions,
    prompt_maker: PromptMaker,
    special: dict[str, list[int]] | None = None,
) -> None:
    """Raise if prompts do not fit models or reward functions.

    Args:
        prompts: by the datasets' names in errors.
        models: by their names in errors, "the model" among them; what is not a loaded model is not checked.
        special: see `check_ids`.
    Raises:
        TypeError, ValueError: prompts or columns do not fit.
    """
    longest = max((some.longest for some in prompts.values()), default=0)
    known = {name: some.head for name, some in prompts.items()}
    for name, model in models.items():
        if isinstance(model, PreTrainedModel | PeftModel):
            check_lengths(name, model, longest, prompt_maker.args)
    check_ids(cast(PreTrainedModel, models["the model"]), known, special or {})
    check_ends(known, prompt_maker.tokenizer)
    check_calls(rewards, known, prompt_maker.agents)


def with_turn_end(eos_ids: list[int], prompt_maker: PromptMaker) -> list[int]:
    """Return the ids that end a completion, with the token that ends the chat template's turns.

    The EOS of many a base ends a document: a conversation would continue with turns that the model writes itself.
    """
    tokenizer, chats = prompt_maker.tokenizer, any(some.head.conversational for some in prompt_maker.prompts.values())
    end = find_turn_end(tokenizer, prompt_maker.chat_template_kwargs) if chats else None
    if end is None or end in eos_ids:
        return eos_ids
    told = tokenizer.convert_ids_to_tokens(end), tokenizer.eos_token
    logger.warning("%r ends a completion, as it ends turns in the chat template; the tokenizer's EOS is %r", *told)
    return [*eos_ids, end]


def load_prompt_maker(inputs: TrainerInputs) -> PromptMaker:
    """Return the maker of prompts, with tokenizer, tools and environments."""
    if not isinstance(inputs.model, str):
        check_architecture("model", inputs.model)
    tokenizer = inputs.processing_class or load_tokenizer(inputs.model, **inputs.of_model)
    date = RunDate.today()
    options: dict[str, Any] = {CLOCK: date, **cast(dict[str, Any], inputs.args.chat_template_kwargs or {})}
    played_by = inputs.tools, inputs.environment_factory
    if inputs.agent is None:
        agents = load_agents(*played_by, tokenizer, inputs.args, options)
    else:
        agents = load_program(inputs.agent, *played_by, tokenizer, options)
    options = options if agents is None else agents.chat_format.options
    datasets = by_name(inputs.train_dataset, inputs.eval_dataset)
    return PromptMaker(tokenizer, inputs.args, agents, date, options, datasets)


def reward_functions(inputs: TrainerInputs, base_name: str, agents: Agents | None) -> RewardFunctions:
    """Return the given reward functions, then the reward functions of tools and environments.

    `reward_weights` has an entry for each given function, or for all of them; by default, the latter have weight 1.

    Raises:
        TypeError, ValueError: a reward function cannot be used, or there is none.
    """
    given: list[RewardFunc] = []
    if inputs.reward_funcs is not None:
        given = load_reward_funcs(inputs.reward_funcs, inputs.reward_processing_classes, base_name, inputs.args.device)
    own = episode_rewards(agents, given)
    if inputs.reward_funcs is None and not own and inputs.ref_model is not None and inputs.args.needs_reference:
        given = [no_reward]
    weights = inputs.args.reward_weights
    if own and weights is not None and len(weights) != len(given) + len(own):
        weights = [*check_weights(weights, [plain_name(func) for func in given]), *[1.0] * len(own)]
    return RewardFunctions([*given, *own], weights, inputs.args.missing_eos_penalty)


def no_reward(completions: Sequence[object], **kwargs: object) -> list[float]:
    """Return a score of 0 for each completion: the reference is the only teacher."""
    return [0.0] * len(completions)


def load_critic(
    inputs: TrainerInputs, base: PreTrainedModel | PeftModel, prompt_maker: PromptMaker
) -> CriticSource | None:
    """Return the critic's source; None for estimators without a critic."""
    args, critic, own, train = inputs.args, inputs.critic, inputs.critic_peft_config, prompt_maker.prompts.get(TRAIN)
    raise_first(
        {
            f"critic_peft_config has no effect with advantage_estimator={args.advantage_estimator!r}; leave it out, "
            "or set advantage_estimator='gae'": own is not None and not args.needs_critic,
            f"prompt_candidates={args.prompt_candidates} chooses prompts by the critic before an episode begins, and "
            "an agent writes its prompt later; leave it out, or set advantage_estimator='grpo'": (
                args.prompt_candidates > 1 and args.needs_critic and inputs.agent is not None
            ),
            f"critic_peft_config is an adapter, and critic={critic!r} has none; leave it out, or set "
            "critic='adapter'": own is not None and critic in ("shared", "shared_detached"),
            f"critic_update={args.critic_update!r} has steps that do not move the actor, but with critic='shared' its "
            "loss does; set critic='shared_detached' or 'adapter'": critic == "shared" and args.critic_follows,
        }
    )
    if not args.needs_critic:
        return None
    # A revision belongs to the repository that it was given for.
    given = {name: value for name, value in inputs.init_kwargs.items() if name != "revision" or critic == inputs.model}
    found = find_critic(critic, **given)
    settings: dict[str, Any] = {"layers": args.critic_layers, "bounds": args.bounds}
    settings["peft_config"] = own or found.peft_config
    if train is not None:
        settings["privileged"] = train.head.critic_ids is not None
    source = replace(found, **settings)
    source.check(base)
    if own is not None:
        check_adapter(own)
    if isinstance(source.model, PreTrainedModel):
        # Checkpoints of one tokenizer pad their vocabularies to different sizes.
        check_vocabulary("critic", source.model, max(prompt_maker.tokenizer.get_vocab().values()) + 1)
    return source


def prepare_reward_models(rewards: RewardFunctions, base: PreTrainedModel, prompt_maker: PromptMaker) -> None:
    """Give reward models the run's date, and reward adapters the actor's base.

    Raises:
        ValueError: a process reward model cannot judge the run's completions.
    """
    for func in map(unwrap, rewards.funcs):
        if isinstance(func, RewardModel):
            func.date = prompt_maker.date
        if isinstance(func, ProcessRewardModel):
            func.check(prompt_maker.tokenizer, several_turns=prompt_maker.agents is not None)
        if isinstance(func, RewardAdapter):
            func.attach(base)
