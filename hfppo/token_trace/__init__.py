"""Token traces: the numbers of actor, reference, reward and critic for each token of a completion.

`TokenTable` shows one completion, `TokenTraceCallback` records some completions during a run, and

    python -m hfppo.token_trace out "请问1+1=2？"

shows the numbers of a run's last checkpoint for a prompt.
"""

from hfppo.reporting.token_table import TokenTable
from hfppo.token_trace.callback import TokenTraceCallback

__all__ = ["TokenTable", "TokenTraceCallback"]
