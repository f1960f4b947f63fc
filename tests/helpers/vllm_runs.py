"""What the tests with vLLM share: its environment, a base that it loads, and a server that can be killed."""

import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from transformers import GenerationConfig

from helpers.processes import free_port
from helpers.tiny import tiny_model

# Read when vLLM is imported, and by the servers that are started here.
if find_spec("vllm"):
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # with fewer processes a server starts sooner
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

ENGINE = {"enforce_eager": True, "max_model_len": 256}
# vLLM's prefix cache holds whole blocks, of 128 tokens on a CPU: shorter prompts never meet it.
PROMPTS = Dataset.from_list([{"prompt": p} for p in ("请问1+2=", "1+" * 70 + "2=", "3+4=", "12+3=" * 30)])


def save_base(folder: str) -> str:
    """A base with heads wide enough for vLLM, and a generation config that would show if it leaked in."""
    base = tiny_model(hidden_size=64, max_position_embeddings=512)
    base.generation_config = GenerationConfig(do_sample=True, top_k=2, repetition_penalty=5.0, eos_token_id=1)
    base.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


class Server:
    """vLLM's server on the loopback device, started by the command that `ServerEngine`'s errors print.

    Args:
        command: the printed command.
        log: the file for the server's output.
    """

    def __init__(self, command: str, log: Path):
        port = free_port()
        variable, python, *arguments = shlex.split(command)
        assert python == "python"
        self.environment = os.environ | dict([variable.split("=", 1)])
        self.command = [sys.executable, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self.command += ["--enforce-eager", "--max-model-len", str(ENGINE["max_model_len"])]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        """Begin to start it."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        while self.process.poll() is None:
            try:
                urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"the server ended: {self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """Without warning, with the processes that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None
