"""From the arguments of `PPOTrainer` to its checked and loaded parts; nothing is generated or written here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hfppo.checks.data import (
    END,
    STOPS,
    check_calls,
    check_ids,
    check_lengths,
    check_tokenizer,
    warn_of_ended_prompts,
)
from hfppo.config import PPOConfig
from hfppo.data.chat_template import CLOCK, RunDate
from hfppo.data.prompts import Prompts
from hfppo.environments.agents import Agents, load_agents
from hfppo.environments.episodes import EpisodePlayer, make_player
from hfppo.environments.pool import EnvironmentFactory
from hfppo.environments.turn_rewards import episode_rewards
from hfppo.generation.sampler import eos_token_ids
from hfppo.models.actor_critic import ActorCritic
from hfppo.models.critic import CRITIC_KINDS, CriticSource, find_critic
from hfppo.models.loading import (
    check_architecture,
    check_model,
    check_vocabulary,
    load_model,
    load_reference,
    load_tokenizer,
    positions_of,
    separate_adapter,
    with_quantization,
)
from hfppo.prompt_maker import DatasetPrompts, PromptMaker
from hfppo.rewards.functions import RewardFunctions, check_weights
from hfppo.rewards.load_rewards import load_reward_funcs
from hfppo.rewards.model import RewardAdapter, RewardModel
from hfppo.rewards.reward_func import plain_name, unwrap


@dataclass(frozen=True)
class TrainerInputs:
    """The arguments of `PPOTrainer` that its parts are made from."""

    model: str | PreTrainedModel | PeftModel
    args: PPOConfig
    reward_funcs: Any = None
    train_dataset: Dataset | IterableDataset | None = None
    eval_dataset: Dataset | dict[str, Dataset] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    peft_config: PeftConfig | None = None
    ref_model: str | PreTrainedModel | None = None
    critic: str | PreTrainedModel = "adapter"
    reward_tokenizers: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None
    tools: Sequence[Callable[..., Any]] | None = None
    environment_factory: EnvironmentFactory | Mapping[str, EnvironmentFactory] | None = None
    quantization_config: Any = None
    date: RunDate | None = None  # for chat templates; None: today

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for models given by name."""
        return with_quantization(cast(dict[str, Any], self.args.model_init_kwargs or {}), self.quantization_config)

    @property
    def of_model(self) -> dict[str, Any]:
        """The same for `model`; empty if it is loaded."""
        return self.init_kwargs if isinstance(self.model, str) else {}

    def sources(self, base_path: str) -> list[tuple[str, Any]]:
        """Return the models and reward functions, each after the name of its argument."""
        given = self.reward_funcs if isinstance(self.reward_funcs, list | tuple) else [self.reward_funcs]
        named: list[tuple[str, Any]] = [("reward_funcs", unwrap(func)) for func in given]
        named += [("model", self.model), ("the base's path", base_path), ("ref_model", self.ref_model)]
        own = not self.args.needs_critic or self.critic in CRITIC_KINDS
        return named + ([] if own else [("critic", self.critic)])


@dataclass(frozen=True)
class Parts:
    """The checked and loaded parts of a trainer."""

    model: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    eos_ids: list[int]
    rewards: RewardFunctions
    peft_config: PeftConfig
    prompts: DatasetPrompts
    prompt_maker: PromptMaker  # for datasets that come later
    sources: list[tuple[str, Any]]  # models and reward functions, each after its argument
    player: EpisodePlayer | None  # plays with tools and environments


