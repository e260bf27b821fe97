"""A real server of vLLM on 127.0.0.1, started by the python that the variable TEZO_VLLM names."""

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests

PYTHON = os.environ.get("TEZO_VLLM")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip


def with_adapters(modules: Sequence[str] = ALL) -> list[str]:
    """Returns the arguments of a server that takes adapters on layers with these names."""
    limits = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "16"]
    return [*limits, "--lora-target-modules", *modules]


def states_behind(blocks: Sequence[int], folder: Path) -> list[str]:
    """Returns the arguments of a server that writes the states behind these blocks into files in a folder.

    PYTHONPATH of the server has the folder `benchmarks`.
    """
    ids = {"eagle_aux_hidden_state_layer_ids": [block + 1 for block in blocks]}  # the state before the next block
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": ids}}
    connector = {
        "kv_connector": "StatesOnCpu", "kv_connector_module_path": "cpu_states", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }  # fmt: skip
    return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(connector)]


@contextmanager
def real_server(
    folder: Path, port: int, arguments: Sequence[str], log: Path, seconds: float = 250.0, **environment: str
) -> Iterator[subprocess.Popen[Any]]:
    """Yields the process of a server that answers.

    Args:
        folder: of its model.
        port: where it answers.
        arguments: further ones of its command line.
        log: file with all that it prints.
        seconds: for how long it is waited for.
        environment: variables of it, besides `SETTINGS`.

    Raises:
        RuntimeError: it has ended or does not answer; with the errors in its log.
    """
    command = [  # `vllm serve` of the package for CPUs fails: it asks for the version of a package that is not there
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
        "--served-model-name", folder.name, "--host", "127.0.0.1", "--enforce-eager", "--max-model-len", "256",
        *arguments,
    ]  # fmt: skip
    with log.open("w") as written:
        process = subprocess.Popen(
            command, env={**os.environ, **SETTINGS, **environment}, stdout=written, stderr=written,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(process, port, log, seconds)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()


def wait_for(process: subprocess.Popen[Any], port: int, log: Path, seconds: float) -> None:
    """Returns when a server answers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with suppress(requests.RequestException):
            if requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).ok:
                return
        time.sleep(0.5)
    raise RuntimeError("\n".join(errors_in(log)) or log.read_text(errors="replace")[-3000:])


def errors_in(log: Path) -> list[str]:
    """Returns the errors that a server has printed, each once, the first ones first."""
    lines = [line.partition("] ")[2] for line in log.read_text(errors="replace").splitlines() if " ERROR " in line]
    return [*dict.fromkeys(line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")))]
