"""Cells live and die as one, and nothing outlives its launcher."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from fleet_support import Fleet, alive, engine, joining, port_of, until


def test_cells_come_up_and_go_down(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    events = tmp_path / "events"
    chat = engine("--events", str(events), "--show", "COLOUR", "PULSING_LAUNCHER_SAYS", join=joining(events))
    fleet.write({**chat, "env": {"COLOUR": "c${cell}-${worker}"}}, engine(name="plain", cells=2))
    fleet.up(env={"PULSING_LAUNCHER_SAYS": "hello"})
    chat_cell = fleet.wait("chat/0", joined=True)
    plain = [fleet.wait(f"plain/{at}") for at in (0, 1)]
    # Three cells, three ports, all of them really theirs.
    ports = {port_of(cell) for cell in (chat_cell, *plain)}
    assert len(ports) == 3
    for cell in (chat_cell, *plain):
        with urllib.request.urlopen(f"http://127.0.0.1:{port_of(cell)}/health", timeout=5) as answer:
            assert answer.read().decode() == str(cell["pids"]["0"])
    # The environment is the launcher's and the spec's; both streams are in the cell's log.
    assert '"COLOUR": "c0-0", "PULSING_LAUNCHER_SAYS": "hello"' in fleet.log("chat/0")
    assert "to stderr" in fleet.log("chat/0")
    shown = fleet.run("logs", "chat/0/0")
    assert shown.returncode == 0
    assert "chat/0/0 g1 | to stderr" in shown.stdout
    table = fleet.run("ps")
    assert table.returncode == 0, table.stderr
    assert "plain/1  ready" in table.stdout
    # A second launcher is told who runs it.
    assert fleet.launcher is not None
    second = fleet.run("up")
    assert (second.returncode, second.stdout) == (1, "")
    assert f"runs already, launched by pid {fleet.launcher.pid}" in second.stderr
    down = fleet.run("down")
    assert down.returncode == 0, down.stderr
    assert fleet.launcher.wait(5) == 0
    assert fleet.processes() == []
    # The cell had left the cluster before its engine was told to stop.
    lines = events.read_text().splitlines()
    pid, port = chat_cell["pids"]["0"], port_of(chat_cell)
    assert lines == [f"joined 127.0.0.1:1 worker http://127.0.0.1:{port} {pid}", "left", "engine told to stop"]
    gone = fleet.run("ps")
    assert gone.returncode == 1
    assert "does not run" in gone.stderr
    again = fleet.run("down")
    assert again.returncode == 0
    assert "does not run" in again.stderr


def test_a_fleet_goes_on_when_nobody_reads_what_it_says(fleet: Fleet) -> None:
    fleet.write(engine(cells=2))
    read, write = os.pipe()
    fleet.launcher = subprocess.Popen(fleet.words("up"), stdout=write, stderr=write, env=fleet.env(None))
    os.close(read)
    os.close(write)
    for at in (0, 1):
        assert fleet.wait(f"chat/{at}")["restarts"] == 0
    down = fleet.run("down")
    assert down.returncode == 0, down.stderr
    assert fleet.processes() == []


def test_a_killed_worker_restarts_its_whole_cell(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    events = tmp_path / "events"
    fleet.write(engine("--children", workers=2, join=joining(events), stop={"term": 0.5}), engine(name="other"))
    fleet.up()
    before = fleet.wait("chat/0", joined=True)
    other = fleet.wait("other/0")
    assert len(before["pids"]) == 2
    old = [pid for pid in fleet.processes() if pid != other["pids"]["0"]]
    # Two workers, two children each, the join process.
    assert len(old) == 7
    os.kill(before["pids"]["1"], signal.SIGKILL)
    after = fleet.wait("chat/0", generation=2, joined=True)
    assert not [pid for pid in old if alive(pid)], "two generations of a cell run together"
    assert set(after["pids"].values()).isdisjoint(before["pids"].values())
    assert after["restarts"] == 1
    # The others' commands may hold this cell's address: it keeps it.
    assert after["addrs"] == before["addrs"]
    assert fleet.wait("other/0")["pids"] == other["pids"]
    assert "worker 1 was killed by SIGKILL" in fleet.said.read_text()
    both = fleet.run("logs", "chat/0/0", "--all_generations")
    assert "g1 | " in both.stdout
    assert "g2 | " in both.stdout
    assert fleet.run("down").returncode == 0
    assert fleet.processes() == []


def test_nothing_survives_the_launcher(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    fleet.write(engine("--deaf", "--children", cells=2, join=joining(tmp_path / "events")))
    fleet.up()
    for at in (0, 1):
        fleet.wait(f"chat/{at}", joined=True)
    assert len(fleet.processes()) == 8
    assert fleet.launcher is not None
    fleet.launcher.kill()
    fleet.launcher.wait()
    until(lambda: not fleet.processes(), "all processes gone", within=5.0)


def guardians_of(launcher: int) -> list[int]:
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"_guardian.py" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_guardian_leaves_nothing_and_the_cell_comes_back(fleet: Fleet) -> None:
    nameless = fleet.directory / "nameless"
    fleet.write(engine("--deaf", "--children", "--nameless", str(nameless)), stop={"term": 0.5})
    fleet.up()
    fleet.wait("chat/0")
    old = [*fleet.processes(), int(nameless.read_text())]
    assert len(set(old)) == 4
    assert fleet.launcher is not None
    (guardian,) = guardians_of(fleet.launcher.pid)
    os.kill(guardian, signal.SIGKILL)
    fleet.wait("chat/0", generation=2)
    assert not [pid for pid in old if alive(pid)]
    assert "its guardian was killed" in fleet.said.read_text()


def test_the_next_start_finds_what_guardian_and_launcher_left(fleet: Fleet) -> None:
    nameless = fleet.directory / "nameless"
    fleet.write(engine("--deaf", "--children", "--nameless", str(nameless)), stop={"term": 0.5})
    fleet.up()
    fleet.wait("chat/0")
    hidden = int(nameless.read_text())
    assert fleet.launcher is not None
    (guardian,) = guardians_of(fleet.launcher.pid)
    old = fleet.processes()
    # Stopped first, so that neither can act on the other's death.
    os.kill(fleet.launcher.pid, signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    fleet.launcher.kill()
    fleet.launcher.wait()
    # The worker itself goes with its guardian; what it started stays.
    main = fleet.cell("chat/0")["pids"]["0"]
    until(lambda: not alive(main), "the worker is gone")
    assert len(fleet.processes()) == len(old) - 1
    assert alive(hidden)
    fleet.up()
    until(lambda: not [pid for pid in (*old, hidden) if alive(pid)], "the old run's processes are gone")
    fleet.wait("chat/0")
    until(lambda: "an earlier run left behind" in fleet.said.read_text(), "it says so")


def test_a_deaf_cell_is_killed_and_a_second_signal_hurries(fleet: Fleet) -> None:
    fleet.write(engine("--deaf", "--children"), stop={"drain": 0.0, "term": 30.0})
    fleet.up()
    fleet.wait("chat/0")
    assert fleet.launcher is not None
    fleet.launcher.send_signal(signal.SIGINT)
    fleet.wait("chat/0", "stopping")
    began = time.monotonic()
    fleet.launcher.send_signal(signal.SIGINT)
    assert fleet.launcher.wait(10) == 0
    assert time.monotonic() - began < 5
    assert fleet.processes() == []


def test_a_cell_that_keeps_crashing_is_given_up(fleet: Fleet) -> None:
    fleet.write(engine("--exit", "3"), restart={"budget": 2, "backoff": 0.02, "jitter": 0.0})
    fleet.up()
    assert fleet.launcher is not None
    assert fleet.launcher.wait(20) == 1
    cell = fleet.cell("chat/0")
    assert (cell["state"], cell["generation"], cell["restarts"]) == ("failed", 3, 2)
    assert "chat/0: worker 0 exited with 3; logs: " in fleet.said.read_text()
    assert "to stderr" in fleet.log("chat/0")
    assert len(list((fleet.state / "test" / "logs").glob("chat.0.0.g*.log"))) == 3


def test_restart_never_and_logs_of_old_generations(fleet: Fleet) -> None:
    fleet.write(engine("--exit", "0", restart={"when": "never"}))
    fleet.up()
    assert fleet.launcher is not None
    assert fleet.launcher.wait(20) == 1
    assert fleet.cell("chat/0")["generation"] == 1
    fleet.write(engine("--exit", "0"), restart={"budget": 4, "backoff": 0.01}, keep_generations=2)
    fleet.up()
    assert fleet.launcher.wait(20) == 1
    kept = sorted(path.name for path in (fleet.state / "test" / "logs").glob("*"))
    assert kept == ["chat.0.0.g4.log", "chat.0.0.g5.log"]
    # The run before keeps its last words.
    assert [path.name for path in (fleet.state / "test" / "logs.previous").glob("*")] == ["chat.0.0.g1.log"]


def test_logs_are_where_the_file_says_and_where_they_cannot_be_nothing_starts(fleet: Fleet) -> None:
    fleet.write(engine(), log_dir=str(fleet.directory / "elsewhere"))
    fleet.up()
    log = pathlib.Path(fleet.wait("chat/0")["logs"]["0"])
    assert log.parent == fleet.directory / "elsewhere" / "test"
    assert f"logs below {log.parent}\n" in fleet.said.read_text()
    assert fleet.run("down").returncode == 0

    (fleet.directory / "file").touch()
    fleet.write(engine(), log_dir=str(fleet.directory / "file" / "logs"))
    result = fleet.run("up")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"Not a directory: '{fleet.directory}/file/logs/test'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_not_ready_in_time(fleet: Fleet) -> None:
    fleet.write(engine("--silent", ready={"within": 0.5, "every": 0.05}, restart={"when": "never"}))
    fleet.up()
    assert fleet.launcher is not None
    assert fleet.launcher.wait(20) == 1
    assert "chat/0: not ready within 0.5 s: 127.0.0.1:" in fleet.said.read_text()
    assert fleet.processes() == []


def test_a_join_process_that_dies_comes_back_without_its_engine(fleet: Fleet, tmp_path: pathlib.Path) -> None:
    events = tmp_path / "events"
    fleet.write(engine(join=joining(events)))
    fleet.up()
    before = fleet.wait("chat/0", joined=True)
    until(events.exists, "joined")
    joined = [pid for pid in fleet.processes() if pid != before["pids"]["0"]]
    assert len(joined) == 1
    os.kill(joined[0], signal.SIGKILL)
    until(lambda: events.read_text().count("joined") == 2, "joined again")
    after = fleet.wait("chat/0", joined=True)
    assert (after["generation"], after["pids"]) == (1, before["pids"])


def test_an_occupied_fixed_port_is_refused_and_its_holder_named(fleet: Fleet) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        fixed = engine() | {"ports": [{"name": "primary", "static_port": port}]}
        fleet.write(fixed, engine(name="other"))
        result = fleet.run("up")
        assert (result.returncode, result.stdout) == (1, "")
        assert f"port {port} is taken by pid {os.getpid()} (" in result.stderr
        assert not (fleet.state / "test" / "logs").exists(), "something was started all the same"
    fleet.up()
    assert port_of(fleet.wait("chat/0")) == port


def test_a_stolen_port_moves_and_is_not_the_engines_fault(fleet: Fleet) -> None:
    thief = (
        "import socket, sys, time\n"
        "while True:\n"
        "    try:\n"
        "        s = socket.create_server(('', int(sys.argv[1])), reuse_port=False); break\n"
        "    except OSError:\n"
        "        time.sleep(0.001)\n"
        "print('got it', flush=True)\n"
        "time.sleep(600)\n"
    )
    # The first start of the worker says which port it has, and waits until the thief is there.
    slow_start = (
        "import os, pathlib, sys, time\n"
        "mark, want, rest = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]\n"
        "if not mark.exists():\n"
        "    pathlib.Path(str(mark) + '.port').write_text(want)\n"
        "    while not mark.exists():\n"
        "        time.sleep(0.01)\n"
        "os.execvp(rest[0], rest)\n"
    )
    mark = fleet.directory / "stolen"
    chat = engine(restart={"budget": 0})
    chat["run"] = ["python3", "-c", slow_start, str(mark), "${port.primary}", *chat["run"]]
    fleet.write(chat)
    fleet.up()
    wanted = pathlib.Path(f"{mark}.port")
    until(lambda: wanted.exists() and wanted.read_text(), "the worker runs")
    port = int(wanted.read_text())
    taken = subprocess.Popen([sys.executable, "-c", thief, str(port)], stdout=subprocess.PIPE)
    try:
        assert taken.stdout is not None
        assert taken.stdout.readline() == b"got it\n"
        mark.touch()
        after = fleet.wait("chat/0", generation=2)
        assert port_of(after) != port
        assert after["restarts"] == 0
        assert "its port was taken by somebody else" in fleet.said.read_text()
    finally:
        taken.kill()
        taken.communicate()


def test_a_closed_port_answers_nobody(fleet: Fleet) -> None:
    fleet.write(engine())
    fleet.up()
    port = port_of(fleet.wait("chat/0"))
    fleet.run("down")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
