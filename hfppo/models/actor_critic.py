"""Actor, reference and critic on one frozen base, in one module tree.

The actor is the base with a LoRA adapter, the reference the base without it or with the adapter that training starts
from, the critic the base with an adapter and a value head of its own. `AdapterSwitch` chooses.
"""

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from huggingface_hub.constants import REPOCARD_NAME
from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hfppo.models.adapter_checks import unchanged, warn_of_left_out
from hfppo.models.adapter_switch import ACTOR, CRITIC, REFERENCE, AdapterSwitch
from hfppo.models.critic import CRITIC_FOLDER, CriticSource, build_critic, find_critic, only_adaptable, shared_copy
from hfppo.models.layout import Layout, hidden_states, lay_out, run_trunk, trunk_of
from hfppo.models.loading import check_adapter, check_vocabulary, fit_to_model, keep_four_bits
from hfppo.models.lower_layers import record_states, start_from
from hfppo.models.modes import attributes, copy_whole, is_sharded
from hfppo.models.output_head import Entropy, token_logprobs
from hfppo.models.router_loss import router_coef, router_loss
from hfppo.models.vocabulary import is_resized


class TokenOutputs(NamedTuple):
    """Outputs of one forward for the T completion tokens of B rows; 0 where none was sampled."""

    logprobs: Tensor | None = None  # (B, T) float32, log π(y_t | x, y_<t) at temperature, nats
    entropy: Tensor | None = None  # (B, T) float32, of the full distribution at temperature, nats
    values: Tensor | None = None  # (B, T) float32, V(s_t) before token t
    final_value: Tensor | None = None  # (B,) float32, V after the last token
    base_states: Tensor | None = None  # (N, H) states below the critic's layers, of all real tokens, row after row
    router_loss: Tensor | None = None  # () float32, see `hfppo.models.router_loss`
    value_logits: Tensor | None = None  # (B, T) float32, z of values σ(z) in a range, for their cross-entropy


@dataclass(frozen=True)
class Want:
    """Which outputs a forward returns."""

    temperature: float = 1.0  # divides the logits
    policy: bool = True  # log-probs, and the entropy
    values: bool = True  # V(s_t), if there is a critic
    entropy: Entropy = "none"  # "differentiable" costs as much again as the gradient of the log-probs
    final_value: bool = False  # the value after the last token as well, which costs reading that token
    # The base's states below the critic's layers. Without `values` the adapter must be disabled.
    base_states: bool = False
    router_loss: bool = False  # the load-balancing loss, if the base has one; it reads the last token as well


EVERYTHING = Want()


