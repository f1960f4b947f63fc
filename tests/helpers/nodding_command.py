"""An agent as a command: says "yes" to two answers; the reward is the share of vowels in the last."""

import json
import os
import sys
from urllib.request import Request, urlopen

messages, reward = json.load(sys.stdin)["prompt"], 0.0
for _ in range(2):
    request = Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as response:
        choice = json.load(response)["choices"][0]
    text = choice["message"]["content"] or ""
    reward = sum(letter in "aeiou" for letter in text) / max(len(text), 1)
    if choice["finish_reason"] == "length":
        break
    messages += [choice["message"], {"role": "user", "content": "yes"}]
print(reward)
