"""Actor, reference and critic on one frozen base.

The actor is the base with a LoRA adapter, the reference the base with that adapter disabled, the critic a second
module tree over the same tensors with an adapter and a value head of its own. Two adapters on one tree would not do:
switching between a forward and its backward silently gives zero gradients.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import LoraConfig, PeftConfig, PeftModel, PeftModelForCausalLM, get_peft_model, load_peft_weights
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

CRITIC_FOLDER = "critic"
CRITIC_WEIGHTS = "critic.safetensors"
CRITIC_CONFIG = "critic_config.json"

# These initialisations write into the base, so that disabling the adapter no longer gives the base back.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "eva", "loftq", "lora_ga")

# Logits are made for as many tokens at once as fit into this many numbers (float32: 128 MiB).
MAX_LOGITS = 2**25


class TokenOutputs(NamedTuple):
    """What one forward says about the T completion tokens of B rows; 0 on padding."""

    logprobs: Tensor | None  # (B, T) float32, log π(y_t | x, y_<t) at temperature, nats
    entropy: Tensor | None  # (B, T) float32, of the full distribution at temperature, nats
    values: Tensor | None  # (B, T) float32, V(s_t) before token t
    final_value: Tensor | None  # (B,) float32, V after the last real token


class Critic(nn.Module):
    """A value head, on a trunk of its own or on the actor's hidden states.

    Args:
        kind: "adapter" (LoRA on the actor's base), "shared" (the actor's hidden states) or "model" (LoRA on another).
        trunk: hidden states from token ids, or None for "shared".
        hidden_size: width of the hidden states.
        base: name of the separate model, kept in the saved folder.
        detach: with "shared", keep the value loss from the actor's weights.
    """

    def __init__(
        self, kind: str, trunk: nn.Module | None, hidden_size: int, base: str | None = None, detach: bool = False
    ):
        super().__init__()
        self.kind, self.base, self.detach = kind, base, detach
        self.trunk = trunk
        self.value_head = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, actor_hidden: Tensor | None, **inputs: Tensor) -> Tensor:
        """(B, S) values of the states in (B, S) token ids, or of the (B, S, H) hidden states of the actor."""
        if self.trunk is not None:
            hidden = self.trunk(**inputs, use_cache=False).last_hidden_state
        else:
            hidden = actor_hidden.detach() if self.detach else actor_hidden
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def save(self, folder: str | Path) -> None:
        """Write the trainable weights and what they belong to."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self.trained_state(), Path(folder) / CRITIC_WEIGHTS)
        config = {"kind": self.kind, "base": self.base}
        (Path(folder) / CRITIC_CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote.

        Raises:
            ValueError: the folder holds another kind of critic.
        """
        state = load_file(Path(folder) / CRITIC_WEIGHTS)
        if state.keys() != self.trained_state().keys():
            saved = json.loads((Path(folder) / CRITIC_CONFIG).read_text())["kind"]
            raise ValueError(
                f"{folder} holds a critic of kind {saved!r} that does not fit this run's {self.kind!r} critic; "
                "use the critic and the peft_config it was trained with"
            )
        self.load_state_dict(state, strict=False)

    def trained_state(self) -> dict[str, Tensor]:
        """The trainable weights by name."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}


class ActorCritic(PeftModelForCausalLM):
    """A PEFT model with a critic beside it, and the reference inside it.

    For PEFT and transformers it is a plain adapter model: `generate`, `save_pretrained`, `disable_adapter` and a
    forward without `completion_mask` do what they always do.

    Args:
        base: the causal language model; it is frozen, and its tensors are never written.
        peft_config: the actor's adapter.
        critic: "adapter", "shared", a folder written by `save_pretrained`, a model or its id, or None for no critic.
        ref_model: the reference; None for the base with the adapter disabled.
        start_adapter: weights to start the actor from; unless `ref_model` is given, a frozen copy is the reference.
        detach_critic: with a shared critic, keep the value loss from the actor's weights.

    Raises:
        ValueError: an adapter whose disabled state is not the base, or without trainable weights; an architecture
            whose logits are not its output head on its hidden states.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        peft_config: PeftConfig,
        critic: str | PreTrainedModel | None = "adapter",
        ref_model: PreTrainedModel | PeftModel | None = None,
        start_adapter: dict[str, Tensor] | None = None,
        detach_critic: bool = False,
    ):
        check_adapter(peft_config)
        critic_module = build_critic(critic, base, peft_config, detach_critic)
        if start_adapter is not None and ref_model is None:
            ref_model = frozen_adapter_copy(base, peft_config, start_adapter)
        super().__init__(base, peft_config)
        if start_adapter is not None:
            set_peft_model_state_dict(self, start_adapter)
        self.critic = critic_module
        self.ref_model = ref_model.requires_grad_(False).eval() if ref_model is not None else None
        self._policy: PreTrainedModel | PeftModel = self.causal_lm
        disable_dropout(self)
        if not any(p.requires_grad for p in self.actor_parameters()):
            raise ValueError("the adapter has no trainable weight; check peft_config's target_modules")
        self._check_logits()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The base with the actor's adapter in it, whose forward gives logits."""
        return cast(PreTrainedModel, self.get_base_model())

    def actor_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the policy."""
        return [p for p in self.base_model.parameters() if p.requires_grad]

    def critic_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the critic; empty without one."""
        return [] if self.critic is None else [p for p in self.critic.parameters() if p.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the log-probs of `forward` are those of the reference policy."""
        if self.ref_model is None:
            with self.disable_adapter():
                yield
            return
        self._policy = self.ref_model
        try:
            yield
        finally:
            self._policy = self.causal_lm

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        completion_mask: Tensor | None = None,
        temperature: float = 1.0,
        policy: bool = True,
        values: bool = True,
        **kwargs: Any,
    ) -> TokenOutputs | Any:
        """Log-probs, entropy and values of completion tokens; without `completion_mask`, PEFT's own forward.

        Args:
            input_ids: (B, P + T), prompts padded on the left, completions on the right.
            attention_mask: (B, P + T), 1 on the tokens to attend to.
            completion_mask: (B, T) bool, True on the tokens asked about.
            temperature: divides the logits.
            policy: False leaves log-probs and entropy out.
            values: False leaves the values out.
        """
        if completion_mask is None:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        states = completion_mask.shape[1] + 1  # s_0 … s_T: state t is read at the token before token t
        positions = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
        values = values and self.critic is not None
        hidden = None
        if policy or (values and self.critic.trunk is None):
            hidden = trunk_of(self._policy)(**inputs, use_cache=False).last_hidden_state[:, -states:]
        logprobs = entropy = state_values = final_value = None
        if policy:
            tokens = input_ids[:, -states + 1 :]
            logprobs, entropy = token_logprobs(self._policy, hidden[:, :-1], tokens, completion_mask, temperature)
        if values:
            after = self.critic(hidden, **inputs)[:, -states:]
            last = (completion_mask.shape[1] - completion_mask.flip(1).int().argmax(dim=1))[:, None]
            final_value = after.gather(1, last).squeeze(1)
            state_values = after[:, :-1].where(completion_mask, 0.0)
        return TokenOutputs(logprobs, entropy, state_values, final_value)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Turn activation checkpointing on in the actor and in the critic's trunk."""
        trees: list[Any] = [self.causal_lm]
        if self.critic is not None and isinstance(self.critic.trunk, PeftModel):
            trees.append(self.critic.trunk.get_base_model())
        for tree in trees:
            tree.activation_checkpointing_enable(**kwargs)
            tree.enable_input_require_grads()

    def save_pretrained(self, save_directory: str, is_main_process: bool = True, **kwargs: Any) -> None:
        """Write a plain PEFT adapter, and the critic into `critic/` beside it."""
        super().save_pretrained(
            save_directory, is_main_process=is_main_process, selected_adapters=["default"], **kwargs
        )
        if self.critic is not None and is_main_process:
            self.critic.save(Path(save_directory) / CRITIC_FOLDER)

    def _check_logits(self) -> None:
        """Refuse an architecture whose logits are more than `logits_of` knows, before a run rests on them."""
        model = self.causal_lm
        ids = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits.float()
            got = logits_of(model, trunk_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
        if not torch.allclose(expected, got, rtol=1e-3, atol=1e-3):
            raise ValueError(
                f"{type(model).__name__} changes its logits after the output head in a way this package does not "
                f"know (they differ by up to {(expected - got).abs().max():.3g}); use another architecture"
            )


def trunk_of(model: PreTrainedModel | PeftModel) -> nn.Module:
    """The part of a causal language model, adapters included, that gives hidden states."""
    causal_lm: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    return causal_lm.base_model


def logits_of(model: PreTrainedModel | PeftModel, hidden: Tensor) -> Tensor:
    """(…, V) float32 logits from (…, H) hidden states, with what some architectures do after the output head."""
    logits = model.get_output_embeddings()(hidden).float()
    config = model.config.get_text_config()
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:  # Cohere
        logits = logits * factor
    return logits


def token_logprobs(
    model: PreTrainedModel | PeftModel, hidden: Tensor, tokens: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the real tokens, without keeping (B, T, V) logits.

    Only real tokens reach the output head, in chunks; the backward pass makes each chunk's logits again.

    Args:
        hidden: (B, T, H), the state before each token.
        tokens: (B, T) int64.
        mask: (B, T) bool.
        temperature: divides the logits.
    Returns:
        logprobs, entropy: (B, T) float32, nats, 0 where mask is False.
    """

    def chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax(logits_of(model, states) / temperature, dim=-1)
        return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(dim=-1)

    states, targets = hidden[mask], tokens[mask]
    size = max(1, MAX_LOGITS // model.config.get_text_config().vocab_size)
    if len(targets) <= size:
        logprobs, entropy = chunk(states, targets)
    else:
        parts = [
            checkpoint(chunk, *piece, use_reentrant=False)
            for piece in zip(states.split(size), targets.split(size), strict=True)
        ]
        logprobs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    nothing = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
    return nothing.masked_scatter(mask, logprobs), nothing.masked_scatter(mask, entropy)


def shared_copy(module: nn.Module) -> Any:
    """A second module tree over the same tensors: adapters put on one do not touch the other."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, memo={id(tensor): tensor for tensor in tensors})


def check_adapter(config: PeftConfig) -> None:
    """Refuse adapters that, disabled, do not give the base back: the reference would not be the base."""
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        raise ValueError(
            f"init_lora_weights={init!r} changes the base, so the disabled adapter is not the reference policy; "
            "use init_lora_weights=True, 'gaussian' or 'orthogonal'"
        )
    if (bias := getattr(config, "bias", "none")) != "none":
        raise ValueError(
            f"bias={bias!r} trains biases of the base, so the disabled adapter is not the reference policy; "
            "use bias='none'"
        )
    if config.is_prompt_learning:
        raise ValueError(f"{config.peft_type} is prompt learning, which has no reference policy; use LoRA")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: the ratio compares two passes over one token, and dropout would be noise in it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 (modules are typed to hold tensors only)


def build_critic(
    critic: str | PreTrainedModel | None, base: PreTrainedModel, peft_config: PeftConfig, detach: bool
) -> Critic | None:
    """The critic that the `critic` argument of `ActorCritic` asks for; before an adapter is put on the base."""
    if critic is None:
        return None
    folder = saved_critic(critic)
    if folder is not None:
        saved = json.loads((folder / CRITIC_CONFIG).read_text())
        critic = saved["base"] if saved["kind"] == "model" else saved["kind"]
    if critic == "shared":
        built = Critic("shared", None, base.config.get_text_config().hidden_size, detach=detach)
    elif critic == "adapter":
        trunk = adapted(shared_copy(base.base_model), peft_config)
        built = Critic("adapter", trunk, base.config.get_text_config().hidden_size)
    else:
        built = critic_from_model(critic, peft_config)
    if folder is not None:
        built.load(folder)
    return built.to(base.device) if built.trunk is None else built


def saved_critic(critic: str | PreTrainedModel) -> Path | None:
    """The folder that `critic` names, if it is one that `Critic.save` wrote."""
    if not isinstance(critic, str):
        return None
    folders = (Path(critic), Path(critic) / CRITIC_FOLDER)
    return next((folder for folder in folders if (folder / CRITIC_CONFIG).is_file()), None)


def critic_from_model(critic: str | PreTrainedModel, peft_config: PeftConfig) -> Critic:
    """A critic on another model, for instance the reward model, whose score head the value head starts from."""
    if isinstance(critic, str):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            critic, num_labels=1, output_loading_info=True
        )
        trained_head = not any(name.startswith("score") for name in info["missing_keys"])
    else:
        model, trained_head = critic, True
    score = getattr(model, "score", None) if trained_head else None
    trunk = adapted(model.base_model, peft_config)
    built = Critic("model", trunk, model.config.get_text_config().hidden_size, base=model.config.name_or_path)
    if isinstance(score, nn.Linear) and score.out_features == 1:
        with torch.no_grad():
            built.value_head.weight.copy_(score.weight)
    return built


def adapted(trunk: nn.Module, peft_config: PeftConfig) -> PeftModel:
    """The trunk with an adapter like the actor's on it.

    Its name keeps the critic's weights out of the actor's saved adapter, which PEFT picks by name.
    """
    config: Any = copy.deepcopy(peft_config)
    config.task_type, config.modules_to_save, config.inference_mode = None, None, False
    return get_peft_model(trunk, config, adapter_name="critic")


def frozen_adapter_copy(base: PreTrainedModel, peft_config: PeftConfig, weights: dict[str, Tensor]) -> PeftModel:
    """The base with a frozen copy of an adapter on it, in a module tree of its own."""
    model = PeftModelForCausalLM(shared_copy(base), copy.deepcopy(peft_config), adapter_name="reference")
    set_peft_model_state_dict(model, weights, adapter_name="reference")
    return model


@dataclass(frozen=True)
class Actor:
    """What an actor is built from."""

    base: PreTrainedModel
    peft_config: PeftConfig
    start_adapter: dict[str, Tensor] | None  # None: a new adapter


def load_actor(model: str | PreTrainedModel | PeftModel, peft_config: PeftConfig | None, **init_kwargs: Any) -> Actor:
    """Take a model as users give it: an id or path of a base or of an adapter, a loaded base, a loaded adapter.

    Raises:
        ValueError: a second adapter is asked for on a trained one, or the loaded adapter is not trainable.
    """
    if isinstance(model, str):
        try:
            config = PeftConfig.from_pretrained(model)
        except (ValueError, OSError):  # no adapter there: a base
            base = AutoModelForCausalLM.from_pretrained(model, **init_kwargs)
            return Actor(base, peft_config or default_peft_config(), None)
        base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **init_kwargs)
        start = load_peft_weights(model, device=str(base.device))
    elif isinstance(model, PeftModel):
        config = model.active_peft_config
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(
                "model is a PeftModel without a trainable weight, so training would change nothing; load it with "
                "PeftModel.from_pretrained(..., is_trainable=True)"
            )
        start = {k: v.clone() for k, v in get_peft_model_state_dict(model, adapter_name=model.active_adapter).items()}
        base = model.unload()
    else:
        return Actor(model, peft_config or default_peft_config(), None)
    if peft_config is not None:
        raise ValueError(
            "model is already an adapter and peft_config asks for another; leave peft_config out to train the "
            "adapter on, or merge it into its base first"
        )
    config = copy.deepcopy(config)
    config.inference_mode = False
    return Actor(base, config, start)


def default_peft_config() -> LoraConfig:
    """LoRA of rank 16 on every linear layer but the output head."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
