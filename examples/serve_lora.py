"""Serve a ported LoRA with transformers and peft, in the form of OpenAI's chat completions, and chat with it.

    pip install 'tuneport[adapters]'
    python examples/serve_lora.py new-llm-lora --port 8000
    python examples/serve_lora.py new-llm-lora --ask "What is a task vector?"   # serves, asks once, stops

The base is the one that the adapter names, here or next to the adapter. If its tokenizer has no chat template, the
model reads the messages one after the other, as in a transfer. It is a small server, for one user: for many, load the
adapter in vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import torch
from jinja2 import TemplateError
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


class Chat:
    """The model with its adapter, one request at a time."""

    def __init__(self, adapter: str, device: str) -> None:
        self.name = adapter
        dtype = torch.float32 if device == "cpu" else "auto"  # many CPUs take minutes for a word in half precision
        named = PeftConfig.from_pretrained(adapter).base_model_name_or_path
        beside = Path(adapter).resolve().parent / named  # a relative path is of the folder where the adapter was made
        found = str(beside) if beside.exists() and not Path(named).exists() else named
        try:
            base = AutoModelForCausalLM.from_pretrained(found, dtype=dtype)
            self.tokenizer = AutoTokenizer.from_pretrained(found)
        except OSError as error:
            sys.exit(f"{adapter} names the base {named}, which cannot be opened: {str(error).splitlines()[0]}")
        self.model = PeftModel.from_pretrained(base, adapter).to(device).eval()
        self.lock = threading.Lock()

    def answer(self, messages: list[dict[str, str]], most: int, temperature: float) -> str:
        """What the assistant says next, at most so many tokens; a temperature of 0 takes the likeliest ones."""
        options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
        if self.tokenizer.chat_template:
            inputs = self.tokenizer.apply_chat_template(messages, **options)
        else:
            inputs = self.tokenizer("".join(f"{message['content']}\n" for message in messages), return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with self.lock, torch.inference_mode():
            found = self.model.generate(**inputs.to(self.model.device), max_new_tokens=most, **sampling)
        return self.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def handler(chat: Chat) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != "/v1/chat/completions":
                return self.reply(404, {"error": {"message": f"no such path: {self.path}"}})
            try:
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if given.get("stream"):
                    raise ValueError("this server does not stream: leave out `stream`")
                said = chat.answer(given["messages"], given.get("max_tokens", 256), given.get("temperature", 0.0))
            except (KeyError, TypeError, ValueError, TemplateError) as error:
                return self.reply(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
            choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
            return self.reply(200, {"object": "chat.completion", "model": chat.name, "choices": [choice]})

        def reply(self, status: int, content: dict[str, object]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing of requests."""

    return Handler


def ask(address: str, question: str, most: int) -> str:
    """Send one question to a server of this form."""
    content = {"messages": [{"role": "user", "content": question}], "max_tokens": most}
    request = Request(f"{address}/v1/chat/completions", json.dumps(content).encode())
    with urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="folder of the adapter")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument("--ask", metavar="QUESTION", help="ask the server, print the answer and stop")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of the answer to --ask")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    chat = Chat(options.adapter, options.device)
    with ThreadingHTTPServer(("127.0.0.1", options.port), handler(chat)) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        print(f"serving {options.adapter} on {address}/v1/chat/completions", flush=True)
        if options.ask is None:
            server.serve_forever()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("user:", options.ask)
        print("assistant:", ask(address, options.ask, options.tokens))
        server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
