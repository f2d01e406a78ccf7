"""Stands in for `vllm serve` in tests of the agent: a worker process of its own, and an API on rank 0.

Files in the folder of the first argument steer it: `hang` makes completions hang, `fail` ends it with an exception.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

folder, rank, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if sys.argv[4:] == ["worker"]:
    time.sleep(600)
if (folder / "fail").exists():
    print("Traceback (most recent call last):\nValueError: Free memory on device is less than desired", flush=True)
    sys.exit(1)
print(f"generation {os.environ['SPARKPAIR_GENERATION']} of rank {rank}", flush=True)
# A shell of `exec -a` gives the worker the name that vLLM's children give themselves.
worker = subprocess.Popen(
    ["bash", "-c", f"exec -a VLLM::Worker_TP{rank} {sys.executable} {__file__} {folder} {rank} {port} worker"]
)
(folder / f"worker-{rank}").write_text(str(worker.pid))
print("Loading safetensors checkpoint shards:  43% Completed", flush=True)


class Handler(BaseHTTPRequestHandler):
    steps = 0
    in_flight = 0

    def send(self, body: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if Path(os.environ["SPARKPAIR_DRAINING"]).exists():
            self.send(json.dumps({"error": "stopped", "in_flight": Handler.in_flight}), 503)
        elif self.path == "/metrics":
            busy = int((folder / "hang").exists())
            self.send(f'vllm:num_requests_running{{e="0"}} {busy}.0\nvllm:generation_tokens_total {Handler.steps}\n')
        else:
            self.send(json.dumps({"data": [{"max_model_len": 64}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.in_flight += 1
        while (folder / "hang").exists():
            time.sleep(0.1)
        Handler.in_flight -= 1
        Handler.steps += 1
        self.send(json.dumps({"choices": [{"text": "hello"}]}))

    def log_message(self, *args: object) -> None:
        pass


ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
time.sleep(0.5)
if rank == 0:
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
worker.wait()
time.sleep(600)
