"""Serves the GPT of examples/gpt from one process, with weights that lightning-zero converted.

Run from the root of the repository:

    python examples/serve/serve.py gpt.safetensors
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))
from data import decode, encode
from model import GPT

LONGEST = 1000
"""The most characters of one answer."""


def load(path: Path) -> GPT:
    """Builds a GPT of the size that the weights tell, and fills it.

    Args:
        path: A ``.safetensors`` file whose names have no prefix.
    """
    weights = load_file(path)
    if "characters.weight" not in weights:
        raise SystemExit(
            f"{path} has no 'characters.weight': convert the checkpoint with --prefix gpt. --strip"
        )
    vocabulary, width = weights["characters.weight"].shape
    context = weights["positions.weight"].shape[0]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    model = GPT(vocabulary, width, layers, context)
    model.load_state_dict(weights)
    return model.eval()


def handler_of(model: GPT) -> type[BaseHTTPRequestHandler]:
    """Makes a class of request handlers that answer with a model's text."""

    class Handler(BaseHTTPRequestHandler):
        """Answers ``GET /?prompt=...&length=...&temperature=...&seed=...`` with JSON."""

        def do_GET(self) -> None:
            """Continues the prompt."""
            given = {
                name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()
            }
            try:
                prompt = given.get("prompt") or "def "
                length = min(int(given.get("length", 100)), LONGEST)
                temperature = float(given.get("temperature", 0.8))
                seed = int(given.get("seed", 0))
                if temperature <= 0:
                    raise ValueError("temperature has to be greater than 0")
            except ValueError as error:
                return self._answer(400, {"error": str(error)})
            text = decode(model.generate(encode(prompt), length, temperature, seed))
            return self._answer(200, {"text": text})

        def _answer(self, status: int, content: dict[str, str]) -> None:
            body = json.dumps(content).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def main() -> None:
    """Loads the weights and serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("weights", type=Path, help="what lightning-zero convert wrote")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.weights)
    with HTTPServer(("127.0.0.1", arguments.port), handler_of(model)) as server:
        numbers = sum(parameter.numel() for parameter in model.parameters())
        print(f"{numbers:,} parameters from {arguments.weights}")
        print(f"serving at http://127.0.0.1:{server.server_port}/?prompt=def%20", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
