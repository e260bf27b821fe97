"""A stand-in for a server of vLLM 0.32 on 127.0.0.1: a tiny model computes its answers, which can be altered."""

import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers
from folders import bpe_tokenizer, completion_rows, label_rows, saved, write_rows
from gguf_files import tiny_llama
from safetensors.torch import load_file, save_file
from torch import nn

from tezo.forward.engine import NOTHING, Asked, Change
from tezo.models.lora import Adapter, attach_adapter, load_adapter

NAME = "tiny"
COMPLETIONS = "/v1/completions"
ASK = """
import json, os, urllib.request

def ask(row):
    body = {"model": os.environ["TEZO_MODEL"], "prompt": row["prompt"], "temperature": 0, "max_tokens": 8}
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]
"""
"""What a program begins with that asks a model for an answer to its row."""


@dataclass
class Reply:
    """What is sent back; a length that is not that of the body cuts the answer short."""

    body: bytes
    status: int = 200
    kind: str | None = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


Lie = Callable[[Reply], Reply | None]
"""The right answer -> what is sent; None: the connection is closed. The right answer itself is not a lie."""


@dataclass
class StandIn:
    """What the server has, and how it lies.

    Attributes:
        lie: alters an answer.
        lies_at: path whose answers are altered.
        honest: number of answers at that path that are still right.
        lies: number of answers that are altered then.
        ignores_adapters: it takes adapters, and computes without them.
        alters: what it makes of an adapter that it takes.
        states: folder into which it writes the states behind `blocks`; as vLLM 0.32 it then fails where several tokens
            are asked for.
        named: path of the file -> path that its answer names.
        adapters: those that are loaded now.
        asked: paths and bodies of all requests.
    """

    model: Any
    tokenizer: Any
    url: str = ""
    lie: Lie | None = None
    lies_at: str = COMPLETIONS
    honest: int = 0
    lies: float = 0
    ignores_adapters: bool = False
    alters: Callable[[Adapter], Adapter] = lambda adapter: adapter
    states: Path | None = None
    blocks: Sequence[int] = (0, 1)
    named: Callable[[Path], Path] = lambda path: path
    adapters: dict[str, Adapter] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)

    def lying(self, lie: Lie, times: float = float("inf"), *, at: str = COMPLETIONS, honest: int = 0) -> "StandIn":
        self.lie, self.lies, self.lies_at, self.honest = lie, times, at, honest
        return self

    def answer(self, path: str, asked: Any) -> Reply | None:
        with self.lock:
            self.asked.append((path, asked))
            reply = self.right(path, asked)
            if self.lie is None or path != self.lies_at or not self.lies:
                return reply
            if self.honest:
                self.honest -= 1
                return reply
            altered = self.lie(reply)
            self.lies -= altered is not reply  # it is about other requests
            return altered

    def right(self, path: str, asked: Any) -> Reply:
        if path == "/v1/models":
            ids = {NAME: None, **dict.fromkeys(self.adapters, NAME)}
            return as_json({"object": "list", "data": [{"id": own, "parent": of} for own, of in ids.items()]})
        if path == "/tokenize":
            tokens = self.tokenizer(asked["prompt"], add_special_tokens=asked["add_special_tokens"])["input_ids"]
            return as_json({"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": None})
        if path == "/v1/load_lora_adapter":
            if not Path(asked["lora_path"]).is_dir():
                return failure(404, f"Loading lora {asked['lora_name']} failed: No adapter found for <path>")
            self.adapters[asked["lora_name"]] = self.alters(load_adapter(Path(asked["lora_path"])))
            return plain(f"Success: LoRA adapter '{asked['lora_name']}' added successfully.")
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(asked["lora_name"], None) is None:
                return failure(404, f"The lora adapter '{asked['lora_name']}' cannot be found.")
            return plain(f"Success: LoRA adapter '{asked['lora_name']}' removed successfully.")
        if path == COMPLETIONS:
            return self.completions(asked)
        return as_json({"detail": "Not Found"}, 404)

    def completions(self, asked: Any) -> Reply:
        if asked["model"] not in {NAME, *self.adapters}:
            return failure(404, f"The model `{asked['model']}` does not exist.")
        adapter = None if self.ignores_adapters else self.adapters.get(asked["model"])
        handles = attach_adapter(self.model, adapter) if adapter is not None else []
        prompts = asked["prompt"]
        if isinstance(prompts, str):
            prompts = [self.tokenizer(prompts)["input_ids"]]
        if self.states is not None and "logprob_token_ids" in asked:
            return failure(500, "list index out of range")
        name = f"cmpl-{random.getrandbits(64):016x}"
        more: dict[str, Any] = {"id": name, "kv_transfer_params": None}
        try:
            if self.states is not None:
                first, *_ = [self.write_states(f"{name}-{i}", prompt) for i, prompt in enumerate(prompts)]
                more["kv_transfer_params"] = {"hidden_states_path": str(self.named(first))}
            choices = [self.choice(i, prompt, asked) for i, prompt in enumerate(prompts)]
        finally:
            for handle in handles:
                handle.remove()
        number = sum(choice.pop("written") for choice in choices)
        usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": number}
        said = {"object": "text_completion", "model": asked["model"], "choices": choices, "usage": usage}
        return as_json(said | more)

    def write_states(self, name: str, prompt: Sequence[int]) -> Path:
        assert self.states is not None
        found: list[torch.Tensor] = []
        blocks = [self.model.model.layers[i] for i in self.blocks]
        handles = [block.register_forward_hook(lambda _, __, out: found.append(out[0].clone())) for block in blocks]
        self.logits(prompt)
        for handle in handles:
            handle.remove()
        states = torch.stack([state.reshape(len(prompt), -1) for state in found], 1)
        path = self.states / f"{name}-0a1b.safetensors"
        Path(f"{path}.lock").touch()
        save_file({"hidden_states": states, "token_ids": torch.tensor(list(prompt))}, path)
        return path

    def choice(self, index: int, prompt: Sequence[int], asked: Any) -> dict[str, Any]:
        seen = self.logits(prompt)
        table, tokens, reason = seen.log_softmax(-1), list[int](), "length"
        draw = torch.Generator().manual_seed(asked.get("seed", 0))
        for _ in range(asked["max_tokens"]):
            logits = self.logits([*prompt, *tokens])[-1] if tokens else seen[-1]
            if asked["temperature"]:
                tokens.append(int(torch.multinomial((logits / asked["temperature"]).softmax(-1), 1, generator=draw)))
            else:
                tokens.append(int(logits.argmax()))
            text = self.tokenizer.decode(tokens)
            if tokens[-1] in asked.get("stop_token_ids", [self.tokenizer.eos_token_id]) or any(
                end in text for end in asked.get("stop", ())
            ):
                reason = "stop"
                break
        shown = asked.get("return_token_ids", False)
        found: dict[str, Any] = {"index": index, "text": self.tokenizer.decode(tokens, skip_special_tokens=True)}
        found |= {"finish_reason": reason, "token_ids": tokens if shown else None}
        found |= {"logprobs": None, "prompt_logprobs": None}
        found |= {"prompt_token_ids": list(prompt) if shown else None, "written": len(tokens)}
        if (count := asked.get("prompt_logprobs")) is not None:
            places = [self.ranked(table[i - 1], [token], count) for i, token in enumerate(prompt) if i]
            found["prompt_logprobs"] = [None, *places]
        if "logprob_token_ids" in asked:
            values = {f"token_id:{t}": float(table[-1][t]) for t in [tokens[0], *asked["logprob_token_ids"]]}
            said = {"text_offset": [0], "tokens": [f"token_id:{tokens[0]}"], "top_logprobs": [values]}
            found["logprobs"] = said | {"token_logprobs": [values[f"token_id:{tokens[0]}"]]}
        return found

    def ranked(self, row: torch.Tensor, tokens: Sequence[int], count: int) -> dict[str, Any]:
        """The tokens, and the `count` likeliest, which count as such."""
        ranks = {t: int((row >= row[t]).sum()) for t in tokens}
        ranks |= {t: i for i, t in enumerate(row.topk(count).indices.tolist(), start=1)}
        return {
            str(t): {"logprob": float(row[t]), "rank": rank, "decoded_token": self.tokenizer.decode([t])}
            for t, rank in ranks.items()
        }

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.model(input_ids=torch.tensor([list(tokens)])).logits[0]
        return found


