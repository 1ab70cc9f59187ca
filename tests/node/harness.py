"""A real node for tests: four processes in a folder of their own, each started, killed and restarted on its own.
Standard library only. Everything is hermetic: its own node name, shared-memory names, sockets, ports and temporary folder."""
import contextlib
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(os.environ.get("HEARTH_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
BIN = pathlib.Path(os.environ.get("HEARTH_BIN_DIR", SOURCE / "build/release/bin"))
SHARED = pathlib.Path(os.environ.get("HEARTH_SHARED_DIR", SOURCE.parent / "shared"))
FABLE = SOURCE / "deploy/models/fable-moe"
SKIP = 77  # ctest's skip code


def skip(reason):
    print("SKIPPED:", reason)
    sys.exit(SKIP)


def free_ports(n):
    sockets = []
    for _ in range(n):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        sockets.append(s)
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(what, condition, timeout=30.0, interval=0.02):
    """Returns condition()'s first true value; fails with the reason after `timeout` seconds."""
    end = time.monotonic() + timeout
    last = None
    while time.monotonic() < end:
        try:
            value = condition()
            if value:
                return value
        except (OSError, http.client.HTTPException, AssertionError) as e:
            last = e
        time.sleep(interval)
    raise AssertionError(f"no {what} within {timeout} s" + (f" ({last!r})" if last else ""))


class Answer:
    """An HTTP answer read whole."""

    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)


class Node:
    """One node. `with Node() as node:` starts all four processes and waits until the router has met both workers."""

    def __init__(self, model=FABLE, config="", start=True, env=None, ready_timeout=60):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="hearth-test-"))
        self.name = f"t{os.getpid()}-{random.randrange(1 << 32):08x}"
        self.http_port, self.grpc_port = free_ports(2)
        self.shm = pathlib.Path("/dev/shm")
        self.env = dict(os.environ, **(env or {}))
        self.processes = {}
        self.logs = {}
        self.ready_timeout = ready_timeout
        self.start_all = start
        sections = {"node": {"name": self.name, "runtime_dir": str(self.dir), "shm_dir": str(self.shm), "log_level": "info"},
                    "model": {"path": str(model), "name": "m"},
                    # Which way a prompt goes is the test's own affair: what was measured before must not change it.
                    "router": {"path_choice": "length", "http_listen": [f"localhost:{self.http_port}"], "grpc_listen": [f"localhost:{self.grpc_port}"]}}
        for line in config.splitlines():  # "router.max_queue = 3"
            if "=" in line:
                key, value = line.split("=", 1)
                table, name = key.strip().split(".")
                sections.setdefault(table, {})[name] = json.loads(value)
        self.config = self.dir / "node.toml"
        self.config.write_text("".join(f"[{t}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in kv.items()) for t, kv in sections.items()))

    def __enter__(self):
        try:
            if self.start_all:
                for kind in ("weightstore", "prefill.0", "decode.0", "router"):
                    self.start(kind)
                self.wait_ready()
                self.wait_worker("prefill.0")
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind, value, trace):
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[name].pid, signal.SIGCONT)
                self.processes[name].kill()
        for process in self.processes.values():
            process.wait()
        for path in self.shm.glob(f"hearth.{self.name}.*"):
            path.unlink()
        if kind is not None and kind is not SystemExit:
            for name, log in self.logs.items():
                text = pathlib.Path(log).read_text(errors="replace")
                print(f"---- {name} log, last lines\n" + "\n".join(text.splitlines()[-25:]), file=sys.stderr)
        shutil.rmtree(self.dir, ignore_errors=True)

    # -- processes
    def start(self, name, extra_env=None, args=()):
        program, _, index = name.partition(".")
        command = [str(BIN / f"hearth-{program}"), "--config", str(self.config), *args]
        if index:
            command += ["--index", index]
        log = self.logs.setdefault(name, str(self.dir / f"{name}.log"))
        with open(log, "ab") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=dict(self.env, **(extra_env or {})))
        return self.processes[name]

    @contextlib.contextmanager
    def supervised(self):
        """All four under `hearth up`, ready; at the end Ctrl-C, which it must obey with exit code 0."""
        self.logs["up"] = str(self.dir / "up.log")
        with open(self.logs["up"], "ab") as out:
            up = subprocess.Popen([str(BIN / "hearth"), "up", "--config", str(self.config), "--quiet"], stderr=out)
        try:
            self.wait_ready()
            yield
            up.send_signal(signal.SIGINT)
            assert up.wait(30) == 0
        finally:
            up.kill()
            up.wait()

    def pid(self, name):
        return self.processes[name].pid

    def signal(self, name, sig):
        os.kill(self.pid(name), sig)

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def terminate(self, name, timeout=20):
        self.processes[name].terminate()
        return self.processes[name].wait(timeout)

    def restart(self, name, extra_env=None):
        self.kill(name)
        return self.start(name, extra_env)

    def log(self, name):
        return pathlib.Path(self.logs[name]).read_text(errors="replace")

    def regions(self):
        return sorted(p.name for p in self.shm.glob(f"hearth.{self.name}.*"))

    def command(self, *args, timeout=60, check=True):
        """`hearth <subcommand> --config ...`; returns (exit code, stdout, stderr)."""
        done = subprocess.run([str(BIN / "hearth"), args[0], "--config", str(self.config), *args[1:]], capture_output=True, text=True, timeout=timeout)
        if check and done.returncode != 0:
            raise AssertionError(f"hearth {' '.join(args)} ended with {done.returncode}: {done.stderr}")
        return done.returncode, done.stdout, done.stderr

    def status(self):
        return json.loads(self.command("status", "--json", check=False)[1])

    def wait_ready(self, timeout=None):
        wait_for("readiness", lambda: self.get("/health").status == 200, timeout or self.ready_timeout)

    def wait_worker(self, name):
        """The node answers as soon as one decode worker is there; this waits until the router has met that one, after each of its deaths anew."""
        def met():
            said = [line for line in self.log("router").splitlines() if f" {name} is " in line]
            return bool(said) and said[-1].endswith(f"{name} is ready")
        wait_for(f"the router meeting {name}", met)

    # -- HTTP
    def request(self, method, path, body=None, headers=None, timeout=120):
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path, **kw):
        return self.request("GET", path, **kw)

    def post(self, path, body, **kw):
        return self.request("POST", path, body, **kw)

    def completion(self, prompt, **options):
        answer = self.post("/v1/completions", {"model": "m", "prompt": prompt, "temperature": 0, **options})
        assert answer.status == 200, (answer.status, answer.body[:400])
        return answer.json()

    def chat(self, content, **options):
        answer = self.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, **options})
        assert answer.status == 200, (answer.status, answer.body[:400])
        return answer.json()

    @contextlib.contextmanager
    def stream(self, path, body, timeout=120):
        """Yields an iterator over the SSE data objects; "[DONE]" ends it. Leaving the block closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps({"model": "m", "stream": True, **body}).encode(), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(f"{response.status}: {response.read()[:400]}")
            yield self._events(response)
        finally:
            connection.close()

    @staticmethod
    def _events(response):
        for raw in response:
            line = raw.rstrip(b"\r\n")
            line.decode("utf-8")  # each line is valid UTF-8
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                return
            yield json.loads(line[6:])

    def idle(self):
        """Nothing queued or running, no page held: what must be so after every request has ended."""
        status = self.status()
        router, store = status["router"], status["weightstore"]
        workers = status["workers"].values()
        return (router and store and all(workers) and router["queued"] == router["prefilling"] == router["decoding"] == 0
                and all(w["running"] == w["waiting"] == 0 for w in workers) and int(store["pool"]["rows"]) == 0)


def run_tests(namespace):
    """Runs every function test_* of a module, prints one line each; exit code 1 if one failed."""
    wanted = sys.argv[1:]
    failed = []
    for name, function in list(namespace.items()):
        if not name.startswith("test_") or (wanted and name not in wanted):
            continue
        start = time.monotonic()
        try:
            function()
            print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except SystemExit:
            raise
        except BaseException as e:  # noqa: BLE001: any failure is reported and the rest still runs
            import traceback
            traceback.print_exc()
            print(f"FAIL {name}: {e}", flush=True)
            failed.append(name)
    print(f"{len(failed)} failed" if failed else "all passed")
    sys.exit(1 if failed else 0)
