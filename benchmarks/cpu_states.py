"""The connector of hidden states of vLLM for a CPU, whose own one asks for pinned memory, which only a GPU has.

A server is started with the folder of this file in PYTHONPATH, and these settings beside those of `served_looks.py`:

    --kv-transfer-config '{"kv_connector": "StatesOnCpu", "kv_connector_module_path": "cpu_states", ...}'
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector


class _Done:
    """A copy that has ended."""

    def query(self) -> bool:
        return True


class StatesOnCpu(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Writes the states of a prompt when it has ended."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = self._kv_cache[pending.block_ids]  # (blocks, layers, tokens of a block, D)
        states = blocks.transpose(1, 2).flatten(0, 1)[: len(pending.token_ids)]
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {"hidden_states": states.contiguous(), "token_ids": torch.as_tensor(pending.token_ids)}, pending.filename
        )
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