def as_json(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode(), status)


def plain(text: str) -> Reply:
    return Reply(text.encode(), kind=None)


def failure(status: int, message: str) -> Reply:
    return as_json({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status)


def vllm_home(root: Path) -> Path:
    """`root` with a tiny model that answers differ of, and rows."""
    tokenizer = bpe_tokenizer(chat=True)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    model = tiny_llama(64 * -(-len(tokenizer) // 64), max_position_embeddings=256, **sizes)
    saved(model, tokenizer, root / NAME)
    for name, count in (("labels", 24), ("few", 6)):
        write_rows(root / f"{name}.jsonl", label_rows(count))
    write_rows(root / "texts.jsonl", completion_rows(24))
    return root


def another_of_its_base(folder: Path, root: Path) -> Path:
    """`root` with a model that differs from that in the folder by its weights alone, as another fine-tune does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    saved(model, transformers.AutoTokenizer.from_pretrained(folder), root)
    return root


def some_asked(draw: random.Random, *, several: bool, likely: int) -> Asked:
    beginning = draw.choices(range(4, 250), k=5)
    texts = sorted({(*beginning, *draw.choices(range(4, 250), k=draw.randint(1, 9))) for _ in range(6)})
    places: dict[tuple[int, ...], tuple[int, int]] = {}
    for i, text in enumerate(texts):
        for p in {len(beginning) - 1, len(text) // 2, len(text) - 1}:
            places.setdefault(text[: p + 1], (i, p))
    pairs, rows = sorted(places.values()), []
    for i, p in pairs:
        following = texts[i][p + 1] if p + 1 < len(texts[i]) else draw.randrange(4, 250)
        more = draw.choice([[], [7, 9]]) if several else []
        rows.append([following, *more, *[NOTHING] * (2 - len(more))])
    return Asked(texts, *(torch.tensor(own) for own in zip(*pairs, strict=True)), torch.tensor(rows), likely)


def a_change(model: Any, ranks: Sequence[int] = (4,), seed: int = 0, size: float = 0.1) -> Change:
    generator = torch.Generator().manual_seed(seed)
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n]
    return {
        name: (
            torch.randn(ranks[i % len(ranks)], layer.in_features, generator=generator) * size,
            torch.randn(layer.out_features, ranks[i % len(ranks)], generator=generator) * size,
        )
        for i, (name, layer) in enumerate(layers)
    }


def check_ends_alike(*runs: Path) -> None:
    """Two runs have the same change of the weights, whatever its factors are."""
    states = [load_file(run / "adapter/adapter_model.safetensors") for run in runs]
    products = [
        torch.cat([(s[n] @ s[n.replace("_B", "_A")]).flatten() for n in sorted(s) if ".lora_B." in n]) for s in states
    ]
    assert (products[0] - products[1]).norm() <= 1e-2 * products[1].norm() > 0


@contextmanager
def vllm_server(folder: Path) -> Iterator[StandIn]:
    """Yields a server that has the model in a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    standin = StandIn(model, transformers.AutoTokenizer.from_pretrained(folder))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self.send(standin.answer(self.path, None))

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send(standin.answer(self.path, json.loads(body)))

        def send(self, reply):
            self.close_connection = True
            if reply is None:
                return
            self.send_response(reply.status)
            if reply.kind is not None:
                self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the client has read enough
                self.wfile.write(reply.body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        standin.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield standin
        finally:
            server.shutdown()
