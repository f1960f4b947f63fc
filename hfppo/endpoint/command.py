"""A command as an agent."""

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")  # variables of this process that a command gets
SHOWN = 2000  # characters of a failed command's errors


@dataclass(frozen=True)
class Command:
    """A command that plays an episode: an agent in any language, in a process of its own.

        PPOTrainer(agent=Command(["python", "solve.py"]), …)

    It gets the row as JSON on its standard input, `seed` and `episode_seed` included, and the policy's address and key
    as `OPENAI_BASE_URL` and `OPENAI_API_KEY`, and by Anthropic's names. The last line of its output is the reward, as
    JSON; other text is the episode's output. When it ends or takes too long, the processes that it has started are
    killed.

    Args:
        argv: program and arguments; no shell reads them.
        env: further environment variables. Of this process's it gets `PATH`, `HOME`, `LANG`, `TMPDIR` and
            `VIRTUAL_ENV` only, so that no token leaks.
    Raises:
        TypeError: `argv` is not a list of texts.
    """

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.argv, str) or not self.argv or not all(isinstance(part, str) for part in self.argv):
            raise TypeError(f"Command({self.argv!r}): give the program and its arguments as a list of texts")

    async def __call__(self, /, base_url: str, api_key: str, seed: int, episode_seed: int, **row: Any) -> object:
        """Play an episode, and return its reward or output.

        Raises:
            OSError, RuntimeError: the command cannot be started, or fails.
        """
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        variables |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        variables |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key, **self.env}
        # Files, because a process that outlives the command would keep pipes open.
        with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
            given.write(json.dumps({"seed": seed, "episode_seed": episode_seed, **row}, default=str).encode())
            given.seek(0)
            started = await asyncio.create_subprocess_exec(
                *self.argv, stdin=given, stdout=output, stderr=errors, env=variables, start_new_session=True
            )
            try:
                code = await started.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
            said, complaints = read_text(output), read_text(errors)
        if code:
            raise RuntimeError(f"{self.argv} ended with exit code {code}: {complaints[-SHOWN:]}")
        *_, last = said.splitlines() or [""]
        try:
            return json.loads(last)
        except ValueError:
            return last


def read_text(file: IO[bytes]) -> str:
    """Return the text of a file, from its beginning."""
    file.seek(0)
    return file.read().decode(errors="replace").strip()
