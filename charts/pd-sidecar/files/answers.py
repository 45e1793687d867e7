"""`helm test`: does the decode Service answer, and what did the sidecar decide? Takes the Service's URL."""

import json
import ssl
import sys
import urllib.request

base = sys.argv[1]
tls = ssl._create_unverified_context()  # whose certificate it is, clients check by the names that they use
with urllib.request.urlopen(base + "/v1/models", timeout=30, context=tls) as answer:
    model = json.load(answer)["data"][0]["id"]
body = json.dumps({"model": model, "prompt": "One token, please:", "max_tokens": 1}).encode()
request = urllib.request.Request(base + "/v1/completions", body, {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=300, context=tls) as answer:
    tokens = json.load(answer)["usage"]["completion_tokens"]
    decision = answer.headers["x-pd-decision"] or "not said (--decision-header off?)"
print(f"{model}: {tokens} token, decision: {decision}")
sys.exit(tokens != 1)
