"""Token traces: what actor, reference, reward and critic put out for a completion, token by token.

`TokenTable` shows one completion, `TokenTraceCallback` records some of them during a run, and

    python -m hfppo.token_trace out/checkpoint-120 "请问1+1=2？"

shows what a checkpoint says about a prompt.
"""

from hfppo.token_trace.callback import TokenTraceCallback
from hfppo.token_trace.table import TokenRow, TokenTable

__all__ = ["TokenRow", "TokenTable", "TokenTraceCallback"]
