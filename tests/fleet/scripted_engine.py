"""An engine for tests: answers /health, and misbehaves as its switches say."""

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
parser.add_argument("--show", nargs="*", default=[], help="print these variables")
parser.add_argument("--events", help="file that is told when SIGTERM comes")
options = parser.parse_args()

sys.stdout.write(json.dumps({"pid": os.getpid(), **{name: os.environ.get(name) for name in options.show}}) + "\n")
sys.stdout.flush()
sys.stderr.write("to stderr\n")
sys.stderr.flush()
if options.exit is not None:
    sys.exit(options.exit)
SLEEP = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
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


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
