"""Scores from a server: a judge or a reward model that runs elsewhere, behind one HTTP address.

    reward_funcs=[right_answer, RewardServer("http://127.0.0.1:8100/score", columns=["answer"])]

The server gets JSON by POST, {"prompts": […], "completions": […], "answer": […]}, and answers {"scores": […]}: a
number for each completion, or null to leave the row out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tenacity import stop_after_attempt

from hfppo.rewards.reward_func import BatchReward, Text
from hfppo.support.calls import wait_for
from hfppo.support.http_client import Endpoint, ServerError
from hfppo.support.secrets import hide_in_url


class RewardServer(BatchReward):
    """A server that follows the contract of `hfppo.rewards.reward_func`; it answers while the models compute.

    Args:
        url: its address, http:// or https://; requests go to exactly that.
        columns: further columns of the dataset to send.
        batch_size: completions per request.
        timeout: seconds until an answer must be complete.
        max_retries: further attempts after the first; pauses grow from 0.2 to 5 seconds.
        max_concurrency: concurrent requests per process.
        headers: request headers, such as Authorization; never logged or saved.
        name: its name in metrics.

    Raises:
        ValueError: an argument outside its range.
    """

    def __init__(
        self,
        url: str,
        columns: Sequence[str] = (),
        batch_size: int = 16,
        timeout: float = 60.0,
        max_retries: int = 5,
        max_concurrency: int = 8,
        headers: Mapping[str, str] | None = None,
        name: str = "reward_server",
    ):
        if batch_size < 1 or max_retries < 0:
            raise ValueError(f"batch_size={batch_size} must be 1 or more, max_retries={max_retries} 0 or more")
        self.endpoint = Endpoint(url, timeout, stop_after_attempt(max_retries + 1), max_concurrency, headers)
        self.columns, self.batch_size, self.__name__ = list(columns), batch_size, name

    async def __call__(
        self, /, prompts: Sequence[Text], completions: Sequence[Text], **kwargs: Any
    ) -> list[float | None]:
        """Return one score per completion.

        Raises:
            ServerError: the server cannot be reached, or its answer breaks the protocol.
            KeyError: a column is missing from the dataset.
            TypeError, ValueError: JSON cannot encode a value.
        """
        sent = {"prompts": prompts, "completions": completions, **{column: kwargs[column] for column in self.columns}}
        starts = range(0, len(prompts), self.batch_size)
        bodies = [{key: rows[i : i + self.batch_size] for key, rows in sent.items()} for i in starts]
        answers = await self.endpoint.post_all("", bodies)
        return [
            score
            for body, answer in zip(bodies, answers, strict=True)
            for score in self._scores(answer, len(body["prompts"]))
        ]

    def check(self) -> None:
        """Ask for the scores of no completions, so that a wrong address fails before the run.

        Raises:
            ServerError: the server cannot be reached, or its answer is not an empty list of scores.
        """
        body: dict[str, list] = {key: [] for key in ("prompts", "completions", *self.columns)}
        self._scores(wait_for(lambda: self.endpoint.post_all("", [body]))[0], 0)

    def _scores(self, answer: object, wanted: int) -> list[float | None]:
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list) or len(scores) != wanted:
            raise ServerError(
                f"{hide_in_url(self.endpoint.url)} answered {str(answer)[:200]!r} for {wanted} completions; "
                'it must answer {"scores": [one number or null for each]}'
            )
        return scores
