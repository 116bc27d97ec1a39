"""Measure captions per second of the captioner `openai` with a server that takes the same time for each answer.

    python benchmarks/server_captions.py --images 1920 --concurrency 32 --seconds 0.5

The server is another process of this machine. It answers each request after `--seconds`, for any number of requests, so
that concurrency / seconds is the greatest possible rate. Images have 640 x 480 pixels of noise, which is the slowest to
encode. Captions/s, the possible rate, CPU time per caption, and the most requests in flight are printed.
"""

import argparse
import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, process_time, sleep

import numpy as np
from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))

SIZE = (640, 480)
DIFFERENT_IMAGES = 64  # files; each has many requests, because the operator alone does not notice repeated images


def serve(seconds: float, port, most_in_flight) -> None:
    """Answer requests forever; the caller reads `port`, and `most_in_flight`, the most requests in flight."""
    lock, in_flight = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            self._send({"data": []})

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                in_flight[0] += 1
                most_in_flight.value = max(most_in_flight.value, in_flight[0])
            sleep(seconds)
            with lock:
                in_flight[0] -= 1
            choice = {"message": {"content": "a caption"}, "finish_reason": "stop"}
            self._send({"choices": [choice], "usage": {"total_tokens": 100}})

        def _send(self, values: dict) -> None:
            body = json.dumps(values).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 1024

    server = Server(("127.0.0.1", 0), Handler)
    port.value = server.server_address[1]
    server.serve_forever()


def draw_images(folder: Path) -> list[str]:
    rng = np.random.default_rng(0)
    for number in range(DIFFERENT_IMAGES):
        Image.fromarray(rng.integers(0, 256, (*SIZE[::-1], 3), dtype=np.uint8)).save(
            folder / f"{number}.jpg", quality=90
        )
    return [str(folder / f"{number}.jpg") for number in range(DIFFERENT_IMAGES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1920)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    context = get_context("spawn")
    port, most_in_flight = context.Value("i", 0), context.Value("i", 0)
    server = context.Process(target=serve, args=(arguments.seconds, port, most_in_flight), daemon=True)
    server.start()

    import dj2mgm.juicer.operators  # noqa: F401  (registers them)
    from dj2mgm.juicer.patched_data_juicer import load_ops, patch_data_juicer

    while not port.value:
        sleep(0.05)
    settings = {"base_url": f"http://127.0.0.1:{port.value}/v1", "model": "m", "key_variable": None}
    patch_data_juicer()
    [operator] = load_ops([{"openai_captioning_mapper": settings | {"concurrency": arguments.concurrency}}])
    with tempfile.TemporaryDirectory() as folder:
        images = draw_images(Path(folder))
        requests = [images[number % len(images)] for number in range(arguments.images)]
        operator.connect()
        start, cpu_seconds = perf_counter(), process_time()
        captions: dict = {}
        operator.request_captions(requests, captions.__setitem__)
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_seconds
    caption_count = len(captions)
    rate, possible_rate = caption_count / seconds, arguments.concurrency / arguments.seconds
    print(
        f"{caption_count} of {arguments.images} captions in {seconds:.1f} s: {rate:.1f}/s of {possible_rate:.0f}/s; "
        f"{1000 * cpu_seconds / caption_count:.1f} ms CPU each; at most {most_in_flight.value} in flight"
    )
    server.kill()


if __name__ == "__main__":
    main()