class ActorCritic(PeftModelForCausalLM):
    """A PEFT model with a critic and a reference.

    For PEFT and transformers it is a plain adapter model: `generate`, `save_pretrained`, `disable_adapter` and a
    forward without `completion_mask` work as in PEFT.

    Args:
        base: the causal language model; it is frozen, and its tensors are never written.
        peft_config: the actor's adapter.
        critic: one of `CRITIC_KINDS`, a folder written by `save_pretrained`, a model or its id, or None for no critic.
        ref_model: the reference; None for the base with the adapter disabled.
        start_adapter: weights to start the actor from; unless `ref_model` is given, a frozen copy is the reference.

    Raises:
        ValueError: an adapter whose disabled state is not the base, or without trainable weights.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        peft_config: PeftConfig,
        critic: str | PreTrainedModel | CriticSource | None = "adapter",
        ref_model: PreTrainedModel | PeftModel | None = None,
        start_adapter: dict[str, Tensor] | None = None,
    ):
        check_adapter(peft_config)
        keep_four_bits(base)
        if ref_model is not None:
            check_vocabulary("ref_model", ref_model, base.config.get_text_config().vocab_size)
            keep_four_bits(ref_model)
        source = None if critic is None else find_critic(critic)
        config = fit_to_model(peft_config, base)  # a copy: PEFT resolves "all-linear" in place
        of_critic = None if source is None else source.config_for(base, peft_config)
        base.requires_grad_(False)  # PEFT freezes only the layers that it sees
        with unchanged(base, "peft_config"), warn_of_left_out(base, peft_config, config):
            if source is not None and source.kind == "adapter":  # the first, as PEFT draws the weights
                with only_adaptable(base, source.layers):
                    self._add(base, CRITIC, cast(PeftConfig, of_critic))
            built = None if source is None else build_critic(source, base, of_critic)
            if start_adapter is not None and ref_model is None:
                frozen = copy.deepcopy(config)
                frozen.inference_mode = True
                self._add(base, REFERENCE, frozen)
                set_peft_model_state_dict(self, start_adapter, adapter_name=REFERENCE)
            self._add(base, ACTOR, config)
            if start_adapter is not None:
                set_peft_model_state_dict(self, start_adapter)
        self.set_adapter(ACTOR)
        self.critic = built
        self.adapters = AdapterSwitch(self.base_model)
        self.ref_model = ref_model.requires_grad_(False).eval() if ref_model is not None else None
        # The dtype in which a layer returned the kept base states; a prepared forward returns them in float32.
        self.base_states_dtype: torch.dtype | None = None
        self._as_reference = False
        disable_noise(self)
        cast_by_autocast(self)
        if not self.actor_parameters():
            raise ValueError("the adapter has no trainable weight; check peft_config's target_modules")
        if source is not None and source.folder is not None:
            self._load_critic(source.folder)

    def _add(self, base: PreTrainedModel, name: str, config: PeftConfig) -> None:
        """Put an adapter on the base; the first one makes it a PEFT model."""
        if "_modules" in vars(self):
            self.add_adapter(name, config)
        else:
            super().__init__(base, config, name)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The base with the actor's adapter in it; its forward returns logits."""
        return cast(PreTrainedModel, self.get_base_model())

    def actor_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the policy."""
        return list(self._of_actor().values())

    def critic_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the critic; empty without a critic."""
        return list(self._of_critic().values())

    def _of_actor(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the policy, by their names in the base."""
        named = self.base_model.named_parameters()
        return {name: p for name, p in named if p.requires_grad and CRITIC not in name.split(".")}

    def _of_critic(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the critic, by their names in this model."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad and CRITIC in name.split(".")}

    def critic_names(self) -> dict[str, str]:
        """Return the names of the critic's trained weights, by their names in a saved critic's file.

        The file names an adapter on the actor's base as if the critic had a trunk of its own.
        """
        trunk = trunk_of(self.causal_lm)
        inside = next(name for name, module in self.named_modules() if module is trunk) + "."
        own = "trunk.base_model.model."
        return {
            own + name.removeprefix(inside) if name.startswith(inside) else name.removeprefix("critic."): name
            for name in self._of_critic()
        }

    def copy_actor(self) -> "ActorCritic":
        """Return the actor alone in eval mode, with weights of its own in the adapter, and the same base tensors."""
        with self._actor_alone():
            copied: ActorCritic = shared_copy(self, self.actor_parameters())
        return copied.eval()

    def actor_weights(self) -> dict[str, Tensor]:
        """Return copies of the policy's trainable weights on the CPU, by name."""
        return {name: p.detach().to("cpu", copy=True) for name, p in self._of_actor().items()}

    @torch.no_grad()
    def load_actor_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over what `actor_weights` returned."""
        for name, weight in weights.items():
            self.base_model.get_parameter(name).copy_(weight)

    @property
    def critic_is_shared(self) -> bool:
        """Whether the critic reads the actor's hidden states."""
        return self.critic is not None and self.critic.is_shared

    @property
    def critic_trunk(self) -> PreTrainedModel | PeftModel:
        """The model that computes the critic's states while its adapter acts: another one, or the actor's trunk."""
        return self.critic.trunk or cast(PreTrainedModel, trunk_of(self.causal_lm))

    @property
    def keeps_base_states(self) -> bool:
        """Whether the critic starts from the base's states below its layers."""
        return self.critic is not None and self.critic.layers is not None

    @cached_property
    def is_resized(self) -> bool:
        """Whether the base's vocabulary has another size than in the base's folder or repository."""
        return is_resized(self.causal_lm, self.peft_config["default"].revision)

    @property
    def reference_is_base(self) -> bool:
        """Whether the reference is the base without an adapter."""
        return self.ref_model is None and REFERENCE not in self.peft_config

    def reference(self) -> AbstractContextManager[None]:
        """Make `forward` compute log-probs of the reference policy inside the block."""
        if self.ref_model is not None:
            return attributes(self, _as_reference=True)
        return self.adapters.use(None if self.reference_is_base else REFERENCE)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute with the base alone inside the block, as in PEFT."""
        return self.adapters.use(None)

    def set_adapter(self, adapter_name: str, inference_mode: bool = False) -> None:
        """Make an adapter act, as in PEFT, but leave the critic's trained."""
        super().set_adapter(adapter_name, inference_mode)
        if CRITIC in self.peft_config:
            self.set_requires_grad(CRITIC)

    def enable_adapter_layers(self) -> None:
        """Undo `disable_adapter_layers`, as in PEFT, but leave the critic's adapter trained."""
        cast(BaseTuner, self.base_model).enable_adapter_layers()
        self.set_adapter(self.active_adapter)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        completion_mask: Tensor | None = None,
        want: Want = EVERYTHING,
        base_states: Tensor | None = None,
        critic_input_ids: Tensor | None = None,
        critic_attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> TokenOutputs | ModelOutput:
        """Log-probs, entropy and values of completion tokens; without `completion_mask`, PEFT's own forward.

        Args:
            input_ids: (B, P + T), prompts padded on the left, completions on the right.
            attention_mask: (B, P + T), 1 on the tokens to attend to.
            completion_mask: (B, T) bool, True on the completions' sampled tokens; only they get numbers.
            want: which outputs, and at which temperature.
            base_states: (N, H), which the values start from, as an earlier call returned them for these rows; on any
                device.
            critic_input_ids, critic_attention_mask: (B, C + T), the same completions after prompts of the critic's
                own; None: it reads the actor's.
        """
        if completion_mask is None:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        assert not kwargs, f"these belong into `want`: {sorted(kwargs)}"
        routed = want.policy and want.router_loss and router_coef(self.causal_lm) != 0
        final = want.final_value or want.base_states or routed
        rows = (input_ids, attention_mask, completion_mask.shape[1], final)
        logprobs = entropy = layout = hidden = balance = None
        of_values: dict[str, Tensor] = {}
        # The states of the block's last forward, the critic's or the base's.
        recorded = record_states(trunk_of(self.causal_lm), self.critic.layers) if want.base_states else nullcontext()
        with recorded as recording:
            if want.policy or (want.values and self.critic_is_shared):
                layout = lay_out(self._language_model, *rows)
                outputs = run_trunk(trunk_of(self._language_model), layout)
                hidden = outputs.last_hidden_state.flatten(0, 1)
                balance = router_loss(self.causal_lm, outputs, layout.tokens) if routed else None
            if want.policy:
                logprobs, entropy = self._policy(layout, hidden, input_ids, completion_mask, want)
            if want.values and self.critic is not None:
                if not self.critic_is_shared:
                    if critic_input_ids is not None:
                        layout, rows = None, (critic_input_ids, critic_attention_mask, *rows[2:])
                    if layout is None or self.critic.trunk is not None:
                        layout = lay_out(self.critic_trunk, self.critic.readable(rows[0]), *rows[1:])
                    hidden = self._critic_states(layout, attention_mask, base_states)
                outputs_of_head = self.critic(hidden)[layout.states]  # (B, T + 1)
                of_values = self.critic.token_values(outputs_of_head, completion_mask, want.final_value)
        if want.base_states:
            self.base_states_dtype = recording.states.dtype
        return TokenOutputs(
            logprobs,
            entropy,
            base_states=layout.take(recording.states, attention_mask) if want.base_states else None,
            router_loss=balance,
            **of_values,
        )

    def _policy(
        self, layout: Layout, hidden: Tensor, input_ids: Tensor, mask: Tensor, want: Want
    ) -> list[Tensor | None]:
        """Return log-probs and entropies, (B, T) each, from a layout's (N, H) hidden states.

        Args:
            mask: (B, T), the completion mask.
        """
        real = mask.nonzero(as_tuple=True)  # once, since the device waits for it
        before = hidden[layout.states[:, :-1][real]]
        tokens = input_ids[:, -mask.shape[1] :][real]
        found = token_logprobs(self._language_model, before, tokens, want.temperature, want.entropy)
        nothing = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
        return [None if x is None else nothing.masked_scatter(mask, x) for x in found]

    def _critic_states(self, layout: Layout, attention_mask: Tensor, base_states: Tensor | None) -> Tensor:
        """Return the (N, H) states that the critic reads where they are not the actor's.

        Args:
            base_states: see `forward`.
        """
        started: AbstractContextManager[None] = nullcontext()
        if base_states is not None:
            states = layout.place(base_states.to(attention_mask.device, self.base_states_dtype), attention_mask)
            started = start_from(self.critic_trunk, self.critic.layers, states)
        with self.adapters.use(CRITIC), started:
            return hidden_states(self.critic_trunk, layout)

    @property
    def _language_model(self) -> PreTrainedModel | PeftModel:
        """The model of the policy: the actor, or inside `reference` a separate reference."""
        return self.ref_model if self._as_reference else self.causal_lm

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **more: object
    ) -> None:
        """Turn activation checkpointing on in the actor and in the critic's trunk."""
        trees = [self.causal_lm]
        if self.critic is not None and self.critic.trunk is not None:
            trees.append(cast(PreTrainedModel, self.critic.trunk.get_base_model()))
        for tree in trees:
            enable = getattr(tree, "activation_checkpointing_enable", None) or tree.gradient_checkpointing_enable
            enable(activation_checkpointing_kwargs, **more)
            tree.enable_input_require_grads()
        self.adapters.follow_checkpointing(self.causal_lm)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **more: object
    ) -> None:
        """Do the same under the name that Trainer calls before transformers 5.20."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **more)

    def save_pretrained(
        self, save_directory: str, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Write a plain PEFT adapter, and the critic into the subfolder `critic/`."""
        state_dict = self.state_dict() if state_dict is None else state_dict
        self.save_adapter(save_directory, state_dict, is_main_process=is_main_process, **kwargs)
        if self.critic is not None and is_main_process:
            weights = {saved: state_dict[name] for saved, name in self.critic_names().items()}
            self.critic.save(Path(save_directory) / CRITIC_FOLDER, weights)

    def weights_to_save(self) -> dict[str, Tensor]:
        """Return the state of the model; where it is sharded, trained weights and buffers only, whole and on the CPU.

        There it is a collective call. Embeddings of another size than in the base's folder are included.
        """
        if not is_sharded(self):
            return self.state_dict()
        state = self.state_dict(keep_vars=True)  # first, since FSDP2 then puts the shards back in their places
        resized = [self.causal_lm.get_input_embeddings(), self.causal_lm.get_output_embeddings()] * self.is_resized
        own = {id(layer.weight) for layer in resized}
        frozen = {id(p) for p in self.parameters() if not p.requires_grad} - own
        return copy_whole({name: x for name, x in state.items() if id(x) not in frozen})

    def save_adapter(self, folder: str, state_dict: dict[str, Tensor], **kwargs: Any) -> None:
        """Write the actor as a plain PEFT adapter, from the model's state."""
        others = {CRITIC, REFERENCE, "ref_model"}
        of_actor = {name: tensor for name, tensor in state_dict.items() if not others & {*name.split(".")}}
        with self._actor_alone():
            super().save_pretrained(
                folder,
                state_dict=of_actor,
                selected_adapters=["default"],
                # By itself PEFT asks the Hub each time, and misses a nested configuration's vocabulary.
                save_embedding_layers=self.is_resized,
                **kwargs,
            )

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter into the actor, as PEFT does."""
        with self._actor_alone():
            return super().load_adapter(*args, **kwargs)

    def _actor_alone(self) -> AbstractContextManager[None]:
        """Remove critic and reference from the submodules for the block; PEFT searches all submodules for adapters."""
        return attributes(self, critic=None, ref_model=None)

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write PEFT's model card where there is none; the trainer's has PEFT's metadata, valid for the Hub."""
        if not (Path(output_dir) / REPOCARD_NAME).is_file():
            super().create_or_update_model_card(output_dir)

    def load_critic(self, folder: str) -> None:
        """Load the critic, if the model has one, from a folder that `save_pretrained` wrote."""
        if self.critic is not None:
            self._load_critic(Path(folder) / CRITIC_FOLDER)

    def _load_critic(self, folder: Path) -> None:
        """Load the critic from its own folder."""
        names = self.critic_names()
        weights: dict[str, Any] = {names[saved]: x for saved, x in self.critic.read(folder, names).items()}
        # Like load_state_dict, but each process takes its shards where the weights are sharded.
        options = StateDictOptions(full_state_dict=True, strict=False)  # the other weights are not in the file
        set_model_state_dict(self, weights, options=options)