def load_parts(inputs: TrainerInputs) -> Parts:
    """Return the parts of `PPOTrainer`; quick checks come before slow loading.

    Raises:
        TypeError, ValueError: names the input that cannot be used, and the remedy.
    """
    args = inputs.args
    prompt_maker = load_prompt_maker(inputs)
    tokenizer, agents = prompt_maker.tokenizer, prompt_maker.agents
    prompts = prompt_maker.of_datasets(inputs.train_dataset, inputs.eval_dataset)
    longest = max((some.longest for some in prompts.named.values()), default=0)

    loaded = load_model(inputs.model, **inputs.of_model)
    check_model(loaded, inputs.peft_config)
    check_lengths("the model", loaded, longest, args)
    eos_ids = eos_token_ids(tokenizer, loaded.generation_config)
    padding = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    special = {END: eos_ids, "the padding token": [padding], STOPS: args.stop_token_ids or eos_ids}
    check_ids(loaded, prompts.known, special)
    warn_of_ended_prompts(prompts.known, eos_ids)
    player = None if agents is None else make_player(agents, eos_ids, args, positions_of(loaded)[0])

    reference = load_reference(inputs.ref_model, **inputs.init_kwargs)
    if reference is not None:
        check_lengths("ref_model", reference, longest, args)
    rewards = load_rewards(inputs, str(loaded.config.name_or_path or ""), agents)
    check_calls(rewards, prompts.known, agents)
    critic = load_critic(inputs, loaded, tokenizer, longest)
    actor = separate_adapter(loaded, inputs.peft_config, inputs.of_model.get("revision"))
    for func in map(unwrap, rewards.funcs):
        if isinstance(func, RewardModel):
            func.date = prompt_maker.date
        if isinstance(func, RewardAdapter):
            func.attach(actor.base)
    tokenizer.pad_token_id = padding
    return Parts(
        model=ActorCritic(actor.base, actor.peft_config, critic, reference, actor.start_adapter),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        rewards=rewards,
        peft_config=actor.peft_config,
        prompts=prompts,
        prompt_maker=prompt_maker,
        sources=inputs.sources(actor.base.name_or_path),
        player=player,
    )


def load_prompt_maker(inputs: TrainerInputs) -> PromptMaker:
    """Return what makes prompts of datasets, with tokenizer, tools and environments."""
    if not isinstance(inputs.model, str):
        check_architecture("model", inputs.model)
    tokenizer = load_tokenizer(inputs.model, **inputs.of_model) if inputs.tokenizer is None else inputs.tokenizer
    check_tokenizer(tokenizer)
    date = RunDate.today() if inputs.date is None else inputs.date
    options = {CLOCK: date, **cast(dict[str, Any], inputs.args.chat_template_kwargs or {})}
    agents = load_agents(inputs.tools, inputs.environment_factory, tokenizer, inputs.args, options)
    options = options if agents is None else agents.chat_format.options
    return PromptMaker(tokenizer, inputs.args, agents, date, options)


def load_rewards(inputs: TrainerInputs, base_name: str, agents: Agents | None) -> RewardFunctions:
    """Return the reward functions, those of tools and environments last.

    `reward_weights` has an entry for each given function, and may have one more for each of the others, which count 1
    otherwise.

    Raises:
        TypeError, ValueError: a reward function cannot be used, or there is none; names it.
    """
    args, given = inputs.args, []
    if inputs.reward_funcs is not None:
        init_kwargs = cast(dict[str, Any], args.reward_model_init_kwargs or {})
        given = load_reward_funcs(inputs.reward_funcs, inputs.reward_tokenizers, base_name, args.device, **init_kwargs)
    own = episode_rewards(agents, given)
    weights = args.reward_weights
    if own and weights is not None and len(weights) != len(given) + len(own):
        weights = [*check_weights(weights, [plain_name(func) for func in given]), *[1.0] * len(own)]
    return RewardFunctions([*given, *own], weights)


def load_critic(
    inputs: TrainerInputs, base: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, longest: int
) -> CriticSource | None:
    """Return the critic's source; None for estimators without a critic.

    Args:
        longest: tokens of the longest prompt.
    """
    args, critic = inputs.args, inputs.critic
    if not args.needs_critic:
        return None
    # A revision belongs to the repository that it was given for.
    given = {name: value for name, value in inputs.init_kwargs.items() if name != "revision" or critic == inputs.model}
    source = find_critic(critic, **given).with_layers(args.critic_layers, critic, base)
    if isinstance(source.model, PreTrainedModel):
        # Checkpoints of one tokenizer pad their vocabularies to different sizes.
        check_vocabulary("critic", source.model, max(tokenizer.get_vocab().values()) + 1)
        check_lengths("the critic", source.model, longest, args)
    return source


def load_later_dataset(
    dataset: Dataset, name: str, model: ActorCritic, rewards: RewardFunctions, prompt_maker: PromptMaker
) -> Prompts:
    """Return the checked prompts of a dataset that comes after construction; errors call it `name`.

    Raises:
        TypeError, ValueError: names the prompts or columns that do not fit.
    """
    prompts = prompt_maker.of_dataset(dataset, name)
    check_lengths("the model", model.causal_lm, prompts.longest, prompt_maker.args)
    check_ids(model.causal_lm, {name: prompts}, {})
    check_calls(rewards, {name: prompts}, prompt_maker.agents)
    return prompts
