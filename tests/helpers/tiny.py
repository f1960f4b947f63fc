"""Tiny models and tokenizers with random weights; nothing is downloaded."""

import torch
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MllamaForCausalLM,
    MllamaTextConfig,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'user' %}？{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}，{% endif %}"
)


# Two layers, and random weights that are large enough for a distribution with some shape.
SHAPE = {
    **{"vocab_size": 26, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3},
    **{"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}


def tiny_model(seed: int = 0, **config) -> LlamaForCausalLM:
    set_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **config}))


def ragged_model() -> LlamaForCausalLM:
    """One whose completions often end early, so that several processes hold completions of other lengths."""
    made = tiny_model(seed=1)
    made.generation_config.eos_token_id = list(range(1, 8))
    return made


def lora(**changes) -> LoraConfig:
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**config, **changes})


LORA = lora()


def scorer(num_labels: int = 1, vocab_size: int = 26, **config) -> LlamaForSequenceClassification:
    set_seed(5)
    base = tiny_model().config.to_dict()
    made = LlamaForSequenceClassification(
        LlamaConfig(**{**base, "num_labels": num_labels, "vocab_size": vocab_size, **config})
    )
    torch.nn.init.normal_(made.score.weight)
    return made


def other_tokenizer(padding_side: str, pad_token: str) -> PreTrainedTokenizerFast:
    """The same characters under other ids, from the end of the vocabulary on."""
    alphabet = ["<end>", "<void>", *reversed("0123456789+=请问？是的不对，等于！")]
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<void>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad_token, eos_token="<end>", padding_side=padding_side
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_gpt2(**config):
    """Absolute positions and dropout, both of which can break the equality of two passes."""
    set_seed(0)
    defaults = {"vocab_size": 26, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(**{**defaults, "eos_token_id": 1, **config}))


def tiny_qwen3() -> PreTrainedModel:
    return tiny_of_type("qwen3", head_dim=16)


def tiny_opt(**more):
    """Keeps dropout as a number, in the decoder and in each layer; untied in train mode as from_config leaves it."""
    set_seed(0)
    config = OPTConfig(vocab_size=26, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=2)
    config.update({"max_position_embeddings": 64, "init_std": 0.3, "eos_token_id": 1, "pad_token_id": 0})
    config.update({"word_embed_proj_dim": 32, "bos_token_id": None, "dropout": 0.3, **more})
    return OPTForCausalLM(config)


# What architectures of unusual layers need, by their type.
UNUSUAL_LAYERS = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_h1": {
        **{"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    },
    "nemotron_h": {
        **{"layer_types": ["mamba", "attention"], "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16},
        **{"n_groups": 1, "chunk_size": 8, "head_dim": 16},
    },
    "llama4_text": {"intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 16, "attention_chunk_size": 16},
    "mllama_text_model": {"cross_attention_layers": [], "bos_token_id": 2},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 128},
    "bart": {
        **{"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
        **{"is_decoder": True, "is_encoder_decoder": False, "init_std": 0.3},
    },
    "minimax": {"head_dim": 16, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]},
}


def tiny_of_type(name: str, **config) -> PreTrainedModel:
    """A causal language model of any architecture."""
    set_seed(0)
    fields = {**SHAPE, "num_key_value_heads": 1, **UNUSUAL_LAYERS.get(name, {}), **config}
    if name == "mllama_text_model":
        return MllamaForCausalLM(MllamaTextConfig(**fields))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields))


def tiny_vision_model(name: str, **text) -> PreTrainedModel:
    """A vision-language model, whose text part alone is of interest."""
    set_seed(0)
    text = {**tiny_model().config.to_dict(), "head_dim": 16, **text}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision, image_token_id=24, video_token_id=25)
    return AutoModelForImageTextToText.from_config(config)


# What mixtures of experts need, by their type.
EXPERTS = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "rope_parameters": {"rope_type": "default"}},
}


def tiny_experts(kind: str, routed: bool = True, **config) -> PreTrainedModel:
    """A mixture of four experts, two of them for a token."""
    routing = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5, "output_router_logits": routed}
    return tiny_of_type(kind, head_dim=16, **EXPERTS[kind], **routing, **config)
