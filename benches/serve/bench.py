#!/usr/bin/env python3
"""How much more 64 clients get of a server than one: `python benches/serve/bench.py --dreamc target/release/dreamc`.

Trains `model.yaml` for a step, serves it, and asks for texts of a fixed length: first one after another, then from many
clients at once. Prints tokens a second, latencies, the ratio, and ends with an error where that is below `--at-least`.

`--soak SECONDS` sends random clients to a smaller model instead: some lie, some stall, some vanish, some read slowly, some begin
alike. It prints memory every minute, and at the end whether it was flat (`flat` has the bound) and what was lost. It ends
with an error if memory grew (judged from ten minutes on), a row or a cache is still taken, or an honest text changed or was not answered.
"""

import argparse
import http.client
import json
import pathlib
import random
import socket
import statistics
import subprocess
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent


class Server:
    def __init__(self, dreamc, run, *more):
        self.process = subprocess.Popen([dreamc, "serve", run, "--port", "0", *more], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        print(line.strip())
        self.address = line.split("http://")[1].split(": ")[0]

    def ask(self, body, timeout=600):
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())

    def metric(self, name):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"dreamc_{name} "))

    def resident(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def load(server, clients, texts, tokens):
    """Tokens a second and seconds of each text, for so many clients with so many texts each."""
    seconds, written = [], []

    def client(number):
        for i in range(texts):
            begun = time.monotonic()
            prompt = f"Client {number} asks for text {i}: "
            status, answer = server.ask({"prompt": prompt, "max_tokens": tokens, "temperature": 0})
            assert status == 200, answer
            seconds.append(time.monotonic() - begun)
            written.append(answer["usage"]["completion_tokens"])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begun = time.monotonic()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return sum(written) / (time.monotonic() - begun), sorted(seconds)


def flat(memory):
    """Whether the last quarter of some samples is no larger than the second, in median and at most: up to a twentieth and 8 MB."""
    quarter = len(memory) // 4
    early, late = memory[quarter : 2 * quarter], memory[-quarter:]
    return quarter == 0 or all(of(late) <= 1.05 * of(early) + 8 for of in (statistics.median, max))


def soak(server, length):
    """Random clients for so many seconds."""
    begun, wrong, counts = time.monotonic(), [], {}
    until = begun + length
    # Short, and with a beginning that caches hold of others.
    beginning = "The quick brown fox jumps over the lazy dog. " * 4
    honest = [{"prompt": prompt, "max_tokens": 24, "temperature": 0} for prompt in ("The quick", beginning, beginning + "The")]
    text = lambda answer: answer["choices"][0]["text"]
    expected = [text(server.ask(body)[1]) for body in honest]

    def client(number):
        draw = random.Random(number)
        while time.monotonic() < until:
            kind = draw.choice(["honest", "honest", "gone", "stalls", "slow", "nonsense", "liar", "many", "bad"])
            counts[kind] = counts.get(kind, 0) + 1
            host, port = server.address.split(":")
            try:
                if kind == "honest":
                    which = draw.randrange(len(honest))
                    status, answer = server.ask(honest[which])
                    counts[status] = counts.get(status, 0) + 1
                    if status == 200 and text(answer) != expected[which]:
                        wrong.append(answer)
                    elif status not in (200, 429):
                        wrong.append(answer)
                    continue
                if kind == "bad":
                    status, answer = server.ask({"prompt": draw.choice([None, 3, [], [-1], {"a": 1}]), "n": draw.choice([0, 1, 9**9])})
                    continue
                if kind == "many":
                    prompt = draw.choice(["a", beginning]) * draw.randrange(1, 3) + "b" * draw.randrange(100)
                    server.ask({"prompt": [prompt] * draw.randrange(1, 9), "max_tokens": 8, "logprobs": 2, "echo": draw.random() < 0.5})
                    continue
                connection = socket.create_connection((host, int(port)), timeout=20)
                body = json.dumps({"prompt": "x" * draw.randrange(1, 200), "max_tokens": 200, "stream": draw.random() < 0.5})
                head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                if kind == "slow":
                    connection.sendall((head % len(body) + body).encode())
                    for _ in range(draw.randrange(20)):
                        connection.recv(64)
                        time.sleep(0.1 * draw.random())
                elif kind == "gone":
                    connection.sendall((head % len(body) + body).encode())
                    time.sleep(draw.random())
                elif kind == "stalls":
                    connection.sendall((head % len(body) + body[: draw.randrange(len(body))]).encode())
                    time.sleep(2 * draw.random())
                elif kind == "liar":
                    connection.sendall((head % draw.choice([0, 10**12, len(body) + 5, 3]) + body).encode())
                    time.sleep(draw.random())
                else:
                    connection.sendall(draw.randbytes(draw.randrange(1, 5000)))
                connection.close()
            except (OSError, http.client.HTTPException) as error:
                counts["refused"] = counts.get("refused", 0) + 1
                if kind == "honest":
                    wrong.append(repr(error))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(48)]
    [thread.start() for thread in threads]
    memory, said = [], 0
    while time.monotonic() < until:
        time.sleep(min(5, length / 40))
        memory.append(server.resident())
        minutes = (time.monotonic() - begun) / 60
        if minutes >= said + 1:
            said = int(minutes)
            tokens = {name: int(server.metric(name)) for name in ("cache_tokens", "cache_tokens_kept", "texts_total", "texts_gone_total")}
            print(f"minute {said}: {memory[-1]:.0f} MB, {json.dumps(tokens)}, {sum(counts.values())} clients, {len(wrong)} wrong", flush=True)
    [thread.join() for thread in threads]
    held = lambda: {name: server.metric(name) for name in ("texts_running", "texts_waiting", "cache_tokens", "cache_tokens_reserved")}
    deadline = time.monotonic() + 120
    while any(held().values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    lost = {name: taken for name, taken in held().items() if taken}
    report = {"seconds": round(length), "clients": counts, "wrong": len(wrong), "lost": lost, "flat": flat(memory)}
    report["shared_tokens"] = int(server.metric("prompt_tokens_shared_total"))
    report["memory_mb"] = [round(m) for m in memory[:: max(1, len(memory) // 20)]] + [round(server.resident())]
    print(json.dumps(report))
    # It follows the tokens in flight: a quarter of a short run has too few clients to be like another.
    short = length < 600
    verdict = "not judged before ten minutes" if short else "flat" if report["flat"] else "NOT flat"
    print(f"memory: {verdict} (the last quarter within 5 % and 8 MB of the second, in median and at most); lost: {lost or 'nothing'}; {len(wrong)} wrong")
    assert not wrong, wrong[:1]
    assert not lost and (short or report["flat"])
    assert [text(server.ask(body)[1]) for body in honest] == expected


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dreamc", default="target/release/dreamc")
    parser.add_argument("--run", help="a run to serve in place of model.yaml's")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--texts", type=int, default=2, help="texts of each client")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--at-least", type=float, default=6.0, help="least ratio")
    parser.add_argument("--soak", type=float, help="seconds of random clients")
    arguments = parser.parse_args()
    dreamc = str(pathlib.Path(arguments.dreamc).resolve())
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run
        if run is None:
            run = f"{folder}/run"
            spec = pathlib.Path(folder, "model.yaml")
            spec.write_text((HERE / "model.yaml").read_text())
            pathlib.Path(folder, "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
            small = ["--set", "model.hidden=64"] if arguments.soak else []
            subprocess.run([dreamc, "train", str(spec), "--out", run, "--quiet", *small], check=True, cwd=folder)
        # A soak meets every bound: rows, room in caches, waiting texts and kept beginnings.
        bounds = ["--rows", "24", "--queue", "24", "--cache-tokens", "4000", "--keep", "1024"] if arguments.soak else []
        server = Server(dreamc, run, "--threads", arguments.threads, *bounds)
        try:
            if arguments.soak:
                return soak(server, arguments.soak)
            load(server, 1, 1, 4)
            alone, one = load(server, 1, 2 * arguments.texts, arguments.tokens)
            many, all_of_them = load(server, arguments.clients, arguments.texts, arguments.tokens)
            print(f"1 client: {alone:.1f} tokens/s, {statistics.median(one):.2f} s a text")
            print(f"{arguments.clients} clients: {many:.1f} tokens/s, {statistics.median(all_of_them):.2f} s a text, at most {all_of_them[-1]:.2f} s")
            print(f"ratio {many / alone:.1f}; resident {server.resident():.0f} MB")
            assert many >= arguments.at_least * alone
        finally:
            server.process.kill()


if __name__ == "__main__":
    main()