def disable_noise(model: nn.Module) -> None:
    """Set every dropout and jitter to 0; otherwise their noise enters the ratio of two passes over one token."""
    for module in model.modules():
        if "Dropout" in type(module).__name__ and hasattr(module, "p"):  # torch's, and PEFT's own
            cast(nn.Dropout, module).p = 0.0
        # Many architectures keep it as a number; a few, such as Falcon, read it from their configuration.
        for owner in [module, module.config] if isinstance(module, PreTrainedModel) else [module]:
            for name, value in vars(owner).items():
                if not any(noise in name for noise in ("dropout", "layerdrop", "jitter")):
                    continue
                if isinstance(value, float):
                    setattr(owner, name, 0.0)
                elif isinstance(value, dict):  # LoHa and LoKr have one for each adapter
                    value.update({adapter: 0.0 for adapter, rate in value.items() if isinstance(rate, float)})


def cast_by_autocast(model: nn.Module) -> None:
    """Let autocast cast the inputs of LoRA layers, where it is on.

    PEFT casts them to the adapter's float32, and autocast back: the same numbers by two more kernels, and a copy in
    float32 for the gradient. A hook decides at each call, since activation checkpointing calls a layer again later.
    """
    for module in model.modules():
        if isinstance(module, lora.Linear):
            module.register_forward_pre_hook(follow_autocast)


def follow_autocast(layer: lora.Linear, _: object) -> None:
    """Turn off PEFT's cast of a layer's input under autocast. Variants such as DoRA use the input elsewhere, too."""
    autocast = torch.is_autocast_enabled(cast(Tensor, layer.weight).device.type)
    layer.cast_input_dtype_enabled = bool(layer.lora_variant) or not autocast
