"""An engine for tests: answers /health, with --model as much as a Router needs, and misbehaves as its switches say."""

import argparse
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--exit", type=int, help="end at once with this code")
parser.add_argument("--silent", action="store_true", help="never answer")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--children", action="store_true", help="one child in the group, one that left it; both deaf")
parser.add_argument("--nameless", help="one child without an environment; its pid goes into this file")
parser.add_argument("--show", nargs="*", default=[], help="print these variables")
parser.add_argument("--model", help="list this model, answer each chat with this process's id, and show metrics")
parser.add_argument("--answer_when", help="with --model: answer chats once this file is there")
parser.add_argument("--events", help="file that is told when SIGTERM comes")
options = parser.parse_args()

sys.stdout.write(json.dumps({"pid": os.getpid(), **{name: os.environ.get(name) for name in options.show}}) + "\n")
sys.stdout.flush()
sys.stderr.write("to stderr\n")
sys.stderr.flush()
if options.exit is not None:
    sys.exit(options.exit)
SLEEP = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
if options.nameless:
    # So looks a process that has renamed itself over its environment.
    child = subprocess.Popen([sys.executable, "-c", SLEEP], env={}, start_new_session=True)
    pathlib.Path(options.nameless).write_text(str(child.pid))
if options.children:
    subprocess.Popen([sys.executable, "-c", SLEEP])
    subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)


def on_term(*_: object) -> None:
    if options.events:
        with pathlib.Path(options.events).open("a") as file:
            file.write("engine told to stop\n")
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else on_term)
if options.silent:
    time.sleep(600)


running = 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(str(os.getpid()))
        elif self.path == "/v1/models" and options.model:
            self.answer(json.dumps({"object": "list", "data": [{"id": options.model, "object": "model"}]}))
        elif self.path == "/metrics" and options.model:
            self.answer(f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n")
        else:
            self.answer("", 404)

    def do_POST(self) -> None:
        global running  # noqa: PLW0603 - a whole server in a page
        running += 1
        self.rfile.read(int(self.headers["content-length"]))
        while options.answer_when and not pathlib.Path(options.answer_when).exists():
            time.sleep(0.02)
        message = {"role": "assistant", "content": str(os.getpid())}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer(json.dumps({"id": "x", "object": "chat.completion", "model": options.model, "choices": [choice]}))
        running -= 1

    def answer(self, text: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
