"""What comes over bare sockets: cut at every border, pipelined, half closed, slow; and what goes out (S3)."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from house import House
from profiles import TEXT

BODY = json.dumps({"model": "actor", "messages": [{"role": "user", "content": TEXT}]}, ensure_ascii=False).encode()
STREAMED = BODY.replace(b"{", b'{"stream": true, ', 1)


def request(body: bytes = BODY, *, path: str = "/v1/chat/completions", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Connection:
    """One socket, and the responses that come over it."""

    def __init__(self, house: House) -> None:
        host, port = house.addr.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def response(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self.file.readline().split(b" ")[1])
        fields: dict[str, str] = {}
        while (line := self.file.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            fields[name] = value
        if status < 200:
            # Interim: a client of HTTP/1.1 waits for the next one.
            return self.response()
        if fields.get("transfer-encoding") == "chunked":
            return status, fields, b"".join(self.chunks())
        return status, fields, self.file.read(int(fields.get("content-length", 0)))

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.file.readline(), 16):
            yield self.file.read(size + 2)[:-2]
        self.file.readline()

    def text(self) -> str:
        status, _, body = self.response()
        assert status == 200, body
        return str(json.loads(body)["choices"][0]["message"]["content"])


@pytest.fixture
def connection(house: House) -> Iterator[Connection]:
    opened = Connection(house)
    yield opened
    opened.file.close()
    opened.socket.close()


def test_a_request_may_be_cut_at_every_border(connection: Connection) -> None:
    whole = request()
    for cut in range(1, len(whole)):
        connection.send(whole[:cut])
        connection.send(whole[cut:])
        assert connection.text() == TEXT, cut


def test_a_request_may_come_byte_by_byte_and_chunked(connection: Connection) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for byte in head + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n":
        connection.send(bytes((byte,)))
    assert connection.text() == TEXT


def test_pipelined_requests_are_answered_in_order(connection: Connection) -> None:
    words = [f"number-{number}" for number in range(8)]
    connection.send(b"".join(request(BODY.replace(TEXT.encode(), word.encode())) for word in words))
    assert [connection.text() for _ in words] == words


def test_a_client_that_has_said_all_may_close_its_side(connection: Connection) -> None:
    connection.send(request(more="connection: close\r\n"))
    connection.socket.shutdown(socket.SHUT_WR)
    assert connection.text() == TEXT


def test_a_slow_reader_gets_every_event(connection: Connection) -> None:
    words = " ".join(f"w{number}" for number in range(300))
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.send(request(STREAMED.replace(TEXT.encode(), words.encode())))
    status = connection.file.readline()
    while connection.file.readline().strip():
        pass
    assert b" 200 " in status
    out = b""
    for number, chunk in enumerate(connection.chunks()):
        out += chunk
        if number < 5:
            time.sleep(0.02)  # the worker runs ahead of this reader
    events = out.decode().split("\n\n")
    assert (events[-2], events[-1]) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == words


def test_the_head_of_a_stream_keeps_proxies_from_gathering_it(connection: Connection) -> None:
    connection.send(request(STREAMED))
    status, fields, _ = connection.response()
    assert status == 200
    assert fields["content-type"].startswith("text/event-stream")
    assert (fields["cache-control"], fields["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-length" not in fields
    assert fields["x-request-id"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model":', 400),
        (b"", 400),
        (b'{"model":"nope","messages":[{}]}', 404),
        (b'{"model":"actor","messages":[]}', 400),
        (b'{"model":"actor","messages":[{"role":"user","content":"x"}],"n":0}', 400),
        (b'{"model":"actor","messages":[{"role":"user","content":"\xff"}]}', 400),
        (b'{"model":"actor","messages":[{"role":"user","content":[{"type":"thinking"}]}]}', 400),
    ],
)
def test_an_error_has_four_fields_and_the_connection_lives_on(connection: Connection, body: bytes, status: int) -> None:
    connection.send(request(body))
    answered, fields, text = connection.response()
    error = json.loads(text)["error"]
    assert (answered, fields["content-type"]) == (status, "application/json")
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], type(error["message"])) == ("invalid_request_error", str)
    connection.send(request())
    assert connection.text() == TEXT


def test_nulls_and_unknown_fields_pass_everywhere(connection: Connection) -> None:
    nulls = ("stream", "stop", "n", "seed", "tools", "tool_choice", "logprobs", "top_logprobs", "temperature", "top_p")
    nulls += ("max_tokens", "max_completion_tokens", "response_format", "stream_options", "user", "logit_bias")
    nulls += ("presence_penalty", "frequency_penalty", "parallel_tool_calls", "reasoning_effort", "metadata", "store")
    extra = {**dict.fromkeys(nulls), "foo": {"deep": [1, None]}, "service_tier": "auto"}
    body = json.dumps({**json.loads(BODY), **extra}).encode()
    connection.send(request(body))
    assert connection.text() == TEXT


def test_paths_are_forgiven_and_methods_are_told(connection: Connection) -> None:
    for path in ("/chat/completions", "/v1/chat/completions/", "/v1/chat/completions"):
        connection.send(request(path=path))
        assert connection.text() == TEXT
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/", 200),
        ("OPTIONS", "/v1/embeddings", 204),
    ):
        connection.send(f"{method} {path} HTTP/1.1\r\nhost: x\r\norigin: http://a\r\n\r\n".encode())
        answered, fields, body = connection.response()
        assert answered == status, (method, path, body)
        assert status != 405 or "POST" in fields["allow"]
